"""Tests of data=stream: samples, ranks, workers, resuming, and the errors of damaged files."""

from __future__ import annotations

import csv
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import exp
from exp.check.examination import plan
from exp.check.first_samples import refuse_other_data
from exp.check.resolution import resolve
from exp.data.data import Data
from exp.data.shards import Shards
from exp.errors import ConfigError, RunError, is_installed

EACH = (7, 5, 8, 3)
SAMPLES = sum(EACH)
NUMBERS = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32)
KINDS = ["csv", "jsonl", "npz", "tar", "parquet"]
NO_PYARROW = "pyarrow is not installed"


def write_tar(file, members):
    """Write a .tar file of (name, bytes) pairs."""
    with tarfile.open(file, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def npy(array) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


def png(pixels) -> bytes:
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, "PNG")
    return raw.getvalue()


def write(folder, kind, *, each=EACH):
    """Write `each[i]` samples to file number i; the class of a sample is its number modulo 3."""
    start = 0
    for number, count in enumerate(each):
        rows, classes = NUMBERS[start : start + count], [place % 3 for place in range(start, start + count)]
        file = folder / f"{number}.{kind}"
        if kind == "csv":
            with file.open("w", newline="") as text:
                lines = ([*map(repr, map(float, row)), label] for row, label in zip(rows, classes, strict=True))
                csv.writer(text).writerows([["u", "v", "w", "kind"], *lines])
        elif kind == "jsonl":
            lines = [json.dumps({"row": row.tolist(), "kind": label}) for row, label in zip(rows, classes, strict=True)]
            file.write_text("\n \n".join(lines))
        elif kind == "npz":
            np.savez(file, row=rows, kind=np.array(classes))
        elif kind == "tar":
            members = []
            for place, (row, label) in enumerate(zip(rows, classes, strict=True), start):
                members += [(f"a/{place:03}.row.npy", npy(row)), (f"a/{place:03}.cls", str(label).encode())]
            write_tar(file, members)
        else:
            pyarrow = pytest.importorskip("pyarrow", reason=NO_PYARROW)
            from pyarrow import parquet

            table = pyarrow.table({"row": [row.tolist() for row in rows], "kind": classes})
            parquet.write_table(table, file, row_group_size=3)
        start += count


def data(folder, kind="npz", *, dataset=None, **settings) -> Data:
    files = {"train": str(folder / f"*.{kind}")}
    made = Shards(**{"files": files, "target": "cls" if kind == "tar" else "kind", **(dataset or {})})
    return Data(**{"dataset": made, "batch_size": 4, "num_classes": 3, "seed": 5, "shuffle_buffer": 6, **settings})


def plain(batches) -> list:
    return [([part.tolist() for part in batch.data], *batch[1:]) for batch in batches]


