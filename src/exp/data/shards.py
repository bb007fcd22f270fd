"""A data set that does not fit into memory: files of records, read one after another or by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from torch.utils.data import Dataset, IterableDataset

from exp.data.data_errors import SampleError, data_error
from exp.data.dataset_files import find_files
from exp.data.fields import Fields, Inputs, Names, NumberDtype
from exp.data.indexed_shards import IndexedShards
from exp.data.pictures import Mode, PictureForm
from exp.data.randomness import permutation, seed_for
from exp.data.shard_files import CsvShard, JsonLines, NpzShard, ParquetShard, Record, ShardFile, TarShard
from exp.data.source import Task
from exp.data.splits import DEFAULT_SIZES, lengths
from exp.data.value_names import ValueNames
from exp.errors import ConfigError
from exp.shared_types import STAGES, Stage

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".npz", ".tar")
Patterns = str | Sequence[str]


class Shards(Dataset[object]):
    """Files of records, of which train, val and test each read some as a stream, see ShardStream.

    A file ends in .csv or .tsv (rows below names), .jsonl (a mapping in JSON a line), .parquet, .npz (arrays
    `[N, ...]`) or .tar (files that follow each other with one name are a record, its columns their endings, as in
    WebDataset). All of them are of one kind.

    Args:
        files: a glob, or several, relative to the current folder, or else to directory: the files are divided among the
            splits, by data.parts and parts_seed. Or a mapping of train, val and test to globs.
        target: see Fields.
        directory: the folder in which files are looked for after the current one.
        inputs: see Fields. A text of a .csv that is a number is one.
        task: see Fields.
        classes: see Fields.
        dtypes: see Fields.
        index: whether the files are read once before the run to find where records begin. The splits then have a
            length and an index: samples are shuffled in blocks all over the files, a sampler can choose them, and a run
            resumes in the middle of an epoch without reading what was before. For .csv, .tsv, .jsonl and .tar.
        count: whether the records of files that do not state their number (all but .parquet and .npz) are counted by
            reading them once; otherwise the length of an epoch is unknown.
        delimiter: between the values of a .csv; of a .tsv it is a tab.
        scale: see Fields.
        resize: of pictures, see Images.
        crop: see Images.
        mode: see Images.
        mean: see Images.
        std: see Images.
        background: see Images.
        parts_seed: the seed that divides the files.

    Raises:
        ConfigError: for a file or a column that is not there, and a file whose beginning is damaged, or whose end is,
            of .parquet, .npz and .tar; for a .parquet without pyarrow.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledRecords"

    def __init__(
        self,
        *,
        files: Patterns | Mapping[Stage, Patterns | None],
        target: Names | None,
        directory: str = "data",
        inputs: Inputs | None = None,
        task: Task = "classification",
        classes: Sequence[str] | None = None,
        dtypes: Mapping[str, NumberDtype] | None = None,
        index: bool = False,
        count: bool = False,
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        scale: float = 1.0,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        background: str = "white",
        parts_seed: int = 0,
    ) -> None:
        self.index, self.count, self.parts_seed = index, count, parts_seed
        fields = Fields(
            inputs=inputs,
            target=target,
            task=task,
            classes=classes,
            dtypes=dtypes,
            scale=scale,
            picture=PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std, background=background),
        )
        given = files if isinstance(files, Mapping) else {None: files}
        if wrong := [name for name in given if name is not None and name not in STAGES]:
            raise data_error(f"dataset.files.{wrong[0]}", got="no part", expected="train, val or test")
        self.files: dict[Stage | None, list[ShardFile]] = {}
        for stage, patterns in given.items():
            if patterns is not None:
                key = "dataset.files" if stage is None else f"dataset.files.{stage}"
                found = find_files(patterns, directory=directory, key=key)
                self.files[stage] = [open_shard(file, delimiter=delimiter) for file in found]
        opened = [file for several in self.files.values() for file in several]
        if not opened or len(set(map(type, opened))) > 1:
            one_each = {type(file): file for file in reversed(opened)}
            got = " and ".join(str(file.file) for file in reversed(one_each.values())) or "no file of any part"
            raise data_error("dataset.files", got=got, expected="files of one kind")
        self.fields = settled_fields(fields, opened)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, ShardStream | IndexedShards]:
        """Return a stream, or samples by number, for each split: of its files, or of whole files that are chosen.

        sizes: of files without splits, fractions of them.
        Raises: ConfigError for sizes in addition to files by split, for a number of samples, and for fewer files than
            splits.
        """
        if None not in self.files:
            if dict(sizes) != dict(DEFAULT_SIZES):
                got = "sizes, beside data.dataset.files with files for each part"
                raise data_error("parts", got=got, expected="null")
            return {stage: self._part(self.files[stage]) for stage in STAGES if stage in self.files}
        files = self.files[None]
        for stage, size in sizes.items():
            if isinstance(size, int) and size != 1:
                expected = "a fraction: whole files are divided, or files for each part, data.dataset.files.val=..."
                raise data_error(f"parts.{stage}", got=str(size), expected=expected)
        order = permutation(seed=seed_for(self.parts_seed, "shards"), epoch=0, length=len(files)).tolist()
        counts = lengths({stage: float(size) for stage, size in sizes.items()}, len(files), unit="files")
        parts: dict[Stage, ShardStream | IndexedShards] = {}
        for stage, held in counts.items():
            chosen, order = sorted(order[:held]), order[held:]
            parts[stage] = self._part([files[place] for place in chosen])
        return parts

    def _part(self, files: Sequence[ShardFile]) -> ShardStream | IndexedShards:
        if self.index:
            return IndexedShards(files=files, fields=self.fields)
        return ShardStream(files=files, fields=self.fields, count=self.count)


