"""Errors about shapes and dtypes have the line of the YAML, the layer, its input, and the expected input.

Each document of shape_errors.yaml is a network of a user. Its first comments are data, overrides and parts of the
message. The wrong line ends in `# <-`.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.errors import ConfigError

HERE = Path(__file__).parent
DATA = """# Tensors of a user's own
defaults: [_loader, _self_]
dataset:
  _target_: own_tensors.Tensors
  values: {values}
  classes: {classes}
  numbers: 2
parts: {{train: 0.5, val: 0.25, test: 0.25}}
inputs: {inputs}
num_classes: {num_classes}
num_outputs: {num_outputs}
batch_size: 8
"""
# Data set: its inputs with shape and dtype. The targets of `number` are two numbers.
VALUES = {
    "row": {"input": ([4], "float32")},
    "number": {"input": ([4], "float32")},
    "image": {"input": ([3, 8, 8], "float32")},
    "text": {"input": ([16], "int64")},
    "double": {"input": ([4], "float64")},
    "mixed": {"image": ([3, 8, 8], "float32"), "words": ([16], "int64")},
}
SMALL = ("metrics=[]", "hooks=[]", "logger=[]", "test=false")


@dataclass(frozen=True)
class Wrong:
    """Document of shape_errors.yaml, with the line of the error in the written file, or None for any line."""

    name: str
    data: str
    words: list[str]
    overrides: list[str]
    text: str
    line: int | None


def documents() -> Iterator[Wrong]:
    for text in re.split(r"^---\n", (HERE / "shape_errors.yaml").read_text(), flags=re.MULTILINE):
        head = dict(re.findall(r"^# (data|says|overrides): (.*)$", text, flags=re.MULTILINE))
        marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(("# <-", "# <-'"))]
        yield Wrong(
            name=text.splitlines()[0].removeprefix("# "),
            data=head["data"],
            words=head["says"].split(" | "),
            overrides=head.get("overrides", "").split(),
            text=text,
            line=marked[0] if marked else None,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with all networks and data sets."""
    place = tmp_path_factory.mktemp("own")
    shutil.copy(HERE / "own_tensors.py", place)
    for group in ("data", "model"):
        (place / "conf" / group).mkdir(parents=True)
    for name, values in VALUES.items():
        classes, outputs = (0, 2) if name == "number" else (3, 3)
        text = DATA.format(
            values={key: list(value) for key, value in values.items()},
            classes=classes,
            inputs={key: {"shape": shape, "dtype": dtype} for key, (shape, dtype) in values.items()},
            num_classes=classes or "null",
            num_outputs=outputs,
        )
        (place / "conf/data" / f"{name}.yaml").write_text(text)
    for wrong in documents():
        (place / "conf/model" / f"{wrong.name}.yaml").write_text(wrong.text)
    return place


@pytest.fixture(autouse=True)
def _stand_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "own_tensors", raising=False)


def message_of(wrong: Wrong) -> str:
    objective = ["objective=[mse]"] if wrong.data == "number" and not wrong.overrides else []
    words = [f"model={wrong.name}", f"data={wrong.data}", *SMALL, *objective, *wrong.overrides]
    with pytest.raises(ConfigError) as refused:
        plan(resolve(exp.compose(words)))
    (error,) = refused.value.errors
    return str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=wrong.name, marks=() if place % 4 == 0 else pytest.mark.slow)
        for place, wrong in enumerate(documents())
    ],
)
def test_an_error_names_line_layer_and_values(wrong: Wrong) -> None:
    message = message_of(wrong)
    for words in wrong.words:
        assert words in message
    assert "; expected " in message
    if wrong.line is not None:
        assert re.search(rf"\[conf/model/{wrong.name}\.yaml, line {wrong.line}(, column \d+)?\]$", message), message
