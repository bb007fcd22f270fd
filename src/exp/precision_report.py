"""precision.report: what a precision does to a network, measured on copies before training begins."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exp.engine.forward import forward_by_name
from exp.nested import moved
from exp.objectives.objective import Objective
from exp.precision.advice import print_comparison, proposed_keep, write_comparison
from exp.precision.comparison import Comparison, compare
from exp.precision.plugin import build_precision
from exp.precision.words import WORDS
from exp.types import Batch

log = logging.getLogger(__name__)


def report_precision(
    *,
    network_factory: Callable[[], nn.Module],
    objective: Objective,
    batch: Batch,
    precision: Mapping[str, Any],
    device: torch.device,
    seed: int,
    directory: Path,
) -> None:
    """Prints a table by layer and a `keep` map, and writes both to precision.md in the run directory.

    network_factory: makes the network of the run, in float32 and with its weights; called several times.
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
            data = plugin.convert_input(batch.data) if is_chosen else batch.data
            total: Tensor = parts[is_chosen](forward_by_name(network)(network, data), None)[0]
            return total

        return compare(reference, chosen, loss=loss, precision=plugin, seed=seed)

    comparison = compared(precision["keep"])
    keep = proposed_keep(comparison, precision["keep"], again=compared)
    path = write_comparison(comparison, directory, keep=keep, notes=notes)
    print_comparison(comparison, path, keep=keep, notes=notes)
