"""The stages of a pipeline that one rank holds, the micro-batches of a batch, and how they run through the stages.

Training is a schedule of torch.distributed.pipelining, one for each shape of micro-batches, because its buffers have
fixed sizes. Evaluation goes forward only, stage by stage: of the V schedules torch 2.13 has no forward alone.

The batch, which every rank of a pipeline has, is not sent: a stage finds the inputs of a micro-batch by its number,
which is all that torch passes to the stage. The values that later stages read are sent.

Relied on, and tested: torch infers what a new schedule sends by one forward of each stage, and one call of the loss,
before the first micro-batch (`PipelineStage` in dynamic mode, seen in torch 2.13). They leave no trace here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from exp.models.graphs import TENSOR
from exp.nested import map_tensors, move_tensors, tensors_in

if TYPE_CHECKING:
    from exp.models.partition import Part, Split

Data = TypeVar("Data")
Note = TypeVar("Note")
Inputs = Mapping[str, object]
Context = Callable[[], AbstractContextManager[object]]
Shape = tuple[object, ...]
CPU = torch.device("cpu")
# Shapes of micro-batches whose schedules are kept, with their buffers.
KEPT = 8
# Micro-batches a rank of the pipeline: GPipe's paper finds the idle time small from 4 on (Huang 2019, section 2.3).
WISH = 4


class Stage:
    """One part of the network, as a function of what is sent to it.

    around: the context of a forward, such as autocast.
    """

    def __init__(self, network: nn.Module, split: Split, index: int, *, around: Context) -> None:
        self.network, self.split, self.index, self.around = network, split, index, around
        self.part: Part = split.parts[index]
        self.takes = split.carried(index - 1) if index else ()
        self.gives = split.carried(index)
        self.is_last = index == len(split.parts) - 1
        # Of the network's output, once it has been seen.
        self.output: object = None
        own = set(self.part.tensors)
        self.parameters = [parameter for name, parameter in network.named_parameters() if name in own]
        self.buffers = [name for name, _ in network.named_buffers() if name in own]

    def run(self, received: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        """What is sent on: the tensors of the values that later stages read; of the last stage those of the output."""
        tensors = iter(received)
        values: dict[str, object] = {name: _fill(self.split.values[name], tensors) for name in self.takes}
        read = [inputs[name] for name in self.part.inputs] + [values[name] for name in self.part.takes]
        with self.around():
            result = self.part.run(self.network, *read)
        if self.is_last:
            self.output = map_tensors(result, lambda _: TENSOR)
            return tuple(tensors_in(result))
        # A value that only passes through is a new one to autograd, for this stage may read it as well.
        values = map_tensors(values, lambda tensor: tensor.view_as(tensor))
        values.update(zip(self.part.gives, result, strict=True))
        return tuple(tensor.contiguous() for name in self.gives for tensor in tensors_in(values[name]))

    def whole_output(self, tensors: Sequence[Tensor]) -> Any:
        """The network's output of its tensors."""
        return _fill(self.output, iter(tensors))


class Stages:
    """What one rank does in a pipeline.

    stages: those of this rank, in order. owner: of each stage of the pipeline, the place in the group.
    group: the ranks of one pipeline.
    device: of this rank. schedule: torch's name of one, such as 1F1B.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        owner: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        schedule: str,
    ) -> None:
        self.stages, self.owner, self.group, self.device = tuple(stages), tuple(owner), group, device
        self.schedule = schedule
        self.has_output = self.stages[-1].is_last
        self._schedules: dict[Shape, _Scheduled] = {}

    def shared(self, value: Data) -> Data:
        """What the rank with the network's output gives, on every rank of the pipeline; each must call it."""
        found = [value]
        source = dist.get_global_rank(self.group, self.owner[-1])
        dist.broadcast_object_list(found, src=source, group=self.group, device=self.device)
        return found[0]

    def train(self, inputs: Sequence[Inputs], loss: Callable[[Any, int], tuple[Tensor, Note]]) -> list[Note]:
        """Forward and backward of all micro-batches; the gradients are added up in the parameters.

        inputs: the network's, of each micro-batch.
        loss: of an output and the number of its micro-batch: the value to go backward from, 0-d, and anything else.
        Returns: that anything, of each micro-batch, on the rank that has the output; nothing elsewhere.
        """
        key = (len(inputs), _shapes(inputs[0]))
        scheduled = self._schedules.pop(key, None) or _Scheduled(self, len(inputs))
        self._schedules[key] = scheduled
        while len(self._schedules) > KEPT:
            self._schedules.pop(next(iter(self._schedules)))
        return scheduled.step(inputs, loss)

    def evaluate(self, inputs: Inputs) -> Any:
        """Return the network's output for a whole batch, on the rank that has the output; None elsewhere.

        Stage after stage computes. A rank that has sent its output may begin the next batch.
        """
        place = dist.get_rank(self.group)
        tensors: tuple[Tensor, ...] = ()
        for stage in self.stages:
            if stage.index and (source := self.owner[stage.index - 1]) != place:
                found: list[Any] = [None]
                source = dist.get_global_rank(self.group, source)
                dist.recv_object_list(found, src=source, group=self.group, device=self.device)
                tensors = move_tensors(found[0], self.device)
            tensors = stage.run(tensors, inputs)
            if not stage.is_last and (target := self.owner[stage.index + 1]) != place:
                target = dist.get_global_rank(self.group, target)
                # By way of the CPU, because a pickled tensor names the device of its rank.
                dist.send_object_list([move_tensors(tensors, CPU)], dst=target, group=self.group, device=self.device)
        return self.stages[-1].whole_output(tensors) if self.has_output else None


