"""python -m exp.data: figures against NumPy and scikit-learn, leaks that were made, files, exit statuses."""

import errno
import importlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler

from exp.construct import build_data
from exp.dashboard import page_for
from exp.data.__main__ import main
from exp.errors import is_installed

OWN = '''
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Pairs(Dataset):
    """20 rows of 3 numbers; rows 17 to 19 are rows 0 to 2, the last one with another target."""

    def __init__(self, broken=-1, kind="tuple", noise=0.0):
        self.broken, self.kind, self.noise = broken, kind, noise

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("the disk under this sample is gone")
        row = np.random.default_rng(index % 17).normal(size=3)
        if index == 5:
            row[1] = np.nan
        if index == 6:
            row[2] = np.inf
        target = index % 17 % 2 if index < 19 else 1
        if self.kind == "mapping":
            return {"input": row, "target": target, "weight": np.float32(index), "name": f"row {index}"}
        if self.kind == "tensors":
            return torch.from_numpy(row).float(), torch.tensor([float(target), 2.0])
        return row, target


class Sequences(Dataset):
    """Tokens of 1 to 4 numbers, and as many floating ones."""

    num_classes = 2
    lengths = (1, 4, 2, 3, 4, 1)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return {
            "tokens": torch.arange(1, length + 1) + index,
            "curve": torch.full((length,), float(index)),
            "target": torch.tensor(index % 2),
        }


class Stream(IterableDataset):
    def __init__(self, count=10, is_counted=False):
        self.count, self.is_counted = count, is_counted

    def __iter__(self):
        return ((torch.tensor([float(index)]), index % 2) for index in range(self.count))

    def __len__(self):
        if not self.is_counted:
            raise TypeError
        return self.count


class Objects(Dataset):
    """What a transform makes tensors of."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return Thing(index), index % 2


class Thing:
    def __init__(self, number):
        self.number = number


class Made(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(3), index % 2


class MadeStream(IterableDataset):
    def __iter__(self):
        return ((torch.rand(3), index % 2) for index in range(6))


class Turn:
    def __call__(self, thing):
        return torch.tensor([float(thing.number)])


class Noise:
    """In place, as careless transforms are."""

    def __call__(self, row):
        row += torch.rand(len(row))
        return row


class Scale:
    def __call__(self, input):
        return input.float() / 255


class Slow(Pairs):
    def __getitem__(self, index):
        if index == 9:
            open("asleep", "w").close()
            time.sleep(60)
        return super().__getitem__(index)


class Bytes(Dataset):
    num_classes = 2

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3, 16, 16), index * 10, dtype=torch.uint8), index % 2
'''
ALLOW = "security.allow=[looked_at]"
# Parts without one for validation have no loss/val.
ALONE = "monitor=loss/train"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "looked_at.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "looked_at", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr("exp.data.__main__.SECONDS", 0.01)
    return tmp_path


def own(name: str, *, parts: str = "{train: 1.0, val: 0, test: 0}", more: str = "") -> str:
    """Selects a data set of the module above. parts, more: of its YAML."""
    Path("conf/data/own.yaml").write_text(
        "# A data set of this test: data=own\n"
        "defaults: [_loader, _self_]\n"
        f"dataset: {name}\n"
        f"parts: {parts}\nbatch_size: 4\n{more}\n",
        encoding="utf-8",
    )
    return "data=own"


def look(*words: str) -> dict:
    """What the command writes into data.json, where it ends well."""
    assert main([*words, ALONE]) == 0
    (found,) = sorted(Path("outputs").rglob("data.json"), key=lambda path: path.stat().st_mtime_ns)[-1:]
    return json.loads(found.read_text(encoding="utf-8")) | {"directory": found.parent}


