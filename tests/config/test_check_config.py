"""The check of whole configs: every option passes, edits never raise other exceptions, and errors have a file."""

import copy
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import exp
from exp.check.examination import examine, plan, validate
from exp.check.resolution import resolve
from exp.check.stages import compose, first_stage, second_stage
from exp.cli.check import main as check
from exp.config.frozen import COMPOSITION
from exp.config.reading import MAX_NODES, read
from exp.config.settings import SCHEMA, settings_of
from exp.config.slots import COLLECTIONS, NODES, PHASES
from exp.errors import ConfigError, ErrorDetails, is_installed

CONF = Path(exp.__file__).parent / "conf"
NEWCOMER = Path(exp.__file__).parents[2] / ".ci" / "newcomer"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


NEEDS = dict.fromkeys(
    ("tensors", "csv", "csv_regression", "parquet", "npy", "windows", "mnist", "images", "stream", "hf", "token_file"),
    "a file",
)
NEEDS |= {
    "letter_names": "a network of whole numbers",
    "muon": "a network of matrices",
    "sparse_adam": "sparse gradients",
    "features": "a layer of its name",
    "fp16_true": "another eps",
    "fp8": "a Hopper GPU",
    "gan": "an objective and phases",
    "gpt": "a text",
}
NEEDS |= {name: "an extra" for name in ("tokenizers", "deepspeed", "mlflow", "wandb") if not is_installed(name)}
if "tokenizers" in NEEDS:
    NEEDS["tokens"] = "an extra"


def chosen(**groups: str) -> list[str]:
    """Return commands that together select each option of several groups at least once."""
    names = {group: [name for name in options(group) if name not in NEEDS] for group in groups}
    count = max(map(len, names.values()))
    return [
        " ".join(f"{word}{names[group][index % len(names[group])]}" for group, word in groups.items())
        for index in range(count)
    ]


COMMANDS = [
    *chosen(model="model=", optimizer="optimizer=", debug="debug="),
    *chosen(hooks="+hooks=", scheduler="scheduler=", precision="precision=", callbacks="+callbacks=", logger="logger="),
    *chosen(strategy="strategy="),
    *(
        f"data={name} model={'gpt' if name in ('text', 'tokens') else 'mlp'}"
        for name in options("data")
        if name not in NEEDS
    ),
    "model=lenet +hooks=features",
    "precision=fp16_true optimizer.eps=1e-4",
    "metrics=[accuracy,f1,auroc]",
    "data=diabetes objective=[mse] metrics=[mae]",
    "data=diabetes objective=[l1] metrics=[rmse]",
    "data=diabetes objective=[huber] metrics=[r2]",
    "data=text metrics=[bits_per_character,perplexity]",
    "model=gan objective=[discriminator,generator] phases=[adversarial] metrics=[]",
    "model=gan objective=[discriminator,generator,wgan_gp] phases=[wgan_gp] metrics=[]",
    "model=sequential phases=[body_and_head]",
    "experiment=gan +objective=r1 objective.r1.output=real_score +phases=lazy_r1",
    "experiment=gpt",
    "experiment=dann",
    "+objective=[r1,jacobian]",
    "model=mlp +objective=consistency",
    "hooks=[] callbacks=[] logger=[]",
    "+precision=bf16 strategy=ddp",
]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Another test may have imported the module of its folder.
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_composes_and_passes_the_check(command, empty):
    assert examine(resolve(compose(command.split()))).errors == ()


def test_the_schema_has_the_keys_of_train_yaml(empty):
    config = OmegaConf.to_container(compose([]), resolve=False)

    def compare(schema: dict, node: dict, key: str) -> None:
        extra = set(NODES) | set(COLLECTIONS) | {COMPOSITION, PHASES} if not key else set()
        assert set(schema) == set(node) - extra, key
        for name, rule in schema.items():
            if isinstance(rule, dict):
                compare(rule, node[name], f"{key}.{name}")

    compare(SCHEMA, config, "")


