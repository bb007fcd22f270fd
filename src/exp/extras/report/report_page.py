"""Writes a comparison as one HTML file that loads nothing: tables, pictures, and how to read them."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from exp.extras.report.charts import Chart
from exp.extras.report.run_comparison import Comparison
from exp.redaction import covered
from exp.sweeps.results import again_command, best_line, repeat_cells, table_cells

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 1500px; font: 15px/1.45 system-ui, sans-serif; }
p, figcaption { max-width: 75ch; }
pre { overflow-x: auto; user-select: all; }
.scroll { overflow: auto; max-height: 70vh; border: 1px solid GrayText; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 0.25rem 0.6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid GrayText; }
td.wide { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: Canvas; }
tr.best th, tr.best td { font-weight: bold; }
th button { font: inherit; border: 0; padding: 0; background: none; color: inherit; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }
figure { margin: 0; } img { max-width: 100%; }
li { overflow-wrap: anywhere; }
"""
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const text = row => row.cells[column].textContent;
    const order = (a, b) => {
      const x = text(a), y = text(b);
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
      const sign = up ? 1 : -1;
      return x - y ? sign * (x - y) : sign * x.localeCompare(y, undefined, {numeric: true});
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }));
}
"""


def page(comparison: Comparison, charts: Sequence[Chart], *, notes: Sequence[str], about: str) -> str:
    """Return the page.

    Args:
        comparison: The runs.
        charts: The pictures.
        notes: What was decided, left out or could not be read, one line each.
        about: The time and the command.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # The page loads nothing, and no script except the one above can run.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    count = len(comparison.rows)
    shown = os.path.relpath(comparison.base)
    place = str(comparison.base) if shown.startswith("..") else Path.cwd().name if shown == "." else shown
    title = f"{count} run{'s' if count != 1 else ''} in {place}"
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        *_summary(comparison),
        *_pictures(charts),
        *_tables(comparison),
        *_notes(notes),
        f"</main><footer><p><small>{escape(about)}</small></p></footer>",
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return covered("\n".join(lines) + "\n")


def _summary(comparison: Comparison) -> Iterator[str]:
    yield f"<p>{escape(_statuses(comparison))}</p>"
    best = best_line(comparison.rows, repeat_over=comparison.repeat_over)
    if best:
        yield f"<p>Best: <strong>{escape(best)}</strong></p>"
        yield "<p>Start from its config, and type your changes after it:</p>"
        yield f"<pre>{escape(again_command(comparison.base, comparison.best))}</pre>"
    else:
        yield "<p>No run is the best: none has completed with a value, or they monitor different tags.</p>"


def _pictures(charts: Sequence[Chart]) -> Iterator[str]:
    if not charts:
        return
    yield '<h2>Pictures</h2><div class="charts">'
    for chart in charts:
        source = f"data:image/png;base64,{base64.b64encode(chart.png).decode()}"
        caption = escape(chart.caption)
        yield f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    yield "</div>"


def _tables(comparison: Comparison) -> Iterator[str]:
    rows = comparison.rows
    header, cells = table_cells(rows, results=True)
    best = comparison.best
    yield f"<h2>{len(rows)} run{'s' if len(rows) != 1 else ''}</h2>"
    yield from _table("The runs", header, cells, bold=[row is best for row in rows])
    if comparison.repeat_over is not None:
        over = comparison.repeat_over
        top = comparison.best_group
        yield f"<h2>Over {escape(over)}</h2>"
        bold = [bool(top) and group.rows == top for group in comparison.groups]
        yield from _table(f"The runs over {over}", *repeat_cells(rows, over=over), bold=bold)


def _table(
    caption: str, header: Sequence[str], cells: Sequence[Sequence[str]], *, bold: Sequence[bool]
) -> Iterator[str]:
    heads = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in header)
    yield f'<div class="scroll" tabindex="0"><table aria-label="{escape(caption)}">'
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for line, is_best in zip(cells, bold, strict=True):
        first, *others = line
        shown = "".join(f"<td{' class=wide' if len(cell) > 60 else ''}>{escape(cell)}</td>" for cell in others)
        yield f'<tr{" class=best" if is_best else ""}><th scope="row">{escape(first)}</th>{shown}</tr>'
    yield "</tbody></table></div>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in notes)
        yield "</ul>"


def _statuses(comparison: Comparison) -> str:
    counts = Counter(row.status for row in comparison.rows)
    return ", ".join(f"{count} {status}" for status, count in counts.items())
