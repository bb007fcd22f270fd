"""A strategy class of Lightning's own as the `_target_`, with exp's name for it beside its options."""

from __future__ import annotations

import pytest

import exp
from exp.errors import ConfigError

pytestmark = pytest.mark.numeric

SHORT = ("model=sequential", "optimizer=sgd", "trainer.max_epochs=null", "trainer.max_steps=10", "test=false")
MINE = """
# Lightning's own DDPStrategy: strategy=mine
_target_: lightning.pytorch.strategies.DDPStrategy
name: mine
find_unused_parameters: true
"""


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "conf" / "strategy"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(MINE.lstrip())


def test_two_ranks_of_it_train_as_one_process(ranks, mine):
    one = ranks.train(*SHORT, "strategy=single")
    two = ranks.train(*SHORT, "strategy=mine", ranks=2)
    assert two.report["strategy"] == "mine"
    assert two.losses == pytest.approx(one.losses, abs=1e-5)


@pytest.mark.any_processor
def test_one_rank_of_it_as_a_command(mine, tmp_path, commands):
    # Lightning's strategy asks for a process group even where it is alone in it.
    done = commands.run("strategy=mine", "launch.devices=1", "launch.accelerator=cpu", *SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_option_that_it_does_not_have_is_told(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"strategy\.find_unused: .* Did you mean strategy\.find_unused_parameters\?"):
        exp.validate(exp.compose(["strategy=mine", "+strategy.find_unused=true"]))
