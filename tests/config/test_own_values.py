"""What a config folder of one's own may hold beside options of exp's groups: values, groups, functions."""

import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import exp
from exp.check.__main__ import main as check
from exp.check.plan import examine, frozen, plan, resolve
from exp.check.stages import early_faults
from exp.config.compose import composition_of
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
        # Values, a group and a function of one's own: experiment=own
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
        faults = early_faults(config) or examine(resolve(config)).faults
    except exp.ConfigError as error:
        faults = error.faults
    assert faults, overrides
    return {fault.key: fault for fault in faults}


def width(*overrides):
    return exp.compose(list(overrides)).model.layers.hidden.out_features


def test_values_of_ones_own_are_there_for_interpolations_and_change_with_or_without_a_plus(place):
    assert width("experiment=own") == 24
    assert width("experiment=own", "vars.width=100") == 50
    assert width("+vars.width=32", "model.layers.hidden.out_features=${vars.width}") == 32
    told = refused("vars.width=32")["vars.width"]
    assert told.cure == "To add it, write +vars.width=32"
    # A node among them is looked at where something refers to it.
    assert check(["'+vars.layer={_target_: torch.nn.Nope}'".strip("'")]) == 0
    assert "Did you mean" in refused("+vars.layer={_target_: torch.nn.Tanhh}", "model.layers.activation=${vars.layer}")[
        "model.layers.activation._target_"
    ].cure  # fmt: skip


def test_a_group_of_ones_own_owns_the_node_of_its_name_and_its_values_are_frozen(place):
    assert exp.compose(["experiment=own"]).name == "here"
    assert exp.compose(["experiment=own", "paths=cluster"]).name == "there"
    assert exp.compose(["experiment=own", "paths.root=else"]).name == "else"
    assert exp.compose(["+paths=cluster", "name=${paths.root}"]).name == "there"
    directory = freeze(plan(resolve(exp.compose(["experiment=own"]))).resolved.config)
    kept = OmegaConf.load(directory / "config.yaml")
    assert (kept.paths.root, kept.vars.width, kept.model.layers.hidden.out_features) == ("here", 48, 24)
    assert frozen(directory).plain["model"]["layers"]["hidden"]["out_features"] == 24
    assert check([f"from_run={directory}", "seed=3"]) == 0


def test_a_key_of_ones_own_at_the_top_is_told_where_it_belongs(place):
    Path("conf/experiment/more.yaml").write_text("# @package _global_\naddress: {port: 80}\n")
    assert refused("experiment=more")["address"].cure == "Put it below vars, and refer to it as ${vars.address}"
    assert refused("+address.port=80")["address.port"].cure == "A value of your own is +vars.address.port=80"


@pytest.mark.parametrize(
    ("override", "key", "cure"),
    [
        ("paths=default", "paths", "Write +paths=default"),
        ("+paths=defalt", "paths", "Did you mean default?"),
        ("+path=default", "path", "Did you mean paths?"),
        ("experiment=own +paths=cluster", "paths", "Write paths=cluster"),
    ],
)
def test_a_group_of_ones_own_is_chosen_as_hydra_has_it(place, override, key, cure):
    assert refused(*override.split())[key].cure == cure


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("os.system", "outside the allowed packages"),
        ("mine.halff", "not there"),
        ("mine.Net", "no function of yours"),
        ("torch.nn.functional.relu", "no function of yours"),
        ("mine", "'mine'"),
    ],
)
def test_the_function_of_a_resolver_passes_the_wall_and_its_fault_is_told_once(place, entry, says):
    found = refused(f"+resolvers.mine={entry}", "'model.layers.hidden.out_features=${mine:64}'".strip("'"))
    assert list(found) == ["resolvers.mine"]
    assert says in found["resolvers.mine"].got
    assert ("mine" in sys.modules) == entry.startswith("mine.")


def test_a_resolver_runs_nothing_before_its_name_is_looked_at_and_ends_with_its_config(place):
    exp.compose(["experiment=own", "model.layers.hidden.out_features=8"])
    assert "mine" not in sys.modules
    assert width("experiment=own") == 24
    assert sys.modules["mine"].ran == [48]
    # Of another config that names none it is unknown.
    assert "half" in refused("model.layers.hidden.out_features=${half:64}")["model.layers.hidden.out_features"].expected
    assert refused("+resolvers.now=mine.half")["resolvers.now"].cure == "Write resolvers.my_now"
    assert "no such number" in refused("+resolvers.x=mine.fails", "seed=${x:3}")["seed"].expected
    # One that came with a config may not open the wall for itself.
    Path("conf/experiment/opens.yaml").write_text(
        "# @package _global_\nsecurity: {allow: [shutil]}\nresolvers: {x: shutil.rmtree}\ndata_dir: ${x:conf}\n"
    )
    assert set(refused("experiment=opens")) >= {"security.allow", "resolvers.x"}
    assert Path("conf").is_dir()


