"""Data set of files of records that do not fit in memory. The records are read as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from torch.utils.data import Dataset, IterableDataset

from exp.data.data_errors import SampleError, data_error, require_sample
from exp.data.dataset_files import find_files
from exp.data.entries import ValueNames
from exp.data.fields import Fields, Inputs, Names, NumberDtype
from exp.data.pictures import Mode, PictureForm
from exp.data.randomness import permutation, seed_for
from exp.data.shard_files import CsvShard, JsonLines, NpzShard, ParquetShard, Record, ShardFile, TarShard
from exp.data.source import Task
from exp.data.splits import DEFAULT_SIZES
from exp.errors import ConfigError
from exp.shared_types import STAGES, Stage

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet", ".npz", ".tar")
Patterns = str | Sequence[str]


class Shards(Dataset[object]):
    """Data set of files of records. The config lists the files of each split. A split is a stream; see ShardStream.

    Supported formats are .csv and .tsv (rows after a header), .jsonl (a JSON object on each line), .parquet, .npz
    (arrays `[N, ...]`) and .tar (see TarShard). All files must have the same format.

    Args:
        files: A mapping from the splits `train`, `val` and `test` to glob patterns. The patterns are relative to the
            current folder or to `directory`. None means that there is no such split.
        target: See Fields.
        directory: The folder that is searched if a pattern matches no file in the current folder. Default: `data`.
        inputs: See Fields. Texts in a .csv file are converted to numbers.
        task: See Fields. Default: "classification".
        classes: See Fields.
        dtypes: See Fields.
        delimiter: The character between values of a .csv file. Default: a comma. The delimiter of a .tsv file is a tab.
        scale: See Fields. Default: 1.
        resize: See PictureForm.
        crop: See PictureForm.
        mode: See PictureForm.
        mean: See PictureForm.
        std: See PictureForm.

    Raises:
        ConfigError: A file or a column does not exist, a file is damaged, or pyarrow is not installed.
    """

    unlabelled = "exp.data.unlabelled.UnlabelledRecords"

    def __init__(
        self,
        *,
        files: Mapping[Stage, Patterns | None],
        target: Names | None,
        directory: str = "data",
        inputs: Inputs | None = None,
        task: Task = "classification",
        classes: Sequence[str] | None = None,
        dtypes: Mapping[str, NumberDtype] | None = None,
        delimiter: Annotated[str, "one character", Len(1, 1)] = ",",
        scale: float = 1.0,
        resize: int | Sequence[int] | None = None,
        crop: int | Sequence[int] | None = None,
        mode: Mode | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        fields = Fields(
            inputs=inputs,
            target=target,
            task=task,
            classes=classes,
            dtypes=dtypes,
            scale=scale,
            picture=PictureForm(resize=resize, crop=crop, mode=mode, mean=mean, std=std),
        )
        if wrong := [name for name in files if name not in STAGES]:
            raise data_error(f"dataset.files.{wrong[0]}", got=wrong[0], expected="train, val or test")
        self.files: dict[Stage, list[ShardFile]] = {}
        for stage, patterns in files.items():
            if patterns is not None:
                found = find_files(patterns, directory=directory, key=f"dataset.files.{stage}")
                self.files[stage] = [open_shard(file, delimiter=delimiter) for file in found]
        opened = [file for several in self.files.values() for file in several]
        if not opened or len(set(map(type, opened))) > 1:
            one_each = {type(file): file for file in reversed(opened)}
            got = " and ".join(str(file.file) for file in reversed(one_each.values())) or "no files"
            raise data_error("dataset.files", got=got, expected="files of the same format")
        self.fields = fields_of(fields, opened)

    def divide(self, sizes: Mapping[Stage, int | float]) -> dict[Stage, ShardStream]:
        """Return a mapping from the names of the splits to their streams.

        Args:
            sizes: The sizes in data.parts. They must be the default sizes, because data.dataset.files already lists the
                files of each split.

        Raises:
            ConfigError: `sizes` are not the default sizes.
        """
        if dict(sizes) != dict(DEFAULT_SIZES):
            got, expected = "sizes of splits, although data.dataset.files lists the files of each split", "null"
            raise data_error("parts", got=got, expected=expected, fix="Set data.parts=null")
        return {
            stage: ShardStream(files=self.files[stage], fields=self.fields) for stage in STAGES if stage in self.files
        }


class ShardStream(IterableDataset[object]):
    """Stream of the samples of several files, in the order of the records.

    Every rank and every worker iterates over all records. It parses only the records that it needs for its samples.

    Args:
        files: The files.
        fields: The conversion of records to samples.

    Attributes:
        num_classes: The number of classes if the config lists their names. None otherwise.
    """

    def __init__(self, *, files: Sequence[ShardFile], fields: Fields) -> None:
        self.files, self.fields = tuple(files), fields
        self.num_classes = None if fields.classes is None else len(fields.classes)
        known = [file.length for file in files if file.length is not None]
        self._length = sum(known) if len(known) == len(files) else None
        if self._length is not None:
            require_sample(self._length, files[0].file, key="dataset.files")

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Record]:
        """Yield the records of an epoch.

        Args:
            seed: The seed of the run.
            epoch: The epoch, counted from 0.
            shuffle: Whether to read the files in a random order that depends on (seed, epoch). If False, files are read
                in the order of their names. The order of the records in a file does not change.
        """
        order = list(range(len(self.files)))
        if shuffle:
            order = permutation(seed=seed_for(seed, "shards"), epoch=epoch, length=len(self.files)).tolist()
        for place in order:
            yield from self.files[place].records()

    def sample(self, record: Record) -> object:
        """Return the sample that is made from a record.

        Raises:
            SampleError: The record cannot be read. The message contains its position.
        """
        return self.fields.sample(record.columns(self.fields.columns), where=str(record))

    @property
    def value_names(self) -> ValueNames:
        return self.fields.value_names

    def __iter__(self) -> Iterator[object]:
        return map(self.sample, self.records(seed=0, epoch=0, shuffle=False))

    def __len__(self) -> int:
        """Return the number of samples. Raise TypeError if the files must be read to count the samples."""
        if self._length is None:
            raise TypeError("data=stream: these files do not state their number of records")
        return self._length


def open_shard(file: Path, *, delimiter: str = ",") -> ShardFile:
    """Return the reader of a file of records.

    Args:
        file: The path of the file. Its extension determines the format.
        delimiter: The character between values of a .csv file. Default: a comma.

    Raises:
        ConfigError: The extension is not supported, or the file does not have the format of its extension.
    """
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


def fields_of(fields: Fields, files: Sequence[ShardFile]) -> Fields:
    """Return a conversion of records with the columns and dtype of each input. The first record determines the dtypes.

    Args:
        fields: The conversion of records as the config sets it.
        files: The files of all splits.

    Raises:
        ConfigError: A file does not have a column, there are no records, or the first record is not a valid sample.
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
