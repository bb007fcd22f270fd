"""The search for the checkpoint from which a run resumes.

    resume=auto                selects the newest checkpoint of all runs with this `name`
    runtime.autoresume=true    selects the newest checkpoint of the last runs of the same command, if they are not
                               completed. Intended for cluster schedulers that start a command again

If a checkpoint is damaged, the previous checkpoint is used. Runs that are still running are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from exp.config.frozen import COMPOSITION
from exp.engine.checkpoint import CHECKPOINTS, State, read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION, sweep_run
from exp.errors import RunError, config_error
from exp.files import is_locked, remove_partial_files

AUTO = "auto"
# Patterns of run directories below outputs/<name>: a directory set by hydra.run.dir, or <date>/<time>.
RUNS = ("*", "*/*")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search for a checkpoint.

    Attributes:
        path: The checkpoint. None if no checkpoint was found.
        notes: Remarks on the checkpoints and runs that were found or skipped.
    """

    path: Path | None
    notes: tuple[str, ...]


def find_start(config: DictConfig) -> Found:
    """Return the checkpoint that `resume=auto` or `runtime.autoresume=true` selects.

    Raises:
        ConfigError: The run is a job of a sweep, because jobs would resume from each other. Another cause is a config
            that exp.compose did not make, because such a config has no run directory.
    """
    is_again = config.runtime.autoresume is True
    key = "runtime.autoresume" if is_again else "resume"
    if COMPOSITION not in config:
        got = f"{'true' if is_again else 'auto'}, in a config that exp.compose did not make"
        expected = "the path of a checkpoint, because this config has no run directory where exp could search"
        raise config_error(key, got=got, expected=expected, fix="Make the config with exp.compose(overrides)")
    composition = config[COMPOSITION]
    directory = Path(composition.directory).absolute()
    root = root_of(directory, str(config.name))
    if directory.is_relative_to(root / "sweeps"):
        got = "true, in a sweep" if is_again else "auto, in a sweep"
        expected = "a single run, because jobs of a sweep would resume from each other"
        raise config_error(key, got=got, expected=expected)
    runs = _runs(root)
    notes: list[str] = []
    if is_again:
        found = _of_command(runs, OmegaConf.to_yaml(composition.overrides, resolve=True), notes)
        if found is not None:
            return Found(path=found, notes=tuple(notes))
        if config.resume != AUTO:
            what = "from the beginning" if config.resume is None else f"from {config.resume}"
            notes.append(f"runtime.autoresume: found no unfinished run below {root}. The run starts {what}")
            start = None if config.resume is None else Path(config.resume)
            return Found(path=start, notes=tuple(notes))
    alive = [run for run in runs if is_locked(run / "config.yaml")]
    notes += [f"resume=auto: skipped {run}, which is still running" for run in alive]
    path = _newest([run for run in runs if run not in alive], notes, name=str(config.name))
    if path is None:
        notes.append(f"resume=auto: found no checkpoint of {config.name} below {root}. It starts from the beginning")
    else:
        notes.append(f"resume=auto: resumes from {path}")
    return Found(path=path, notes=tuple(notes))


def newest_of(run: Path) -> Found:
    """Return the newest undamaged checkpoint of a run directory, with notes on damaged checkpoints."""
    notes: list[str] = []
    return Found(path=_newest([run], notes), notes=tuple(notes))


def remove_leftovers(directory: Path, name: str) -> None:
    """Remove partly written files of killed runs. Only runs with the given name are searched.

    Args:
        directory: Run directory of any run with this name.
        name: Value of the key `name`.
    """
    root = root_of(directory, name)
    for pattern in RUNS:
        for path in root.glob(f"{pattern}/{CHECKPOINTS}/.*.partial"):
            sweep_run(path.parent.parent)
        # These files may also be from runs that were killed before the first checkpoint.
        for path in root.glob(f"{pattern}/.*.partial"):
            remove_partial_files(path.parent)


