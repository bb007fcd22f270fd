"""Composition of overrides and files: valid configs, errors, and the search for config files."""

import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import exp
from exp.check.examination import config_errors
from exp.check.stages import early_errors
from exp.config.compose import composition_of
from exp.config.freeze import freeze
from exp.config.frozen import COMPOSITION
from exp.config.search_path import OWN_CONF, search_places, users_conf
from exp.config.targets import resolve
from exp.errors import ConfigError, ErrorDetails

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


def refused_values(*overrides: str) -> list[ErrorDetails]:
    return early_errors(exp.compose(list(overrides)))


def whole(*overrides: str) -> dict:
    """Return a config without its overrides, with a fixed run directory."""
    plain = OmegaConf.to_container(exp.compose([*overrides, FIXED_DIRECTORY]), resolve=False)
    del plain[COMPOSITION]["overrides"]
    return plain


def test_a_config_records_its_overrides_and_directory():
    config = exp.compose(["seed=3", "hydra.run.dir=outputs/a/b"])
    assert "hydra" not in config
    assert config.seed == 3
    assert list(config[COMPOSITION].overrides) == ["seed=3"]
    assert config[COMPOSITION].directory == str(Path.cwd() / "outputs/a/b")


def test_composing_changes_nothing_in_the_process():
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    def state():
        root = logging.getLogger()
        hydra = version.VersionBase.instance().version_base, HydraConfig.instance().cfg
        return Path.cwd(), list(root.handlers), root.level, *hydra

    before, overrides = state(), ["seed=3"]
    exp.compose(overrides)
    assert state() == before
    assert list(Path.cwd().iterdir()) == []
    assert overrides == ["seed=3"]
    assert not GlobalHydra.instance().is_initialized()


# wrong_inputs.txt has further wrong overrides.
WRONG = [
    ("precision=[bf16,fp16]", "precision", "Write precision="),
    ("+optimizer=sgd", "optimizer", "Write optimizer=sgd"),
    ("hooks=[gradients", "hooks", "cannot be read"),
    ("name=a b=c", "name", "Quote"),
    ("hydra/callbacks=x", "hydra/callbacks", "hydra/launcher or hydra/sweeper"),
    ("hydra.mode=MULTIRUN", "hydra.mode", "-m"),
    ("name=../../../x", "hydra.run.dir", "below the working directory"),
    (f"name={'a' * 320}", "hydra.run.dir", "characters; expected a path of fewer"),
    ("seed=" + "[" * 400 + "]" * 400, "seed", "nested too deeply"),
    ("seed=" + "x" * 30_000, "seed", "30005 characters"),
    ("--help", "--help", "Flags begin with -"),
    ("", "overrides", "key=value"),
]


@pytest.mark.parametrize(("override", "key", "message"), WRONG, ids=lambda value: value[:40] or "empty")
def test_a_wrong_override_suggests_a_fix(override, key, message):
    error = refused(override)
    assert key in [error.key for error in error.errors]
    assert message in str(error)
    assert len(str(error).splitlines()) <= 12
    assert len(str(error)) < 1500


def test_all_errors_are_reported_together():
    error = refused("modl=mlp", "precision=bf61", "hooks=null", "seed=1,2", "optimizer.lrr=3", "name=[")
    assert [error.key for error in error.errors] == ["name", "modl", "precision", "hooks", "seed", "optimizer.lrr"]
    error = refused("optimizer.lrr=3", "data.batch_size=-1")
    assert {error.key for error in error.errors} == {"optimizer.lrr", "data.batch_size"}


def test_an_axis_is_chosen_once_per_command():
    assert "two choices of an option" in str(refused("precision=bf16", "+precision=fp16"))
    assert exp.compose(["precision=bf16", "precision=fp16"]).precision.word == "fp16"


def test_plus_adds_to_a_group_in_any_order():
    base = set(exp.compose([]).hooks)
    some = options("hooks")[:2]
    assert set(exp.compose(["hooks=[]"]).hooks) == set()
    assert set(exp.compose([f"hooks=[{some[0]}]", f"+hooks={some[1]}"]).hooks) == set(some)
    assert set(exp.compose([f"+hooks={some[1]}", f"hooks={some[0]}"]).hooks) == set(some)
    each = exp.compose([f"+callbacks={name}" for name in options("callbacks")]).callbacks
    assert set(each) == set(exp.compose([f"callbacks=[{','.join(options('callbacks'))}]"]).callbacks)
    assert set(exp.compose([f"~hooks.{min(base)}"]).hooks) == base - {min(base)}


