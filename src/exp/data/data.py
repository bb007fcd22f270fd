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

from exp.data.collate import Collate, Pad, collate_of
from exp.data.entries import BatchForm, by_name, target_in
from exp.data.faults import data_fault
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
from exp.data.joint_transforms import Transform, callables
from exp.data.labels import IGNORED, Labels
from exp.data.loader import EpochBatches, GlobalBatches, Loader, ShareSampler
from exp.data.randomness import preserve_generators, reseed_batch
from exp.data.samplers import BalancedSampler
from exp.data.sampling import MakeSampler, Passes, SampledBatches, SampledOrder, maker
from exp.data.spec import DeclaredSpec, read_spec, stated, stated_classes
from exp.data.split_rules import chooser
from exp.data.splits import fit, make_splits, prepare
from exp.data.streams import Recorded, ShareOfStream, StreamLoader, open_stream
from exp.data.tv_tensors import plain_tensors, wrapping
from exp.data.workers import (
    Assembly,
    FetchOptions,
    SampleSource,
    StartMethod,
    WorkerLoader,
    apply_transforms,
    received,
)
from exp.errors import ConfigError, ExpError, RunError, UserCodeError
from exp.nested import tensors_in
from exp.shared_types import Batch, DataSpec, SampleDtype, Stage

# By name, or in a list.
Transforms = Mapping[str, Any] | Sequence[Any] | None
BATCH = "batch_transforms"
ChangeAssembly = Callable[[Assembly], Assembly]
# Of a part, that the check looks at before a run.
SAMPLES = 64


