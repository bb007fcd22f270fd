"""from_run=DIR: the config of a run that is there, what a command says otherwise, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from exp.check.plan import resolve
from exp.check.stages import compose
from exp.config.compose import composition_of
from exp.config.found_run import written
from exp.config.freeze import freeze, read_overrides
from exp.config.hydra_adapter import parse_override, task_overrides
from exp.errors import ConfigError, RunError
from exp.sweeps.executor import End
from exp.sweeps.sweep import compose_sweep, sweep

CUSTOM = """# A network of one's own: model=mine
_target_: exp.models.containers.SequentialModel
layers:
  flatten: {_target_: torch.nn.Flatten}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}", bias: %s}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def frozen(*overrides: str) -> Path:
    """The directory of a run, as it is when its training begins."""
    return freeze(resolve(compose(overrides)).config)


def config_of(run: Path) -> dict[str, object]:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.lr=3e-3", "model=lenet", "hooks=[memory]", "tags=[a,'b c']"),
        ("data=wine", "+precision=bf16", "metrics=[f1]", "seed=3", "name=n${seed}"),
        ("experiment=example", "~hooks.gradients", "+freeze.unfreeze={2: ['layers.*']}"),
        ("phases=body_and_head", "objective=[cross_entropy]", "trainer.max_epochs=3"),
    ],
)
def test_the_config_is_the_runs_but_for_what_is_said_otherwise(overrides, capsys):
    run = frozen(*overrides)
    again = frozen(f"from_run={run}")
    assert config_of(again) == config_of(run)
    assert read_overrides(again) == read_overrides(run)
    other = frozen(f"from_run={run}", "seed=9", "trainer.max_epochs=7")
    expected = config_of(run)
    expected["seed"] = 9
    expected["trainer"]["max_epochs"] = 7
    if "name=n${seed}" in overrides:
        expected["name"] = "n9"
    assert config_of(other) == expected
    assert capsys.readouterr().err == ""


def test_a_choice_of_this_command_takes_the_place_of_the_runs_and_what_is_added_is_added(capsys):
    run = frozen("model=mlp", "hooks=[memory]", "optimizer.lr=0.02")
    assert read_overrides(frozen(f"from_run={run}", "+hooks=throughput", "model=lenet")) == [
        "hooks=[memory]", "optimizer.lr=0.02", "+hooks=throughput", "model=lenet",
    ]  # fmt: skip
    assert list(config_of(frozen(f"from_run={run}", "+hooks=throughput"))["hooks"]) == ["memory", "throughput"]
    assert list(config_of(frozen(f"from_run={run}", "hooks=[gradients]"))["hooks"]) == ["gradients"]
    assert capsys.readouterr().err == ""


def test_a_value_that_a_file_has_changed_since_is_the_runs_and_told(folder, capsys):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "optimizer").mkdir()
    model, optimizer = folder / "conf" / "model" / "mine.yaml", folder / "conf" / "optimizer" / "own.yaml"
    model.write_text(CUSTOM % "true")
    optimizer.write_text("# Own: optimizer=own\n_target_: torch.optim.SGD\nlr: 0.1\nnesterov: true\nmomentum: 0.5\n")
    run = frozen("model=mine", "optimizer=own", "seed=4")
    model.write_text(CUSTOM % "false")
    optimizer.write_text("# Own: optimizer=own\n_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\ndampening: 0.1\n")
    again = config_of(frozen(f"from_run={run}"))
    assert again.pop("optimizer") == {**config_of(run)["optimizer"], "dampening": 0.1}
    assert again == {key: value for key, value in config_of(run).items() if key != "optimizer"}
    told = capsys.readouterr().err.splitlines()
    expected = "optimizer.nesterov=true, optimizer.momentum=0.5, model.layers.head.bias=true"
    assert told == [
        f"as in {run}, though the configs say otherwise today: {expected}",
        f"what {run} did not have, as it is today: optimizer.dampening=0.1",
    ]
    # What this command changes is not the run's any more.
    other = config_of(frozen(f"from_run={run}", "optimizer=sgd", "model.layers.head.bias=false"))
    assert "nesterov" not in other["optimizer"]
    assert other["model"]["layers"]["head"]["bias"] is False
    assert "optimizer.momentum" not in capsys.readouterr().err


def test_a_run_that_is_no_config_today_is_told_and_what_mends_it_is_taken(folder, capsys):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text(CUSTOM % "true")
    run = frozen("model=mine", "seed=4")
    (folder / "conf" / "model" / "mine.yaml").unlink()
    with pytest.raises(ConfigError, match="there is no option 'mine'"):
        frozen(f"from_run={run}")
    assert config_of(frozen(f"from_run={run}", "model=mlp"))["seed"] == 4
    assert f"{run} is no config today, so what has changed since is not known: model: " in capsys.readouterr().err


