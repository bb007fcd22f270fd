"""python -m exp.fork RUN@STEP [overrides]: a run of its own that begins where another one was at a step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, ErrorDetails, RunError, config_error
from exp.output import announce_torch_import, command
from exp.spelling import among

if TYPE_CHECKING:
    from exp.engine.checkpoint import State


@command()
def main(argv: Sequence[str]) -> int:
    """Train a child of a run: its command with other values, from its state at a step, with the parent recorded.

    Returns: exp.train's exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m exp.fork", description=main.__doc__)
    parser.add_argument("parent", metavar="RUN@STEP", help="a run directory and a step of it that has a checkpoint")
    parser.add_argument("overrides", nargs="*", help="what the child does otherwise, such as optimizer.lr=1e-4 seed=1")
    arguments = parser.parse_args(argv)
    from exp.run_report import print_report

    run, step = _parsed(arguments.parent)
    report = fork(run, step, arguments.overrides)
    print_report(report)
    return 0 if report.status == "completed" else 1


def _parsed(parent: str) -> tuple[Path, int | None]:
    name, _, step = parent.rpartition("@")
    if not name:
        name, step = parent, ""
    if step and not step.isdecimal():
        raise config_error("RUN@STEP", got=repr(parent), expected="a run directory, @ and a step")
    run = Path(name).absolute()
    if not (run / "config.yaml").is_file():
        raise RunError(f"{run} has no config.yaml; expected a run directory, outputs/<name>/<date>/<time>")
    return run, int(step) if step else None


def fork(run: Path, step: int | None, overrides: Sequence[str]) -> Any:
    """Run the child.

    step: of the parent's optimizer; None is its newest checkpoint.
    Returns: its report. Raises: as exp.fit; ConfigError where the state of the parent does not fit the child.
    """
    import yaml

    with announce_torch_import():
        from exp.check.continuation import changed_values, examine_resume
        from exp.check.resolution import resolve
        from exp.check.stages import compose
        from exp.config.found_run import merge_overrides
        from exp.config.versions import with_present_keys
        from exp.engine.checkpointing import CONFIG
        from exp.start import fit

    config = compose(merge_overrides(run, overrides, without=("resume", "runtime.autoresume", "hydra.run.dir")))
    config.resume, config.runtime.autoresume = None, False
    path, state = _chosen(run, step)
    resolved = resolve(config)
    changed = {}
    if not resolved.errors:  # else fit tells them
        errors = examine_resume({**resolved.plain, "resume": str(path)}, is_fork=True).errors
        before, now = with_present_keys(yaml.safe_load(state[CONFIG])), yaml.safe_load(resolved.yaml)
        changed = changed_values({**before, "resume": None}, now)
        if errors or (errors := tuple(_unfit(state, changed, now))):
            raise ConfigError(errors)
        state = with_values(state, changed, groups=(now["optimizer"] or {"groups": {}})["groups"])
    return fit(config, begin=partial(_begin, run=run, path=path, state=state, changed=changed))


def _chosen(run: Path, step: int | None) -> tuple[Path, State]:
    """Return the checkpoint to begin from, and its state."""
    from exp.check.starting_point import states_of
    from exp.engine.checkpointing import POSITION

    found = {state[POSITION]["step"]: (path, state) for path, state in reversed(list(states_of(run)))}
    if not found:
        raise RunError(f"{run} has no whole checkpoint to begin from")
    wanted = max(found) if step is None else step
    if wanted not in found:
        expected = f"a step that has a checkpoint: {among(map(str, sorted(found)))}"
        raise config_error("RUN@STEP", got=f"step {wanted}", expected=expected)
    return found[wanted]


def _unfit(state: State, changed: Mapping[str, tuple[Any, Any]], now: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Values of the optimizer that cannot be put into its state."""
    from exp.check.continuation import INCIDENTAL

    values = [key for key in changed if key.startswith("optimizer.")]
    if values and now["phases"]:
        yield ErrorDetails(key=values[0], got="another value, in a fork of a run with phases", expected="the parent's")
    for key in values if not now["phases"] else ():
        name = key.removeprefix("optimizer.")
        groups = [group for one in state["optimizer_states"] for group in one["param_groups"]]
        if name not in INCIDENTAL and not all(name in group for group in groups):
            expected = "the parent's value: the optimizer does not keep this one with its groups"
            yield ErrorDetails(key=key, got="another value, in a fork", expected=expected)


def _begin(directory: Path, *, run: Path, path: Path, state: State, changed: Mapping[str, tuple[Any, Any]]) -> Path:
    """Put the parent's state, with the child's values, into the child's directory, and record where it came from."""
    from exp.cli.resume import START
    from exp.config.freeze import record_parent
    from exp.engine.checkpoint import CHECKPOINTS, AtomicCheckpointIO, copy_checkpoint, read_checkpoint
    from exp.engine.checkpointing import BEST, CONFIG, POSITION
    from exp.engine.recording import LATEST

    beside = path.with_name("best.ckpt")
    start = directory / CHECKPOINTS / START
    start.parent.mkdir()
    best = state[BEST]
    if best is not None and beside.is_file() and read_checkpoint(beside).get(BEST) == best:
        copy_checkpoint(beside, start.with_name("best.ckpt"))
    else:
        best = None  # its file is gone: the best is sought from here
    text = (directory / "config.yaml").read_text(encoding="utf-8")
    # The child's report has the child's own values: it may not log all that the parent did.
    AtomicCheckpointIO().save_checkpoint({**state, BEST: best, CONFIG: text, LATEST: {}}, start)
    parent = {"run": str(run), "step": state[POSITION]["step"], "checkpoint": str(path), "changed": changed}
    record_parent(directory, parent)
    return start


def with_values(state: State, changed: Mapping[str, tuple[Any, Any]], *, groups: Mapping[str, Any]) -> State:
    """A checkpoint whose optimizer has other values: the state holds them, and would bring the old ones back.

    A learning rate that a schedule has moved is moved from the new one as it was from the old.

    changed: values by dotted key, was and is. groups: of the optimizer, which may have values of their own.
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
    def moved(rate: float) -> float:
        return now if rate == was else rate / was * now

    for key in {"lr", "initial_lr"} & group.keys():
        group[key] = moved(group[key])
    for schedule in schedules:
        for key in {"base_lrs", "_last_lr"} & schedule.keys():
            schedule[key][place] = moved(schedule[key][place])
    inner = [schedule for one in schedules for schedule in one.get("_schedulers", ())]
    if inner:
        _set_rate({}, inner, place, was=was, now=now)
