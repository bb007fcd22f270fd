"""Hydra as a program: its flags, its answers to questions, its sweepers. The other half of hydra_adapter.

Seen: Hydra 1.3.8. Relied upon: get_args_parser, Hydra.show_cfg, show_info, hydra_help and shell_completion,
Plugins.instantiate_sweeper, Callbacks. Of Python 3.11: ArgumentParser._actions, for there is no other way to an
action that was added by somebody else.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import __version__ as HYDRA_VERSION
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from exp.config.hydra_adapter import Loader, hydra_base, hydra_config
from exp.errors import ConfigError, Fault

__all__ = ["HYDRA_VERSION", "answer", "argument_parser", "job_return", "run_sweeper", "task_overrides"]


def argument_parser(program: str, *, version: str = HYDRA_VERSION) -> argparse.ArgumentParser:
    """Hydra's parser of the command line, which raises ConfigError on a wrong flag.

    version: what --version says in the place of Hydra's own.
    """
    parser = get_args_parser()
    parser.prog = program

    def error(message: str) -> None:
        raise ConfigError([Fault(key="command line", got=message, expected="the flags of --help, and key=value")])

    (action,) = [action for action in parser._actions if "--version" in action.option_strings]
    action.version = version  # type: ignore[attr-defined]  # of the action "version" alone
    parser.error = error  # type: ignore[method-assign, assignment]  # the one way to its words
    return parser


def answer(loader: Loader, arguments: argparse.Namespace, *, config_name: str, overrides: list[str]) -> None:
    """Hydra's own answers to --cfg, --info, --hydra-help and --shell-completion. Raises one of HYDRA_ERRORS."""
    from hydra._internal.hydra import Hydra

    root = logging.getLogger()
    kept = root.level, list(root.handlers), HydraConfig.instance().cfg
    with hydra_base():
        hydra = Hydra(task_name=config_name, config_loader=loader)
        try:
            if arguments.hydra_help:
                hydra.hydra_help(config_name=config_name, args_parser=argument_parser("exp"), args=arguments)
            elif arguments.cfg is not None:
                hydra.show_cfg(
                    config_name=config_name, overrides=overrides, cfg_type=arguments.cfg, package=arguments.package,
                    resolve=arguments.resolve,
                )  # fmt: skip
            elif arguments.info is not None:
                hydra.show_info(arguments.info, config_name=config_name, overrides=overrides)
            else:
                hydra.shell_completion(config_name=config_name, overrides=overrides)
        finally:
            root.setLevel(kept[0])
            root.handlers[:] = kept[1]
            HydraConfig.instance().cfg = kept[2]


def run_sweeper(config: DictConfig, loader: Loader, task: Any, *, directory: Path) -> None:
    """Lets the configured sweeper name the jobs and the configured launcher run them. No Hydra callbacks are made."""
    with hydra_base(), hydra_config(config):
        setup_globals()
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.mode = RunMode.MULTIRUN
        config.hydra.sweep.dir = str(directory)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
        sweeper.sweep(arguments=task_overrides(config))


def task_overrides(config: DictConfig) -> list[str]:
    """The overrides of a composed config that are not Hydra's own, as typed: each job resolves `name=a${seed}`."""
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides.task, resolve=False))


def job_return(*, overrides: Sequence[str], config: DictConfig | None, directory: str, value: float) -> JobReturn:
    """What a sweeper gets of one job: completed always, with nan for a failed one, or it would end the sweep."""
    result = JobReturn(overrides=list(overrides), cfg=config, working_dir=directory, status=JobStatus.COMPLETED)
    result.return_value = value
    return result
