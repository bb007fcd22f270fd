"""Tests of `python -m exp.data`: statistics, leaks, files and exit statuses."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.preprocessing import StandardScaler

import exp
from exp.check.resolution import resolve
from exp.construct import build_data
from exp.extras.survey.data import main

OWN = '''
import os
import signal

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Pairs(Dataset):
    """20 rows of 3 numbers. Rows 17 to 19 repeat rows 0 to 2, the last with another target."""

    def __init__(self, broken=-1, kind="tuple"):
        self.broken, self.kind = broken, kind

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
            wave = torch.tensor([3 + 4j])
            return {"input": row, "target": target, "weight": np.float32(index), "name": f"row {index}", "wave": wave}
        if self.kind == "tensors":
            return torch.from_numpy(row).float(), torch.tensor([float(target), 2.0])
        return row, target


class Sequences(Dataset):
    """Tokens of 1 to 4 numbers, and as many floating-point numbers."""

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
    def __init__(self, is_counted=False):
        self.is_counted = is_counted

    def __iter__(self):
        return ((torch.tensor([float(index)]), index % 2) for index in range(10))

    def __len__(self):
        if not self.is_counted:
            raise TypeError
        return 10


class MadeStream(IterableDataset):
    def __iter__(self):
        return ((torch.rand(3), index % 2) for index in range(6))


class Noise:
    """Changes its argument in place, as careless transforms do."""

    def __call__(self, row):
        row += torch.rand(len(row))
        return row


class Interrupted(Pairs):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGINT)
'''
ALLOW = "security.allow=[looked_at]"
# loss/val does not exist without a validation split.
ALONE = "monitor=loss/train"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "looked_at.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "looked_at", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def own(name: str, *, parts: str = "{train: 1.0, val: 0, test: 0}", more: str = "") -> str:
    """Write conf/data/own.yaml for a data set of the module above, and return the override that selects it."""
    Path("conf/data/own.yaml").write_text(
        "# A data set of this test: data=own\n"
        "defaults: [_loader, _self_]\n"
        f"dataset: {name}\n"
        f"parts: {parts}\nbatch_size: 4\n{more}\n",
        encoding="utf-8",
    )
    return "data=own"


def look(*words: str) -> dict:
    """Run the command, and return the content of its data.json and the directory."""
    assert main([*words, ALONE]) == 0
    (found,) = sorted(Path("outputs").rglob("data.json"), key=lambda path: path.stat().st_mtime_ns)[-1:]
    return json.loads(found.read_text(encoding="utf-8")) | {"directory": found.parent}


def close(numbers: dict, values: np.ndarray) -> None:
    """Assert that the statistics of a column equal those of NumPy in float64."""
    values = np.asarray(values, dtype=np.float64)
    assert numbers["count"] == len(values)
    assert numbers["mean"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
    assert numbers["deviation"] == pytest.approx(values.std(), rel=1e-9, abs=1e-12)
    assert (numbers["low"], numbers["high"]) == (values.min(), values.max())


def arrays(stage: str, *words: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a split that the network receives."""
    input, target = build_data(resolve(exp.compose(list(words))).settings).part(stage).entries
    return input.numpy().astype(np.float64), target.numpy()


def test_pictures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = look("name=looked")
    directory = found["directory"]
    assert directory.parts[:3] == ("outputs", "looked", "data")
    assert sorted(path.name for path in directory.iterdir()) == ["data.json", "data.md"]
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


def test_a_chosen_directory_is_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert look("data=wine", "hydra.run.dir=outputs/mine")["directory"] == Path("outputs/mine")
    assert "results    outputs/mine" in capsys.readouterr().out
    assert look("data=wine", "hydra.run.dir=outputs/mine")["directory"] == Path("outputs/mine-2")


def test_columns_have_the_statistics_of_scikit_learn() -> None:
    found = look("data=diabetes")
    table = build_data(resolve(exp.compose(["data=diabetes"])).settings, keeps_raw=True).raw["train"]
    rows, target = (values[table.rows] for values in (table.numbers, table.targets["target"]))
    columns = found["parts"]["train"]["numbers"]["input"]
    scaler = StandardScaler().fit(rows)
    assert [one["name"] for one in columns] == ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert [one["mean"] for one in columns] == pytest.approx(scaler.mean_.tolist(), rel=1e-9)
    assert [one["deviation"] for one in columns] == pytest.approx(scaler.scale_.tolist(), rel=1e-9)
    close(found["parts"]["train"]["numbers"]["target"][0], target.reshape(-1))
    assert found["leaks"] == found["repeated"] == []
    assert not any(line.startswith(("leak", "repeated", "differs")) for line in found["findings"])


