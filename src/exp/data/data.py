"""The data of a run: its train, val and test parts, their shapes, and one rank's loader of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from exp.data.batching import Batching
from exp.data.collate import Collate, Pad, collate_of
from exp.data.data_errors import data_error
from exp.data.entries import BatchForm, by_name, target_in
from exp.data.in_memory import (
    AnyDataset,
    Fitted,
    Indexed,
    IndexedLoader,
    Noted,
    Raw,
    Tensors,
    gathered,
    sample_name,
    samples_in,
)
from exp.data.joint_transforms import StageTransforms, apply_transforms, plain_tensors
from exp.data.labels import IGNORED, Labels
from exp.data.loader import GlobalBatches, Loader, ShareSampler
from exp.data.randomness import preserve_generators, reseed_batch
from exp.data.samplers import BalancedSampler
from exp.data.sampling import MakeSampler
from exp.data.spec import read_spec, stated, stated_classes
from exp.data.split_rules import chooser
from exp.data.splits import fit, make_splits, prepare
from exp.data.streams import Recorded, ShareOfStream, StreamLoader, open_stream
from exp.data.tv_tensors import wrapping
from exp.data.workers import Assembly, FetchOptions, SampleSource, StartMethod, WorkerLoader, received
from exp.errors import ConfigError, ExpError, RunError, UserCodeError
from exp.nested import tensors_in
from exp.shared_types import Batch, DataSpec, SampleDtype, Stage, tensor_specs

# By name, or in a list.
Transforms = Mapping[str, Any] | Sequence[Any] | None
ChangeAssembly = Callable[[Assembly], Assembly]
# Of a part, that the check looks at before a run.
SAMPLES = 64


class Data:
    """Data sets for train, val and test, and how they are batched.

    Data in memory (torch's TensorDataset, or any data set with `gather(indices)`) is batched by index. Any other
    Dataset, and data with transforms, goes sample by sample through torch's DataLoader; so does an IterableDataset.

    Args:
        dataset: one data set, divided into splits.
        train: a data set for the training split, instead of a divided one.
        val: the same for the validation split.
        test: the same for the test split.
        parts: size of each split of `dataset`: a fraction, or a whole number of samples.
        parts_seed: chooses the splits. It is not the run's seed, so that a checkpoint is never tested on samples that
            another seed trained it on.
        split: rules for the splits, see split_rules.SplitRules.
        batch_size: samples of a global batch, over all ranks.
        shuffle: whether training is shuffled by (seed, epoch).
        drop_last: whether the short last batch of training is left out.
        sampler: which samples of train an epoch takes: a class of torch's kind, made with the split as `data_source`,
            or `balanced`, which draws each class alike; None takes each once. It draws by torch's generators, seeded
            from (seed, epoch), and is shared out over ranks here.
        batch_sampler: which samples make a global batch, in every split: a class of torch's kind, made with the split
            as `data_source`; None takes batch_size one after another.
        num_workers: see DataLoader.
        pin_memory: see DataLoader; None for true on a machine with a CUDA device.
        prefetch_factor: see DataLoader.
        persistent_workers: see DataLoader.
        multiprocessing_context: see DataLoader.
        shuffle_buffer: samples among which the order of a stream is random.
        shuffle_block: of data that are slow to read in single places, how many samples that follow each other are read
            together; None for the data set's `block`, else each by itself.
        shuffle_window: blocks whose samples are shuffled together.
        tv_tensors: what entries of a sample are to torchvision's v2 transforms, such as {input: image, target: mask}.
        transforms: applied in turn to the input of each sample, or to the entries that their parameters name.
        train_transforms: the same before them, in training only.
        eval_transforms: the same before them, in validation, test and prediction.
        batch_transforms: the same on a rank's share of a batch, on its device.
        train_batch_transforms: the same before them, in training only.
        collate: list of samples to batch; `pad` brings tensors to one size (exp.data.collate.Pad); None for torch's.
        inputs: a shape and a dtype for each input by name, of samples with several or with another than `input`; null
            in a shape is a length that differs from batch to batch. Of samples that are tuples, names in their order.
        input_shape: see DataSpec. None leaves it, and the four others, to the data.
        input_dtype: see DataSpec.
        num_classes: see DataSpec.
        num_outputs: see DataSpec.
        input_mean: of pictures that were normalised: an input is (pixel - mean) / std, with pixels from 0 (black) to 1
            (white). One number, or one a channel, by which the pictures can be shown again.
        input_std: see input_mean.
        ignored_labels: whole targets that are no class and that losses leave out; None for every ignore_index of the
            objective and the metrics, and torch's, -100. Another label outside the classes is refused.
        keeps_doubles: whether float64, which NumPy gives, stays float64, for a run in fp64; otherwise it becomes
            float32, except if input_dtype or inputs say float64.
        earlier: returns the figures of training in the run that this one resumes; None computes them here.
        keeps_raw: whether splits that are Raw stay in memory, too, in the attribute `raw`, by stage.
        seed: of the run.

    Attributes:
        rounded: the entries of a sample that come in float64 and become float32.
        fitted: the figures of training, such as means, words or classes, which checkpoints keep.
        notes: notes on the data, a line each.

    Raises:
        ConfigError: with the key of the config.
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
        shuffle_block: Annotated[int, Ge(1)] | None = None,
        shuffle_window: Annotated[int, Ge(1)] = 64,
        tv_tensors: Mapping[str, Any] | None = None,
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
        self.shuffle_buffer, self.input_mean, self.input_std = shuffle_buffer, input_mean, input_std
        dtypes = [input_dtype, *(one["dtype"] for one in (inputs or {}).values())]
        self.form = BatchForm(names=tuple(inputs or ()), keeps_doubles=keeps_doubles or "float64" in dtypes)
        self._collate = collate_of(collate, inputs=self.form.names)
        given = {"transforms": transforms, "train_transforms": train_transforms, "eval_transforms": eval_transforms}
        given |= {"batch_transforms": batch_transforms, "train_batch_transforms": train_batch_transforms}
        first = () if tv_tensors is None else (wrapping(tv_tensors, inputs=self.held),)
        self.transforms = StageTransforms.made(given, first=first, held=self.held, names=self.form.names)
        pinned = use_pinned_memory(pin_memory)
        self._options = FetchOptions(num_workers, pinned, prefetch_factor, persistent_workers, multiprocessing_context)
        own: dict[Stage, Any] = {"train": train, "val": val, "test": test}
        raw = make_splits(dataset, own, sizes=parts, seed=parts_seed, choose=chooser(split, seed=parts_seed))
        self._prepare(raw, earlier=earlier or (lambda: None), keeps_raw=keeps_raw)
        self.batching = self._batching(block=shuffle_block, window=shuffle_window)
        self.labels = Labels(classes=None, ignored=(IGNORED,) if ignored_labels is None else tuple(ignored_labels))
        self.spec = self._spec(inputs, input_shape, input_dtype, num_classes, num_outputs)
        self._check_labels()
        self._choose(sampler, batch_sampler)

    def _batching(self, *, block: int | None, window: int) -> Batching:
        options: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}
        return Batching(parts=self._parts, block=block, window=window, seed=self.seed, **options)

    def _choose(self, sampler: MakeSampler | Literal["balanced"] | None, batch_sampler: MakeSampler | None) -> None:
        chosen = BalancedSampler if sampler == "balanced" else sampler
        self.batching.choose(chosen, batch_sampler, inputs=self.held, num_classes=self.spec.num_classes)

    def _prepare(
        self, raw: Mapping[Stage, AnyDataset], *, earlier: Callable[[], Fitted | None], keeps_raw: bool
    ) -> None:
        self.fitted = fit(raw, earlier=earlier)
        self._parts = prepare(raw, self.fitted)
        lines = [part.notes_in(self.fitted, stage=stage) for stage, part in raw.items() if isinstance(part, Noted)]
        self.notes = tuple(dict.fromkeys(chain.from_iterable(lines)))
        self.raw = {stage: part for stage, part in raw.items() if keeps_raw and isinstance(part, Raw)}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that have a part."""
        return tuple(self._parts)

    @property
    def num_workers(self) -> int:
        """The processes that read samples; none of them for data in memory."""
        return self._options.num_workers

    def part(self, stage: Stage) -> Any:
        """The data set of one stage.

        Raises: RunError where there is none.
        """
        if stage not in self._parts:
            raise RunError(
                f"data has no {stage} part; expected one of {', '.join(self._parts)}. "
                f"Give data.parts.{stage} a size, or data.{stage} a data set"
            )
        return self._parts[stage]

    def loader(self, stage: Stage, *, rank: int = 0, world_size: int = 1) -> Loader:
        """One rank's batches of one stage. Training is shuffled by (seed, epoch), the others are in order.

        Raises: RunError where there is no such part.
        """
        dataset = self.part(stage)
        if isinstance(dataset, IterableDataset):
            stream = replace(self._stream(dataset, stage), rank=rank, world_size=world_size)
            return StreamLoader(stage=stage, stream=stream, options=self._options)
        sampler = ShareSampler(batches=self.batching.of(stage), rank=rank, world_size=world_size)
        if self.is_indexed(stage):
            return IndexedLoader(
                stage=stage,
                dataset=dataset,
                sampler=sampler,
                pin_memory=self._options.pin_memory,
                form=self.form,
                # Of tensors the labels have been looked at whole.
                labels=None if isinstance(dataset, Tensors) else self.labels,
            )
        source = self._source(stage)
        assembly = self._assembly(source.named)
        return WorkerLoader(stage=stage, source=source, sampler=sampler, options=self._options, assembly=assembly)

    def ordered_loader(
        self, stage: Stage, *, count: int, fingerprint: Callable[[object], object], assembled: ChangeAssembly
    ) -> Loader:
        """Return a loader of samples in the order of the part of a stage, each once, whatever a sampler takes.

        Args:
            stage: the stage, of which no batch is gathered by index.
            count: the number of samples; a stream is read whole.
            fingerprint: of each sample before transforms, those of epoch 0.
            assembled: Returns the assembly of batches, given that of the stage.
        """
        part, options = self.part(stage), replace(self._options, pin_memory=False, persistent_workers=False)
        if isinstance(part, IterableDataset):
            stream = replace(self._stream(part, stage), shuffle=False, shuffle_buffer=0, drop_last=False)
            stream = replace(stream, fingerprint=fingerprint, assembly=assembled(stream.assembly))
            return StreamLoader(stage=stage, stream=stream, options=options)
        source = self._source(stage, fingerprint=fingerprint)
        batches = GlobalBatches(
            length=min(count, samples_in(part)), batch_size=self.batch_size, shuffle=False, drop_last=False, seed=0
        )
        sampler = ShareSampler(batches=batches, rank=0, world_size=1)
        assembly = assembled(self._assembly(source.named))
        return WorkerLoader(stage=stage, source=source, sampler=sampler, options=options, assembly=assembly)

    def in_own_units(self, stage: Stage, indices: Tensor) -> dict[str, Tensor]:
        """Return samples as Raw.in_own_units does; nothing of data that is not raw, or if transforms follow."""
        is_changed = not self.is_indexed(stage) or self.transforms_batches(stage)
        return {} if is_changed or stage not in self.raw else self.raw[stage].in_own_units(indices, self.fitted)

    def transforms_batches(self, stage: Stage) -> bool:
        """Whether the batches of a stage go through transforms once they are on the device."""
        return bool(self.transforms.of_batch(stage))

    def transform_batch(self, batch: Batch, *, stage: Stage, rank: int, epoch: int, number: int) -> Batch:
        """A rank's share of a batch with the stage's batch transforms applied, under generators of its own stream.

        Raises: UserCodeError, and what a transform of exp's refuses.
        """
        reseed_batch(seed=self.seed, stage=stage, rank=rank, epoch=epoch, batch=number)
        try:
            return batch._replace(data=apply_transforms(batch.data, self.transforms.of_batch(stage)))
        except ExpError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, what=f"transforming batch {number} of {stage}") from error

    def first_samples(self, stage: Stage, *, seconds: float) -> object:
        """What the check looks at: the first samples of a stage as a batch, at most one batch and `SAMPLES`.

        Data in memory are given whole. None for a stream of the user's own, which may be read once only.

        seconds: when so many have passed, no further sample is read.
        Raises: SampleError for a label outside the classes, and for samples that make no batch; UserCodeError.
        """
        if isinstance(self.part(stage), IterableDataset) and not isinstance(self.part(stage), Recorded):
            return None
        with preserve_generators():
            read = self._first_samples(stage, seconds=seconds)
            if not self.transforms_batches(stage):
                return read
            count = next(len(tensor) for tensor in tensors_in(read))
            batch = Batch(read, size=count, global_size=count, world_size=1)
            return self.transform_batch(batch, stage=stage, rank=0, epoch=0, number=0).data

    def _first_samples(self, stage: Stage, *, seconds: float) -> object:
        part = self.part(stage)
        if self.is_indexed(stage) and isinstance(part, Tensors):
            return self.form(part.entries)
        if isinstance(part, IterableDataset):
            few = replace(self._stream(part, stage), batch_size=min(self.batch_size, SAMPLES), drop_last=False)
            found = next(iter(replace(few, shuffle=False, shuffle_buffer=0)), None)
            if found is None:
                raise self._empty_stream(stage)
            return received(found[0])
        count = min(self.batch_size, SAMPLES, samples_in(part))
        if self.is_indexed(stage):
            entries = self.form(gathered(part, torch.arange(count), stage=stage))
            self.labels.refuse(entries, lambda place: sample_name(part, place, stage=stage))
            return entries
        source, ends = self._source(stage), time.monotonic() + seconds
        read = [source[0, 0]]
        while len(read) < count and time.monotonic() < ends:
            read.append(source[0, len(read)])
        return received(self._assembly(source.named)(read))

    def _stream(self, dataset: IterableDataset[object], stage: Stage) -> ShareOfStream:
        shuffle = self.shuffle and stage == "train"
        return ShareOfStream(
            dataset=dataset,
            transforms=self.transforms.of(stage),
            assembly=self._assembly(f"sample {{}} of {stage}".format),
            batch_size=self.batch_size,
            drop_last=self.drop_last and stage == "train",
            shuffle_buffer=self.shuffle_buffer if shuffle else 0,
            shuffle=shuffle,
            seed=self.seed,
            stage=stage,
            rank=0,
            world_size=1,
        )

    def _source(self, stage: Stage, *, fingerprint: Callable[[object], object] | None = None) -> SampleSource:
        return SampleSource(
            dataset=self.part(stage),
            transforms=self.transforms.of(stage),
            seed=self.seed,
            stage=stage,
            fingerprint=fingerprint,
        )

    def _assembly(self, named: Callable[[int], str]) -> Assembly:
        return Assembly(collate=self._collate, form=self.form, labels=self.labels, named=named)

    def is_indexed(self, stage: Stage) -> bool:
        is_plain = self._collate is default_collate and not self.transforms.of(stage)
        return is_plain and isinstance(self._parts[stage], Indexed)

    @property
    def held(self) -> tuple[str, ...]:
        """The names of a sample's values, before they are a batch."""
        names = self.form.names
        return self._collate.held(names) if isinstance(self._collate, Pad) else names

    def _empty_stream(self, stage: Stage) -> ConfigError:
        return data_error(stage, got="an empty stream", expected="at least one sample")

    def _check_labels(self) -> None:
        """Data in memory is looked at whole; other labels as they are read."""
        self.labels = replace(self.labels, classes=self.spec.num_classes)
        for stage, part in self._parts.items():
            if not isinstance(part, Tensors):
                continue
            wrong = self.labels.first_wrong(target_in(by_name(part.entries, self.form.names)))
            if wrong is not None:
                index, label = wrong
                raise ConfigError([self.labels.error(label, of=sample_name(part, index, stage=stage))])

    def _spec(
        self,
        inputs: Mapping[str, Any] | None,
        input_shape: Sequence[int] | None,
        input_dtype: SampleDtype | None,
        num_classes: int | None,
        num_outputs: int | None,
    ) -> DataSpec:
        declared = DataSpec(
            inputs=tensor_specs(inputs or {}),
            input_shape=None if input_shape is None else tuple(input_shape),
            input_dtype=input_dtype,
            num_classes=num_classes,
            num_outputs=num_outputs,
        )
        stage, part = next(iter(self._parts.items()))
        if isinstance(part, IterableDataset) and declared.inputs and declared.num_outputs is not None:
            # A stream may be slow to open, and may be read once only.
            return declared
        with preserve_generators():
            raw = self._first(stage, part)
        self.rounded, batch = self.form.rounded(raw), self.form(raw)
        outputs = [number for part in self._parts.values() if (number := stated(part, "num_outputs")) is not None]
        return read_spec(
            declared,
            batch,
            names=self.form.names,
            num_classes=stated_classes(self._parts, declared, self.form.names),
            num_outputs=max(outputs, default=None),
        )

    def _first(self, stage: Stage, part: Any) -> object:
        """A batch of one sample, in the dtypes that it comes in."""
        if self.is_indexed(stage):
            return gathered(part, torch.zeros(1, dtype=torch.int64), stage=stage)
        if not isinstance(part, IterableDataset):
            source = self._source(stage)
            assembly = replace(self._assembly(source.named), form=replace(self.form, keeps_doubles=True))
            return received(assembly([source[0, 0]]))
        transforms = self.transforms.of(stage)
        sample = next(open_stream(part, epoch=0), None)
        if sample is None:
            raise self._empty_stream(stage)
        read = apply_transforms(sample, transforms)
        return self._collate([plain_tensors(read) if self._collate is default_collate else read])


def use_pinned_memory(wanted: bool | None) -> bool:
    """Whether batches are made in pinned memory; None means where there is a CUDA device.

    Raises: ConfigError where it is asked for without one.
    """
    available = torch.cuda.is_available()
    if wanted and not available:
        raise data_error(
            "pin_memory", got="true", expected="a machine with a CUDA device", fix="null decides by itself"
        )
    return available if wanted is None else wanted
