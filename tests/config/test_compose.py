"""From overrides to a config: what composes, what is refused and how, where configs are looked for."""

import itertools
import logging
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import exp
from exp.check.stages import config_faults
from exp.config import search_path
from exp.config.compose import composition_of
from exp.config.freeze import COMPOSITION
from exp.config.groups import open_search_path
from exp.config.hydra_adapter import parse_override
from exp.config.overrides import checked_lines, for_hydra
from exp.config.search_path import OWN_CONF, search_places, users_conf
from exp.config.targets import resolve
from exp.errors import ConfigError

FIXED_DIRECTORY = "hydra.run.dir=outputs/here"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (OWN_CONF / group).glob("*.yaml") if not path.name.startswith("_"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refused(*overrides: str, **settings_) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        exp.compose(list(overrides), **settings_)
    assert caught.value.exit_status == 2
    return caught.value


def whole(*overrides: str) -> dict:
    """A config but for the list of its overrides, and in a fixed directory, for the clock's sake."""
    plain = OmegaConf.to_container(exp.compose([*overrides, FIXED_DIRECTORY]), resolve=False)
    del plain[COMPOSITION]["overrides"]
    return plain


def test_a_job_config_has_no_hydra_node_and_knows_where_it_came_from():
    config = exp.compose(["seed=3", "hydra.run.dir=outputs/a/b"])
    assert "hydra" not in config
    assert config.seed == 3
    assert list(config[COMPOSITION].overrides) == ["seed=3"]
    assert config[COMPOSITION].directory == str(Path.cwd() / "outputs/a/b")


def test_composing_makes_no_file_and_touches_neither_directory_nor_logging_nor_arguments():
    before = Path.cwd(), list(logging.getLogger().handlers), logging.getLogger().level
    overrides = ["seed=3"]
    exp.compose(overrides)
    assert (Path.cwd(), list(logging.getLogger().handlers), logging.getLogger().level) == before
    assert list(Path.cwd().iterdir()) == []
    assert overrides == ["seed=3"]


def test_another_hydra_program_in_the_process_keeps_its_settings():
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    before = version.VersionBase.instance().version_base, HydraConfig.instance().cfg
    exp.compose([])
    assert (version.VersionBase.instance().version_base, HydraConfig.instance().cfg) == before
    assert not GlobalHydra.instance().is_initialized()


# What a hurried user types, the key that the message names, and the cure that it must hold.
WRONG = [
    ("precison=bf16", "precison", "Did you mean precision?"),
    ("+precison=bf16", "precison", "Did you mean precision?"),
    ("++precison=bf16", "precison", "Did you mean precision?"),
    ("optimzer=sgd", "optimzer", "Did you mean optimizer?"),
    ("optimizer=adamm", "optimizer", "Did you mean adam"),
    ("precision=[bf16,fp16]", "precision", "Write precision="),
    ("precision=bfloat16", "precision", "Write precision=bf16"),
    ("precision=null", "precision", "Write precision=[] for none"),
    ("++precision=bf16", "precision", "Write precision=bf16"),
    ("precision.bf16=true", "precision.bf16", "word"),
    ("optimizer=[adam,sgd]", "optimizer", "a list"),
    ("+optimizer=sgd", "optimizer", "Write optimizer=sgd"),
    ("~optimizer", "optimizer", "Write optimizer=adamw"),
    ("optimizer=null", "optimizer", "null"),
    ("hooks=null", "hooks", "Write hooks=[] for none"),
    ("hooks=[gradiens]", "hooks", "Did you mean gradients?"),
    ("~hooks", "hooks", "Write hooks=[] for none"),
    ("~hooks.memry", "hooks.memry", "Did you mean hooks.memory?"),
    ("hooks=gradients,memory", "hooks", "hooks=[gradients,memory]"),
    ("optimizer.lr=1e-3,1e-2", "optimizer.lr", "-m"),
    ("seed=range(0,3)", "seed", "-m"),
    ("optimizer.lrr=0.1", "optimizer.lrr", "Did you mean optimizer.lr?"),
    ("optimizer.learning_rate=0.1", "optimizer.learning_rate", "optimizer.lr=0.1"),
    ("trainer.max_epoch=3", "trainer.max_epoch", "trainer.max_epochs=3"),
    ("lr=0.1", "lr", "optimizer.lr"),
    ("batch_size=3", "batch_size", "data.batch_size"),
    ("epochs=3", "epochs", "trainer.max_epochs=3"),
    ("+seed=3", "seed", "Write seed=3"),
    ("~seed", "seed", "Leave it out"),
    ("seed", "seed", "has no ="),
    ("hooks=[gradients", "hooks", "cannot be read"),
    ("name=a b=c", "name", "Quote"),
    ("ckpt_path=last.ckpt", "ckpt_path", "Write resume=last.ckpt"),
    ("trainer=gpu", "trainer", "launch.accelerator=gpu"),
    ("trainer=mps", "trainer", "launch.accelerator=mps"),
    ("trainer=ddp", "trainer", "strategy=ddp"),
    ("trainer.devices=2", "trainer.devices", "launch.devices=2"),
    ("++trainer.num_nodes=2", "trainer.num_nodes", "launch.nodes=2"),
    ("trainer.accelerator=gpu", "trainer.accelerator", "launch.accelerator=gpu"),
    ("trainer.strategy=ddp", "trainer.strategy", "strategy=ddp"),
    ("trainer.precision=16", "trainer.precision", "Write precision=fp16"),
    ("model.optimizer.lr=0.1", "model.optimizer.lr", "optimizer.lr=0.1"),
    ("data.train_val_test_split=[1,2,3]", "data.train_val_test_split", "data.parts={train"),
    ("extras.print_config=true", "extras.print_config", "print_config=true"),
    ("hparams_search=mnist_optuna", "hparams_search", "-m 'optimizer.lr=interval"),
    ("task_name=x", "task_name", "name=x"),
    ("debug=default", "debug", "debug=one_batch"),
    ("hydra.callbacks.x._target_=os.system", "hydra.callbacks.x._target_", "run before the check"),
    ("hydra/callbacks=x", "hydra/callbacks", "hydra/launcher or hydra/sweeper"),
    ("hydra.sweeper._target_=os.system", "hydra.sweeper._target_", "not of an installed Hydra plug-in"),
    ("+hydra.sweeper.sampler._target_=os.system", "hydra.sweeper._target_", "os.system"),
    ("hydra.launcher._target_=exp.train.main", "hydra.launcher._target_", "not of an installed Hydra plug-in"),
    ("hydra.run.dir=.", "hydra.run.dir", "a directory of its own"),
    ("hydra.run.dir=..", "hydra.run.dir", "a directory of its own"),
    ("hydra.run.dir=/", "hydra.run.dir", "a directory of its own"),
    ("name=../../../x", "hydra.run.dir", "below the working directory"),
    ("hydra.job.chdir=true", "hydra.job.chdir", "never changes"),
    ("hydra.mode=MULTIRUN", "hydra.mode", "-m"),
    ("hydra/sweeper=optuna", "hydra/sweeper", "no option 'optuna'"),
    ("hydra/launcher=joblib", "hydra/launcher", "pip install hydra-joblib-launcher"),
    (f"name={'a' * 320}", "name", "aaaa..., 320 characters; expected a path of fewer"),
    ("hydra.verbos=true", "hydra.verbos", "not a setting"),
    ("model=../../../../etc/passwd", "model", "no option"),
    ("model=/etc/passwd", "model", "no option"),
    ("model/x=3", "model/x", "no such group"),
    ("model@teacher=mlp", "model@teacher", "Write +model@vars.teacher=mlp"),
    ("seed=" + "[" * 400 + "]" * 400, "seed", "nested too deeply"),
    ("seed=" + "x" * 30_000, "seed", "30005 characters"),
    ("--help", "--help", "Flags begin with -"),
    ("", "overrides", "key=value"),
]


@pytest.mark.parametrize(("override", "key", "cure"), WRONG, ids=[wrong[0][:50] or "empty" for wrong in WRONG])
def test_a_wrong_override_is_named_with_its_cure(override, key, cure):
    error = refused(override)
    assert key in [fault.key for fault in error.faults]
    assert cure in str(error)
    assert len(str(error).splitlines()) <= 12
    assert len(str(error)) < 1500


def test_all_faults_come_back_at_once():
    error = refused("modl=mlp", "precision=bf61", "hooks=null", "seed=1,2", "optimizer.lrr=3", "ckpt_path=x", "name=[")
    keys = [fault.key for fault in error.faults]
    assert keys == ["name", "modl", "precision", "hooks", "seed", "ckpt_path", "optimizer.lrr"]


def test_the_rest_of_the_config_is_checked_although_an_override_has_a_fault():
    error = refused("optimizer.lrr=3", "data.batch_size=-1")
    assert {fault.key for fault in error.faults} == {"optimizer.lrr", "data.batch_size"}


def test_a_command_of_two_choices_of_one_axis_is_refused_and_the_last_of_two_equal_signs_wins():
    assert "chosen twice" in str(refused("precision=bf16", "+precision=fp16"))
    assert exp.compose(["precision=bf16", "precision=fp16"]).precision.word == "fp16"


def test_plus_on_a_many_group_adds_whatever_else_is_said():
    base = set(exp.compose([]).hooks)
    some = options("hooks")[:2]
    assert set(exp.compose(["hooks=[]"]).hooks) == set()
    assert set(exp.compose([f"hooks=[{some[0]}]", f"+hooks={some[1]}"]).hooks) == set(some)
    assert set(exp.compose([f"+hooks={some[1]}", f"hooks={some[0]}"]).hooks) == set(some)
    each = exp.compose([f"+callbacks={name}" for name in options("callbacks")]).callbacks
    assert set(each) == set(exp.compose([f"callbacks=[{','.join(options('callbacks'))}]"]).callbacks)
    assert set(exp.compose([f"~hooks.{min(base)}"]).hooks) == base - {min(base)}


def choices(group):
    """The options of an axis; of the many experiments those that set a precision themselves, and a few others."""
    names = options(group)
    if group != "experiment":
        return names
    setting = [name for name in names if "/precision/" in (OWN_CONF / group / f"{name}.yaml").read_text("utf-8")]
    assert setting
    return sorted({*setting, "gan", "gpt", "lenet"})


AXES = [[[], *([f"{group}={name}"] for name in choices(group))] for group in ("experiment", "debug", "strategy")]


def test_the_two_spellings_of_a_precision_are_one_command_for_hydra_whatever_else_is_chosen():
    """Over all combinations: a config depends on nothing but what Hydra is handed."""
    _, vocabulary = open_search_path(config_dir=None, config_name="train")
    for precision, *choice in itertools.product(options("precision"), *AXES):
        others = [override for part in choice for override in part]
        handed = []
        for sign in ("", "+"):
            lines, faults = checked_lines([f"{sign}precision={precision}", *others], vocabulary, multirun=False)
            assert not faults
            handed.append(for_hydra(lines, vocabulary))
        assert handed[0] == handed[1] == [f"precision={precision}", *others]


def one_config_of_two_spellings(precision, *others):
    configs = [whole(f"{sign}precision={precision}", *others) for sign in ("", "+")]
    assert configs[0] == configs[1]
    assert configs[0]["precision"]["word"] == precision


@pytest.mark.parametrize("precision", options("precision"))
def test_the_two_spellings_of_a_precision_give_one_config(precision):
    one_config_of_two_spellings(precision)


@pytest.mark.parametrize("others", [choice for axis in AXES for choice in axis if choice], ids=lambda choice: choice[0])
def test_the_two_spellings_give_one_config_beside_whatever_else_is_chosen(others):
    """Of one precision, another for each choice: the first test shows that Hydra is handed the same of all."""
    known = options("precision")
    one_config_of_two_spellings(known[sum(map(ord, others[0])) % len(known)], *others)


@pytest.mark.parametrize("axis", ["experiment", "debug"])
def test_plus_on_the_other_axes_keeps_their_place(axis):
    for name in choices(axis):
        configs = [whole(f"{sign}{axis}={name}", "precision=fp16") for sign in ("", "+")]
        assert configs[0] == configs[1]
        assert configs[1]["precision"]["word"] == "fp16"


def test_the_users_conf_wins_and_exps_own_stays_behind_it():
    write("conf/optimizer/sgd.yaml", "# Mine. Select it with optimizer=sgd\n_target_: torch.optim.SGD\nlr: 7\n")
    write("conf/optimizer/mine.yaml", "# Mine. Select it with optimizer=mine\n_target_: torch.optim.SGD\nlr: 8\n")
    assert exp.compose(["optimizer=sgd"]).optimizer.lr == 7
    assert exp.compose(["optimizer=mine"]).optimizer.lr == 8
    assert exp.compose(["optimizer=adamw"]).optimizer._target_ == "torch.optim.AdamW"


def test_a_conf_of_something_else_is_not_taken(monkeypatch):
    write("conf/nginx.yaml", "server: 1\n")
    assert users_conf() is None
    monkeypatch.chdir(OWN_CONF.resolve().parent)
    assert users_conf() is None
    assert [place.provider for place in search_places()] == ["main"]


def test_local_default_overrides_the_groups_but_not_precision():
    write("conf/local/default.yaml", "# @package _global_\n# This machine.\nseed: 5\nprecision: {word: bf16}\n")
    assert exp.compose([]).seed == 5
    assert exp.compose(["precision=fp16"]).precision.word == "fp16"


def test_config_dir_stands_between_the_users_conf_and_exps(tmp_path):
    for place, lr in (("conf", 1), ("other", 2)):
        write(f"{place}/optimizer/both.yaml", f"# Select it with optimizer=both\n_target_: torch.optim.SGD\nlr: {lr}\n")
    write("other/optimizer/adamw.yaml", "# Other. Select it with optimizer=adamw\n_target_: torch.optim.SGD\nlr: 3\n")
    assert exp.compose(["optimizer=both"], config_dir="other").optimizer.lr == 1
    assert exp.compose(["optimizer=adamw"], config_dir="other").optimizer.lr == 3
    assert "not a directory" in str(refused(config_dir="nowhere"))


@pytest.mark.parametrize("value", ["some_plugin", "some_plugin.conf", "some_plugin.inner"])
def test_a_plugins_entry_point_names_a_package_and_nothing_of_it_is_run(tmp_path, monkeypatch, value):
    package = "inner/" if value.endswith("inner") else ""
    write("site/some_plugin/__init__.py", "raise RuntimeError('imported')\n")
    write(
        f"site/some_plugin/{package}conf/optimizer/far.yaml",
        "# Far. Select it with optimizer=far\n_target_: torch.optim.SGD\nlr: 9\n",
    )
    write(f"site/some_plugin/{package}conf/optimizer/adamw.yaml", "# Far. Select it never\n_target_: nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    point = EntryPoint(name="far", value=value, group="exp.conf")
    monkeypatch.setattr(search_path.importlib.metadata, "entry_points", lambda group: [point])
    config = exp.compose(["optimizer=far"])
    assert config.optimizer.lr == 9
    assert exp.compose([]).optimizer._target_ == "torch.optim.AdamW"
    assert "some_plugin" not in sys.modules


def test_a_plugin_without_configs_is_told_and_does_no_harm(monkeypatch, capsys):
    point = EntryPoint(name="gone", value="no_such_package_at_all", group="exp.conf")
    monkeypatch.setattr(search_path.importlib.metadata, "entry_points", lambda group: [point])
    exp.compose([])
    assert "gone" in capsys.readouterr().err


def test_modules_beside_the_users_conf_can_be_imported_once_a_config_names_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    write("conf/model/x.yaml", "# X. Select it with model=x\n_target_: beside_a_conf.Net\n")
    write("beside_a_conf.py", "import torch\nclass Net(torch.nn.Identity): pass\n")
    exp.compose([])
    resolve("torch.nn.Linear")
    assert str(tmp_path) not in sys.path
    resolve(exp.compose(["model=x"]).model._target_)
    assert sys.path[-1] == str(tmp_path)


def test_an_ignored_choice_is_a_fault():
    text = (OWN_CONF / "train.yaml").read_text()
    ours = "  - override hydra/launcher"
    write("conf/train.yaml", text.replace(ours, f"  - override hooks: []\n{ours}"))
    write("conf/hooks/x.yaml", "# X. Select it with +hooks=x\nx: {_target_: a.b}\n")
    assert "hooks=memory was ignored" in str(refused("+hooks=memory"))


def test_an_option_of_a_yaml_that_is_not_there_is_a_fault_with_its_neighbour():
    write("conf/experiment/e.yaml", "# @package _global_\n# E.\ndefaults:\n  - override /optimizer: adamww\n")
    error = refused("experiment=e")
    assert error.faults[0].key == "optimizer"
    assert "Did you mean adamw?" in str(error)


@pytest.mark.parametrize("names", [["me"], ["one", "two"], ["one", "two", "three"]])
def test_configs_that_include_each_other_are_named_by_their_files(names):
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        write(f"conf/model/{name}.yaml", f"# Round. Select it with model={name}\ndefaults: [{following}, _self_]\n")
    (fault,) = refused(f"model={names[0]}").faults
    assert fault.key == "defaults"
    assert sorted(fault.source.split(", ")) == sorted(f"conf/model/{name}.yaml" for name in names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("just words\n", "one value"),
        ("a: \t- b\n\t- c\n", "line"),
        ("a: !!python/object/apply:os.system [echo]\n", "could not determine a constructor"),
        ("a: &a [*a]\n", "into itself"),
        ("a: " + "[" * 200 + "]" * 200 + "\n", "nested too deeply"),
        ("a: " + "[" * 400_000 + "\n", "nested too deeply"),
        ("- " * 400_000 + "x\n", "nested too deeply"),
        ("?\t" * 400_000 + "x\n", "model/broken.yaml"),
        ("defaults: {a: b}\n", "defaults"),
        ("defaults: [{a: b, c: d}]\n", "Too many keys"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), "nodes"),
        ("a: '${b'\n", "a"),
    ],
)
def test_a_broken_yaml_is_a_fault_that_names_the_file(text, expected):
    write("conf/model/broken.yaml", text)
    error = refused("model=broken")
    assert expected in str(error)
    assert "model" in str(error)


