"""Tables and arrays from a user's own files: what is read, and how a fault is told."""

import contextlib
import csv
import io

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exp.data.data import Data
from exp.data.delimited import Csv, read_sheet
from exp.data.in_memory import Tensors
from exp.data.tensor_file import TensorFile
from exp.errors import ConfigError

FLOWERS = """\
id,colour,height,kind
1,red,1.5,rose
2,blue,2.5,iris

3,red,"3.5",rose
4,blue,4.5,tulip
"""


@pytest.fixture
def flowers(tmp_path):
    path = tmp_path / "flowers.csv"
    path.write_text(FLOWERS)
    return str(path)


def rows(made: Csv) -> Tensors:
    return made.prepare(made.fit())


def test_a_classification(flowers):
    made = Csv(path=flowers, target="kind", categorical=["colour"], ignore=["id"], standardise=False)
    assert made.fit()["table"]["words"] == {"colour": ["blue", "red"]}
    assert made.classes == {"target": ("iris", "rose", "tulip")}
    features, targets = rows(made).entries
    assert features.tolist() == [[1.5, 0, 1], [2.5, 1, 0], [3.5, 0, 1], [4.5, 1, 0]]
    assert targets.tolist() == [1, 0, 1, 2]
    spec = Data(dataset=made, parts={"train": 2, "val": 2}).spec
    assert (spec.input_shape, spec.num_classes, spec.num_outputs) == ((3,), 3, 3)


def test_a_regression_standardised_or_not(flowers):
    settings = {"path": flowers, "target": "height", "task": "regression", "ignore": ["colour", "kind"]}
    data = Data(train=Csv(**settings, standardise=False))
    assert data.part("train").entries[1].tolist() == [[1.5], [2.5], [3.5], [4.5]]
    assert (data.spec.num_classes, data.spec.num_outputs) == (None, 1)
    standardised = Data(train=Csv(**settings)).part("train").entries[1]
    assert standardised.flatten().tolist() == pytest.approx([-1.341641, -0.447214, 0.447214, 1.341641])


def test_numbers_as_labels_keep_their_order_and_columns_without_names_are_numbered(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("10;0.5\n9;1.5\n10;2.5\n")
    made = Csv(path=str(path), target=0, delimiter=";", header=False)
    assert made.classes == {"target": ("9", "10")}
    assert rows(made).entries[1].tolist() == [1, 0, 1]
    assert made.columns == ("1",)


def test_a_file_is_looked_for_in_the_data_directory_too(flowers, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert len(Csv(path="flowers.csv", directory=str(tmp_path), target="kind", ignore=["colour"])) == 4


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (FLOWERS, {"target": "knd"}, r"data.dataset.target: knd; expected a column of .*Did you mean kind\?"),
        (FLOWERS, {"ignore": ["idd"]}, r"data.dataset.ignore: idd; .*mean id\?"),
        (FLOWERS, {}, r"'red' in line 2 of .*column colour; expected a number. Put it in data.dataset.categorical"),
        (FLOWERS, {"delimiter": ";"}, r"data.dataset.target: kind; expected a column"),
        (FLOWERS, {"ignore": ["id", "colour", "height"]}, r"data.dataset.ignore: every column but the target"),
        ("a,kind\n1,x\nnan,y\n", {}, r"data.dataset.path: no value in line 3 of .*column a; expected one in every row"),
        ("a,kind\n1,x\n-inf,y\n", {}, r"-inf in line 3 of"),
        ("a,kind\n1,x\n,y\n", {}, r"no value in line 3 of .*column a; .*data.dataset.impute=mean"),
        ("a,kind\n1,x\n2,\n", {}, r"no value in line 3 of .*column kind"),
        ('a,b,kind\n"x\ny",2,x\n1,inf,y\n', {"categorical": ["a"]}, r"inf in line 4 of"),
        ("a,kind\n1,x\n2\n", {}, r"1 values in line 3 of .*; expected 2, as in its first line"),
        ("a,a,kind\n1,2,x\n", {}, r"with a twice"),
        ("a,kind\n", {}, r"without a row"),
        ("", {}, r"without a row"),
        ('a,kind\n"1,x\n', {}, r"near line 2.*expected CSV in UTF-8"),
        (
            "a,kind\n" + "".join(f"1,{i}.5\n" for i in range(30)),
            {},
            r"data.dataset.task: classification of 30 labels.*data=csv_regression",
        ),
    ],
)
def test_faults_of_a_table(tmp_path, text, settings, message):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Csv(**{"path": str(path), "target": "kind", **settings})


