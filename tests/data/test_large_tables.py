"""Tables too large to keep as they are read: parsed in pieces, kept packed, encoded where a batch needs them."""

import csv
import io
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exp.data import delimited, tables
from exp.data.data import Data
from exp.data.delimited import Csv, read_sheet
from exp.data.in_memory import Selection, Tensors
from exp.data.windows import Windows
from exp.errors import ConfigError

SETTINGS = {
    "target": {"kind": "kind", "cost": ["price", "rent"]},
    "task": {"kind": "classification", "cost": "regression"},
    "categorical": ["colour"],
    "dates": ["built"],
    "impute": "mean",
}


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """A table with holes, read and looked at a few rows at a time."""
    monkeypatch.setattr(delimited, "CHARACTERS", 1500)
    monkeypatch.setattr(tables, "PIECE", 50)
    generator = np.random.default_rng(0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["size", "stamp", "built", "colour", "price", "rent", "kind"])
    for number in range(400):
        size, price = generator.normal(100, 20), generator.normal(3e5, 1e5)
        colour = ["red", "blue", "dark, red", ""][generator.integers(4)]
        row = [
            f"{size:.3f}" if number % 9 else "",
            1.6e9 + number,
            f"20{10 + number % 15}-03-04",
            colour,
            f"{price:.1f}",
            number / 7,
        ]
        writer.writerow([*row, ["flat", "house"][number % 2]])
    path = tmp_path / "homes.csv"
    path.write_text(text.getvalue())
    return path


@pytest.mark.parametrize("encoding", ["one_hot", "index"])
@pytest.mark.parametrize("impute", ["mean", "median", "most_frequent"])
def test_a_packed_table_is_encoded_as_one_that_is_not(homes, encoding, impute):
    choices = {**SETTINGS, "impute": impute, "encoding": encoding}
    made = [Data(dataset=Csv(path=str(homes), **choices, packed=packed), seed=3) for packed in (False, True)]
    assert isinstance(made[0].part("train"), Tensors)
    assert isinstance(made[1].part("train"), Selection)
    assert made[0].spec == made[1].spec
    for stage in ("train", "val", "test"):
        plain, packed = (list(data.loader(stage)) for data in made)
        assert len(plain) == len(packed)
        for one, other in zip(plain, packed, strict=True):
            assert one.data.keys() == other.data.keys()
            for name, values in one.data.items():
                assert other.data[name].dtype == values.dtype
                torch.testing.assert_close(other.data[name], values, rtol=1e-5, atol=1e-5)


def test_a_column_that_is_wide_beside_its_spread_keeps_its_spread(homes):
    # In float32 as they stand, 1.6e9 and the next 63 whole numbers are one.
    data = Data(dataset=Csv(path=str(homes), target="kind", ignore=["size", "built", "colour"], packed=True))
    stamps = torch.cat([batch.data[0][:, 0] for batch in data.loader("train")])
    assert len(stamps.unique()) == len(stamps) == 280


def test_parts_of_a_packed_table_share_its_rows(homes):
    data = Data(dataset=Csv(path=str(homes), **SETTINGS, packed=True))
    sources = [data.part(stage).source.table.entries["numbers"] for stage in ("train", "val", "test")]
    assert len({tensor.data_ptr() for tensor in sources}) == 1
    assert sources[0].dtype == torch.float32


def test_a_file_is_read_in_less_memory_than_it_has_bytes(tmp_path):
    path = tmp_path / "long.csv"
    row = "0.12345678,1.2345678,12.345678,123.45678,1234.5678,red,0.87654321\n"
    path.write_text("a,b,c,d,e,colour,target\n" + row * 100_000)
    tracemalloc.start()
    made = Csv(path=str(path), target="target", task="regression", categorical=["colour"], packed=True)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made) == 100_000
    # Six numbers and a word, 4 bytes each; while it is read, a piece of text and what becomes of it beside.
    assert held < 1.2 * 100_000 * 7 * 4
    assert peak < path.stat().st_size + 8 * 2**20


def test_a_file_is_passed_over_once_for_all_of_its_columns(homes, monkeypatch):
    passes = []
    pieces = delimited.Parser.pieces
    monkeypatch.setattr(delimited.Parser, "pieces", lambda parser: passes.append(parser) or pieces(parser))
    Csv(path=str(homes), **SETTINGS)
    assert len(passes) == 1
    series = homes.with_name("series.csv")
    series.write_text("a,b,c,d\n" + "1,2,3,4\n" * 50)
    Windows(path=str(series), targets=["c", "d"], length=4)
    assert len(passes) == 2


def test_a_file_is_packed_by_its_size(homes, monkeypatch):
    assert not Csv(path=str(homes), **SETTINGS)._offsets
    monkeypatch.setattr(delimited, "PACKED", 1000)
    assert Csv(path=str(homes), **SETTINGS)._offsets


