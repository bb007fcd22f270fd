"""Data of a run: the train, val and test splits, the shapes of their samples, and the loaders of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from exp.data.batching import Batching, MakeSampler
from exp.data.collate import Collate
from exp.data.data_errors import data_error, name_error
from exp.data.entries import BatchForm, by_name, inputs_in, target_in
from exp.data.in_memory import AnyDataset, Fitted, Noted, Raw, Tensors
from exp.data.joint_transforms import Transforms, apply_transforms
from exp.data.labels import IGNORED, Labels, classes_in
from exp.data.loading import Loading
from exp.data.randomness import preserve_generators, reseed_batch
from exp.data.samplers import BalancedSampler
from exp.data.split_rules import chooser
from exp.data.splits import fit, make_splits, prepare
from exp.data.workers import FetchOptions, StartMethod
from exp.errors import ExpError, UserCodeError
from exp.nested import tensors_in
from exp.shared_types import Batch, DataSpec, SampleDtype, Stage, TensorSpec, dtype_name, tensor_specs


class Data(Loading):
    """Data of a run: the data sets for training, validation and test, and the settings of their batches.

    Some data sets are in memory: torch's TensorDataset, and every data set with a method `gather(indices)`. A batch of
    such a data set is read with a single index operation. torch's DataLoader reads all other data sets sample by
    sample. It also reads data in memory if there are transforms.

    Args:
        dataset: A data set that exp divides into splits.
        train: The data set of the training split. It replaces the training split of `dataset`.
        val: The data set of the validation split. It replaces the validation split of `dataset`.
        test: The data set of the test split. It replaces the test split of `dataset`.
        parts: The size of each split of `dataset`: a fraction, or a whole number of samples.
        parts_seed: The seed that divides `dataset`. Default: 0. It is independent of `seed`, so that runs with
            different seeds have the same test split.
        split: Rules that divide `dataset`; see split_rules.SplitRules.
        batch_size: The number of samples in a global batch, over all ranks. Default: 64.
        shuffle: Whether to shuffle the training samples in each epoch. Default: True.
        drop_last: Whether to drop the last training batch if it has fewer samples than batch_size. Default: False.
        sampler: A subclass of torch's Sampler that chooses the training samples. Its parameter `data_source` receives
            the training split. `balanced` draws all classes equally often. None reads each sample once per epoch.
        batch_sampler: A subclass of torch's Sampler that chooses the batches of every split. Its parameter
            `data_source` receives the split. None forms batches of batch_size consecutive samples.
        num_workers: See torch's DataLoader.
        pin_memory: See torch's DataLoader. None pins memory if there is a CUDA device.
        prefetch_factor: See torch's DataLoader.
        persistent_workers: See torch's DataLoader.
        multiprocessing_context: See torch's DataLoader.
        shuffle_buffer: The number of samples in the shuffle buffer of an IterableDataset. Default: 1000.
        transforms: Transforms of each sample, applied in order. A transform with one parameter receives the input. If a
            transform has several parameters, each parameter receives the value of the sample with the same name.
        train_transforms: Transforms of each training sample, applied before `transforms`.
        eval_transforms: Transforms of each sample in validation, test and prediction, applied before `transforms`.
        batch_transforms: Transforms of a batch. They run on the device, on the samples of the global batch that the
            rank has read.
        train_batch_transforms: Transforms of a training batch, applied before `batch_transforms`.
        collate: The function that makes a batch from a list of samples. `pad` pads the tensors of a batch to the same
            size (exp.data.collate.Pad). None uses torch's default_collate.
        inputs: The shape and dtype of each input by name. Required if samples have several inputs, or if the only input
            is not named `input`. The value null in a shape means a length that varies. If samples are tuples, the names
            must be in the order of the values.
        input_shape: See DataSpec. None reads the shape from the data.
        input_dtype: See DataSpec. None reads the dtype from the data.
        num_classes: See DataSpec. None reads the number from the data.
        num_outputs: See DataSpec. None reads the number from the data.
        input_mean: The mean that the data set has already subtracted from the pixels: one number, or one number for
            each channel. TensorBoard needs it to show pictures, because an input is (pixel - mean) / std. Pixels are
            from 0 (black) to 1 (white).
        input_std: The standard deviation by which the data set has already divided the pixels, as a list like
            input_mean.
        ignored_labels: Labels outside the classes that losses ignore. All other labels outside the classes are errors.
            None means the ignore_index of the objective and of each metric, and torch's default, -100.
        keeps_doubles: Whether float64 samples stay float64. Default: False, which converts them to float32 unless
            input_dtype or inputs state float64.
        earlier: A function that returns the statistics of the training split from the checkpoint of a resumed run. If
            it is None or returns None, the statistics are computed.
        keeps_raw: Whether to keep the splits before their preparation in the attribute `raw`. Default: False.
        seed: The seed of the run. Default: 0.

    Attributes:
        spec: The shapes, dtypes and number of classes of the samples.
        fitted: The statistics of the training split that checkpoints store, such as means, words or classes.
        notes: Notes on the data, each of one line, for the log of the run.
        raw: The splits before their preparation, such as standardization, by name. Empty if `keeps_raw` is False.

    Raises:
        ConfigError: A setting does not match the data.
    """

    def __init__(
        self,
        *,
        dataset: Any = None,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        parts: Mapping[str, float] | None = None,
        parts_seed: int = 0,
        split: Mapping[str, Any] | None = None,
        batch_size: int = 64,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: MakeSampler | Literal["balanced"] | None = None,
        batch_sampler: MakeSampler | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: Annotated[int, Ge(1)] | None = None,
        persistent_workers: bool = True,
        multiprocessing_context: StartMethod | None = None,
        shuffle_buffer: Annotated[int, Ge(0)] = 1000,
        transforms: Transforms = None,
        train_transforms: Transforms = None,
        eval_transforms: Transforms = None,
        batch_transforms: Transforms = None,
        train_batch_transforms: Transforms = None,
        collate: Collate | Literal["pad"] | None = None,
        inputs: Mapping[str, Any] | None = None,
        input_shape: Sequence[int] | None = None,
        input_dtype: SampleDtype | None = None,
        num_classes: int | None = None,
        num_outputs: int | None = None,
        input_mean: Sequence[float] | None = None,
        input_std: Sequence[float] | None = None,
        ignored_labels: Sequence[int] | None = None,
        keeps_doubles: bool = False,
        earlier: Callable[[], Fitted | None] | None = None,
        keeps_raw: bool = False,
        seed: int = 0,
    ) -> None:
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed
        self.input_mean, self.input_std = input_mean, input_std
        declared = declared_spec(inputs, input_shape, input_dtype, num_classes, num_outputs)
        own: dict[Stage, AnyDataset | None] = {"train": train, "val": val, "test": test}
        raw = make_splits(dataset, own, sizes=parts, seed=parts_seed, choose=chooser(split, seed=parts_seed))
        prepared = self._prepare(raw, earlier=earlier or (lambda: None), keeps_raw=keeps_raw)
        given = {"transforms": transforms, "train_transforms": train_transforms, "eval_transforms": eval_transforms}
        given |= {"batch_transforms": batch_transforms, "train_batch_transforms": train_batch_transforms}
        pinned = use_pinned_memory(pin_memory)
        super().__init__(
            form=form_of(inputs, declared, keeps_doubles=keeps_doubles),
            collate_setting=collate,
            transform_settings=given,
            labels=Labels(classes=None, ignored=(IGNORED,) if ignored_labels is None else tuple(ignored_labels)),
            options=FetchOptions(num_workers, pinned, prefetch_factor, persistent_workers, multiprocessing_context),
            batching=Batching(parts=prepared, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed),
            shuffle_buffer=shuffle_buffer,
        )
        self._decide(declared, BalancedSampler if sampler == "balanced" else sampler, batch_sampler)

    def _prepare(
        self, raw: Mapping[Stage, AnyDataset], *, earlier: Callable[[], Fitted | None], keeps_raw: bool
    ) -> Mapping[Stage, AnyDataset]:
        """Return the splits after their preparation, such as standardization. Set `fitted`, `notes` and `raw`.

        Args:
            raw: The splits before their preparation, by name.
            earlier: A function that returns the statistics of a resumed run. It returns None for a new run.
            keeps_raw: Whether to keep the splits before their preparation in `raw`.
        """
        self.fitted = fit(raw, earlier=earlier)
        self.raw = {stage: part for stage, part in raw.items() if keeps_raw and isinstance(part, Raw)}
        prepared = prepare(raw, self.fitted)
        lines = [part.notes_in(self.fitted, stage=stage) for stage, part in raw.items() if isinstance(part, Noted)]
        self.notes = tuple(dict.fromkeys(chain.from_iterable(lines)))
        return prepared

    def _decide(self, declared: DataSpec, sampler: MakeSampler | None, batch_sampler: MakeSampler | None) -> None:
        """Read the spec from the data, check the labels, and set the samplers."""
        self.spec = self._spec(declared)
        self.labels = replace(self.labels, classes=self.spec.num_classes)
        self.check_labels()
        self.batching.choose(sampler, batch_sampler, inputs=self.names, num_classes=self.spec.num_classes)

    def in_own_units(self, stage: Stage, indices: Tensor) -> dict[str, Tensor]:
        """Return the values of samples in the units of the data, before standardization; see Raw.in_own_units.

        The mapping is empty for a split that is not Raw, because it was not standardized. It is also empty if
        transforms change the samples.

        Args:
            stage: The name of the split.
            indices: The indices of the samples, int64 `[K]`.

        Returns:
            A mapping from the names of a sample's values to tensors with K rows.
        """
        is_changed = not self.is_indexed(stage) or self.transforms_batches(stage)
        return {} if is_changed or stage not in self.raw else self.raw[stage].in_own_units(indices, self.fitted)

    def transforms_batches(self, stage: Stage) -> bool:
        """Return whether the batches of a split are transformed on the device."""
        return bool(self.transforms.of_batch(stage))

    def transform_batch(self, batch: Batch, *, stage: Stage, rank: int, epoch: int, number: int) -> Batch:
        """Return a batch after the batch transforms of its split.

        The random generators are seeded from the seed of the run and all arguments except the batch.

        Args:
            batch: The samples of a global batch that this rank has read.
            stage: The name of the split.
            rank: The rank of this process.
            epoch: The epoch, counted from 0.
            number: The number of the batch in the epoch, counted from 0.

        Raises:
            UserCodeError: A user's transform raises an error.
            ExpError: A transform of exp does not support the batch.
        """
        reseed_batch(seed=self.seed, stage=stage, rank=rank, epoch=epoch, batch=number)
        try:
            return batch._replace(data=apply_transforms(batch.data, self.transforms.of_batch(stage)))
        except ExpError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, what=f"transforming batch {number} of {stage}") from error

    def first_samples(self, stage: Stage, *, seconds: float) -> object:
        """Return a batch of the first samples of a split, for the check before a run.

        If the split is a Tensors data set without transforms of samples, the batch contains the whole split. In all
        other cases, it has at most 64 samples, and at most data.batch_size. Return None for a user's IterableDataset,
        because some can be read only once.

        Args:
            stage: The name of the split.
            seconds: The time in seconds after which no more samples are read.

        Raises:
            SampleError: A label is outside the classes, or the samples cannot be batched.
            UserCodeError: The user's code raises an error.
        """
        with preserve_generators():
            read = self.read_first(stage, seconds=seconds)
            if read is None or not self.transforms_batches(stage):
                return read
            count = next(len(tensor) for tensor in tensors_in(read))
            batch = Batch(read, size=count, global_size=count, world_size=1)
            return self.transform_batch(batch, stage=stage, rank=0, epoch=0, number=0).data

    def _spec(self, declared: DataSpec) -> DataSpec:
        parts, form = self.parts, self.form
        stage, part = next(iter(parts.items()))
        if isinstance(part, IterableDataset) and declared.inputs and declared.num_outputs is not None:
            # No sample is read, because a stream may be slow to open, and some can be read only once.
            return declared
        with preserve_generators():
            batch = self.first_sample(stage)
        outputs = [number for part in parts.values() if (number := attribute(part, "num_outputs")) is not None]
        return read_spec(
            declared,
            batch,
            names=form.names,
            num_classes=classes_of(parts, declared, form.names),
            num_outputs=max(outputs, default=None),
        )


def form_of(inputs: Mapping[str, object] | None, declared: DataSpec, *, keeps_doubles: bool) -> BatchForm:
    """Return the BatchForm, which converts batches to the names and dtypes that the network expects.

    Args:
        inputs: The value of data.inputs, which contains the names of the inputs.
        declared: The spec in the config. If one of its dtypes is float64, float64 samples stay float64.
        keeps_doubles: Whether float64 samples stay float64 regardless of the spec.
    """
    dtypes = [declared.input_dtype, *(one.dtype for one in declared.inputs.values())]
    return BatchForm(names=tuple(inputs or ()), keeps_doubles=keeps_doubles or "float64" in dtypes)


def use_pinned_memory(wanted: bool | None) -> bool:
    """Return whether batches are copied to pinned memory.

    Args:
        wanted: The value of data.pin_memory. None pins memory if there is a CUDA device.

    Raises:
        ConfigError: The value is true, and there is no CUDA device.
    """
    available = torch.cuda.is_available()
    if wanted and not available:
        fix = "Set data.pin_memory=null, which pins memory only if there is a CUDA device"
        raise data_error("pin_memory", got="true", expected="a machine with a CUDA device", fix=fix)
    return available if wanted is None else wanted


def declared_spec(
    inputs: Mapping[str, Mapping[str, object]] | None,
    input_shape: Sequence[int] | None,
    input_dtype: SampleDtype | None,
    num_classes: int | None,
    num_outputs: int | None,
) -> DataSpec:
    """Return the spec that the config sets. The parameters are the keys of the config's `data` section."""
    return DataSpec(
        inputs=tensor_specs(inputs or {}),
        input_shape=None if input_shape is None else tuple(input_shape),
        input_dtype=input_dtype,
        num_classes=num_classes,
        num_outputs=num_outputs,
    )


