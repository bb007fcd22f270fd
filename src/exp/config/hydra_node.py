"""What of Hydra's own settings may be set: where results go, the sweeper and the launcher. Else a fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.hydra_adapter import registered_targets, targets_in
from exp.config.spelling import among, did_you_mean
from exp.errors import Fault

ALLOWED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath")
ALLOWED_BELOW = ("hydra.sweeper.", "hydra.launcher.")
# Hydra's own groups that have a meaning here; the others set up what exp does not use.
USED_GROUPS = ("hydra/launcher", "hydra/sweeper")
REFUSED = {
    "hydra.callbacks": ("a class that would run before the check", "a callback of the run: +callbacks=early_stopping"),
    "hydra.job.chdir": ("the working directory never changes", "paths relative to it; results go to the run directory"),
    "hydra.output_subdir": ("Hydra writes no files here", "config.yaml and overrides.yaml of the run directory"),
    "hydra.job_logging": ("Hydra sets up no logging here", "train.log of the run directory"),
    "hydra.hydra_logging": ("Hydra sets up no logging here", "train.log of the run directory"),
    "hydra.verbose": ("Hydra sets up no logging here", "--info for what Hydra sees"),
    "hydra.mode": ("the mode is a flag", "-m for several jobs, nothing for one"),
    "hydra.job.env_set": ("a job changes no environment variables", "NAME=value before the command, or a .env file"),
    "hydra.job.env_copy": ("a job changes no environment variables", "NAME=value before the command, or a .env file"),
}


def hydra_key_fault(key: str, options: Callable[[str], list[str]], *, sweep: bool) -> Fault | None:
    """What is wrong with an override of Hydra's own settings, or None."""
    if sweep:
        return _fault(key, "several values", "one value: Hydra's own settings cannot be swept")
    if "/" in key:
        if any(key == group or key.startswith(group + "/") for group in USED_GROUPS):
            return None
        found = options(key)
        what = "a group that exp does not use" if found else "no such group"
        return _fault(key, what, "hydra/launcher or hydra/sweeper", did_you_mean(key, USED_GROUPS))
    for refused, (got, expected) in REFUSED.items():
        if key == refused or key.startswith(refused + "."):
            return _fault(key, got, expected)
    if key in ALLOWED or key.startswith(ALLOWED_BELOW):
        return None
    return _fault(key, "not a setting that exp uses", f"one of {among(ALLOWED)}", did_you_mean(key, ALLOWED))


def hydra_node_faults(config: DictConfig, *, multirun: bool) -> list[Fault]:
    """What is wrong with the hydra node of a composed config, whoever wrote it."""
    hydra = config.hydra
    faults = []
    if hydra.callbacks:
        got, expected = REFUSED["hydra.callbacks"]
        faults += [_fault(f"hydra.callbacks.{name}", got, expected) for name in hydra.callbacks]
    if hydra.mode is not None and hydra.mode.name == "MULTIRUN" and not multirun:
        faults.append(_fault("hydra.mode", "MULTIRUN without -m", "-m in front of the overrides"))
    if hydra.job.chdir:
        faults.append(_fault("hydra.job.chdir", *REFUSED["hydra.job.chdir"]))
    known = registered_targets()
    for name in ("sweeper", "launcher"):
        for target in targets_in(OmegaConf.to_container(hydra[name], resolve=False, throw_on_missing=False)):
            if target not in known:
                faults.append(_fault(
                    f"hydra.{name}._target_", f"{target} is not of an installed Hydra plug-in",
                    f"hydra/{name}=NAME of an installed plug-in",
                ))  # fmt: skip
    return faults + directory_faults(config, "hydra.sweep.dir" if multirun else "hydra.run.dir")


def directory_faults(config: DictConfig, key: str) -> list[Fault]:
    """Faults of a directory that results go to: it must have a value and lie inside the working directory."""
    try:
        directory = OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return [_fault(key, reason, "a path that can be worked out before the run")]
    if not isinstance(directory, str) or not directory.strip() or "\0" in directory:
        return [_fault(key, repr(directory), "a directory below the working directory")]
    if not is_inside(directory):
        cure = "Link a larger disk to ./outputs, or start in the directory that is to hold the results"
        return [_fault(key, directory, "a directory below the working directory", cure)]
    return []


def is_inside(directory: str) -> bool:
    """Whether a path lies below the working directory, read as text: links may lead out, `..` may not."""
    path = Path(directory)
    return Path.cwd() in Path(os.path.abspath(path)).parents and ".." not in path.parts


def chosen_and_ignored(chosen: Sequence[tuple[str, str]], loaded: Sequence[str]) -> list[Fault]:
    """Choices of the command line that the composition did not follow.

    chosen: pairs of group and option; loaded: the config paths that were merged.
    """
    return [
        Fault(
            key=group,
            got=f"{group}={option} was ignored by the defaults list",
            expected="a choice that takes effect",
            cure=f"Look for `override {group}` in the primary config",
            source="command line",
        )
        for group, option in chosen
        if f"{group}/{option}" not in loaded
    ]


def _fault(key: str, got: str, expected: str, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure)
