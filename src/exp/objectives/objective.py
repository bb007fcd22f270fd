"""The objective: a weighted sum of named terms. Its value is the loss that the network is trained on.

A cross entropy with class weights or ignored targets divides by the weights of the targets at hand. Each rank dividing
by its own would give another loss than one process, so that such a mean is weighted by its divisor, over ranks and over
the batches of a stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from exp.errors import RunError, config_error
from exp.functions.at_least_float32 import summing_dtype
from exp.objectives.loss_inputs import ELEMENTWISE, Values, full, match_target, names_of_values, pick
from exp.objectives.term import TWICE, AbstractTerm, needs_of
from exp.objectives.terms import NLL, NOTHING, CrossEntropy
from exp.shared_types import Batch, StepWeights
from exp.spelling import find_nearest

if TYPE_CHECKING:
    from exp.objectives.passes import Passes

# A mean, 0-d, and what it divides its sum by.
Mean = tuple[Tensor, Tensor | float]
# What may divide by something else than the number of its targets.
ByWeight = CrossEntropy | NLL | nn.CrossEntropyLoss | nn.NLLLoss


class Term(AbstractTerm):
    """A loss of one output of the network against one target.

    loss: a module called with (output, target) that gives a 0-d tensor, such as torch.nn.MSELoss. One that declares
        `needs` (objectives/term.py) is called with (output, target, passes).
    weight: its factor in the sum.
    output, target: which of the values it compares: `output` and `target`, or a name that the network's or the
        data set's mapping has.
    inputs: in their place, for a loss of other values: a parameter of its forward to the name of a value, such as
        {input: mean, target: target, var: variance} of torch.nn.GaussianNLLLoss.
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
        if not isinstance(loss, nn.Module):
            raise ValueError(f"loss is {loss}; expected a module, such as {{_target_: torch.nn.MSELoss}}")
        if inputs is not None and (output, target) != ("output", "target"):
            raise ValueError(f"inputs is {dict(inputs)}, beside output or target; expected one of the two")
        if inputs is not None and not inputs:
            raise ValueError("inputs is {}; expected a name of a value for each parameter of the loss, or null")
        self.loss = loss
        self.inputs = None if inputs is None else dict(inputs)
        required = _required(loss)
        if self.inputs is not None and len(required) == 2 and self.inputs.keys() == set(required):
            # By name or by place, it is one loss of an output and a target.
            output, target = (self.inputs[parameter] for parameter in required)
            self.inputs = None
        self.output = output
        self.target = target
        # Once: to hold a loss against a dozen classes takes as long as a small operator.
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
        """What the loss says by its own method `divisor`, called as the loss is, and what torch's losses divide by."""
        if self.inputs is not None:
            is_whole = all(name in values for name in self.inputs.values())
            return self._divisor_by_name(self._by_name(values) if is_whole else self._known_by_name(values))
        module, target = self.loss, pick(values, self.target, "target")
        if self._is_by_weight:
            return total_weight(cast(ByWeight, module), target)
        if self._is_weighed:
            divisor = cast("Callable[[Tensor | None, Tensor], Tensor | float]", module.divisor)
            # Before the forward of a step there is no output.
            return divisor(full(pick(values, self.output, "output")) if self.output in values else None, full(target))
        # Batches of texts may differ in their lengths.
        is_by_number = isinstance(module, (*ELEMENTWISE, CrossEntropy, NLL)) and module.reduction == "mean"
        return float(target.numel()) if is_by_number else None

    def weighed(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, Tensor | float | None]:
        if not self._is_by_weight:
            return super().weighed(values, batch, passes)
        module, output = self.loss, full(pick(values, self.output, "output"))
        return counted_mean(cast(ByWeight, module), output, full(pick(values, self.target, "target")))

    def forward(self, values: Values, batch: Batch | None = None, passes: Passes | None = None) -> Tensor:
        """The unweighted loss, 0-d, in float32 (float64 where the output is float64).

        passes: for a loss that declares needs.

        Raises: RunError where a value is not there, a shape does not fit, or the loss is not one number.
        """
        module = self.loss  # once: nn.Module's attribute lookup takes a microsecond
        if self.inputs is not None:
            named: dict[str, Any] = dict(self._by_name(values))
            if passes is not None:
                named["passes"] = passes
            return self._one_number(module(**named))
        output = full(pick(values, self.output, "output"))
        target = full(pick(values, self.target, "target"))
        if self._is_elementwise:
            target = match_target(module, output, target)
        if self._is_by_weight:
            return counted_mean(cast(ByWeight, module), output, target)[0]
        return self._one_number(module(output, target) if passes is None else module(output, target, passes))

    def _by_name(self, values: Values) -> dict[str, Tensor]:
        """What the loss is called with; those that it compares element by element are of one shape and dtype."""
        assert self.inputs is not None
        found = {parameter: full(pick(values, name, parameter)) for parameter, name in self.inputs.items()}
        if self._is_elementwise and {"input", "target"} <= found.keys():
            found["target"] = match_target(self.loss, found["input"], found["target"])
        return found

    def _known_by_name(self, values: Values) -> dict[str, Tensor | None]:
        """The same before the forward of a step, with None for what the network gives."""
        assert self.inputs is not None
        return {one: full(values[name]) if name in values else None for one, name in self.inputs.items()}

    def _divisor_by_name(self, given: Mapping[str, Any]) -> Tensor | float | None:
        if self._is_weighed:
            return cast("Callable[..., Tensor | float]", self.loss.divisor)(**given)
        return float(given["input"].numel()) if self._is_elementwise and "input" in given else None

    def _one_number(self, loss: Tensor) -> Tensor:
        if loss.dim() != 0:
            raise RunError(
                f"{type(self.loss).__name__} gives a tensor of shape {list(loss.shape)}; a term must give one number, "
                "the mean over samples"
            )
        return loss