def test_two_configs_of_one_process_have_their_own_resolvers(place):
    Path("other.py").write_text("def half(number):\n    return 8\n")
    first = exp.compose(["+resolvers.half=mine.half", "model.layers.hidden.out_features=${half:64}"])
    second = exp.compose(["+resolvers.half=other.half", "model.layers.hidden.out_features=${half:64}"])
    found = [resolve(one).plain["model"]["layers"]["hidden"]["out_features"] for one in (first, second, first)]
    assert found == [32, 8, 32]
    sys.modules.pop("other", None)


def test_a_resolver_gives_all_who_read_a_config_one_value_whatever_is_composed_beside(place):
    with Path("mine.py").open("a") as file:
        file.write("\n\ndef drawn(*words):\n    ran.append(words)\n    return len(ran)\n")
    resolvers = "+resolvers={drawn: mine.drawn, half: mine.half}"
    first = exp.compose([resolvers, "seed=${drawn:}", "+vars={a: 8}", "name=${drawn:[1,2]}"])
    exp.compose(["seed=3"])
    resolved = resolve(first)
    directory = freeze(plan(resolved).resolved.config)
    kept = OmegaConf.load(directory / "config.yaml")
    assert kept.seed == resolved.plain["seed"] == first.seed == frozen(directory).plain["seed"]
    assert kept.name == first.name != kept.seed
    # Of other arguments it is asked anew, and of another config.
    first.vars.a = 6
    first.data.batch_size = "${half:${vars.a}}"
    assert (first.data.batch_size, first.seed) == (3, kept.seed)
    assert exp.compose([resolvers, "seed=${drawn:}"]).seed not in (kept.seed, kept.name)


def test_an_accelerator_that_is_an_interpolation_is_looked_at_by_the_check(place, monkeypatch):
    for text, key in [
        ("launch.accelerator=${oc.env:NOPE}", "launch.accelerator"),
        ("launch.accelerator=${nope}", "launch.accelerator"),
        ("launch=${nope}", "launch"),
        ("+resolvers={half: os.system} launch.accelerator=${half:4}", "resolvers.half"),
    ]:
        *others, last = text.rsplit(" ", 1)
        assert key in refused(*others, last), text
    exp.compose(["+resolvers={half: mine.half}", "launch.accelerator=${half:4}"])
    assert "mine" not in sys.modules
    monkeypatch.setenv("KIND", "gpu")
    config = exp.compose(["launch.accelerator=${oc.env:KIND}"])
    assert early_faults(config) == []
    assert resolve(config).config.launch.accelerator == exp.compose(["launch.accelerator=gpu"]).launch.accelerator


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=${nope}", "seed"), ("seed=abc", "seed"), ("monitor=${nope}", "monitor"), ("mode=${oc.env:NOPE}", "mode"),
        ("+resolvers={half: os.system}; seed=${half:4}", "resolvers.half"),
    ],
)  # fmt: skip
def test_what_a_sweep_reads_before_its_jobs_is_told_as_in_a_run(place, override, key):
    with pytest.raises(exp.ConfigError) as caught:
        compose_sweep([*override.split("; "), "optimizer.lr=0.1,0.2"])
    assert [fault.key for fault in caught.value.faults] == [key]


def test_an_option_of_a_group_of_many_that_is_written_flat_is_taken_under_its_files_name(place):
    config = exp.compose(["objective=[smooth]", "+callbacks=early", "objective.smooth.label_smoothing=0.2"])
    assert config.objective.smooth.label_smoothing == 0.2
    assert config.callbacks.early.patience == 7
    assert check(["objective=[smooth]", "+callbacks=early"]) == 0
    assert check(["phases=[all]"]) == 0
    # Its faults have its file and line.
    assert refused("+callbacks=early", "~callbacks.early", "+callbacks.early={_target_: mine.Nope}")
    Path("conf/hooks").mkdir()
    Path("conf/hooks/bye.yaml").write_text("# Flat\n_target_: exp.hooks.memory.Memory\nevery_n_step: 3\n")
    fault = refused("+hooks=bye")["hooks.bye.every_n_step"]
    assert fault.source == "conf/hooks/bye.yaml, line 3"


