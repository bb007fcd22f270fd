"""Run a step that failed again on the CPU, and name the operator, the layer and the number that it fails for.

On a GPU an index out of range is a "device-side assert": it names nothing, and behind it nothing can be read from the
device any more. So the weights are copied to the CPU before each step, and the batch as well. That is for debugging.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from exp.data.randomness import reseed
from exp.engine.module import TrainingModule
from exp.errors import ExpError, Interrupted, RunError, UserCodeError, one_line, shortened
from exp.hooks.step_trace import named_terms
from exp.nested import moved
from exp.shared_types import Batch, Stage
from exp.strategies.model_parallel import ModelParallel

CPU = torch.device("cpu")


class FailingStep(Callback):
    """A callback that keeps what each step begins with, and says of one that fails where it does so on the CPU.

    module: before it is moved to a device; of a module of the user's own, None, and nothing is run again.
    """

    def __init__(self, module: TrainingModule | None) -> None:
        super().__init__()
        self._module = module
        self._network = None if module is None else copy.deepcopy(module.network)
        self._objective = None if module is None else copy.deepcopy(module.objective)
        self._step: tuple[Stage, Batch, int, int] | None = None

    # --- what a step begins with ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep("train", trainer, batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep("val", trainer, batch, batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep("test", trainer, batch, batch_idx)

    def _keep(self, stage: Stage, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._module is None or self._network is None or self._objective is None or not isinstance(batch, Batch):
            return
        epoch = trainer.current_epoch if stage == "train" else 0
        self._step = stage, batch._replace(data=moved(batch.data, CPU)), batch_idx, epoch
        # A rank that has parts of the weights keeps the initial ones, which will do for an index.
        if not isinstance(trainer.strategy, ModelParallel):
            _copy(self._module.network, self._network)
            _copy(self._module.objective, self._objective)

    # --- the step that failed ---

    def named(self, error: BaseException) -> BaseException:
        """The error that is told in the place of one that ended a step: with the operator, the layer and the index."""
        is_told = isinstance(error, ExpError) and not isinstance(error, UserCodeError)
        if is_told or not isinstance(error, Exception) or isinstance(error, Interrupted) or self._step is None:
            return error
        stage, _, batch_idx, _ = self._step
        cause, frames = (error.cause, error.frames) if isinstance(error, UserCodeError) else (one_line(error), "")
        head = f"batch {batch_idx} of {stage} failed with {cause}"
        told = RunError("\n".join(filter(None, [head, frames, self._found()])))
        told.__cause__ = error
        return told

    def _found(self) -> str:
        """What the step does on the CPU, in words."""
        assert self._module is not None
        assert self._network is not None
        assert self._objective is not None
        assert self._step is not None
        stage, batch, batch_idx, epoch = self._step
        reseed(seed=self._module.seed, rank=self._module.rank, epoch=epoch, batch=batch_idx, stage=stage)
        with _Layers(self._network, self._objective) as layers, _Operators(layers) as operators:
            try:
                with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(stage == "train"):
                    loss = self._module.loss_of(batch, network=self._network, objective=self._objective)
                    layers.is_backward = True
                    if loss.requires_grad:
                        loss.backward()
            except Exception as error:  # whatever it is, it is what is asked for
                return _described(error, operators, samples=batch.size)
        return (
            "Run again on the CPU, in float32, it does not fail. The error above is at the kernel that failed, for "
            "launches were blocking: look at its frames, or at memory that a kernel of your own writes"
        )


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Give a module on the CPU the weights, buffers and modes of another like it."""
    with torch.no_grad():
        for own, other in ((target.parameters(), source.parameters()), (target.buffers(), source.buffers())):
            for one, now in zip(own, other, strict=True):
                one.copy_(now.detach())
    for part, its_source in zip(target.modules(), source.modules(), strict=True):
        part.training = its_source.training


