"""A config that trains badly has a note in its plan, and the options of exp have no notes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

import exp
from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.errors import is_installed

CONF = Path(exp.__file__).parent / "conf"
TABLES = yaml.safe_load(Path(__file__).with_name("notes.yaml").read_text())


def notes(*overrides: str) -> tuple[str, ...]:
    return examine(resolve(exp.compose(overrides))).notes


@pytest.mark.parametrize(("overrides", "words"), [(overrides, words) for overrides, *words in TABLES["notes"]])
def test_a_note_names_its_fix(overrides: str, words: list[str]) -> None:
    found = notes(*overrides.split("; "))
    assert len([note for note in found if all(word in note for word in words)]) == 1, found


# gpt, gan and domain_adversarial need other data or terms. The plan of parameter_dict notes an untrained matrix.
MODELS = {path.stem for path in (CONF / "model").glob("*.yaml")} - {"gpt", "gan", "domain_adversarial"}
EXPERIMENTS = {path.stem for path in (CONF / "experiment").glob("*.yaml")} - {"parameter_dict"}
if not is_installed("tokenizers"):
    EXPERIMENTS -= {"tokenized_text"}
MORE_HEALTHY = [
    *([f"model={name}"] for name in sorted(MODELS)),
    *([f"experiment={name}"] for name in sorted(EXPERIMENTS)),
    *([f"scheduler={path.stem}"] for path in sorted((CONF / "scheduler").glob("*.yaml"))),
    *(overrides.split("; ") for overrides in TABLES["more_healthy"]),
]


@pytest.mark.parametrize("overrides", TABLES["healthy"])
def test_a_healthy_config_has_no_note(overrides: str) -> None:
    assert notes(*overrides.split("; ")) == ()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MORE_HEALTHY, ids=" ".join)
def test_no_option_of_exp_has_a_note(overrides: list[str]) -> None:
    assert notes(*overrides) == ()


@pytest.mark.parametrize(
    "overrides",
    [
        "data=diabetes precision=bf16_true",
        pytest.param("data=digits model=resnet", marks=pytest.mark.slow),
        pytest.param("data=breast_cancer scheduler=cosine", marks=pytest.mark.slow),
        pytest.param("experiment=gan", marks=pytest.mark.slow),
        pytest.param("experiment=domain_adversarial", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_logs_no_warning(
    overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, logger="exp"):
        exp.fit(exp.compose([*overrides.split(), "trainer.max_epochs=1", "hooks=[]", "logger=[]", "test=false"]))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("exp")] == []


def test_the_log_of_a_run_has_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probabilities = "+model.layers.last={_target_: torch.nn.Softmax, dim: -1}"
    exp.fit(exp.compose([probabilities, "trainer.max_steps=1", "hooks=[]", "logger=[]", "test=false"]))
    (path,) = tmp_path.glob("outputs/**/train.log")
    assert path.read_text().count("model.layers.last is a Softmax") == 1