def test_ok_says_what_will_run(empty, capsys):
    assert check(["model=mlp", "+precision=bf16", "strategy=ddp", "launch.accelerator=cpu"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("ok: ")
    for part in ("parameters", "input [1, 8, 8] float32", "batch 64", "ddp with 2 ranks on cpu", "bf16"):
        assert part in line


def test_a_sweep_is_checked_whole(empty, commands):
    done = commands.run("-m", "model=mlp,sequential", module="exp.check")
    assert (done.returncode, done.stdout) == (0, "ok: 2 jobs\n")
    assert list(empty.iterdir()) == [], "the check wrote a file"


def test_the_number_of_parameters_is_the_networks(empty):
    config = compose(["model=sequential"])
    from exp.construct import build_network, plain_config
    from exp.shared_types import DataSpec

    spec = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
    network = build_network(settings_of(plain_config(config)), spec)
    assert plan(resolve(config)).shapes.parameters == sum(parameter.numel() for parameter in network.parameters())


def test_what_a_data_set_leaves_open_is_filled_in_before_others_are_checked(empty):
    config = compose(["data=text"])
    assert config.data.input_shape is None
    config = resolve(config).config
    assert list(config.data.input_shape) == [64]
    assert config.model.layers.tokens.num_embeddings == config.data.num_classes > 1


def test_ones_own_conf_layer_data_and_hook_pass(empty, capsys):
    shutil.copytree(NEWCOMER, empty, dirs_exist_ok=True)
    assert check(["model=spiral_net", "data=spirals", "+hooks=weight_norm"]) == 0, capsys.readouterr().err


def test_an_allowed_package_on_the_command_line_passes(empty):
    node = "+metrics.mine={_target_: sklearn.linear_model.LogisticRegression}"
    errors = examine(resolve(compose([node, "security.allow=[sklearn]"]))).errors
    # The package is allowed, and the class is refused because it is no metric.
    assert [error.key for error in errors] == ["metrics.mine._target_"]
    assert "torchmetrics.Metric" in errors[0].expected
    assert "allowed" not in errors[0].got


def test_a_layer_that_cannot_run_without_numbers_is_noted_and_not_refused(empty, capsys):
    write(empty / "numbers_layer.py", """
        import torch
        class Numbers(torch.nn.Module):
            def forward(self, x):
                return x[x > 0].reshape(1, -1)[:, :1].expand(len(x), 10)
        """)  # fmt: skip
    write(empty / "conf/model/mine.yaml", """
        # Depends on values: model=mine
        _target_: exp.models.containers.SequentialModel
        layers:
          numbers: {_target_: numbers_layer.Numbers}
          head: {_target_: torch.nn.Linear, in_features: 10, out_features: 10}
        """)  # fmt: skip
    assert check(["model=mine"]) == 0
    assert "were not checked" in capsys.readouterr().err


def write(path: Path, text: str) -> None:
    import textwrap

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))


class TestSources:
    """Errors have the file that sets the key last."""

    def error(self, command: list[str], key: str) -> ErrorDetails:
        return next(error for error in examine(resolve(compose(command))).errors if error.key == key)

    def test_the_command_line_over_a_file(self, empty):
        assert self.error(["seed=-1"], "seed").source == "command line"

    def test_a_file_of_ones_own_over_exps(self, empty):
        write(empty / "conf/experiment/mine.yaml", "# @package _global_\n# Mine\noptimizer: {lr: fast}\n")
        assert self.error(["experiment=mine"], "optimizer.lr").source == "conf/experiment/mine.yaml, line 3"

    def test_a_parameter_that_is_missing_is_where_its_node_is(self, empty):
        write(empty / "conf/model/mine.yaml", """
            # No width: model=mine
            _target_: exp.models.containers.SequentialModel
            layers: {hidden: {_target_: torch.nn.Linear}}
            """)  # fmt: skip
        error = self.error(["model=mine"], "model.layers.hidden.out_features")
        assert (error.got, error.source) == ("nothing", "conf/model/mine.yaml, line 3")

    def test_a_program_has_line_and_column(self, empty):
        write(empty / "conf/model/mine.yaml", """
            # A program with a typo in its second line: model=mine
            _target_: exp.models.containers.ModuleDictModel
            layers: {flatten: {_target_: torch.nn.Flatten}}
            forward: |
              x = flatten(x)
              return flaten(x)
            """)  # fmt: skip
        error = self.error(["model=mine"], "model.forward")
        assert error.source == "conf/model/mine.yaml, line 6, column 10"
        assert "flaten" in error.got
        assert "flatten" in error.expected


class TestReading:
    def errors(self, content: dict) -> dict[str, ErrorDetails]:
        return {error.key: error for error in read(OmegaConf.create(content))[1]}

    def test_an_interpolation_to_nowhere_names_its_holder_and_the_nearest(self):
        errors = self.errors({"data": {"num_classes": 3}, "head": {"width": "${data.num_clases}"}})
        assert errors.keys() == {"head.width"}
        assert errors["head.width"].fix == "Did you mean ${data.num_classes}?"

    def test_an_entry_of_a_list_that_names_nothing_is_an_error(self, empty):
        with pytest.raises(ConfigError) as caught:
            plan(resolve(compose(["data.input_shape=['${data.dataset.length}']"])))
        assert "data.input_shape" in str(caught.value)

    def test_one_missing_value_is_one_error_however_many_use_it(self):
        assert self.errors({"a": "???", "b": "${a}", "c": "x ${a}"}).keys() == {"a"}

    def test_circles_end(self):
        assert self.errors({"a": "${b}", "b": "${a}"}).keys() == {"a", "b"}
        assert self.errors({"a": {"b": "${a}"}}).keys() == {"a.b"}

    def test_an_environment_variable_that_is_not_set(self, monkeypatch):
        monkeypatch.delenv("NOT_SET_AT_ALL", raising=False)
        error = self.errors({"a": "${oc.env:NOT_SET_AT_ALL}"})["a"]
        assert "NOT_SET_AT_ALL" in error.got
        assert self.errors({"a": "${oc.env:NOT_SET_AT_ALL,x}"}) == {}

    def test_doubling_interpolations_are_bounded(self):
        content = {"a0": "x"} | {f"a{index}": f"${{a{index - 1}}}${{a{index - 1}}}" for index in range(1, 60)}
        (error,) = self.errors(content).values()
        assert "too large" in error.got

    def test_many_nodes_are_bounded(self):
        (error,) = self.errors({"a": list(range(MAX_NODES + 1))}).values()
        assert "too large" in error.got