def test_a_file_that_is_no_text_or_too_large_is_a_fault():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/a.yaml").write_bytes(b"\xff\xfe\x00")
    Path("conf/model/b.yaml").write_text("# B\n" + "x: 1\n" * 300_000)
    assert "conf/model/a.yaml" in str(refused("model=a"))
    assert "bytes" in str(refused("model=b"))


def test_hydra_callbacks_and_foreign_targets_in_a_file_are_refused():
    write("conf/experiment/e.yaml", "# @package _global_\n# E.\nhydra:\n  callbacks: {x: {_target_: os.system}}\n")
    write("conf/experiment/f.yaml", "# @package _global_\n# F.\nhydra:\n  sweeper: {_target_: os.system}\n")
    write("conf/experiment/g.yaml", "# @package _global_\n# G.\nhydra: {mode: MULTIRUN}\n")
    assert refused("experiment=e").faults[0].key == "hydra.callbacks.x"
    assert refused("experiment=f").faults[0].key == "hydra.sweeper._target_"
    assert refused("experiment=g").faults[0].key == "hydra.mode"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hydra: {job_logging: {version: 1}}", "hydra.job_logging.version"),
        ("hydra: {hydra_logging: {version: 1}}", "hydra.hydra_logging.version"),
        ("hydra: {job: {env_set: {LD_PRELOAD: evil.so}}}", "hydra.job.env_set"),
        ("hydra: {job: {env_copy: [PATH]}}", "hydra.job.env_copy"),
        ("hydra: {job: {chdir: true}}", "hydra.job.chdir"),
        ("hydra: {help: {app_name: x}}", "hydra.help.app_name"),
        ("hydra: {verbose: true}", "hydra.verbose"),
        ("hydra: {output_subdir: .hydra}", "hydra.output_subdir"),
        ("hydra: {env: {other: 1}}", "hydra.env.other"),
        ("defaults: [{override /hydra/launcher: basic}]", "hydra/launcher"),
        ("defaults: [{override /hydra/job_logging: default}]", "hydra/job_logging"),
        ("defaults: [{override /hydra/help: default}]", "hydra/help"),
    ],
)
def test_what_a_file_sets_of_hydra_and_nobody_reads_is_refused_with_the_file(text, key):
    write("conf/experiment/e.yaml", f"# @package _global_\n{text}\n")
    fault = refused("experiment=e").faults[0]
    assert fault.key == key
    assert fault.source == "conf/experiment/e.yaml"


