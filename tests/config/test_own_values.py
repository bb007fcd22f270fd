"""A user's config folder with custom values, groups and resolver functions."""

import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import exp
from exp.check.examination import examine, plan
from exp.check.plan import read_resolved
from exp.check.resolution import resolve
from exp.check.stages import early_errors
from exp.cli.check import main as check
from exp.config.freeze import freeze
from exp.sweeps.sweep import compose_sweep

MODULE = """
    ran = []


    def half(number):
        ran.append(number)
        return number // 2


    def fails(number):
        raise ValueError("no such number")


    class Net:
        pass
"""
FILES = {
    "mine.py": MODULE,
    "conf/paths/default.yaml": "# Where things are: - /paths: default\nroot: here\n",
    "conf/paths/cluster.yaml": "# On the cluster: paths=cluster\nroot: there\n",
    "conf/experiment/own.yaml": """
        # Values, a group and a function of the user: experiment=own
        # @package _global_
        defaults:
          - /paths: default
          - _self_
        name: ${paths.root}
        vars: {width: 48}
        resolvers: {half: mine.half}
        model: {layers: {hidden: {out_features: "${half:${vars.width}}"}}}
    """,
    "conf/objective/smooth.yaml": "_target_: torch.nn.CrossEntropyLoss\nlabel_smoothing: 0.1\n",
    "conf/callbacks/early.yaml": (
        "_target_: lightning.pytorch.callbacks.EarlyStopping\nmonitor: loss/val\npatience: 7\n"
    ),
    "conf/phases/all.yaml": "terms: [cross_entropy]\nparameters: '*'\n",
    "conf/small.yaml": "defaults:\n  - train\n  - override model: mlp\n  - _self_\nname: small\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine", None)


def refused(*overrides):
    try:
        config = exp.compose(list(overrides))
        errors = early_errors(config) or examine(resolve(config)).errors
    except exp.ConfigError as error:
        errors = error.errors
    assert errors, overrides
    return {error.key: error for error in errors}


def width(*overrides):
    return exp.compose(list(overrides)).model.layers.hidden.out_features


def test_values_below_vars_are_interpolated(place):
    assert width("experiment=own") == 24
    assert width("experiment=own", "vars.width=100") == 50
    assert width("+vars.width=32", "model.layers.hidden.out_features=${vars.width}") == 32
    found = refused("vars.width=32")["vars.width"]
    assert found.fix == "To add the key, write +vars.width=32"
    # A node in vars is checked only if another key refers to it.
    assert check(["+vars.layer={_target_: torch.nn.Nope}"]) == 0
    assert "Did you mean" in refused("+vars.layer={_target_: torch.nn.Tanhh}", "model.layers.activation=${vars.layer}")[
        "model.layers.activation._target_"
    ].fix  # fmt: skip


def test_a_user_group_owns_its_node(place):
    assert exp.compose(["experiment=own"]).name == "here"
    assert exp.compose(["experiment=own", "paths=cluster"]).name == "there"
    assert exp.compose(["experiment=own", "paths.root=else"]).name == "else"
    assert exp.compose(["+paths=cluster", "name=${paths.root}"]).name == "there"
    directory = freeze(plan(resolve(exp.compose(["experiment=own"]))).resolved.config)
    kept = OmegaConf.load(directory / "config.yaml")
    assert (kept.paths.root, kept.vars.width, kept.model.layers.hidden.out_features) == ("here", 48, 24)
    assert read_resolved(directory).plain["model"]["layers"]["hidden"]["out_features"] == 24
    assert check([f"from_run={directory}", "seed=3"]) == 0


