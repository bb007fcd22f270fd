"""exp.predict: every kind of file, prepared as in training, against the network by hand and scikit-learn."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import exp
from exp.data.faults import SampleError
from exp.data.unlabelled import UnlabelledRecords, UnlabelledSeries, first_beyond
from exp.errors import ConfigError, RunError
from exp.predict import main

SHORT = ["trainer.enable_progress_bar=false", "trainer.max_epochs=3", "hooks=[]", "test=false"]
KINDS = ("ant", "bee", "cow")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(*overrides):
    return exp.load(exp.fit(exp.compose([*SHORT, *overrides])).directory)


def pets(count, *, seed):
    draws = np.random.default_rng(seed)
    kinds = draws.integers(0, 3, count)
    return {
        "height": draws.normal(10 * kinds, 4.0),
        "colour": np.array(["red", "green", "blue"])[draws.integers(0, 3, count)],
        "weight": draws.normal(100.0 - kinds, 1.0),
        "kind": np.array(KINDS)[kinds],
        "price": 1000.0 + 50.0 * kinds + draws.normal(size=count),
    }


def write_csv(path, columns):
    rows = zip(*columns.values(), strict=True)
    Path(path).write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")


def encoded(rows, training):
    """By scikit-learn, with the figures of the training part."""
    numbers, others = (np.stack([one["height"], one["weight"]], 1) for one in (rows, training))
    words = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(training["colour"][:, None])
    scaled = StandardScaler().fit(others).transform(numbers)
    return torch.from_numpy(np.concatenate([scaled, words.transform(rows["colour"][:, None])], 1)).float()


def table_run(*overrides):
    rows = pets(120, seed=0)
    write_csv("pets.csv", rows)
    run = trained(
        "data=csv", "data.dataset.path=pets.csv", "data.dataset.categorical=[colour]", "data.dataset.target=kind",
        "data.dataset.ignore=[price]", *overrides,
    )  # fmt: skip
    part = run.data.part("train").indices.numpy()
    return run, {name: column[part] for name, column in rows.items()}


def read_answers(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_in_every_format(capsys):
    run, training = table_run()
    new = pets(11, seed=1)
    new["colour"][3] = "violet"  # which training has never seen
    with torch.no_grad():
        expected = run.network()(encoded(new, training)).double().softmax(1).numpy()
    given = {"id": np.arange(11), **{name: new[name] for name in ("weight", "colour", "height")}}
    write_csv("new.csv", given)
    Path("new.jsonl").write_text(
        "\n".join(json.dumps({name: column[row].item() for name, column in given.items()}) for row in range(11))
    )
    np.savez("new.npz", **given)
    for source in ("new.csv", "new.jsonl", "new.npz"):
        for target in ("answers.csv", "answers.jsonl"):
            assert main([f"run={run.directory}", f"input={source}", f"output={target}"]) == 0
            rows = read_answers(Path(target))
            assert [row["class"] for row in rows] == [KINDS[number] for number in expected.argmax(1)]
            found = np.array([[float(row[f"probability_{kind}"]) for kind in KINDS] for row in rows])
            assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)
            assert np.allclose([float(row["probability"]) for row in rows], expected.max(1), rtol=1e-5)
        assert f"11 samples of {source} predicted: answers.jsonl" in capsys.readouterr().out
    assert not list(Path("outputs").rglob("predictions"))
    assert np.allclose(run.predict(given).answers()["probabilities"], expected, rtol=1e-5, atol=1e-7)


def test_parquet():
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    from pyarrow import parquet

    run, training = table_run()
    new = pets(5, seed=2)
    parquet.write_table(pyarrow.table({name: new[name] for name in ("height", "colour", "weight")}), "new.parquet")
    assert main([f"run={run.directory}", "input=new.parquet", "output=answers.parquet"]) == 0
    with torch.no_grad():
        expected = run.network()(encoded(new, training)).argmax(1)
    assert parquet.read_table("answers.parquet")["class"].to_pylist() == [KINDS[number] for number in expected]


def test_a_regression_answers_in_the_units_of_the_data():
    rows = pets(120, seed=0)
    write_csv("pets.csv", {name: rows[name] for name in ("height", "weight", "price")})
    run = trained("data=csv_regression", "data.dataset.path=pets.csv", "data.dataset.target=price")
    given = {name: pets(6, seed=3)[name] for name in ("height", "weight")}
    found = run.predict(given)
    training = rows["price"][run.data.part("train").indices.numpy()]
    raw = found.outputs["output"].astype(np.float64)
    assert np.allclose(found.answers()["prediction"], raw * training.std() + training.mean(), rtol=1e-12)
    write_csv("new.csv", given)
    main([f"run={run.directory}", "input=new.csv", "output=answers.csv"])
    answers = [float(row["prediction"]) for row in read_answers(Path("answers.csv"))]
    assert np.allclose(answers, found.answers()["prediction"][:, 0], rtol=1e-6)
    without = trained(
        "data=csv_regression", "data.dataset.path=pets.csv", "data.dataset.target=price",
        "data.dataset.standardise=false", "optimizer.lr=1e-6",
    )  # fmt: skip
    found = without.predict(given)
    assert np.array_equal(found.answers()["prediction"], found.outputs["output"].astype(np.float64))


@pytest.fixture
def pictures(tmp_path):
    draws = np.random.default_rng(0)
    for kind, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(draws.normal(shade, 20, (10, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / kind / f"{number:02}.png")
    return tmp_path / "pets"


def test_pictures_in_a_folder_one_and_by_a_table(pictures):
    run = trained(
        "data=images", "data.dataset.path=pets", "data.dataset.resize=[8,8]", "data.dataset.mean=[0.5,0.4,0.3]",
        "data.dataset.std=[0.2,0.3,0.4]", "data.num_workers=0", "data.batch_size=8",
    )  # fmt: skip
    files = sorted(pictures.rglob("*.png"))
    pixels = [Image.open(file).resize((8, 8), Image.Resampling.BILINEAR) for file in files]
    values = torch.from_numpy(np.stack([np.asarray(one) for one in pixels])).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        expected = run.network()((values - mean) / std)
    assert main([f"run={run.directory}", "input=pets", "output=answers.csv"]) == 0
    rows = read_answers(Path("answers.csv"))
    assert [row["file"] for row in rows] == [str(file.absolute()) for file in files]
    assert [row["class"] for row in rows] == [("dark", "light")[number] for number in expected.argmax(1)]
    assert np.allclose([float(row["probability_light"]) for row in rows], expected.softmax(1)[:, 1], atol=1e-5)
    Path("some.csv").write_text("path\npets/light/03.png\npets/dark/01.png\n")
    assert [row["file"][-12:] for row in table_of(run, "some.csv")] == ["light/03.png", "/dark/01.png"]
    assert len(table_of(run, "pets/dark/00.png")) == 1


def table_of(run, given):
    assert main([f"run={run.directory}", f"input={given}", "output=found.jsonl"]) == 0
    return read_answers(Path("found.jsonl"))


def test_arrays_as_the_data_set_gives_them():
    run = trained("precision=fp64")
    inputs, targets = run.data.part("test").gather(torch.arange(20))
    with torch.no_grad():
        expected = run.network()(inputs.double()).numpy()
    np.savez("digits.npz", input=inputs.numpy())
    np.save("digits.npy", inputs.numpy())
    write_csv("digits.csv", {f"p{number}": column for number, column in enumerate(inputs.flatten(1).numpy().T)})
    Path("digits.jsonl").write_text("\n".join(json.dumps({"input": one.tolist()}) for one in inputs))
    for given in ("digits.npz", "digits.npy", "digits.csv", "digits.jsonl", inputs, inputs.numpy(), {"input": inputs}):
        found = run.predict(given)
        assert np.array_equal(found.outputs["output"], expected)
        assert found.answers()["class"].tolist() == expected.argmax(1).tolist()
    main([f"run={run.directory}", "input=digits.npz", "output=answers.npz"])
    with np.load("answers.npz") as file:
        assert np.array_equal(file["output"], expected)
        assert np.array_equal(file["class"], expected.argmax(1))
    assert (expected.argmax(1) == targets.numpy()).mean() > 0.5


def test_transforms_are_those_of_an_evaluation():
    run = trained(
        "data.train_transforms={noise: {_target_: torch.nn.Dropout}}",
        "data.transforms={scale: {_target_: torch.nn.Tanh}}",
        "data.input_shape=null", "security.allow=[]",
    )  # fmt: skip
    inputs, _ = run.data.part("test").gather(torch.arange(5))
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(run.predict(inputs).outputs["output"]), run.network()(inputs.tanh()))


def test_several_outputs_and_a_sequence_stay_apart(text):
    run = trained(
        "data.batch_size=8", *text, "trainer.max_steps=2", "model.constants.width=16", "trainer.max_epochs=null"
    )
    windows, _ = run.data.part("test").gather(torch.arange(4))
    found = run.predict(windows)
    with torch.no_grad():
        assert np.allclose(found.outputs["output"], run.network()(windows).numpy(), atol=1e-6)
    np.savez("windows.npz", input=windows.numpy())
    assert main([f"run={run.directory}", "input=windows.npz", "output=answers.csv"]) == 1
    assert main([f"run={run.directory}", "input=windows.npz", "output=answers.jsonl"]) == 0
    (first, *_) = read_answers(Path("answers.jsonl"))
    assert len(first["class"]) == windows.shape[1]


@pytest.mark.any_processor
@pytest.mark.numeric
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_ranks_predict_what_one_process_does(strategy, commands):
    run = trained("precision=fp64", "model=sequential")
    inputs, _ = run.data.part("test").gather(torch.arange(23))
    np.savez("digits.npz", input=inputs.numpy())
    # Batches of 8, 8 and 7; and of 22 and 1, of which one rank has none.
    for size in (8, 22):
        ended = commands.run(
            f"run={run.directory}", "input=digits.npz", "output=ranks.npz", f"strategy={strategy}",
            "launch.accelerator=cpu", "launch.devices=2", f"data.batch_size={size}", module="exp.predict",
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        with torch.no_grad(), np.load("ranks.npz") as file:
            assert np.allclose(file["output"], run.network()(inputs.double()).numpy(), rtol=1e-12, atol=1e-13)


def test_a_series_is_cut_and_standardised_as_in_training():
    draws = np.random.default_rng(0)
    series = {"load": draws.normal(50, 9, 200).cumsum(), "heat": draws.normal(20, 2, 200)}
    write_csv("series.csv", series)
    run = trained(
        "data=windows", "data.dataset.path=series.csv", "data.dataset.targets=load", "data.dataset.length=6",
        "data.dataset.horizon=2", "model=mlp", "data.batch_size=16",
    )  # fmt: skip
    rows = np.stack(list(series.values()), 1)
    told = torch.load(run.path_of(None), weights_only=True)["RunData"]["windows"]
    new = rows[150:163]
    write_csv("new.csv", {"load": new[:, 0], "heat": new[:, 1]})
    found = run.predict("new.csv")
    scaled = (new - told["means"].numpy()) / told["deviations"].numpy()
    windows = torch.from_numpy(np.stack([scaled[start : start + 6] for start in range(8)])).float()
    with torch.no_grad():
        outputs = run.network()(windows).double().numpy()
    mean, deviation = told["means"][0].item(), told["deviations"][0].item()
    assert np.allclose(found.answers()["prediction"], outputs * deviation + mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("new.csv", "height,colour\n1,red\n", "input: weight; expected a column of"),
        ("new.csv", "height,colour,weight\n1,red,heavy\n", "'heavy' in line 2 of"),
        ("new.csv", "height,colour,weight\n1,red,\n", "no value in line 2 of"),
        ("new.csv", "height,colour,weight\n", "without a row"),
        ("new.jsonl", '{"height": 1, "colour": "red"}\n{"height": 2', "line 2 of"),
        ("new.jsonl", '{"height": 1, "colour": "red"}\n\n{"height": 2', "line 3 of"),
        ("new.jsonl", "3\n", "new.jsonl is a number; expected an object of values by name"),
        ("new.jsonl", "[1, 2]\n", "new.jsonl is a list; expected an object of values by name"),
        ("new.jsonl", '{"height": 1, "colour": "red", "weight": 2}\n"a"\n', "line 2 of"),
        ("new.jsonl", '{"height": 1, "colour": "red", "weight": 2}\n[1, "red", 2]\n', "new.jsonl is a list; expected"),
        ("new.npz", "nothing", "arrays of numbers in NumPy's .npz"),
        ("new.xlsx", "", "a file in .csv, .parquet, .jsonl, .npz, .npy"),
    ],
)
def test_input_that_does_not_fit(name, content, message, capsys):
    run, _ = table_run("trainer.max_steps=1")
    Path(name).write_text(content)
    assert main([f"run={run.directory}", f"input={name}", "output=answers.csv"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not Path("answers.csv").exists()


def test_arrays_that_do_not_fit():
    run = trained("trainer.max_steps=1")
    for given, message in {
        "shape": (np.zeros((3, 5)), r"\[3, 5\]; expected \[N, \*\[1, 8, 8\]\]"),
        "numbers": (np.full((2, 1, 8, 8), math.nan), "not finite in sample 0"),
        "name": ({"image": np.zeros((2, 1, 8, 8)), "other": np.zeros(2)}, "no input"),
        "empty": (np.zeros((0, 1, 8, 8)), "without a sample"),
    }.values():
        with pytest.raises(ConfigError, match=message):
            run.predict(given)
    with pytest.raises(RunError, match="expected numbers or words"):
        run.predict(object())


def test_places_that_cannot_be_written(capsys):
    run, _ = table_run("trainer.max_steps=1")
    write_csv("new.csv", pets(2, seed=0))
    for output, status, message in (
        ("answers.xlsx", 2, "a file in .npz, .csv, .jsonl, .parquet"),
        ("nowhere/answers.csv", 2, "mkdir -p nowhere"),
        ("pets.csv/answers.csv", 2, "whose folder is not there"),
    ):
        assert main([f"run={run.directory}", "input=new.csv", f"output={output}"]) == status
        assert message in capsys.readouterr().err
    assert main([f"run={run.directory}", "input=missing.csv", "output=answers.csv"]) == 2
    assert "which is not there" in capsys.readouterr().err
    assert main([f"run={run.directory}", "inptu=new.csv", "output=answers.csv"]) == 2
    assert "Did you mean input where inptu is?" in capsys.readouterr().err


def test_neither_the_input_nor_the_run_is_written_over(capsys):
    run, _ = table_run("trainer.max_steps=1")
    write_csv("same.csv", pets(3, seed=0))
    np.savez("same.npz", **{name: column for name, column in pets(3, seed=0).items() if name != "kind"})
    Path("link.csv").symlink_to("same.csv")
    Path("hard.csv").hardlink_to("same.csv")
    before = {name: Path(name).read_bytes() for name in ("same.csv", "same.npz")}
    for given, output in (
        ("same.csv", "same.csv"), ("same.csv", "./same.csv"), ("link.csv", "same.csv"), ("same.csv", "link.csv"),
        ("same.csv", "hard.csv"), ("same.npz", str(Path("same.npz").absolute())),
    ):  # fmt: skip
        assert main([f"run={run.directory}", f"input={given}", f"output={output}"]) == 2
        assert f"output: {Path(output)}, which is the input; expected another file" in capsys.readouterr().err
    assert before == {name: Path(name).read_bytes() for name in before}
    table = run.directory / "metrics.csv"
    table.write_text("kept")
    Path("outward.csv").symlink_to(table)
    for output in (table, run.directory / "checkpoints" / "new.csv", Path("outward.csv")):
        assert main([f"run={run.directory}", "input=same.csv", f"output={output}"]) == 2
        assert f"output: {output}, a place of the run" in capsys.readouterr().err
    assert table.read_text() == "kept"
    assert main([f"run={run.directory}", "input=same.csv", f"output={run.directory / 'answers.csv'}"]) == 0
    assert len(read_answers(run.directory / "answers.csv")) == 3


def test_numbers_beyond_float32_are_refused_by_their_place(capsys):
    run, _ = table_run("trainer.max_steps=1")
    Path("new.csv").write_text("height,colour,weight\n1,red,2\n1,red,-1e39\n")
    assert main([f"run={run.directory}", "input=new.csv", "output=answers.csv"]) == 2
    error = capsys.readouterr().err
    assert "input: -1e+39 in line 3 of" in error
    assert "column weight; expected a number that float32 holds, 3.4e+38 at most" in error
    digits = trained("trainer.max_steps=1")
    given = np.zeros((2, 1, 8, 8))
    given[1, 0, 2, 3] = 1e300
    with pytest.raises(ConfigError, match=r"input: 1e\+300 in sample 1, entry \[0, 2, 3\] of input"):
        digits.predict(given)
    rows = given.reshape(2, 64)
    write_csv("digits.csv", {f"p{number}": column for number, column in enumerate(rows.T)})
    with pytest.raises(ConfigError, match=r"1e\+300 in line 3 of .*, column p19; expected"):
        digits.predict("digits.csv")
    assert not Path("answers.csv").exists()


def test_a_column_of_large_numbers_is_standardised_before_float32():
    rows = pets(120, seed=0)
    write_csv("pets.csv", {**{name: rows[name] for name in ("weight", "kind")}, "height": rows["height"] * 1e39})
    run = trained("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind")
    found = run.predict({"weight": rows["weight"][:4], "height": rows["height"][:4] * 1e39})
    assert np.isfinite(found.outputs["output"]).all()


@pytest.mark.parametrize(
    ("values", "dtype", "place"),
    [
        ([[1.0, 3e38], [-3.5e38, 0.0]], torch.float32, (1, 0)),
        ([[1.0, 3e38]], torch.float64, None),
        ([70000.0], torch.float16, (0,)),
        ([1e300], torch.int64, (0,)),
        ([5, 2**40], torch.int32, (1,)),
        ([5, 2**40], torch.int64, None),
        ([0, -1], torch.uint8, (1,)),
        ([0, 3], torch.bool, None),
    ],
)
def test_the_first_number_that_a_dtype_does_not_hold(values, dtype, place):
    assert first_beyond(np.array(values), dtype) == place


def test_series_and_records_beyond_float32(tmp_path):
    np.save(tmp_path / "series.npy", np.array([[0.0, 1.0], [1.0, 1e39], [2.0, 3.0]]))
    series = UnlabelledSeries(path=str(tmp_path / "series.npy"), length=2)
    told = {"columns": ["0", "1"], "means": [0.0, 0.0], "deviations": [1.0, 1.0]}
    with pytest.raises(ConfigError, match=r"1e\+39 in row 1 of .*, column 1; expected a number that float32 holds"):
        series.prepare({"windows": told})
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "b": 2}\n{"a": 3, "b": 1e39}\n')
    (tmp_path / "lists.jsonl").write_text('{"input": [1.0, 2.0]}\n{"input": [1e39, 1.0]}\n')
    for name, place in (("rows", "in b of row 1"), ("lists", r"in input, entry \[0\], of row 1")):
        records = UnlabelledRecords(path=str(tmp_path / f"{name}.jsonl"))
        assert records[0].tolist() == [1.0, 2.0]
        with pytest.raises(SampleError, match=place):
            records[1]


def test_lines_of_lists_are_samples_and_do_not_go_with_objects():
    run = trained("trainer.max_steps=1")
    inputs, _ = run.data.part("test").gather(torch.arange(3))
    lines = [json.dumps(one.tolist()) for one in inputs]
    Path("lists.jsonl").write_text("\n".join(lines))
    assert np.array_equal(run.predict("lists.jsonl").outputs["output"], run.predict(inputs).outputs["output"])
    record = json.dumps({"input": inputs[0].tolist()})
    for line, (first, second) in {
        "line 2 of .* is an object; expected a list": (lines[0], record),
        "line 2 of .* is a list; expected an object": (record, lines[0]),
        "line 2 of .* is null; expected a list": (lines[0], "null"),
    }.items():
        Path("mixed.jsonl").write_text(f"{first}\n{second}\n")
        with pytest.raises(ConfigError, match=line):
            run.predict("mixed.jsonl")


def test_a_csv_without_a_header_loses_no_sample(capsys):
    run = trained("trainer.max_steps=1")
    inputs, _ = run.data.part("test").gather(torch.arange(3))
    rows = inputs.numpy().reshape(3, 64) + np.arange(64) / 128  # no number is there twice
    body = "\n".join(",".join(map(str, row)) for row in rows)
    Path("bare.csv").write_text(body)
    assert main([f"run={run.directory}", "input=bare.csv", "output=answers.csv"]) == 2
    error = capsys.readouterr().err
    assert "bare.csv, whose first line, " in error
    assert "holds numbers alone; expected a header there, the names of the columns" in error
    assert "Write one above it" in error
    for names in (range(64), [f"p{number}" for number in range(64)]):
        Path("named.csv").write_text(",".join(map(str, names)) + "\n" + body)
        assert np.array_equal(run.predict("named.csv").outputs["output"], run.predict(rows).outputs["output"])


def test_columns_that_training_knew_by_numbers(tmp_path):
    rows = pets(120, seed=0)
    write_csv("pets.csv", {"2020": rows["height"], "2021": rows["weight"], "kind": rows["kind"]})
    run = trained("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind", "trainer.max_steps=1")
    write_csv("new.csv", {"2021": rows["weight"][:4], "2020": rows["height"][:4], "7": np.zeros(4)})
    assert len(run.predict("new.csv")) == 4
    Path("bare.csv").write_text("1.5,2.5\n3.5,4.5\n")
    with pytest.raises(ConfigError, match=r"whose first line, 1\.5, 2\.5, holds numbers alone"):
        run.predict("bare.csv")
    with pytest.raises(ConfigError, match=r"whose first line, 1\.5, 2\.5, holds numbers alone"):
        UnlabelledRecords(path="bare.csv")
    assert len(UnlabelledRecords(path="new.csv", inputs=["2020", "2021"])) == 4
    with pytest.raises(ConfigError, match=r"whose first line, 1\.5, 2\.5, holds numbers alone"):
        UnlabelledSeries(path="bare.csv", length=1).prepare(
            {"windows": {"columns": ["load", "heat"], "means": [0.0, 0.0], "deviations": [1.0, 1.0]}}
        )
    Path("twice.csv").write_text("0.0,0.0\n3.5,4.5\n")
    with pytest.raises(ConfigError, match=r"twice; expected a name for each column\. Its first line is taken for"):
        run.predict("twice.csv")


def test_a_table_that_was_trained_without_a_header():
    rows = pets(120, seed=0)
    write_csv("pets.csv", {name: rows[name] for name in ("height", "weight", "kind")})
    Path("pets.csv").write_text(Path("pets.csv").read_text().partition("\n")[2])
    run = trained(
        "data=csv", "data.dataset.path=pets.csv", "data.dataset.header=false", "data.dataset.target=2",
        "trainer.max_steps=1",
    )  # fmt: skip
    Path("bare.csv").write_text("1.5,2.5\n3.5,4.5\n")
    assert len(run.predict("bare.csv")) == 2
