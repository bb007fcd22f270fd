"""Files and commands of docs/how-to.md run, with results as good as those of simple models."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FILE = re.compile(r"^```(yaml|python) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^python -m exp\.train (.+)$", re.MULTILINE)
# Results of other models on the same samples, minus a margin for the small test splits. LogisticRegression of
# scikit-learn: 0.906, 0.996, 0.889, 0.983 and 0.740. Counts of pairs of tokens: 22.8. Ridge: 0.117. A constant: 0.148.
AT_LEAST = {
    "A table with missing values and words": ("accuracy/test", 0.86),
    "A loss and a metric of your own": ("top_two/test", 0.97),
    "Two heads": ("accuracy/test", 0.80),
    "Sequences of several lengths": ("accuracy/test", 0.94),
    "A rare class": ("accuracy/test", 0.68),
}
AT_MOST = {
    "Text in tokens": ("perplexity/test", 20.0),
    "A forecast": ("mae/test", 0.15),
    "Estimate uncertainty": ("loss/test", 0.14),
    "A loss that the network computes: a variational autoencoder": ("loss/test/reconstruction", 0.13),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files of the page and of docs/how_to_data.py."""
    place = tmp_path_factory.mktemp("how_to")
    for _, path, text in FILE.findall(PAGE):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    spec = importlib.util.spec_from_file_location("how_to_data", ROOT / "docs" / "how_to_data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        data.main()
        yield place


@pytest.mark.parametrize("title", SECTIONS)
def test_a_task_takes_few_lines(title: str) -> None:
    lines = {"yaml": 0, "python": 0}
    for kind, _, text in FILE.findall(SECTIONS[title]):
        lines[kind] += sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())
    assert lines["yaml"] <= 20
    assert lines["python"] <= 20
    assert COMMAND.findall(SECTIONS[title])


def run(commands: Any, folder: Path, title: str, *more: str) -> dict[str, float]:
    """Run the command of a section, and return the last values by tag."""
    (line,) = COMMAND.findall(SECTIONS[title])
    before = set(folder.glob("outputs/**/report.json"))
    done = commands.run(*shlex.split(line), "trainer.enable_progress_bar=false", *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    (report,) = set(folder.glob("outputs/**/report.json")) - before
    found: dict[str, float] = json.loads(report.read_text())["metrics"]
    print(title, found)
    return found


def test_every_section_is_run() -> None:
    others = {"Pictures in folders", "Another task for a trained body"}
    assert SECTIONS.keys() == AT_LEAST.keys() | AT_MOST.keys() | others


@pytest.mark.parametrize("title", [title if number == 0 else pytest.param(title, marks=pytest.mark.slow)
                                   for number, title in enumerate([*AT_LEAST, *AT_MOST])])  # fmt: skip
def test_the_result_of_a_section_is_good(title: str, commands: Any, folder: Path) -> None:
    if title == "Text in tokens":
        pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    found = run(commands, folder, title)
    if title in AT_LEAST:
        tag, bound = AT_LEAST[title]
        assert found[tag] >= bound
    else:
        tag, bound = AT_MOST[title]
        assert found[tag] <= bound


@pytest.mark.slow
def test_a_trained_body_helps_another_task(commands: Any, folder: Path) -> None:
    assert run(commands, folder, "Pictures in folders")["accuracy/test"] >= 0.89
    title = "Another task for a trained body"
    moved = run(commands, folder, title)["accuracy/test"]
    thawed = ("weights.from=null", "freeze.parameters=[]", "~freeze.unfreeze.0", "~freeze.unfreeze.30")
    fresh = run(commands, folder, title, *thawed)["accuracy/test"]
    assert moved > fresh + 0.01
