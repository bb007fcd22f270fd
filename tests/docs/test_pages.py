"""A page says which of the four kinds it is, leads to pages that are there, and one that is made is up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_which_kind_it_is(page: Path) -> None:
    assert re.match(r"# .+\n\n\*(Tutorial|How-to|Reference|Explanation)\*", page.read_text("utf-8"))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+\.\w+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text("utf-8")))
    assert {page.stem for page in PAGES} - linked == set()


@pytest.mark.parametrize("name", ["make_api", "make_compatibility", "make_habits", "make_vocabulary"])
def test_a_page_that_is_made_is_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.page() == made.PAGE.read_text("utf-8"), f"python docs/{name}.py"


def test_the_gallery_is_up_to_date_and_has_pictures() -> None:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    pages = made.pages()
    assert {path.name: path.read_text("utf-8") for path in pages} == {
        path.name: text for path, text in pages.items()
    }, "python docs/make_gallery.py"
    assert {path for path in pages if path != made.INDEX} == set(made.PAGES.glob("*.md"))
    for path in made.PAGES.glob("*.md"):
        picture = path.with_suffix(".png")
        assert picture.read_bytes().startswith(b"\x89PNG"), f"python docs/make_gallery.py --pictures {path.stem}"
        assert picture.stat().st_size < 40_000
    assert {path.stem for path in made.PAGES.glob("*.png")} == {path.stem for path in made.PAGES.glob("*.md")}
    named = [name for names in made.FAMILIES.values() for name in names.split()]
    assert sorted(named) == sorted(path.stem for path in made.PAGES.glob("*.md"))
