"""exp.predict: files of each kind are prepared as in training. Predictions equal the network's and scikit-learn's."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import exp
from exp.cli.predict import main
from exp.data.data_errors import SampleError
from exp.data.unlabelled import UnlabelledRecords, UnlabelledSeries
from exp.errors import ConfigError, RunError

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())["predict"]
KINDS = ("ant", "bee", "cow")


@pytest.fixture
def pets_run(pets_directory, pets, write_csv):
    """A run on a table of pets, which no test changes, and the table."""
    write_csv("pets.csv", pets(120, seed=0))
    return exp.load(pets_directory)


@pytest.fixture
def classify(pets_run, pets):
    """A function that returns the probabilities of pets, computed with scikit-learn's preprocessing."""

    def probabilities(rows):
        part = pets_run.data.part("train").indices.numpy()
        training = {name: column[part] for name, column in pets(120, seed=0).items()}
        numbers, others = (np.stack([one["height"], one["weight"]], 1) for one in (rows, training))
        words = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(training["colour"][:, None])
        scaled = StandardScaler().fit(others).transform(numbers)
        inputs = np.concatenate([scaled, words.transform(rows["colour"][:, None])], 1)
        with torch.no_grad():
            return pets_run.network()(torch.from_numpy(inputs).float()).double().softmax(1).numpy()

    return probabilities


def outputs_of(run, inputs):
    with torch.no_grad():
        return run.network()(inputs).numpy()


def read_answers(path):
    path = Path(path)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("source", ["new.csv", "new.jsonl", "new.npz"])
def test_a_table_in_each_format(source, pets_run, classify, pets, write_csv, capsys):
    new = pets(11, seed=1)
    new["colour"][3] = "violet"  # a word that is not in the training data
    expected = classify(new)
    given = {"id": np.arange(11), **{name: new[name] for name in ("weight", "colour", "height")}}
    write_csv("new.csv", given)
    rows = [{name: column[row].item() for name, column in given.items()} for row in range(11)]
    Path("new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    np.savez("new.npz", **given)
    for target in ("answers.csv", "answers.jsonl"):
        assert main([f"run={pets_run.directory}", f"input={source}", f"output={target}"]) == 0
        answers = read_answers(target)
        assert [row["class"] for row in answers] == [KINDS[number] for number in expected.argmax(1)]
        found = np.array([[float(row[f"probability_{kind}"]) for kind in KINDS] for row in answers])
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)
        assert np.allclose([float(row["probability"]) for row in answers], expected.max(1), rtol=1e-5)
    assert f"11 samples of {source} predicted: answers.jsonl" in capsys.readouterr().out
    assert np.allclose(pets_run.predict(given).answers()["probabilities"], expected, rtol=1e-5, atol=1e-7)


def test_unknown_words_are_counted(pets_run, pets, write_csv, capsys):
    given = {name: column[:4] for name, column in pets(9, seed=1).items()}
    given["colour"] = np.array(["red", "violet", "violet", "cyan"])
    write_csv("new.csv", given)
    np.savez("new.npz", **given)
    for source in ("new.csv", "new.npz"):
        assert main([f"run={pets_run.directory}", f"input={source}", "output=answers.csv"]) == 0
        assert "colour of 3 of 4 rows of the input is not in the training split" in capsys.readouterr().err


def test_parquet(pets_run, classify, pets):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    from pyarrow import parquet

    new = pets(5, seed=2)
    parquet.write_table(pyarrow.table({name: new[name] for name in ("height", "colour", "weight")}), "new.parquet")
    assert main([f"run={pets_run.directory}", "input=new.parquet", "output=answers.jsonl"]) == 0
    expected = [KINDS[number] for number in classify(new).argmax(1)]
    assert [row["class"] for row in read_answers("answers.jsonl")] == expected


