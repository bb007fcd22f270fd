"""Distributed data parallel: a copy of the network in every rank, gradients averaged while backward runs.

communication_hook sends gradients in fewer bytes:
bf16, fp16   each bucket is sent in that dtype. As torch's default_hooks, whose bf16 DistributedDataParallel refuses
             unless the backend is NCCL; gloo adds bfloat16 as well (seen in torch 2.13).
powersgd     each matrix is sent as two of low rank, and what was lost is added to the next step's gradients (Vogels et
             al. 2019, torch's powerSGD_hook).
ring         as they are, from neighbour to neighbour (exp.strategies.ring_all_reduce), which logs what it sends.

local_sgd takes steps without communication, and averages the weights every so many of them. With all ranks' gradients
averaged at every step there is one trajectory; here each rank has its own between two averagings (Lin et al. 2018,
arXiv:1808.07217, post-local SGD; torch's post_localSGD_hook and PeriodicModelAverager).
"""

# No postponed annotations: DistributedDataParallel compares those of a hook with the classes themselves.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not name it
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from exp.errors import Fault, RunError
from exp.models.partition import Patterns
from exp.precision.words import WORDS
from exp.shared_types import Batch
from exp.spelling import show
from exp.strategies.batch_norm import Share, batch_norm_faults, join_statistics, part_statistics
from exp.strategies.footprint import Footprint, Load, Place, Transfer, all_reduce, averaged, gather, whole
from exp.strategies.gradient_averaging import average_tensors, broadcast_buffers, broadcast_state
from exp.strategies.layer_split import (
    MEETS,
    Layers,
    LayerSplitStrategy,
    OverDevices,
    device_places,
    inner_split,
    split_faults,
)
from exp.strategies.placement import CPU_RANKS, DEFAULT_DEMAND, Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.ring_all_reduce import Ring
from exp.strategies.strategy import Blueprint, Strategy, module_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """How `communication_hook: powersgd` compresses; torch's PowerSGDState, under names of exp.

    rank: of the two matrices that stand for one; more is closer and costs more.
    start_step: optimizer steps with whole gradients before the first compressed one.
    min_compression_rate: a matrix that would not shrink by this factor is sent whole.
    error_feedback: what was lost in one step is added to the next one's gradients.
    warm_start: a step begins with the matrices of the last.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Steps without communication.

    every_n_steps: optimizer steps between two averagings of the weights; None is no local SGD.
    start_step: optimizer steps of ordinary ddp before the first local one.
    within_node: the gradients are still averaged among the ranks of each node, at every step.
    average_optimizer_state: momenta are averaged with the weights, so that a run resumes exactly.
    """

    every_n_steps: int | None = None
    start_step: int = 0
    within_node: bool = False
    average_optimizer_state: bool = True


# Options of ddp that tell DistributedDataParallel's reducer what to do, and their defaults.
OF_THE_REDUCER = {
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "bucket_cap_mb": None,
}


