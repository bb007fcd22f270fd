"""Check of the files in sdist and wheel: python3 .ci/distributions.py dist/*.tar.gz dist/*.whl"""

import sys
import tarfile
import zipfile
from email.parser import Parser

SDIST = (
    *("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"),
    *("conf/train.yaml", "src/exp/conf/train.yaml", "src/exp/py.typed", "tests/conftest.py", "docs/tutorial.md"),
    *("benchmarks/loop.py", "multirun.sh", "constraints.txt", ".ci/run", ".pre-commit-config.yaml"),
)
WHEEL = (
    "exp/conf/train.yaml",
    "exp/py.typed",
    "exp/cli/train.py",
    "hydra_plugins/exp/launcher.py",
    "exp/conf/model/mlp.yaml",
)


def main(paths: list[str]) -> None:
    (sdist,) = [path for path in paths if path.endswith(".tar.gz")]
    (wheel,) = [path for path in paths if path.endswith(".whl")]
    with tarfile.open(sdist) as archive:
        listed = [name.partition("/")[2] for name in archive.getnames()]
        names = set(listed)
    missing = [name for name in SDIST if name not in names]
    assert not missing, f"{sdist} lacks {missing}"
    assert len(listed) == len(names), f"{sdist} contains a file twice"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(place).decode())
    licence = place.replace("METADATA", "licenses/LICENSE")
    missing = [name for name in (*WHEEL, licence) if name not in names]
    assert not missing, f"{wheel} lacks {missing}"
    foreign = {name.partition("/")[0] for name in names} - {"exp", "hydra_plugins", place.partition("/")[0]}
    assert not foreign, f"{wheel} also installs {foreign}"
    assert "hydra_plugins/__init__.py" not in names, "hydra_plugins must stay a namespace package for other plug-ins"
    found = {key: metadata.get_all(key) for key in ("License-Expression", "Author", "Project-URL", "Classifier")}
    assert all(found.values()), f"METADATA lacks some of these fields: {found}"


if __name__ == "__main__":
    main(sys.argv[1:])