def test_a_regression_answers_in_units_of_the_data(trained, pets, write_csv):
    rows = pets(120, seed=0)
    write_csv("pets.csv", {name: rows[name] for name in ("height", "weight", "price")})
    data = ("data=csv_regression", "data.dataset.path=pets.csv", "data.dataset.target=price")
    run = trained(*data)
    given = {name: pets(6, seed=3)[name] for name in ("height", "weight")}
    found = run.predict(given)
    training = rows["price"][run.data.part("train").indices.numpy()]
    raw = found.outputs["output"].astype(np.float64)
    assert np.allclose(found.answers()["prediction"], raw * training.std() + training.mean(), rtol=1e-12)
    write_csv("new.csv", given)
    main([f"run={run.directory}", "input=new.csv", "output=answers.csv"])
    answers = [float(row["prediction"]) for row in read_answers("answers.csv")]
    assert np.allclose(answers, found.answers()["prediction"][:, 0], rtol=1e-6)
    found = trained(*data, "data.dataset.standardise=false", "optimizer.lr=1e-6").predict(given)
    assert np.array_equal(found.answers()["prediction"], found.outputs["output"].astype(np.float64))


def test_pictures_in_a_folder_single_or_in_a_table(trained, tmp_path):
    draws = np.random.default_rng(0)
    for kind, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(draws.normal(shade, 20, (10, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / kind / f"{number:02}.png")
    run = trained(
        "data=images", "data.dataset.path=pets", "data.dataset.resize=[8,8]", "data.dataset.mean=[0.5,0.4,0.3]",
        "data.dataset.std=[0.2,0.3,0.4]", "data.num_workers=0", "data.batch_size=8",
    )  # fmt: skip
    files = sorted((tmp_path / "pets").rglob("*.png"))
    pixels = [Image.open(file).resize((8, 8), Image.Resampling.BILINEAR) for file in files]
    values = torch.from_numpy(np.stack([np.asarray(one) for one in pixels])).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    expected = torch.from_numpy(outputs_of(run, (values - mean) / std))

    def answers(given):
        assert main([f"run={run.directory}", f"input={given}", "output=answers.csv"]) == 0
        return read_answers("answers.csv")

    rows = answers("pets")
    assert [row["file"] for row in rows] == [str(file.absolute()) for file in files]
    assert [row["class"] for row in rows] == [("dark", "light")[number] for number in expected.argmax(1)]
    assert np.allclose([float(row["probability_light"]) for row in rows], expected.softmax(1)[:, 1], atol=1e-5)
    Path("some.csv").write_text("path\npets/light/03.png\npets/dark/01.png\n")
    assert [row["file"][-12:] for row in answers("some.csv")] == ["light/03.png", "/dark/01.png"]
    assert len(answers("pets/dark/00.png")) == 1


def test_arrays_in_each_format(digits):
    inputs, _ = digits.data.part("test").gather(torch.arange(20))
    expected = outputs_of(digits, inputs)
    np.savez("digits.npz", input=inputs.numpy())
    np.save("digits.npy", inputs.numpy())
    Path("digits.jsonl").write_text("\n".join(json.dumps({"input": one.tolist()}) for one in inputs))
    files = ("digits.npz", "digits.npy", "digits.jsonl")
    for given in (*files, inputs, inputs.numpy(), {"input": inputs}):
        found = digits.predict(given)
        assert np.allclose(found.outputs["output"], expected, rtol=1e-4, atol=1e-5)
        assert found.answers()["class"].tolist() == expected.argmax(1).tolist()
    main([f"run={digits.directory}", "input=digits.npz", "output=answers.npz"])
    with np.load("answers.npz") as file:
        assert np.allclose(file["output"], expected, rtol=1e-4, atol=1e-5)
        assert np.array_equal(file["class"], expected.argmax(1))


def test_transforms_are_those_of_an_evaluation(trained):
    run = trained(
        "data.train_transforms={noise: {_target_: torch.nn.Dropout}}",
        "data.transforms={scale: {_target_: torch.nn.Tanh}}",
        "data.input_shape=null", "security.allow=[]", "precision=fp64",
    )  # fmt: skip
    inputs, _ = run.data.part("test").gather(torch.arange(5))
    expected = outputs_of(run, inputs.tanh().double())
    assert np.allclose(run.predict(inputs).outputs["output"], expected, rtol=1e-5)


def test_a_sequence_has_several_classes_for_each_sample(text, trained):
    run = trained("data.batch_size=8", *text, "model.constants.width=16", "trainer.max_epochs=null")
    windows, _ = run.data.part("test").gather(torch.arange(4))
    assert np.allclose(run.predict(windows).outputs["output"], outputs_of(run, windows), atol=1e-6)
    np.savez("windows.npz", input=windows.numpy())
    assert main([f"run={run.directory}", "input=windows.npz", "output=answers.csv"]) == 1
    assert main([f"run={run.directory}", "input=windows.npz", "output=answers.jsonl"]) == 0
    (first, *_) = read_answers("answers.jsonl")
    assert len(first["class"]) == windows.shape[1]


@pytest.mark.any_processor
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("strategy", "size"),
    # 23 samples are batches of 8, 8 and 7, or of 22 and 1. One rank has no sample of a batch of 1.
    [("ddp", 22), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", 8), ("pipeline", 8)))],
)
def test_ranks_predict_as_one_process(strategy, size, commands, trained):
    run = trained("precision=fp64", "model=sequential")
    inputs, _ = run.data.part("test").gather(torch.arange(23))
    np.savez("digits.npz", input=inputs.numpy())
    ended = commands.run(
        f"run={run.directory}", "input=digits.npz", "output=ranks.npz", f"strategy={strategy}",
        "launch.accelerator=cpu", "launch.devices=2", f"data.batch_size={size}", module="exp.predict",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    with np.load("ranks.npz") as file:
        assert np.allclose(file["output"], outputs_of(run, inputs.double()), rtol=1e-12, atol=1e-13)


def test_a_series_is_windowed_and_standardized(trained, write_csv):
    draws = np.random.default_rng(0)
    series = {"load": draws.normal(50, 9, 200).cumsum(), "heat": draws.normal(20, 2, 200)}
    write_csv("series.csv", series)
    run = trained(
        "data=windows", "data.dataset.path=series.csv", "data.dataset.targets=load", "data.dataset.length=6",
        "data.dataset.horizon=2", "model=mlp", "data.batch_size=16",
    )  # fmt: skip
    fit = torch.load(run.path_of(None), weights_only=True)["RunData"]["windows"]
    new = np.stack(list(series.values()), 1)[150:163]
    write_csv("new.csv", {"load": new[:, 0], "heat": new[:, 1]})
    scaled = (new - fit["means"].numpy()) / fit["deviations"].numpy()
    windows = torch.from_numpy(np.stack([scaled[start : start + 6] for start in range(8)])).float()
    expected = outputs_of(run, windows).astype(np.float64) * fit["deviations"][0].item() + fit["means"][0].item()
    assert np.allclose(run.predict("new.csv").answers()["prediction"], expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_a_file_that_does_not_fit_is_refused(name, content, message, pets_run, capsys):
    Path(name).write_text(content)
    assert main([f"run={pets_run.directory}", f"input={name}", "output=answers.csv"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not Path("answers.csv").exists()


def test_arrays_that_do_not_fit_are_refused(digits):
    large = np.zeros((2, 1, 8, 8))
    large[1, 0, 2, 3] = 1e300
    for given, message in (
        (np.zeros((3, 5)), r"\[3, 5\]; expected \[N, \*\[1, 8, 8\]\]"),
        (np.full((2, 1, 8, 8), math.nan), "nan in sample 0, .* of input"),
        ({"image": np.zeros((2, 1, 8, 8)), "other": np.zeros(2)}, "without input"),
        (np.zeros((0, 1, 8, 8)), "without a sample"),
        (large, r"input: 1e\+300 in sample 1, entry \[0, 2, 3\] of input"),
    ):
        with pytest.raises(ConfigError, match=message):
            digits.predict(given)
    with pytest.raises(RunError, match=r"expected an array \[N, ...\] of numbers or texts"):
        digits.predict(object())
    with pytest.raises(RunError, match="a list whose samples differ in length"):
        digits.predict([[1.0, 2.0], [3.0]])
    Path("ragged.jsonl").write_text('{"input": [[1, 2], [3]]}\n{"input": [[1]]}\n')
    with pytest.raises(ConfigError, match="lists of different lengths"):
        digits.predict("ragged.jsonl")


def test_outputs_that_cannot_be_written_are_refused(pets_directory, pets, write_csv, tmp_path, capsys):
    run = shutil.copytree(pets_directory, tmp_path / "run")
    table = run / "metrics.csv"
    table.write_text("kept")
    Path("outward.csv").symlink_to(table)
    write_csv("same.csv", pets(3, seed=0))
    Path("link.csv").symlink_to("same.csv")
    Path("hard.csv").hardlink_to("same.csv")
    before = Path("same.csv").read_bytes()
    is_input = "which is the input; expected another file"
    for given, output, message in (
        ("same.csv", "answers.xlsx", "a file name that ends in .npz, .csv, .jsonl"),
        ("same.csv", "nowhere/answers.csv", "mkdir -p nowhere"),
        ("same.csv", "same.csv/answers.csv", "whose folder does not exist"),
        ("missing.csv", "answers.csv", "which does not exist"),
        ("same.csv", "same.csv", is_input),
        ("same.csv", "link.csv", is_input),
        ("same.csv", "hard.csv", is_input),
        ("same.csv", table, f"output: {table}, a file of the run"),
        ("same.csv", run / "checkpoints" / "new.csv", "a file of the run"),
        ("same.csv", "outward.csv", "output: outward.csv, a file of the run"),
    ):
        assert main([f"run={run}", f"input={given}", f"output={output}"]) == 2
        assert message in capsys.readouterr().err
    assert main([f"run={run}", "inptu=new.csv", "output=answers.csv"]) == 2
    assert "Did you mean input instead of inptu?" in capsys.readouterr().err
    assert (Path("same.csv").read_bytes(), table.read_text()) == (before, "kept")
    assert main([f"run={run}", "input=same.csv", f"output={run / 'answers.csv'}"]) == 0
    assert len(read_answers(run / "answers.csv")) == 3


def test_large_numbers_are_standardized_in_float64(trained, pets, write_csv):
    rows = pets(120, seed=0)
    write_csv("pets.csv", {**{name: rows[name] for name in ("weight", "kind")}, "height": rows["height"] * 1e39})
    run = trained("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind")
    found = run.predict({"weight": rows["weight"][:4], "height": rows["height"][:4] * 1e39})
    assert np.isfinite(found.outputs["output"]).all()


def test_series_and_records_that_overflow_are_refused(tmp_path):
    np.save(tmp_path / "series.npy", np.array([[0.0, 1.0], [1.0, 1e39], [2.0, 3.0]]))
    series = UnlabelledSeries(path=str(tmp_path / "series.npy"), options={"length": 2})
    fit = {"columns": ["0", "1"], "means": torch.zeros(2), "deviations": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"1e\+39 in row 1 of .*, column 1; expected a finite number that fits"):
        series.prepare({"windows": fit})
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": 2}\n{"a": 3, "b": 1e39}\n')
    (tmp_path / "lists.jsonl").write_text('{"input": [1.0, 2.0]}\n{"input": [1e39, 1.0]}\n')
    for name in ("rows", "lists"):
        records = UnlabelledRecords(path=str(tmp_path / f"{name}.jsonl"))
        assert records[0].tolist() == [1.0, 2.0]
        with pytest.raises(SampleError, match=r"a number in line 2 of .*.jsonl that is not finite in float32"):
            records[1]


def test_a_csv_needs_the_header_of_training(trained, pets, write_csv):
    """A first line of numbers is a header only if these are the names of training, or training had none."""
    table = pets(120, seed=0)
    write_csv("pets.csv", {"2020": table["height"], "2021": table["weight"], "kind": table["kind"]})
    data = ("data=csv", "data.dataset.path=pets.csv")
    run = trained(*data, "data.dataset.target=kind")
    write_csv("new.csv", {"2021": table["weight"][:4], "2020": table["height"][:4], "7": np.zeros(4)})
    assert (
        len(run.predict("new.csv")) == len(UnlabelledRecords(path="new.csv", options={"inputs": ["2020", "2021"]})) == 4
    )
    Path("bare.csv").write_text("1.5,2.5\n3.5,4.5\n")
    with pytest.raises(ConfigError, match="whose first line holds numbers; expected a header"):
        UnlabelledRecords(path="bare.csv")
    with pytest.raises(ConfigError, match=r"input: 2020; expected a column of .*bare.csv"):
        run.predict("bare.csv")

    Path("pets.csv").write_text(Path("pets.csv").read_text().partition("\n")[2])
    run = trained(*data, "data.dataset.header=false", "data.dataset.target=2")
    assert len(run.predict("bare.csv")) == 2