class _Scheduled:
    """A schedule of torch's for micro-batches of one shape."""

    def __init__(self, stages: Stages, count: int) -> None:
        self.count = count
        self.inputs: Sequence[Inputs] = ()
        self.loss: Callable[[Any, int], tuple[Tensor, object]] | None = None
        self.notes: dict[int, object] = {}
        self.modules = [_StageModule(stage, self) for stage in stages.stages]
        made = [
            PipelineStage(module, module.stage.index, len(stages.owner), stages.device, group=stages.group)
            for module in self.modules
        ]
        kind = get_schedule_class(stages.schedule)
        # The loss is weighted already: of unequal micro-batches torch's own mean would not be the batch's.
        single = issubclass(kind, PipelineScheduleSingle)
        self.schedule = kind(made[0] if single else made, count, loss_fn=self._loss, scale_grads=False)

    def step(self, inputs: Sequence[Inputs], loss: Callable[[Any, int], tuple[Tensor, Note]]) -> list[Note]:
        self.inputs, self.loss, self.notes = inputs, loss, {}
        numbers = torch.arange(self.count)
        last = self.modules[-1].stage.is_last
        try:
            self.schedule.step(number=numbers, target=numbers if last else None, return_outputs=False)
        finally:
            self.inputs, self.loss = (), None
        # By number: what torch's look at the first one left was overwritten by its real turn.
        return [cast(Note, self.notes[number]) for number in sorted(self.notes)]

    def _loss(self, output: Tensor | tuple[Tensor, ...], number: Tensor) -> Tensor:
        assert self.loss is not None
        tensors = output if isinstance(output, tuple) else (output,)
        place = int(number)
        loss, self.notes[place] = self.loss(self.modules[-1].stage.whole_output(tensors), place)
        return loss


class _StageModule(nn.Module):
    """A stage as torch's schedules call it."""

    stage: Stage
    scheduled: _Scheduled

    def __init__(self, stage: Stage, scheduled: _Scheduled) -> None:
        super().__init__()
        self.__dict__["stage"], self.__dict__["scheduled"] = stage, scheduled
        self._is_inferring = True

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's own; the network's other layers are no submodules of this."""
        return iter(self.stage.parameters)

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        inputs = self.scheduled.inputs[int(number)]
        for tensor in received:
            if tensor.requires_grad:  # gloo sends no gradient that is a view, such as that of a part of torch.cat
                tensor.register_hook(Tensor.contiguous)
        if not self._is_inferring:
            return self.stage.run(received, inputs)
        self._is_inferring = False
        # To see the shapes: a running statistic must not count these samples twice, so that copies are counted in.
        network, names = self.stage.network, self.stage.buffers
        before = {name: network.get_buffer(name) for name in names}
        set_buffers(network, {name: buffer.clone() for name, buffer in before.items()})
        try:
            return self.stage.run(received, inputs)
        finally:
            set_buffers(network, before)


def set_buffers(network: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Puts other tensors in the place of buffers, by their full names."""
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, buffer)


def _shapes(inputs: Inputs) -> Shape:
    return tuple((name, tuple((t.shape, t.dtype) for t in tensors_in(value))) for name, value in inputs.items())


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Generic[Data]):
    """One of a share's micro-batches, all of the same size, as a schedule needs them.

    data: as the share's, sliced. size: how many of its samples are the share's own; the others repeat its last one and
    count for nothing.
    """

    data: Data
    size: int


def count_micro_batches(
    wish: int | Literal["auto"], *, batch_size: int, ranks: int, least: int, multiple_of: int
) -> int:
    """Micro-batches of a rank's share of `batch_size` samples.

    wish: `auto` takes the largest number that cuts the share without a rest, up to 4 a rank of the pipeline.
    least, multiple_of: what the schedule asks for.
    """
    if wish != "auto":
        return wish
    most = max(WISH * ranks, least)
    fitting = [count for count in range(least, most + 1) if count % multiple_of == 0]
    even = [count for count in fitting if batch_size % count == 0]
    return even[-1] if even else fitting[0]


def split_micro_batches(data: Data, *, size: int, count: int) -> list[MicroBatch[Data]]:
    """`size` samples in `count` micro-batches of one size. Where they do not come out even, the last ones are filled
    up with the last sample."""
    each = -(-size // count)
    found = []
    for place in range(count):
        start = min(place * each, size)
        stop = min(start + each, size)
        found.append(MicroBatch(data=_slice(data, start=start, stop=stop, size=size, each=each), size=stop - start))
    return found


def keep_samples(output: Data, size: int) -> Data:
    """The first `size` samples of an output."""
    return map_tensors(output, lambda tensor: tensor[:size] if tensor.dim() else tensor)


def _fill(kind: object, tensors: Iterator[Tensor]) -> Any:
    """A value of this structure, with the next of the tensors in the place of each of its own."""
    return map_tensors(kind, lambda _: next(tensors))


def _slice(data: Data, *, start: int, stop: int, size: int, each: int) -> Data:
    def sliced(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        piece = tensor[start:stop]
        missing = each - (stop - start)
        return torch.cat([piece, tensor[size - 1 :].expand(missing, *tensor.shape[1:])]) if missing else piece

    return map_tensors(data, sliced)
