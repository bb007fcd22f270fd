"""ZeRO by DeepSpeed: optimizer state, gradients and weights divided over the ranks, by stage. An extra.

Lightning's own DeepSpeedStrategy is for GPUs alone, writes directories that no other strategy reads, and takes
precision and accumulation out of exp's hands. Here the engine wraps the network and nothing else, by DeepSpeed's public
`initialize`, `backward`, `step` and `safe_get_*`.

Relied on beside these, and tested: `bit16_groups` and `single_partition_of_fp32_groups` of the optimizer of stages 1
and 2, `fp16_groups` and `fp32_partitioned_groups_flat` of stage 3 (a group's parameters, and the flat tensor in which
this rank keeps its part of them), `_lazy_init_hp_params_optimizer_state` with
`_hp_optimizer_states_linked`, `refresh_fp32_params`, and `__compatible_ops__` (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.errors import ErrorDetails, MissingExtraError, is_installed
from exp.precision.words import WORDS
from exp.strategies.footprint import (
    Footprint,
    Held,
    Load,
    Place,
    Transfer,
    all_reduce_bytes,
    gather_bytes,
)
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, averages_weights, module_of, network_of, precision_of

# Numbers that are sent at once.
BUCKET = 200_000_000
# Hooks that need no whole weights.
WITHOUT_WEIGHTS = ("exp.hooks.gradients.Gradients", "exp.hooks.throughput.Throughput")


class DeepSpeed(Strategy):
    """The engine of DeepSpeed around the network. A step computes what ddp computes.

    Args:
        name: Name of the strategy.
        stage: State that is divided over the ranks: 1 the optimizer's, 2 the gradients, too, 3 the weights, too.
        offload_optimizer: Whether the optimizer's state and its step are on the CPU of a run on GPUs.
    """

    owns_step = True

    def __init__(
        self, *, name: str = "deepspeed", stage: Literal[1, 2, 3] = 2, offload_optimizer: bool = False
    ) -> None:
        super().__init__(name=name)
        self.stage, self.offload_optimizer = stage, offload_optimizer
        self.shards_parameters = stage == 3

    @property
    def demand(self) -> Demand:
        """One rank a device. In stage 3 ranks keep parts of one copy of the weights."""
        return Demand(rest="shard" if self.shards_parameters else "replicate")

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of a missing DeepSpeed, and of settings that its engine does not support."""
        return [*([] if is_installed("deepspeed") else [_missing()]), *self._errors(planned)]

    def footprint(self, load: Load) -> Footprint:
        """Return the footprint of the stage. The engine's parts are flat: each rank has 1 / N of all numbers."""
        ranks = load.placement.data_ranks
        if ranks == 1:
            return super().footprint(load)
        held = {
            name: self._held(one, load.sizes[name].itemsize, ranks) for name, one in load.whole_parameters().items()
        }
        learning = max((one.itemsize for one in load.sizes.values() if one.learns), default=4)
        buffers = {"bucket of gradients": min(load.gradient_bytes, BUCKET * learning)}
        if self.stage < 3:
            buffers["the engine's own copy of the part that it steps"] = load.gradient_bytes // ranks
        place = Place(ranks=tuple(range(ranks)), held=held, buffers=buffers)
        weights, gradients = load.parameter_bytes, load.gradient_bytes
        reduced = gather_bytes(gradients, ranks) if self.stage > 1 else all_reduce_bytes(gradients, ranks)
        gathers = 2 * load.micro_batches if self.stage == 3 else 1
        transfers = [
            Transfer(what="sums of gradients", sent=reduced * load.micro_batches, over=ranks),
            Transfer(what="all-gather of weights", sent=gather_bytes(weights, ranks) * gathers, over=ranks),
        ]
        note = "what DeepSpeed's engine keeps is an estimate, from its stages (Rajbhandari et al. 2020) and its options"
        offload = ["strategy.offload_optimizer is not counted"] if self.offload_optimizer else []
        return Footprint(places=[place], transfers=transfers, notes=(note, *offload))

    def _held(self, one: Held, itemsize: int, ranks: int) -> Held:
        part = -(-math.prod(one.shape) // ranks)
        gradient = one.gradient and (part * itemsize if self.stage > 1 else one.gradient)
        return replace(one, shape=(part,), stored=part * itemsize if self.stage == 3 else one.stored, gradient=gradient)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """A ZeroStrategy with these options. Raises: MissingExtraError."""
        if not is_installed("deepspeed"):
            raise missing_extra()
        return ZeroStrategy(placement=placement, options=self)

    def _errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        # DeepSpeed has a loss scale of its own, and casts the network itself; these words need neither.
        known = [
            word.name
            for word in WORDS.values()
            if not word.needs_scaler and not word.float8 and word.parameters is None
        ]
        if planned.precision not in known:
            yield ErrorDetails(
                key="precision.word",
                got=f"{planned.precision} with strategy={self.name}",
                expected=f"one of {', '.join(known)}: DeepSpeed would scale the loss or cast the network itself",
            )
        if planned.settings.trainer.gradient_clip_algorithm == "value":
            got, expected = f"value with strategy={self.name}", "norm, or null: DeepSpeed clips by norm alone"
            yield ErrorDetails(key="trainer.gradient_clip_algorithm", got=got, expected=expected)
        placement = planned.placement
        if self.offload_optimizer and (placement.accelerator == "cpu" or placement.world_size == 1):
            expected = "false: on a CPU, and with one rank, nothing is offloaded"
            yield ErrorDetails(key="strategy.offload_optimizer", got="true", expected=expected)
        if self.stage < 3:
            return
        averages = [name for name, kind in planned.callbacks.items() if averages_weights(kind)]
        if averages:
            got = "an average of the weights with strategy.stage=3, which has them in parts"
            yield ErrorDetails(key=f"callbacks.{averages[0]}", got=got, expected="strategy.stage=1 or 2")
        for name, hook in planned.hooks.items():
            names = {f"{base.__module__}.{base.__qualname__}" for base in type(hook).__mro__}
            if names.isdisjoint(WITHOUT_WEIGHTS) or getattr(hook, "modules", None) != ("*",):
                yield ErrorDetails(
                    key=f"hooks.{name}",
                    got=f"{type(hook).__name__} with strategy.stage=3",
                    expected="a hook that looks at no weight, for they lie in parts: gradients of all, throughput",
                    fix=f"Take it out with ~hooks.{name}, or write strategy.stage=2",
                )


def missing_extra() -> MissingExtraError:
    return MissingExtraError(feature="strategy=deepspeed", package="deepspeed", extra="deepspeed")


def _missing() -> ErrorDetails:
    """Return the error as one of the config's."""
    got, _, fix = str(missing_extra()).partition(": ")
    return ErrorDetails(key="strategy.name", got=got, expected="it, or another strategy", fix=f"Install it: {fix}")


class ZeroStrategy(ModelParallel):
    """The network in DeepSpeed's engine from fit's setup on. A stage without fit before it has the plain network.

    engine: None before.
    """

    def __init__(self, *, placement: Placement, options: DeepSpeed) -> None:
        super().__init__(placement=placement)
        self.options = options
        self.engine: Any = None
        self._gradient_norms: dict[str, Tensor] = {}

    # --- placing ---

    def place_model(self) -> None:
        """Do nothing: the engine takes the network with its optimizer."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.engine is None:
            self.engine = self._engine(trainer)
            # Beside the module's children, so that the state dict has the network once.
            module_of(self).__dict__["run_network"] = self.engine

    def _engine(self, trainer: Trainer) -> Any:
        import deepspeed

        deepspeed.utils.logging.logger.setLevel(logging.WARNING)
        # It asks the environment of this process, which is the rank's own, for its device.
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        if self.root_device.type == "cpu":
            # Else the ranks compile an operator, for minutes, and wait for each other in it.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        network = network_of(self)
        engine, *_ = deepspeed.initialize(
            config=self._config(trainer),
            model=network,
            model_parameters=[parameter for parameter in network.parameters() if parameter.requires_grad],
            optimizer=self.optimizers[0],
            dist_init_required=False,
        )
        return engine

    def _config(self, trainer: Trainer) -> dict[str, Any]:
        autocast = precision_of(self).word.autocast
        kind = {} if autocast is None else {"dtype": str(autocast).removeprefix("torch.")}
        offload = {"offload_optimizer": {"device": "cpu"}} if self.options.offload_optimizer else {}
        return {
            # For its log alone: exp divides the batches.
            "train_micro_batch_size_per_gpu": 1,
            # Lightning divides the loss; the boundary is set by hand.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            "zero_allow_untested_optimizer": True,
            # The optimizer is the config's, and not DeepSpeed's for the CPU.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.options.stage,
                "overlap_comm": False,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                **offload,
            },
            # The engine turns off an autocast that it does not know of.
            "torch_autocast": {"enabled": autocast is not None, **kind},
        }

    # --- a step ---

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object) -> Tensor:
        module = module_of(self)
        loss = precision_of(self).pre_backward(closure_loss, module)
        self.engine.set_gradient_accumulation_boundary(self.is_last_backward)
        self.engine.backward(loss)
        if self.is_last_backward:
            self._show_gradients()
        return precision_of(self).post_backward(loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: nn.Module | None = None, **_: object) -> object:
        return super().optimizer_step(cast(Optimizer, EngineStep(self, optimizer)), closure, model)

    def _show_gradients(self) -> None:
        """Set the whole gradients of the step for hooks. Clipping is the engine's, and comes later."""
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in network_of(self).named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is None:
                continue
            if self.options.stage == 3:
                # A weight that lies in parts is empty here, and takes no gradient of its whole shape.
                self._gradient_norms[name] = torch.linalg.vector_norm(gradient.double())
            else:
                parameter.grad = gradient.view(parameter.shape)

    def hide_gradients(self) -> None:
        """Remove the gradients, which would be added to those of the next step. The engine has its own."""
        self._gradient_norms = {}
        for parameter in network_of(self).parameters():
            parameter.grad = None

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 2-norms by name. In stage 3 they are those of the gradients, which hooks cannot have as tensors."""
        if self.options.stage == 3:
            return dict(self._gradient_norms)
        return {name: torch.linalg.vector_norm(tensor, dtype=torch.float64) for name, tensor in tensors.items()}

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.ds_shape if self.options.stage == 3 else parameter.shape  # type: ignore[attr-defined]  # DeepSpeed's

    # --- checkpoints ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._gathered():
            return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._gathered(written=True):
            super().load_model_state_dict(checkpoint, strict=strict)
        if self.engine is None:
            return
        if self.options.stage < 3:
            self.engine.optimizer.refresh_fp32_params()
            return
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in module_of(self).named_parameters():
            if parameter.requires_grad and name in checkpoint["state_dict"]:
                safe_set_full_fp32_param(parameter, checkpoint["state_dict"][name].to(self.root_device))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self._link_state()
        held, flat = self._members(), self._flat()
        state: dict[int, dict[str, object]] = {}
        for number, name in enumerate(name for names in held for name in names):
            parameter = self._trained[name]
            entry = optimizer.state.get(flat[name], {})
            whole = {}
            for key, value in entry.items():
                if _is_count(value):
                    # Of its own, for one process counts for each parameter, in place.
                    whole[key] = _copied(value)
                else:
                    found = safe_get_full_optimizer_state(parameter, key)
                    whole[key] = found.view(self._shape(parameter)).cpu() if self.is_global_zero else None
            if whole:
                state[number] = whole
        first = 0
        groups = []
        for group, names in zip(optimizer.param_groups, held, strict=True):
            groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": state, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        optimizer, saved = self.optimizers[0], checkpoint["optimizer_states"][0]
        held, flat = self._members(), self._flat()
        for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})
        entries = {
            name: saved["state"][number]
            for number, name in enumerate(name for names in held for name in names)
            if number in saved["state"]
        }
        for name, entry in entries.items():
            # One flat tensor holds the parts of many: what is counted, such as the steps, is counted once for all.
            optimizer.state[flat[name]].update(
                {
                    key: _copied(value) if _is_count(value) else torch.zeros_like(flat[name])
                    for key, value in entry.items()
                    if key not in optimizer.state[flat[name]]
                }
            )
        self._link_state()
        for name, entry in entries.items():
            for key, value in entry.items():
                if not _is_count(value):
                    safe_set_full_optimizer_state(self._trained[name], value.to(self.root_device), key)

    def _link_state(self) -> None:
        """Let stages 1 and 2 find the optimizer's state of each parameter.

        DeepSpeed does so once, after the first step of the first group, when other groups have no state.
        """
        if self.options.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _gathered(self, *, written: bool = False) -> AbstractContextManager[object]:
        """Return a context with whole weights. The weights that rank 0 writes there are divided again."""
        if self.engine is None or self.options.stage < 3:
            return nullcontext()
        import deepspeed

        parameters = list(network_of(self).parameters())
        gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0 if written else None
        )
        return gathered

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return dict(module_of(self).named_parameters())

    def _members(self) -> list[list[str]]:
        """Return the names of the optimizer's parameters, by group."""
        return self._groups[0]

    def _flat(self) -> dict[str, Tensor]:
        """Return the flat tensor in which this rank has its part of each trained parameter."""
        engine, names = self.engine.optimizer, self._names()
        if self.options.stage == 3:
            pairs = zip(engine.fp16_groups, engine.fp32_partitioned_groups_flat, strict=True)
        else:
            pairs = zip(engine.bit16_groups, engine.single_partition_of_fp32_groups, strict=True)
        return {names[id(parameter)]: flat for group, flat in pairs for parameter in group}


class EngineStep:
    """The object that Lightning steps instead of the optimizer: the engine, which steps the optimizer's parts."""

    def __init__(self, strategy: ZeroStrategy, optimizer: Optimizer) -> None:
        self._strategy = strategy
        self.param_groups = optimizer.param_groups

    def step(self, closure: Callable[[], object]) -> object:
        """Step the engine. closure: forward, backward, and the hooks that see gradients."""
        output = closure()
        self._strategy.hide_gradients()
        self._strategy.engine.step()
        return output


def _is_count(value: object) -> bool:
    """Return whether an entry of an optimizer's state is one number for a parameter, such as the steps."""
    return not isinstance(value, Tensor) or value.dim() == 0


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
