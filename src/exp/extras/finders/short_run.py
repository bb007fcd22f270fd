"""Runs the first steps of a planned run, for the commands exp.find_lr and exp.find_batch.

Network, data, sample order, objective, optimizer, precision and strategy are those of the planned run. Validation,
test, checkpoints, resume and schedule are disabled.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.config.found_run import key_of
from exp.errors import ErrorDetails, Interrupted, invalid_value, raise_errors
from exp.files import write_atomic
from exp.lighter_imports import pause_garbage_collection

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from omegaconf import DictConfig

    from exp.check.plan import Plan
    from exp.run_report import Report

# Values of the short run by dotted config key.
SHORT: Mapping[str, object] = {
    "monitor": "loss/train",
    "mode": "min",
    "test": False,
    "scheduler": {"_target_": "exp.optim.schedules.Constant", "interval": "step", "monitor": None},
    "logger": {"tensorboard": {"_target_": "exp.tensorboard.logger.TensorBoardLogger"}},
    "checkpoint.every_n_steps": None,
    "checkpoint.every_n_minutes": None,
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
    """Error of a short run that was ended by a signal."""

    def __str__(self) -> str:
        return f"interrupted by signal {self.signum}; an incomplete test has no result and saves no state"


# Numbers that the values of flags must exceed, by the name of the flag without `--`.
Limits = Mapping[str, float]


def flag_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser without flags, to which a command adds its flags.

    Args:
        program: Name of the command, such as exp.find_lr.
        description: Text for --help.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [flags and overrides of exp.train]",
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, program: str, above: Limits
) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Return the values of the flags of a command, and the arguments of exp.train.

    If the command line asks for information, such as --help, this function prints the information. In that case the
    arguments of exp.train are None.

    Args:
        parser: Parser with the flags of the command.
        argv: The command line.
        program: Name of the command, such as exp.find_lr.
        above: Numbers that the values of flags must exceed.

    Raises:
        ConfigError: Values of flags are invalid. The error lists all of them.
    """
    from exp.cli.command_line import answer_question, parse_arguments
    from exp.cli.train import refuse_ranks

    own, rest = parser.parse_known_args(argv)
    values = {name: value for name, value in vars(own).items() if name in above and value is not None}
    errors = [
        ErrorDetails(f"--{name}", f"{value:g}", f"a number above {above[name]:g}")
        for name, value in values.items()
        if not value > above[name]  # the comparison is also false for nan
    ]
    arguments = parse_arguments(rest, program=f"python -m {program}")
    if arguments.multirun:
        errors.append(ErrorDetails("--multirun", "several runs", "one run", "Leave -m out, and start each run alone"))
    raise_errors(errors)
    if answer_question(arguments):
        return own, None
    refuse_ranks(program)
    return own, arguments


def decide(arguments: argparse.Namespace) -> tuple[DictConfig, Plan]:
    """Return the config and the plan of the run that exp.train would start with these arguments.

    Raises:
        ConfigError: The config has errors, or a short run does not support the run. The error lists all errors.
    """
    from exp.check.stages import compose, refuse_early

    config = compose(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    config.runtime.autoresume = False
    refuse_early(config)
    with pause_garbage_collection():
        from exp.check.examination import plan
        from exp.check.resolution import resolve

    decided = plan(resolve(config))
    settings = decided.settings
    raise_errors(
        invalid_value(key, got, expected)
        for key, is_wrong, got, expected in (
            ("module", settings.module is not None, settings.module, "null: only exp's own training can be shortened"),
            ("launch.nodes", settings.launch.nodes != 1, settings.launch.nodes, "1"),
            ("train", settings.train is not True, False, "true"),
            ("resume", settings.resume is not None, settings.resume, "null; weights.from=RUN_DIR starts from weights"),
        )
        if is_wrong
    )
    return config, decided


def shorten_config(
    config: DictConfig, decided: Plan, changes: Mapping[str, Any], *, room: str, overrides: Sequence[str]
) -> DictConfig:
    """Return the config of the short run.

    Args:
        config: Config of the run.
        decided: Plan of the run.
        changes: Values by dotted config key that are set in addition to SHORT. Entries of `callbacks` are added to the
            callbacks that stay enabled.
        room: Folder name in outputs/<name>/<room>/<date>/<time>. An override of hydra.run.dir sets another directory.
        overrides: Overrides of the command line.
    """
    from omegaconf import OmegaConf, open_dict

    from exp.check.starting_point import root_of
    from exp.config.frozen import COMPOSITION
    from exp.config.reading import copy_config

    short = copy_config(config)
    kept, _ = split_callbacks(decided)
    # Hooks that do not transform are disabled, because they do not change a step.
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


def split_callbacks(decided: Plan) -> tuple[list[str], list[str]]:
    """Return the names of the callbacks that change the first steps, and the names of all other callbacks.

    Only subclasses of BaseFinetuning, which freezes layers, change the first steps.
    """
    from lightning.pytorch.callbacks.finetuning import BaseFinetuning

    from exp.config.targets import resolve

    settings, kept = decided.settings, []
    for name, node in settings.callbacks.items():
        kind: type[Callback] = resolve(node["_target_"], allow=settings.security.allow)
        if issubclass(kind, BaseFinetuning):
            kept.append(name)
    return kept, [name for name in settings.callbacks if name not in kept]


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows as a CSV file. Floats keep all digits."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    write_atomic(path, file.getvalue())


def run(config: DictConfig, *, fit: Callable[[DictConfig], Report]) -> Report:
    """Run a short run, and return its report.

    Args:
        config: Config of the short run.
        fit: Function that runs a config and returns the report.

    Raises:
        Unfinished: A signal ended the run.
    """
    try:
        return fit(config)
    except Interrupted as error:
        if error.checkpoint is not None:
            Path(error.checkpoint).unlink(missing_ok=True)  # a short run is never resumed
        raise Unfinished(signum=error.signum, checkpoint=None) from error
