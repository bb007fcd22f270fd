"""precision.report: what a precision does to a network, as a table, with the precision.keep that it suggests."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from exp.files import write_whole
from exp.nested import mapped, moved
from exp.objectives.objective import Objective
from exp.precision.comparison import Comparison, LayerComparison, compare
from exp.precision.plugin import build_precision
from exp.precision.words import HALF, WORDS
from exp.shared_types import Batch

log = logging.getLogger(__name__)

FILE = "precision.md"
HEADINGS = ("layer", "type", "dtype", "error", "own error", "gradient error", "overflow", "underflow")
SHOWN = tuple(heading for heading in HEADINGS if heading != "type")
# A product of rounded numbers is wrong by about half a unit in the last place; more comes of the layer's own numbers.
UNITS = 4
# A share of lost numbers that no longer averages out.
LOST = 0.1
# Of running the batch again with more layers kept.
ROUNDS = 8


def report_precision(
    *,
    network_factory: Callable[[], nn.Module],
    forward: Callable[[nn.Module], Callable[[nn.Module, Any], Mapping[str, Any]]],
    objective: Objective,
    batch: Batch,
    precision: Mapping[str, Any],
    device: torch.device,
    seed: int,
    directory: Path,
) -> None:
    """Prints a table by layer and a `keep` map, and writes both to precision.md in the run directory.

    network_factory: makes the network of the run, in float32 and with its weights; called several times.
    forward: gives a network's forward pass, which makes the values by name of what runs the network and a batch's data.
    precision: the config's node.
    """
    names = [name for name, term in objective.terms.items() if not objective.only([name]).needs]
    notes = []
    if len(names) < len(objective.terms):
        left_out = ", ".join(name for name in objective.terms if name not in names)
        notes.append(f"without the terms that need more than one pass: {left_out}")
    if not names:
        log.warning("precision.report: no term of the objective is of one forward pass alone; nothing was measured")
        return
    part = objective.only(names).to(device)
    # The weights of a loss are float64 with the network under fp64.
    parts = part, copy.deepcopy(part).double() if WORDS[precision["word"]].double else part
    batch = batch._replace(data=moved(batch.data, device))

    def compared(keep: Mapping[str, str]) -> Comparison:
        plugin = build_precision(precision["word"], device_type=device.type, keep=keep, **precision["scaler"])
        reference, chosen = (network_factory().to(device).train() for _ in range(2))

        def loss(network: nn.Module) -> Tensor:
            is_chosen = network is chosen
            # Of its own: a first layer may work in place.
            data = mapped(batch.data, Tensor.clone)
            data = plugin.convert_input(data) if is_chosen else data
            total: Tensor = parts[is_chosen](forward(network)(network, data), None)[0]
            return total

        return compare(reference, chosen, loss=loss, precision=plugin, seed=seed)

    comparison = compared(precision["keep"])
    keep = proposed_keep(comparison, precision["keep"], again=compared)
    path = write_comparison(comparison, directory, keep=keep, notes=notes)
    print_comparison(comparison, path, keep=keep, notes=notes)


def proposed_keep(
    comparison: Comparison, keep: Mapping[str, str], *, again: Callable[[Mapping[str, str]], Comparison]
) -> dict[str, str]:
    """Extends `keep` by the layers that should be in fp32.

    What the first of them do wrong hides what later ones do, so they are kept and the batch is run again, until nothing
    more is found.

    again: compares under another keep.
    """
    proposed = dict(keep)
    for _ in range(ROUNDS):
        more = [name for name in _worst(comparison) if name not in proposed]
        if not more:
            break
        proposed |= dict.fromkeys(more, "fp32")
        comparison = again(proposed)
    names = [layer.name for layer in comparison.layers]
    patterns = _patterns([name for name in names if name in proposed.keys() - keep.keys()], names)
    return {**keep, **dict.fromkeys(patterns, "fp32")}


def _worst(comparison: Comparison) -> list[str]:
    """Layers where infinity begins; else those with errors of their own; else those with an outlying gradient."""
    dtype, layers = WORDS[comparison.word].compute, comparison.layers
    if dtype not in HALF:
        return []
    limit = UNITS * torch.finfo(dtype).eps
    usual = median(layer.gradient_error for layer in layers) if layers else 0.0
    stages = (
        [layer.name for layer in layers if layer.is_origin],
        [layer.name for layer in layers if layer.overflow],
        [layer.name for layer in layers if layer.own_error > limit or layer.underflow > LOST],
        [layer.name for layer in layers if layer.gradient_error > max(limit, UNITS * usual)],
    )
    return next((names for names in stages if names), [])


def keep_as_yaml(keep: Mapping[str, str]) -> str:
    """Writes `keep` as YAML, to paste into an experiment."""
    if not keep:
        return "precision:\n  keep: {}\n"
    return "precision:\n  keep:\n" + "".join(f'    "{pattern}": {dtype}\n' for pattern, dtype in keep.items())


def write_comparison(
    comparison: Comparison, directory: Path, *, keep: Mapping[str, str], notes: Collection[str]
) -> Path:
    """Writes precision.md in the run directory. keep: the one proposed. Returns: its path."""
    lines = [
        f"# precision={comparison.word} against float32, one batch",
        "",
        *(f"- {line}" for line in _facts(comparison)),
    ]
    lines += [f"- {note}" for note in notes]
    lines += ["", f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    lines += [f"| {' | '.join(_cells(layer))} |" for layer in comparison.layers]
    lines += ["", "Proposed:", "", "```yaml", keep_as_yaml(keep).rstrip(), "```"]
    path = directory / FILE
    write_whole(path, "\n".join(lines) + "\n")
    return path


def print_comparison(comparison: Comparison, path: Path, *, keep: Mapping[str, str], notes: Collection[str]) -> None:
    """Prints the table and the proposal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    title = f"precision={comparison.word} against float32, one batch"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # Without the types, which the file has: seven columns fit into a terminal of 80.
    for heading in SHOWN:
        is_text = heading in ("layer", "dtype")
        table.add_column(heading.replace(" error", ""), justify="left" if is_text else "right", overflow="fold")
    for layer in comparison.layers:
        cells = dict(zip(HEADINGS, _cells(layer), strict=True))
        table.add_row(*(cells[heading] for heading in SHOWN))
    console.print(table)
    for line in (*_facts(comparison), *notes):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"proposed, also in {path}:\n{keep_as_yaml(keep)}", markup=False, soft_wrap=True)


def _facts(comparison: Comparison) -> list[str]:
    error = abs(comparison.loss - comparison.loss_float32)
    facts = [f"loss {comparison.loss:.6g}, in float32 {comparison.loss_float32:.6g}, difference {error:.2g}"]
    if comparison.loss_scale != 1.0:
        facts.append(f"gradients measured at a loss scale of {comparison.loss_scale:g}")
    return facts


def _cells(layer: LayerComparison) -> tuple[str, ...]:
    errors = (layer.output_error, layer.own_error, layer.gradient_error)
    shown = [f"{error:.1e}" if error else "0" for error in errors]
    # A share that rounds to nothing is none to look at.
    underflow = "0" if (share := f"{layer.underflow:.1%}") == "0.0%" else share
    return (layer.name, layer.kind, layer.dtype, *shown, str(layer.overflow), underflow)


def _patterns(names: Collection[str], all_names: Collection[str]) -> list[str]:
    """blocks.0.norm and blocks.1.norm as blocks.*.norm, where this names no other layer."""
    patterns = []
    for name in names:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        is_exact = {other for other in all_names if fnmatchcase(other, pattern)} <= set(names)
        patterns.append(pattern if pattern != "*" and is_exact else name)
    return list(dict.fromkeys(patterns))