def test_an_option_is_put_in_another_place_by_an_at_and_refers_to_itself_there(place):
    config = exp.compose(["+model@vars.teacher=mlp", "model=lenet"])
    assert config.vars.teacher.layers.stem.out_features == config.vars.teacher.constants.width
    assert check(["+model@model.layers.extra=mlp"]) == 0
    assert refused("+model@teacher=mlp")["model@teacher"].cure.startswith("Write +model@vars.teacher=mlp, ")
    assert refused("model@vars.teacher=mlp")["model@vars.teacher"].cure == "Write +model@vars.teacher=mlp"
    assert refused("model@model=mlp")["model@model"].cure == "Write model=mlp"
    # It used to replace the data, in silence.
    assert "data.extra" in refused("+data@data.extra=wine")


@pytest.mark.parametrize("text", [
    "objective: {mse: {_target_: torch.nn.MSELoss}}\n", "defaults:\n  - digits\n  - override /objective: [mse]\n",
])  # fmt: skip
def test_a_data_yaml_that_brings_its_objective_is_told_how(place, text):
    Path("conf/data").mkdir()
    Path("conf/data/mine.yaml").write_text(
        f"# Mine\n{text if text[0] == 'd' else 'defaults: [digits]' + chr(10) + text}"
    )
    (fault,) = refused("data=mine").values()
    assert "`# @package _global_`" in fault.cure
    assert "data:" in fault.cure
    assert "conf/data/mine.yaml" in fault.source.replace("data/mine.yaml", "conf/data/mine.yaml")
    own = "# Mine\n# @package _global_\ndefaults:\n  - /data/digits@data\n  - override /objective: [cross_entropy]\n"
    Path("conf/data/mine.yaml").write_text(f"{own}  - _self_\ndata: {{batch_size: 8}}\n")
    assert exp.compose(["data=mine"]).data.batch_size == 8


def test_a_primary_config_of_ones_own_may_begin_with_exps(place, capsys):
    assert check(["-cn", "small", "seed=3", "optimizer=sgd"]) == 0
    assert exp.compose(["seed=3"], config_name="small").name == "small"
    assert check(["-cn", "smal"]) == 2
    assert "Write conf/smal.yaml, with defaults: [train, _self_]" in capsys.readouterr().err


OWN_CLASSES = """
    from lightning.pytorch import LightningDataModule
    from torch import nn


    class Data(LightningDataModule):
        def __init__(self, val_split=0.1, batch_size=32):
            super().__init__()


    class Net(nn.Module):
        def __init__(self, weight_decay=0.0, loss="l1", net=None, compile=False):
            super().__init__()


    class Saver:
        def __init__(self, monitor="loss/val"):
            pass
"""


def test_a_class_of_ones_own_keeps_its_words_where_they_are_habits_of_others(place):
    files = {
        "keeping.py": textwrap.dedent(OWN_CLASSES),
        "conf/data/mydm.yaml": "_target_: keeping.Data\nval_split: 0.1\nbatch_size: 32\n",
        "conf/model/mynet.yaml": "_target_: keeping.Net\nweight_decay: 0.0\nloss: l1\n"
        "net: {width: 8}\ncompile: false\n",
        "conf/callbacks/model_checkpoint.yaml": "_target_: keeping.Saver\nmonitor: loss/val\n",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    chosen = ["model=mynet", "data=mydm", "+callbacks=model_checkpoint"]
    keys = ["data.val_split=0.2", "model.weight_decay=0.5", "model.loss=l2", "model.net.width=16", "model.compile=true"]
    config = composition_of([*chosen, *keys, "callbacks.model_checkpoint.monitor=loss"]).config
    found = (config.data.val_split, config.model.weight_decay, config.model.loss, config.model.net.width)
    assert found == (0.2, 0.5, "l2", 16)
    assert config.model.compile is True
    assert config.callbacks.model_checkpoint.monitor == "loss"
    Path("conf/data/plain.yaml").write_text("_target_: keeping.Data\n")
    assert composition_of(["data=plain", "data.val_split=0.3"]).config.data.val_split == 0.3
    # Where there is no such key, and no parameter, it is the habit.
    assert refused("data.val_split=0.2")["data.val_split"].cure == "Write data.parts.val=0.2"
    assert refused("model=mynet", "model.lr=0.2")["model.lr"].cure == "Write optimizer.lr=0.2"
    assert refused("+model.weight_decay=0.5")["model.weight_decay"].cure == "Write optimizer.weight_decay=0.5"
    sys.modules.pop("keeping", None)
