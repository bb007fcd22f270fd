"""Metadata and license of the package, tested without building a distribution."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import exp

ROOT = Path(exp.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Checksum of the license's words, joined by single spaces.
SHA256 = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
# Names of distributions that differ from the module's name.
DISTRIBUTIONS = {
    "PIL": "pillow", "google": "protobuf", "hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


@pytest.fixture(scope="module")
def metadata() -> Message:
    core = pytest.importorskip("hatchling.metadata.core", reason="hatchling comes with the extra dev")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    spec = pytest.importorskip("hatchling.metadata.spec")
    project = core.ProjectMetadata(str(ROOT), plugins.PluginManager())
    made = spec.get_core_metadata_constructors()[spec.DEFAULT_METADATA_VERSION](project)
    return Parser().parsestr(made)


def test_the_metadata_states_author_and_license(metadata: Message) -> None:
    assert metadata["Name"] == "exp-framework"
    assert metadata["Version"] == exp.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Author"] == "The exp authors"
    assert all(re.fullmatch(r"\w+, https://\S+", line) for line in metadata.get_all("Project-URL"))
    assert "pytorch" in metadata["Keywords"]
    assert "# exp" in metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    # The index refuses a license classifier next to an expression.
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License")]


def test_the_classifiers_start_at_the_required_python(metadata: Message) -> None:
    found = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if " :: 3." in line]
    least = ".".join(metadata["Requires-Python"].removeprefix(">=").split(".")[:2])
    assert min(found, key=lambda version: int(version.partition(".")[2])) == least


def test_the_license_is_that_of_apache() -> None:
    words = " ".join((ROOT / "LICENSE").read_text().split())
    assert hashlib.sha256(words.encode()).hexdigest() == SHA256


def test_the_citation_agrees_with_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == exp.__version__
    assert cited["license"] == PROJECT["license"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert {"cff-version", "message", "title"} <= cited.keys()


def test_pictures_of_readme_exist() -> None:
    repository = PROJECT["urls"].get("Repository")
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    if repository is None:
        assert [place for place in pictures if not (ROOT / place).is_file()] == []
    else:
        assert [place for place in pictures if not place.startswith("https://")] == []


def imported() -> set[str]:
    """Return the top-level packages that the source imports."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"exp", "hydra_plugins"}


def test_imported_packages_are_declared() -> None:
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    declared = {Requirement(line).name.lower().replace("_", "-") for line in lines}
    missing = {name for name in imported() if DISTRIBUTIONS.get(name, name).lower().replace("_", "-") not in declared}
    assert missing == set()


def test_the_files_of_the_sdist_exist() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert [name for name in targets["sdist"]["include"] if not (ROOT / name).exists()] == []