class Objective(nn.Module):
    """The weighted sum of terms, computed in full precision whatever the network runs in.

    terms: by name; a bare loss module becomes a term of weight 1. The names are those of the tags
        `loss/<stage>/<term>`.
    needs: what its terms need beside the values of one forward pass, words of NEEDS in objectives/term.py.
    Raises: RunError where there is none; ConfigError where a loss is no mean over samples, and for needs that are none.
    """

    needs: frozenset[str]

    def __init__(self, terms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not terms:
            raise RunError("the objective has no terms; it must have at least one: objective=[cross_entropy]")
        # A plain mapping, for an nn.ModuleDict refuses names such as `update` and is slow to read; the list registers.
        self.terms = {name: term if isinstance(term, AbstractTerm) else Term(loss=term) for name, term in terms.items()}
        # Where the losses stand in the config: a bare one is the term's whole node.
        self.loss_keys = {
            name: f"objective.{name}.loss" if terms[name] is term else f"objective.{name}"
            for name, term in self.terms.items()
        }
        self._needs = {name: _needs(term, key=f"objective.{name}") for name, term in self.terms.items()}
        self.needs = frozenset().union(*self._needs.values())
        for name, term in self.terms.items():
            if isinstance(term, Term) and (error := reduction_error(term.loss)):
                fix = f"Take the line out, or scale the term with objective.{name}.weight"
                expected = "mean, for each sample counts once"
                raise config_error(f"{self.loss_keys[name]}.reduction", got=error, expected=expected, fix=fix)
        self._terms = nn.ModuleList(self.terms.values())
        self._weighed = frozenset(name for name, term in self.terms.items() if term.is_weighed)
        # Of the last call, this rank's mean of each term, and the divisor of each weighed one.
        self._own: dict[str, Tensor] = {}
        self._divisors: dict[str, Tensor | float] = {}
        compared = [term for term in self.terms.values() if isinstance(term, Term)]
        self._output = next((next(iter(term.names.values())) for term in compared), None)

    def needs_of(self, name: str) -> frozenset[str]:
        """What a term needs, and its loss."""
        return self._needs[name]

    @property
    def differentiated_twice(self) -> list[str]:
        """Names of the terms whose value is a gradient, which is differentiated again."""
        return [name for name, needs in self._needs.items() if needs & TWICE]

    @property
    def weighed(self) -> tuple[str, ...]:
        """Names of the terms that divide by weights of their targets, and not by the number of samples."""
        return tuple(name for name in self.terms if name in self._weighed)

    def means(self, values: Values, parts: Mapping[str, Tensor], *, size: int) -> list[Mean]:
        """Each term's mean over a batch that no other rank shares, as its last call gave it, and what it divided by.

        size: of the batch, in samples.
        """
        found: list[Mean] = []
        for name, term in self.terms.items():
            divisor = self._divisors[name] if name in self._weighed else term.divisor(values)
            found.append((parts[name], size if divisor is None else divisor))
        return found

    def own_means(self, batch: Batch) -> list[Mean]:
        """Each term's mean over this rank's share of a batch, of the last call; a stand-in counts for nothing."""
        if not batch.size:
            return [(torch.zeros_like(mean), 0.0) for mean in self._own.values()]
        return [(mean, self._divisors.get(name, batch.size)) for name, mean in self._own.items()]

    def step_weights(
        self, batches: Sequence[Batch], named: Callable[[Any], Values], *, device: torch.device
    ) -> StepWeights:
        """The divisors of a step over micro-batches, before its first forward. Every rank must call it.

        named: gives the values of a batch's data by name, on the device. Asked for where there are weighed terms.
        Raises: ConfigError for a divisor that needs what the network gives.
        """
        size = sum(batch.global_size for batch in batches) / len(batches)
        if not self._weighed:
            return StepWeights(len(batches), size, {})
        names, dtype = self.weighed, summing_dtype(device)
        total = torch.zeros(len(names), dtype=dtype, device=device)
        for batch in batches:
            found = self.known_divisors(named(batch.data))
            if batch.size:
                total += torch.stack([torch.as_tensor(found[name], dtype=dtype, device=device) for name in names])
        means = over_ranks(total, batches[0]) / len(batches)
        return StepWeights(len(batches), size, dict(zip(names, means.unbind(), strict=True)))

    def known_divisors(self, values: Values) -> dict[str, Tensor | float | None]:
        """The divisors of the weighed terms, of the values of a batch alone.

        Raises: ConfigError for a divisor that needs what the network gives.
        """
        found: dict[str, Tensor | float | None] = {}
        for name in self.weighed:
            try:
                found[name] = detached(self.terms[name].divisor(values))
            except Exception as error:
                raise config_error(
                    f"objective.{name}",
                    got=f"a divisor that needs the network's output ({type(error).__name__}: {error})",
                    expected="a divisor of the batch alone, which a step over several micro-batches takes before it "
                    "runs the network",
                    fix="Write trainer.accumulate_grad_batches=1",
                ) from error
        return found

    def only(self, names: Collection[str]) -> Objective:
        """The sum of some of the terms, in this one's order: the same modules, not copies.

        Raises: RunError where a name is no term.
        """
        for name in names:
            if name not in self.terms:
                found = find_nearest(name, self.terms)
                hint = f". Nearest: {found[0]}" if found else ""
                raise RunError(f"the objective has no term {name!r}; there are {', '.join(self.terms)}{hint}")
        return Objective({name: term for name, term in self.terms.items() if name in names})

    def forward(
        self, values: Values, batch: Batch | None = None, passes: Passes | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts.

        values: `output`, `target` and whatever else the network and the batch name.
        batch: whose share the values are. Where other ranks hold the rest of it, the mean over ranks, weighted by
            their samples, is the loss of the whole batch; every rank must call it then.
        passes: of the step that gave the values; only where there are `needs`.
        Returns: the sum of weight times term, 0-d and with a gradient; and each term's own loss, 0-d, detached and
            not weighted.
        Raises: RunError where a term's needs are not met.
        """
        device = self._device(values)
        # Autocast knows no meta device, on which FLOPs are counted.
        if device != "meta" and torch.is_autocast_enabled(device):
            # Some losses refuse to run under autocast, and a sum of half precision numbers is not one to train on.
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
            raise RunError(f"the terms need {', '.join(sorted(self.needs))}; the objective was called without passes")
        for name, term in self.terms.items():
            given = passes if self._needs[name] else None
            if name in self._weighed:
                whole = None if batch is None or batch.step is None else batch.step.divisors[name]
                own, divisor = term.weighed(values, batch, given)
                self._divisors[name] = detached(divisor)
                loss = shared_mean(own, self._divisors[name], batch, whole)
            else:
                own = loss = term(values, batch) if given is None else term(values, batch, given)
            parts[name] = loss.detach()
            if self._weighed:
                self._own[name] = parts[name] if own is loss else own.detach()
            weighted = loss if term.weight == 1.0 else term.weight * loss
            total = weighted if total is None else total + weighted
        assert total is not None
        return total, parts


def _needs(term: AbstractTerm, *, key: str) -> frozenset[str]:
    needs = needs_of(term, key=key)
    return needs | needs_of(term.loss, key=f"{key}.loss") if isinstance(term, Term) else needs


def _required(loss: nn.Module) -> list[str]:
    """The parameters that its forward cannot do without, in order."""
    parameters = inspect.signature(loss.forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.default is one.empty and one.kind in by_name]


def reduction_error(loss: nn.Module) -> str | None:
    """Says what is wrong with the reduction of a loss; None where its value is a mean over samples."""
    reduction = getattr(loss, "reduction", "mean")
    # KLDivLoss calls the mean over samples batchmean.
    if reduction == "mean" or (reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)):
        return None
    return f"{type(loss).__name__} has reduction {reduction!r}, so that its value depends on the batch size"


def counts_by_weight(loss: nn.Module) -> bool:
    """Whether the loss may divide by something else than the number of its targets."""
    if isinstance(loss, CrossEntropy | NLL):
        return loss.class_weights is not None or loss.ignore_index != NOTHING
    # torch's own ignore -100 unless told otherwise, and a batch does not say whether it has any.
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def counted_mean(loss: ByWeight, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss over the targets that count, 0-d, and their weight: torch's mean, and 0 where none counts, not nan."""
    # Past nn.Module, whose setting of an attribute costs as much as a small operator.
    settings = vars(loss)
    settings["reduction"] = "sum"
    try:
        total: Tensor = loss(output, target)
    finally:
        settings["reduction"] = "mean"
    weight = total_weight(loss, target)
    # Above 0, or 0: then the sum is 0, too.
    return total / weight.to(total.dtype).clamp_min(torch.finfo(torch.float32).tiny), weight


def shared_mean(loss: Tensor, divisor: Tensor | float, batch: Batch | None, whole: Tensor | None = None) -> Tensor:
    """A rank's loss such that the mean over ranks, weighted by samples, is that of the batch, 0-d.

    One sum over the ranks, of one number. whole: the batch's divisor, if the step knows it already.
    """
    if batch is None or (batch.world_size == 1 and whole is None):
        return loss
    held = torch.as_tensor(divisor, dtype=summing_dtype(loss.device), device=loss.device)
    if whole is None:
        # A stand-in takes part in the sum, and adds nothing to it.
        whole = over_ranks(held.clone() if batch.size else torch.zeros_like(held), batch)
    if not batch.size:
        return loss * 0.0
    share = (held / whole.where(whole > 0, 1.0)).to(loss.dtype)
    return loss * share * (batch.mean_size / batch.size)


def detached(divisor: Tensor | float | None) -> Tensor | float:
    """A term's divisor, without a gradient. Raises: RunError where it is None."""
    if divisor is None:
        raise RunError("a term's divisor is None; expected a number, or a tensor 0-d: by what its mean divided")
    return divisor.detach() if isinstance(divisor, Tensor) and divisor.requires_grad else divisor


def over_ranks(total: Tensor, batch: Batch) -> Tensor:
    """The sum over the ranks that share a batch; it may overwrite `total`. Every rank must call it."""
    if batch.world_size == 1:
        return total
    torch.distributed.all_reduce(total)
    # Several ranks hold each share where a model is split over ranks.
    return total * (batch.world_size / torch.distributed.get_world_size())


def total_weight(loss: ByWeight, target: Tensor) -> Tensor:
    """The weight by which the loss divides its sum, 0-d."""
    dtype = summing_dtype(target.device)
    if target.is_floating_point():  # torch divides the loss of probabilities by their number, whatever the weights
        count = target.numel() // target.shape[1] if target.dim() > 1 else 1
        return torch.tensor(count, dtype=dtype, device=target.device)
    weights: Tensor | None = loss.class_weights if isinstance(loss, CrossEntropy | NLL) else loss.weight
    if weights is not None and loss.ignore_index == NOTHING:
        return weights[target].sum(dtype=dtype)
    counted = target != loss.ignore_index
    if weights is None:
        return counted.sum(dtype=dtype)
    return torch.where(counted, weights[torch.where(counted, target, 0)], 0.0).sum(dtype=dtype)
