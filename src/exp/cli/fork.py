"""python -m exp.fork RUN@STEP [overrides]: start a new run from the state of another run at a step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, ErrorDetails, RunError, config_error, not_supported_with
from exp.lighter_imports import pause_garbage_collection
from exp.output import command
from exp.spelling import among

if TYPE_CHECKING:
    from exp.engine.checkpoint import State
    from exp.run_report import Report


# Pairs of the value in the parent and the value in the fork, by dotted key.
Changed = Mapping[str, tuple[Any, Any]]


@command()
def main(argv: Sequence[str]) -> int:
    """Train a fork: a new run from the state of a parent run at a step, with the parent's command and changed values.

    The parent and the step are recorded in provenance.json of the fork.

    Returns:
        The exit status of exp.train.
    """
    parser = argparse.ArgumentParser(prog="python -m exp.fork", description=main.__doc__)
    parser.add_argument("parent", metavar="RUN@STEP", help="a run directory, @ and a step that has a checkpoint")
    parser.add_argument("overrides", nargs="*", help="changes of the fork, such as optimizer.lr=1e-4 seed=1")
    arguments = parser.parse_args(argv)
    from exp.run_report import print_report

    run, step = _parse_parent(arguments.parent)
    report = fork(run, step, arguments.overrides)
    print_report(report)
    return 0 if report.status == "completed" else 1


def _parse_parent(parent: str) -> tuple[Path, int | None]:
    name, _, step = parent.rpartition("@")
    if not name:
        name, step = parent, ""
    if step and not step.isdecimal():
        raise config_error("RUN@STEP", got=repr(parent), expected="a run directory, @ and a step")
    run = Path(name).absolute()
    if not (run / "config.yaml").is_file():
        raise RunError(f"{run} has no config.yaml; expected a run directory, outputs/<name>/<date>/<time>")
    return run, int(step) if step else None


def fork(run: Path, step: int | None, overrides: Sequence[str]) -> Report:
    """Train a fork of a run, and return the report of the fork.

    Args:
        run: Run directory of the parent.
        step: Optimizer step of the parent's checkpoint from which the fork starts. None: the newest checkpoint.
        overrides: Overrides that the fork adds to those of the parent.

    Raises:
        ConfigError: The config has errors, or the parent's state does not fit the config.
        RunError: The parent has no intact checkpoint.
    """
    import yaml

    with pause_garbage_collection():
        from exp.check.continuation import changed_values, examine_resume
        from exp.check.resolution import resolve
        from exp.check.stages import compose
        from exp.config.found_run import merge_overrides
        from exp.config.versions import with_present_keys
        from exp.engine.checkpointing import CONFIG
        from exp.start import fit

    config = compose(merge_overrides(run, overrides, without=("resume", "runtime.autoresume", "hydra.run.dir")))
    config.resume, config.runtime.autoresume = None, False
    path, state = _find_checkpoint(run, step)
    resolved = resolve(config)
    changed = {}
    if not resolved.errors:  # fit reports these errors
        errors = examine_resume({**resolved.plain, "resume": str(path)}, is_fork=True).errors
        before, now = with_present_keys(yaml.safe_load(state[CONFIG])), yaml.safe_load(resolved.yaml)
        changed = changed_values({**before, "resume": None}, now)
        if errors or (errors := tuple(_unfit_errors(state, changed, now))):
            raise ConfigError(errors)
        state = with_values(state, changed, groups=(now["optimizer"] or {"groups": {}})["groups"])
    return fit(config, begin=partial(_begin, run=run, path=path, state=state, changed=changed))


def _find_checkpoint(run: Path, step: int | None) -> tuple[Path, State]:
    """Return the path and the state of the checkpoint at a step.

    Args:
        run: Run directory.
        step: Optimizer step. None: the newest checkpoint.

    Raises:
        ConfigError: The run has no checkpoint at this step.
        RunError: The run has no intact checkpoint.
    """
    from exp.check.starting_point import states_of
    from exp.engine.checkpointing import POSITION

    found = {state[POSITION]["step"]: (path, state) for path, state in reversed(list(states_of(run)))}
    if not found:
        raise RunError(f"{run} has no intact checkpoint to start from")
    wanted = max(found) if step is None else step
    if wanted not in found:
        expected = f"a step that has a checkpoint: {among(map(str, sorted(found)))}"
        raise config_error("RUN@STEP", got=f"step {wanted}", expected=expected)
    return found[wanted]


def _unfit_errors(state: State, changed: Changed, now: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yield an error for each optimizer value of the fork that cannot replace the value in the saved state.

    Args:
        state: Checkpoint of the parent.
        changed: Values that the fork changes.
        now: Config of the fork.
    """
    from exp.check.continuation import INCIDENTAL

    values = [key for key in changed if key.startswith("optimizer.")]
    if values and now["phases"]:
        yield not_supported_with(values[0], "a changed value in a fork", "phases in the run", "the parent run's value")
    for key in values if not now["phases"] else ():
        name = key.removeprefix("optimizer.")
        groups = [group for one in state["optimizer_states"] for group in one["param_groups"]]
        if name not in INCIDENTAL and not all(name in group for group in groups):
            other = "an optimizer that does not store the value in its parameter groups"
            yield not_supported_with(key, "a changed value in a fork", other, "the value of the parent run")


