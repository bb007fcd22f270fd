"""Access to the files of a run: its config, report, curves, and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor, nn

from exp.check.rules import weights_of_run
from exp.config.settings import Settings
from exp.construct import build_data, build_module, build_network, build_run_precision
from exp.data.data import Data
from exp.data.randomness import preserve_generators
from exp.engine.checkpoint import CHECKPOINTS, CURRENT, State, read_checkpoint
from exp.errors import COMMAND_LINE, RunError, config_error
from exp.run_report import Report, read_report
from exp.shared_types import DataSpec
from exp.spelling import among
from exp.tensorboard.event_file import Curve, read_curves

WORDS = ("best", "last")
# Prefix of network parameters in the state dict of exp's training module.
PREFIX = "network."
# Directory of exported files, below a run directory.
EXPORTS = "exports"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run on disk, or one of its checkpoints.

    Args:
        directory: Absolute path of the run directory. None for a checkpoint outside of a run directory.
        checkpoint: Path of the loaded checkpoint. None if a run directory was loaded.
        config: The frozen config. All interpolations are resolved.
        settings: The config as typed objects.
    """

    directory: Path | None
    checkpoint: Path | None
    config: DictConfig
    settings: Settings

    @functools.cached_property
    def report(self) -> Report:
        """Content of report.json.

        Raises:
            RunError: The file does not exist.
        """
        return read_report(self._directory("report.json"))

    @functools.cached_property
    def history(self) -> History:
        """Curves of all scalars in the run's event files. Their steps are optimizer steps.

        Raises:
            RunError: The run has no scalars, for example because it ran without logger=[tensorboard].
        """
        events = self._directory("the file of the curves") / "tensorboard"
        found = read_curves(events, wants=lambda tag: True)
        if not found.by_tag:
            why = "; ".join(found.problems) or "the run had no logger=[tensorboard], or wrote no scalar yet"
            raise RunError(f"{events} holds no scalars: {why}")
        return History(sorted(found.by_tag.items()))

    @functools.cached_property
    def data(self) -> Data:
        """The run's data, with the splits, the standardization and the classes of the training.

        Raises:
            ConfigError: The data does not exist.
            RunError: The run has the loaders of a LightningDataModule.
        """
        if self.settings.has_own_loaders:
            kind = self.settings.data["_target_"]
            raise RunError(f"the run's data is {kind}, which has its own loaders; expected exp.data.data.Data")
        with preserve_generators():
            return build_data(dataclasses.replace(self.settings, resume=str(self.path_of(None))))

    def network(self, weights: str | Path | None = None, *, averaged: bool = True) -> nn.Module:
        """Return the trained neural network on the CPU, in evaluation mode and in the dtypes of training.

        If the run trained the user's LightningModule, that module is returned.

        Args:
            weights: `best`, `last`, or the path of a checkpoint. None uses the loaded checkpoint if there is one.
                Otherwise None uses the best checkpoint, or the last one if there is no best. Default: None.
            averaged: Whether to use the averaged weights if the run kept an average. Validation used the average.
                Default: True.

        Raises:
            RunError: The checkpoint does not exist, is damaged, or belongs to another network.
            ConfigError: A target is not allowed.
        """
        path = self.path_of(weights)
        settings, is_own = self.settings, self.settings.module is not None
        state = read_checkpoint(path, map_location="cpu")
        with preserve_generators():
            network = build_module(settings) if is_own else build_network(settings, DataSpec.of(settings.data))
        precision = build_run_precision(settings, device_type="cpu")
        precision.is_whole = is_own
        precision.represent(network)
        _fill(network, _weights(state, path, averaged=averaged), path=path, prefix="" if is_own else PREFIX)
        return network.eval()

    def path_of(self, weights: str | Path | None) -> Path:
        """Return the path of the checkpoint from which the method `network` loads weights.

        Args:
            weights: `best`, `last`, or the path of a checkpoint. None selects the same checkpoint as in `network`.

        Raises:
            RunError: The checkpoint does not exist.
        """
        if weights is None and self.checkpoint is not None:
            return self.checkpoint
        if weights is not None and str(weights) not in WORDS:
            path = Path(weights)
            if not path.is_file():
                raise RunError(f"{path} does not exist; expected best, last, or the path of a checkpoint")
            return path
        directory = self._directory("the run's other checkpoints")
        found = weights_of_run(directory) if weights is None else directory / CHECKPOINTS / f"{weights}.ckpt"
        if found is None or not found.is_file():
            there = sorted(path.name for path in (directory / CHECKPOINTS).glob("*.ckpt"))
            wanted = "checkpoint" if weights is None else f"{weights}.ckpt"
            raise RunError(f"{directory} has no {wanted}; it has {among(there) if there else 'no checkpoint'}")
        return found

    def refuse_own_file(self, output: Path, *, weights: str | Path | None) -> None:
        """Raise ConfigError if a command must not write an output file.

        The file must not replace the checkpoint or a file of the run, and must not be in the run's folder of
        checkpoints.

        Args:
            output: Output path of a command.
            weights: The checkpoint that the command reads, as in `network`.
        """
        whose, place = None, output.resolve()
        if is_same_file(output, self.path_of(weights)):
            whose = "the checkpoint with the weights"
        elif self.directory is not None and place.is_relative_to(self.directory.resolve()):
            first = place.relative_to(self.directory.resolve()).parts[:1]
            if first == (CHECKPOINTS,) or (output.exists() and first != (EXPORTS,)):
                whose = f"a file of the run {self.directory}"
        if whose is not None:
            expected = f"a file outside the run directory, a new file, or a file in {EXPORTS}/"
            raise config_error("output", got=f"{output}, {whose}", expected=expected, source=COMMAND_LINE)

    def _directory(self, wanted: str) -> Path:
        if self.directory is None:
            raise RunError(f"{self.checkpoint} is not in a run directory, so that {wanted} cannot be found")
        return self.directory


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same existing file."""
    return one.exists() and other.exists() and one.samefile(other)


def _weights(state: State, path: Path, *, averaged: bool) -> Mapping[str, Tensor]:
    if not averaged and CURRENT not in state:
        raise RunError(f"{path} has no average of weights, because the run has no callbacks=[ema]. Leave averaged out")
    weights: Mapping[str, Tensor] = state["state_dict"] if averaged else state[CURRENT]
    return weights


def _fill(network: nn.Module, weights: Mapping[str, Tensor], *, path: Path, prefix: str) -> None:
    """Load weights into a network.

    Raises:
        RunError: The weights belong to another network.
    """
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    try:
        network.load_state_dict(own)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} has weights of another network than its config: {reason:.400}") from error


class History(dict[str, Curve]):
    """The curves of a run by tag.

    For example, `history["loss/val"].steps` is int64 `[N]`, and `history["loss/val"].values` is float64 `[N]`.
    """

    def __missing__(self, tag: str) -> Curve:
        raise KeyError(f"the run did not log {tag}; expected one of {among(self, word=tag)}")
