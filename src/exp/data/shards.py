"""A data set that does not fit into memory: files of records, read one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from torch.utils.data import Dataset, IterableDataset

from exp.data.columns import Task
from exp.data.dataset_files import find_files
from exp.data.faults import SampleError, data_fault
from exp.data.fields import Columns, Fields, Inputs, NumberDtype
from exp.data.indexed_shards import IndexedShards
from exp.data.pictures import Mode, PictureForm
from exp.data.randomness import permutation, seed_for
from exp.data.shard_files import CsvShard, JsonLines, NpzShard, ParquetShard, Record, ShardFile, TarShard
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

    files: a glob, or several, relative to the current folder, or else to directory: the files are divided among the
        parts, by data.parts and parts_seed. Or a mapping of train, val and test to globs.
    target, inputs, task, classes, dtypes, scale: see Fields. A text of a .csv that is a number is one.
    index: whether the files are read once before the run to find where records begin. The parts then are data sets with
        an index: samples are shuffled in blocks all over the files, a sampler can choose them, and a run goes on in the
        middle of an epoch without reading what was before. For .csv, .tsv, .jsonl and .tar.
    count: whether the records of files that do not say how many they hold (all but .parquet and .npz) are counted by
        reading them once; otherwise nobody knows the length of an epoch.
    delimiter: between the values of a .csv; of a .tsv it is a tab.
    resize, crop, mode, mean, std, background: of pictures, see Images.

    Raises: ConfigError for a file or a column that is not there, and a file that is damaged as far as its beginning,
        and of .parquet, .npz and .tar its end, tell; where pyarrow is not installed and a file is .parquet.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledRecords"

    def __init__(
        self,
        *,
        files: Patterns | Mapping[Stage, Patterns | None],
        target: Columns | None,
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
        self.count, self.index, self.parts_seed = count, index, parts_seed
        self.fields = Fields(
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
            raise data_fault(f"dataset.files.{wrong[0]}", got="no part", expected="train, val or test")
        self.files: dict[Stage | None, list[ShardFile]] = {}
        for stage, patterns in given.items():
            if patterns is not None:
                key = "dataset.files" if stage is None else f"dataset.files.{stage}"
                found = find_files(patterns, directory=directory, key=key)
                self.files[stage] = [_opened(file, delimiter=delimiter) for file in found]
        opened = [file for several in self.files.values() for file in several]
        if not opened:
            raise data_fault("dataset.files", got="no file of any part", expected="a glob of files, {train: ...}")
        _refuse_mixed(opened)
        self._settle(opened)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, ShardStream | IndexedShards]:
        """A stream, or samples by number, for each part: of its own files, or of whole files that are chosen for it.

        sizes: of files without parts, fractions of them.
        Raises: ConfigError for sizes beside files by part, for a number of samples, and for fewer files than parts.
        """
        if None not in self.files:
            if dict(sizes) != dict(DEFAULT_SIZES):
                got = "sizes, beside data.dataset.files with files for each part"
                raise data_fault("parts", got=got, expected="null")
            return {stage: self._part(self.files[stage]) for stage in STAGES if stage in self.files}
        files = self.files[None]
        for stage, size in sizes.items():
            if isinstance(size, int) and size != 1:
                expected = "a fraction: whole files are divided, or files for each part, data.dataset.files.val=..."
                raise data_fault(f"parts.{stage}", got=str(size), expected=expected)
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

    def _settle(self, files: Sequence[ShardFile]) -> None:
        """Look at the columns of all files, as far as they are known, and at the first record."""
        for file in files:
            if file.names is not None:
                self.fields.wanted(file.names, where=str(file.file))
        try:
            first = next((record for file in files for record in file.records()), None)
            if first is None:
                raise data_fault("dataset.files", got=f"{files[0].file} without a record", expected="at least one")
            wanted = self.fields.wanted(first.file.names_of(first), where=str(first))
            self.fields = self.fields.settled(first.columns(wanted), where=str(first))
        except SampleError as error:
            raise ConfigError([error.fault]) from error


class ShardStream(IterableDataset[object]):
    """The samples of some files, one after another.

    Every rank and every worker passes over all records, and reads and parses those of its own samples alone.

    num_classes: an attribute, as many as there are names of classes; None where targets are numbers.
    """

    def __init__(self, *, files: Sequence[ShardFile], fields: Fields, count: bool) -> None:
        self.files, self.fields = tuple(files), fields
        self.num_classes = None if fields.classes is None else len(fields.classes)
        self._length = _length(self.files, count=count)
        if self._length == 0:
            raise data_fault("dataset.files", got=f"{files[0].file} without a record", expected="at least one")

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Record]:
        """The records of one epoch: file after file, in the order of their names or shuffled by (seed, epoch)."""
        order = list(range(len(self.files)))
        if shuffle:
            order = permutation(seed=seed_for(seed, "shards"), epoch=epoch, length=len(self.files)).tolist()
        for place in order:
            yield from self.files[place].records()

    def sample(self, record: Record) -> object:
        """The sample of a record.

        Raises: SampleError where it cannot be read, with its file and its place there.
        """
        return self.fields.sample(record.columns(self.fields.columns), where=str(record))

    @property
    def value_names(self) -> ValueNames:
        return self.fields.value_names

    def __iter__(self) -> Iterator[object]:
        return map(self.sample, self.records(seed=0, epoch=0, shuffle=False))

    def __len__(self) -> int:
        """Raises: TypeError where nobody has counted the records."""
        if self._length is None:
            raise TypeError("data=stream: these files do not say how many records they hold; data.dataset.count=true")
        return self._length


def _length(files: Sequence[ShardFile], *, count: bool) -> int | None:
    total = 0
    for file in files:
        if file.length is not None:
            total += file.length
        elif not count:
            return None
        else:
            try:
                total += sum(1 for _ in file.records())
            except SampleError as error:
                raise ConfigError([error.fault]) from error
    return total


def _opened(file: Path, *, delimiter: str) -> ShardFile:
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
        raise data_fault(
            "dataset.files",
            got=str(file),
            expected=f"a file that ends in {', '.join(ENDINGS)}",
            cure="Unpack what is compressed" if kind in (".gz", ".tgz", ".zst", ".bz2", ".xz") else None,
        )
    return kinds[kind](file)


def _refuse_mixed(files: Sequence[ShardFile]) -> None:
    first, *others = files
    for file in others:
        if type(file) is not type(first):
            raise data_fault(
                "dataset.files",
                got=f"{first.file} and {file.file}",
                expected="files of one kind",
                cure="Narrow the glob",
            )