def rows(batches) -> list[list[float]]:
    return [row for batch in batches for row in batch.data[0][: batch.size].tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_workers_and_resumed_runs_share_one_order(tmp_path, kind):
    write(tmp_path, kind)
    wanted = NUMBERS[: sum(EACH)].tolist()
    ordered = data(tmp_path, kind, shuffle=False)
    assert (ordered.spec.input_shape, ordered.spec.input_dtype, ordered.spec.num_classes) == ((3,), "float32", 3)
    batches = list(ordered.loader("train"))
    assert rows(batches) == wanted
    classes = torch.cat([batch.data[1] for batch in batches])
    assert classes.tolist() == [place % 3 for place in range(sum(EACH))]

    made = data(tmp_path, kind)
    loader = made.loader("train")
    epochs = [list(loader) for _ in range(2)]
    for batches in epochs:
        assert sorted(rows(batches)) == sorted(wanted)
    assert rows(epochs[0]) != rows(epochs[1])
    ranks = [list(made.loader("train", rank=rank, world_size=3)) for rank in range(3)]
    for number, whole in enumerate(epochs[0]):
        parts = [batches[number].data[0][: batches[number].size] for batches in ranks]
        assert torch.equal(torch.cat(parts), whole.data[0])
    resumed = data(tmp_path, kind, num_workers=2).loader("train")
    for epoch, batch in [(1, 3), (0, 5)]:
        resumed.set_position(epoch, batch)
        assert plain(resumed) == plain(epochs[epoch][batch:])


def test_files_come_in_another_order_each_epoch(tmp_path):
    write(tmp_path, "npz")
    loader = data(tmp_path, shuffle_buffer=0, batch_size=1).loader("train")
    place = {tuple(row): number for number, row in enumerate(NUMBERS.tolist())}
    file_of = np.repeat(range(4), EACH)
    orders = []
    for _ in range(4):
        seen = [place[tuple(row)] for row in rows(loader)]
        orders.append(tuple(dict.fromkeys(file_of[seen].tolist())))
        assert seen == [sample for file in orders[-1] for sample in np.flatnonzero(file_of == file)]
    assert len(set(orders)) > 1


def test_the_length_is_known_if_files_state_it(tmp_path):
    for kind in ("csv", "npz"):
        write(tmp_path, kind)
    assert len(data(tmp_path, "npz").loader("train")) == 6
    with pytest.raises(TypeError, match="length of this stream is unknown"):
        len(data(tmp_path, "csv").loader("train"))


def test_forked_workers_read_an_archive_independently(tmp_path):
    # Each value is larger than a file's buffer, so that each value is a separate read.
    members = []
    for number in range(120):
        members += [(f"{number:04}.row.npy", npy(np.full(5000, number, dtype=np.float32))), (f"{number:04}.cls", b"1")]
    write_tar(tmp_path / "0.tar", members)
    made = data(tmp_path, "tar", num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        seen = torch.cat([batch.data[0] for batch in made.loader("train")])
        assert (seen == seen[:, :1]).all()
        assert sorted(seen[:, 0].int().tolist()) == list(range(120))


def test_sizes_of_splits_are_an_error(tmp_path):
    write(tmp_path, "npz")
    with pytest.raises(
        ConfigError, match=r"data.parts: sizes of splits, although data.dataset.files lists the files of each split"
    ):
        data(tmp_path, parts={"train": 0.5, "val": 0.5})


def test_columns_become_named_inputs_and_targets(tmp_path):
    (tmp_path / "a.csv").write_text("id,age,size,colour,price,rent\n1,2,3,red,5.5,1\n4,5,6,blue,8,2\n")
    files = {"train": str(tmp_path / "a.csv")}
    inputs = {"table": ["age", "size"], "id": "id"}
    numbers = Shards(files=files, inputs=inputs, dtypes={"id": "int64"}, target=["price", "rent"], task="regression")
    made = Data(dataset=numbers, batch_size=2)
    found = {name: (one.shape, one.dtype) for name, one in made.spec.inputs.items()}
    assert found == {"table": ((2,), "float32"), "id": ((1,), "int64")}
    assert (made.spec.num_classes, made.spec.num_outputs) == (None, 2)
    batch = {name: value.tolist() for name, value in made.first_samples("train", seconds=9).items()}
    assert batch == {"table": [[2, 3], [5, 6]], "id": [[1], [4]], "target": [[5.5, 1], [8, 2]]}
    settings = {"files": files, "inputs": ["age", "size"], "target": "colour"}
    named = Data(dataset=Shards(**settings, classes=["blue", "red"]))
    assert named.spec.num_classes == 2
    assert named.first_samples("train", seconds=9)[1].tolist() == [1, 0]
    for wrong, message in (
        ({}, r"data.dataset.target: 'red' in colour of line 2 of .*a.csv; expected the number of a class.*classes="),
        ({"classes": ["red", "bleu"]}, r"dataset.target: the class blue in line 3 of .*; expected one of the classes"),
        ({"classes": ["red", "red"]}, r"data.dataset.classes: .*; expected different names"),
        ({"inputs": ["colour"]}, r"data.dataset.inputs: 'red' in colour of line 2 of .*; expected numbers"),
        ({"inputs": ["aeg"]}, r"data.dataset.inputs: aeg; expected a column of .*a.csv. Did you mean age"),
        ({"target": "colur"}, r"data.dataset.target: colur; expected a column of .*a.csv. Did you mean colour"),
        ({"dtypes": {"table": "int64"}}, r"data.dataset.dtypes.table: table; expected the name of an input"),
        ({"target": ["age", "size"]}, r"data.dataset.target: 2 columns in a classification"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, RunError), match=message):
            Data(dataset=Shards(**{**settings, **wrong}), num_classes=2).first_samples("train", seconds=9)


def test_a_tar_holds_pictures_and_json(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 255, (4, 6, 8, 3), dtype=np.uint8)
    members = []
    for number, picture in enumerate(pixels):
        members += [(f"{number}.PNG", png(picture)), (f"{number}.json", f'{{"label": {number % 2}}}'.encode())]
    write_tar(tmp_path / "a.tar", members)
    settings = {"inputs": "png", "target": "json.label", "files": {"train": str(tmp_path / "a.tar")}}
    made = data(tmp_path, "tar", dataset={**settings}, num_classes=2, shuffle=False)
    pictures, targets = next(iter(made.loader("train"))).data
    assert torch.equal((pictures * 255).round().permute(0, 2, 3, 1).to(torch.uint8), torch.from_numpy(pixels))
    assert targets.tolist() == [0, 1, 0, 1]
    small = data(tmp_path, "tar", dataset={**settings, "crop": [4, 5], "mode": "L"}, num_classes=2)
    assert small.spec.input_shape == (1, 4, 5)
    with pytest.raises(ConfigError, match=r"data.dataset.target: json.labl; .*Did you mean json.label"):
        data(tmp_path, "tar", dataset={**settings, "target": "json.labl"})
    with pytest.raises(ConfigError, match=r"a dict in json of sample 0 of .*; expected numbers"):
        data(tmp_path, "tar", dataset={**settings, "inputs": ["png", "json"]})


def cut(name, *, left):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:left])