def close(numbers: dict, values: np.ndarray) -> None:
    """Figures of a column equal NumPy's in float64."""
    values = np.asarray(values, dtype=np.float64)
    assert numbers["count"] == len(values)
    assert numbers["mean"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
    assert numbers["deviation"] == pytest.approx(values.std(), rel=1e-9, abs=1e-12)
    assert (numbers["low"], numbers["high"]) == (values.min(), values.max())


def arrays(stage: str, *words: str) -> tuple[np.ndarray, np.ndarray]:
    """The part of a data set in memory, as the network gets it."""
    import exp
    from exp.check.plan import resolve

    input, target = build_data(resolve(exp.compose(list(words))).plain).part(stage).entries
    return input.numpy().astype(np.float64), target.numpy()


def test_pictures_are_counted_drawn_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    found = look("name=looked")
    directory = found["directory"]
    assert directory.parts[:3] == ("outputs", "looked", "data")
    assert sorted(path.name for path in directory.iterdir()) == [
        "classes_target.png", "data.json", "data.md", "samples_input_test.png", "samples_input_train.png",
        "samples_input_val.png", "tensorboard",
    ]  # fmt: skip
    whole = load_digits()
    counts = sum(np.array([found["parts"][stage]["classes"]["target"]["counts"].get(str(label), 0)
                           for label in range(10)]) for stage in ("train", "val", "test"))  # fmt: skip
    assert counts.tolist() == np.bincount(whole.target).tolist()
    for stage, part in found["parts"].items():
        images, labels = arrays(stage)
        assert part["samples"] == part["looked_at"] == len(images)
        assert part["batches"] == -(-len(images) // 64)
        assert part["batch"]["input"] == {"dtype": "float32", "shape": [64, 1, 8, 8]}
        assert part["batch"]["target"] == {"dtype": "int64", "shape": [64]}
        close(part["numbers"]["input"][0], images.reshape(-1))
        expected = np.bincount(labels, minlength=10)
        assert part["classes"]["target"]["counts"] == {str(label): int(n) for label, n in enumerate(expected)}
        assert part["classes"]["target"]["imbalance"] == expected.max() / expected.min()
    text = (directory / "data.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith(text)
    assert "    python -m exp.data name=looked" in text
    assert "samples/s" in text
    assert found["loader"]["workers"] == 0
    with Image.open(directory / "samples_input_train.png") as picture:
        assert min(picture.size) > 4 * 64


def test_tensorboard_shows_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = look("data=wine")["directory"]
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    tags = events.Tags()
    assert sorted(tags["images"]) == ["data/classes/target", "data/histograms/input"]
    assert tags["tensors"] == ["data/report"]
    (text,) = events.Tensors("data/report")
    assert text.tensor_proto.string_val[0].decode() == (directory / "data.md").read_text(encoding="utf-8")
    assert page_for(directory, runs=1) == "images"
    assert f"dashboard  python -m exp.dashboard {directory}" in capsys.readouterr().out
    without = look("data=wine", "logger=[]")["directory"]
    assert without != directory
    assert not (without / "tensorboard").exists()


def test_a_directory_that_was_chosen_is_taken_and_never_shared() -> None:
    assert look("data=wine", "hydra.run.dir=outputs/mine")["directory"] == Path("outputs/mine")
    assert look("data=wine", "hydra.run.dir=outputs/mine")["directory"] == Path("outputs/mine-2")


def test_columns_have_their_names_and_scikit_learns_figures() -> None:
    found = look("data=diabetes", "data.dataset.standardise=false")
    rows, target = arrays("train", "data=diabetes", "data.dataset.standardise=false")
    columns = found["parts"]["train"]["numbers"]["input"]
    scaler = StandardScaler().fit(rows)
    assert [one["name"] for one in columns] == ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert [one["mean"] for one in columns] == pytest.approx(scaler.mean_.tolist(), rel=1e-9)
    assert [one["deviation"] for one in columns] == pytest.approx(scaler.scale_.tolist(), rel=1e-9)
    close(found["parts"]["train"]["numbers"]["target"][0], target.reshape(-1))
    assert (found["directory"] / "histograms_input.png").is_file()
    assert (found["directory"] / "histograms_target.png").is_file()


def test_moments_lose_no_digits_where_the_mean_is_large(place: Path) -> None:
    rows = 1e8 + np.random.default_rng(0).normal(size=(3000, 2)).astype(np.float64)
    np.savez(place / "far.npz", input=rows, target=np.arange(3000) % 2)
    held = rows.astype(np.float32).astype(np.float64)  # what Arrays gives
    own("{_target_: exp.data.arrays.Arrays, path: far.npz}")
    for column, numbers in enumerate(look("data=own")["parts"]["train"]["numbers"]["input"]):
        close(numbers, held[:, column])


def test_leaks_and_repeats_are_found_with_their_first_pair(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    labels = np.arange(20) % 2
    np.savez(place / "train.npz", input=draws[:12], target=labels[:12])
    np.savez(place / "val.npz", input=np.stack([*draws[12:15], draws[12]]), target=[*labels[12:15], labels[12]])
    test = np.stack([draws[16], draws[7], draws[13], draws[7], draws[3]])
    np.savez(place / "test.npz", input=test, target=[0, labels[7], labels[13], 1 - labels[7], labels[3]])
    parts = "\n".join(
        f"{stage}: {{_target_: exp.data.tensor_file.TensorFile, path: {stage}.npz}}"
        for stage in ("train", "val", "test")
    )
    found = look(own("null", parts="null", more=parts))
    leaks = {(one["part"], one["within"]): one for one in found["leaks"]}
    assert leaks.keys() == {("test", "train"), ("test", "val")}
    assert leaks["test", "train"]["count"] == 3
    assert leaks["test", "train"]["pairs"] == [[1, 7], [3, 7], [4, 3]]
    assert leaks["test", "train"]["other_target"] == 1
    assert leaks["test", "val"]["pairs"] == [[2, 1]]
    assert {one["part"]: one["pairs"] for one in found["repeated"]} == {"val": [[3, 0]], "test": [[3, 1]]}
    told = capsys.readouterr().out
    assert "leak: 3 samples of test are in train, first: test 1 = train 7; 1 of them with another target" in told
    assert "leak: 1 sample of test is in val, first: test 2 = val 1" in told
    assert "repeated: 1 sample of val is in it more than once, first: val 3 = val 0" in told


def test_data_without_a_leak_has_none() -> None:
    found = look("data=breast_cancer")
    assert found["leaks"] == found["repeated"] == []
    assert not any(line.startswith(("leak", "repeated")) for line in found["findings"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tuple", "mapping"])
def test_a_data_set_of_ones_own_is_read_once_with_its_missing_values(kind: str, workers: int) -> None:
    words = own(f"{{_target_: looked_at.Pairs, kind: {kind}}}", more=f"num_classes: 2\nnum_workers: {workers}")
    more = ["+data.inputs={input: {shape: [3], dtype: float32}}"] if kind == "mapping" else []
    found = look(words, ALLOW, *more)
    part = found["parts"]["train"]
    rows = np.stack([np.random.default_rng(index % 17).normal(size=3) for index in range(20)]).astype(np.float32)
    first, second, third = part["numbers"]["input"]
    close(first, rows[:, 0])
    close(second, np.delete(rows[:, 1], 5))
    close(third, np.delete(rows[:, 2], 6))
    assert [one["missing"] for one in (first, second, third)] == [0, 1, 0]
    assert [one["infinite"] for one in (first, second, third)] == [0, 0, 1]
    assert part["batch"]["input"] == {"dtype": "float32", "shape": [4, 3]}
    assert [one["pairs"] for one in found["repeated"]] == [[[17, 0], [18, 1], [19, 2]]]
    assert found["loader"]["workers"] == workers
    assert any("1 nan and 1 infinite" in line and "1 1, 2 1" in line for line in found["findings"])
    assert any(line.startswith("rounded: input") for line in found["findings"])
    if kind == "mapping":
        close(part["numbers"]["weight"][0], np.arange(20))
        assert part["lengths"]["name"] == {"count": 20, "total": 110, "low": 5, "high": 6, "mean": 5.5}
    assert found["repeated"][0]["other_target"] == 1


@pytest.mark.parametrize("name", ["Made", "MadeStream"])
def test_samples_that_are_made_at_random_are_not_the_same_in_two_parts(name: str) -> None:
    node = f"{{_target_: looked_at.{name}}}"
    declared = "num_classes: 2\ninput_shape: [3]\ninput_dtype: float32\nnum_outputs: 2"
    found = look(own("null", parts="null", more=f"train: {node}\nval: {node}\ntest: {node}\n{declared}"), ALLOW)
    assert [part["looked_at"] for part in found["parts"].values()] == [6, 6, 6]
    assert found["leaks"] == found["repeated"] == []


def test_a_regression_with_several_targets() -> None:
    words = own("{_target_: looked_at.Pairs, kind: tensors}")
    part = look(words, ALLOW, "objective=[mse]", "metrics=[mae]")["parts"]["train"]
    close(part["numbers"]["target"][0], [*(index % 17 % 2 for index in range(19)), 1])
    close(part["numbers"]["target"][1], np.full(20, 2.0))


def test_padding_counts_for_nothing() -> None:
    words = own(
        "{_target_: looked_at.Sequences}",
        more="collate: {_target_: exp.data.collate.Pad, masks: {there: tokens}}\n"
        "inputs:\n  tokens: {shape: [null], dtype: int64}\n  curve: {shape: [null], dtype: float32}\n"
        "  there: {shape: [null], dtype: bool}",
    )
    part = look(words, ALLOW)["parts"]["train"]
    lengths = (1, 4, 2, 3, 4, 1)
    close(part["numbers"]["curve"][0], np.repeat(np.arange(6.0), lengths))
    tokens = np.concatenate([np.arange(1, length + 1) + index for index, length in enumerate(lengths)])
    assert part["whole_numbers"]["tokens"] == {
        "count": 15, "distinct": len(set(tokens)), "low": 1, "high": 8, "unknown": None, "vocabulary": None,
    }  # fmt: skip
    assert part["lengths"]["tokens"] == {"count": 6, "total": 15, "low": 1, "high": 4, "mean": 2.5}
    assert part["batch"]["tokens"] == {"dtype": "int64", "shape": [4, 4]}


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_stream_is_looked_at_as_far_as_asked(is_counted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    declared = "input_shape: [1]\ninput_dtype: float32\nnum_classes: 2\nnum_outputs: 2"
    counted = f"is_counted: {str(is_counted).lower()}"
    words = own("null", parts="null", more=f"train: {{_target_: looked_at.Stream, {counted}}}\n{declared}")
    part = look(words, ALLOW)["parts"]["train"]
    assert (part["samples"], part["looked_at"], part["batches"]) == (10, 10, 3)
    close(part["numbers"]["input"][0], np.arange(10.0))
    cut = look(words, ALLOW, "--samples", "4")
    assert cut["parts"]["train"]["looked_at"] == 4
    assert cut["parts"]["train"]["samples"] == (10 if is_counted else None)
    assert any(line.startswith("not looked at: ") for line in cut["findings"])


def test_a_number_of_samples_bounds_the_look() -> None:
    found = look("--samples", "100")
    assert [part["looked_at"] for part in found["parts"].values()] == [100, 100, 100]
    images, _ = arrays("train")
    close(found["parts"]["train"]["numbers"]["input"][0], images[:100].reshape(-1))
    assert "not looked at: 1,158 of 1,258 samples in train; --samples all looks at every one" in found["findings"]
    assert look("--samples", "all")["parts"]["train"]["looked_at"] == 1258


def test_transforms_of_samples_and_of_batches_are_seen(place: Path) -> None:
    mixed = "{mixup: {_target_: exp.data.batch_transforms.Mixup, num_classes: 10}}"
    found = look("data=digits", f"+data.train_batch_transforms={mixed}", "data.drop_last=true")
    part = found["parts"]["train"]
    assert part["batch"]["target"] == {"dtype": "int64", "shape": [64]}
    assert part["after_batch_transforms"] == {"target": {"dtype": "float32", "shape": [64, 10]}}
    assert sum(part["classes"]["target"]["counts"].values()) == 1258  # of the samples, which are not mixed
    assert found["parts"]["val"]["after_batch_transforms"] == {}
    words = own("{_target_: looked_at.Bytes}", more="batch_transforms: {scale: {_target_: looked_at.Scale}}")
    part = look(words, ALLOW)["parts"]["train"]
    assert part["batch"]["input"] == {"dtype": "uint8", "shape": [4, 3, 16, 16]}
    assert part["after_batch_transforms"]["input"] == {"dtype": "float32", "shape": [4, 3, 16, 16]}
    scaled = (np.repeat(np.arange(8), 256) * 10).astype(np.float32) / np.float32(255)
    assert [one["name"] for one in part["numbers"]["input"]] == ["channel 0", "channel 1", "channel 2"]
    for channel in part["numbers"]["input"]:
        close(channel, scaled)


def test_a_random_transform_hides_no_repeat() -> None:
    words = own(
        "{_target_: looked_at.Pairs, kind: tensors}",
        more="transforms: {noise: {_target_: looked_at.Noise}}",
    )
    found = look(words, ALLOW, "objective=[mse]", "metrics=[mae]")
    assert [one["pairs"] for one in found["repeated"]] == [[[17, 0], [18, 1], [19, 2]]]


def test_objects_that_nobody_can_compare_are_told() -> None:
    words = own("{_target_: looked_at.Objects}", more="num_classes: 2\ntransforms: {t: {_target_: looked_at.Turn}}")
    found = look(words, ALLOW)
    assert "not compared: 6 samples of train, which hold objects without bytes to compare" in found["findings"]


def test_text_is_counted_in_characters_of_its_vocabulary(text: tuple[str, ...]) -> None:
    found = look(*text, "data.dataset.vocabulary_size=10")
    part = found["parts"]["train"]
    whole = part["whole_numbers"]["input"]
    characters = Path(text[1].partition("=")[2]).read_text(encoding="utf-8")
    trained = characters[: round(0.9 * len(characters))]
    frequent = sorted({*trained}, key=lambda one: (-trained.count(one), one))[:10]
    seen = trained[: (len(trained) - 1) // 64 * 64]
    assert whole["vocabulary"] == 11
    assert whole["count"] == len(seen)
    assert whole["unknown"] == sum(one not in frequent for one in seen)
    assert part["lengths"]["input"]["low"] == part["lengths"]["input"]["high"] == 64
    assert part["classes"]["target"]["names"][1:] == [repr(one) for one in sorted(frequent)]


def test_a_class_that_is_absent_and_one_that_is_rare_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["x,kind", *(f"{index},{'ab'[index % 23 == 22]}" for index in range(46)), "50,c"]
    (place / "rare.csv").write_text("\n".join(rows), encoding="utf-8")
    part = "{train: 46, val: 0, test: 0}"
    words = own("{_target_: exp.data.delimited.Csv, path: rare.csv, target: kind}", parts=part, more="parts_seed: 3")
    found = look(words)
    counts = found["parts"]["train"]["classes"]["target"]
    assert counts["names"] == ["a", "b", "c"]
    told = capsys.readouterr().out
    if "2" in counts["counts"]:
        assert counts["counts"]["2"] == 1
    else:
        assert "absent: target 2 c in no sample of train" in told
    assert "imbalance: in train the target 0 a is there" in told


def test_a_sample_that_cannot_be_read_ends_with_status_1_and_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = own("{_target_: looked_at.Pairs, broken: 7}", more="num_classes: 2")
    assert main([words, ALLOW, ALONE]) == 1
    told = capsys.readouterr().err
    assert "reading sample 7 of train" in told
    assert "OSError: the disk under this sample is gone" in told
    assert not list(Path().rglob("data.json"))


def test_a_broken_picture_ends_with_status_1_and_its_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _files(place)
    file = place / "pets" / "dog" / "z.jpg"  # whose beginning is read before the run, and is good
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:-60])
    assert main(["data=images", "data.dataset.path=pets", "data.num_workers=0"]) == 1
    told = capsys.readouterr().err
    assert "pets/dog/z.jpg, which cannot be read" in told
    assert len(told.splitlines()) == 1


def test_parts_that_are_not_alike_are_told(place: Path) -> None:
    _files(place)
    crop = "+data.train_transforms.crop={_target_: exp.data.images.RandomCrop, size: 8}"
    found = look("data=images", "data.dataset.path=pets", "data.num_workers=0", crop)
    assert "differs: input is float32 [3, 8, 8] in train, and float32 [3, 12, 12] in val" in found["findings"]
    assert not [line for line in look("data=wine")["findings"] if line.startswith("differs")]


def test_a_terminal_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    look()
    told = capsys.readouterr().err
    assert "\r\033[Ktrain: 64 of 1,258 samples" in told
    assert told.endswith("\r\033[K")  # nothing of it stays


def test_faults_of_the_config_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data=wnie"]) == 2
    assert "wine" in capsys.readouterr().err
    assert main(["data.batch_size=0", "data=wine"]) == 2
    assert "data.batch_size: 0" in capsys.readouterr().err
    assert main(["data=csv", "data.dataset.path=none.csv", "data.dataset.target=y"]) == 2
    assert "none.csv" in capsys.readouterr().err
    assert main(["-m", "seed=0,1"]) == 2
    assert "--multirun" in capsys.readouterr().err
    assert main(["--samples", "0"]) == 2
    assert "--samples" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_place_that_cannot_be_written_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "full").write_text("", encoding="utf-8")
    assert main(["data=wine", "hydra.run.dir=full/there"]) == 1
    told = capsys.readouterr().err
    assert "full/there: " in told
    assert "hydra.run.dir=" in told


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("exp.files.write_whole", full)
    assert main(["data=wine"]) == 1
    assert "No space left on device. Make room there" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_an_output_that_cannot_be_written_costs_nothing_else(place: Path) -> None:
    program = "from exp.data.__main__ import main; raise SystemExit(main(['data=wine']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=place, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert list(place.glob("outputs/*/data/*/*/data.md"))


def test_a_ctrl_c_ends_with_130_and_leaves_nothing(place: Path, commands) -> None:
    words = own("{_target_: looked_at.Slow}", more="num_classes: 2")
    started = commands.start(words, ALLOW, ALONE, module="exp.data.__main__", cwd=place)
    ends = time.monotonic() + 60
    while not (place / "asleep").exists() and started.process.is_alive() and time.monotonic() < ends:
        time.sleep(0.05)
    os.kill(started.process.pid, signal.SIGINT)
    done = started.end(seconds=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().endswith("interrupted")
    assert not (place / "outputs").exists()


def test_the_help_and_the_config_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    assert "--samples N|all" in capsys.readouterr().out
    assert main(["--cfg", "job", "data=wine", "--package", "data"]) == 0
    assert "exp.data.tables.Wine" in capsys.readouterr().out


def _files(place: Path) -> dict[str, list[str]]:
    """The words that choose each option of conf/data that needs files, and the files."""
    draws = np.random.default_rng(0)
    rows = draws.normal(size=(40, 3))
    np.savez(place / "a.npz", input=rows.astype(np.float32), target=np.arange(40) % 3)
    (place / "folder").mkdir()
    np.save(place / "folder" / "input.npy", rows.astype(np.float32))
    np.save(place / "folder" / "mask.npy", rows > 0)
    np.save(place / "folder" / "target.npy", np.arange(40) % 3)
    lines = [f"{x:.6f},{y:.6f},{'uvw'[index % 3]},{'ab'[index % 2]}" for index, (x, y, _) in enumerate(rows)]
    (place / "a.csv").write_text("\n".join(["x,y,word,kind", *lines]), encoding="utf-8")
    (place / "b.csv").write_text("\n".join(["x,y,z", *(",".join(f"{v:.6f}" for v in row) for row in rows)]))
    for name in ("cat", "dog"):
        (place / "pets" / name).mkdir(parents=True)
        for number in range(10):
            pixels = draws.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "pets" / name / f"{number}.png")
    (place / "idx").mkdir()
    for part, count in (("train", 30), ("t10k", 10)):
        pixels = draws.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 8, 8)
        (place / "idx" / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (place / "idx" / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes()
        )
    draws.integers(0, 9, 400).astype(np.uint16).tofile(place / "tokens.bin")
    (place / "shards").mkdir()
    for number in range(2):
        rows = [f"{number},{index},{'ab'[index % 2]}" for index in range(9)]
        (place / "shards" / f"{number}.csv").write_text("\n".join(["file,row,kind", *rows]), encoding="utf-8")
    stream = ["data.dataset.files={train: shards/0.csv, val: shards/1.csv, test: null}", "data.dataset.classes=[a,b]"]
    return {
        "stream": [*stream, "data.dataset.target=kind"],
        "tensors": ["data.dataset.path=a.npz"],
        "npy": ["data.dataset.path=folder"],
        "csv": ["data.dataset.path=a.csv", "data.dataset.target=kind", "data.dataset.categorical=[word]"],
        "csv_regression": ["data.dataset.path=b.csv", "data.dataset.target=[y,z]"],
        "images": ["data.dataset.path=pets"],
        "mnist": ["data.dataset.path=idx"],
        "token_file": ["data.dataset.path=tokens.bin", "data.dataset.vocabulary_size=9", "data.dataset.block_size=4"],
        "windows": ["data.dataset.path=b.csv", "data.dataset.targets=[y]", "data.dataset.length=4"],
    }  # fmt: skip


SHIPPED = ("breast_cancer", "wine", "diabetes", "digits", "digit_domains", "text", "letter_names")
WITH_FILES = ("stream", "tensors", "npy", "csv", "csv_regression", "images", "mnist", "token_file", "windows")
# Each with the package that it needs.
EXTRAS = {"parquet": "pyarrow", "tokens": "tokenizers", "hf": "datasets"}


def test_no_option_is_left_out() -> None:
    import exp

    options = {path.stem for path in (Path(exp.__file__).parent / "conf" / "data").glob("[!_]*.yaml")}
    assert options == {*SHIPPED, *WITH_FILES, *EXTRAS}


@pytest.mark.parametrize("option", [*SHIPPED[4:], *WITH_FILES])
def test_every_option_is_looked_at(option: str, place: Path, text: tuple[str, ...]) -> None:
    words = [] if option in SHIPPED else _files(place)[option]
    found = look(*(text if option == "text" else (f"data={option}", *words)))
    train = found["parts"]["train"]
    assert all(part["looked_at"] == part["samples"] for part in found["parts"].values())
    assert train["batch"]
    if option == "csv":
        assert [one["name"] for one in train["numbers"]["input"]] == ["x", "y", "word=u", "word=v", "word=w"]
    if option == "stream":
        assert [one["name"] for one in train["numbers"]["input"]] == ["file", "row"]
        assert train["classes"]["target"] == {
            "counts": {"0": 5, "1": 4},
            "names": ["a", "b"],
            "ignored": 0,
            "imbalance": 1.25,
        }
        assert found["leaks"] == []
    if option == "windows":
        assert [one["name"] for one in train["numbers"]["input"]] == ["x", "y", "z"]
        assert [one["name"] for one in train["numbers"]["target"]] == ["y"]
    if option == "images":
        assert train["classes"]["target"]["names"] == ["cat", "dog"]
        assert (found["directory"] / "samples_input_train.png").is_file()
        assert found["loader"]["workers"] == 2
    if option == "npy":
        assert {"input", "mask"} <= train["numbers"].keys()
    if option == "digit_domains":
        assert train["classes"]["target"]["ignored"] == 600
        assert train["classes"]["domain"]["counts"] == {"0": 600, "1": 600}


@pytest.mark.parametrize("option", EXTRAS)
def test_an_option_with_an_extra_is_looked_at(option: str, place: Path, text: tuple[str, ...]) -> None:
    if not is_installed(EXTRAS[option]):
        pytest.skip(f"the extra of {option} is not installed")
    rows = [{"x": float(index), "kind": "ba"[index % 2]} for index in range(40)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    if option == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), place / "rows.parquet")
    words = {
        "tokens": [text[1], "data.dataset.vocabulary_size=300"],
        "parquet": ["data.dataset.path=rows.parquet", "data.dataset.target=kind"],
        "hf": ["data.dataset.files=rows.jsonl", "data.dataset.target=kind"],
    }[option]
    train = look(f"data={option}", *words)["parts"]["train"]
    if option == "tokens":
        assert (train["whole_numbers"]["input"]["vocabulary"], train["whole_numbers"]["input"]["unknown"]) == (
            300,
            None,
        )
        return
    assert train["classes"]["target"]["names"] == ["a", "b"]
    assert [one["name"] for one in train["numbers"]["input"]] == ["x"]


def test_a_leaked_picture_is_named_by_its_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _files(place)
    (place / "pets" / "dog" / "copy.png").write_bytes((place / "pets" / "cat" / "3.png").read_bytes())
    parts = "data.parts={train: 1.0,val: 0,test: 0}"
    found = look("data=images", "data.dataset.path=pets", "data.num_workers=0", parts)
    (repeated,) = found["repeated"]
    assert (repeated["count"], repeated["other_target"]) == (1, 1)
    assert "pets/dog/copy.png and pets/cat/3.png" in capsys.readouterr().out.replace("\n", " ")


def test_sparse_and_conjugated_numbers_and_columns_of_one_are_looked_at(place: Path) -> None:
    from exp.data.survey import PartSurvey, _Entry
    from exp.data.value_names import ValueNames

    found = PartSurvey(stage="train", samples=4, batches=2)
    values = {"sparse": torch.eye(4).to_sparse(), "waves": torch.tensor([[3 + 4j], [0j], [6 + 8j], [1j]]).conj()}
    for name, value in values.items():
        entry = _Entry(name, ValueNames(columns={"waves": ["volt"]}), is_target=False)
        for part in (value.to_dense()[:3], value):
            entry.add(part, None, places=[], quota=100)
        entry.close(name, found)
    close(found.numbers["sparse"][0].__dict__, [1, 0, 0, 1, 0, 0, 0])
    assert found.numbers["waves"][0].name == "volt"
    close(found.numbers["waves"][0].__dict__, [5, 0, 10, 5, 0, 10, 1])


def test_a_batch_padded_by_a_function_of_ones_own_is_one_value() -> None:
    from exp.data.survey import PartSurvey, _Entry
    from exp.data.value_names import ValueNames

    found, draws = PartSurvey(stage="train", samples=None, batches=None), np.random.default_rng(0)
    batches = [draws.normal(size=(4, width)) for width in (3, 5, 300)]
    entry = _Entry("curve", ValueNames(), is_target=False)
    for batch in batches:
        entry.add(torch.from_numpy(batch), None, places=[], quota=10)
    entry.close("curve", found)
    close(found.numbers["curve"][0].__dict__, np.concatenate([batch.reshape(-1) for batch in batches]))


def test_bytes_of_samples_tell_them_apart() -> None:
    from exp.data.fingerprints import fingerprint

    def hashed(value: object) -> object:
        return fingerprint((value, 0), inputs=(), targets=("target",)).inputs

    some = torch.arange(6.0)
    assert hashed(some) == hashed(some.clone())
    others = [some, some.double(), some.reshape(2, 3), some + 1, some.numpy(), [1, 23], [12, 3], "12", b"12", None, {}]
    assert len({hashed(one) for one in others}) == len(others)
    assert hashed(torch.arange(6.0).reshape(2, 3).T) == hashed(torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert hashed(torch.ones(3, dtype=torch.bfloat16)) != hashed(torch.zeros(3, dtype=torch.bfloat16))
    assert hashed(torch.tensor(1.0)) != hashed(torch.tensor(2.0))
    assert hashed(torch.tensor([1j]).conj()) == hashed(torch.tensor([complex(0, -1)]))
    assert fingerprint((torch.eye(2).to_sparse(), 0), inputs=(), targets=()) is None


def test_a_module_of_ones_own_sees_exps_data_and_loaders_of_ones_own_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lit", raising=False)
    shutil.copytree(Path(__file__).parents[2] / ".ci" / "newcomer", place, dirs_exist_ok=True)
    assert main(["module=litnet", "data=wine"]) == 0
    assert "| train |     125 |" in capsys.readouterr().out
    assert main(["module=litnet", "data=litdigits"]) == 2
    told = capsys.readouterr().err
    assert "data._target_: lit.LitDigits, whose loaders give batches and know no samples" in told
