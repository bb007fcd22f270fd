"""Distributed data parallel: a copy of the network in every rank, gradients averaged while backward runs.

communication_hook sends gradients in fewer bytes:
bf16, fp16   each bucket is sent in that dtype. As torch's default_hooks, whose bf16 DistributedDataParallel refuses
             unless the backend is NCCL; gloo adds bfloat16 as well (seen in torch 2.13).
powersgd     each matrix is sent as two of low rank, and what was lost is added to the next step's gradients (Vogels et
             al. 2019, torch's powerSGD_hook).

local_sgd takes steps without communication, and averages the weights every so many of them. With all ranks' gradients
averaged at every step there is one trajectory; here each rank has its own between two averagings (Lin et al. 2018,
arXiv:1808.07217, post-local SGD; torch's post_localSGD_hook and PeriodicModelAverager).
"""

# No postponed annotations: DistributedDataParallel compares those of a hook with the classes themselves.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not name it
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from exp.errors import ErrorDetails
from exp.precision.words import WORDS
from exp.shared_types import Batch
from exp.spelling import show
from exp.strategies.batch_norm import Share, batch_norm_errors, join_statistics, part_statistics
from exp.strategies.footprint import Footprint, Load, Place, Transfer, all_reduce, averaged, gather, whole
from exp.strategies.gradient_averaging import average_tensors, broadcast_buffers, broadcast_state
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank
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
    """

    every_n_steps: int | None = None
    start_step: int = 0


class DDP(Strategy):
    """The options are those of torch.nn.parallel.DistributedDataParallel, under its names, and some around it.

    find_unused_parameters: search the graph for parameters without a gradient at every step.
    gradient_as_bucket_view: gradients are views of the buckets that are sent, and take their memory once.
    static_graph: every step uses the same parameters in the same order.
    broadcast_buffers: rank 0's buffers go to all ranks before each forward; False: before each validation, checkpoint
        and test.
    bucket_cap_mb: size of a bucket in MiB; None is torch's default.
    sync_batchnorm: batch normalisation over the global batch, not over each rank's share.
    communication_hook: how gradients are sent: None as they are, fp16, bf16, powersgd.
    powersgd: the options of that hook. local_sgd: steps without communication.
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
        communication_hook: Literal["fp16", "bf16", "powersgd"] | None = None,
        powersgd: PowerSGD | None = None,
        local_sgd: LocalSGD | None = None,
    ) -> None:
        super().__init__(name=name)
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

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Options that contradict each other, the network or the machine."""
        errors = [*self._contradictions(planned), *self._phase_errors(planned)]
        return [*errors, *batch_norm_errors(planned, sync_batchnorm=self.sync_batchnorm)]

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's DDPStrategy with these options."""
        return ExpDDPStrategy(placement=placement, options=self)

    def footprint(self, load: Load) -> Footprint:
        """Return a copy for each rank, and the buckets that are sent if gradients are not views of them."""
        count = load.placement.world_size
        has_buckets = count > 1 and not self.options["gradient_as_bucket_view"]
        buffers = {"buckets of gradients": load.gradient_bytes} if has_buckets else {}
        places = [Place(ranks=tuple(range(count)), held=whole(load), buffers=buffers)]
        if count == 1:
            return Footprint(places=places)
        transfers = self._transfers(load)
        if load.buffers and self.options["broadcast_buffers"] and not self.averages_between_steps:
            sent = gather(load.buffers, count) * load.micro_batches
            transfers.append(Transfer(what="broadcast of buffers", sent=sent, over=count))
        is_powersgd = self.communication_hook == "powersgd"
        notes = ("powersgd sends less: its gradients are counted whole",) if is_powersgd else ()
        return Footprint(places=places, transfers=transfers, notes=notes)

    def _transfers(self, load: Load) -> list[Transfer]:
        """Return the transfer of gradients, or of weights between two meetings of local SGD."""
        ranks, every = load.placement.data_ranks, self.local_sgd.every_n_steps
        if every is not None:
            sent = all_reduce(load.gradient_bytes, ranks) / every
            return [Transfer(what=f"all-reduce of weights, every {every} steps", sent=sent, over=ranks)]
        if self.communication_hook not in DTYPES:
            return averaged(load)
        largest = max((one.itemsize for one in load.sizes.values() if one.learns), default=2)
        return averaged(load, factor=2 / largest)

    def _contradictions(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        if self.options["static_graph"] and self.options["find_unused_parameters"]:
            yield ErrorDetails(
                key="strategy.static_graph",
                got="true with find_unused_parameters",
                expected="one of the two: a static graph finds unused parameters once",
                fix="Write strategy.find_unused_parameters=false",
            )
        if (
            self.communication_hook == "powersgd"
            and planned.placement.accelerator == "cpu"
            and torch.cuda.is_available()
        ):
            yield ErrorDetails(
                key="strategy.communication_hook",
                got="powersgd on CPU ranks of a machine with a GPU",
                expected="bf16, fp16 or null: PyTorch's hook waits for the GPU",
            )
        if not self.averages_between_steps:
            return
        if self.communication_hook is not None:
            yield ErrorDetails(
                key="strategy.communication_hook",
                got=f"{self.communication_hook} with local_sgd",
                expected="null: local steps send no gradients",
            )
        if WORDS[planned.precision].compute is torch.float16:
            yield ErrorDetails(
                key="strategy.local_sgd",
                got=f"local steps with precision={planned.precision}",
                expected="bf16 or fp32: each rank would have a loss scale of its own",
                fix="Write precision=bf16",
            )
        if self.sync_batchnorm:
            yield ErrorDetails(
                key="strategy.sync_batchnorm",
                got="true with local_sgd",
                expected="false: it makes ranks communicate at every layer of every step",
            )

    def _phase_errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        """Yield an error for each option of the gradient average: phases average without DistributedDataParallel."""
        if not planned.config["phases"] or planned.placement.world_size == 1:
            return
        defaults = DDP()._average_options()
        for key, value in self._average_options().items():
            if value != defaults[key]:
                yield ErrorDetails(
                    key=f"strategy.{key}",
                    got=f"{show(value)}, with phases, which average their gradients without it",
                    expected=show(defaults[key]),
                )

    def hook_errors(self, *, expected: str) -> list[ErrorDetails]:
        """Return an error for each option that needs a communication hook of DistributedDataParallel."""
        return [
            ErrorDetails(key=f"strategy.{key}", got=str(value), expected=expected)
            for key, value in self._hook_options().items()
            if value is not None
        ]

    def _hook_options(self) -> dict[str, str | int | None]:
        """Return the options that register a communication hook, None if they are off."""
        return {
            "communication_hook": self.communication_hook,
            "local_sgd.every_n_steps": self.local_sgd.every_n_steps,
        }

    def _average_options(self) -> dict[str, Any]:
        """Return the options of the average of gradients."""
        of_reducer = {key: value for key, value in self.options.items() if key != "broadcast_buffers"}
        return {**self._hook_options(), "sync_batchnorm": self.sync_batchnorm, **of_reducer}


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
        # In local SGD they are averaged with the weights, and sent at no other time.
        self.broadcasts_buffers = bool(options.options["broadcast_buffers"]) and not options.averages_between_steps
        of_torch: dict[str, Any] = {**options.options, "broadcast_buffers": self.broadcasts_buffers}
        super().__init__(process_group_backend=placement.backend, **of_torch)
        self._options = options
        self._share = Share() if options.sync_batchnorm else None
        self._classes_before: dict[nn.Module, type[nn.Module]] = {}
        self._local: LocalSteps | None = None
        self._waits_for_a_graph = bool(options.options["static_graph"])

    def configure_ddp(self) -> None:
        """Wrap the module, unless it averages its gradients."""
        module, options = module_of(self), self._options
        if self._share is not None and not self._classes_before:
            self._classes_before = join_statistics(module, self._share, device_type=self.root_device.type)
        # A LightningModule that is not exp's own says nothing of it.
        if getattr(module, "averages_gradients", False):
            broadcast_state(module)
            return
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        compress(self.model, options, steps_done=lambda: module.trainer.global_step)
        if options.averages_between_steps:
            self._local = LocalSteps(options.local_sgd)
            self.model.register_comm_hook(self._local, _unless_local)

    @property
    def is_plain(self) -> bool:
        """Whether a step does nothing but call DistributedDataParallel.

        Relied on, and tested: Lightning's `_model_averager` is None but for its own post-local SGD (lightning 2.6.6).
        """
        own = (type(self).training_step, type(self).optimizer_step)
        is_own = own == (ExpDDPStrategy.training_step, ExpDDPStrategy.optimizer_step)
        return is_own and self._local is None and self._share is None and self._model_averager is None

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


class LocalSteps:
    """Steps that each rank takes alone, and the averages that follow them."""

    def __init__(self, options: LocalSGD) -> None:
        self.options = options
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
        tensors += [tensor for optimizer in optimizers for tensor in _state(optimizer)]
        average_tensors([tensor.detach() for tensor in tensors])


def _unless_local(steps: LocalSteps, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over all ranks, except in local steps."""
    buffer: Tensor = bucket.buffer()
    if not steps.is_local:
        return _added_up(buffer.div_(dist.get_world_size()), then=lambda total: total)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


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


def compress(wrapped: DistributedDataParallel, options: DDP, *, steps_done: Callable[[], int]) -> None:
    """Register the communication hook that the options name, if they name one.

    Args:
        steps_done: Returns the number of the run's finished steps. Called when the first gradients exist.
    """
    if options.communication_hook == "powersgd":
        wrapped.register_comm_hook(LowRank(options.powersgd, steps_done), _in_low_rank)
    elif options.communication_hook is not None:
        wrapped.register_comm_hook(DTYPES[options.communication_hook], _in_dtype)


def _in_dtype(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    # Divided before they are added: float16 overflows less.
    return _added_up(buffer.to(dtype).div_(dist.get_world_size()), then=buffer.copy_)


def _in_low_rank(low_rank: LowRank, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return powerSGD_hook(low_rank.state, bucket)


def _added_up(sent: Tensor, *, then: Callable[[Tensor], Tensor]) -> torch.futures.Future[Tensor]:
    """Return the future of what `then` makes of the sum over all ranks."""
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda future: then(future.value()[0]))
    return found