def objects(folder):
    np.savez(folder / "1.npz", row=np.array([{}, {}]), kind=np.array([0, 1]))


def link(folder):
    with tarfile.open(folder / "1.tar", "w") as archive:
        info = tarfile.TarInfo("a.cls")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pack(*members):
    return lambda folder: write_tar(folder / "1.tar", members)


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        (
            "csv",
            put("1.csv", "u,v,w,kind\n1,2,3,0\n1,2,3\n"),
            r"at sample 1: 3 values in line 3 of .*1.csv, but 4 names in",
        ),
        ("csv", put("1.csv", b"u,v,w,kind\n\xff,1,1,1\n"), r"1.csv \('utf-8' codec .*\); expected CSV in UTF-8"),
        (
            "csv",
            put("1.csv", b"u,v,w,kind\n" + b"1,1,1,1\n" * 4000 + b"\xff,1,1,1\n"),
            r"at sample 4000: 'utf-8' codec",
        ),
        ("csv", put("1.csv", "u,v,w,kind\n1,,3,0"), r"'' in v of line 2 of .*1.csv"),
        ("csv", put("1.csv", "u,v,w,kind\n1,nan,3,0"), r"'nan' in v of line 2 of .*1.csv"),
        ("csv", put("1.csv", ""), r"1.csv \(it is empty\); expected a line with the names"),
        ("jsonl", put("1.jsonl", '{"row": [1, 2, 3], "kind": 0}\n{"row": [1,'), r"1.jsonl, .* at sample 1: line 2: "),
        ("jsonl", put("1.jsonl", '{"row": [1, 2, 3]}'), r"kind, which line 1 of .*1.jsonl does not have"),
        ("npz", cut("1.npz", left=300), r"1.npz \(File is not a zip file\); expected a complete .npz"),
        ("npz", objects, r"1.npz \(row.npy contains Python objects, which may run code"),
        (
            "npz",
            lambda folder: np.savez(folder / "1.npz", row=NUMBERS, kind=[1]),
            r"row has 600 samples, kind has 1",
        ),
        ("tar", cut("1.tar", left=2048), r"1.tar \(its end is missing"),
        ("tar", link, r"1.tar, which cannot be read at sample 0: a.cls is a link or a device"),
        ("tar", pack(("1.row.pkl", b"x"), ("1.cls", b"1")), r"row.npy, which sample 0 of .*1.tar does not have"),
        ("tar", pack(("1.cls", b"one"), ("1.row.npy", npy(NUMBERS[0]))), r"sample 0: column cls: "),
        ("tar", pack(("1.cls", b"1"), ("1.row.npy", npy(np.array([{}])))), r"sample 0: column row.npy: "),
        ("tar", pack(("1.cls", b"1"), ("1.cls", b"1")), r"/1.cls occurs twice"),
    ],
)
def test_errors_name_the_file_and_the_sample(tmp_path, kind, spoil, message):
    write(tmp_path, kind)
    spoil(tmp_path)
    inputs = ["u", "v", "w"] if kind == "csv" else None
    with pytest.raises((ConfigError, RunError), match=message):
        list(data(tmp_path, kind, dataset={"inputs": inputs}).loader("train"))


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("value", "dtype"), [(0.5, "bool"), (0.5, "int64"), (2 + 3j, "int64")])
def test_no_dtype_drops_a_part_of_a_number(tmp_path, value, dtype):
    np.savez(tmp_path / "0.npz", row=np.array([[1, value]]), kind=np.array([0]))
    with pytest.raises(RunError, match=rf"dtypes\.input: {dtype}, although sample 0 of .* has numbers with fractions"):
        list(data(tmp_path, dataset={"dtypes": {"input": dtype}}).loader("train"))


def test_a_damaged_tar_is_never_read_as_a_shorter_one(tmp_path):
    write(tmp_path, "tar", each=(4,))
    whole = (tmp_path / "0.tar").read_bytes()
    used = 4 * 2 * 2 * 512
    damaged = [whole[:length] for length in range(0, used + 512, 512)]
    damaged += [whole[:header] + b"x" * 512 + whole[header + 512 :] for header in range(0, used, 1024)]
    for content in damaged:
        (tmp_path / "0.tar").write_bytes(content)
        with pytest.raises((ConfigError, RunError), match=r"0.tar"):
            list(data(tmp_path, "tar").loader("train"))