def test_a_user_key_at_the_top_is_refused(place):
    Path("conf/experiment/more.yaml").write_text("# @package _global_\naddress: {port: 80}\n")
    assert refused("experiment=more")["address"].fix == "Move the key below vars, and refer to it as ${vars.address}"
    assert refused("+address.port=80")["address.port"].fix == "To add a value of your own, write +vars.address.port=80"


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("paths=default", "paths", "Write +paths=default"),
        ("+paths=defalt", "paths", "Did you mean default?"),
        ("+path=default", "path", "Did you mean paths?"),
        ("experiment=own +paths=cluster", "paths", "Write paths=NAME, without the +"),
    ],
)
def test_a_misspelled_user_group_suggests_a_fix(place, override, key, fix):
    assert refused(*override.split())[key].fix == fix


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("os.system", "outside the allowed packages"),
        ("mine.halff", "does not exist"),
        ("mine.Net", "not a function of yours"),
        ("mine", "'mine'"),
    ],
)
def test_the_function_of_a_resolver_is_checked(place, entry, says):
    found = refused(f"+resolvers.mine={entry}", "model.layers.hidden.out_features=${mine:64}")
    assert list(found) == ["resolvers.mine"]
    assert says in found["resolvers.mine"].got
    assert ("mine" in sys.modules) == entry.startswith("mine.")


def test_a_resolver_belongs_to_its_config(place):
    exp.compose(["experiment=own", "model.layers.hidden.out_features=8"])
    assert "mine" not in sys.modules
    assert width("experiment=own") == 24
    assert sys.modules["mine"].ran == [48]
    # Another config has no such resolver.
    assert "half" in refused("model.layers.hidden.out_features=${half:64}")["model.layers.hidden.out_features"].expected
    assert refused("+resolvers.now=mine.half")["resolvers.now"].fix == "Write resolvers.my_now"
    assert "no such number" in refused("+resolvers.x=mine.fails", "seed=${x:3}")["seed"].expected
    # A YAML file may not allow the package of a resolver; only the command line may.
    Path("conf/experiment/opens.yaml").write_text(
        "# @package _global_\nsecurity: {allow: [shutil]}\nresolvers: {x: shutil.rmtree}\ndata_dir: ${x:conf}\n"
    )
    assert set(refused("experiment=opens")) >= {"security.allow", "resolvers.x"}
    assert Path("conf").is_dir()


def test_a_resolver_gives_one_value_per_config(place):
    with Path("mine.py").open("a") as file:
        file.write("\n\ndef drawn(*words):\n    ran.append(words)\n    return len(ran)\n")
    resolvers = "+resolvers={drawn: mine.drawn, half: mine.half}"
    first = exp.compose([resolvers, "seed=${drawn:}", "+vars={a: 8}", "name=${drawn:[1,2]}"])
    exp.compose(["seed=3"])
    resolved = resolve(first)
    directory = freeze(plan(resolved).resolved.config)
    kept = OmegaConf.load(directory / "config.yaml")
    assert kept.seed == resolved.plain["seed"] == first.seed == read_resolved(directory).plain["seed"]
    assert kept.name == first.name != kept.seed
    # The resolver runs again for other arguments and for another config.
    first.vars.a = 6
    first.data.batch_size = "${half:${vars.a}}"
    assert (first.data.batch_size, first.seed) == (3, kept.seed)
    assert exp.compose([resolvers, "seed=${drawn:}"]).seed not in (kept.seed, kept.name)


def test_an_interpolated_accelerator_is_checked(place):
    assert "launch.accelerator" in refused("launch.accelerator=${oc.env:NOPE}")
    assert "resolvers.half" in refused("+resolvers={half: os.system}", "launch.accelerator=${half:4}")
    exp.compose(["+resolvers={half: mine.half}", "launch.accelerator=${half:4}"])
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=${nope}", "seed"), ("seed=abc", "seed"), ("mode=${oc.env:NOPE}", "mode"),
        ("+resolvers={half: os.system}; seed=${half:4}", "resolvers.half"),
    ],
)  # fmt: skip
def test_a_sweep_reports_errors_before_its_jobs(place, override, key):
    with pytest.raises(exp.ConfigError) as caught:
        compose_sweep([*override.split("; "), "optimizer.lr=0.1,0.2"])
    assert [error.key for error in caught.value.errors] == [key]


