"""The stages of one rank of a pipeline, and how micro-batches run through them.

Training uses a schedule of torch.distributed.pipelining for each shape of micro-batches, because its buffers have fixed
sizes. Evaluation runs the forward stage by stage: torch 2.13 has no forward of the V schedules.

Every rank of a pipeline has the batch, so the batch is not sent. torch passes the number of a micro-batch to a stage,
which looks up the inputs. The values that later stages read are sent.

Relied on, and tested: before the first micro-batch, torch infers what a new schedule sends from one forward of each
stage and one call of the loss (`PipelineStage` in dynamic mode, torch 2.13). They have no effect here.
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
# Largest number of schedules that are kept with their buffers.
KEPT = 8
# Micro-batches per rank: the GPipe paper finds little idle time from 4 on (Huang 2019, section 2.3).
WISH = 4


class Stage:
    """A part of the network, as a function of the tensors that are sent to it.

    Args:
        around: Context of a forward, such as autocast.
    """

    def __init__(self, network: nn.Module, split: Split, index: int, *, around: Context) -> None:
        self.network, self.split, self.index, self.around = network, split, index, around
        self.part: Part = split.parts[index]
        self.takes = split.values_after(index - 1) if index else ()
        self.gives = split.values_after(index)
        self.is_last = index == len(split.parts) - 1
        # Structure of the network's output, known after the first forward.
        self.output: object = None
        own = set(self.part.tensors)
        self.parameters = [parameter for name, parameter in network.named_parameters() if name in own]
        self.buffers = [name for name, _ in network.named_buffers() if name in own]

    def run(self, received: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the tensors that later stages read, or those of the network's output from the last stage."""
        tensors = iter(received)
        values: dict[str, object] = {name: _fill(self.split.values[name], tensors) for name in self.takes}
        read = [inputs[name] for name in self.part.inputs] + [values[name] for name in self.part.takes]
        with self.around():
            result = self.part.run(self.network, *read)
        if self.is_last:
            self.output = map_tensors(result, lambda _: TENSOR)
            return tuple(tensors_in(result))
        # A value that is only passed on becomes a new tensor for autograd: this stage may read it as well.
        values = map_tensors(values, lambda tensor: tensor.view_as(tensor))
        values.update(zip(self.part.gives, result, strict=True))
        return tuple(tensor.contiguous() for name in self.gives for tensor in tensors_in(values[name]))

    def whole_output(self, tensors: Sequence[Tensor]) -> Any:
        """Return the network's output with these tensors."""
        return _fill(self.output, iter(tensors))


