"""Hooks of MkDocs, which add README.md as the first page, and the pages that are made from code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# ```yaml conf/model/mine.yaml: a block with the content of a file, which tests write. The text above it names the file.
FILE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
MADE = ("api", "compatibility", "habits", "vocabulary")


def generated_pages() -> dict[str, str]:
    """Return the text of each page that is made from code, by its path in docs/."""
    pages = {f"{name}.md": imported(f"make_{name}").page() for name in MADE}
    return pages | imported("make_gallery").pages()


def imported(name: str) -> ModuleType:
    """Import and return the module docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page, with links relative to docs/, and the generated pages."""
    from mkdocs.structure.files import File

    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text("utf-8"))
    for path, content in {"index.md": text, **generated_pages()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside docs/ by their text, and remove file names from code blocks."""
    docs = ROOT / "docs"
    place = (docs / page.file.src_uri).parent
    # index.md is README.md, and its links are relative to the repository's root.
    origin = ROOT if page.file.src_uri == "index.md" else place

    def linked(match: re.Match[str]) -> str:
        words, path, _ = match.groups()
        target = (place / path).resolve()
        if target.is_relative_to(docs) and target.exists():
            return match[0]
        return words if (origin / path).exists() else match[0]

    return FILE.sub(r"```\1", LINK.sub(linked, markdown))