def states_of(run: Path) -> Iterator[tuple[Path, State]]:
    """Yield the path and the content of each checkpoint from which a run can resume.

    The newest checkpoint of the run directory comes first.
    """
    for path in _newest_first([run]):
        state = _whole(path, [])
        if state is not None:
            yield path, state


def _of_command(runs: Sequence[Path], overrides: str, notes: list[str]) -> Path | None:
    """Return the newest checkpoint of the unfinished runs after the last completed run with these overrides.

    Several runs are searched, because the last run may have resumed from an earlier run, and may have been killed
    before its first checkpoint. Return None if there is no checkpoint, or if one of the runs is still running.

    Args:
        runs: Run directories, also of runs with other overrides.
        overrides: Text that overrides.yaml must have.
        notes: List to which this function adds remarks.
    """
    unfinished = []
    for run in sorted(runs, key=_start_time, reverse=True):
        if not (run / "overrides.yaml").is_file() or (run / "overrides.yaml").read_bytes() != overrides.encode():
            continue
        if is_locked(run / "config.yaml"):
            notes.append(f"runtime.autoresume: skipped {run}, which is still running")
            return None
        if _is_completed(run):
            break
        unfinished.append(run)
    path = _newest(unfinished, notes)
    if path is not None:
        notes.append(f"runtime.autoresume: resumes from {path}")
    return path


def _newest(runs: Sequence[Path], notes: list[str], *, name: str | None = None) -> Path | None:
    """Return the newest checkpoint from which a run can resume. Return None if there is no such checkpoint.

    Args:
        runs: Run directories.
        notes: List to which this function adds remarks.
        name: Value of `name` that the config in the checkpoint must have. None (default) accepts any name.
    """
    for path in _newest_first(runs):
        state = _whole(path, notes)
        if state is not None and name in (None, _name(state[CONFIG])):
            return path
    return None


def _newest_first(runs: Sequence[Path]) -> list[Path]:
    found = [path for run in runs for path in (run / CHECKPOINTS).glob("*.ckpt") if not path.name.startswith(".")]
    # best.ckpt and last.ckpt may be links to the same file and have the same time. In this case, last.ckpt comes first.
    ages = {path: (path.stat().st_mtime_ns, path.name == "last.ckpt") for path in found if path.is_file()}
    return sorted(ages, key=ages.__getitem__, reverse=True)


def _whole(path: Path, notes: list[str]) -> State | None:
    """Return the content of a checkpoint. Return None if no run can resume from the checkpoint."""
    try:
        state = read_checkpoint(path)
    except RunError as error:
        notes.append(f"an older checkpoint is used, because {error}")
        return None
    return state if isinstance(state.get(POSITION), dict) and isinstance(state.get(CONFIG), str) else None


def root_of(directory: Path, name: str) -> Path:
    """Return the directory that contains all runs of a name.

    This is outputs/<name> for a run directory inside outputs/<name>, and otherwise the parent directory.
    """
    parts = Path(name).parts
    above = [parent for parent in directory.parents if parent.parts[-len(parts) :] == parts]
    return above[0] if above else directory.parent


def _runs(root: Path) -> list[Path]:
    """Return the run directories below a folder of runs, at most two levels down.

    The default run directory is <root>/<date>/<time>. A directory that the user sets by `hydra.run.dir` may be directly
    below the root.
    """
    return [path.parent for pattern in RUNS for path in root.glob(f"{pattern}/config.yaml")]


def _name(config: str) -> str | None:
    """Return the value of `name` in the config of a checkpoint. Return None if the text is not a config."""
    try:
        content = yaml.safe_load(config)
    except yaml.YAMLError:
        return None
    return str(content.get("name")) if isinstance(content, dict) else None


def _start_time(run: Path) -> int:
    return (run / "overrides.yaml").stat().st_mtime_ns if (run / "overrides.yaml").is_file() else 0


def _is_completed(run: Path) -> bool:
    report = run / "report.json"
    if not report.is_file():
        return False
    try:
        return bool(json.loads(report.read_text(encoding="utf-8"))["status"] == "completed")
    except (ValueError, KeyError, TypeError):  # the file is not a report of exp
        return False