class Stages:
    """A rank of a pipeline.

    Args:
        stages: Stages of this rank, in order.
        owner: Index in the group of the rank of each stage of the pipeline.
        group: Ranks of the pipeline.
        device: Device of this rank.
        schedule: torch's name of the schedule, such as 1F1B.
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
        """Return the value of the rank with the network's output. Every rank of the pipeline must call it."""
        found = [value]
        source = dist.get_global_rank(self.group, self.owner[-1])
        dist.broadcast_object_list(found, src=source, group=self.group, device=self.device)
        return found[0]

    def train(self, inputs: Sequence[Inputs], loss: Callable[[Any, int], tuple[Tensor, Note]]) -> list[Note]:
        """Run the forwards and backwards of all micro-batches, and add the gradients up in the parameters.

        Args:
            inputs: Inputs of the network for each micro-batch.
            loss: Maps an output and the number of its micro-batch to a loss, 0-d, and a note.

        Returns:
            The notes of all micro-batches on the rank with the network's output; nothing on other ranks.
        """
        key = (len(inputs), _shapes(inputs[0]))
        scheduled = self._schedules.pop(key, None) or _Scheduled(self, len(inputs))
        self._schedules[key] = scheduled
        while len(self._schedules) > KEPT:
            self._schedules.pop(next(iter(self._schedules)))
        return scheduled.step(inputs, loss)

    def evaluate(self, inputs: Inputs) -> Any:
        """Return the network's output for a whole batch on the rank with the last stage, and None on other ranks.

        The stages run one after another. A rank that has sent its output may start the next batch.
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
                # Sent from the CPU, because a pickled tensor names the device of its rank.
                dist.send_object_list([move_tensors(tensors, CPU)], dst=target, group=self.group, device=self.device)
        return self.stages[-1].whole_output(tensors) if self.has_output else None


class _Scheduled:
    """A schedule of torch, for micro-batches of one shape."""

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
        # The loss is weighted already: torch's mean over unequal micro-batches would not be the batch's.
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
        # By number: the note of torch's inference was overwritten by the real first micro-batch.
        return [cast(Note, self.notes[number]) for number in sorted(self.notes)]

    def _loss(self, output: Tensor | tuple[Tensor, ...], number: Tensor) -> Tensor:
        assert self.loss is not None
        tensors = output if isinstance(output, tuple) else (output,)
        place = int(number)
        loss, self.notes[place] = self.loss(self.modules[-1].stage.whole_output(tensors), place)
        return loss


class _StageModule(nn.Module):
    """A stage in the form that torch's schedules call."""

    stage: Stage
    scheduled: _Scheduled

    def __init__(self, stage: Stage, scheduled: _Scheduled) -> None:
        super().__init__()
        self.__dict__["stage"], self.__dict__["scheduled"] = stage, scheduled
        self._is_inferring = True

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stage: the network is no submodule."""
        return iter(self.stage.parameters)

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        inputs = self.scheduled.inputs[int(number)]
        for tensor in received:
            if tensor.requires_grad:  # gloo cannot send a gradient that is a view, such as that of torch.cat
                tensor.register_hook(Tensor.contiguous)
        if not self._is_inferring:
            return self.stage.run(received, inputs)
        self._is_inferring = False
        # torch infers the shapes. Running statistics must not count these samples twice, so copies are updated.
        network, names = self.stage.network, self.stage.buffers
        before = {name: network.get_buffer(name) for name in names}
        set_buffers(network, {name: buffer.clone() for name, buffer in before.items()})
        try:
            return self.stage.run(received, inputs)
        finally:
            set_buffers(network, before)


def set_buffers(network: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Replace buffers by their full names."""
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, buffer)


def _shapes(inputs: Inputs) -> Shape:
    return tuple((name, tuple((t.shape, t.dtype) for t in tensors_in(value))) for name, value in inputs.items())


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Generic[Data]):
    """A micro-batch of a share. All of them have the same size, as a schedule needs.

    Attributes:
        data: A slice of the share's data.
        size: Samples that count; the others repeat the last sample.
    """

    data: Data
    size: int


def count_micro_batches(
    wish: int | Literal["auto"], *, batch_size: int, ranks: int, least: int, multiple_of: int
) -> int:
    """Return the number of micro-batches of a rank's share of `batch_size` samples.

    Args:
        wish: The number, or `auto` for the largest one that divides the share, up to 4 per rank of the pipeline.
        least: Smallest number that the schedule supports.
        multiple_of: Divisor of the number that the schedule needs.
    """
    if wish != "auto":
        return wish
    most = max(WISH * ranks, least)
    fitting = [count for count in range(least, most + 1) if count % multiple_of == 0]
    even = [count for count in fitting if batch_size % count == 0]
    return even[-1] if even else fitting[0]


def split_micro_batches(data: Data, *, size: int, count: int) -> list[MicroBatch[Data]]:
    """Return `size` samples in `count` micro-batches of one size. The last ones may repeat the last sample."""
    each = -(-size // count)
    found = []
    for place in range(count):
        start = min(place * each, size)
        stop = min(start + each, size)
        found.append(MicroBatch(data=_slice(data, start=start, stop=stop, size=size, each=each), size=stop - start))
    return found


def keep_samples(output: Data, size: int) -> Data:
    """Return the first `size` samples of an output."""
    return map_tensors(output, lambda tensor: tensor[:size] if tensor.dim() else tensor)


def _fill(kind: object, tensors: Iterator[Tensor]) -> Any:
    """Return a value of this structure whose tensors are replaced by the next ones."""
    return map_tensors(kind, lambda _: next(tensors))


def _slice(data: Data, *, start: int, stop: int, size: int, each: int) -> Data:
    def cut_tensor(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        piece = tensor[start:stop]
        missing = each - (stop - start)
        return torch.cat([piece, tensor[size - 1 :].expand(missing, *tensor.shape[1:])]) if missing else piece

    return map_tensors(data, cut_tensor)
