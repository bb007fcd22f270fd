"""python -m exp.resume RUN [overrides]: resume a run.

With --verify, the steps between the last two checkpoints are trained again and compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import RunError, config_error
from exp.output import command

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from exp.engine.checkpoint import State

EXACT, DIFFERS = 0, 1
# The checkpoint from which a fork starts, in the fork's folder of checkpoints.
START = "start.ckpt"
# Entries of a checkpoint that may differ between equal runs. They are times, measured memory, the config, the list of
# files, and Lightning's counters, which exp does not need to resume a run.
NOT_COMPARED = ("exp_seconds", "exp_latest", "exp_config", "exp_manifest", "exp_kept", "loops")
FIRST = ("state_dict", "optimizer_states", "lr_schedulers")


@command()
def main(argv: Sequence[str]) -> int:
    """Resume a run from its newest intact checkpoint with the run's command, or verify that resuming is exact.

    Returns:
        Exit status of exp.train. With --verify: 0 if all values are equal, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m exp.resume", description=main.__doc__)
    parser.add_argument("run", type=Path, help="a run directory, outputs/<name>/<date>/<time>")
    parser.add_argument("overrides", nargs="*", help="more overrides of the run, such as trainer.max_epochs=60")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="repeat the training from the second-to-last checkpoint in a new directory, and compare the results",
    )
    trust = "with --verify: a package whose classes the config may name, as in security.allow"
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=trust)
    arguments = parser.parse_args(argv)
    if not (arguments.run / "config.yaml").is_file():
        raise RunError(f"{arguments.run} has no config.yaml; expected a run directory, outputs/<name>/<date>/<time>")
    if not arguments.verify:
        return resume(arguments.run, arguments.overrides)
    if arguments.overrides:
        raise config_error("--verify", got=" ".join(arguments.overrides), expected="no overrides")
    difference, text = verify(arguments.run, allow=arguments.allow)
    print(text)
    return EXACT if difference is None else DIFFERS


def resume(run: Path, overrides: Sequence[str]) -> int:
    """Resume a run from its newest intact checkpoint, with its overrides and additional ones.

    Args:
        run: Run directory.
        overrides: Overrides that are added to those of the run.

    Returns:
        Exit status of exp.train.

    Raises:
        RunError: The run is still running, or has no intact checkpoint.
    """
    from exp.check.starting_point import newest_of
    from exp.cli import train
    from exp.config.found_run import merge_overrides
    from exp.config.frozen import read_overrides
    from exp.files import is_locked

    if is_locked(run / "config.yaml"):
        raise RunError(f"{run} is still running. Wait for its end, or send SIGTERM: the run then saves a checkpoint")
    found = newest_of(run)
    for note in found.notes:
        print(note, file=sys.stderr)
    if found.path is None:
        raise RunError(f"{run} has no intact checkpoint to resume from. Its command: {' '.join(read_overrides(run))}")
    return train.main([*merge_overrides(run, overrides), f"resume='{found.path}'"])


def verify(run: Path, *, allow: Sequence[str] = ()) -> tuple[str | None, str]:
    """Train again from the second-to-last checkpoint to the last, and compare the state with the last checkpoint.

    The training runs in a temporary directory.

    Args:
        run: Run directory.
        allow: Packages that the config may name. Default: none.

    Returns:
        The first difference of the states, and the text to print. The difference is None if all values are equal.

    Raises:
        ConfigError: The config has errors.
        RunError: The run has no checkpoint, or the training fails.
    """
    from exp.engine.checkpoint import read_checkpoint

    own = positions_of(run)
    if not own:
        raise RunError(f"{run} has no checkpoint to verify")
    last = max(own, key=lambda path: (own[path]["batches"], path.name == "last.ckpt"))
    before, found = train_again(run, to=own[last], allow=allow)
    difference = next(differences(read_checkpoint(last), found), None)
    text = f"{last}, step {own[last]['step']}, trained again from {before}"
    return difference, f"exact: {text}" if difference is None else f"differs: {text}\n  {difference}"


def positions_of(run: Path) -> dict[Path, Mapping[str, int]]:
    """Return the positions of the intact checkpoints that a run wrote, by path.

    A position is a dict with the epoch, the batch and the step. Checkpoints with another config are left out, such as
    those copied from another run.
    """
    from exp.check.starting_point import states_of
    from exp.engine.checkpointing import CONFIG, POSITION
    from exp.engine.progress import Position

    text = (run / "config.yaml").read_text(encoding="utf-8")
    return {
        path: dataclasses.asdict(Position.of(state[POSITION]))
        for path, state in states_of(run)
        if state[CONFIG] == text
    }


