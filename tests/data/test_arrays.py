"""Tests of arrays in .npy, .npz, .pt and IDX files and of windows of time series: values and errors."""

from __future__ import annotations

import gzip
import pickle
import struct
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import exp
from exp.data.arrays import Arrays
from exp.data.data import Data
from exp.data.idx import Idx, read_idx
from exp.data.tensor_file import TensorFile
from exp.data.windows import Windows
from exp.errors import ConfigError


@pytest.fixture
def scans(tmp_path):
    draw = np.random.default_rng(0)
    held = {
        "image": draw.integers(0, 255, (20, 1, 4, 4), dtype=np.uint8),
        "row": draw.normal(size=(20, 3)),
        "mask": draw.random((20, 5)) > 0.5,
        "words": draw.integers(0, 9, (20, 6), dtype=np.int16),
        "kind": np.arange(20, dtype=np.uint8) % 3,
        "price": draw.normal(size=20).astype(">f8"),
    }
    for name, array in held.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "all.npz", **held)
    return tmp_path, held


@pytest.mark.parametrize("place", ["", "all.npz"])
def test_arrays_by_name_are_inputs(scans, place):
    folder, held = scans
    made = Arrays(path=str(folder / place), target="kind", inputs=["image", "row", "mask", "words"], scale=1 / 255)
    data = Data(dataset=made, parts={"train": 12, "test": 8}, batch_size=5)
    shapes = {name: (one.shape, one.dtype) for name, one in data.spec.inputs.items()}
    assert shapes == {
        "image": ((1, 4, 4), "float32"),
        "row": ((3,), "float32"),
        "mask": ((5,), "bool"),
        "words": ((6,), "int64"),
    }
    assert (data.spec.num_classes, data.spec.num_outputs) == (3, 3)
    part = data.part("test")
    seen = torch.cat([batch.data["row"] for batch in data.loader("test")])
    assert torch.equal(seen, torch.from_numpy(held["row"][part.indices.numpy()]).float())
    assert torch.allclose(part[0]["image"] * 255, torch.from_numpy(held["image"][int(part.indices[0])]).float())
    if not place:
        assert len(pickle.dumps(made)) < 2_000, "workers must get the path of the file instead of its numbers"


def test_one_input_and_a_number_are_a_pair(scans):
    data = Data(dataset=Arrays(path=str(scans[0]), target="price", inputs=["row"]))  # big-endian float64
    inputs, targets = next(iter(data.loader("test"))).data
    assert (inputs.shape[1:], targets.shape[1:], targets.dtype) == ((3,), (1,), torch.float32)
    assert data.spec.num_outputs == 1


@pytest.mark.parametrize("kind", ["npy", "tensors"])
def test_float64_stays_in_a_run_of_float64(scans, kind):
    folder, held = scans
    place = str(folder if kind == "npy" else folder / "all.npz")
    held = held | {"row": held["row"].astype(np.float64) / 3}
    np.savez(folder / "all.npz", **held)
    np.save(folder / "row.npy", held["row"])
    made = (
        Arrays(path=place, target="price", inputs=["row"])
        if kind == "npy"
        else TensorFile(path=place, input="row", target="price")
    )
    for keeps in (True, False):
        data = Data(dataset=made, parts={"train": 12, "test": 8}, batch_size=8, keeps_doubles=keeps)
        (inputs, targets), rows = next(iter(data.loader("test"))).data, data.part("test").indices.numpy()
        dtype = torch.float64 if keeps else torch.float32
        assert torch.equal(inputs, torch.from_numpy(held["row"][rows]).to(dtype))
        assert torch.equal(targets[:, 0], torch.from_numpy(held["price"][rows].astype(np.float64)).to(dtype))


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_errors_of_arrays_by_name(scans, capsys):
    folder, _ = scans
    pickled = np.array([Evil()], dtype=object)

    def refused(message, **settings):
        with pytest.raises(ConfigError, match=message):
            Arrays(**{"path": str(folder), "target": "kind", **settings})

    refused(r"data.dataset.target: knd; .*Did you mean kind\?", target="knd")
    refused(r"data.dataset.inputs: imge; .*Did you mean image\?", inputs=["imge"])
    refused(r"no folder at .*; expected an existing folder", path=str(folder / "gone"))
    np.save(folder / "short.npy", np.zeros((3, 2)))
    refused(
        r"image has 20 samples, short has 3 samples, kind has 20 samples; expected the same", inputs=["image", "short"]
    )
    for array, message in (
        (pickled, r"\(.*Python objects.*\); expected an array of numbers"),
        (np.array(["a", "b"]), " of dtype <U1; expected an array of numbers"),
        (np.float64(1), ", which is a single number"),
    ):
        np.save(folder / "odd.npy", array, allow_pickle=True)
        refused(rf"odd.npy ?{message}")
    (folder / "odd.npy").write_bytes(pickle.dumps(Evil()))
    refused(r"odd.npy \(.*\); expected an array of numbers")
    np.savez(folder / "odd.npz", kind=pickled, x=np.zeros(1))
    refused(r"odd.npz \(.*allow_pickle", path=str(folder / "odd.npz"))
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["npz", "pt", "pair"])
def test_arrays_of_one_file(tmp_path, kind):
    inputs, targets = np.arange(12, dtype=np.uint8).reshape(4, 3), np.array([0, 2, 1, 1], dtype=np.int32)
    path = tmp_path / ("arrays.npz" if kind == "npz" else "arrays.pt")
    tensors = torch.from_numpy(inputs), torch.from_numpy(targets)
    if kind == "npz":
        np.savez(path, images=inputs, labels=targets)
    else:
        torch.save(tensors if kind == "pair" else dict(zip(("images", "labels"), tensors, strict=True)), path)
    made = TensorFile(path=str(path), input="images", target="labels", scale=0.5)
    assert made.entries[0].tolist() == (inputs * 0.5).tolist()
    assert made.entries[1].dtype == torch.int64
    spec = Data(train=made).spec
    assert (spec.input_shape, spec.input_dtype, spec.num_classes) == ((3,), "float32", 3)


