"""from_run=DIR uses the config of an earlier run with the overrides of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from exp.check.examination import examine
from exp.check.resolution import resolve
from exp.check.stages import compose
from exp.config import targets
from exp.config.found_run import override_value
from exp.config.freeze import freeze
from exp.config.frozen import read_overrides
from exp.config.grammar import parse_override
from exp.config.hydra_adapter import recorded_overrides
from exp.config.versions import DDP, as_before, with_present_keys
from exp.errors import ConfigError, RunError
from exp.extras.gallery import custom_functions
from exp.models.inference import lazy_class
from exp.sweeps.executor import End
from exp.sweeps.ledger import identity_of
from exp.sweeps.sweep import compose_sweep, sweep

CUSTOM = """# A user's network: model=mine
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
    """Freeze a config and return its run directory, without training."""
    return freeze(resolve(compose(overrides)).config)


def config_of(run: Path) -> dict[str, object]:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.parametrize(
    "overrides",
    [
        ("data=wine", "+precision=bf16", "hooks=[memory]", "tags=[a,'b c']", "seed=3", "name=n${seed}"),
        pytest.param(("experiment=example", "~hooks.gradients", "+freeze.unfreeze={2: ['*']}"), marks=pytest.mark.slow),
    ],
)
def test_a_config_from_a_run_equals_its_config(overrides, capsys):
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


def test_choices_replace_and_additions_add_to_the_run(capsys):
    run = frozen("model=mlp", "hooks=[memory]", "optimizer.lr=0.02")
    assert read_overrides(frozen(f"from_run={run}", "+hooks=throughput", "model=lenet")) == [
        "hooks=[memory]", "optimizer.lr=0.02", "+hooks=throughput", "model=lenet",
    ]  # fmt: skip
    assert list(config_of(frozen(f"from_run={run}", "+hooks=throughput"))["hooks"]) == ["memory", "throughput"]
    assert list(config_of(frozen(f"from_run={run}", "hooks=[gradients]"))["hooks"]) == ["gradients"]
    assert capsys.readouterr().err == ""


def test_values_of_a_changed_file_are_kept(folder, capsys):
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
    printed = capsys.readouterr().err.splitlines()
    expected = "optimizer.nesterov=true, optimizer.momentum=0.5, model.layers.head.bias=true"
    assert printed == [f"values of {run} replace other values of the present files: {expected}"]
    # Overrides of this command take precedence.
    other = config_of(frozen(f"from_run={run}", "optimizer=sgd", "model.layers.head.bias=false"))
    assert "nesterov" not in other["optimizer"]
    assert other["model"]["layers"]["head"]["bias"] is False
    assert "optimizer.momentum" not in capsys.readouterr().err


def test_removed_keys_and_hooks_of_a_run_are_left_out(capsys):
    run = frozen("seed=4")
    content = config_of(run)
    content["runtime"] |= {"warm": False, "non_finite": "rewind"}
    content["hooks"]["landscape"] = {"_target_": "exp.hooks.landscape.Landscape", "every_n_steps": 20}
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    (run / "overrides.yaml").write_text(
        "- runtime.warm=false\n- runtime.non_finite=rewind\n"
        "- +hooks=[landscape]\n- hooks.landscape.points=5\n- seed=4\n"
    )
    again = frozen(f"from_run={run}")
    assert read_overrides(again) == ["seed=4"]
    assert config_of(again) == config_of(frozen("seed=4"))
    assert capsys.readouterr().err == ""


def test_earlier_names_of_moved_classes_are_read():
    run = frozen("+hooks=[profile,retain_gradients]")
    content = (run / "config.yaml").read_text()
    earlier = content.replace("exp.extras.debugging.", "exp.hooks.").replace("exp.extras.research.", "exp.hooks.")
    assert earlier.count("exp.hooks.profile.Profile") == 1
    (run / "config.yaml").write_text(earlier)
    assert config_of(frozen(f"from_run={run}")) == yaml.safe_load(content)
    named = frozen("+hooks.mine={_target_: exp.hooks.retain_gradients.RetainGradients}", "hooks.mine.modules=[head]")
    assert config_of(named)["hooks"]["mine"]["modules"] == ["head"]