def sets_precision(experiment: str) -> bool:
    return "/precision/" in (OWN_CONF / "experiment" / f"{experiment}.yaml").read_text()


EXPERIMENTS = ("gan", "gpt", "lenet", *[name for name in options("experiment") if sets_precision(name)])
CHOICES = {"experiment": EXPERIMENTS, "debug": options("debug"), "strategy": options("strategy")}
OVERRIDES = [f"{group}={name}" for group, names in CHOICES.items() for name in names]


@pytest.mark.parametrize(
    "override", ["debug=one_batch", *(pytest.param(one, marks=pytest.mark.slow) for one in OVERRIDES)]
)
def test_both_signs_of_an_axis_give_one_config(override):
    word = options("precision")[sum(map(ord, override)) % len(options("precision"))]
    configs = [whole(f"{sign}precision={word}", override) for sign in ("", "+")]
    if not override.startswith("strategy="):
        configs.append(whole(f"precision={word}", f"+{override}"))
    assert all(config == configs[0] for config in configs)
    assert configs[0]["precision"]["word"] == word


def test_a_user_conf_takes_precedence():
    write("conf/optimizer/sgd.yaml", "# Mine. Select it with optimizer=sgd\n_target_: torch.optim.SGD\nlr: 7\n")
    write("conf/optimizer/mine.yaml", "# Mine. Select it with optimizer=mine\n_target_: torch.optim.SGD\nlr: 8\n")
    assert exp.compose(["optimizer=sgd"]).optimizer.lr == 7
    assert exp.compose(["optimizer=mine"]).optimizer.lr == 8
    assert exp.compose(["optimizer=adamw"]).optimizer._target_ == "torch.optim.AdamW"


def test_a_conf_folder_of_another_program_is_ignored(monkeypatch):
    write("conf/nginx.yaml", "server: 1\n")
    assert users_conf() is None
    monkeypatch.chdir(OWN_CONF.resolve().parent)
    assert users_conf() is None
    assert [place.provider for place in search_places()] == ["exp"]


def test_local_default_overrides_all_but_the_command():
    write("conf/local/default.yaml", "# @package _global_\n# This machine.\nseed: 5\nprecision: {word: bf16}\n")
    assert exp.compose([]).seed == 5
    assert exp.compose(["precision=fp16"]).precision.word == "fp16"


def test_config_dir_comes_after_the_user_conf():
    for place, lr in (("conf", 1), ("other", 2)):
        write(f"{place}/optimizer/both.yaml", f"# Select it with optimizer=both\n_target_: torch.optim.SGD\nlr: {lr}\n")
    write("other/optimizer/adamw.yaml", "# Other. Select it with optimizer=adamw\n_target_: torch.optim.SGD\nlr: 3\n")
    assert exp.compose(["optimizer=both"], config_dir="other").optimizer.lr == 1
    assert exp.compose(["optimizer=adamw"], config_dir="other").optimizer.lr == 3
    assert "not a directory" in str(refused(config_dir="nowhere"))


