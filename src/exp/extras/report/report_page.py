"""A comparison as one HTML file that needs no other, and no net: table, pictures, and how each is read."""

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
:root { color-scheme: light dark; --paper: #ffffff; --ink: #202124; --soft: #5f6368; --rule: #d5d6d8; --fill: #f4f5f6;
  --accent: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #17181a; --ink: #e6e7e9; --soft: #a4a7ab; --rule: #3c3f43; --fill: #222427; --accent: #ff9a4d; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1500px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0.2rem 0 0.6rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 0.5rem; }
p { margin: 0.3rem 0; max-width: 75ch; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: var(--fill); padding: 0.6rem 0.8rem; overflow-x: auto; border-radius: 4px; user-select: all; }
.scroll { overflow-x: auto; max-height: 70vh; border: 1px solid var(--rule); border-radius: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; width: 100%; }
th, td { padding: 0.25rem 0.6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--rule); }
td.wide { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: var(--fill); z-index: 1; }
tbody th { position: sticky; left: 0; background: var(--paper); font-weight: normal; }
tr.best th, tr.best td { font-weight: bold; color: var(--accent); }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; } figure.wide { grid-column: 1 / -1; }
figure .scroll { border: 0; max-height: none; }
figure svg { display: block; width: 100%; height: auto; }
figure.wide svg { min-width: 560px; }
figure svg text { fill: var(--ink); }
figcaption { color: var(--soft); font-size: 13px; max-width: 75ch; }
ul { padding-left: 1.2rem; } li { max-width: 100ch; overflow-wrap: anywhere; }
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
    """The whole file. notes: what was decided, left out or could not be read. about: when and by what it was made."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # Nothing is loaded, from nowhere, and the one script that runs is the one above.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
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
    best = best_line(comparison.rows, repeat_over=comparison.repeat_over, names=comparison.names)
    if best:
        yield f"<p>Best: <strong>{escape(best)}</strong></p>"
        yield "<p>A run that starts from its config, with what you change behind it:</p>"
        yield f"<pre>{escape(again_command(comparison.base, comparison.best))}</pre>"
    else:
        yield "<p>No run is the best: none has completed with a value, or they watch different tags.</p>"


def _pictures(charts: Sequence[Chart]) -> Iterator[str]:
    if not charts:
        return
    yield '<h2>Pictures</h2><div class="charts">'
    for chart in charts:
        svg = chart.svg.replace(
            "<svg", f'<svg role="img" aria-label="{escape(chart.text)}" style="max-width: {chart.width}px"', 1
        )
        yield f"<figure{' class=wide' if chart.is_wide else ''}>"
        yield f'<div class="scroll">{svg}</div><figcaption>{escape(chart.caption)}</figcaption></figure>'
    yield "</div>"


def _tables(comparison: Comparison) -> Iterator[str]:
    rows = comparison.rows
    header, cells = table_cells(rows, results=True, names=comparison.names)
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


def progress_line(comparison: Comparison) -> str:
    """How far the runs are, and the best, in a line."""
    best = best_line(comparison.rows, repeat_over=comparison.repeat_over, names=comparison.names)
    return f"{_statuses(comparison)}{f'; best {best}' if best else ''}"


def _statuses(comparison: Comparison) -> str:
    counts = Counter(row.status for row in comparison.rows)
    return ", ".join(f"{count} {status}" for status, count in counts.items())