def test_integer_inputs_are_tokens(tmp_path):
    np.savez(tmp_path / "arrays.npz", input=np.array([[1, 2], [3, 4]]), target=np.array([0.5, 1.5]))
    data = Data(train=TensorFile(path=str(tmp_path / "arrays.npz")))
    assert (data.spec.input_dtype, data.spec.num_classes, data.spec.num_outputs) == ("int64", None, 1)
    assert data.part("train").entries[1].tolist() == [[0.5], [1.5]]


def test_errors_of_arrays_of_one_file(tmp_path, capsys):
    arrays = {
        "good": (r"data.dataset.input: input; .*Did you mean inputs", {"inputs": np.zeros((3, 2))}),
        "uneven": (r"input has 3 samples, target has 2", {"input": np.zeros((3, 2))}),
        "nan": (r"a number that is not finite in input of sample 1", {"input": np.array([[1.0], [np.nan]])}),
        "pickled": (r"data.dataset.path: .*allow_pickle", {"input": np.array([Evil(), 0], dtype=object)}),
    }
    errors = {f"{name}.npz": message for name, (message, _) in arrays.items()}
    for name, (_, held) in arrays.items():
        np.savez(tmp_path / f"{name}.npz", target=np.zeros(2), **held)
    torch.save({"input": Evil(), "target": torch.zeros(1)}, tmp_path / "evil.pt")
    torch.save(torch.zeros(3), tmp_path / "one.pt")
    for name in ("broken.pt", "broken.npz", "table.xls"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 no")
    errors |= {"evil.pt": r"expected only tensors", "one.pt": r"with a value of the type Tensor; expected a mapping"}
    errors |= {"broken.pt": r"expected only tensors", "broken.npz": r"arrays of numbers"}
    errors |= {"table.xls": r"a file that ends in .npz", "gone.npz": r"no file at"}
    for name, message in errors.items():
        with pytest.raises(ConfigError, match=message):
            TensorFile(path=str(tmp_path / name))
    assert "executed" not in capsys.readouterr().out


@pytest.fixture
def load(tmp_path):
    draw = np.random.default_rng(1)
    rows = np.stack([np.arange(100.0), draw.normal(5, 3, 100), draw.normal(size=100)], 1)
    path = tmp_path / "load.csv"
    np.save(tmp_path / "load.npy", rows)
    np.savetxt(path, rows, delimiter=",", header="hour,load,wind", comments="", fmt="%.17g")
    return path, rows


@pytest.mark.parametrize(("horizon", "stride", "targets"), [(1, 1, "load"), (3, 2, ["wind", "load"])])
def test_windows_stay_inside_their_split(load, horizon, stride, targets):
    path, rows = load
    series = Windows(path=str(path), targets=targets, length=6, horizon=horizon, stride=stride, time="hour")
    data = Data(dataset=series, parts={"train": 0.6, "val": 0.2, "test": 0.2})
    values = rows[:, 1:]
    mean, deviation = values[:60].mean(0), values[:60].std(0)
    for stage, start, stop in (("train", 0, 60), ("val", 60, 80), ("test", 80, 100)):
        part = (values[start:stop] - mean) / deviation
        firsts = range(0, len(part) - 6 - horizon + 1, stride)
        inputs = np.stack([part[first : first + 6] for first in firsts])
        order = [0] if targets == "load" else [1, 0]
        wanted = np.stack([part[first + 6 : first + 6 + horizon][:, order] for first in firsts])
        given = data.part(stage).gather(torch.arange(len(firsts)))
        assert len(data.part(stage)) == len(firsts)
        np.testing.assert_allclose(given[0].numpy(), inputs, atol=1e-6)
        np.testing.assert_allclose(given[1].numpy(), wanted[..., 0] if targets == "load" else wanted, atol=1e-6)
    assert data.fitted["windows"]["columns"] == ["load", "wind"]
    assert data.spec.num_outputs == (1 if targets == "load" else 2)


def test_windows_of_an_array_are_counted(load):
    path, rows = load
    series = Windows(path=str(path.with_suffix(".npy")), targets=1, columns=[2], length=4, standardise=False)
    data = Data(dataset=series, parts={"train": 10, "val": 5})
    assert [len(data.part(stage)) for stage in data.stages] == [10, 5]
    inputs, targets = data.part("train")[0]
    np.testing.assert_allclose(inputs[:, 0].numpy(), rows[:4, 2].astype(np.float32))
    assert targets.item() == pytest.approx(rows[4, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": "lode"}, r"data.dataset.targets: lode; .*Did you mean load\?"),
        ({"time": "load"}, r"data.dataset.time: load of .*, which does not increase from row \d+"),
        ({"length": 90}, r"data.dataset.length: 90 with a horizon of 1, although a split has only 70 rows"),
        ({"targets": []}, r"data.dataset.targets: no column"),
        (
            {"path": "a.csv", "targets": "x", "time": "day"},
            r"no value in line 3 of .*column x; .* the missing value$",
        ),
        ({"path": "a.csv", "targets": "x"}, r"column day; .*a finite number. Set data.dataset.columns"),
    ],
)
def test_errors_of_windows(load, settings, message, monkeypatch):
    monkeypatch.chdir(load[0].parent)
    load[0].with_name("a.csv").write_text("day,x\n2024-01-01,1\n2024-01-02,\n2024-01-03,3\n")
    with pytest.raises(ConfigError, match=message):
        Data(dataset=Windows(**{"path": str(load[0]), "targets": "load", **settings}))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("2024-01-01,2024-01-02,2024-01-03", None),
        ("1,2.5,4", None),
        ("1,NA,4", "no value in line 3"),
        ("NA,2024-01-02,2024-01-03", "no value in line 2"),
        ("2024-01-02,2024-01-01,2024-01-03", "does not increase from row 0 to row 1"),
    ],
)
def test_a_time_column_has_increasing_dates_or_numbers(tmp_path, column, message):
    file = tmp_path / "a.csv"
    file.write_text("when,x\n" + "".join(f"{when},{row}\n" for row, when in enumerate(column.split(","))))
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        Windows(path=str(file), targets="x", time="when", length=1)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    draw = np.random.default_rng(2)
    held = {}
    for part, rows in (("train", 30), ("t10k", 10)):
        held[part] = draw.integers(0, 255, (rows, 8, 8), dtype=np.uint8), np.arange(rows, dtype=np.uint8) % 5
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(held[part][0]))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(held[part][1])))
    return tmp_path, held