def test_what_a_file_may_set_of_hydra_is_not():
    write(
        "conf/experiment/e.yaml",
        "# @package _global_\nhydra: {run: {dir: outputs/e}, sweeper: {params: {seed: '0,1'}}}\n",
    )
    assert exp.compose(["experiment=e"])["_composition_"].directory.endswith("outputs/e")
    # A primary config of one's own begins as a copy of exp's, and may choose another launcher.
    text = (OWN_CONF / "train.yaml").read_text()
    write("conf/train.yaml", text)
    exp.compose([])
    write("conf/train.yaml", text.replace("override hydra/launcher: exp", "override hydra/launcher: basic"))
    exp.compose([])
    write("conf/train.yaml", text.replace("override hydra/job_logging: none", "override hydra/job_logging: default"))
    assert refused().faults[0].source == "conf/train.yaml"


def test_values_of_hydra_are_put_in_place_before_its_node_goes():
    write("conf/experiment/e.yaml", "# @package _global_\n# E.\ntags: ['${hydra:runtime.cwd}', '${hydra.job.name}']\n")
    assert exp.compose(["experiment=e"]).tags[0] == str(Path.cwd())
    write("conf/experiment/f.yaml", "# @package _global_\n# F.\nname: '${hydra:runtime.output_dir}'\n")
    assert "known before the run" in str(refused("experiment=f", FIXED_DIRECTORY))