def test_earlier_layers_functions_and_values_of_a_frozen_config_are_read():
    elementary = "exp.functions.elementary"
    layers = {name: {"_target_": f"exp.models.layers.{name}"} for name in ("Exp", "Cube", "Linear")}
    content = {"model": {"functions": {"cube": f"{elementary}.Cube"}, "layers": layers}}
    found = with_present_keys({**content, "runtime": {"non_finite": "rewind", "max_rewinds": 3}})
    assert found["runtime"] == {"non_finite": "stop", "compile_mode": None}
    assert targets.resolve_function(found["model"]["functions"]["cube"]) is custom_functions.Cube
    kinds = {name: targets.resolve(layer["_target_"]) for name, layer in found["model"]["layers"].items()}
    assert [kinds["Exp"], kinds["Cube"]] == [custom_functions.ExpLayer, custom_functions.CubeLayer]
    made = lazy_class(kinds["Linear"], {"out_features"})(out_features=2)
    made(torch.zeros(1, 3))
    assert (type(made), made.in_features) == (custom_functions.LinearLayer, 3)
    assert as_before(found)["model"]["functions"] == content["model"]["functions"]


@pytest.mark.parametrize(
    ("name", "value", "now"),
    [
        ("inner", "layer_split", "exp.extras.gallery.split_ddp.SplitDDP"),
        ("communication_hook", "ring", "exp.extras.gallery.ring_all_reduce.RingDDP"),
    ],
)
def test_a_value_that_is_a_class_now_chooses_the_class(name, value, now):
    run = frozen("strategy=ddp")
    content = config_of(run)
    content["strategy"][name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    (run / "overrides.yaml").write_text(f"- strategy=ddp\n- strategy.{name}={value}\n")
    found = with_present_keys(content)
    assert found["strategy"] == {**config_of(frozen("strategy=ddp"))["strategy"], "_target_": now}
    assert config_of(frozen(f"from_run={run}"))["strategy"] == found["strategy"]
    assert identity_of(found) == identity_of(content)
    assert identity_of(found) != identity_of({**content, "strategy": {**found["strategy"], "_target_": DDP}})


def test_a_job_has_the_identity_that_it_had_with_removed_parameters():
    now = config_of(frozen("data=hf", "data.dataset.path=folder", "data.dataset.target=kind"))
    before = {**now, "data": {**now["data"], "dataset": {**now["data"]["dataset"], "files": None}}}
    assert as_before(now) == as_before(before)
    assert as_before(now)["data"]["dataset"]["files"] is None


@pytest.mark.parametrize(
    ("target", "parameter", "harmless", "others"),
    [
        ("exp.strategies.ddp.DDP", "powersgd", [{"_target_": "exp.strategies.ddp.PowerSGD"}], [{"rank": 4}]),
        ("exp.strategies.fsdp.FSDP", "no_sync", [False], [True]),
        ("exp.strategies.tensor_parallel.TensorParallel", "sequence", [False, True], []),
        ("exp.strategies.hybrid.Hybrid", "sequence", [False, True], []),
        ("exp.engine.range_test.RangeTest", "stop_factor", [4.0, 4], [None, 8.0]),
        ("exp.data.hf.HuggingFace", "files", [None], ["*.csv"]),
        ("exp.hooks.gradient_reversal.GradientReversal", "steepness", [10.0], [5.0]),
    ],
)
def test_only_harmless_values_of_removed_parameters_are_dropped(target, parameter, harmless, others):
    for value in (*harmless, *others):
        found = with_present_keys({"some": {"node": {"_target_": target, parameter: value}}})["some"]["node"]
        assert found.get(parameter, "dropped") == ("dropped" if value in harmless else value)


@pytest.mark.parametrize("value", [False, True])
def test_a_removed_value_that_changes_the_run_is_an_error(value):
    run = frozen("strategy=fsdp")
    content = config_of(run)
    content["strategy"]["no_sync"] = value
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    (run / "overrides.yaml").write_text(f"- strategy=fsdp\n- +strategy.no_sync={str(value).lower()}\n")
    errors = examine(resolve(compose([f"from_run={run}"]))).errors
    assert [error.key for error in errors] == ["strategy.no_sync"] * value
    assert all("Leave strategy.no_sync out" in str(error) for error in errors)


def test_a_run_with_a_removed_option_is_reported(folder, capsys):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text(CUSTOM % "true")
    run = frozen("model=mine", "seed=4")
    (folder / "conf" / "model" / "mine.yaml").unlink()
    with pytest.raises(ConfigError, match="there is no option 'mine'"):
        frozen(f"from_run={run}")
    assert config_of(frozen(f"from_run={run}", "model=mlp"))["seed"] == 4
    assert f"The config of {run} cannot be compared with the present files: model: " in capsys.readouterr().err


def test_resume_and_sweep_of_the_run_are_dropped(folder):
    run = frozen("seed=1", "sweep.max_failures=3", "sweep.repeat_over=seed")
    # A resumed run has these overrides.
    (run / "overrides.yaml").write_text("- seed=1\n- resume=outputs/x.ckpt\n- sweep.max_failures=3\n")
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("resume: null", "resume: outputs/x.ckpt")
    )
    again = frozen(f"from_run={run}")
    assert read_overrides(again) == ["seed=1"]
    assert config_of(again)["resume"] is None
    assert config_of(again)["sweep"]["max_failures"] is None