def test_mnist_is_read_from_its_files(mnist):
    folder, held = mnist
    made = Idx(path=str(folder), part="test", mean=0.5, std=0.25)
    expected = (torch.from_numpy(held["t10k"][0]).float() / 255 - 0.5) / 0.25
    assert torch.allclose(made.entries[0], expected[:, None])
    assert made.entries[1].tolist() == held["t10k"][1].tolist()
    exp.validate(exp.compose(["data=mnist", f"data.dataset.path={folder}"]))


def test_errors_of_idx_files(mnist):
    folder, held = mnist
    file = folder / "train-images-idx3-ubyte"
    for content, message in (
        (file.read_bytes()[:-1], r"of 1935 bytes; expected 1936 bytes, as its header states"),
        (b"\0\0\x08\x03\0\0", r"of 6 bytes; expected"),
        (b"\x89PNG....", r"which starts with b'.x89PNG'; expected an IDX file"),
        (idx(held["train"][0][:3]), r"images \[3, 8, 8\] and labels \[30\]"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Idx(path=str(folder))
    file.unlink()
    with pytest.raises(
        ConfigError, match=r"without train-images-idx3-ubyte; expected a folder with this file, with or without .gz"
    ):
        Idx(path=str(folder))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b no")
    with pytest.raises(ConfigError, match=r"expected an IDX file"):
        read_idx(folder / "train-labels-idx1-ubyte.gz")
