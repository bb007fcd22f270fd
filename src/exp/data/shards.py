"""A data set that does not fit in memory: files of records, read as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from torch.utils.data import Dataset, IterableDataset

from exp.data.data_errors import SampleError, data_error, require_sample
from exp.data.dataset_files import find_files
from exp.data.fields import Fields, Inputs, Names, NumberDtype
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
    """Files of records. Each split reads some of the files as a stream; see ShardStream.

    A file ends in .csv or .tsv (rows after a header), .jsonl (a JSON mapping on each line), .parquet, .npz (arrays
    `[N, ...]`) or .tar (see TarShard). All files are of one kind.

    Args:
        files: A glob, or several, relative to the current folder or to `directory`. data.parts and parts_seed divide
            the files among the splits. Or a mapping of train, val and test to globs.
        target: As in Fields.
        directory: The folder in which files are looked up after the current one.
        inputs: As in Fields. A text of a .csv file that is a number becomes a number.
        task: As in Fields.
        classes: As in Fields.
        dtypes: As in Fields.
        count: Whether files other than .parquet and .npz are read once before the run to count their records.
            Otherwise the length of an epoch is unknown.
        delimiter: The sign between values of a .csv file. A .tsv file has tabs.
        scale: As in Fields.
        resize: As in Images, and so are the following options of pictures.
        parts_seed: The seed that divides the files.

    Raises:
        ConfigError: A file or a column does not exist, a file is found to be damaged, or pyarrow is not installed.
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
        self.count, self.parts_seed = count, parts_seed
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
            raise data_error(f"dataset.files.{wrong[0]}", got="no split", expected="train, val or test")
        self.files: dict[Stage | None, list[ShardFile]] = {}
        for stage, patterns in given.items():
            if patterns is not None:
                key = "dataset.files" if stage is None else f"dataset.files.{stage}"
                found = find_files(patterns, directory=directory, key=key)
                self.files[stage] = [open_shard(file, delimiter=delimiter) for file in found]
        opened = [file for several in self.files.values() for file in several]
        if not opened or len(set(map(type, opened))) > 1:
            one_each = {type(file): file for file in reversed(opened)}
            got = " and ".join(str(file.file) for file in reversed(one_each.values())) or "no file of any split"
            raise data_error("dataset.files", got=got, expected="files of one kind")
        self.fields = fields_of(fields, opened)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, ShardStream]:
        """Return a stream for each split.

        Args:
            sizes: The fractions of the files, for files that are not given by split.

        Raises:
            ConfigError: Files by split have sizes, a size is a number of samples, or there are fewer files than splits.
        """
        if None not in self.files:
            if dict(sizes) != dict(DEFAULT_SIZES):
                got = "sizes, and data.dataset.files with files for each split"
                raise data_error("parts", got=got, expected="null")
            return {stage: self._stream(self.files[stage]) for stage in STAGES if stage in self.files}
        files = self.files[None]
        for stage, size in sizes.items():
            if isinstance(size, int) and size != 1:
                expected = "a fraction of the files, or files for each split, data.dataset.files.val=..."
                raise data_error(f"parts.{stage}", got=str(size), expected=expected)
        order = permutation(seed=seed_for(self.parts_seed, "shards"), epoch=0, length=len(files)).tolist()
        counts = lengths({stage: float(size) for stage, size in sizes.items()}, len(files), unit="files")
        parts: dict[Stage, ShardStream] = {}
        for stage, held in counts.items():
            chosen, order = sorted(order[:held]), order[held:]
            parts[stage] = self._stream([files[place] for place in chosen])
        return parts

    def _stream(self, files: Sequence[ShardFile]) -> ShardStream:
        return ShardStream(files=files, fields=self.fields, count=self.count)


class ShardStream(IterableDataset[object]):
    """The samples of some files, in the order of the records.

    Every rank and every worker passes over all records, but reads and parses only those of its samples.

    Attributes:
        num_classes: The number of class names; None if targets are numbers.
    """

    def __init__(self, *, files: Sequence[ShardFile], fields: Fields, count: bool) -> None:
        self.files, self.fields = tuple(files), fields
        self.num_classes = None if fields.classes is None else len(fields.classes)
        known = [length for file in files if (length := _length(file, count=count)) is not None]
        self._length = sum(known) if len(known) == len(files) else None
        if self._length is not None:
            require_sample(self._length, files[0].file, key="dataset.files")

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Record]:
        """Yield the records of one epoch, with the files sorted by name or shuffled by (seed, epoch)."""
        order = list(range(len(self.files)))
        if shuffle:
            order = permutation(seed=seed_for(seed, "shards"), epoch=epoch, length=len(self.files)).tolist()
        for place in order:
            yield from self.files[place].records()

    def sample(self, record: Record) -> object:
        """Return the sample of a record. Raise SampleError with the place of a record that cannot be read."""
        return self.fields.sample(record.columns(self.fields.columns), where=str(record))

    @property
    def value_names(self) -> ValueNames:
        return self.fields.value_names

    def __iter__(self) -> Iterator[object]:
        return map(self.sample, self.records(seed=0, epoch=0, shuffle=False))

    def __len__(self) -> int:
        """Raise TypeError if a file does not state its number of records."""
        if self._length is None:
            raise TypeError("data=stream: these files do not state their number of records; data.dataset.count=true")
        return self._length


def open_shard(file: Path, *, delimiter: str = ",") -> ShardFile:
    """Return a file of records. Raise ConfigError for an unknown ending."""
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


def fields_of(fields: Fields, files: Sequence[ShardFile]) -> Fields:
    """Return the fields with the form of the first record.

    Raises:
        ConfigError: A file lacks a column, or the first record is not a valid sample.
    """
    for file in files:
        if file.names is not None:
            fields.columns_to_read(file.names, where=str(file.file))
    try:
        first = next((record for file in files for record in file.records()), None)
        require_sample(int(first is not None), files[0].file, key="dataset.files")
        assert first is not None
        wanted = fields.columns_to_read(first.file.names_of(first), where=str(first))
        return fields.of_record(first.columns(wanted), where=str(first))
    except SampleError as error:
        raise ConfigError([error.error]) from error