def test_a_run_directory_that_cannot_be_worked_out_is_a_fault():
    assert "nowhere" in str(refused("name=${nowhere}"))
    assert "hydra.run.dir" in [fault.key for fault in refused("name=???").faults]


def test_links_may_lead_out_of_the_working_directory(tmp_path):
    disk = tmp_path.parent / f"{tmp_path.name}-disk"
    disk.mkdir()
    os.symlink(disk, "outputs")
    assert exp.compose([]) is not None


def test_env_file_is_read_and_does_not_win_over_the_environment(monkeypatch):
    monkeypatch.delenv("EXP_DATA_DIR", raising=False)
    monkeypatch.setenv("EXP_TEST_KEPT", "outer")
    write(".env", "EXP_DATA_DIR=/my/data\nEXP_TEST_KEPT=inner\n")
    try:
        assert exp.compose([]).data_dir == "/my/data"
        assert os.environ["EXP_TEST_KEPT"] == "outer"
    finally:
        os.environ.pop("EXP_DATA_DIR", None)


def test_without_dotenv_one_line_says_what_to_install(monkeypatch, capsys):
    write(".env", "A=1\n")
    monkeypatch.setitem(sys.modules, "dotenv", None)
    exp.compose([])
    exp.compose([])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install 'exp-framework[env]'" in message