def _begin(directory: Path, *, run: Path, path: Path, state: State, changed: Changed) -> Path:
    """Write the checkpoint from which a fork starts, and record the parent in provenance.json.

    Args:
        directory: Run directory of the fork.
        run: Run directory of the parent.
        path: Checkpoint of the parent.
        state: State of the checkpoint, with the optimizer values of the fork.
        changed: Values that the fork changes.

    Returns:
        Path of the new checkpoint.
    """
    from exp.cli.resume import START
    from exp.config.freeze import record_parent
    from exp.engine.checkpoint import CHECKPOINTS, AtomicCheckpointIO, copy_checkpoint, read_checkpoint
    from exp.engine.checkpointing import BEST, CONFIG, POSITION
    from exp.engine.recording import LATEST

    parents_best = path.with_name("best.ckpt")
    start = directory / CHECKPOINTS / START
    start.parent.mkdir()
    best = state[BEST]
    if best is not None and parents_best.is_file() and read_checkpoint(parents_best).get(BEST) == best:
        copy_checkpoint(parents_best, start.with_name("best.ckpt"))
    else:
        best = None  # the parent's best.ckpt is missing or has another step, so the fork starts without a best value
    text = (directory / "config.yaml").read_text(encoding="utf-8")
    # Logged values of the parent are removed, because the fork may log fewer tags than the parent.
    AtomicCheckpointIO().save_checkpoint({**state, BEST: best, CONFIG: text, LATEST: {}}, start)
    parent = {"run": str(run), "step": state[POSITION]["step"], "checkpoint": str(path), "changed": changed}
    record_parent(directory, parent)
    return start


def with_values(state: State, changed: Changed, *, groups: Mapping[str, Any]) -> State:
    """Return a checkpoint with changed values of the optimizer.

    The values in the checkpoint are changed, because a resumed run uses the values of its checkpoint instead of the
    values of the config. If a schedule has changed a learning rate, the rate is multiplied by the ratio of the new
    value to the old value.

    Args:
        state: Checkpoint, which is changed in place.
        changed: Pairs of old and new value by dotted key.
        groups: The node `optimizer.groups`. Values that a group sets are not changed.
    """
    values = {key.removeprefix("optimizer."): pair for key, pair in changed.items() if key.startswith("optimizer.")}
    schedules = state["lr_schedulers"]
    for optimizer in state["optimizer_states"] if values else ():
        for place, group in enumerate(optimizer["param_groups"]):
            name = str(group.get("name", ""))
            own = groups.get(name.removesuffix("_exempt"), {})
            for key, (was, now) in values.items():
                is_own = key in own or (key == "weight_decay" and name.endswith("_exempt"))
                if key in group and not is_own and key != "lr":
                    group[key] = now
                elif key == "lr" and not is_own:
                    _set_rate(group, schedules, place, was=was, now=now)
    return state


def _set_rate(group: dict[str, Any], schedules: Sequence[State], place: int, *, was: float, now: float) -> None:
    def scale(rate: float) -> float:
        return now if rate == was else rate / was * now

    for key in {"lr", "initial_lr"} & group.keys():
        group[key] = scale(group[key])
    for schedule in schedules:
        for key in {"base_lrs", "_last_lr"} & schedule.keys():
            schedule[key][place] = scale(schedule[key][place])
    inner = [schedule for one in schedules for schedule in one.get("_schedulers", ())]
    if inner:
        _set_rate({}, inner, place, was=was, now=now)