class _Layers:
    """The modules that are being called, by name; a context in which it knows."""

    def __init__(self, network: nn.Module, objective: nn.Module) -> None:
        named = [(name or "(network)", one) for name, one in network.named_modules()]
        named += named_terms(objective).items()
        self._named = named
        self._open: list[str] = []
        self._hooks = ExitStack()
        self.is_backward = False

    @property
    def innermost(self) -> str:
        """In words."""
        if self.is_backward:
            return "in the backward"
        return f"in {self._open[-1]}" if self._open else "between the layers"

    def __enter__(self) -> _Layers:
        for name, module in self._named:
            words = f"`{name}` ({type(module).__name__})"
            self._hooks.callback(module.register_forward_pre_hook(partial(self._begin, words)).remove)
            # Not where the call fails: then it is the one that is open.
            self._hooks.callback(module.register_forward_hook(self._end).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _begin(self, words: str, *_: object) -> None:
        self._open.append(words)

    def _end(self, *_: object) -> None:
        self._open.pop()


class _Operators(TorchDispatchMode):
    """Remembers the operator that is being called, its arguments and its layer."""

    def __init__(self, layers: _Layers) -> None:
        TorchDispatchMode.__init__(self)
        self.layers = layers
        self.name, self.place = "", ""
        self.given: Sequence[Any] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.name, self.given, self.place = func._schema.name.removeprefix("aten::"), args, self.layers.innermost
        return func(*args, **(kwargs or {}))


def _described(error: Exception, operators: _Operators, *, samples: int) -> str:
    with _outside_of(operators):
        found = next(_out_of_range(operators.name, operators.given, samples=samples), None)
    words = shortened(one_line(error), most=300)
    where = f"Run again on the CPU, it fails {operators.place or operators.layers.innermost}"
    operator = f", in the operator {operators.name}" if operators.name else ""
    return f"{where}{operator}: {found or words}" + (f" ({words})" if found else "")


@contextmanager
def _outside_of(operators: _Operators) -> Iterator[None]:
    """What is looked at now is no operator of the step."""
    kept = operators.name, operators.given, operators.place
    yield
    operators.name, operators.given, operators.place = kept


def _out_of_range(name: str, given: Sequence[Any], *, samples: int) -> Iterator[str]:
    """Which number of an operator's arguments is not one that it takes."""
    if name == "embedding" or name in ("_embedding_bag", "_embedding_bag_forward_only"):
        yield from _outside("index", given[1], 0, given[0].shape[0], samples=samples)
    elif name.startswith(("nll_loss_forward", "nll_loss2d_forward")):
        classes = given[0].shape[1 if given[0].dim() > 1 else 0]
        yield from _outside("target", given[1], 0, classes, samples=samples, ignored=given[4])
    elif name.startswith(("gather", "index_select", "scatter", "index_add", "index_copy")):
        yield from _outside("index", given[2], 0, given[0].shape[given[1]], samples=samples)
    elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        for dimension, index in enumerate(given[1]):
            if isinstance(index, Tensor) and index.dtype is not torch.bool and dimension < given[0].dim():
                size = given[0].shape[dimension]
                yield from _outside("index", index, -size, size, samples=samples)
    elif name == "binary_cross_entropy":
        for word, values in (("probability", given[0]), ("target", given[1])):
            yield from _outside(word, values, 0, 1, samples=samples, is_closed=True)


def _outside(
    word: str, values: Tensor, low: int, high: int, *, samples: int, ignored: int | None = None, is_closed: bool = False
) -> Iterator[str]:
    """The first number that is not from `low` on and below `high`, or up to it, in words."""
    values = values.detach()
    bad = ~((values >= low) & (values <= high if is_closed else values < high))
    if ignored is not None:
        bad &= values != ignored
    places = bad.nonzero().tolist()
    if not places:
        return
    first = places[0]
    value = values[tuple(first)].item()
    at = ""
    if first:
        row = "sample" if values.shape[0] == samples else "row"
        at = f" of {row} {first[0]}" + (f", at {first[1:]}," if first[1:] else "")
    more = f"; {len(places)} of {values.numel()} numbers are" if len(places) > 1 else ""
    yield f"{word} {value:g}{at} is out of {low}..{high if is_closed else high - 1}{more}"
