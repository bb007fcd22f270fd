"""Files of records by number: the index says where every 256th record begins."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from torch.utils.data import Dataset

from exp.data.data_errors import SampleError, data_error
from exp.data.fields import Fields
from exp.data.shard_files import BEGINNING, Mark, Record, ShardFile
from exp.data.value_names import ValueNames
from exp.errors import ConfigError

# Records that are found, and kept, together.
STRETCH = 256
# Stretches that a process keeps: those of a window of data.shuffle_window=64 blocks, each of which reaches into two.
KEPT = 130


@dataclass(frozen=True)
class Index:
    """The index of a file.

    Args:
        file: the file.
        marks: where every 256th record begins.
        length: the number of records.
        state: size and time of the last change of the file.
    """

    file: ShardFile
    marks: Sequence[Mark]
    length: int
    state: tuple[int, int]


class IndexedShards(Dataset[object]):
    """The samples of some files by number.

    Each file is read once when this is made, to find where records begin. For a sample the 256 records around it are
    passed over, and kept for the next samples.

    block: an attribute, how many samples that follow each other are best read together.
    num_classes: an attribute, as many as there are names of classes; None where targets are numbers.

    Raises: ConfigError for a file that breaks off, and for a kind of file that is read in larger pieces.
    """

    block = STRETCH

    def __init__(self, *, files: Sequence[ShardFile], fields: Fields) -> None:
        self.fields = fields
        self.num_classes = None if fields.classes is None else len(fields.classes)
        try:
            self.indices = [index_of(file) for file in files]
        except SampleError as error:
            raise ConfigError([error.error]) from error
        self._edges = list(accumulate((index.length for index in self.indices), initial=0))
        self._kept: OrderedDict[tuple[int, int], list[Record]] = OrderedDict()
        if not len(self):
            raise data_error("dataset.files", got=f"{files[0].file} without a record", expected="at least one")

    def __len__(self) -> int:
        return self._edges[-1]

    def __getitem__(self, index: int) -> object:
        """Raises: SampleError where it cannot be read, with its file and its place there."""
        file = bisect_right(self._edges, index) - 1
        number = index - self._edges[file]
        record = self._stretch(file, number // STRETCH)[number % STRETCH]
        return self.fields.sample(record.columns(self.fields.columns), where=str(record))

    def __getstate__(self) -> dict[str, object]:
        # A worker opens the files itself.
        return vars(self) | {"_kept": OrderedDict()}

    @property
    def value_names(self) -> ValueNames:
        return self.fields.value_names

    def _stretch(self, file: int, place: int) -> list[Record]:
        key = (file, place)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        index = self.indices[file]
        if _state(index.file) != index.state:
            raise index.file.damaged(place * STRETCH, "it has changed since it was indexed, as the run began")
        records = list(islice(index.file.records(index.marks[place]), STRETCH))
        self._kept[key] = records
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return records


def index_of(file: ShardFile) -> Index:
    """Return the index of a file, which is read once.

    Raises: SampleError for a file that breaks off; ConfigError for a kind of file that is read in larger pieces.
    """
    if not file.has_marks:
        got, expected = f"true, and {file.file}", "files that end in .csv, .tsv, .jsonl or .tar"
        raise data_error("dataset.index", got=got, expected=expected, fix="Write data.dataset.index=false")
    state, marks, length = _state(file), [BEGINNING], 0
    for record in file.records():
        length += 1
        if length % STRETCH == 0:
            marks.append(Mark(length, record.end, record.line))
    return Index(file=file, marks=marks, length=length, state=state)


def _state(file: ShardFile) -> tuple[int, int]:
    found = file.file.stat()
    return found.st_size, found.st_mtime_ns
