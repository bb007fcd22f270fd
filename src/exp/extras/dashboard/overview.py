"""The first page of TensorBoard, on which the most important curves of a run are pinned."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tensorboard.backend.experimental_plugin import ExperimentalPlugin
from tensorboard.plugins import base_plugin

from exp.shared_types import split_tag
from exp.tensorboard.event_file import read_curves

# Tags that are pinned after losses, metrics and learning rates.
LOOKED_AT = ("gradients/norm/total", "gradients/update_ratio/total", "throughput/samples_per_second")
MOST_PINNED = 9


class Overview(base_plugin.TBPlugin, ExperimentalPlugin):
    """TensorBoard plug-in that redirects a short address to the page Time Series with pinned curves.

    TensorBoard shows no tab for an experimental plug-in. The address of Time Series gets the parameter `pinnedCards`
    (tensorboard 2.21; a test fails if the parameter changes).
    """

    plugin_name = "exp"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._directory = Path(context.logdir)

    def get_plugin_apps(self) -> Mapping[str, Callable[..., Iterable[bytes]]]:
        return {"/overview": self._overview}

    def is_active(self) -> bool:
        return False

    def _overview(self, environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
        start_response("302 Found", [("Location", f"/?{question(self._directory)}#timeseries")])
        return []


def question(directory: Path) -> str:
    """Return the query string of the address of Time Series that pins the curves of the newest run with scalars.

    Args:
        directory: Folder with the links to runs.
    """
    runs: dict[Path, float] = {}
    for run in directory.iterdir():
        with contextlib.suppress(OSError):  # the run may have been removed since iterdir
            runs[run] = run.stat().st_mtime
    newest_first = sorted(runs, key=runs.__getitem__, reverse=True)
    found = next((tags for run in newest_first if (tags := in_order(_tags_of(run)))), [])
    cards = [{"plugin": "scalars", "tag": tag} for tag in found]
    pinned = urllib.parse.quote(json.dumps(cards, separators=(",", ":")))
    return f"pinnedCards={pinned}&smoothing=0"


def _tags_of(run: Path) -> set[str]:
    tags: set[str] = set()

    def note(tag: str) -> bool:
        tags.add(tag)
        return False

    read_curves(run, wants=note)
    return tags


def in_order(tags: Iterable[str]) -> list[str]:
    """Return the most important tags, at most MOST_PINNED, in the order in which they are pinned."""
    known = sorted(tags)
    # Tags of the test split are left out, because a test has only one point, which report.md shows.
    named = {tag: split_tag(tag) for tag in known}
    losses = [tag for tag, (name, stage) in named.items() if name.startswith("loss") and stage in ("train", "val")]
    losses = [tag for tag in losses if "/" not in named[tag][0]]  # only the sum of all terms
    metrics = [tag for tag, (name, stage) in named.items() if stage == "val" and "/" not in name and tag not in losses]
    rates = [tag for tag in known if tag.startswith("optimizer/lr/")]
    first = (*losses, *metrics, *rates, *LOOKED_AT)
    return [tag for tag in first if tag in known][:MOST_PINNED]
