"""Stages of one rank of a pipeline, and the functions that run micro-batches through the stages.

In training, a schedule of torch.distributed.pipelining runs the micro-batches. Each shape of micro-batches needs a
schedule, because the schedule's buffers have fixed sizes. Evaluation runs the forward of a whole batch stage by stage.

Every rank of a pipeline loads the batch, so that the batch is not sent between ranks. torch passes the number of a
micro-batch to each stage, and the stage selects its inputs by this number. Values that later stages need are sent.

Tested property of torch 2.13: before the first micro-batch, a new schedule runs one forward of each stage and one call
of the loss. From these calls, torch infers the shapes of the tensors to send (`PipelineStage` in dynamic mode). This
module makes sure that these calls change no state.
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

from exp.nested import map_tensors, move_tensors, tensors_in

if TYPE_CHECKING:
    from exp.models.partition import Part, Split

Data = TypeVar("Data")
Note = TypeVar("Note")
Inputs = Mapping[str, object]
Context = Callable[[], AbstractContextManager[object]]
Shape = tuple[object, ...]
CPU = torch.device("cpu")
# Placeholder for a tensor in the structure of the network's output.
TENSOR = torch.empty(0, device="meta")
# Maximum number of schedules that are kept in memory with their buffers.
KEPT = 8
# Number of micro-batches per rank that `auto` selects if possible. According to the GPipe paper, the idle time is small
# for 4 or more (Huang 2019, section 2.3).
WISH = 4


class Stage:
    """A part of the network as a function from tensors of earlier stages to tensors for later stages.

    Args:
        network: The network.
        split: Split of the network.
        index: Index of the stage in the pipeline.
        around: Function that returns a context for the forward, such as autocast.
    """

    def __init__(self, network: nn.Module, split: Split, index: int, *, around: Context) -> None:
        self.network, self.split, self.index, self.around = network, split, index, around
        self.part: Part = split.parts[index]
        self.takes = split.values_after(index - 1) if index else ()
        self.gives = split.values_after(index)
        self.is_last = index == len(split.parts) - 1
        # Structure of the network's output. The first forward sets this attribute.
        self.output: object = None
        own = set(self.part.tensors)
        self.parameters = [parameter for name, parameter in network.named_parameters() if name in own]
        self.buffers = [name for name, _ in network.named_buffers() if name in own]

    def run(self, received: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the tensors that later stages need. The last stage returns the tensors of the network's output."""
        tensors = iter(received)
        values: dict[str, object] = {name: _fill(self.split.values[name], tensors) for name in self.takes}
        read = [inputs[name] for name in self.part.inputs] + [values[name] for name in self.part.takes]
        with self.around():
            result = self.part.run(self.network, *read)
        if self.is_last:
            self.output = map_tensors(result, lambda _: TENSOR)
            return tuple(tensors_in(result))
        # A stage may both use a value and pass it on. In this case, autograd needs a separate tensor for the later
        # stages.
        values = map_tensors(values, lambda tensor: tensor.view_as(tensor))
        values.update(zip(self.part.gives, result, strict=True))
        return tuple(tensor.contiguous() for name in self.gives for tensor in tensors_in(values[name]))

    def whole_output(self, tensors: Sequence[Tensor]) -> Any:
        """Return the network's output, given the tensors in it."""
        return _fill(self.output, iter(tensors))


class Stages:
    """The stages of one rank of a pipeline.

    Args:
        stages: Stages of this rank, in order.
        owner: Index in the group of the rank that runs each stage, for all stages of the pipeline.
        group: Process group of the pipeline.
        device: Device of this rank.
        schedule: Name of the schedule in torch, such as 1F1B.
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

    def broadcast_output(self, value: Data) -> Data:
        """Return the value from the rank of the last stage on all ranks of the pipeline.

        Every rank of the pipeline must call this method.

        Args:
            value: Value to send. Only the value on the rank of the last stage is used.
        """
        found = [value]
        source = dist.get_global_rank(self.group, self.owner[-1])
        dist.broadcast_object_list(found, src=source, group=self.group, device=self.device)
        return found[0]

    def train(self, inputs: Sequence[Inputs], loss: Callable[[Any, int], tuple[Tensor, Note]]) -> list[Note]:
        """Run forward and backward of all micro-batches. The gradients are added to the parameters' gradients.

        Args:
            inputs: Inputs of the network for each micro-batch.
            loss: Function of an output and the number of its micro-batch. It returns the loss, 0-d, and an additional
                result.

        Returns:
            Additional results of all micro-batches, on the rank of the last stage. An empty list on other ranks.
        """
        key = (len(inputs), _shapes(inputs[0]))
        scheduled = self._schedules.pop(key, None) or _Scheduled(self, len(inputs))
        self._schedules[key] = scheduled
        while len(self._schedules) > KEPT:
            self._schedules.pop(next(iter(self._schedules)))
        return scheduled.step(inputs, loss)

    def evaluate(self, inputs: Inputs) -> Any:
        """Return the network's output for a whole batch on the rank of the last stage. Return None on other ranks.

        The stages run in sequence. After a rank has sent its tensors to the next rank, it may start the next batch.
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
                # The tensors are sent from the CPU, because a pickled tensor contains the device of its rank.
                dist.send_object_list([move_tensors(tensors, CPU)], dst=target, group=self.group, device=self.device)
        return self.stages[-1].whole_output(tensors) if self.has_output else None