def install_plugin(name: str, package: str) -> None:
    """Write the metadata of a distribution with an entry point, as pip does."""
    write(f"site/{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write(f"site/{name}-1.0.dist-info/entry_points.txt", f"[exp.conf]\n{name} = {package}\n")


@pytest.mark.parametrize("package", ["some_plugin", "some_plugin.inner"])
def test_configs_of_a_plugin_are_found_without_imports(tmp_path, monkeypatch, package):
    inner = "inner/" if package.endswith("inner") else ""
    far = "# Far. Select it with optimizer=far\n_target_: torch.optim.SGD\nlr: 9\n"
    write("site/some_plugin/__init__.py", "raise RuntimeError('imported')\n")
    write(f"site/some_plugin/{inner}conf/optimizer/far.yaml", far)
    write(f"site/some_plugin/{inner}conf/optimizer/adamw.yaml", "# Hidden by exp's own\n_target_: nothing\n")
    install_plugin("far", package)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert exp.compose(["optimizer=far"]).optimizer.lr == 9
    assert exp.compose([]).optimizer._target_ == "torch.optim.AdamW"
    assert "some_plugin" not in sys.modules


def test_modules_next_to_conf_are_importable_once_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    write("conf/model/x.yaml", "# X. Select it with model=x\n_target_: beside_a_conf.Net\n")
    write("beside_a_conf.py", "import torch\nclass Net(torch.nn.Identity): pass\n")
    exp.compose([])
    resolve("torch.nn.Linear")
    assert str(tmp_path) not in sys.path
    resolve(exp.compose(["model=x"]).model._target_)
    assert sys.path[-1] == str(tmp_path)


def test_a_choice_that_hydra_ignores_is_an_error():
    text = (OWN_CONF / "train.yaml").read_text()
    ours = "  - override hydra/launcher"
    write("conf/train.yaml", text.replace(ours, f"  - override hooks: []\n{ours}"))
    write("conf/hooks/x.yaml", "# X. Select it with +hooks=x\nx: {_target_: a.b}\n")
    assert "ignore hooks=memory" in str(refused("+hooks=memory"))


@pytest.mark.parametrize("names", [["me"], ["one", "two", "three"]])
def test_an_include_cycle_is_an_error(names):
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        write(f"conf/model/{name}.yaml", f"# Round. Select it with model={name}\ndefaults: [{following}, _self_]\n")
    (error,) = refused(f"model={names[0]}").errors
    assert "include each other" in error.got


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("a: !!python/object/apply:os.system [echo]\n", "could not determine a constructor"),
        ("a: &a [*a]\n", "contains itself"),
        ("- " * 400_000 + "x\n", "nested too deeply"),
        ("?\t" * 400_000 + "x\n", "model/broken.yaml"),
        ("defaults: [{a: b, c: d}]\n", "Too many keys"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), "nodes"),
    ],
)
def test_a_broken_yaml_is_named(text, expected):
    write("conf/model/broken.yaml", text)
    error = refused("model=broken")
    assert expected in str(error)
    assert "model" in str(error)


def test_a_binary_or_large_file_is_named():
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/a.yaml").write_bytes(b"\xff\xfe\x00")
    Path("conf/model/b.yaml").write_text("# B\n" + "x: 1\n" * 300_000)
    assert "conf/model/a.yaml" in str(refused("model=a"))
    assert "bytes" in str(refused("model=b"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hydra: {job_logging: {version: 1}}", "hydra.job_logging.version"),
        ("hydra: {callbacks: {x: {_target_: os.system}}}", "hydra.callbacks.x"),
        ("hydra: {sweeper: {_target_: os.system}}", "hydra.sweeper._target_"),
        ("hydra: {job: {env_set: {LD_PRELOAD: evil.so}}}", "hydra.job.env_set"),
        ("hydra: {job: {chdir: true}}", "hydra.job.chdir"),
        ("defaults: [{override /hydra/launcher: basic}]", "hydra/launcher"),
        ("defaults: [{override /hydra/job_logging: default}]", "hydra/job_logging"),
    ],
)
def test_a_hydra_setting_of_a_file_is_refused(text, key):
    write("conf/experiment/e.yaml", f"# @package _global_\n{text}\n")
    error = refused("experiment=e").errors[0]
    assert error.key == key
    assert (error.source or "conf/experiment/e.yaml") == "conf/experiment/e.yaml"


def test_a_hydra_setting_is_refused_in_each_file():
    files = ["conf/debug/e.yaml", "conf/experiment/e.yaml"]
    for file in files:
        write(file, "# @package _global_\nhydra: {job: {chdir: true}}\n")
    errors = refused("debug=e", "experiment=e").errors
    assert sorted((error.key, error.source) for error in errors) == [("hydra.job.chdir", file) for file in files]


def test_a_file_may_set_directories_and_sweeps():
    write(
        "conf/experiment/e.yaml",
        "# @package _global_\nhydra: {run: {dir: outputs/e}, sweeper: {params: {seed: '0,1'}}}\n",
    )
    assert exp.compose(["experiment=e"])["_composition_"].directory.endswith("outputs/e")
    # A custom primary config is usually a copy of exp's, and may select another launcher.
    text = (OWN_CONF / "train.yaml").read_text()
    write("conf/train.yaml", text)
    exp.compose([])
    write("conf/train.yaml", text.replace("override hydra/launcher: exp", "override hydra/launcher: basic"))
    exp.compose([])
    write("conf/train.yaml", text.replace("override hydra/job_logging: none", "override hydra/job_logging: default"))
    assert refused().errors[0].source == "conf/train.yaml"


