"""Writes a comparison as one self-contained HTML file with tables and pictures."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from exp.extras.report.charts import Chart
from exp.extras.report.run_comparison import Comparison
from exp.redaction import mask_secrets
from exp.sweeps.results import again_command, best_line, repeat_cells, table_cells

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 1500px; font: 15px/1.45 system-ui, sans-serif; }
p, figcaption { max-width: 75ch; }
pre { overflow-x: auto; user-select: all; }
.scroll { overflow: auto; max-height: 70vh; border: 1px solid GrayText; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 0.25rem 0.6rem; text-align: left; border-bottom: 1px solid GrayText; overflow-wrap: anywhere; }
thead th { position: sticky; top: 0; background: Canvas; }
tr.best th, tr.best td { font-weight: bold; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1.2rem; }
figure { margin: 0; } img { max-width: 100%; }
"""
# The page loads no files and runs no scripts.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(comparison: Comparison, charts: Sequence[Chart], *, notes: Sequence[str], about: str) -> str:
    """Return the HTML page of a comparison.

    Args:
        comparison: The compared runs.
        charts: The pictures.
        notes: Notes about decisions, omissions and unreadable files, one line each.
        about: Text with the time and the command, for the end of the page.
    """
    count = len(comparison.rows)
    shown = os.path.relpath(comparison.base)
    place = str(comparison.base) if shown.startswith("..") else Path.cwd().name if shown == "." else shown
    title = escape(f"{count} run{'s' if count != 1 else ''} in {place}")
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>",
        *_summary(comparison),
        *_pictures(charts),
        *_tables(comparison),
        "<h2>Notes</h2><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes),
        f"</ul></main><footer><p><small>{escape(about)}</small></p></footer></body></html>",
    ]
    return mask_secrets("\n".join(lines) + "\n")


def _summary(comparison: Comparison) -> Iterator[str]:
    counts = Counter(row.status for row in comparison.rows)
    yield f"<p>{escape(', '.join(f'{count} {status}' for status, count in counts.items()))}</p>"
    best = best_line(comparison.rows, repeat_over=comparison.repeat_over)
    if best:
        yield f"<p>Best: <strong>{escape(best)}</strong></p>"
        yield "<p>Start from its config, and append your changes:</p>"
        yield f"<pre>{escape(again_command(comparison.base, comparison.best))}</pre>"
    else:
        yield "<p>No best run: no run has completed with a value, or the runs monitor different tags.</p>"


def _pictures(charts: Sequence[Chart]) -> Iterator[str]:
    yield '<h2>Pictures</h2><div class="charts">'
    for chart in charts:
        source = f"data:image/png;base64,{base64.b64encode(chart.png).decode()}"
        caption = escape(chart.caption)
        yield f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    yield "</div>"


def _tables(comparison: Comparison) -> Iterator[str]:
    rows, over, top = comparison.rows, comparison.repeat_over, comparison.best_group
    yield from _table("The runs", *table_cells(rows, results=True), bold=[row is comparison.best for row in rows])
    if over is not None:
        bold = [bool(top) and group.rows == top for group in comparison.groups]
        yield from _table(f"The runs over {over}", *repeat_cells(rows, over=over), bold=bold)


def _table(title: str, header: Sequence[str], cells: Sequence[Sequence[str]], *, bold: Sequence[bool]) -> Iterator[str]:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    yield f'<h2>{escape(title)}</h2><div class="scroll" tabindex="0"><table aria-label="{escape(title)}">'
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for (first, *others), is_best in zip(cells, bold, strict=True):
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f'<tr{" class=best" if is_best else ""}><th scope="row">{escape(first)}</th>{shown}</tr>'
    yield "</tbody></table></div>"