def read_spec(
    declared: DataSpec,
    batch: object,
    *,
    names: Sequence[str] = (),
    num_classes: int | None,
    num_outputs: int | None = None,
) -> DataSpec:
    """Return the shapes, dtypes and numbers of classes and outputs of the data.

    Args:
        declared: The spec in the config. Its values must match the data. If a value is None, or the inputs are empty,
            they are read from the data.
        batch: A batch of one sample, converted for the network.
        names: The names in data.inputs. If empty, data.input_shape and data.input_dtype describe the only input.
        num_classes: The number of classes in the data set. None if the data set does not state the number.
        num_outputs: The number of outputs in the data set. None if the data set does not state the number.

    Raises:
        ConfigError: A value in the config differs from the data, or a required value is in neither.
    """
    values = inputs_in(batch)
    shapes = {name: tuple(value.shape[1:]) for name, value in values.items()}
    found = {name: TensorSpec(shape=shapes[name], dtype=dtype_name(value.dtype)) for name, value in values.items()}
    target = target_in(batch)
    if not names and declared.input_shape is not None and "input" not in found:
        got = f"null, although samples have the entries {', '.join(found)}"
        expected = "a shape and a dtype for each input of the network, or an entry named input"
        fix = "Set data.input_shape=null to read shapes and dtypes from the data"
        raise data_error("inputs", got=got, expected=expected, fix=fix)
    _refuse_other_inputs(declared.inputs if names else {}, found)
    only = "input" if "input" in found else next(iter(found)) if len(found) == 1 else None
    shape, dtype = (shapes[only], found[only].dtype) if only else (None, None)
    _refuse_unlike("input_shape", declared.input_shape, shape)
    _refuse_unlike("input_dtype", declared.input_dtype, dtype)
    _refuse_unlike("num_classes", declared.num_classes, num_classes)
    classes = declared.num_classes if num_classes is None else num_classes
    # data.num_outputs takes precedence over the data, because a model may have one output for two classes.
    outputs = declared.num_outputs if declared.num_outputs is not None else num_outputs or classes
    if outputs is None and isinstance(target, Tensor) and target.is_floating_point():
        outputs = target.shape[-1] if target.dim() > 1 else 1
    # If samples have no value named `target`, no error is raised, because objective terms and metrics may use targets
    # with other names.
    if outputs is None and target is not None:
        got = "null, although the data set does not state the number of classes"
        raise data_error("num_classes", got=got, expected="the number of classes, or data.num_outputs for a regression")
    # Values of other dtypes are not inputs of the network, and neither are values that are empty in the first sample,
    # such as boxes. Objective terms and hooks can use them.
    fed = {name: one for name, one in found.items() if one.dtype in get_args(SampleDtype) and 0 not in one.shape}
    is_alone = list(found) == ["input"] or declared.input_shape is not None
    return DataSpec(
        inputs=declared.inputs or ({} if is_alone else fed),
        input_shape=shape,
        input_dtype=dtype,
        num_classes=classes,
        num_outputs=outputs,
    )


