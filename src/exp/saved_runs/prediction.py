"""Predict with the weights of a saved run: its data's preparation, its network and precision, its class names."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, open_dict
from torch import Tensor

from exp.config.frozen import literal
from exp.config.settings import Settings, settings_of
from exp.config.targets import resolve
from exp.construct import build_objective, plain_config
from exp.data.column_source import raw_columns
from exp.data.csv_source import Dialect
from exp.data.unlabelled import UnlabelledImages, UnlabelledSeries, pictures_at
from exp.engine.datamodule import fitted_in
from exp.engine.predictions import archive_of, read_shares
from exp.errors import ConfigError, ErrorDetails, RunError, config_error
from exp.saved_runs.answers import Reading, readings_of
from exp.saved_runs.evaluation import evaluation_config
from exp.saved_runs.run_files import RunFiles
from exp.shared_types import DataSpec
from exp.start import fit

ARRAYS = "exp.data.unlabelled.UnlabelledArrays"
# Where a data node names a data set.
PLACES = ("dataset", "train", "val", "test")
# What the training data said of themselves, and samples without answers cannot.
TOLD = ("inputs", "input_shape", "input_dtype", "num_classes", "num_outputs")
# Of a data node, what is of training.
OF_TRAINING = ("sampler", "batch_sampler")


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The outputs of the network for each sample, in the order of the input.

    Args:
        outputs: By name, `[N, ...]`, or a list of N arrays of different lengths.
        files: The files of pictures; else empty.
        kept: Columns of the input that the command keeps, by name.
        readings: The descriptions of outputs that a loss compares with a target, by name.
    """

    outputs: Mapping[str, np.ndarray | list[np.ndarray]]
    files: Sequence[Path] = ()
    kept: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.outputs.values())))

    def answers(self, output: str | None = None) -> dict[str, np.ndarray]:
        """Return the answers of an output; see Reading.answers.

        Args:
            output: The name; None takes the only output with answers.

        Raises:
            RunError: There is no such output, or its samples differ in length.
        """
        names = list(self.readings)
        name = names[0] if output is None and len(names) == 1 else output
        if name is None or name not in self.readings:
            raise RunError(
                f"output is {name}; expected one that a loss compared: {', '.join(names) or 'there is none'}"
            )
        values = self.outputs[name]
        if isinstance(values, list):
            raise RunError(f"the samples of {name} differ in length; read each by readings[{name!r}].answers")
        return self.readings[name].answers(values)


def predict(
    run: RunFiles,
    given: str | Path | Mapping[str, Any] | Any,
    *,
    weights: str | Path | None = None,
    overrides: Sequence[str] = (),
    keep: Sequence[str] = (),
    is_shown: bool = False,
) -> Predictions:
    """Run the network over samples without targets.

    Args:
        run: The run.
        given: A file, a folder, one array `[N, ...]`, or arrays by the name of the input, with the content of a file of
            the run's data: columns of a table, pictures, or arrays before transforms.
        weights: The checkpoint, as in RunFiles.network.
        overrides: Changes of the run's command, as in `evaluate`.
        keep: Columns of the input that are copied to the answers.
        is_shown: Whether to show a progress bar.

    Raises:
        ConfigError: The input does not fit the run's data.
        RunError: The prediction fails.
    """
    # Not tempfile.TemporaryDirectory: a process forked from this one would take it away at its own end.
    place = Path(tempfile.mkdtemp(prefix="exp-predict-"))
    try:
        path = Path(given).absolute() if isinstance(given, str | Path) else _saved(given, run, place)
        checkpoint = run.path_of(weights).absolute()
        config = _predicting(run, path, checkpoint=checkpoint, overrides=overrides, place=place)
        config.trainer.enable_progress_bar = is_shown
        try:
            kept = _kept(run, path, keep) if keep else {}
            report = fit(config)
        except ConfigError as error:
            raise ConfigError([_of_input(error) for error in error.errors]) from error
        if report.status != "completed":
            raise RunError(f"the prediction is not complete: it {report.status}")
        found = _assembled(read_shares(Path(report.directory)), config, checkpoint, classes=stated_classes(run))
    finally:
        shutil.rmtree(place)
    for name, values in kept.items():
        if len(values) != len(found):
            got = f"{name} of {len(values)} rows, and {len(found)} samples"
            raise config_error("keep", got=got, expected="a row for each sample", source="command line")
    return dataclasses.replace(found, kept=kept)


def _predicting(run: RunFiles, path: Path, *, checkpoint: Path, overrides: Sequence[str], place: Path) -> DictConfig:
    """Return the config of a run that predicts the samples at a path, and logs nothing."""
    config = evaluation_config(run, overrides, checkpoint=checkpoint, asked="predict", directory=place)
    told = {key: run.config.data[key] for key in TOLD}
    answers = _set_node(run).get("target")
    if isinstance(answers, Mapping):  # targets by name, which nothing tells from inputs in a batch
        told["inputs"] = {name: one for name, one in (told["inputs"] or {}).items() if name not in answers} or None
    unlabelled = unlabelled_node(run, path)
    with open_dict(config):
        config.data = {**config.data, **dict.fromkeys((*PLACES, *OF_TRAINING)), **told, "test": unlabelled}
        config.logger = {}
    return config