def test_another_primary_config(tmp_path):
    write("conf/mine.yaml", "# Mine. Select it with --config-name mine\ndefaults: [train, _self_]\nseed: 77\n")
    write("conf/model/x.yaml", "# X. Select it with model=x\n_target_: a.b\n")
    assert exp.compose([], config_name="mine").seed == 77
    assert refused(config_name="absent").faults[0].key == "--config-name"


def test_several_values_are_left_to_the_sweeper_with_multirun_but_still_checked():
    master = composition_of(["seed=1,2", "optimizer=adamw,sgd"], multirun=True)
    assert master.config.seed == 0
    with pytest.raises(ConfigError, match="Did you mean sgd"):
        composition_of(["optimizer=adamw,sdg"], multirun=True)
    with pytest.raises(ConfigError, match="cannot be swept"):
        composition_of(["hydra.run.dir=a,b"], multirun=True)


def test_a_parsed_override_is_not_changed_by_composing():
    before = str(parse_override("optimizer.lr=0.5"))
    exp.compose(["optimizer.lr=0.5"])
    assert str(parse_override("optimizer.lr=0.5")) == before


PIECES = st.sampled_from([
    "model", "hooks", "precision", "optimizer.lr", "hydra.run.dir", "hydra/sweeper", "seed", "=", "+", "~", "++", "[",
    "]", "{", "}", ",", ":", "'", '"', "${", "}", "$", "@", ".", "..", "/", "\\", " ", "null", "true", "1e-3", "???",
    "a", "_target_", "mlp", "range(1,3)", "glob(*)", "choice(a,b)", "interval(0,1)", "extend_list(1)", "\n", "é", "\0",
])  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.lists(PIECES, min_size=1, max_size=6).map("".join), st.text(max_size=12)), max_size=3))
@example(["seed=${seed}"])
@example(["hydra.run.dir=${hydra.run.dir}"])
@example(["model.x={a:{b:{c:[1]}}}"])
@example(["tags={}"])
@example(["name=\0"])
@example(["=3"])
@example(["+a.=3"])
@example(["++hydra=3"])
@example(["hydra=3"])
@example(["hooks={a:b}"])
@example(["hydra.sweeper=null"])
@example(["hydra.launcher=3"])
@example(["+model@=mlp"])
@example(["hydra.searchpath=[nowhere]"])
@example(["hydra.searchpath=3"])
@example(["model={_target_:a.b}"])
@example(["optimizer=glob(*)"])
@example(["~model.layers"])
@example(["model.layers=3", "model.layers.x=4"])
def test_garbage_composes_or_is_a_config_error(overrides):
    try:
        composition_of(overrides, check=config_faults)
    except ConfigError as error:
        keys = [fault.key for fault in error.faults]
    else:
        keys = ["none"]
    assert keys
    assert all(keys)