def test_a_flat_option_is_named_by_its_file(place):
    config = exp.compose(["objective=[smooth]", "+callbacks=early", "objective.smooth.label_smoothing=0.2"])
    assert config.objective.smooth.label_smoothing == 0.2
    assert config.callbacks.early.patience == 7
    assert check(["objective=[smooth]", "+callbacks=early"]) == 0
    assert check(["phases=[all]"]) == 0
    assert refused("+callbacks=early", "~callbacks.early", "+callbacks.early={_target_: mine.Nope}")
    Path("conf/hooks").mkdir()
    Path("conf/hooks/bye.yaml").write_text("# Flat\n_target_: exp.hooks.memory.Memory\nevery_n_step: 3\n")
    error = refused("+hooks=bye")["hooks.bye.every_n_step"]
    assert error.source == "conf/hooks/bye.yaml, line 3"


def test_an_option_can_be_placed_elsewhere(place):
    config = exp.compose(["+model@vars.teacher=mlp", "model=lenet"])
    assert config.vars.teacher.layers.stem.out_features == config.vars.teacher.constants.width
    assert check(["+model@model.layers.extra=mlp"]) == 0
    assert refused("+model@teacher=mlp")["teacher"].fix.startswith("Move the key below vars, ")
    assert refused("model@vars.teacher=mlp")["model@vars.teacher"].fix == "Write +model@vars.teacher=mlp"
    assert "data.extra" in refused("+data@data.extra=wine")


def test_an_objective_in_data_suggests_a_fix(place):
    Path("conf/data").mkdir()
    Path("conf/data/mine.yaml").write_text("# Mine\ndefaults:\n  - digits\n  - override /objective: [mse]\n")
    (error,) = refused("data=mine").values()
    assert "`# @package _global_`" in error.fix
    assert error.source.endswith("data/mine.yaml")
    own = "# Mine\n# @package _global_\ndefaults:\n  - /data/digits@data\n  - override /objective: [cross_entropy]\n"
    Path("conf/data/mine.yaml").write_text(f"{own}  - _self_\ndata: {{batch_size: 8}}\n")
    assert exp.compose(["data=mine"]).data.batch_size == 8


def test_a_user_primary_config_extends_that_of_exp(place, capsys):
    assert check(["-cn", "small", "seed=3", "optimizer=sgd"]) == 0
    for name in ("small", "small.yaml"):
        assert exp.compose(["seed=3"], config_name=name).name == "small"
    assert check(["-cn", "smal"]) == 2
    assert "Write conf/smal.yaml, with defaults: [train, _self_]" in capsys.readouterr().err


def test_parameters_of_a_user_class_are_accepted(place):
    """Other frameworks use train_val_test_split and pretrained, which exp refuses elsewhere."""
    Path("keeping.py").write_text(
        "from lightning.pytorch import LightningDataModule\nfrom torch import nn\n\n\n"
        "class Data(LightningDataModule):\n    def __init__(self, train_val_test_split=0.1):\n"
        "        super().__init__()\n\n\n"
        "class Net(nn.Module):\n    def __init__(self, pretrained=False):\n        super().__init__()\n"
    )
    for name, text in {"data/mydm": "_target_: keeping.Data\n", "model/mynet": "_target_: keeping.Net\n"}.items():
        Path("conf", name).parent.mkdir(exist_ok=True)
        Path("conf", f"{name}.yaml").write_text(text)
    config = exp.compose(["model=mynet", "data=mydm", "data.train_val_test_split=0.2", "model.pretrained=true"])
    assert (config.data.train_val_test_split, config.model.pretrained) == (0.2, True)
    assert "Write 'data.parts=" in refused("data.train_val_test_split=0.2")["data.train_val_test_split"].fix
    assert refused("model=mynet", "model.lr=0.2")["model.lr"].fix == "Write optimizer.lr=0.2"
    sys.modules.pop("keeping", None)
