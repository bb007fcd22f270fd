"""Pages state their kind, their links lead to existing pages, and generated pages have the expected content."""

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
    """Return the text of a page without code, because brackets in code are not links."""
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


def imported(name: str) -> ModuleType:
    """Return the module docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_how_to_titles_are_questions() -> None:
    pages = {
        page.name: page.read_text("utf-8").splitlines()[0]
        for page in PAGES
        if "\n\n*How-to*" in page.read_text("utf-8")
    }
    assert pages
    assert [name for name, title in pages.items() if "?" not in title] == []


def test_the_site_links_every_page() -> None:
    listed = set(re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    made = {f"{name}.md" for name in (*imported("mkdocs_hooks").MADE, "gallery")}
    assert listed == {page.name for page in PAGES} | made


@pytest.mark.slow
def test_the_site_builds_without_broken_links(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs and its theme are the extra docs: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert any(entry["location"].startswith("models.html#the-forward-program") for entry in found)
    for page in tmp_path.rglob("*.html"):  # the site loads nothing from other servers
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?://", page.read_text("utf-8")), page.name


GENERATED = {
    "make_api": ("### `exp.compose`", "### `exp.hooks.hook.Hook`", "## objective"),
    "make_compatibility": ("| `shards_parameters` |", "| `strategy=fsdp` |", "## Callbacks that no run supports"),
    "make_habits": ("| you type there | here |", "| `trainer.strategy=ddp` | `strategy=ddp` |"),
    "make_vocabulary": ("`scaled_dot_product_attention`", "## Not supported"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "compat" in name else ()) for name in GENERATED]
)
def test_a_page_about_the_code_is_made(name: str) -> None:
    text = imported(name).page()
    assert re.match(r"# .+\n\n\*Reference\*", text)
    assert [part for part in GENERATED[name] if part not in text] == []


def test_the_gallery_has_a_page_and_picture_for_each_experiment() -> None:
    made = imported("make_gallery")
    names = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
    assert sorted(made.pages()) == sorted(["gallery.md", *(f"gallery/{name}.md" for name in names)])
    assert sorted(" ".join(made.FAMILIES.values()).split()) == names
    pictures = sorted(made.PICTURES.glob("*.png"))
    assert [picture.stem for picture in pictures] == names
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG"), f"python docs/make_gallery.py {picture.stem}"
        assert picture.stat().st_size < 40_000