def test_references_to_hydra_have_hydras_values():
    """The values are those of lightning-hydra-template's conf/paths/default.yaml under hydra.main."""
    write("conf/paths/default.yaml", "output_dir: ${hydra:runtime.output_dir}\nwork_dir: ${hydra:runtime.cwd}\n")
    names = "['${hydra:job.name}', '${hydra.job.override_dirname}', '${hydra:job.config_name}']"
    write(
        "conf/experiment/e.yaml",
        f"# @package _global_\ndefaults: [/paths: default]\ntags: {names}\nvars: {{a: '${{paths.output_dir}}/a'}}\n",
    )
    exclude = "hydra.job.config.override_dirname.exclude_keys=[name]"
    overrides = ["seed=3", "experiment=e", "name=x", FIXED_DIRECTORY, exclude]
    for place in ("outputs/here", "outputs/here-2"):
        kept = OmegaConf.load(freeze(exp.compose(overrides)) / "config.yaml")
        assert kept.paths == {"output_dir": str(Path(place).absolute()), "work_dir": str(Path.cwd())}
        assert [*kept.tags, kept.vars.a] == ["train", "experiment=e,seed=3", "train", f"{Path(place).absolute()}/a"]
    write("conf/experiment/f.yaml", "# @package _global_\n\nname: '${hydra.job.num}'\n")
    (error,) = [one for one in refused("experiment=f", FIXED_DIRECTORY).errors if one.key == "name"]
    assert (error.expected, error.source) == ("a value that is known before the run", "conf/experiment/f.yaml, line 3")


def test_a_mapping_and_a_list_replace_each_other():
    write("conf/experiment/e.yaml", "# @package _global_\nvars: {a: [3], b: {y: 4}, c: {d: {z: 5}}, e: {f: 1}}\n")
    typed = ["vars.a={w:6}", "vars.b=[7]", "vars.c={d:[8]}", "++vars.e.f=[9]"]
    both = {"a": {"w": 6}, "b": [7], "c": {"d": [8]}, "e": {"f": [9]}}
    assert exp.compose(["experiment=e", *typed]).vars == both
    write("conf/experiment/f.yaml", "# @package _global_\ndefaults: [e]\nvars: {a: {x: 1}}\n")
    (error,) = refused("experiment=f").errors
    assert "experiment/f" in error.got
    assert "Cannot merge DictConfig with ListConfig" in error.got
    csv = ["data=csv", "data.dataset.path=x.csv", "data.dataset.target=y"]
    assert exp.compose([*csv, "data.dataset.dates={when:'%d.%m.%Y'}"]).data.dataset.dates == {"when": "%d.%m.%Y"}
    (error,) = refused_values("trainer=[1]")
    assert (error.key, error.source) == ("trainer", "command line")


def test_a_missing_value_is_an_error_where_it_is_referred_to():
    text = "vars: {a: '${vars.b}', b: '${vars.no}', c: ['${vars.no}', '${vars.b}'], x: '${vars.y}', y: '${vars.x}'}\n"
    write("conf/experiment/e.yaml", f"# @package _global_\n{text}")
    found = {error.key: error.got for error in refused_values("experiment=e")}
    assert found == {"vars.b": "${vars.no}", "vars.c.0": "${vars.no}", "vars.x": "${vars.y}", "vars.y": "${vars.x}"}


REFERENCE = "# @package _global_\nvars: {teacher: '${model}', l: {a: {b: 1}}, k: '${vars.l}'}\n"


@pytest.mark.parametrize(("key", "other"), [("vars.teacher.width", "model.width"), ("vars.k.a.b", "vars.l.a.b")])
def test_no_override_changes_the_node_of_a_reference(key, other):
    write("conf/experiment/kd.yaml", REFERENCE)
    (error,) = refused("experiment=kd", "+model.width=1", f"{key}=3").errors
    assert (error.key, error.got) == (key, "there is no such key")
    config = exp.compose(["experiment=kd", "+model.width=1", f"+{key}=3"])
    assert (OmegaConf.select(config, key), OmegaConf.select(config, other)) == (3, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tags=a,b"], "For all values in one run, write tags=[a,b]"),
        (["mine=a"], "Write +mine=a"),
        (["+mine=a", "+mine=b"], "two choices of an option, +mine=a and +mine=b"),
    ],
)
def test_an_error_of_a_choice_has_a_source(overrides, words):
    for option in ("mine/a", "mine/b", "model/small"):
        write(f"conf/{option}.yaml", "x: 1\n")
    error = refused(*overrides).errors[0]
    assert (error.source, words in str(error)) == ("command line", True)


def test_an_unresolvable_run_directory_is_an_error():
    assert "nowhere" in str(refused("name=${nowhere}"))
    assert "hydra.run.dir" in [error.key for error in refused("name=???").errors]


