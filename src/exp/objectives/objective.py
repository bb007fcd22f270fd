"""The objective: a weighted sum of named terms. Its value is the loss that the network is trained on.

A cross entropy with class weights or ignored targets is a sum divided by the total weight of the targets. This divisor
differs between ranks, so a plain mean over ranks would differ from the loss of a single process. Such losses are
therefore averaged over ranks and batches with their divisors as weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed
from torch import Tensor, nn

from exp.errors import RunError, config_error
from exp.functions.at_least_float32 import summing_dtype
from exp.objectives.loss_inputs import ELEMENTWISE, Values, full, match_target, names_of_values, pick
from exp.objectives.term import TWICE, AbstractTerm, needs_of
from exp.objectives.terms import NLL, NOTHING, CrossEntropy
from exp.shared_types import Batch, StepWeights
from exp.spelling import did_you_mean

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

# A mean as a 0-d tensor, and the divisor of this mean, such as the number of samples.
Mean = tuple[Tensor, Tensor | float]
# Losses that may divide by the total weight of the targets instead of the number of targets.
ByWeight = CrossEntropy | NLL | nn.CrossEntropyLoss | nn.NLLLoss


class Term(AbstractTerm):
    """A term of the objective that calls a loss, usually with an output of the network and a target.

    Args:
        loss: A module that is called with (output, target) and returns a 0-d tensor, such as torch.nn.MSELoss. If the
            module declares `needs` (objectives/term.py), it is called with (output, target, passes).
        weight: The factor of this term in the objective. Default: 1.
        output: The name of the output: `output` (default), or a name in the mapping that the network or the data set
            returns.
        target: The name of the target. Default: `target`.
        inputs: Names of values by parameter of `forward`, for a loss that does not take an output and a target. For
            torch.nn.GaussianNLLLoss, an example is {input: mean, target: target, var: variance}. Default: None.
    """

    def __init__(
        self,
        *,
        loss: nn.Module,
        weight: float = 1.0,
        output: str = "output",
        target: str = "target",
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(weight=weight)
        if inputs is not None and (output, target) != ("output", "target"):
            raise ValueError(f"inputs is {dict(inputs)}, next to output or target; expected only one of the two")
        if inputs is not None and not inputs:
            raise ValueError("inputs is {}; expected null, or the name of a value for each parameter of the loss")
        parameters = inspect.signature(loss.forward).parameters.values()
        by_position = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one.name for one in by_position if one.default is one.empty]
        if inputs is not None and len(required) == 2 and inputs.keys() == set(required):
            # A loss with two required parameters is called with an output and a target by position.
            output, target = (inputs[parameter] for parameter in required)
            inputs = None
        self.loss = loss
        self.inputs = None if inputs is None else dict(inputs)
        self.output = output
        self.target = target
        # The result is stored, because isinstance with a dozen classes takes as long as a small operator.
        self._is_elementwise = isinstance(loss, ELEMENTWISE)
        self._is_by_weight = self.inputs is None and counts_by_weight(loss)
        self._is_weighed = self._is_by_weight or hasattr(loss, "divisor")

    @property
    def is_weighed(self) -> bool:
        return self._is_weighed

    @property
    def names(self) -> Mapping[str, str]:
        return names_of_values(self.inputs, output=self.output, target=self.target)

    def divisor(self, values: Values) -> Tensor | float | None:
        """Return the divisor of the mean over a batch. Return None if the divisor is the number of samples.

        If the loss has a method `divisor`, this method is called with the same arguments as the loss. Before the
        forward pass, its arguments from the network are None. For a loss of torch, the divisor is the number or the
        total weight of the targets.

        Args:
            values: The values of the batch by name.
        """
        if self._is_weighed and not self._is_by_weight:
            divisor = cast("Callable[..., Tensor | float]", self.loss.divisor)
            given = self._arguments(values, is_partial=True)
            return divisor(*given.values()) if self.inputs is None else divisor(**given)
        # The number of targets in a batch may vary, for example with the length of texts.
        is_by_number = isinstance(self.loss, (*ELEMENTWISE, CrossEntropy, NLL)) and self.loss.reduction == "mean"
        name = self.target if self.inputs is None else self.inputs.get("target")
        if name is None or not (self._is_by_weight or is_by_number):
            return None
        # Do not read the output, because `full` would copy scores in half precision.
        target = pick(values, name, "target")
        return total_weight(cast(ByWeight, self.loss), full(target)) if self._is_by_weight else float(target.numel())

    def weigh(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        if not self._is_by_weight:
            return super().weigh(values, batch, passes)
        module, output = self.loss, full(pick(values, self.output, "output"))
        return counted_mean(cast(ByWeight, module), output, full(pick(values, self.target, "target")))

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """Return the unweighted loss as a 0-d tensor, in float32, or in float64 if the output is float64.

        Args:
            values: The values of the step by name.
            batch: Not used. Default: None.
            passes: Additional passes, for a loss with `needs`. Default: None.

        Raises:
            RunError: A value is missing, a shape does not match, or the loss is not a single number.
        """
        if self._is_by_weight:
            return self.weigh(values)[0]
        module = self.loss  # read only once, because the attribute lookup of nn.Module takes a microsecond
        given: dict[str, object] = dict(self._arguments(values))
        if passes is not None:
            given["passes"] = passes
        loss: Tensor = module(*given.values()) if self.inputs is None else module(**given)
        if loss.dim() != 0:
            raise RunError(
                f"{type(module).__name__} returns a tensor of shape {list(loss.shape)}; expected one number, "
                "the mean over samples"
            )
        return loss

    def _arguments(self, values: Values, *, is_partial: bool = False) -> dict[str, Tensor | None]:
        """Return the arguments of the loss by parameter.

        Args:
            values: The values of the step by name.
            is_partial: Whether missing values become None instead of an error. Default: false.
        """
        inputs = {"output": self.output, "target": self.target} if self.inputs is None else self.inputs
        found = {
            parameter: None if is_partial and name not in values else full(pick(values, name, parameter))
            for parameter, name in inputs.items()
        }
        if self._is_elementwise:
            output, target = found.get("output" if self.inputs is None else "input"), found.get("target")
            if output is not None and target is not None:
                found["target"] = match_target(self.loss, output, target)
        return found


class Objective(nn.Module):
    """The weighted sum of terms. It is computed in float32 or float64, also if the network uses half precision.

    Args:
        terms: The terms by name. A loss module becomes a term with the weight 1. The names appear in the TensorBoard
            tags `loss/<stage>/<term>`.

    Attributes:
        needs: The needs of all terms. NEEDS in objectives/term.py describes them.
        weighed: The names of the weighed terms. These terms divide by their `divisor` instead of the number of samples.

    Raises:
        RunError: There is no term.
        ConfigError: A loss is not a mean over samples, or a need is unknown.
    """

    needs: frozenset[str]

    def __init__(self, terms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not terms:
            raise RunError("the objective has no terms; expected at least one, such as objective=[cross_entropy]")
        # A plain dict, because an nn.ModuleDict rejects names such as `update` and is slow. The ModuleList below
        # registers the terms.
        self.terms = {name: term if isinstance(term, AbstractTerm) else Term(loss=term) for name, term in terms.items()}
        # The config key of the loss of each term. If the config has a loss instead of a Term, this is the key of the
        # term.
        self.loss_keys = {
            name: f"objective.{name}.loss" if terms[name] is term else f"objective.{name}"
            for name, term in self.terms.items()
        }
        self._needs = {name: _needs(term, key=f"objective.{name}") for name, term in self.terms.items()}
        self.needs = frozenset().union(*self._needs.values())
        for name, term in self.terms.items():
            if isinstance(term, Term):
                _require_mean(term.loss, key=self.loss_keys[name], weight=f"objective.{name}.weight")
        self._terms = nn.ModuleList(self.terms.values())
        self.weighed = tuple(name for name, term in self.terms.items() if term.is_weighed)
        # From the last call: the mean of each term over the samples of this rank, and the divisor of each weighed term.
        self._own: dict[str, Tensor] = {}
        self._divisors: dict[str, Tensor | float] = {}
        compared = [term for term in self.terms.values() if isinstance(term, Term)]
        self._output = next((next(iter(term.names.values())) for term in compared), None)

    def needs_of(self, name: str) -> frozenset[str]:
        """Return the needs of a term and of the loss in the term."""
        return self._needs[name]

    @property
    def differentiated_twice(self) -> list[str]:
        """The names of the terms that contain a gradient. The backward of such a term differentiates this gradient."""
        return [name for name, needs in self._needs.items() if needs & TWICE]

    def means(self, values: Values, parts: Mapping[str, Tensor], *, size: int) -> list[Mean]:
        """Return the mean and the divisor of each term, for a batch that is not divided among ranks.

        Args:
            values: The values that the last call of the objective received.
            parts: The unweighted loss of each term that the last call returned.
            size: The number of samples in the batch.
        """
        found: list[Mean] = []
        for name, term in self.terms.items():
            divisor = self._divisors[name] if name in self.weighed else term.divisor(values)
            found.append((parts[name], size if divisor is None else divisor))
        return found

    def own_means(self, batch: Batch) -> list[Mean]:
        """Return the mean and the divisor of each term over the samples of this rank, from the last call.

        A rank without samples computes a placeholder sample. In this case, the mean and the divisor are 0.

        Args:
            batch: The samples of this rank.
        """
        if not batch.size:
            return [(torch.zeros_like(mean), 0.0) for mean in self._own.values()]
        return [(mean, self._divisors.get(name, batch.size)) for name, mean in self._own.items()]

    def step_weights(
        self, batches: Sequence[Batch], named: Callable[[object], Values], *, device: torch.device
    ) -> StepWeights:
        """Return the divisors of the weighed terms for an optimizer step over several micro-batches.

        Every rank must call this method before the first forward pass of the step.

        Args:
            batches: The samples of this rank in each micro-batch.
            named: Function that returns the values in the data of a batch by name, on the device. It is called only if
                there are weighed terms.
            device: The device of the computation.

        Raises:
            ConfigError: The divisor of a term needs the output of the network.
        """
        size = sum(batch.global_size for batch in batches) / len(batches)
        if not self.weighed:
            return StepWeights(len(batches), size, {})
        names, dtype = self.weighed, summing_dtype(device)
        total = torch.zeros(len(names), dtype=dtype, device=device)
        for batch in batches:
            found = self.known_divisors(named(batch.data))
            if batch.size:
                total += torch.stack([torch.as_tensor(found[name], dtype=dtype, device=device) for name in names])
        means = over_ranks(total, batches[0]) / len(batches)
        return StepWeights(len(batches), size, dict(zip(names, means.unbind(), strict=True)))

    def known_divisors(self, values: Values) -> dict[str, Tensor | float]:
        """Return the divisors of the weighed terms, by name of the term, before the forward pass.

        Args:
            values: The values of a batch by name, without the network's output.

        Raises:
            ConfigError: The divisor of a term needs the output of the network.
        """
        found: dict[str, Tensor | float] = {}
        for name in self.weighed:
            try:
                found[name] = detach_divisor(self.terms[name].divisor(values))
            except Exception as error:
                got = f"a divisor that needs the network's output ({type(error).__name__}: {error})"
                expected = "a divisor of the batch alone, because gradient accumulation needs it before the forward"
                fix = "Write trainer.accumulate_grad_batches=1"
                raise config_error(f"objective.{name}", got=got, expected=expected, fix=fix) from error
        return found

    def only(self, names: Collection[str]) -> Objective:
        """Return an objective with only the named terms, in the same order and with the same modules.

        Raises:
            RunError: The objective has no term with one of the names.
        """
        for name in names:
            if name not in self.terms:
                text = f"the objective has no term {name!r}; expected one of {', '.join(self.terms)}"
                raise RunError(". ".join(filter(None, [text, did_you_mean(name, self.terms)])))
        return Objective({name: term for name, term in self.terms.items() if name in names})

    def forward(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the objective, and the loss of each term.

        If a batch is divided among ranks, every rank must call this method. The loss of the whole batch is the mean
        over ranks, weighted by the numbers of samples.

        Args:
            values: The values by name: `output`, `target`, and the names in mappings that the network and the data set
                return.
            batch: The samples of this rank. None (default) if the batch is not divided.
            passes: Additional passes and gradients. Required if a term has `needs`. Default: None.

        Returns:
            Two values: the weighted sum of all terms, a 0-d tensor with a graph, and the unweighted loss of each term,
            a 0-d tensor without a graph.

        Raises:
            RunError: A term has needs, and `passes` is None.
        """
        device = self._device(values)
        # Autocast does not support the meta device, on which FLOPs are counted.
        if device != "meta" and torch.is_autocast_enabled(device):
            # Some losses raise an error under autocast, and a sum in half precision is too inexact for training.
            with torch.autocast(device, enabled=False):
                return self._sum(values, batch, passes)
        return self._sum(values, batch, passes)

    def _device(self, values: Values) -> str:
        if self._output is not None:
            return pick(values, self._output, "output").device.type
        return next((value.device.type for value in values.values() if isinstance(value, Tensor)), "cpu")

    def _sum(self, values: Values, batch: Batch | None, passes: Passes | None) -> tuple[Tensor, dict[str, Tensor]]:
        total: Tensor | None = None
        parts: dict[str, Tensor] = {}
        if passes is None and self.needs:
            raise RunError(f"the objective got no passes, but its terms have the needs {', '.join(sorted(self.needs))}")
        for name, term in self.terms.items():
            given = passes if self._needs[name] else None
            if name in self.weighed:
                whole = None if batch is None or batch.step is None else batch.step.divisors[name]
                own, divisor = term.weigh(values, batch, given)
                self._divisors[name] = detach_divisor(divisor)
                loss = shared_mean(own, self._divisors[name], batch, whole)
            else:
                own = loss = term(values, batch) if given is None else term(values, batch, given)
            parts[name] = loss.detach()
            if self.weighed:
                self._own[name] = parts[name] if own is loss else own.detach()
            weighted = loss if term.weight == 1.0 else term.weight * loss
            total = weighted if total is None else total + weighted
        assert total is not None
        return total, parts