def train_again(run: Path, *, to: Mapping[str, int], allow: Sequence[str] = ()) -> tuple[str, State]:
    """Train from the last checkpoint before a position up to this position, in a temporary directory.

    Args:
        run: Run directory.
        to: Position at which the training ends, as fields of Position.
        allow: Packages that the config may name. Default: none.

    Returns:
        The path of the checkpoint from which the training started, or "the start". The second value is the state at the
        position.

    Raises:
        RunError: The training does not reach the position.
    """
    from exp.config.frozen import read_frozen, refuse_more_than
    from exp.engine.checkpoint import CHECKPOINTS, VERIFIED, read_checkpoint
    from exp.engine.checkpointing import POSITION
    from exp.start import fit

    refuse_more_than(allow, run)
    config = read_frozen(run)
    own = positions_of(run)
    earlier = [path for path in own if own[path]["step"] < to["step"]]
    # Without an earlier checkpoint, a fork starts from its start.ckpt.
    start = [str(path) for path in own if path.name == START] or [config.resume]
    before = str(max(earlier, key=lambda path: own[path]["batches"])) if earlier else start[0]
    with tempfile.TemporaryDirectory(prefix="exp-again-") as place:
        again = Path(place) / "run"
        reached = again / CHECKPOINTS / VERIFIED
        try:
            fit(_replay_config(config, again, before=before, to=to))
        except RunError:
            # The training loads one batch after the position. The first training may have failed at this batch, so an
            # error is raised only if the state was not saved.
            if not reached.is_file():
                raise
        found = read_checkpoint(reached if reached.is_file() else reached.with_name("last.ckpt"))
    if any(found[POSITION][name] != value for name, value in to.items()):
        raise RunError(f"a second training of {run} from {before or 'the start'} does not reach step {to['step']}")
    return before or "the start", found


def _replay_config(config: DictConfig, directory: Path, *, before: str | None, to: Mapping[str, int]) -> DictConfig:
    """Change a config so that its run trains in another directory up to a position, and writes no other outputs.

    Args:
        config: Frozen config, which is changed in place.
        directory: Run directory of the new run.
        before: Checkpoint from which the run starts. None: the beginning.
        to: Position at which the training ends, as fields of Position.
    """
    from omegaconf import OmegaConf, open_dict

    from exp.config.frozen import ALLOWED, COMPOSITION, OWN_GROUPS

    with open_dict(config):
        config.resume, config.test, config.logger = before, False, {}
        config.runtime.autoresume = False
        config.checkpoint.every_n_steps = config.checkpoint.every_n_minutes = None
        config.checkpoint.save_last = True
        if config.trainer.max_time is not None:
            # The time limit is raised, because the repeated training may take longer. It ends at the position instead.
            config.trainer.max_time = "365:00:00:00"
        config.trainer.enable_progress_bar = False
        # StateAt must run before the other callbacks, like the callback that saves last.ckpt.
        state = {"_target_": "exp.extras.debugging.state_at.StateAt", "position": dict(to)}
        config.callbacks = {"verified_state": state, **config.callbacks}
        config[COMPOSITION] = OmegaConf.create(
            {
                "directory": str(directory),
                "overrides": [],
                "of_sweep": [],
                "layers": [],
                ALLOWED: list(config.security.allow),
                OWN_GROUPS: list(map(str, config)),
            }
        )
    return config


def differences(expected: State, found: State) -> Iterator[str]:
    """Yield a line for each difference of two checkpoints. Differences of the weights come first."""
    for key in dict.fromkeys([*FIRST, *sorted({*expected, *found})]):
        if key not in NOT_COMPARED:
            yield from _differences(expected.get(key), found.get(key), key)


def _differences(expected: object, found: object, key: str) -> Iterator[str]:
    import torch

    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            yield f"{key}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
        elif not torch.equal(expected, found):
            other = expected != found
            largest = (expected.double() - found.double()).abs().max()
            yield f"{key}: {int(other.sum())} of {other.numel()} values, by {float(largest):.3g} at most"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name in dict.fromkeys([*expected, *found]):
            if name != "Timer":  # Lightning's timer
                yield from _differences(expected.get(name), found.get(name), f"{key}.{name}")
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        for place, pair in enumerate(zip(expected, found, strict=True)):
            yield from _differences(*pair, f"{key}.{place}")
    elif repr(expected) != repr(found):
        yield f"{key}: {found!r:.60} instead of {expected!r:.60}"
