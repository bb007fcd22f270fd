"""How far a step moves each parameter, beside how large it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from exp.hooks.step import Step


class UpdateRatio:
    """Copies parameters before an optimizer step, and compares them behind it.

    The ratio of a parameter is the norm of its change over its norm before the step (0.001 is the usual advice for
    weights: https://cs231n.github.io/neural-networks-3/#ratio). It is 0 where nothing changed, as in a step that a loss
    scale skips, and 1 where the parameter was all zeros and moved.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    @torch.no_grad()
    def remember(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copies them; those of this step that are known already stay as they were."""
        for name, parameter in parameters.items():
            if name not in self._before:
                self._before[name] = (parameter, parameter.detach().clone())

    @torch.no_grad()
    def taken(self, step: Step) -> dict[str, Tensor]:
        """The ratios, 0-d, by name, and forgets the copies. Where ranks have parts every one of them must call it."""
        held, self._before = self._before, {}
        before = step.norms({name: copy for name, (_, copy) in held.items()})
        changed = step.norms({name: parameter.detach() - copy for name, (parameter, copy) in held.items()})
        if not before:
            return {}
        size, change = torch.stack(list(before.values())), torch.stack(list(changed.values()))
        ratios = change / torch.where(size == 0, change, size)
        return dict(zip(before, torch.where(change == 0, 0.0, ratios).unbind(), strict=True))

    def forget(self) -> None:
        """Frees the copies of a step that came to no end."""
        self._before = {}