def test_the_allow_list_must_be_repeated(folder, monkeypatch):
    (folder / "nets.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(folder))
    own = ["security.allow=[nets]", "data=wine", "model={_target_: nets.Net, in_features: 13, out_features: 3}"]
    run = frozen(*own)
    with pytest.raises(ConfigError, match=r"security.allow: security.allow=\[nets\] in .*If you trust the packages"):
        frozen(f"from_run={run}", "seed=2")
    assert config_of(frozen(f"from_run={run}", own[0], "seed=2"))["model"] == config_of(run)["model"]


class Freezing:
    """Executor that freezes each job and does not train."""

    slots, stacks = 1, False

    def __init__(self):
        self.frozen, self._ends = [], []

    def start(self, jobs):
        (job,) = jobs
        self.frozen.append(freeze(resolve(job.new_config()).config))
        self._ends = [End(job=job.number, outcome=RunError("enough"))]

    def ends(self, timeout):
        ends, self._ends = self._ends, []
        return ends


def test_a_sweep_may_start_from_a_run(folder):
    run = frozen("model=mlp", "seed=7", "optimizer.lr=0.02")
    assert recorded_overrides(compose_sweep([f"from_run={run}", "seed=0,1,2"]).config) == [
        "model=mlp", "optimizer.lr=0.02", "seed=0,1,2",
    ]  # fmt: skip
    executor = Freezing()
    again = compose_sweep([f"from_run={run}", "seed=0,1"])
    assert sweep(again, executor=executor, check=lambda some: [None] * len(some)) == 1
    jobs = executor.frozen
    for seed, job in enumerate(jobs):
        assert config_of(job) == {**config_of(run), "seed": seed}
    assert config_of(frozen(f"from_run={jobs[1]}")) == config_of(jobs[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from_run=nope"], r"from_run: nope, which has no config.yaml; expected a run directory"),
        (["from_run=file"], r"from_run: file, which has no config.yaml; expected a run directory"),
        (["from_run=empty"], r"from_run: empty, which has no config.yaml; expected a run directory"),
        (["from_run=half"], r"from_run: half, which has no overrides.yaml"),
        (["from_run=sweep"], r"from_run: sweep, which has no config.yaml"),
        (["from_run=a,b"], r"from_run: from_run=a,b; expected one run. For several runs, sweep"),
        (["+from_run=half"], r"expected from_run=DIR"),
        (["from_run=a b=c"], r"from_run: .*a b=c.* cannot be read"),
    ],
)
def test_a_directory_without_a_run_is_an_error(folder, words, message):
    (folder / "file").touch()
    for name in ("empty", "half", "sweep/0"):
        (folder / name).mkdir(parents=True)
        if name != "empty":
            (folder / name / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=message):
        compose(words)


VALUES = [1e300, True, None, "it's", "back\\slash\\", "true", "3", [1, [2.0, "x, y"]], {"a": {"b c": None}}]


@pytest.mark.parametrize("value", VALUES)
def test_hydra_reads_a_written_value_back(value):
    read = parse_override(f"key={override_value(value)}").value()
    assert json.dumps(read) == json.dumps(value)


def test_a_path_with_special_characters_is_quoted():
    run = frozen("seed=1", "hydra.run.dir='outputs/a b=c,[1]'")
    assert compose([f"from_run={override_value(str(run))}"]).seed == 1