def attribute(part: object, name: str) -> int | None:
    """Return an integer attribute of a data set. Return None if the data set does not have the attribute.

    Args:
        part: The data set. If a Subset does not have the attribute, the data set of the Subset is used.
        name: The name of the attribute.
    """
    number: int | None = getattr(part, name, None)
    return attribute(part.dataset, name) if number is None and isinstance(part, Subset) else number


def classes_of(parts: Mapping[Stage, object], declared: DataSpec, names: Sequence[str]) -> int | None:
    """Return the number of classes. Return None if the number is unknown.

    The number is the largest attribute `num_classes` of the splits. If no split has this attribute, the number is in
    the config. If the config does not contain the number, it is counted from the targets in memory.

    Args:
        parts: The splits by name.
        declared: The spec in the config.
        names: The names of the inputs.
    """
    if known := [classes for part in parts.values() if (classes := attribute(part, "num_classes")) is not None]:
        return max(known)
    if declared.num_classes is not None:
        return declared.num_classes
    found = [classes_in(target_in(by_name(one.entries, names))) for one in parts.values() if isinstance(one, Tensors)]
    return max((classes for classes in found if classes is not None), default=None)


def _refuse_other_inputs(declared: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> None:
    """Raise ConfigError if an input in data.inputs is not in the samples, or has a different shape or dtype there.

    Args:
        declared: The inputs in data.inputs, by name.
        found: The values of the samples, by name.
    """
    for name, one in declared.items():
        if name not in found:
            raise name_error(f"inputs.{name}", name, found, expected="an entry of the samples")
        held = found[name]
        fits = len(one.shape) == len(held.shape) and all(
            size is None or size == other for size, other in zip(one.shape, held.shape, strict=True)
        )
        if not fits:
            expected = f"{list(held.shape)}, the shape of the data, with null for a length that varies"
            raise data_error(f"inputs.{name}.shape", got=str(list(one.shape)), expected=expected)
        _refuse_unlike(f"inputs.{name}.dtype", one.dtype, held.dtype)


def _refuse_unlike(key: str, declared: object, found: object) -> None:
    """Raise ConfigError if a value in the config differs from the data. None matches any value.

    Args:
        key: The config key below `data.`.
        declared: The value in the config.
        found: The value in the data.
    """
    if declared is not None and found is not None and declared != found:
        shown, held = (list(value) if isinstance(value, tuple) else value for value in (declared, found))
        fix = f"Correct the value, or set data.{key}=null to read the value from the data"
        raise data_error(key, got=str(shown), expected=f"{held}, the value of the data", fix=fix)