@pytest.mark.parametrize(("rank", "workers"), [(1, 0), (1, 2)])
def test_ranks_and_workers_name_the_damaged_file(tmp_path, rank, workers):
    write(tmp_path, "tar")
    damaged = bytearray((tmp_path / "2.tar").read_bytes())
    damaged[2048:2560] = b"x" * 512
    (tmp_path / "2.tar").write_bytes(damaged)
    loader = data(tmp_path, "tar", num_workers=workers).loader("train", rank=rank, world_size=2)
    with pytest.raises(RunError, match=r"2.tar, which cannot be read at sample 0: .*; expected undamaged files"):
        list(loader)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": {"train": "none-*.npz"}}, r"data.dataset.files.train: none-\*.npz, which matches no file"),
        ({"files": {"trian": "*.npz"}}, r"data.dataset.files.trian: trian; expected train, val or test"),
        ({"files": {"train": ["0.npz", "0.csv"]}}, r"0.csv and 0.npz; expected files of the same format"),
        ({"files": {"train": "a.tar.gz"}}, r"a.tar.gz; expected a file that ends in .csv, .* not compressed"),
        ({"files": {"train": None}}, r"data.dataset.files: no files"),
    ],
)
def test_errors_of_globs(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    for kind in ("csv", "npz"):
        write(tmp_path, kind)
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(ConfigError, match=message):
        Data(dataset=Shards(**settings, target="kind"))


WORDS = [
    "data=stream", "model=mlp", "hooks=[]", "logger=[]", "data.dataset.target=kind", "data.num_classes=3",
    "data.batch_size=4", "trainer.max_epochs=3", "test=false", "data.dataset.files.train=[0.jsonl,1.jsonl,2.jsonl]",
    "data.dataset.files.val=3.jsonl",
]  # fmt: skip


def test_ranks_and_resumed_runs_of_a_stream_agree(tmp_path, ranks):
    write(tmp_path, "jsonl")
    words = [*WORDS, "precision=fp64", "model.constants.dropout=0.0"]
    whole = ranks.train(*words)
    # The length of an epoch, 5 batches, is unknown before it ends.
    half = ranks.train(*words, "trainer.max_steps=7")
    resume = f"resume={half.directory}/checkpoints/last.ckpt"
    rest = ranks.train(*words, resume, "data.num_workers=1")
    two = ranks.train(*words, "strategy=ddp", "launch.devices=2", ranks=2)
    expected = whole.checkpoint()["state_dict"]
    assert whole.report["steps"] == rest.report["steps"] == two.report["steps"] == 15
    for name, value in expected.items():
        assert torch.equal(rest.checkpoint()["state_dict"][name], value)
        torch.testing.assert_close(two.checkpoint()["state_dict"][name], value, rtol=1e-9, atol=1e-11)


def test_the_first_samples_are_checked_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "jsonl")
    (tmp_path / "3.jsonl").write_text('{"row": [1, 2, 3], "kind": 1}\n{"row": [1, 2, 3], "kind": 3}\n')
    with pytest.raises(
        ConfigError, match=r"data.num_classes: 3; expected 4 or more, because sample 1 of val has the class 3"
    ):
        refuse_other_data(plan(resolve(exp.compose(WORDS))))


@pytest.mark.skipif(is_installed("pyarrow"), reason="pyarrow is installed")
def test_parquet_without_pyarrow_names_the_extra(tmp_path):
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"dataset.files: .*the package pyarrow.*'exp-framework\[parquet\]'"):
        Shards(files={"train": str(tmp_path / "a.parquet")}, target="kind")
    with pytest.raises(ConfigError, match=r"a.parquet needs the package pyarrow.*'exp-framework\[parquet\]'"):
        exp.validate(exp.compose(["data=parquet", f"data.dataset.path={tmp_path}/a.parquet", "data.dataset.target=y"]))


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason=NO_PYARROW)
    write(tmp_path, "parquet")
    content = bytearray((tmp_path / "1.parquet").read_bytes())
    content[4:60] = b"x" * 56
    (tmp_path / "1.parquet").write_bytes(content)
    with pytest.raises(RunError, match=r"1.parquet, which cannot be read at sample 0"):
        list(data(tmp_path, "parquet", shuffle=False).loader("train"))
    cut("1.parquet", left=100)(tmp_path)
    with pytest.raises(ConfigError, match=r"1.parquet \(.*\); expected a complete Parquet file"):
        data(tmp_path, "parquet")
