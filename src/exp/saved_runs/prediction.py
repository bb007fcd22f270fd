"""Predictions of a saved run. The data preparation, network, precision and class names are those of the run."""

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
from exp.data.unlabelled import UnlabelledImages, pictures_at
from exp.engine.datamodule import fitted_in
from exp.engine.predictions import archive_of, read_shares
from exp.errors import ConfigError, ErrorDetails, RunError
from exp.saved_runs.answers import Reading, readings_of
from exp.saved_runs.evaluation import evaluation_config
from exp.saved_runs.run_files import RunFiles
from exp.shared_types import DataSpec
from exp.start import fit

ARRAYS = "exp.data.unlabelled.UnlabelledArrays"
# Keys of the node `data` that contain data sets.
PLACES = ("dataset", "train", "val", "test")
# Keys of the node `data` whose values come from the training data. Samples without targets do not determine the values.
FROM_DATA = ("inputs", "input_shape", "input_dtype", "num_classes", "num_outputs")
# Keys of the node `data` that have an effect only in training.
OF_TRAINING = ("sampler", "batch_sampler")


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The outputs of the network for each sample, in the order of the input.

    Args:
        outputs: Outputs by name: an array `[N, ...]`. If samples differ in length, a list of N arrays.
        files: Files of the pictures. Default: empty, for other data.
        readings: Descriptions of the outputs that a loss compares with a target, by output name. Default: empty.
    """

    outputs: Mapping[str, np.ndarray | list[np.ndarray]]
    files: Sequence[Path] = ()
    readings: Mapping[str, Reading] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.outputs.values())))

    def answers(self, output: str | None = None) -> dict[str, np.ndarray]:
        """Return the predictions for an output: classes with probabilities, or numbers, as in Reading.answers.

        Args:
            output: Name of the output. Default: None, which selects the only output that a loss compares with a target.

        Raises:
            RunError: No such output exists, or its samples differ in length.
        """
        names = list(self.readings)
        name = names[0] if output is None and len(names) == 1 else output
        if name is None or name not in self.readings:
            known = ", ".join(names) or "the run has none"
            raise RunError(f"output is {name}; expected an output that a loss compares with a target: {known}")
        values = self.outputs[name]
        if isinstance(values, list):
            raise RunError(f"samples of {name} differ in length. Pass one at a time to readings[{name!r}].answers")
        return self.readings[name].answers(values)


def predict(
    run: RunFiles,
    given: object,
    *,
    weights: str | Path | None = None,
    overrides: Sequence[str] = (),
    is_shown: bool = False,
) -> Predictions:
    """Run the network of a saved run over samples without targets.

    Args:
        run: The saved run.
        given: A file, a folder, one array `[N, ...]`, or arrays by input name. The content must be like a file of the
            run's data: table columns, pictures, or arrays before transforms.
        weights: `best`, `last`, or the path of a checkpoint. Default: None, which selects the checkpoint as in
            RunFiles.network.
        overrides: Overrides that are added to those of the run, as in `evaluate`.
        is_shown: Whether to show a progress bar. Default: False.

    Raises:
        ConfigError: The input does not fit the run's data.
        RunError: The prediction fails.
    """
    # tempfile.TemporaryDirectory is not used, because a forked process would remove the directory at its end.
    place = Path(tempfile.mkdtemp(prefix="exp-predict-"))
    try:
        path = Path(given).absolute() if isinstance(given, str | Path) else _save(given, run, place)
        checkpoint = run.path_of(weights).absolute()
        config = _predicting(run, path, checkpoint=checkpoint, overrides=overrides, place=place)
        config.trainer.enable_progress_bar = is_shown
        try:
            report = fit(config)
        except ConfigError as error:
            raise ConfigError([_as_input_error(one) for one in error.errors]) from error
        if report.status != "completed":
            raise RunError(f"the prediction was not completed: its status is {report.status}")
        return _assemble(read_shares(Path(report.directory)), config, checkpoint, classes=config_classes(run))
    finally:
        shutil.rmtree(place)


def _predicting(run: RunFiles, path: Path, *, checkpoint: Path, overrides: Sequence[str], place: Path) -> DictConfig:
    """Return the config of a run that predicts samples without loggers.

    Args:
        run: The saved run.
        path: File or folder of the samples.
        checkpoint: Path of the weights.
        overrides: Overrides that are added to those of the saved run.
        place: Parent directory of the new run directory.
    """
    config = evaluation_config(run, overrides, checkpoint=checkpoint, asked="predict", directory=place)
    known = {key: run.config.data[key] for key in FROM_DATA}
    targets = _set_node(run).get("target")
    if isinstance(targets, Mapping):  # `data.inputs` also lists the named targets of a batch, which are missing now
        known["inputs"] = {name: one for name, one in (known["inputs"] or {}).items() if name not in targets} or None
    unlabelled = unlabelled_node(run, path)
    with open_dict(config):
        config.data = {**config.data, **dict.fromkeys((*PLACES, *OF_TRAINING)), **known, "test": unlabelled}
        config.logger = {}
    return config


def _save(given: object, run: RunFiles, place: Path) -> Path:
    """Write the user's arrays to an .npz file, and return the path of the file.

    Raises:
        RunError: A value is not an array of numbers or text.
    """
    names = list(DataSpec.of(run.settings.data).inputs)
    arrays = given if isinstance(given, Mapping) else {names[0]: given}
    held = {}
    for name, value in arrays.items():
        try:
            array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        except ValueError as error:
            got = f"{name} is a {type(value).__name__} whose samples differ in length"
            raise RunError(f"{got}; expected an array [N, ...]. Predict each length separately") from error
        if array.dtype.kind not in "fiubU" or not array.ndim:
            raise RunError(f"{name} is {type(value).__name__}; expected an array [N, ...] of numbers or texts")
        held[str(name)] = array
    (place / "given.npz").write_bytes(archive_of(held))
    return place / "given.npz"


def unlabelled_node(run: RunFiles, path: Path) -> dict[str, Any]:
    """Return the config node of a data set without targets.

    The data set reads the files at a path in the same way as the run's data set reads its files.
    """
    data, node = run.settings.data, _set_node(run)
    allow = run.settings.security.allow
    # `own` is the class of the data set, or a user's function that returns the data set.
    own = resolve(node["_target_"], allow=allow)
    kind = getattr(own, "unlabelled", ARRAYS)
    takes = resolve(kind, allow=()).OPTIONS
    known = {} if kind == ARRAYS else inspect.signature(own).parameters
    given = {**{name: one.default for name, one in known.items() if one.default is not one.empty}, **node}
    options = {name: value for name, value in given.items() if name in takes and name != "inputs"}
    if kind == ARRAYS:
        specs = DataSpec.of(data).inputs
        options["inputs"] = {name: {"shape": list(one.shape), "dtype": one.dtype} for name, one in specs.items()}
        changing = ("transforms", "eval_transforms", "batch_transforms")
        options["is_final"] = not any(data.get(key) for key in changing)
    elif "inputs" in takes and node.get("inputs") is not None:
        options["inputs"] = node["inputs"]
    return {"_target_": kind, "path": literal(str(path)), "options": options}


def _set_node(run: RunFiles) -> Mapping[str, Any]:
    """Return the config node of one of the run's data sets, such as `data.dataset` or `data.train`.

    Raises:
        RunError: The run has the loaders of a LightningDataModule.
    """
    data = run.settings.data
    if run.settings.has_own_loaders:
        raise RunError(f"the run's data is {data['_target_']}, whose own loaders cannot read other files")
    node: Mapping[str, Any] = next(data[name] for name in PLACES if data.get(name) is not None)
    return node


def config_classes(run: RunFiles) -> Sequence[str] | None:
    """Return the class names in the config. Return None if the config has no class names."""
    nodes = [run.settings.data[name] for name in PLACES if run.settings.data.get(name) is not None]
    return next((node["classes"] for node in nodes if isinstance(node.get("classes"), list)), None)


def _assemble(
    shares: Mapping[str, list[np.ndarray]], config: DictConfig, checkpoint: Path, *, classes: Sequence[str] | None
) -> Predictions:
    settings = settings_of(plain_config(config))
    outputs: dict[str, np.ndarray | list[np.ndarray]] = {}
    for name, batches in shares.items():
        same = len({batch.shape[1:] for batch in batches}) == 1
        outputs[name] = np.concatenate(batches) if same else [sample for batch in batches for sample in batch]
    node = settings.data["test"]
    is_pictures = resolve(str(node["_target_"]), allow=()) is UnlabelledImages
    files = pictures_at(Path(node["path"]), node["options"]) if is_pictures else ()
    readings = readings_at(settings, checkpoint, classes=classes)
    return Predictions(
        outputs=outputs,
        files=tuple(files),
        readings={name: reading for name, reading in readings.items() if name in outputs},
    )


def readings_at(settings: Settings, checkpoint: Path, *, classes: Sequence[str] | None) -> dict[str, Reading]:
    """Return descriptions of the outputs by name, with the statistics of the training split in a checkpoint.

    For a user's LightningModule, the result is empty.
    """
    is_own = settings.module is not None
    return {} if is_own else readings_of(build_objective(settings), fitted_in(checkpoint) or {}, classes=classes)


def _as_input_error(error: ErrorDetails) -> ErrorDetails:
    is_of_input = error.key.startswith(("data.dataset", "data.test")) or error.key == "data"
    return dataclasses.replace(error, key="input", source=None) if is_of_input else error