def test_a_table_is_shown_as_its_file_has_it(place: Path) -> None:
    draws = np.random.default_rng(0)
    kinds, ages = draws.integers(0, 2, 60), draws.normal(1e8, 1, 60)
    numbers = [repr(age) if row % 9 else "" for row, age in enumerate(ages.tolist())]
    colours = ["red" if row % 7 else "" for row in range(60)]
    rows = [f"{300 + row},{numbers[row]},{colours[row]},{10 * one + row % 10},{one}" for row, one in enumerate(kinds)]
    (place / "t.csv").write_text("\n".join(["id,age,colour,sorted,kind", *rows]), encoding="utf-8")
    words = "impute: most_frequent, categorical: [colour]"
    found = look(own(f"{{_target_: exp.data.delimited.Csv, path: t.csv, target: kind, {words}}}"))
    number, age, _, _ = found["parts"]["train"]["numbers"]["input"]
    close(number, np.arange(300, 360))
    close(age, [one for row, one in enumerate(ages) if row % 9])
    assert age["missing"] == 7


def test_a_large_mean_costs_no_digits(place: Path) -> None:
    rows = 1e8 + np.random.default_rng(0).normal(size=(3000, 2)).astype(np.float64)
    np.savez(place / "far.npz", input=rows, target=np.arange(3000) % 2)
    held = rows.astype(np.float32).astype(np.float64)  # Arrays converts to float32
    own("{_target_: exp.data.arrays.Arrays, path: far.npz}")
    for column, numbers in enumerate(look("data=own")["parts"]["train"]["numbers"]["input"]):
        close(numbers, held[:, column])


def test_large_numbers_have_statistics(place: Path) -> None:
    np.savez(place / "large.npz", input=np.array([[1e200], [-1e200]] * 10), target=np.arange(20) % 2)
    own("{_target_: exp.data.arrays.Arrays, path: large.npz}")
    words = ("data=own", "precision=fp64")
    (column,) = look(*words)["parts"]["train"]["numbers"]["input"]
    assert (column["low"], column["high"], column["deviation"]) == (-1e200, 1e200, None)


def test_leaks_and_repeats_are_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert leaks["test", "val"]["pairs"] == [[2, 1]]
    assert {one["part"]: one["pairs"] for one in found["repeated"]} == {"val": [[3, 0]], "test": [[3, 1]]}
    told = capsys.readouterr().out
    assert "leak: samples of test that are in train: 3, first test 1 = train 7" in told
    assert "leak: samples of test that are in val: 1, first test 2 = val 1" in told
    assert "repeated: samples of val that are in this split more than once: 1, first val 3 = val 0" in told


@pytest.mark.parametrize(("kind", "workers"), [("tuple", 0), ("mapping", 2)])
def test_missing_values_of_a_data_set_are_counted(kind: str, workers: int) -> None:
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
    assert any("1 nan and 1 infinite" in line and "1 1, 2 1" in line for line in found["findings"])
    if kind == "mapping":
        close(part["numbers"]["weight"][0], np.arange(20))
        close(part["numbers"]["wave"][0], np.full(20, 5.0))  # absolute values
        close(part["lengths"]["name"], np.repeat([5.0, 6.0], 10))


def test_a_random_transform_hides_no_repeats() -> None:
    words = own("{_target_: looked_at.Pairs, kind: tensors}", more="transforms: {noise: {_target_: looked_at.Noise}}")
    found = look(words, ALLOW, "objective=[mse]", "metrics=[mae]")
    assert [one["pairs"] for one in found["repeated"]] == [[[17, 0], [18, 1], [19, 2]]]
    first, second = found["parts"]["train"]["numbers"]["target"]
    close(first, [*(index % 17 % 2 for index in range(19)), 1])
    close(second, np.full(20, 2.0))


def test_random_samples_are_no_leak() -> None:
    node = "{_target_: looked_at.MadeStream}"
    declared = "num_classes: 2\ninput_shape: [3]\ninput_dtype: float32\nnum_outputs: 2"
    found = look(own("null", parts="null", more=f"train: {node}\nval: {node}\ntest: {node}\n{declared}"), ALLOW)
    assert [part["looked_at"] for part in found["parts"].values()] == [6, 6, 6]
    assert found["leaks"] == found["repeated"] == []


def test_padding_is_not_counted() -> None:
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
    close(part["numbers"]["tokens"][0], tokens)
    close(part["lengths"]["tokens"], np.array(lengths))
    assert part["batch"]["tokens"] == {"dtype": "int64", "shape": [4, 4]}