class Data:
    """Data sets for train, val and test, and how they are batched.

    Data in memory (torch's TensorDataset, or any data set with `gather(indices)`) is batched by index. Any other
    Dataset, and data with transforms, goes sample by sample through torch's DataLoader; so does an IterableDataset.

    dataset: one data set, divided into parts. train, val, test: a data set for one part, instead of a divided one.
    parts: size of each part of `dataset`: a fraction, or a whole number of samples. parts_seed: chooses them; not the
        run's seed, so that a checkpoint is never tested on what another seed trained it on. split: rules for the parts,
        see split_rules.SplitRules.
    batch_size: samples of a global batch, over all ranks. drop_last: leave out the short last batch of training.
    sampler: which samples of train an epoch takes: a class of torch's kind, made with the part as `data_source`, or
        `balanced`, which draws each class alike; None takes each once. It draws by torch's generators, seeded from
        (seed, epoch), and is shared out over ranks here.
    batch_sampler: which samples make a global batch, in every part: a class of torch's kind, made with the part as
        `data_source`; None takes batch_size one after another.
    num_workers, prefetch_factor, persistent_workers, multiprocessing_context: DataLoader's own.
    pin_memory: None means where there is a CUDA device.
    shuffle_buffer: samples among which the order of a stream is random.
    shuffle_block: of data that are slow to read here and there, how many samples that follow each other are read
        together; None means what the data set says in its `block`, else each by itself. shuffle_window: blocks whose
        samples are shuffled together.
    tv_tensors: what entries of a sample are to torchvision's v2 transforms, such as {input: image, target: mask}.
    transforms: applied in turn to the input of each sample, or to the entries that their parameters name.
        train_transforms: the same before them, in training only. eval_transforms: the same before them, in validation,
        test and prediction. batch_transforms, train_batch_transforms: the same on
        a rank's share of a batch, on its device.
    collate: list of samples to batch; `pad` brings tensors to one size (exp.data.collate.Pad); None means torch's own.
    inputs: a shape and a dtype for each input by name, of samples with several or with another than `input`; null in
        a shape is a length that differs from batch to batch. Of samples that are tuples the names are in their order.
    input_shape, input_dtype, num_classes, num_outputs: see DataSpec. None leaves them, and `inputs`, to the data.
    input_mean, input_std: of pictures that were normalised, what for: an input is (pixel - mean) / std, with pixels
        from 0 (black) to 1 (white). One number, or one a channel. They serve to show the pictures again.
    ignored_labels: whole targets that are no class and that losses leave out; None means every ignore_index of the
        objective and the metrics, and torch's own, -100. Another label outside the classes is refused.
    keeps_doubles: whether float64, which NumPy gives, stays what it is, for a run in fp64; else it becomes float32, a
        network's own dtype, but where input_dtype or inputs say float64.
    rounded: an attribute, the entries of a sample that come in float64 and become float32.
    earlier: gives what the training part told in the run that this one goes on from; this one's is asked without.
    fitted: an attribute, what the training part told, such as means, words or classes. Checkpoints keep it.
    notes: an attribute, what to say of the data, a line each.
    keeps_raw: whether parts that are Raw stay in memory, too, in the attribute `raw`, by stage.
    seed: of the run.

    Raises: ConfigError that names the key.
    """

    rounded: Sequence[str] = ()
    _drawn: SampledOrder | None = None

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
        self.shuffle_block, self.shuffle_window = shuffle_block, shuffle_window
        dtypes = [input_dtype, *(one["dtype"] for one in (inputs or {}).values())]
        self.form = BatchForm(names=tuple(inputs or ()), keeps_doubles=keeps_doubles or "float64" in dtypes)
        self._collate = collate_of(collate, inputs=self.form.names)
        given = {"transforms": transforms, "train_transforms": train_transforms, "eval_transforms": eval_transforms}
        self._set_transforms(given, {BATCH: batch_transforms, f"train_{BATCH}": train_batch_transforms}, tv_tensors)
        pinned = use_pinned_memory(pin_memory)
        self._options = FetchOptions(num_workers, pinned, prefetch_factor, persistent_workers, multiprocessing_context)
        own: dict[Stage, Any] = {"train": train, "val": val, "test": test}
        raw = make_splits(dataset, own, sizes=parts, seed=parts_seed, choose=chooser(split, seed=parts_seed))
        self._prepare(raw, earlier=earlier, keeps_raw=keeps_raw)
        self._batched: dict[Stage, SampledBatches] = {}
        self._check_batches()
        self.labels = Labels(classes=None, ignored=(IGNORED,) if ignored_labels is None else tuple(ignored_labels))
        self.spec = self._spec(DeclaredSpec.of(inputs, input_shape, input_dtype, num_classes, num_outputs))
        self._check_labels()
        self._choose(BalancedSampler if sampler == "balanced" else sampler, batch_sampler)

    def _set_transforms(
        self, given: Mapping[str, Transforms], batch: Mapping[str, Transforms], tv_tensors: Mapping[str, Any] | None
    ) -> None:
        self._wrapping = () if tv_tensors is None else (wrapping(tv_tensors, inputs=self.held),)
        self._steps = {key: callables(one, key, self.held) for key, one in given.items()}
        self._steps |= {key: callables(one, key, self.form.names, is_batch=True) for key, one in batch.items()}

    def _prepare(
        self, raw: Mapping[Stage, AnyDataset], *, earlier: Callable[[], Fitted | None] | None, keeps_raw: bool
    ) -> None:
        self.fitted = fit(raw, earlier=earlier or (lambda: None))
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
        sampler = ShareSampler(batches=self._batches_of(stage), rank=rank, world_size=world_size)
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
        return bool(self._transforms_of(stage, BATCH))

    def transform_batch(self, batch: Batch, *, stage: Stage, rank: int, epoch: int, number: int) -> Batch:
        """A rank's share of a batch with the stage's batch transforms applied, under generators of its own stream.

        Raises: UserCodeError, and what a transform of exp's refuses.
        """
        reseed_batch(seed=self.seed, stage=stage, rank=rank, epoch=epoch, batch=number)
        try:
            return batch._replace(data=apply_transforms(batch.data, self._transforms_of(stage, BATCH)))
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
            transforms=self._transforms_of(stage),
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
            transforms=self._transforms_of(stage),
            seed=self.seed,
            stage=stage,
            fingerprint=fingerprint,
        )

    def _assembly(self, named: Callable[[int], str]) -> Assembly:
        return Assembly(collate=self._collate, form=self.form, labels=self.labels, named=named)

    def _transforms_of(self, stage: Stage, key: str = "transforms") -> tuple[Transform, ...]:
        if key == BATCH:
            return (*self._steps[f"train_{BATCH}"], *self._steps[BATCH]) if stage == "train" else self._steps[BATCH]
        first = "train_transforms" if stage == "train" else "eval_transforms"
        return (*self._wrapping, *self._steps[first], *self._steps[key])

    def is_indexed(self, stage: Stage) -> bool:
        is_plain = self._collate is default_collate and not self._transforms_of(stage)
        return is_plain and isinstance(self._parts[stage], Indexed)

    def _batches_of(self, stage: Stage) -> EpochBatches:
        if stage in self._batched:
            return self._batched[stage]
        train = stage == "train"
        draw = self._drawn if train else None
        return GlobalBatches(
            length=samples_in(self._parts[stage]) if draw is None else len(draw),
            batch_size=self.batch_size,
            shuffle=self.shuffle and train,
            drop_last=self.drop_last and train,
            seed=self.seed,
            draw=draw,
            block=self.shuffle_block or block_of(self._parts[stage]),
            window=self.shuffle_window,
        )

    @property
    def held(self) -> tuple[str, ...]:
        """The names of a sample's values, before they are a batch."""
        names = self.form.names
        return self._collate.held(names) if isinstance(self._collate, Pad) else names

    def _choose(self, sampler: MakeSampler | None, batch_sampler: MakeSampler | None) -> None:
        """Let samplers choose the samples and the batches, now that it is known what they are made of."""
        if self.shuffle_block is not None and (sampler is not None or not self.shuffle):
            why = "a sampler, which chooses the order" if self.shuffle else "data.shuffle=false"
            expected = "null, or an order that is shuffled here"
            raise data_fault("shuffle_block", got=f"{self.shuffle_block}, and {why}", expected=expected)
        if sampler is not None:
            self._drawn = self._sampled(sampler)
        if batch_sampler is not None:
            self._batched = {stage: self._sampled_batches(batch_sampler, stage) for stage in self._parts}

    def _sampled(self, make: MakeSampler) -> SampledOrder:
        """The order that a sampler of the training part gives."""
        part = self._parts.get("train")
        if part is None or isinstance(part, IterableDataset):
            got = "no training part" if part is None else "a training part that is a stream of samples"
            raise data_fault(
                "sampler", got=f"a sampler, and {got}", expected="a data set with an index, to take samples from"
            )
        if not self.shuffle:
            raise data_fault("shuffle", got="false, beside a sampler", expected="true: the sampler decides the order")
        offers = {"data_source": part, "inputs": self.held, "num_classes": self.spec.num_classes}
        passes = Passes(maker(make, key="sampler", offers=offers), key="sampler", stage="train", seed=self.seed)
        order = SampledOrder(passes, samples=samples_in(part))
        if self.drop_last and len(order) < self.batch_size:
            raise self._no_batch(len(order))
        return order

    def _sampled_batches(self, make: MakeSampler, stage: Stage) -> SampledBatches:
        """The batches that a batch sampler of one part gives."""
        part, train, key = self._parts[stage], stage == "train", "batch_sampler"
        if self._drawn is not None:
            raise data_fault(
                key, got="a batch sampler, beside data.sampler", expected="one of the two: it chooses the samples, too"
            )
        if isinstance(part, IterableDataset):
            got = f"a batch sampler, and a {stage} part that is a stream of samples"
            raise data_fault(key, got=got, expected="a data set with an index, to take samples from")
        offers = {
            "data_source": part,
            "inputs": self.held,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle and train,
            "drop_last": self.drop_last and train,
        }
        passes = Passes(maker(make, key=key, offers=offers), key=key, stage=stage, seed=self.seed)
        return SampledBatches(passes, samples=samples_in(part), seed=self.seed, is_whole=not train)

    def _check_batches(self) -> None:
        for stage, part in self._parts.items():
            if isinstance(part, IterableDataset):
                continue
            held = samples_in(part)
            if not held:
                raise data_fault(stage, got="an empty data set", expected="at least one sample")
            if not len(self._batches_of(stage)):
                raise self._no_batch(held)

    def _empty_stream(self, stage: Stage) -> ConfigError:
        return data_fault(stage, got="an empty stream", expected="at least one sample")

    def _no_batch(self, held: int) -> ConfigError:
        return data_fault(
            "batch_size",
            got=f"{self.batch_size} with drop_last=true, and {held} training samples: no batch at all",
            expected=f"{held} or less",
            cure="Make the batch smaller, or keep the short one with data.drop_last=false",
        )

    def _check_labels(self) -> None:
        """Data in memory is looked at whole; other labels as they are read."""
        self.labels = replace(self.labels, classes=self.spec.num_classes)
        for stage, part in self._parts.items():
            if not isinstance(part, Tensors):
                continue
            wrong = self.labels.first_wrong(target_in(by_name(part.entries, self.form.names)))
            if wrong is not None:
                index, label = wrong
                raise ConfigError([self.labels.fault(label, of=sample_name(part, index, stage=stage))])

    def _spec(self, declared: DeclaredSpec) -> DataSpec:
        stage, part = next(iter(self._parts.items()))
        if isinstance(part, IterableDataset) and declared.whole is not None:
            # A stream may be slow to open, and may be read once only.
            return declared.whole
        with preserve_generators():
            raw = self._first(stage, part)
        self.rounded, batch = self.form.rounded(raw), self.form(raw)
        outputs = [number for part in self._parts.values() if (number := stated(part, "num_outputs")) is not None]
        return read_spec(
            declared,
            batch,
            num_classes=stated_classes(self._parts, declared),
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
        transforms = self._transforms_of(stage)
        sample = next(open_stream(part, epoch=0), None)
        if sample is None:
            raise self._empty_stream(stage)
        read = apply_transforms(sample, transforms)
        return self._collate([plain_tensors(read) if self._collate is default_collate else read])


def block_of(part: object) -> int | None:
    """How many samples that follow each other a data set reads best together, by its attribute `block`."""
    block = getattr(part, "block", None)  # a data set of the user's own need not have one, or means another thing
    return block if isinstance(block, int) else None


def use_pinned_memory(wanted: bool | None) -> bool:
    """Whether batches are made in pinned memory; None means where there is a CUDA device.

    Raises: ConfigError where it is asked for without one.
    """
    available = torch.cuda.is_available()
    if wanted and not available:
        raise data_fault(
            "pin_memory", got="true", expected="a machine with a CUDA device", cure="null decides by itself"
        )
    return available if wanted is None else wanted