def test_where_a_run_began_and_its_sweep_are_left_out(folder):
    run = frozen("seed=1", "sweep.max_failures=3", "sweep.repeat_over=seed")
    # As a run that went on has them.
    (run / "overrides.yaml").write_text("- seed=1\n- resume=outputs/x.ckpt\n- sweep.max_failures=3\n")
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("resume: null", "resume: outputs/x.ckpt")
    )
    again = frozen(f"from_run={run}")
    assert read_overrides(again) == ["seed=1"]
    assert config_of(again)["resume"] is None
    assert config_of(again)["sweep"]["max_failures"] is None


def test_what_a_run_trusts_is_trusted_by_whoever_says_it_again(folder, monkeypatch):
    (folder / "nets.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(folder))
    own = ["security.allow=[nets]", "data=wine", "model={_target_: nets.Net, in_features: 13, out_features: 3}"]
    run = frozen(*own)
    with pytest.raises(ConfigError, match=r"security.allow: security.allow=\[nets\] in .*If you trust it, add 'secur"):
        frozen(f"from_run={run}", "seed=2")
    assert config_of(frozen(f"from_run={run}", own[0], "seed=2"))["model"] == config_of(run)["model"]


class Freezing:
    """Ends each job once it is frozen."""

    slots, stacks = 1, False

    def __init__(self):
        self.frozen, self._ends = [], []

    def start(self, work):
        (config,) = work.configs
        self.frozen.append(freeze(resolve(config).config))
        self._ends = [End(job=work.jobs[0], outcome=RunError("enough"))]

    def ends(self, timeout):
        ends, self._ends = self._ends, []
        return ends


def test_a_sweep_around_a_run_and_a_run_of_a_sweep(folder, capsys):
    run = frozen("model=mlp", "seed=7", "optimizer.lr=0.02")
    assert task_overrides(compose_sweep([f"from_run={run}", "seed=0,1,2"]).config) == [
        "model=mlp", "optimizer.lr=0.02", "seed=0,1,2",
    ]  # fmt: skip
    executor = Freezing()
    again = compose_sweep([f"from_run={run}", "seed=0,1"])
    assert sweep(again, executor=executor, check=lambda some: [None] * len(some)) == 1
    jobs = executor.frozen
    for seed, job in enumerate(jobs):
        assert config_of(job) == {**config_of(run), "seed": seed}
    assert config_of(frozen(f"from_run={jobs[1]}")) == config_of(jobs[1])
    assert "seed  " in capsys.readouterr().out.replace("┃", "  ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from_run=nope"], r"from_run: nope, which is not there; expected a run directory"),
        (["from_run=file"], r"from_run: file, which is a file; expected a run directory"),
        (["from_run=empty"], r"from_run: empty, which holds no config.yaml; expected a run directory"),
        (["from_run=half"], r"from_run: half, which holds no overrides.yaml"),
        (["from_run=wrong"], r"from_run: wrong, whose overrides.yaml is no list"),
        (["from_run=sweep"], r"from_run: sweep, a directory of 1 runs; .*Write from_run=sweep/0"),
        (["from_run=a,b"], r"from_run: from_run=a,b; expected one run. Sweep over what differs"),
        (["from_run=half", "from_run=half"], r"expected one run"),
        (["+from_run=half"], r"expected from_run=DIR"),
        (["from_run=3"], r"expected from_run=DIR"),
        (["from_run=a b=c"], r"from_run: a b=c; expected a run directory.*Quote it"),
    ],
)
def test_a_directory_that_is_no_run_is_a_fault(folder, words, message):
    (folder / "file").touch()
    for name in ("empty", "half", "wrong", "sweep/0"):
        (folder / name).mkdir(parents=True)
        if name != "empty":
            (folder / name / "config.yaml").write_text("seed: 1\n")
    (folder / "wrong" / "overrides.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=message):
        compose(words)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_a_run_whose_config_was_cut_is_refused(share):
    run = frozen("seed=1")
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    # Between two keys at the top, where what is left is YAML.
    tops = [place for place, line in enumerate(lines) if line[0].isalpha()]
    (run / "config.yaml").write_text("".join(lines[: tops[int(share * len(tops))]]))
    with pytest.raises(ConfigError, match=r"from_run: .*, whose config\.yaml has no .*: a part of it is lost"):
        compose([f"from_run={run}"])


def test_a_path_with_other_signs_is_quoted():
    run = frozen("seed=1", "hydra.run.dir='outputs/a b=c,[1]'")
    assert compose([f"from_run={written(str(run))}"]).seed == 1


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        -2.5e-7,
        1e300,
        True,
        None,
        "a b",
        "it's",
        "back\\slash\\",
        "true",
        "3",
        [1, [2.0, "x, y"]],
        {"a": {"b c": None}},
    ],
)
def test_a_value_is_written_so_that_hydra_reads_the_same(value):
    read = parse_override(f"key={written(value)}").value()
    assert json.dumps(read) == json.dumps(value)


def test_the_overrides_of_a_composition_are_the_whole_ones():
    run = frozen("seed=1")
    assert composition_of([f"from_run={run}", "seed=2"]).overrides == ("seed=2",)