class DDP(Strategy):
    """The options are those of torch.nn.parallel.DistributedDataParallel, under its names, and some around it.

    find_unused_parameters: search the graph for parameters without a gradient at every step.
    gradient_as_bucket_view: gradients are views of the buckets that are sent, and take their memory once.
    static_graph: every step uses the same parameters in the same order.
    broadcast_buffers: rank 0's buffers go to all ranks before each forward; False: before each validation, checkpoint
        and test.
    bucket_cap_mb: size of a bucket in MiB; None is torch's default.
    sync_batchnorm: batch normalisation over the global batch, not over each rank's share.
    communication_hook: how gradients are sent: None as they are, fp16, bf16, powersgd, ring.
    powersgd: the options of that hook. local_sgd: steps without communication.
    inner: `layer_split` lays the network of each rank over several devices; None has it on one.
    devices_per_rank, layers: of that split, see exp.strategies.layer_split; None is one device for each of `layers`,
        or two.
    """

    steps_once = False

    def __init__(
        self,
        *,
        name: str = "ddp",
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        communication_hook: Literal["fp16", "bf16", "powersgd", "ring"] | None = None,
        powersgd: PowerSGD | None = None,
        local_sgd: LocalSGD | None = None,
        inner: Literal["layer_split"] | None = None,
        devices_per_rank: Annotated[int, Ge(2)] | None = None,
        layers: Layers | None = None,
    ) -> None:
        super().__init__(name=name)
        self.inner = inner_split(inner, devices_per_rank=devices_per_rank, layers=layers)
        self.splits_devices = self.inner is not None
        self.meets = MEETS if self.splits_devices else frozenset()
        self.options = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.sync_batchnorm = sync_batchnorm
        self.communication_hook = communication_hook
        self.powersgd = powersgd or PowerSGD()
        self.local_sgd = local_sgd or LocalSGD()
        self.averages_between_steps = self.local_sgd.every_n_steps is not None

    @property
    def demand(self) -> Demand:
        """One device a rank, or those of its layers; a machine without a GPU tries two ranks."""
        if self.inner is None:
            return DEFAULT_DEMAND
        return Demand(dimensions=Dimensions(devices=self.inner.devices), cpu_devices=CPU_RANKS * self.inner.devices)

    def faults(self, planned: Blueprint) -> Sequence[Fault]:
        """Options that contradict each other, the network or the machine."""
        faults = [*self._contradictions(planned), *self._phase_faults(planned)]
        faults += batch_norm_faults(planned, sync_batchnorm=self.sync_batchnorm)
        if self.inner is not None:
            faults += split_faults(planned, count=self.inner.devices, layers=self.inner.layers)
        return faults

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Lightning's DDPStrategy with these options."""
        if self.inner is None:
            return ExpDDPStrategy(placement=placement, options=self)
        devices, layers = placement.devices(rank.local_rank), self.inner.layers
        if placement.world_size == 1:
            return LayerSplitStrategy(devices=devices, layers=layers)
        return SplitDDPStrategy(devices=devices, layers=layers, placement=placement, options=self)

    def footprint(self, load: Load) -> Footprint:
        """A copy a rank. Where gradients are no views of the buckets that are sent, these are there as well."""
        ranks = tuple(range(load.placement.world_size))
        is_alone, sizes = len(ranks) == 1, load.gradient_bytes
        buffers = {} if is_alone or self.options["gradient_as_bucket_view"] else {"buckets of gradients": sizes}
        if self.inner is None:
            places = [Place(ranks=ranks, held=whole(load), buffers=buffers)]
        else:
            places = device_places(load, count=self.inner.devices, layers=self.inner.layers, ranks=ranks)
        if is_alone:
            return Footprint(places=places)
        transfers, notes = self._transfers(load)
        if load.buffers and self.options["broadcast_buffers"] and not self.averages_between_steps:
            sent = gather(load.buffers, len(ranks)) * load.micro_batches
            transfers.append(Transfer(what="broadcast of buffers", sent=sent, over=len(ranks)))
        return Footprint(places=places, transfers=transfers, notes=tuple(notes))

    def _transfers(self, load: Load) -> tuple[list[Transfer], list[str]]:
        """Of gradients, or of weights where ranks step by themselves."""
        ranks, every = load.placement.data_ranks, self.local_sgd.every_n_steps
        if every is not None:
            sent = all_reduce(load.gradient_bytes, ranks) / every
            return [Transfer(what=f"all-reduce of weights, every {every} steps", sent=sent, over=ranks)], []
        if self.communication_hook == "powersgd":
            found = averaged(load, factor=_powersgd_share(load, self.powersgd))
            return found, [f"powersgd sends so little behind step {self.powersgd.start_step}, and all of it before"]
        if self.communication_hook is None:
            return averaged(load), []
        largest = max((one.itemsize for one in load.sizes.values() if one.learns), default=2)
        return averaged(load, factor=2 / largest), []

    def _contradictions(self, planned: Blueprint) -> Iterator[Fault]:
        is_local = self.local_sgd.every_n_steps is not None
        if self.options["static_graph"] and self.options["find_unused_parameters"]:
            yield Fault(
                key="strategy.static_graph",
                got="true with find_unused_parameters",
                expected="one of the two: a static graph finds unused parameters once",
                cure="Write strategy.find_unused_parameters=false",
            )
        if is_local and self.communication_hook is not None:
            yield Fault(
                key="strategy.communication_hook",
                got=f"{self.communication_hook} with local_sgd",
                expected="null: local steps send no gradients",
            )
        if is_local and WORDS[planned.precision].compute is torch.float16:
            yield Fault(
                key="strategy.local_sgd",
                got=f"local steps with precision={planned.precision}",
                expected="bf16 or fp32: each rank would have a loss scale of its own",
                cure="Write precision=bf16",
            )
        if is_local and self.sync_batchnorm:
            yield Fault(
                key="strategy.sync_batchnorm",
                got="true with local_sgd",
                expected="false: it makes ranks talk at every layer of every step",
            )
        if self.inner is not None and (is_local or self.communication_hook is not None):
            key = "local_sgd" if is_local else "communication_hook"
            got, expected = f"{key} with inner=layer_split", "neither: torch has them for networks on one device"
            yield Fault(key=f"strategy.{key}", got=got, expected=expected)
        yield from self._powersgd_faults(planned)

    def _phase_faults(self, planned: Blueprint) -> Iterator[Fault]:
        """Phases average their gradients after each backward themselves, without ddp's reducer."""
        if not planned.config["phases"] or planned.placement.world_size == 1:
            return
        taken = {
            "communication_hook": self.communication_hook is not None,
            "local_sgd.every_n_steps": self.local_sgd.every_n_steps is not None,
            "sync_batchnorm": self.sync_batchnorm,
        }
        for key in (key for key, is_set in taken.items() if is_set):
            yield Fault(
                key=f"strategy.{key}",
                got="set, with phases, which average their gradients after each backward themselves",
                expected="false" if key == "sync_batchnorm" else "null",
            )
        for key, default in OF_THE_REDUCER.items():
            if self.options[key] != default:
                yield Fault(
                    key=f"strategy.{key}",
                    got=f"{show(self.options[key])}, with phases, which run without ddp's reducer",
                    expected=f"{show(default)}: it would do nothing",
                )

    def _powersgd_faults(self, planned: Blueprint) -> Iterator[Fault]:
        if self.communication_hook != "powersgd":
            return
        if planned.placement.accelerator == "cpu" and torch.cuda.is_available():
            yield Fault(
                key="strategy.communication_hook",
                got="powersgd on cpu ranks of a machine with a GPU",
                expected="bf16, fp16 or null: torch's hook waits for the GPU",
            )