@pytest.fixture(scope="module")
def valid() -> dict:
    config = compose(["trainer.max_epochs=1"])
    return OmegaConf.to_container(config, resolve=False)


VALUES = st.sampled_from([
    None, True, -1, 0, 1, 2.5, float("nan"), float("inf"), 10**30, "", "x", "???", "${nowhere}", "${seed}", "${model}",
    "a.b", "None", "torch.nn.Linear", "os.system", [], [1], ["x", None], {}, {"a": {"b": {}}}, {"repeat": 2},
    {"_target_": "torch.nn.ReLU"}, {"_target_": None}, {"_target_": "???"}, {"_target_": []}, {"_partial_": 1},
    {"_args_": 3, "_target_": "torch.nn.ReLU"},
])  # fmt: skip


@st.composite
def edits(draw):
    """Draw an edit: the path as a fraction of the keys at each level, the action, and a value."""
    steps = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6))
    return steps, draw(st.sampled_from(["delete", "rename", "replace", "add"])), draw(VALUES)


def edited(plain: dict, edit) -> None:
    steps, action, value = copy.deepcopy(edit)
    node: object = plain
    for step in steps:
        names = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not names:
            return
        name = names[int(step * len(names))]
        if name == COMPOSITION:
            return
        if not isinstance(node[name], dict | list) or step == steps[-1]:
            break
        node = node[name]
    if action == "delete":
        del node[name]
    elif action == "replace":
        node[name] = value
    elif isinstance(node, dict):
        node[f"{name}x" if action == "rename" else "added"] = node.pop(name) if action == "rename" else value


@given(st.lists(edits(), min_size=1, max_size=3))
def test_any_edit_of_a_config_gives_errors_or_none_and_never_raises(valid, changes):
    plain = copy.deepcopy(valid)
    for change in changes:
        edited(plain, change)
    plain.pop(COMPOSITION, None)
    config = OmegaConf.create(plain)
    for error in [*first_stage(read(config)), *second_stage(read(config))]:
        assert error.key
        assert len(str(error)) < 2000
        assert "\n" not in str(error)
    for error in examine(resolve(config)).errors:
        assert isinstance(error, ErrorDetails)


@pytest.mark.parametrize("empty", [[], pytest.param(None, marks=pytest.mark.slow)])
def test_empty_nodes_are_reported_and_never_raise(empty):
    whole = OmegaConf.to_container(
        compose(["+hooks=[nan_guard,samples,confusion,operators,clip_module]", "strategy=ddp"])
    )
    del whole[COMPOSITION]
    errors = {name: examine(resolve(OmegaConf.create({**whole, name: empty}))).errors for name in whole}
    assert {"model", "data", "optimizer", "scheduler", "strategy", "trainer"} <= {
        name for name in errors if errors[name]
    }


def test_a_config_made_by_hand_is_checked_without_a_composition(valid):
    plain = copy.deepcopy(valid)
    del plain[COMPOSITION]
    plain["optimizer"]["lr"] = "fast"
    with pytest.raises(ConfigError) as caught:
        validate(OmegaConf.create(plain))
    (error,) = caught.value.errors
    assert (error.key, error.source) == ("optimizer.lr", None)


def test_the_check_of_a_sweep_reports_all_errors(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert check(["-m", "optimizer.lr=-2,-1", "model.layers.head.out_features=7"]) == 2
    told = capfd.readouterr().err
    assert "  model.layers.head.out_features: 7; expected 10" in told
    assert "  optimizer.lr: " in told


def test_repeats_within_repeats_are_bounded_by_their_product(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    relu = "{repeat: TIMES, layer: {_target_: torch.nn.ReLU}}"
    inner = f"{{_target_: exp.models.containers.ModuleListModel, layers: {{a: {relu}}}}}"
    command = f"+model.layers.deep={{repeat: 1000, layer: {inner}}}"
    assert check(["model=mlp", command.replace("TIMES", "1000")]) == 2
    told = capfd.readouterr().err
    assert "model.layers.deep.repeat: 1000, which leads to 1,0" in told
    assert "a model with at most 100,000 layers" in told
    assert first_stage(read(compose(["model=mlp", command.replace("TIMES", "2")]))) == []


def test_a_train_yaml_of_ones_own_that_lacks_most_keys_is_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("# My own\nname: mine\n")
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose([]))
    (error,) = caught.value.errors
    assert "none of seed, monitor" in error.got
    assert "conf/experiment/NAME.yaml" in error.fix
