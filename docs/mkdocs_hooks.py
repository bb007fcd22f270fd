"""What makes a site of the pages: README.md comes first, and its list of pages is the navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# ```yaml conf/model/mine.yaml: a block that is a file, which the tests write; the page names it in a line above.
FILE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)


def navigation(readme: str) -> list[dict[str, Any]]:
    """Take the sections and pages of README's last list, under their names there."""
    listed = readme[readme.index("\n## More\n") :]
    found: list[dict[str, Any]] = [{"exp": "index.md"}]
    for title, pages in re.findall(r"^- \*\*(.+?)\*\*(.*?)(?=^- \*\*|\Z)", listed, re.MULTILINE | re.DOTALL):
        links = [
            {" ".join(name.split()): page} for name, page in re.findall(r"\[([^]]+)\]\(docs/([\w-]+\.md)\)", pages)
        ]
        found.append({title: links})
    # Each system is a page of its own.
    for section in found[1:]:
        for links in section.values():
            if any("gallery.md" in link.values() for link in links):
                links += [f"gallery/{path.name}" for path in sorted((ROOT / "docs" / "gallery").glob("*.md"))]
    return found


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation((ROOT / "README.md").read_text("utf-8"))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page, its links from where it then stands."""
    from mkdocs.structure.files import File

    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text("utf-8"))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leave the names of files outside docs/ as words, and the language alone at the top of a block."""
    docs = ROOT / "docs"
    place = (docs / page.file.src_uri).parent
    # index.md is README.md, beside which other files lie.
    beside = ROOT if page.file.src_uri == "index.md" else place

    def named(match: re.Match[str]) -> str:
        words, path, _ = match.groups()
        inside = (place / path).resolve()
        if inside.is_relative_to(docs) and inside.exists():
            return match[0]
        return words if (beside / path).exists() else match[0]

    return FILE.sub(r"```\1", LINK.sub(named, markdown))
