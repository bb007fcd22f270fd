"""The first steps of a decided run, as a run of their own: for the commands that look for one of its numbers.

Network, data and their order, objective, optimizer, precision and strategy are the run's. It validates, tests, keeps
and goes on with nothing, and has no schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.cli.command_line import key_of
from exp.config.module_key import has_module, target_of
from exp.errors import ConfigError, Fault, Interrupted
from exp.output import loading_torch

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from omegaconf import DictConfig

    from exp.check.plan import Plan
    from exp.run_report import Report

# By dotted key.
SHORT: Mapping[str, Any] = {
    "monitor": "loss/train",
    "mode": "min",
    "test": False,
    "scheduler": {"_target_": "exp.optim.schedules.Constant", "interval": "step", "monitor": None},
    "logger": {"tensorboard": {"_target_": "exp.tensorboard.logger.TensorBoardLogger"}},
    "checkpoint.every_n_steps": None,
    "checkpoint.every_n_minutes": None,
    "checkpoint.keep": 1,
    "checkpoint.save_best": False,
    "checkpoint.save_last": False,
    "launch.max_restarts": 0,
    "trainer.max_epochs": -1,
    "trainer.max_time": None,
    "trainer.limit_val_batches": 0,
    "trainer.val_check_interval": None,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 1,
    "trainer.profiler": None,
}
LEFT_OUT_OF_TRAINER = ("min_epochs", "min_steps")


class Unfinished(Interrupted):
    """A signal ended a short run."""

    def __str__(self) -> str:
        return f"interrupted by signal {self.signum}; a test that did not end says nothing, and leaves no state"


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, program: str
) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """A command's own flags, and those of exp.train beside them; None where they were a question, which is answered.

    parser: of the command's own flags alone. program: such as exp.find_lr.
    Raises: ConfigError.
    """
    from exp.cli.command_line import answer_question, is_question, parse_arguments
    from exp.cli.train import refuse_ranks

    own, rest = parser.parse_known_args(argv)
    arguments = parse_arguments(rest, program=f"python -m {program}")
    if is_question(arguments):
        answer_question(arguments)
        return own, None
    if arguments.multirun:
        fault = Fault(key="--multirun", got="several runs", expected="one", cure="Leave -m out, and call it once each")
        raise ConfigError([fault])
    refuse_ranks(program)
    return own, arguments


def decide(arguments: argparse.Namespace) -> tuple[DictConfig, Plan]:
    """The run that exp.train would make of a command line, checked as it would be.

    Raises: ConfigError with every fault.
    """
    from exp.check.stages import compose, refuse_early

    config = compose(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    config.runtime.autoresume = False
    refuse_early(config)
    with loading_torch():
        from exp.check.examination import plan
        from exp.check.resolution import resolve

    decided = plan(resolve(config))
    faults = list(_beginning_faults(decided.plain))
    if faults:
        raise ConfigError(faults)
    return config, decided


def _beginning_faults(plain: Mapping[str, Any]) -> Iterator[Fault]:
    if has_module(plain):
        yield Fault(
            key="module",
            got=f"{target_of(plain)}, whose steps, losses and optimizers are its own",
            expected="null: it is exp's own training that is made short",
            cure="Try values in runs of their own: python -m exp.train -m KEY=VALUE,VALUE",
        )
    if plain["launch"]["nodes"] != 1:
        expected = "1: this command starts its ranks itself, and on one machine"
        yield Fault(key="launch.nodes", got=str(plain["launch"]["nodes"]), expected=expected)
    if plain["train"] is not True:
        yield Fault(key="train", got="false", expected="true: it trains for some steps", cure="Leave train=false out")
    if plain["resume"] is not None:
        expected = "null: it begins where a run begins"
        yield Fault(key="resume", got=str(plain["resume"]), expected=expected, cure="Or write weights.from=RUN_DIR")


def shortened(
    config: DictConfig, decided: Plan, changes: Mapping[str, Any], *, room: str, overrides: Sequence[str]
) -> DictConfig:
    """The config of the short run.

    changes: by dotted key, beside SHORT; those of `callbacks` join the run's own that it keeps.
    room: of its directory, outputs/<name>/<room>/<date>/<time>; where the overrides name one, it is that.
    """
    from omegaconf import OmegaConf, open_dict

    from exp.check.starting_point import root_of
    from exp.config.copying import copied
    from exp.config.freeze import COMPOSITION

    short = copied(config)
    kept, _ = parted_callbacks(decided)
    # Hooks that transform change what a step does; the others look on.
    hooks = {name: config.hooks[name] for name, hook in decided.hooks.items() if hook.transforms}
    with open_dict(short):
        for key, value in {**SHORT, "hooks": hooks, **changes}.items():
            own = {name: config.callbacks[name] for name in kept} if key == "callbacks" else {}
            OmegaConf.update(short, key, {**own, **value} if own else value, merge=False)
        for name in LEFT_OUT_OF_TRAINER:
            short.trainer.pop(name, None)
    if not any(key_of(text) == "hydra.run.dir" for text in overrides):
        wanted = Path(config[COMPOSITION].directory).absolute()
        root = root_of(wanted, str(config.name))
        short[COMPOSITION].directory = str(root / room / wanted.relative_to(root))
    return short


def parted_callbacks(decided: Plan) -> tuple[list[str], list[str]]:
    """The names of the run's callbacks that change what its first steps do, and of the others."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelPruning
    from lightning.pytorch.callbacks.finetuning import BaseFinetuning

    from exp.config.targets import resolve

    plain, kept = decided.plain, []
    for name, node in plain["callbacks"].items():
        kind: type[Callback] = resolve(node["_target_"], allow=plain["security"]["allow"])
        if issubclass(kind, GradientAccumulationScheduler | ModelPruning | BaseFinetuning):
            kept.append(name)
    return kept, [name for name in plain["callbacks"] if name not in kept]


def run(config: DictConfig, *, fit: Callable[[DictConfig], Report]) -> Report:
    """Run it. fit: as exp.fit. Raises: as that; Unfinished after a signal."""
    try:
        return fit(config)
    except Interrupted as error:
        if error.checkpoint is not None:
            Path(error.checkpoint).unlink(missing_ok=True)  # of weights that nobody goes on with
        raise Unfinished(signum=error.signum, checkpoint=None) from error