@pytest.mark.parametrize("is_counted", [False, True])
def test_samples_limits_what_is_read(is_counted: bool) -> None:
    declared = "input_shape: [1]\ninput_dtype: float32\nnum_classes: 2\nnum_outputs: 2"
    counted = f"is_counted: {str(is_counted).lower()}"
    words = own("null", parts="null", more=f"train: {{_target_: looked_at.Stream, {counted}}}\n{declared}")
    part = look(words, ALLOW, "--samples", "all")["parts"]["train"]
    assert (part["samples"], part["looked_at"], part["batches"]) == (10, 10, 3)
    close(part["numbers"]["input"][0], np.arange(10.0))
    limited = look(words, ALLOW, "--samples", "4")
    assert limited["parts"]["train"]["looked_at"] == 4
    assert limited["parts"]["train"]["samples"] == (10 if is_counted else None)
    assert any(line.startswith("not read: ") for line in limited["findings"])


def test_text_is_counted_in_characters(text: tuple[str, ...]) -> None:
    found = look(*text, "data.dataset.vocabulary_size=10")
    part = found["parts"]["train"]
    whole = part["numbers"]["input"][0]
    characters = Path(text[1].partition("=")[2]).read_text(encoding="utf-8")
    trained = characters[: round(0.9 * len(characters))]
    frequent = sorted({*trained}, key=lambda one: (-trained.count(one), one))[:10]
    assert (whole["count"], whole["low"], whole["high"]) == ((len(trained) - 1) // 64 * 64, 0, 10)
    assert part["lengths"]["input"]["low"] == part["lengths"]["input"]["high"] == 64
    assert part["classes"]["target"]["names"][1:] == [repr(one) for one in sorted(frequent)]


def test_absent_and_rare_classes_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rare.csv").write_text("\n".join(["x,kind", *(f"{index},a" for index in range(44)), "44,b", "45,c"]))
    words = own(
        "{_target_: exp.data.delimited.Csv, path: rare.csv, target: kind}",
        parts="{train: 45, val: 0, test: 0}",
        more="parts_seed: 34",  # this seed excludes the only sample of class c
    )
    found = look(words)["parts"]["train"]["classes"]["target"]
    assert (found["names"], found["counts"]) == (["a", "b", "c"], {"0": 44, "1": 1})
    output = capsys.readouterr().out
    assert "absent: target 2 c in none of the samples of train" in output
    assert "imbalance: in train the target 0 a occurs" in output


def test_an_unreadable_sample_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = own("{_target_: looked_at.Pairs, broken: 7}", more="num_classes: 2")
    assert main([words, ALLOW, ALONE]) == 1
    told = capsys.readouterr().err
    assert "reading sample 7 of train" in told
    assert "OSError: the disk under this sample is gone" in told
    assert not list(Path().rglob("data.json"))


def test_a_ctrl_c_ends_with_130_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([own("{_target_: looked_at.Interrupted}", more="num_classes: 2"), ALLOW, ALONE]) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")
    assert not Path("outputs").exists()


def test_pictures_are_named_by_their_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pets = data_files(place)["images"]
    words = ["data=images", *pets, "data.num_workers=0"]
    (place / "pets" / "dog" / "copy.png").write_bytes((place / "pets" / "cat" / "3.png").read_bytes())
    (repeated,) = look(*words, "data.parts={train: 1.0,val: 0,test: 0}")["repeated"]
    assert repeated["count"] == 1
    assert "pets/dog/copy.png and pets/cat/3.png" in capsys.readouterr().out.replace("\n", " ")
    crop = "+data.train_transforms.crop={_target_: exp.data.images.RandomCrop, size: 8}"
    assert (
        "differs: input is float32 [3, 8, 8] in train, and float32 [3, 12, 12] in val" in look(*words, crop)["findings"]
    )
    # The run reads only the start of a picture before training, and here the end is missing.
    file = place / "pets" / "dog" / "z.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:-60])
    assert main(words) == 1
    message = capsys.readouterr().err
    assert "pets/dog/z.jpg, which cannot be read" in message
    assert len(message.splitlines()) == 1


def test_only_config_errors_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["data=wnie"], "wine"),
        (["data=csv", "data.dataset.path=none.csv", "data.dataset.target=y"], "none.csv"),
        (["-m", "seed=0,1"], "--multirun"),
        (["--samples", "0"], "--samples"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert main(["--cfg", "job", "data=wine", "--package", "data"]) == 0
    assert "exp.data.tables.Wine" in capsys.readouterr().out
    assert not Path("outputs").exists()


def test_an_unwritable_directory_is_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "full").write_text("", encoding="utf-8")
    assert main(["data=wine", "hydra.run.dir=full/there"]) == 1
    told = capsys.readouterr().err
    assert "full/there: " in told
    assert "hydra.run.dir=" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full exists on Linux only")