def test_outputs_may_be_a_link_to_another_disk(tmp_path):
    disk = tmp_path.parent / f"{tmp_path.name}-disk"
    disk.mkdir()
    os.symlink(disk, "outputs")
    assert exp.compose([]) is not None


def test_a_missing_primary_config_is_an_error():
    assert refused(config_name="absent").errors[0].key == "--config-name"


def test_the_values_of_a_sweep_are_checked():
    master = composition_of(["seed=1,2", "optimizer=adamw,sgd"], multirun=True)
    assert master.config.seed == 0
    with pytest.raises(ConfigError, match="Did you mean sgd"):
        composition_of(["optimizer=adamw,sdg"], multirun=True)
    with pytest.raises(ConfigError, match="cannot be swept"):
        composition_of(["hydra.run.dir=a,b"], multirun=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=${seed}"],
        ["hydra.run.dir=${hydra.run.dir}"],
        ["name=\0"],
        ["=3"],
        ["++hydra=3"],
        ["hydra.sweeper=null"],
        ["+model@=mlp"],
        ["optimizer=glob(*)"],
        ["model.layers=3", "model.layers.x=4"],
    ],
)
def test_odd_overrides_compose_or_are_errors(overrides):
    errors = []
    try:
        composition_of(overrides, check=config_errors)
    except ConfigError as error:
        errors = error.errors
    assert all(error.key for error in errors)


PIECES = st.sampled_from([
    "model", "hooks", "precision", "optimizer.lr", "hydra.run.dir", "hydra/sweeper", "seed", "=", "+", "~", "++", "[",
    "]", "{", "}", ",", ":", "'", '"', "${", "}", "$", "@", ".", "..", "/", "\\", " ", "null", "true", "1e-3", "???",
    "a", "_target_", "mlp", "range(1,3)", "glob(*)", "choice(a,b)", "interval(0,1)", "extend_list(1)", "\n", "é", "\0",
])  # fmt: skip


@pytest.mark.slow
@given(st.lists(st.one_of(st.lists(PIECES, min_size=1, max_size=6).map("".join), st.text(max_size=12)), max_size=3))
def test_random_overrides_compose_or_are_errors(overrides):
    test_odd_overrides_compose_or_are_errors(overrides)


def test_recorded_overrides_are_as_typed():
    typed = ["name=a${seed}", "tags=['${name}',b]", r"monitor='\\\\${seed}'"]
    assert list(exp.compose([*typed, FIXED_DIRECTORY])[COMPOSITION].overrides) == typed


NUMBERS = """# @package _global_
freeze: {parameters: ["*"], unfreeze: {0: [head], 30: [body]}}
"""


@pytest.mark.parametrize(
    ("overrides", "unfreeze"),
    [
        (["~freeze.unfreeze.30"], {0: ["head"]}),
        (["+freeze.unfreeze.5=[stem]", "~freeze.unfreeze.0"], {30: ["body"], 5: ["stem"]}),
        (["freeze.unfreeze=null"], None),
    ],
)
def test_entries_named_by_numbers_are_overridden(overrides, unfreeze):
    write("conf/experiment/numbers.yaml", NUMBERS)
    assert exp.compose(["experiment=numbers", *overrides]).freeze.unfreeze == unfreeze


def test_a_missing_number_lists_the_numbers():
    write("conf/experiment/numbers.yaml", NUMBERS)
    (error,) = refused("experiment=numbers", "freeze.unfreeze.7=[stem]").errors
    assert (error.key, error.got, error.expected) == ("freeze.unfreeze.7", "there is no such key", "one of 0, 30")
    assert exp.compose(["+freeze.unfreeze.5=[stem]"]).freeze.unfreeze == {5: ["stem"]}


def test_later_overrides_change_an_added_node():
    node = "+hooks.own={_target_: exp.hooks.gradients.Gradients}"
    assert exp.compose([node, "hooks.own.every_n_steps=5"]).hooks.own.every_n_steps == 5
    with pytest.raises(ConfigError, match=r"hooks\.own\.every_n_step: no parameter of .*every_n_steps\?"):
        exp.validate(exp.compose([node, "hooks.own.every_n_step=5"]))


@pytest.mark.parametrize("words", [["optimizer.nothing=1"], ["optimizer.lr=${nowhere}"]])
def test_an_error_of_omegaconf_that_causes_itself_ends(words, monkeypatch):
    """OmegaConf raises exceptions that are their own cause if OC_CAUSE=1 or in a debugger."""
    monkeypatch.setenv("OC_CAUSE", "1")
    with pytest.raises(exp.ConfigError):
        exp.validate(exp.compose(words))
