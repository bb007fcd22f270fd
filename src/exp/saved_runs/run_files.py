"""What a run left on disk: its config, its report, its curves, and its network with the weights that it saved."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from torch import Tensor, nn

from exp.check.plan import Resolved
from exp.check.rules import weights_of_run
from exp.config.module_key import brings_data
from exp.construct import build_data, build_module, build_network, build_run_precision
from exp.data.data import Data
from exp.data.randomness import preserve_generators
from exp.engine.checkpoint import CHECKPOINTS, CURRENT, State, read_checkpoint
from exp.errors import ConfigError, Fault, RunError
from exp.run_report import Report, read_report
from exp.shared_types import DataSpec
from exp.spelling import among
from exp.tensorboard.curves import Curve, read_curves

WORDS = ("best", "last")
# Of a training module of exp's: its network's names in a state dict begin with it.
PREFIX = "network."
# Of a run directory, where what is exported lies.
EXPORTS = "exports"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run that is on disk, or one checkpoint of it.

    directory: of the run, an absolute path; None of a checkpoint that lies elsewhere than its run has put it.
    checkpoint: the one that was named; None of a run directory, whose best is taken, or else its last.
    resolved: the config with which the run was built.
    """

    directory: Path | None
    checkpoint: Path | None
    resolved: Resolved

    @property
    def config(self) -> DictConfig:
        """The frozen config, every interpolation resolved."""
        return self.resolved.config

    @functools.cached_property
    def report(self) -> Report:
        """What report.json says of the run's end.

        Raises: RunError where there is none.
        """
        return read_report(self._directory("report.json"))

    @functools.cached_property
    def history(self) -> History:
        """All scalars of the run by optimizer step, out of its event files.

        Raises: RunError where there are none: a run without logger=[tensorboard].
        """
        events = self._directory("its curves") / "tensorboard"
        found = read_curves(events, wants=lambda tag: True)
        if not found.by_tag:
            why = "; ".join(found.problems) or "the run had no logger=[tensorboard], or has not written yet"
            raise RunError(f"{events} holds no scalars: {why}")
        return History(curves=found.by_tag, problems=tuple(found.problems))

    @functools.cached_property
    def data(self) -> Data:
        """The run's data set, its parts, standardisation and classes as they were in training.

        Raises: ConfigError where the data is not there any more; RunError for a module that brings loaders of its own.
        """
        if brings_data(self.resolved.plain):
            kind = self.resolved.plain["data"]["_target_"]
            raise RunError(f"the run's data is {kind}, loaders of the user's own; expected exp.data.data.Data")
        with preserve_generators():
            return build_data({**self.resolved.plain, "resume": str(self.path_of(None))})

    def network(self, weights: str | Path | None = None, *, averaged: bool = True) -> nn.Module:
        """The network that was trained, in the dtypes that it was trained in, on the CPU, and in evaluation mode.

        Of a run with a LightningModule of the user's own, that module.

        weights: best, last, or the path of a checkpoint; None: the checkpoint that was loaded, else the best, else the
            last. averaged: of a run with an average of its weights, whether the average is taken, which is what was
            validated; False: the weights that were trained.
        Raises: RunError where there is no such checkpoint, or it is damaged or another network's; ConfigError for a
            target that is not allowed any more.
        """
        path = self.path_of(weights)
        plain, is_own = self.resolved.plain, self.resolved.plain["module"] is not None
        state = read_checkpoint(path, map_location="cpu")
        with preserve_generators():
            network = build_module(plain) if is_own else build_network(plain, DataSpec.of(plain["data"]))
        precision = build_run_precision(plain, device_type="cpu")
        precision.is_whole = is_own
        precision.represent(network)
        _fill(network, _weights(state, path, averaged=averaged), path=path, prefix="" if is_own else PREFIX)
        return network.eval()

    def path_of(self, weights: str | Path | None) -> Path:
        """The checkpoint that `network` takes.

        Raises: RunError where there is none.
        """
        if weights is None and self.checkpoint is not None:
            return self.checkpoint
        if weights is not None and str(weights) not in WORDS:
            path = Path(weights)
            if not path.is_file():
                raise RunError(f"{path} is not there; expected best, last, or the path of a checkpoint")
            return path
        directory = self._directory("its checkpoints")
        found = weights_of_run(directory) if weights is None else directory / CHECKPOINTS / f"{weights}.ckpt"
        if found is None or not found.is_file():
            there = sorted(path.name for path in (directory / CHECKPOINTS).glob("*.ckpt"))
            wanted = "checkpoint" if weights is None else f"{weights}.ckpt"
            raise RunError(f"{directory} has no {wanted}: {f'it has {among(there)}' if there else 'it saved none'}")
        return found

    def refuse_own_file(self, output: Path, *, weights: str | Path | None) -> None:
        """Raise ConfigError for an output that replaces a file of the run, or that lies in its checkpoints/.

        Args:
            output: The output of a command.
            weights: The checkpoint that the command reads, as in `network`.
        """
        whose, place = None, output.resolve()
        if is_same_file(output, self.path_of(weights)):
            whose = "from which the weights are read"
        elif self.directory is not None and place.is_relative_to(self.directory.resolve()):
            first = place.relative_to(self.directory.resolve()).parts[:1]
            if first == (CHECKPOINTS,) or (output.exists() and first != (EXPORTS,)):
                whose = f"a place of the run {self.directory}"
        if whose is not None:
            expected = f"another file: in the directory of a run, {EXPORTS}/ and new names are free"
            raise ConfigError([Fault(key="output", got=f"{output}, {whose}", expected=expected, source="command line")])

    def _directory(self, wanted: str) -> Path:
        if self.directory is None:
            raise RunError(f"{self.checkpoint} lies outside of its run directory, where {wanted} would be")
        return self.directory


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file that is there, by whatever links."""
    return one.exists() and other.exists() and one.samefile(other)


def _weights(state: State, path: Path, *, averaged: bool) -> Mapping[str, Tensor]:
    if not averaged and CURRENT not in state:
        raise RunError(f"{path} has no average beside its weights; leave averaged out")
    weights: Mapping[str, Tensor] = state["state_dict"] if averaged else state[CURRENT]
    return weights


def _fill(network: nn.Module, weights: Mapping[str, Tensor], *, path: Path, prefix: str) -> None:
    """Raises: RunError where they are not those of the network."""
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    try:
        network.load_state_dict(own)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} has other weights than the network of its config: {reason:.400}") from error


class History(Mapping[str, Curve]):
    """The curves of a run by tag: `history["loss/val"].steps` and `.values`, int64 and float64 `[N]`.

    curves: by tag. problems: what of the event files could not be read, a line each.
    """

    def __init__(self, *, curves: Mapping[str, Curve], problems: tuple[str, ...] = ()) -> None:
        self._curves, self.problems = dict(sorted(curves.items())), problems

    def __getitem__(self, tag: str) -> Curve:
        """Raises: KeyError for a tag that the run did not log, naming those like it."""
        if tag not in self._curves:
            raise KeyError(f"the run logged no {tag}; expected one of {among(self._curves, word=tag)}")
        return self._curves[tag]

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def table(self) -> dict[str, np.ndarray]:
        """One row a step at which anything was logged: `step`, int64 `[N]`, and a column a tag, float64 `[N]`.

        nan where a tag has no value at a step. `pandas.DataFrame(run.history.table())` takes it.
        """
        steps = np.unique(np.concatenate([np.empty(0, np.int64), *(curve.steps for curve in self._curves.values())]))
        columns = {"step": steps}
        for tag, curve in self._curves.items():
            columns[tag] = np.full(len(steps), np.nan)
            columns[tag][np.searchsorted(steps, curve.steps)] = curve.values
        return columns