@pytest.mark.parametrize(
    "text", ["name=a${seed}", "name='a\\${seed}'", "tags=['${name}',b]", r"name='\\\\${seed}'", "name=$x"]
)
def test_the_record_of_overrides_is_as_typed(text):
    assert list(exp.compose([text, FIXED_DIRECTORY])[COMPOSITION].overrides) == [text]


def test_interpolations_stay_for_the_check_and_the_frozen_config():
    config = exp.compose([])
    raw = OmegaConf.to_container(config, resolve=False)
    assert raw["data_dir"] == "${oc.env:EXP_DATA_DIR,data}"


NUMBERS = """# @package _global_
freeze: {parameters: ["*"], unfreeze: {0: [head], 30: [body]}}
"""


@pytest.mark.parametrize(
    ("overrides", "unfreeze"),
    [
        ([], {0: ["head"], 30: ["body"]}),
        (["freeze.unfreeze.30=[stem]"], {0: ["head"], 30: ["stem"]}),
        (["~freeze.unfreeze.30"], {0: ["head"]}),
        (["+freeze.unfreeze.5=[stem]", "~freeze.unfreeze.0"], {30: ["body"], 5: ["stem"]}),
        (["freeze.unfreeze={}"], {0: ["head"], 30: ["body"]}),
        (["freeze.unfreeze=null"], None),
    ],
)
def test_entries_whose_names_are_numbers_are_overridden_by_them(overrides, unfreeze):
    write("conf/experiment/numbers.yaml", NUMBERS)
    assert exp.compose(["experiment=numbers", *overrides]).freeze.unfreeze == unfreeze


