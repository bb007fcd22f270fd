"""Pages state their kind, their links lead to existing pages, and generated pages are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_each_page_states_its_kind() -> None:
    kinds = re.compile(r"# .+\n\n\*(Tutorial|How-to|Reference|Explanation)\*")
    assert [page.name for page in PAGES if not kinds.match(page.read_text("utf-8"))] == []


def prose(page: Path) -> str:
    """Return a page without its code, whose brackets are no links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub and on the site."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return set(found)


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.stem
)
def test_links_lead_to_files_and_anchors(page: Path) -> None:
    broken = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`\n]+`", "", prose(page))):
        if "://" in path:
            continue
        there = (page.parent / path) if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_readme_links_every_page() -> None:
    linked = set(re.findall(r"\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text("utf-8")))
    assert {page.stem for page in PAGES} - linked == set()


def module(name: str) -> ModuleType:
    """Return docs/NAME.py, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_how_to_pages_have_the_titles_of_readme() -> None:
    sections = module("mkdocs_hooks").navigation((ROOT / "README.md").read_text("utf-8"))
    (listed,) = [section["How-to"] for section in sections if "How-to" in section]
    for entry in listed:
        ((question, page),) = entry.items()
        assert "?" in question
        assert (ROOT / "docs" / page).read_text("utf-8").startswith(f"# {question}\n\n*How-to*"), page
    pages = {page.name for page in PAGES if "\n\n*How-to*" in page.read_text("utf-8")}
    assert {page for entry in listed for page in entry.values()} == pages


def test_the_site_links_every_page() -> None:
    sections = module("mkdocs_hooks").navigation((ROOT / "README.md").read_text("utf-8"))
    leaves = [leaf for section in sections for part in section.values() if isinstance(part, list) for leaf in part]
    found = {leaf if isinstance(leaf, str) else next(iter(leaf.values())) for leaf in leaves}
    assert found == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


@pytest.mark.slow
def test_the_site_builds_without_broken_links(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs and its theme are the extra docs: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert any(entry["location"].startswith("models.html#the-forward-program") for entry in found)
    for page in tmp_path.rglob("*.html"):  # nothing is loaded from elsewhere
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?://", page.read_text("utf-8")), page.name


@pytest.mark.parametrize(
    "name",
    ["make_api", pytest.param("make_compatibility", marks=pytest.mark.slow), "make_habits", "make_vocabulary"],
)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    made = module(name)
    assert made.page() == made.PAGE.read_text("utf-8"), f"python docs/{name}.py"


def test_the_gallery_is_up_to_date() -> None:
    made = module("make_gallery")
    for path, text in made.pages().items():
        assert path.read_text("utf-8") == text, "python docs/make_gallery.py"
    pages = sorted(made.PAGES.glob("*.md"))
    assert {*made.pages()} - {made.INDEX} == {*pages}
    for path in pages:
        picture = path.with_suffix(".png")
        assert picture.read_bytes().startswith(b"\x89PNG"), f"python docs/make_gallery.py --pictures {path.stem}"
        assert picture.stat().st_size < 40_000
    assert sorted(path.stem for path in made.PAGES.glob("*.png")) == [path.stem for path in pages]
    assert sorted(" ".join(made.FAMILIES.values()).split()) == [path.stem for path in pages]
