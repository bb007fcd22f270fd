"""What the package index and a licence scanner read of a distribution, without building one."""

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
# Of its words, whatever lies between them.
SHA256 = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
# Where the distribution is not called as what is imported.
DISTRIBUTIONS = {
    "PIL": "pillow", "google": "protobuf", "hydra": "hydra-core", "sklearn": "scikit-learn", "yaml": "pyyaml",
    "dotenv": "python-dotenv",
}  # fmt: skip


@pytest.fixture(scope="module")
def metadata() -> Message:
    core = pytest.importorskip("hatchling.metadata.core", reason="hatchling comes with the extra dev")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    spec = pytest.importorskip("hatchling.metadata.spec")
    project = core.ProjectMetadata(str(ROOT), plugins.PluginManager())
    made = spec.get_core_metadata_constructors()[spec.DEFAULT_METADATA_VERSION](project)
    return Parser().parsestr(made)


def test_the_metadata_says_whose_it_is_and_what_it_may_be_used_for(metadata: Message) -> None:
    assert metadata["Name"] == "exp-framework"
    assert metadata["Version"] == exp.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Author"] == "The exp authors"
    assert all(re.fullmatch(r"\w+, https://\S+", line) for line in metadata.get_all("Project-URL"))
    assert "pytorch" in metadata["Keywords"]
    assert "# exp" in metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    # A licence classifier beside an expression is refused by the index.
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License")]


def test_the_classifiers_name_the_least_python_and_no_lower_one(metadata: Message) -> None:
    found = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if " :: 3." in line]
    least = metadata["Requires-Python"].removeprefix(">=")
    assert min(found, key=lambda version: int(version.partition(".")[2])) == least


def test_the_licence_is_the_apache_licences_own_text() -> None:
    words = " ".join((ROOT / "LICENSE").read_text().split())
    assert hashlib.sha256(words.encode()).hexdigest() == SHA256


def test_the_citation_agrees_with_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == exp.__version__
    assert cited["license"] == PROJECT["license"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert {"cff-version", "message", "title"} <= cited.keys()


def test_pictures_have_absolute_addresses_once_there_is_a_public_repository() -> None:
    repository = PROJECT["urls"].get("Repository")
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    if repository is None:
        assert [place for place in pictures if not (ROOT / place).is_file()] == []
    else:
        assert [place for place in pictures if not place.startswith("https://")] == []


def imported() -> set[str]:
    """The top-level packages that the source names, wherever in a module."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"exp", "hydra_plugins"}


def test_what_is_imported_is_declared() -> None:
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    declared = {Requirement(line).name.lower().replace("_", "-") for line in lines}
    missing = {name for name in imported() if DISTRIBUTIONS.get(name, name).lower().replace("_", "-") not in declared}
    assert missing == set()


def test_the_sdist_lists_files_that_are_there() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    assert [name for name in included if not (ROOT / name).exists()] == []
