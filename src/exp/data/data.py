"""The data of a run: its train, val and test splits, their shapes, and one rank's loader of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import IterableDataset

from exp.data.batching import Batching
from exp.data.collate import Collate
from exp.data.data_errors import data_error
from exp.data.entries import BatchForm
from exp.data.in_memory import AnyDataset, Fitted, Noted, Raw
from exp.data.joint_transforms import Transforms, apply_transforms
from exp.data.labels import IGNORED, Labels
from exp.data.loader import Loader
from exp.data.loading import Loading
from exp.data.randomness import preserve_generators, reseed_batch
from exp.data.samplers import BalancedSampler
from exp.data.sampling import MakeSampler
from exp.data.spec import attribute, classes_of, declared_spec, read_spec
from exp.data.split_rules import chooser
from exp.data.splits import fit, make_splits, prepare
from exp.data.workers import FetchOptions, StartMethod
from exp.errors import ExpError, UserCodeError
from exp.nested import tensors_in
from exp.shared_types import Batch, DataSpec, SampleDtype, Stage


class Data:
    """Data sets for train, val and test, and how they are batched.

    Data in memory (torch's TensorDataset, or any data set with `gather(indices)`) is batched by index. Any other
    Dataset, an IterableDataset, and data with transforms are read sample by sample with torch's DataLoader.

    Args:
        dataset: One data set, which is divided into splits.
        train: A data set for the training split, instead of a part of `dataset`.
        val: The same for the validation split.
        test: The same for the test split.
        parts: The size of each split of `dataset`: a fraction, or a whole number of samples.
        parts_seed: The seed of the splits. It differs from the run's seed, so that runs with other seeds have the same
            test split.
        split: Rules for the splits; see split_rules.SplitRules.
        batch_size: The samples of a global batch, over all ranks.
        shuffle: Whether training samples are shuffled by (seed, epoch).
        drop_last: Whether the short last batch of training is left out.
        sampler: The samples of a training epoch: a sampler of torch's kind, made with the split as `data_source`, or
            `balanced`, which draws each class equally often. None takes each sample once.
        batch_sampler: The samples of each global batch in every split: a batch sampler of torch's kind, made with the
            split as `data_source`. None takes batch_size consecutive samples.
        num_workers: As in DataLoader.
        pin_memory: As in DataLoader; None for true with a CUDA device.
        prefetch_factor: As in DataLoader.
        persistent_workers: As in DataLoader.
        multiprocessing_context: As in DataLoader.
        shuffle_buffer: The number of samples among which the order of a stream is random.
        transforms: Applied in order to the input of each sample, or to the entries that their parameters name.
        train_transforms: The same before `transforms`, in training only.
        eval_transforms: The same before `transforms`, in validation, test and prediction.
        batch_transforms: The same for a rank's share of a batch, on its device.
        train_batch_transforms: The same before `batch_transforms`, in training only.
        collate: Returns the batch of a list of samples. `pad` pads tensors to one size (exp.data.collate.Pad); None
            for torch's function.
        inputs: A shape and a dtype for each input by name, if samples have several inputs or another one than `input`.
            null in a shape is a length that varies. For samples that are tuples, the names in their order.
        input_shape: As in DataSpec. None reads it, and the next three, from the data.
        input_dtype: As in DataSpec.
        num_classes: As in DataSpec.
        num_outputs: As in DataSpec.
        input_mean: The mean of normalized pictures, one number or one for each channel, with which the pictures are
            shown. A pixel is from 0 (black) to 1 (white), and an input is (pixel - mean) / std.
        input_std: The deviation; see input_mean.
        ignored_labels: Integer targets outside the classes that losses ignore; other such labels are errors. None for
            every ignore_index of the objective and the metrics, and torch's, -100.
        keeps_doubles: Whether float64 samples stay float64, for a run in fp64. Otherwise they become float32, unless
            input_dtype or inputs state float64.
        earlier: Returns the statistics of the training split from the checkpoint of a resumed run. None computes them.
        keeps_raw: Whether splits that are Raw are also kept unprepared, in the attribute `raw`.
        seed: The seed of the run.

    Attributes:
        loading: The splits and the settings of their batches.
        spec: The shapes, dtypes and classes.
        rounded: The entries of a sample that are float64 and become float32.
        fitted: The statistics of the training split, such as means, words or classes, which checkpoints store.
        notes: Notes on the data, one line each.
        raw: The unprepared splits by stage.

    Raises:
        ConfigError: A setting does not fit the data.
    """

    rounded: Sequence[str] = ()

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
        self.loading = Loading(
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
        """Return the splits as a model receives them, and set `fitted`, `notes` and `raw`."""
        self.fitted = fit(raw, earlier=earlier)
        self.raw = {stage: part for stage, part in raw.items() if keeps_raw and isinstance(part, Raw)}
        prepared = prepare(raw, self.fitted)
        lines = [part.notes_in(self.fitted, stage=stage) for stage, part in raw.items() if isinstance(part, Noted)]
        self.notes = tuple(dict.fromkeys(chain.from_iterable(lines)))
        return prepared

    def _decide(self, declared: DataSpec, sampler: MakeSampler | None, batch_sampler: MakeSampler | None) -> None:
        """Read the spec from the data, check the labels, and choose the samples of the batches."""
        self.spec = self._spec(declared)
        self.loading.labels = replace(self.loading.labels, classes=self.spec.num_classes)
        self.loading.check_labels()
        batching = self.loading.batching
        batching.choose(sampler, batch_sampler, inputs=self.names, num_classes=self.spec.num_classes)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that have a split."""
        return tuple(self.loading.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a sample's values, before it is part of a batch."""
        return self.loading.names

    def part(self, stage: Stage) -> Any:
        """Return the data set of one stage. Raise RunError if the stage has none."""
        return self.loading.part(stage)

    def loader(self, stage: Stage, *, rank: int = 0, world_size: int = 1) -> Loader:
        """Return one rank's batches of one stage. Training is shuffled by (seed, epoch), other stages are in order.

        Raises:
            RunError: The stage has no split.
        """
        return self.loading.loader(stage, rank=rank, world_size=world_size)

    def in_own_units(self, stage: Stage, indices: Tensor) -> dict[str, Tensor]:
        """Return samples as Raw.in_own_units; empty for data that is not raw, and with transforms."""
        is_changed = not self.loading.is_indexed(stage) or self.transforms_batches(stage)
        return {} if is_changed or stage not in self.raw else self.raw[stage].in_own_units(indices, self.fitted)

    def transforms_batches(self, stage: Stage) -> bool:
        """Return whether the batches of a stage are transformed on the device."""
        return bool(self.loading.transforms.of_batch(stage))

    def transform_batch(self, batch: Batch, *, stage: Stage, rank: int, epoch: int, number: int) -> Batch:
        """Return a rank's share of a batch after the batch transforms of its stage, with seeded generators.

        Raises:
            UserCodeError: A transform of the user fails.
            ExpError: A transform of exp does not support the batch.
        """
        reseed_batch(seed=self.seed, stage=stage, rank=rank, epoch=epoch, batch=number)
        try:
            return batch._replace(data=apply_transforms(batch.data, self.loading.transforms.of_batch(stage)))
        except ExpError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, what=f"transforming batch {number} of {stage}") from error

    def first_samples(self, stage: Stage, *, seconds: float) -> object:
        """Return the first samples of a stage as a batch for the check: at most one batch, and at most 64 samples.

        All samples of data in memory are returned. The result is None for a user's stream, which may be read only once.

        Args:
            stage: The stage.
            seconds: The time after which no further sample is read.

        Raises:
            SampleError: A label is outside the classes, or the samples cannot be batched.
            UserCodeError: The user's code fails.
        """
        with preserve_generators():
            read = self.loading.first_samples(stage, seconds=seconds)
            if read is None or not self.transforms_batches(stage):
                return read
            count = next(len(tensor) for tensor in tensors_in(read))
            batch = Batch(read, size=count, global_size=count, world_size=1)
            return self.transform_batch(batch, stage=stage, rank=0, epoch=0, number=0).data

    def _spec(self, declared: DataSpec) -> DataSpec:
        parts, form = self.loading.parts, self.loading.form
        stage, part = next(iter(parts.items()))
        if isinstance(part, IterableDataset) and declared.inputs and declared.num_outputs is not None:
            # A stream may be slow to open, and may be read only once.
            return declared
        with preserve_generators():
            raw = self.loading.first_sample(stage)
        self.rounded, batch = form.rounded_entries(raw), form(raw)
        outputs = [number for part in parts.values() if (number := attribute(part, "num_outputs")) is not None]
        return read_spec(
            declared,
            batch,
            names=form.names,
            num_classes=classes_of(parts, declared, form.names),
            num_outputs=max(outputs, default=None),
        )


def form_of(inputs: Mapping[str, object] | None, declared: DataSpec, *, keeps_doubles: bool) -> BatchForm:
    """Return the form of batches: pairs, unless the config names inputs. float64 stays if the config states it."""
    dtypes = [declared.input_dtype, *(one.dtype for one in declared.inputs.values())]
    return BatchForm(names=tuple(inputs or ()), keeps_doubles=keeps_doubles or "float64" in dtypes)


def use_pinned_memory(wanted: bool | None) -> bool:
    """Return whether batches are made in pinned memory. None means yes with a CUDA device.

    Raises:
        ConfigError: Pinned memory is requested without a CUDA device.
    """
    available = torch.cuda.is_available()
    if wanted and not available:
        fix = "null pins memory only with a CUDA device"
        raise data_error("pin_memory", got="true", expected="a machine with a CUDA device", fix=fix)
    return available if wanted is None else wanted