def _needs(term: AbstractTerm, *, key: str) -> frozenset[str]:
    needs = needs_of(term, key=key)
    return needs | needs_of(term.loss, key=f"{key}.loss") if isinstance(term, Term) else needs


def _require_mean(loss: nn.Module, *, key: str, weight: str) -> None:
    """Raise ConfigError if a loss does not return a mean over samples."""
    reduction = getattr(loss, "reduction", "mean")
    # In KLDivLoss, the reduction batchmean is the mean over samples.
    if reduction != "mean" and not (reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)):
        got = f"{type(loss).__name__} has reduction {reduction!r}, so that its value depends on the batch size"
        fix = f"Leave {key}.reduction out. To scale the term, set {weight}"
        raise config_error(f"{key}.reduction", got=got, expected="mean, so that each sample counts once", fix=fix)


def counts_by_weight(loss: nn.Module) -> bool:
    """Return whether a loss may divide by the total weight of the targets instead of the number of targets."""
    if isinstance(loss, CrossEntropy | NLL):
        return loss.class_weights is not None or loss.ignore_index != NOTHING
    # By default, torch's losses ignore targets of -100, and a batch may contain such targets.
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def counted_mean(loss: ByWeight, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the targets that are not ignored, and the total weight of these targets.

    Both are 0-d tensors. If all targets are ignored, the mean is 0 instead of nan.
    """
    # The attribute is set in vars(loss), because nn.Module's __setattr__ takes as long as a small operator.
    settings = vars(loss)
    settings["reduction"] = "sum"
    try:
        total: Tensor = loss(output, target)
    finally:
        settings["reduction"] = "mean"
    weight = total_weight(loss, target)
    # If the weight is 0, the sum is also 0. The clamp avoids 0 / 0.
    return total / weight.to(total.dtype).clamp_min(torch.finfo(torch.float32).tiny), weight


def shared_mean(loss: Tensor, divisor: Tensor | float, batch: Batch | None, whole: Tensor | None = None) -> Tensor:
    """Return the scaled loss of a rank. The mean of scaled losses over ranks is the loss of the whole batch.

    The mean over ranks is weighted by the numbers of samples.

    Args:
        loss: The mean over the samples of the rank, a 0-d tensor.
        divisor: The divisor of this mean.
        batch: The samples of the rank. None returns the loss unchanged.
        whole: The divisor of the whole batch. None (default) sums the divisors of all ranks.
    """
    if batch is None or (batch.world_size == 1 and whole is None):
        return loss
    held = torch.as_tensor(divisor, dtype=summing_dtype(loss.device), device=loss.device)
    if whole is None:
        # A rank with only a placeholder sample adds 0, because all ranks must take part in the sum.
        whole = over_ranks(held.clone() if batch.size else torch.zeros_like(held), batch)
    if not batch.size:
        return loss * 0.0
    share = (held / whole.where(whole > 0, 1.0)).to(loss.dtype)
    return loss * share * (batch.mean_size / batch.size)


def detach_divisor(divisor: Tensor | float | None) -> Tensor | float:
    """Return the divisor of a term, detached from the graph.

    Raises:
        RunError: The divisor is None.
    """
    if divisor is None:
        raise RunError("the divisor of a term is None; expected a number or a 0-d tensor")
    return divisor.detach() if isinstance(divisor, Tensor) and divisor.requires_grad else divisor


def over_ranks(total: Tensor, batch: Batch) -> Tensor:
    """Return the sum of a tensor over the ranks that share a batch. Every rank must call this function.

    Args:
        total: The tensor of this rank. The function may overwrite this tensor.
        batch: The samples of this rank.
    """
    if batch.world_size == 1:
        return total
    torch.distributed.all_reduce(total)
    # If a model is split over ranks, several ranks have the same samples, so the sum counts these samples several
    # times.
    return total * (batch.world_size / torch.distributed.get_world_size())


def total_weight(loss: ByWeight, target: Tensor) -> Tensor:
    """Return the total weight of the targets, by which a loss divides its sum, as a 0-d tensor."""
    dtype = summing_dtype(target.device)
    if target.is_floating_point():  # torch ignores weights in the divisor of a loss with probabilities as targets
        count = target.numel() // target.shape[1] if target.dim() > 1 else 1
        return torch.tensor(count, dtype=dtype, device=target.device)
    weights: Tensor | None = loss.class_weights if isinstance(loss, CrossEntropy | NLL) else loss.weight
    if weights is not None and loss.ignore_index == NOTHING:
        return weights[target].sum(dtype=dtype)
    counted = target != loss.ignore_index
    if weights is None:
        return counted.sum(dtype=dtype)
    return torch.where(counted, weights[torch.where(counted, target, 0)], 0.0).sum(dtype=dtype)
