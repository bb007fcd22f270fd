"""The hook `dtypes`: logs the dtypes of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from exp.extras.debugging.chosen_steps import OnChosenSteps
from exp.hooks.hook import Values
from exp.hooks.panels import Text
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.shared_types import dtype_name

HEADER = "| layer | type | inputs | output | parameters | kept |\n|---|---|---|---|---|---|"


class Dtypes(OnChosenSteps):
    """Hook that logs the dtypes of the inputs, output and parameters of each layer, as the table `dtypes`.

    If the dtypes of inputs and output differ, autocast, precision.keep or the layer itself casts. The column `kept`
    contains a dtype if the run keeps the layer in this dtype. The reason is precision.keep, or that the precision has
    no kernel for the layer. Only rank 0 is shown. If a layer is called several times, its row lists the dtypes of all
    calls.

    Args:
        steps: Optimizer steps, counted from 1. Default: 1.
        modules: Name patterns of the layers in the table. Modules with submodules and without direct parameters are
            left out. Default: *.
    """

    needs = frozenset({"all_layers", "one_thread"})

    def setup(self, network: nn.Module) -> None:
        self._rows: dict[str, _Row] = {}

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        own = list(module.parameters(recurse=False))
        if not own and any(True for _ in module.children()):
            return
        row = self._rows.setdefault(name, _Row(type(module).__name__, own))
        row.inputs |= dict.fromkeys(_dtypes(inputs))
        row.output |= dict.fromkeys(_dtypes(output))

    def after_step(self, step: Step) -> Values | None:
        rows, self._rows = self._rows, {}
        if not rows or step.rank != 0:
            return None
        kept = {name: dtype_name(dtype) for name, dtype in step.kept.items()}
        lines = [row.line(name, kept.get(name)) for name, row in rows.items()]
        return {self.name: Text("\n".join([HEADER, *lines]))}


class _Row:
    """Row of the table. It contains each dtype of one layer once, in the order in which the dtypes occur."""

    def __init__(self, kind: str, parameters: Sequence[Tensor]) -> None:
        self.kind = kind
        self.parameters = dict.fromkeys(_dtypes(parameters))
        self.inputs: dict[str, None] = {}
        self.output: dict[str, None] = {}

    def line(self, name: str, kept: str | None) -> str:
        cells = [" ".join(one) or "-" for one in (self.inputs, self.output, self.parameters)]
        return f"| {name or '(network)'} | {self.kind} | {' | '.join(cells)} | {kept or ''} |"


def _dtypes(data: object) -> list[str]:
    return [dtype_name(tensor.dtype) for tensor in tensors_in(data)]
