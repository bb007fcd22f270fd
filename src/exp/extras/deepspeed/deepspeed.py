"""Strategy with DeepSpeed's ZeRO, which divides the optimizer state over the ranks. Stage 2 also divides the gradients.

Lightning's DeepSpeedStrategy is not used for three reasons. It supports only GPUs. It writes checkpoint directories
that no other strategy reads. It replaces exp's precision and accumulation. In contrast, this module wraps only the
network in DeepSpeed's engine. It calls DeepSpeed's public functions `initialize`, `backward`, `step` and `safe_get_*`.

The module also uses names that are not public (tested with DeepSpeed 0.19.8). `bit16_groups` of DeepSpeed's optimizer
are the parameters of each group. `single_partition_of_fp32_groups` are the flat tensors with this rank's part of each
group. The other names are `_lazy_init_hp_params_optimizer_state`, `_hp_optimizer_states_linked`, `refresh_fp32_params`
and `__compatible_ops__`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from exp.errors import ErrorDetails, MissingExtraError, is_installed, not_supported_with
from exp.precision.words import WORDS
from exp.strategies.footprint import Footprint, Load, Place
from exp.strategies.model_parallel import ModelParallel
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of, network_of, precision_of

# Largest number of values in one communication.
BUCKET = 200_000_000


class DeepSpeed(Strategy):
    """Strategy that trains the network in DeepSpeed's engine. A step gives the same result as with strategy=ddp.

    Args:
        name: Name of the strategy. Default: deepspeed.
        stage: ZeRO stage. 1 divides the optimizer state over the ranks. 2 also divides the gradients. Default: 2.
    """

    owns_step = True

    def __init__(self, *, name: str = "deepspeed", stage: Literal[1, 2] = 2) -> None:
        super().__init__(name=name)
        self.stage = stage

    @property
    def demand(self) -> Demand:
        """The requested processes: one rank per device."""
        return Demand(rest="replicate")

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of unsupported settings, and the error that DeepSpeed is not installed."""
        return list(self._errors(planned))

    def footprint(self, load: Load) -> Footprint:
        """Return the memory and communication of ddp, with 1 / N of the optimizer state on each of N ranks."""
        ranks = load.placement.data_ranks
        held = {
            name: replace(one, shape=(-(-math.prod(one.shape) // ranks),))
            for name, one in load.whole_parameters().items()
        }
        note = "the memory of DeepSpeed's engine is an estimate, without its buffers"
        place = Place(ranks=tuple(range(ranks)), held=held)
        return Footprint(places=[place], transfers=load.gradient_transfers(), notes=(note,))

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's strategy for a rank.

        Raises:
            MissingExtraError: DeepSpeed is not installed.
        """
        if not is_installed("deepspeed"):
            raise missing_extra()
        return ZeroStrategy(placement=placement, options=self)

    def _errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        if not is_installed("deepspeed"):
            got, _, fix = str(missing_extra()).partition(": ")
            yield ErrorDetails("strategy.name", got, "an installed package deepspeed, or another strategy", fix)
        # DeepSpeed would scale the loss or cast the network, so only precisions that need neither are supported.
        known = [
            word.name
            for word in WORDS.values()
            if not word.needs_scaler and not word.float8 and word.parameters is None
        ]
        strategy = f"strategy={self.name}"
        if planned.precision not in known:
            expected = f"one of {', '.join(known)}: DeepSpeed would scale the loss or cast the network itself"
            yield not_supported_with("precision.word", planned.precision, strategy, expected)
        if planned.settings.trainer.gradient_clip_algorithm == "value":
            expected = "norm, or null: DeepSpeed clips only by norm"
            yield not_supported_with("trainer.gradient_clip_algorithm", "value", strategy, expected)


def missing_extra() -> MissingExtraError:
    """Return the error that DeepSpeed is not installed."""
    return MissingExtraError(feature="strategy=deepspeed", package="deepspeed", extra="deepspeed")


class ZeroStrategy(ModelParallel):
    """Lightning strategy that wraps the network in DeepSpeed's engine when fit starts.

    If no fit precedes an evaluation, the network runs without the engine.

    Attributes:
        engine: The engine. None before fit starts.
    """

    def __init__(self, *, placement: Placement, options: DeepSpeed) -> None:
        super().__init__(placement=placement)
        self.options = options
        self.engine: Any = None

    # --- placing ---

    def place_model(self) -> None:
        """Do nothing, because the engine places the network when it receives the optimizer."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.engine is None:
            self.engine = self._engine(trainer)
            # Stored in `__dict__`, because a submodule would add the network to the state dict a second time.
            module_of(self).__dict__["run_network"] = self.engine

    def _engine(self, trainer: Trainer) -> Any:
        import deepspeed

        deepspeed.utils.logging.logger.setLevel(logging.WARNING)
        # DeepSpeed reads the index of its device from this variable of the process.
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        if self.root_device.type == "cpu":
            # If it were enabled, the ranks would compile an operator for minutes and wait for each other.
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

    def _config(self, trainer: Trainer) -> dict[str, object]:
        autocast = precision_of(self).word.autocast
        kind = {} if autocast is None else {"dtype": str(autocast).removeprefix("torch.")}
        return {
            # DeepSpeed uses this value only in its log, because exp divides the batches.
            "train_micro_batch_size_per_gpu": 1,
            # Lightning divides the loss, and `backward` sets the boundary.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            "zero_allow_untested_optimizer": True,
            # False selects the optimizer of the config instead of DeepSpeed's CPU optimizer.
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.options.stage,
                "overlap_comm": False,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
            },
            # The engine disables autocast unless its config enables autocast.
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

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], object], model: nn.Module | None = None, **_: object
    ) -> object:
        return super().optimizer_step(cast(Optimizer, EngineStep(self, optimizer)), closure, model)

    def _show_gradients(self) -> None:
        """Set `grad` of each parameter to the whole gradient of the step, so that hooks can read it.

        The gradient is that before clipping.
        """
        from deepspeed.utils import safe_get_full_grad

        for parameter in network_of(self).parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None:
                parameter.grad = gradient.view(parameter.shape)

    def hide_gradients(self) -> None:
        """Set `grad` of each parameter to None, so that it is not added to the gradient of the next step.

        The engine has a copy of the gradients.
        """
        for parameter in network_of(self).parameters():
            parameter.grad = None

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the 2-norms of tensors by name. No communication is needed, because each rank has whole tensors."""
        return {name: torch.linalg.vector_norm(tensor, dtype=torch.float64) for name, tensor in tensors.items()}

    # --- checkpoints ---

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.engine is not None:
            self.engine.optimizer.refresh_fp32_params()

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
                    # Copy the count, because later steps change it in place.
                    whole[key] = _copy(value)
                else:
                    found = safe_get_full_optimizer_state(parameter, key)
                    whole[key] = found.view(parameter.shape).cpu() if self.is_global_zero else None
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
            # One flat tensor has the parts of many parameters, which share counts such as the number of steps.
            optimizer.state[flat[name]].update(
                {
                    key: _copy(value) if _is_count(value) else torch.zeros_like(flat[name])
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
        """Link the optimizer state of each parameter to the parameter.

        DeepSpeed links the states only once, after the first step of the first group. At that time, other groups have
        no state.
        """
        self.engine.optimizer._hp_optimizer_states_linked = False
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return dict(module_of(self).named_parameters())

    def _members(self) -> list[list[str]]:
        """Return the names of the parameters in each group of the optimizer."""
        return self._groups[0]

    def _flat(self) -> dict[str, Tensor]:
        """Return the flat tensor that contains each trained parameter, by parameter name.

        All parameters of an optimizer group share one flat tensor: the part of the group that this rank stores.
        """
        engine, names = self.engine.optimizer, self._names()
        pairs = zip(engine.bit16_groups, engine.single_partition_of_fp32_groups, strict=True)
        return {names[id(parameter)]: flat for group, flat in pairs for parameter in group}


class EngineStep:
    """Replacement for the optimizer in Lightning. Its `step` calls the step of DeepSpeed's engine."""

    def __init__(self, strategy: ZeroStrategy, optimizer: Optimizer) -> None:
        self._strategy = strategy
        self.param_groups = optimizer.param_groups

    def step(self, closure: Callable[[], object]) -> object:
        """Run the closure and the step of the engine, and return the result of the closure.

        Args:
            closure: Function that runs forward, backward, and the hooks that read gradients.
        """
        output = closure()
        self._strategy.hide_gradients()
        self._strategy.engine.step()
        return output


def _is_count(value: object) -> bool:
    """Return whether an entry of the optimizer state is a single number, such as the number of steps."""
    return not isinstance(value, Tensor) or value.dim() == 0


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
