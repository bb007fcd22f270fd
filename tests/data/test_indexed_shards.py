"""Files larger than memory with an index: shuffled, shared out, and gone on with without reading what was before."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exp.data import indexed_shards
from exp.data.data import Data
from exp.data.indexed_shards import IndexedShards
from exp.data.shard_files import CsvShard, ShardFile
from exp.data.shards import Shards
from exp.errors import ConfigError, ExpError

FILES, EACH = 3, 50
SAMPLES = FILES * EACH
KINDS = ("csv", "jsonl", "tar")


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch):
    monkeypatch.setattr(indexed_shards, "STRETCH", 5)
    monkeypatch.setattr(IndexedShards, "block", 5)
    monkeypatch.setattr(indexed_shards, "KEPT", 10)


def write(folder, kind):
    """The numbers from 0 on, each with its remainder of three."""
    for file in range(FILES):
        numbers = range(file * EACH, (file + 1) * EACH)
        place = folder / f"part-{file}.{kind}"
        if kind == "csv":
            place.write_text("number,kind\n" + "".join(f'"{number}",{number % 3}\n\n' for number in numbers))
        elif kind == "jsonl":
            lines = (json.dumps({"number": number, "kind": number % 3}) for number in numbers)
            place.write_text("\n \n".join(lines))
        else:
            with tarfile.open(place, "w") as archive:
                for number in numbers:
                    content = io.BytesIO()
                    np.save(content, np.array([number], dtype=np.float32))
                    for ending, held in (("number.npy", content.getvalue()), ("kind.cls", str(number % 3).encode())):
                        member = tarfile.TarInfo(f"{number:04}.{ending}")
                        member.size = len(held)
                        archive.addfile(member, io.BytesIO(held))


def made(folder, kind, **choices):
    columns = ("number.npy", "kind.cls") if kind == "tar" else ("number", "kind")
    shards = Shards(files={"train": str(folder / f"*.{kind}")}, inputs=[columns[0]], target=columns[1], index=True)
    return Data(**{"dataset": shards, "batch_size": 4, "num_classes": 3, "seed": 5, "shuffle_window": 3, **choices})


def numbers(batches):
    return [int(value) for batch in batches for value in batch.data[0][: batch.size].flatten()]


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_seen_once_an_epoch_by_one_of_the_ranks_and_resumed_exactly(tmp_path, kind):
    write(tmp_path, kind)
    data = made(tmp_path, kind)
    assert len(data.part("train")) == SAMPLES
    loader = data.loader("train")
    epochs = [list(loader) for _ in range(2)]
    for batches in epochs:
        assert sorted(numbers(batches)) == list(range(SAMPLES))
        assert all((batch.data[0].flatten() % 3 == batch.data[1]).all() for batch in batches)
    assert numbers(epochs[0]) != numbers(epochs[1])
    ranks = [numbers(data.loader("train", rank=rank, world_size=2)) for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == list(range(SAMPLES))
    resumed = made(tmp_path, kind, num_workers=2).loader("train")
    for epoch, batch in [(0, 0), (1, 20), (0, 35)]:
        resumed.set_position(epoch, batch)
        assert numbers(resumed) == numbers(epochs[epoch][batch:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_reads_as_much_as_a_window_whatever_was_before(tmp_path, kind, monkeypatch):
    write(tmp_path, kind)
    data = made(tmp_path, kind)
    read = []
    for shard in {type(index.file) for index in data.part("train").indices}:
        records = shard.records

        def counted(self, start=None, records=records):
            for record in records(self, start):
                read.append(record.number)
                yield record

        monkeypatch.setattr(shard, "records", counted)
    for position in (0, 18, 36):
        read.clear()
        loader = data.loader("train")
        loader.set_position(1, position)
        next(iter(loader))
        # A batch of 4 out of stretches of 5, of which none is read twice.
        assert len(read) <= 4 * 5


def test_a_sampler_chooses_among_records(tmp_path):
    write(tmp_path, "csv")
    sampler = {"sampler": "balanced"}
    assert len(numbers(made(tmp_path, "csv", **sampler).loader("train"))) == SAMPLES


def test_files_that_are_read_in_larger_pieces_have_no_index(tmp_path):
    np.savez(tmp_path / "a.npz", number=np.arange(3.0), kind=np.arange(3))
    with pytest.raises(ConfigError, match=r"data.dataset.index: true, and .*a.npz.*expected files that end in .csv"):
        made(tmp_path, "npz")


def test_a_file_that_has_been_cut_since_is_told(tmp_path):
    write(tmp_path, "csv")
    data = made(tmp_path, "csv", shuffle=False)
    lines = (tmp_path / "part-1.csv").read_text().splitlines(keepends=True)
    (tmp_path / "part-1.csv").write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(ExpError, match=r"part-1.csv, which cannot be read at sample \d+: it has been cut"):
        list(data.loader("train"))


@pytest.mark.parametrize("content", ['number,kind\n1,0\n"2,1\n', "number,kind\n1,0\n" + 9999 * "\n" + "\xff,1\n"])
def test_a_damaged_file_is_told_before_the_run(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a.csv, which cannot be read at sample 1"):
        made(tmp_path, "csv")


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=12),
    ending=st.sampled_from(["\n", "\r\n"]),
    has_mark=st.booleans(),
)
def test_records_from_the_middle_of_a_csv_file_are_those_of_the_whole(tmp_path, rows, ending, has_mark):
    text = io.StringIO()
    csv.writer(text, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path / "a.csv"
    path.write_text(text.getvalue(), encoding="utf-8-sig" if has_mark else "utf-8", newline="")
    file: ShardFile = CsvShard(path, delimiter=",")
    whole = [record.columns() for record in file.records()]
    marks = list(file.marks())
    assert len(marks) == len(whole) == len(rows)
    for mark in marks:
        assert [record.columns() for record in file.records(mark)] == whole[mark.number :]


def test_a_record_knows_its_line_wherever_it_was_begun(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"x\ny"\n\n2,z\n')
    file = CsvShard(path, delimiter=",")
    assert [str(next(file.records(mark))) for mark in file.marks()] == list(map(str, file.records()))


def test_workers_started_anew_find_the_files_themselves(tmp_path):
    write(tmp_path, "jsonl")
    data = made(tmp_path, "jsonl", num_workers=1, multiprocessing_context="spawn")
    assert numbers(data.loader("train")) == numbers(made(tmp_path, "jsonl").loader("train"))