def test_a_number_that_names_no_entry_is_told_with_those_that_are_there():
    write("conf/experiment/numbers.yaml", NUMBERS)
    with pytest.raises(ConfigError) as raised:
        exp.compose(["experiment=numbers", "freeze.unfreeze.7=[stem]"])
    (fault,) = raised.value.faults
    assert (fault.key, fault.got, fault.expected) == ("freeze.unfreeze.7", "there is no such key", "one of 0, 30")


def test_an_entry_that_is_added_to_an_empty_mapping_is_a_number_as_in_yaml():
    assert exp.compose(["+freeze.unfreeze.5=[stem]"]).freeze.unfreeze == {5: ["stem"]}


def test_a_node_that_is_added_is_there_for_the_overrides_behind_it():
    node = "+hooks.own={_target_: exp.hooks.gradients.Gradients}"
    assert exp.compose([node, "hooks.own.every_n_steps=5"]).hooks.own.every_n_steps == 5
    with pytest.raises(ConfigError, match=r"hooks\.own\.every_n_step: no parameter of .*every_n_steps\?"):
        exp.validate(exp.compose([node, "hooks.own.every_n_step=5"]))


@pytest.mark.parametrize(
    "words", [["optimizer.nothing=1"], ["optimizer.lr=${nowhere}"], ["model=mlp", "+model.layers.hidden.no=1"]]
)
def test_an_error_ends_although_omegaconf_names_it_as_its_own_cause(words, tmp_path, monkeypatch):
    """OC_CAUSE=1, or a debugger: OmegaConf then raises exceptions whose cause is the exception itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OC_CAUSE", "1")
    with pytest.raises(exp.ConfigError):
        exp.validate(exp.compose(words))