class _Scheduled:
    """A torch schedule for micro-batches of one shape."""

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
        # torch does not scale the gradients, because the loss is already weighted. With micro-batches of different
        # sizes, torch's scaling would give another mean than that over the batch.
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
        # The results are stored by number, so that the first micro-batch overwrites the result of torch's shape
        # inference.
        return [cast(Note, self.notes[number]) for number in sorted(self.notes)]

    def _loss(self, output: Tensor | tuple[Tensor, ...], number: Tensor) -> Tensor:
        assert self.loss is not None
        tensors = output if isinstance(output, tuple) else (output,)
        place = int(number)
        loss, self.notes[place] = self.loss(self.modules[-1].stage.whole_output(tensors), place)
        return loss


class _StageModule(nn.Module):
    """Module that wraps a stage, because torch's schedules call modules."""

    stage: Stage
    scheduled: _Scheduled

    def __init__(self, stage: Stage, scheduled: _Scheduled) -> None:
        super().__init__()
        self.__dict__["stage"], self.__dict__["scheduled"] = stage, scheduled
        self._is_inferring = True

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stage. torch needs this method because the network is not a submodule."""
        return iter(self.stage.parameters)

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        inputs = self.scheduled.inputs[int(number)]
        for tensor in received:
            if tensor.requires_grad:  # gloo cannot send a gradient that is a view, such as that of torch.cat
                tensor.register_hook(Tensor.contiguous)
        if not self._is_inferring:
            return self.stage.run(received, inputs)
        self._is_inferring = False
        # torch infers the shapes in this call. Copies of the buffers are updated, because running statistics must not
        # count the samples twice.
        network, names = self.stage.network, self.stage.buffers
        before = {name: network.get_buffer(name) for name in names}
        set_buffers(network, {name: buffer.clone() for name, buffer in before.items()})
        try:
            return self.stage.run(received, inputs)
        finally:
            set_buffers(network, before)


def set_buffers(network: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Replace buffers of a network. The mapping contains the new buffers by their full names."""
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, buffer)


def _shapes(inputs: Inputs) -> Shape:
    return tuple((name, tuple((t.shape, t.dtype) for t in tensors_in(value))) for name, value in inputs.items())


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Generic[Data]):
    """A micro-batch of a rank's batch. All micro-batches have the same length, because a schedule requires it.

    Attributes:
        data: Slice of the batch's data.
        size: Number of samples of the batch in the slice. The other samples in the slice repeat the last sample.
    """

    data: Data
    size: int


def count_micro_batches(
    wish: int | Literal["auto"], *, batch_size: int, ranks: int, least: int, multiple_of: int
) -> int:
    """Return the number of micro-batches into which the samples of a rank are split.

    Args:
        wish: Number of micro-batches. `auto` selects the largest number that divides the samples evenly, up to 4 per
            rank of the pipeline.
        batch_size: Number of samples of the rank.
        ranks: Number of ranks of the pipeline.
        least: Smallest number of micro-batches that the schedule supports.
        multiple_of: Number by which the result must be divisible.
    """
    if wish != "auto":
        return wish
    most = max(WISH * ranks, least)
    fitting = [count for count in range(least, most + 1) if count % multiple_of == 0]
    even = [count for count in fitting if batch_size % count == 0]
    return even[-1] if even else fitting[0]


def split_micro_batches(data: Data, *, size: int, count: int) -> list[MicroBatch[Data]]:
    """Split the samples of a rank into micro-batches of equal length. The last ones may repeat the last sample.

    Args:
        data: The samples.
        size: Number of samples.
        count: Number of micro-batches.
    """
    each = -(-size // count)
    found = []
    for place in range(count):
        start = min(place * each, size)
        stop = min(start + each, size)
        found.append(MicroBatch(data=_slice(data, start=start, stop=stop, size=size, each=each), size=stop - start))
    return found


def keep_samples(output: Data, size: int) -> Data:
    """Return an output without the repeated samples, which follow the first `size` samples."""
    return map_tensors(output, lambda tensor: tensor[:size] if tensor.dim() else tensor)


def _fill(kind: object, tensors: Iterator[Tensor]) -> Any:
    """Return a value with the structure of `kind`. Its tensors are replaced by `tensors` in order."""
    return map_tensors(kind, lambda _: next(tensors))


def _slice(data: Data, *, start: int, stop: int, size: int, each: int) -> Data:
    def cut_tensor(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        piece = tensor[start:stop]
        missing = each - (stop - start)
        return torch.cat([piece, tensor[size - 1 :].expand(missing, *tensor.shape[1:])]) if missing else piece

    return map_tensors(data, cut_tensor)
