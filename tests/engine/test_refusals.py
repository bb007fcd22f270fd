"""Settings of a run that the check refuses, with one error per wrong key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import exp
from exp.errors import ConfigError

CASES = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
GAN = ["model=gan", "objective=[discriminator,generator]", "metrics=[]", "phases=[adversarial]"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case["errors"]))
def test_all_errors_of_a_config_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = GAN if case.get("model") == "gan" else []
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*common, *case["overrides"]]))
    found = {error.key: str(error) for error in caught.value.errors}
    for key, words in case["errors"].items():
        assert words in found.get(key, f"no error of {key}: {found}"), key