def _powersgd_share(load: Load, options: PowerSGD) -> float:
    """The numbers that are sent, of all: two matrices of the rank for one of n by m (Vogels et al. 2019)."""
    sent = count = 0
    for one in load.sizes.values():
        if one.learns:
            rows = one.shape[0] if one.shape else 1
            small = options.rank * (rows + one.count // max(rows, 1))
            is_small = len(one.shape) > 1 and small * options.min_compression_rate < one.count
            sent, count = sent + (small if is_small else one.count), count + one.count
    return sent / max(count, 1)


class ExpDDPStrategy(DDPStrategy):
    """Wraps the module in DistributedDataParallel, but for one that averages its own gradients.

    Of that one, parameters and buffers start as rank 0's, and nothing else is done: DistributedDataParallel's reducer
    counts one backward a forward, which phases with several do not keep.

    broadcasts_buffers: whether rank 0's buffers go to all ranks before each forward; of phases, before each step.
    The other parameters are those of exp.strategies.ddp.DDP. Lightning registers a communication hook on CUDA alone,
    so it is done here.

    Relied on, and tested: `configure_ddp` is where Lightning wraps, and a module that it leaves unwrapped is called as
    it is; a batch is the first argument of `training_step` (seen in lightning 2.6.6).
    """

    def __init__(self, *, placement: Placement, options: DDP) -> None:
        is_local = options.local_sgd.every_n_steps is not None
        # In local SGD they are averaged with the weights, and sent at no other time.
        self.broadcasts_buffers = bool(options.options["broadcast_buffers"]) and not is_local
        of_torch: dict[str, Any] = {**options.options, "broadcast_buffers": self.broadcasts_buffers}
        super().__init__(process_group_backend=placement.backend, **of_torch)
        self._placement, self._options = placement, options
        self._share = Share() if options.sync_batchnorm else None
        self._classes_before: dict[nn.Module, type[nn.Module]] = {}
        self._local: LocalSteps | None = None
        self._ring = Ring()
        self._waits_for_a_graph = bool(options.options["static_graph"])

    def configure_ddp(self) -> None:
        """Raises: RunError where the module averages its own gradients, and an option is about how ddp does it."""
        module, options = module_of(self), self._options
        if self._share is not None and not self._classes_before:
            self._classes_before = join_statistics(module, self._share, device_type=self.root_device.type)
        is_local = options.local_sgd.every_n_steps is not None
        # A LightningModule that is not exp's own says nothing of it.
        if getattr(module, "averages_gradients", False):
            if is_local or options.communication_hook is not None:
                raise RunError(
                    f"{type(module).__name__} averages its gradients itself; expected neither "
                    "strategy.communication_hook nor strategy.local_sgd: leave them null"
                )
            broadcast_state(module)
            return
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if options.communication_hook is not None:
            compress(self.model, options, steps_done=lambda: module.trainer.global_step, ring=self._ring)
        if is_local:
            self._local = LocalSteps(options.local_sgd, node_group=self._node_group())
            self.model.register_comm_hook(self._local, _unless_local)

    @property
    def is_plain(self) -> bool:
        """Whether a step has nothing of it but DistributedDataParallel: neither local steps nor shared statistics.

        Relied on, and tested: Lightning's `_model_averager` is None but for its own post-local SGD (lightning 2.6.6).
        """
        return self._local is None and self._share is None and self._model_averager is None

    def training_step(self, batch: Batch, *arguments: object, **named: object) -> STEP_OUTPUT:
        if self._share is not None:
            # Of a module of the user's own the batch is the data set's.
            self._share.counts = not isinstance(batch, Batch) or batch.size > 0
        if self._local is not None:
            self._local.begin_step(module_of(self).trainer.global_step)
        return super().training_step(batch, *arguments, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of accumulated batches stay here until the last of them.

        A static graph has to see one backward with its collectives before one without (an internal assertion of torch
        2.13 otherwise): the run's first batch is sent, which gives the same sum.
        """
        if self._waits_for_a_graph:
            self._waits_for_a_graph = False
            yield
        else:
            with super().block_backward_sync():
                yield

    def optimizer_step(self, *arguments: Any, **named: Any) -> object:
        output = super().optimizer_step(*arguments, **named)
        if self._local is not None:
            # Lightning counts this step once it is done.
            step = module_of(self).trainer.global_step + 1
            self._local.end_step(step, module_of(self), self.optimizers)
        return output

    def on_validation_start(self) -> None:
        self._agree()

    def on_test_start(self) -> None:
        self._agree()

    def on_train_end(self) -> None:
        self._meet()
        self._ring.tell()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All ranks' weights and buffers, the same in each: what a checkpoint holds. Every rank must call it."""
        self._agree()
        return super().lightning_module_state_dict()

    def teardown(self) -> None:
        super().teardown()
        part_statistics(self._classes_before)
        self._classes_before = {}

    def _agree(self) -> None:
        """Makes weights and buffers one: local SGD averages them, and buffers are rank 0's otherwise."""
        self._meet()
        broadcast_buffers(module_of(self), are_saved_only=not self.broadcasts_buffers)

    def _meet(self) -> None:
        if self._local is not None:
            self._local.meet(module_of(self), self.optimizers)

    def _node_group(self) -> dist.ProcessGroup | None:
        """The ranks of this node, where they average their gradients at every step."""
        if not self._options.local_sgd.within_node or self._placement.ranks_per_node == 1:
            return None
        new_subgroups: Callable[[int], tuple[dist.ProcessGroup, object]] = dist.new_subgroups
        return new_subgroups(self._placement.ranks_per_node)[0]


class SplitDDPStrategy(OverDevices, ExpDDPStrategy):
    """Ranks that average their gradients, each with a network on several devices.

    DistributedDataParallel takes such a module without device_ids.
    """

    def __init__(self, *, devices: Sequence[str], layers: Patterns | None, placement: Placement, options: DDP) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = layers
        ExpDDPStrategy.__init__(self, placement=placement, options=options)

    @property
    def root_device(self) -> torch.device:
        return self.devices[-1]

    def determine_ddp_device_ids(self) -> list[int] | None:
        return None


class LocalSteps:
    """Knows at which step ranks are on their own, and brings them together again.

    node_group: ranks whose gradients are averaged at every step all the same; None where each is on its own.
    """

    def __init__(self, options: LocalSGD, *, node_group: dist.ProcessGroup | None) -> None:
        self.options, self.node_group = options, node_group
        self.is_local = False
        self._is_apart = False

    def begin_step(self, step: int) -> None:
        """step: how many optimizer steps of the run are done."""
        self.is_local = step >= self.options.start_step

    def end_step(self, step: int, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """step: how many are done now, this one counted."""
        self._is_apart = self._is_apart or self.is_local
        assert self.options.every_n_steps is not None
        if self.is_local and (step - self.options.start_step) % self.options.every_n_steps == 0:
            self.meet(module, optimizers)

    def meet(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Makes all ranks one again, where they are apart. Every rank must call it."""
        if not self._is_apart:
            return
        self._is_apart = False
        tensors: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        tensors += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        if self.options.average_optimizer_state:
            tensors += [tensor for optimizer in optimizers for tensor in _state(optimizer)]
        average_tensors([tensor.detach() for tensor in tensors])


def _unless_local(steps: LocalSteps, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages gradients over all ranks, and in local steps over the node's or not at all."""
    buffer: Tensor = bucket.buffer()
    group = steps.node_group if steps.is_local else dist.group.WORLD
    if group is None:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    return _added_up(buffer.div_(dist.get_world_size(group)), group, then=lambda total: total)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Momenta and the like, in an order that all ranks share; not the counts of steps, which are equal already."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in sorted(state):
                value = state[name]
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield value


class LowRank:
    """PowerSGD's state, made when the run's position is known: a resumed run does not begin with whole gradients."""

    def __init__(self, options: PowerSGD, steps_done: Callable[[], int]) -> None:
        self._options, self._steps_done = options, steps_done
        self._state: PowerSGDState | None = None

    @property
    def state(self) -> PowerSGDState:
        if self._state is None:
            options = self._options
            # torch counts from 0 in each process, and needs two full steps before error feedback can begin.
            self._state = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options.rank,
                start_powerSGD_iter=max(2, options.start_step - self._steps_done()),
                min_compression_rate=options.min_compression_rate,
                use_error_feedback=options.error_feedback,
                warm_start=options.warm_start,
            )
        return self._state


def compress(wrapped: DistributedDataParallel, options: DDP, *, steps_done: Callable[[], int], ring: Ring) -> None:
    """Registers the communication hook that the options name.

    steps_done: how many steps of the run are done, asked when the first gradients are there. ring: counts for `ring`.
    """
    if options.communication_hook == "ring":
        wrapped.register_comm_hook(ring, _around)
    elif options.communication_hook == "powersgd":
        wrapped.register_comm_hook(LowRank(options.powersgd, steps_done), _in_low_rank)
    elif options.communication_hook is not None:
        wrapped.register_comm_hook(DTYPES[options.communication_hook], _in_dtype)


def _in_dtype(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    # Divided before they are added: float16 overflows less.
    return _added_up(buffer.to(dtype).div_(dist.get_world_size()), dist.group.WORLD, then=buffer.copy_)


def _around(ring: Ring, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    ring.average(buffer, index=bucket.index(), is_last=bucket.is_last())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _in_low_rank(low_rank: LowRank, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return powerSGD_hook(low_rank.state, bucket)


def _added_up(
    sent: Tensor, group: dist.ProcessGroup | None, *, then: Callable[[Tensor], Tensor]
) -> torch.futures.Future[Tensor]:
    """What `then` makes of the sum over a group's ranks, once it is there."""
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda future: then(future.value()[0]))
    return found
