"""What a term needs and cannot have is said before training."""

from __future__ import annotations

from pathlib import Path

import pytest

import exp
from exp.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=gan", "objective=[wgan_gp]", "metrics=[]", "objective.wgan_gp.critic=discriminatr"],
            r"objective\.wgan_gp: the part 'discriminatr' of the network, which is not there; .*mean discriminator",
        ),
        (
            ["+objective=wgan_gp"],
            r"objective\.wgan_gp: the part 'discriminator' of the network, which is not there; expected one of flatten",
        ),
        (
            ["data=text", "+objective=r1"],
            r"objective\.r1\.input: input, which is int64: whole numbers have no gradient; .*embedding by a name",
        ),
        (
            ["+objective=jacobian", "objective.jacobian.precision=full", "precision=bf16_true"],
            r"objective\.jacobian\.precision: full with precision=bf16_true.*Write precision=bf16",
        ),
        (
            ["+objective=r1", "objective.r1.precision=half"],
            r"objective\.r1\.precision: 'half'; expected one of step, full",
        ),
    ],
)
def test_a_term_that_cannot_have_what_it_needs(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        exp.validate(exp.compose(words))