def test_a_missing_file_names_both_places_and_its_neighbour(flowers, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(
        ConfigError, match=r"data.dataset.path: no file at /flower.csv nor at .*Did you mean flowers.csv"
    ):
        Csv(path="flower.csv", directory=str(tmp_path), target="kind")


values = st.floats(allow_nan=False, allow_infinity=False, width=64)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(values, words, values), min_size=1, max_size=8))
def test_what_pythons_own_writer_writes_is_read_back(tmp_path, rows):
    text = io.StringIO()
    csv.writer(text).writerows([("x", "word", "y"), *rows])
    path = tmp_path / "table.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    sheet = read_sheet(path, delimiter=",", header=True, missing_values=())
    assert sheet.numbers(0).tolist() == [row[0] for row in rows]
    assert sheet.texts(1) == [row[1] for row in rows]
    assert sheet.numbers(2).tolist() == [row[2] for row in rows]
    assert len(sheet) == len(rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
def test_any_bytes_are_a_table_or_a_fault(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(Csv(path=str(path), target="0", header=False)) > 0


@pytest.mark.parametrize("kind", ["npz", "pt", "pair"])
def test_arrays_of_a_file(tmp_path, kind):
    inputs, targets = np.arange(12, dtype=np.uint8).reshape(4, 3), np.array([0, 2, 1, 1], dtype=np.int32)
    path = tmp_path / ("arrays.npz" if kind == "npz" else "arrays.pt")
    if kind == "npz":
        np.savez(path, images=inputs, labels=targets)
    elif kind == "pt":
        torch.save({"images": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}, path)
    else:
        torch.save((torch.from_numpy(inputs), torch.from_numpy(targets)), path)
    made = TensorFile(path=str(path), input="images", target="labels", scale=0.5)
    assert made.entries[0].tolist() == (inputs * 0.5).tolist()
    assert made.entries[1].dtype == torch.int64
    spec = Data(train=made).spec
    assert (spec.input_shape, spec.input_dtype, spec.num_classes) == ((3,), "float32", 3)


def test_tokens_stay_whole_and_numbers_to_predict_get_a_width(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, input=np.array([[1, 2], [3, 4]]), target=np.array([0.5, 1.5]))
    data = Data(train=TensorFile(path=str(path)))
    assert (data.spec.input_dtype, data.spec.num_classes, data.spec.num_outputs) == ("int64", None, 1)
    assert data.part("train").entries[1].tolist() == [[0.5], [1.5]]


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_faults_of_arrays(tmp_path, capsys):
    def refused(name, message, **settings):
        with pytest.raises(ConfigError, match=message):
            TensorFile(path=str(tmp_path / name), **settings)

    np.savez(tmp_path / "good.npz", inputs=np.zeros((3, 2)), target=np.zeros(3))
    refused("good.npz", r"data.dataset.input: input; .*Did you mean inputs")
    np.savez(tmp_path / "uneven.npz", input=np.zeros((3, 2)), target=np.zeros(2))
    refused("uneven.npz", r"3 inputs and 2 targets")
    np.savez(tmp_path / "nan.npz", input=np.array([[1.0], [np.nan]]), target=np.zeros(2))
    refused("nan.npz", r"a number in input 1 that is not finite")
    np.savez(tmp_path / "pickled.npz", input=np.array([Evil()], dtype=object), target=np.zeros(1))
    refused("pickled.npz", r"data.dataset.path: .*allow_pickle")
    torch.save({"input": Evil(), "target": torch.zeros(1)}, tmp_path / "evil.pt")
    refused("evil.pt", r"expected tensors alone")
    torch.save(torch.zeros(3), tmp_path / "one.pt")
    refused("one.pt", r"with Tensor; expected a mapping")
    (tmp_path / "broken.pt").write_bytes(b"not a file of torch")
    refused("broken.pt", r"expected tensors alone")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 no")
    refused("broken.npz", r"arrays of numbers")
    (tmp_path / "table.xls").write_bytes(b"")
    refused("table.xls", r"a file that ends in .npz")
    refused("gone.npz", r"no file at")
    assert "executed" not in capsys.readouterr().out
