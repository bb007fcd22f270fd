"""ZeRO by DeepSpeed: optimizer state, gradients and weights divided over the ranks, by stage. An extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from exp.errors import ConfigError, Fault, MissingExtraError
from exp.strategies.sharding_faults import sharding_faults
from exp.strategies.strategy import Planned, Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank

# DeepSpeed keeps a loss scale of its own, and casts the network itself; these words leave both alone.
WORDS = ("fp32", "tf32", "bf16")
# Hooks that are right without whole weights.
WITHOUT_WEIGHTS = ("exp.hooks.gradients.Gradients", "exp.hooks.throughput.Throughput")
AVERAGING = "exp.engine.ema.ExponentialMovingAverage"


class DeepSpeed(Strategy):
    """The engine of DeepSpeed around the network. A step computes what ddp's does.

    stage: what is divided over the ranks: 1 the optimizer's state, 2 the gradients, too, 3 the weights, too.
    offload_optimizer: the optimizer's state and its step on the CPU of a run on GPUs.
    offload_parameters: the weights there as well, but for those in use; of stage 3.
    overlap_comm: sends gradients while the backward goes on.
    reduce_bucket_size, allgather_bucket_size: numbers that are sent at once.
    show_gradients: gathers whole gradients before every optimizer step, so that hooks see them.
    """

    owns_step = True

    def __init__(
        self,
        *,
        name: str = "deepspeed",
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        overlap_comm: bool = False,
        reduce_bucket_size: int = 200_000_000,
        allgather_bucket_size: int = 200_000_000,
        show_gradients: bool = True,
    ) -> None:
        super().__init__(name=name)
        sizes = {"reduce_bucket_size": reduce_bucket_size, "allgather_bucket_size": allgather_bucket_size}
        faults = [Fault(key=key, got=str(size), expected="1 or more") for key, size in sizes.items() if size < 1]
        if stage not in (1, 2, 3):
            faults.append(Fault(key="stage", got=str(stage), expected="1, 2 or 3"))
        if faults:
            raise ConfigError(faults)
        self.stage = stage
        self.replicates, self.shards_parameters = stage < 3, stage == 3
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters
        self.overlap_comm = overlap_comm
        self.reduce_bucket_size, self.allgather_bucket_size = reduce_bucket_size, allgather_bucket_size
        self.show_gradients = show_gradients

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """DeepSpeed that is not there, and what its engine cannot do."""
        return [
            *([] if is_installed() else [_missing()]),
            *sharding_faults(planned, name=self.name),
            *self._placement_faults(planned.placement),
            *self._engine_faults(planned),
            *self._watching_faults(planned),
        ]

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """A ZeroStrategy with these options. Raises: MissingExtraError."""
        if not is_installed():
            raise missing_extra()
        from exp.strategies.zero import ZeroStrategy

        return ZeroStrategy(placement=placement, options=self)

    def _placement_faults(self, placement: Placement) -> Iterator[Fault]:
        offloads = {"offload_optimizer": self.offload_optimizer, "offload_parameters": self.offload_parameters}
        for name in (name for name, is_on in offloads.items() if is_on):
            key = f"strategy.{name}"
            if placement.accelerator == "cpu":
                expected = "false: everything lies in the CPU's memory already"
                yield Fault(key=key, got="true on a run on CPU", expected=expected)
            elif placement.world_size == 1:
                expected = "two ranks or more: one rank trains without DeepSpeed"
                yield Fault(key=key, got="true with one rank", expected=expected)
            elif name == "offload_parameters" and self.stage != 3:
                got, expected = f"true with strategy.stage={self.stage}", "stage 3, which divides the weights"
                yield Fault(key=key, got=got, expected=expected)

    def _engine_faults(self, planned: Planned) -> Iterator[Fault]:
        if planned.precision not in WORDS:
            yield Fault(
                key="precision.word",
                got=f"{planned.precision} with strategy={self.name}",
                expected=f"one of {', '.join(WORDS)}: DeepSpeed would scale the loss or cast the network itself",
            )
        if planned.config["trainer"].get("gradient_clip_algorithm") == "value":
            yield Fault(
                key="trainer.gradient_clip_algorithm",
                got=f"value with strategy={self.name}",
                expected="norm, or null: DeepSpeed clips by norm alone",
            )

    def _watching_faults(self, planned: Planned) -> Iterator[Fault]:
        callbacks, hooks = planned.config["callbacks"], planned.config["hooks"]
        averages = [name for name, node in callbacks.items() if node["_target_"] == AVERAGING]
        if self.stage == 3 and averages:
            yield Fault(
                key=f"callbacks.{averages[0]}",
                got="an average of the weights with strategy.stage=3, which has them in parts",
                expected="strategy.stage=1 or 2",
            )
        for name, node in hooks.items():
            target = node["_target_"]
            if not self.show_gradients and target.startswith("exp.hooks.gradient"):
                yield Fault(
                    key="strategy.show_gradients",
                    got=f"false with hooks.{name}",
                    expected="true: hooks see the gradients that are gathered for them",
                    cure=f"Or take the hook out with ~hooks.{name}",
                )
            elif self.stage == 3 and (
                target not in WITHOUT_WEIGHTS or ("modules" in node and node["modules"] != ["*"])
            ):
                yield Fault(
                    key=f"hooks.{name}",
                    got=f"{target} with strategy.stage=3",
                    expected="a hook that looks at no weight, for they lie in parts: gradients of all, throughput",
                    cure=f"Take it out with ~hooks.{name}, or write strategy.stage=2",
                )


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def missing_extra() -> MissingExtraError:
    return MissingExtraError(feature="strategy=deepspeed", package="deepspeed", extra="deepspeed")


def _missing() -> Fault:
    """The error's words, beside what else is wrong with the config."""
    got, _, cure = str(missing_extra()).partition(": ")
    return Fault(key="strategy.name", got=got, expected="it, or another strategy", cure=f"Install it: {cure}")