def test_faults_deep_in_a_file_are_told_with_their_line_and_all_together(homes):
    lines = homes.read_text().splitlines()
    lines[200] = lines[200].replace(",20", ",soon-20")
    lines[300] = lines[300].replace("1600000299.0", "inf")
    lines[350] = lines[350].replace("1600000349.0", "many")
    homes.write_text("\n".join([*lines[:150], lines[150] + ",more", *lines[151:]]))
    with pytest.raises(ConfigError, match=r"8 values in line 151 of .*; expected 7"):
        Csv(path=str(homes), **SETTINGS)
    homes.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        Csv(path=str(homes), **SETTINGS)
    told = str(error.value)
    assert "'soon-2014-03-04' in line 201 of" in told
    assert "column built; expected a date in ISO 8601" in told
    assert "inf in line 301 of" in told
    assert "column stamp; expected a finite number" in told
    assert "line 351" not in told  # the first one of each column


texts = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(
        [
            "",
            " 1.5 ",
            "+2",
            "1_000",
            "1e5",
            "0x10",
            "inf",
            "nan",
            "NA",
            "x",
            ".5",
            "5.",
            "\N{ARABIC-INDIC DIGIT ONE}",
            "1 2",
            "#3",
        ]
    ),
    st.text(st.characters(exclude_characters='\r\n",', exclude_categories=["Cs", "Cc"]), max_size=5),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cells=st.lists(texts, min_size=1, max_size=12), ending=st.sampled_from(["\n", "\r\n"]))
def test_what_numpy_parses_is_what_python_would(tmp_path, cells, ending):
    path = tmp_path / "column.csv"
    path.write_bytes(("a,b" + ending + "".join(f"{cell},0{ending}" for cell in cells)).encode())

    def value(text):
        text = text.strip()
        if text in delimited.MISSING_VALUES:
            return math.nan
        if not math.isfinite(float(text)):
            raise ValueError
        return float(text)

    try:
        wanted = [value(cell) for cell in cells]
    except ValueError:
        with pytest.raises(ConfigError, match=r"column a; expected a (finite )?number"):
            read_sheet(path, delimiter=",", header=True).numbers(0)
        return
    np.testing.assert_array_equal(read_sheet(path, delimiter=",", header=True).numbers(0), wanted)


def write_column(folder, values, *, name="far"):
    path = folder / "numbers.csv"
    path.write_text(f"{name},target\n" + "".join(f"{value},{place % 5}\n" for place, value in enumerate(values)))
    return str(path)


@pytest.mark.parametrize("values", [[1e9, 1, 2, 3, 4, 5] * 20, [0, *(1_764_000_000 + second for second in range(600))]])
def test_one_number_far_from_the_others_takes_nothing_from_them(tmp_path, values):
    path = write_column(tmp_path, values)
    whole, packed = (
        Csv(path=path, target="target", task="regression", standardise=False, packed=one) for one in (False, True)
    )
    found = np.concatenate(list(packed._pieces("numbers")))
    expected = np.concatenate(list(whole._pieces("numbers")))
    middle = np.median(expected)
    np.testing.assert_allclose(found - middle, expected - middle, rtol=2.0**-23)


def test_numbers_that_packing_would_lose_are_refused_with_the_key_that_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "CHARACTERS", 1500)
    path = write_column(tmp_path, [1e39, *range(50)])
    with pytest.raises(ConfigError, match=r"(?s)beyond float32 in column far, line 2 .*data.dataset.packed=false"):
        Csv(path=path, target="target", task="regression", packed=True)
    # The first rows are all of one kind, and the others so near each other that float32 has one number for them.
    path = write_column(tmp_path, [0.5] * 2_000 + [1e9 + 0.01 * number for number in range(10_000)])
    with pytest.raises(ConfigError, match=r"(?s)column far, whose numbers are nearer .*data.dataset.packed=false"):
        Csv(path=path, target="target", task="regression", packed=True)


def test_words_alone_are_packed_too(tmp_path):
    path = tmp_path / "words.csv"
    path.write_text("a,b,kind\n" + "".join(f"w{n % 30},v{n % 7},k{n % 3}\n" for n in range(300)))
    choices = {"path": str(path), "target": "kind", "categorical": ["a", "b"]}
    whole, packed = (Data(dataset=Csv(**choices, packed=one), parts={"train": 1.0}) for one in (False, True))
    assert not isinstance(packed.part("train"), Tensors)
    for one, other in zip(
        whole.loader("train", rank=0, world_size=1), packed.loader("train", rank=0, world_size=1), strict=True
    ):
        assert all(map(torch.equal, one.data, other.data))


def test_between_spaces_values_are_those_of_the_csv_module(tmp_path):
    path = tmp_path / "spaces.csv"
    path.write_text("a b\n" + "1  2\n" * 5)
    assert read_sheet(path, delimiter=" ", header=True).numbers(1).tolist() == [2.0] * 5