def _saved(given: Any, run: RunFiles, place: Path) -> Path:
    """Write arrays to an .npz file, and return it; raise RunError for anything else."""
    names = list(DataSpec.of(run.settings.data).inputs)
    arrays = given if isinstance(given, Mapping) else {names[0]: given}
    held = {}
    for name, value in arrays.items():
        try:
            array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        except ValueError as error:
            got = f"{name} is a {type(value).__name__} whose parts differ in length"
            raise RunError(f"{got}; expected an array [N, ...]: give each length by itself") from error
        if array.dtype.kind not in "fiubU" or not array.ndim:
            raise RunError(f"{name} is {type(value).__name__}; expected numbers or words, an array [N, ...]")
        held[str(name)] = array
    (place / "given.npz").write_bytes(archive_of(held))
    return place / "given.npz"


def _kept(run: RunFiles, path: Path, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return columns of the input by name.

    Raises: ConfigError for a column that is not there, and for a data set whose samples are several rows each.
    """
    node = unlabelled_node(run, path)
    if is_of(node, UnlabelledSeries):
        got, expected = f"[{', '.join(names)}], and windows of {node['length']} rows", "a sample for each row"
        raise config_error("keep", got=got, expected=expected, fix="Leave keep out", source="command line")
    dialect = Dialect(**{one.name: node[one.name] for one in dataclasses.fields(Dialect) if one.name in node})
    return {name: list(values) for name, values in raw_columns(path, dialect, names).items()}


def unlabelled_node(run: RunFiles, path: Path) -> dict[str, Any]:
    """Return the node of the data set that reads the input as the run's own data set reads its files."""
    data, node = run.settings.data, _set_node(run)
    allow = run.settings.security.allow
    # Whatever the data set is made of: a function of the user's own may make it, too.
    own = resolve(node["_target_"], allow=allow)
    kind = getattr(own, "unlabelled", ARRAYS)
    takes = inspect.signature(resolve(kind, allow=())).parameters
    known = {} if kind == ARRAYS else inspect.signature(own).parameters
    given = {**{name: one.default for name, one in known.items() if one.default is not one.empty}, **node}
    options = {name: value for name, value in given.items() if name in takes and name not in ("path", "inputs")}
    if kind == ARRAYS:
        specs = DataSpec.of(data).inputs
        options["inputs"] = {name: {"shape": list(one.shape), "dtype": one.dtype} for name, one in specs.items()}
        changing = ("transforms", "eval_transforms", "batch_transforms")
        options["is_final"] = not any(data.get(key) for key in changing)
    elif "inputs" in takes and node.get("inputs") is not None:
        options["inputs"] = node["inputs"]
    return {"_target_": kind, "path": literal(str(path)), **options}


def is_of(node: Mapping[str, Any], kind: type) -> bool:
    """Return whether a node of unlabelled_node is of a data set class."""
    return resolve(node["_target_"], allow=()) is kind


def _set_node(run: RunFiles) -> Mapping[str, Any]:
    """Return the node of a data set of the run. Raises: RunError for loaders of the user's own."""
    data = run.settings.data
    if run.settings.has_own_loaders:
        raise RunError(f"the run's data is {data['_target_']}, loaders of the user's own, which read no other files")
    node: Mapping[str, Any] = next(data[name] for name in PLACES if data.get(name) is not None)
    return node


def stated_classes(run: RunFiles) -> Sequence[str] | None:
    """Return the names of the classes in the config."""
    nodes = [run.settings.data[name] for name in PLACES if run.settings.data.get(name) is not None]
    return next((node["classes"] for node in nodes if isinstance(node.get("classes"), list)), None)


def _assembled(
    shares: Mapping[str, list[np.ndarray]], config: DictConfig, checkpoint: Path, *, classes: Sequence[str] | None
) -> Predictions:
    settings = settings_of(plain_config(config))
    outputs: dict[str, np.ndarray | list[np.ndarray]] = {}
    for name, batches in shares.items():
        same = len({batch.shape[1:] for batch in batches}) == 1
        outputs[name] = np.concatenate(batches) if same else [sample for batch in batches for sample in batch]
    node = settings.data["test"]
    is_pictures = is_of(node, UnlabelledImages)
    options = {"picture": node["picture"]} if "picture" in node else {}
    files = pictures_at(Path(node["path"]), **options) if is_pictures else ()
    readings = readings_at(settings, checkpoint, classes=classes)
    return Predictions(
        outputs=outputs,
        files=tuple(files),
        readings={name: reading for name, reading in readings.items() if name in outputs},
    )


def readings_at(settings: Settings, checkpoint: Path, *, classes: Sequence[str] | None) -> dict[str, Reading]:
    """Return the readings of outputs by name, with the figures of a checkpoint; none of a user's own module."""
    is_own = settings.module is not None
    return {} if is_own else readings_of(build_objective(settings), fitted_in(checkpoint) or {}, classes=classes)


def _of_input(error: ErrorDetails) -> ErrorDetails:
    is_of_input = error.key.startswith(("data.dataset", "data.test")) or error.key == "data"
    return dataclasses.replace(error, key="input", source=None) if is_of_input else error