def test_a_full_standard_output_loses_no_files(place: Path, commands) -> None:
    done = commands.start("data=wine", module="exp.data", cwd=place, output=Path("/dev/full")).end()
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert list(place.glob("outputs/*/data/*/*/data.md"))


def data_files(place: Path) -> dict[str, list[str]]:
    """Write small data files, and return the overrides that select them, by option of conf/data."""
    draws = np.random.default_rng(0)
    rows = draws.normal(size=(40, 3))
    lines = [f"{x:.6f},{y:.6f},{'uvw'[index % 3]},{'ab'[index % 2]}" for index, (x, y, _) in enumerate(rows)]
    (place / "a.csv").write_text("\n".join(["x,y,word,kind", *lines]), encoding="utf-8")
    np.savetxt(place / "b.csv", rows, delimiter=",", header="x,y,z", comments="")
    for name in ("cat", "dog"):
        (place / "pets" / name).mkdir(parents=True)
        for number in range(10):
            pixels = draws.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "pets" / name / f"{number}.png")
    for number in range(2):
        shard = [json.dumps({"x": index, "kind": "ba"[index % 2]}) for index in range(9)]
        (place / f"shard{number}.jsonl").write_text("\n".join(shard), encoding="utf-8")
    stream = "data.dataset.files={train: shard0.jsonl, val: shard1.jsonl, test: null}"
    return {
        "stream": [stream, "data.dataset.classes=[a,b]", "data.dataset.target=kind"],
        "csv": ["data.dataset.path=a.csv", "data.dataset.target=kind", "data.dataset.categorical=[word]"],
        "images": ["data.dataset.path=pets"],
        "windows": ["data.dataset.path=b.csv", "data.dataset.targets=[y]", "data.dataset.length=4"],
    }


@pytest.mark.parametrize(
    ("option", "inputs", "targets"),
    [
        ("stream", ["x"], ["a", "b"]),
        ("csv", ["x", "y", "word=u", "word=v", "word=w"], ["a", "b"]),
        ("images", ["channel 0", "channel 1", "channel 2"], ["cat", "dog"]),
        ("windows", ["x", "y", "z"], ["y"]),
    ],
)
def test_columns_and_classes_have_names(option: str, inputs: list[str], targets: list[str], place: Path) -> None:
    found = look(f"data={option}", *data_files(place)[option])
    assert all(part["looked_at"] == part["samples"] for part in found["parts"].values())
    train = found["parts"]["train"]
    assert [one["name"] for one in train["numbers"]["input"]] == inputs
    if option == "windows":
        assert [one["name"] for one in train["numbers"]["target"]] == targets
    else:
        assert train["classes"]["target"]["names"] == targets
    if option == "stream":
        assert train["classes"]["target"]["counts"] == {"0": 4, "1": 5}


def test_ignored_labels_are_counted() -> None:
    train = look("data=digit_domains")["parts"]["train"]
    assert train["classes"]["target"]["ignored"] == 600
    assert train["classes"]["domain"]["counts"] == {"0": 600, "1": 600}


def test_samples_are_compared_by_their_bytes() -> None:
    from exp.extras.survey.read_once import input_hash

    def hashed(value: object) -> object:
        return input_hash((value, 0), inputs=(), targets=("target",))

    some = torch.arange(6.0)
    assert hashed(some) == hashed(some.clone())
    others = [some, some.double(), some.reshape(2, 3), some + 1, some.numpy(), [1, 23], [12, 3], "12", b"12", None, {}]
    assert len({hashed(one) for one in others}) == len(others)
    assert hashed(torch.arange(6.0).reshape(2, 3).T) == hashed(torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert hashed(torch.ones(3, dtype=torch.bfloat16)) != hashed(torch.zeros(3, dtype=torch.bfloat16))
    assert hashed(torch.tensor(1.0)) != hashed(torch.tensor(2.0))
    assert hashed(torch.tensor([1j]).conj()) == hashed(torch.tensor([complex(0, -1)]))
    assert input_hash((torch.eye(2).to_sparse(), 0), inputs=(), targets=()) is None


def test_a_user_module_works_and_user_loaders_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lit", raising=False)
    shutil.copytree(Path(__file__).parents[2] / ".ci" / "newcomer", place, dirs_exist_ok=True)
    assert main(["module=litnet", "data=wine"]) == 0
    assert "| train |     125 |" in capsys.readouterr().out
    assert main(["module=litnet", "data=litdigits"]) == 2
    told = capsys.readouterr().err
    assert "data._target_: lit.LitDigits with exp.data" in told