class ShardStream(IterableDataset[object]):
    """The samples of some files, one after another.

    Every rank and every worker passes over all records, and reads and parses those of its own samples alone.

    num_classes: an attribute, as many as there are names of classes; None where targets are numbers.
    """

    def __init__(self, *, files: Sequence[ShardFile], fields: Fields, count: bool) -> None:
        self.files, self.fields = tuple(files), fields
        self.num_classes = None if fields.classes is None else len(fields.classes)
        known = [length for file in files if (length := _length(file, count=count)) is not None]
        self._length = sum(known) if len(known) == len(files) else None
        if self._length == 0:
            raise data_error("dataset.files", got=f"{files[0].file} without a record", expected="at least one")

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Record]:
        """Yield the records of one epoch: file after file, in the order of their names or shuffled by (seed, epoch)."""
        order = list(range(len(self.files)))
        if shuffle:
            order = permutation(seed=seed_for(seed, "shards"), epoch=epoch, length=len(self.files)).tolist()
        for place in order:
            yield from self.files[place].records()

    def sample(self, record: Record) -> object:
        """Return the sample of a record.

        Raises: SampleError where it cannot be read, with its file and its place there.
        """
        return self.fields.sample(record.columns(self.fields.columns), where=str(record))

    @property
    def value_names(self) -> ValueNames:
        return self.fields.value_names

    def __iter__(self) -> Iterator[object]:
        return map(self.sample, self.records(seed=0, epoch=0, shuffle=False))

    def __len__(self) -> int:
        """Raises: TypeError if a file does not state its number of records."""
        if self._length is None:
            raise TypeError("data=stream: these files do not state their number of records; data.dataset.count=true")
        return self._length


def open_shard(file: Path, *, delimiter: str = ",") -> ShardFile:
    """Return a file of records. Raises: ConfigError for an unknown ending."""
    kind = file.suffix.lower()
    if kind in (".csv", ".tsv"):
        return CsvShard(file, delimiter="\t" if kind == ".tsv" else delimiter)
    kinds: dict[str, type[JsonLines | ParquetShard | NpzShard | TarShard]] = {
        ".jsonl": JsonLines,
        ".parquet": ParquetShard,
        ".npz": NpzShard,
        ".tar": TarShard,
    }
    if kind not in kinds:
        expected = f"a file that ends in {', '.join(ENDINGS)}, and is not compressed"
        raise data_error("dataset.files", got=str(file), expected=expected)
    return kinds[kind](file)


def _length(file: ShardFile, *, count: bool) -> int | None:
    if file.length is not None or not count:
        return file.length
    try:
        return sum(1 for _ in file.records())
    except SampleError as error:
        raise ConfigError([error.error]) from error


def settled_fields(fields: Fields, files: Sequence[ShardFile]) -> Fields:
    """Return the fields with the form of the first record.

    Raises: ConfigError for a column that a file is known not to have, and for a first record that makes no sample.
    """
    for file in files:
        if file.names is not None:
            fields.wanted(file.names, where=str(file.file))
    try:
        first = next((record for file in files for record in file.records()), None)
        if first is None:
            raise data_error("dataset.files", got=f"{files[0].file} without a record", expected="at least one")
        wanted = fields.wanted(first.file.names_of(first), where=str(first))
        return fields.settled(first.columns(wanted), where=str(first))
    except SampleError as error:
        raise ConfigError([error.error]) from error
