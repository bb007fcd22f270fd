"""The check of whole configs: nothing right is refused, nothing wrong raises, and each fault names its file."""

import copy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import exp
from exp.check.__main__ import main as check
from exp.check.keys import SCHEMA
from exp.check.plan import examine, plan, resolve, validate
from exp.check.stages import compose, first_stage, second_stage
from exp.config.freeze import COMPOSITION
from exp.config.hydra_adapter import Loader
from exp.config.reading import MAX_NODES, read
from exp.config.slots import COLLECTIONS, NODES, PHASES
from exp.errors import ConfigError, Fault, is_installed
from exp.train import main as train

CONF = Path(exp.__file__).parent / "conf"
NEWCOMER = Path(exp.__file__).parents[2] / ".ci" / "newcomer"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


IMAGE_MODELS = ["lenet", "resnet", "rnn", "transformer"]
NEEDS = dict.fromkeys(
    ("tensors", "csv", "csv_regression", "parquet", "npy", "windows", "mnist", "images", "stream", "hf", "token_file"),
    "a file",
)
if not is_installed("tokenizers"):
    NEEDS["tokens"] = "an extra"
if not is_installed("deepspeed"):
    NEEDS["deepspeed"] = "an extra"
NEEDS["letter_names"] = "a network of whole numbers: experiment=names_rnn"
EXTRAS = ("mlflow", "wandb")
NEEDS |= {"muon": "a network of matrices", "sparse_adam": "sparse gradients alone"}
NEEDS["fp8"] = "a Hopper GPU; tests/precision/test_fp8.py"
# Adam's own eps is 0 in float16.
PRECISIONS = {"fp16_true": ["optimizer.eps=1e-4"]}
COMMANDS = [
    *([f"model={name}"] for name in options("model") if name not in ("gpt", "gan")),
    *([f"data={name}"] for name in options("data") if name not in NEEDS and name != "text"),
    ["data=text"],
    *([f"data={name}", "model=mlp"] for name in ("wine", "breast_cancer", "diabetes")),
    *([f"optimizer={name}"] for name in options("optimizer") if name not in NEEDS),
    *([f"scheduler={name}"] for name in options("scheduler")),
    *([f"precision={name}", *PRECISIONS.get(name, [])] for name in options("precision") if name not in NEEDS),
    *([f"strategy={name}"] for name in options("strategy") if name not in NEEDS),
    *([f"+callbacks={name}"] for name in options("callbacks")),
    *([f"debug={name}"] for name in options("debug")),
    # The others are checked by tests/plan/test_training_notes.py, and where tests/gallery runs them.
    *([f"experiment={name}"] for name in ("gan", "gpt", "dann")),
    *([f"+hooks={name}"] for name in options("hooks") if name != "features"),
    ["model=lenet", "+hooks=features"],
    *([f"logger=[{name}]"] for name in options("logger") if name not in EXTRAS or find_spec(name)),
    *([f"metrics=[{name}]"] for name in ("accuracy", "f1", "auroc")),
    *(["data=diabetes", f"objective=[{name}]", f"metrics=[{metric}]"]
      for name, metric in (("mse", "mae"), ("l1", "rmse"), ("huber", "r2"))),
    ["data=text", "metrics=[bits_per_character,perplexity]"],
    ["model=gan", "objective=[discriminator,generator]", "phases=[adversarial]", "metrics=[]"],
    ["model=gan", "objective=[discriminator,generator,wgan_gp]", "phases=[wgan_gp]", "metrics=[]"],
    ["model=sequential", "phases=[body_and_head]"],
    ["experiment=gan", "+objective=r1", "objective.r1.output=real_score", "+phases=lazy_r1"],
    ["+objective=[r1,jacobian]"],
    ["model=mlp", "+objective=consistency"],
    ["hooks=[]", "callbacks=[]", "logger=[]"],
    ["+precision=bf16", "strategy=ddp"],
]  # fmt: skip


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # A module beside somebody's conf, of another test's folder.
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_yaml_composes_and_passes_the_check(command, empty):
    assert examine(resolve(compose(command))).faults == ()


def test_every_option_is_in_the_test_above():
    chosen = " ".join(argument for command in COMMANDS for argument in command)
    files = [
        "debug",
        "precision",
        "strategy",
        "optimizer",
        "scheduler",
        "data",
        "model",
        "callbacks",
        "hooks",
        "phases",
    ]
    missing = [name for group in files for name in options(group) if name not in chosen and name not in NEEDS]
    # gpt is what data=text chooses.
    assert missing == ["gpt"] or missing == []


def test_the_schema_has_the_keys_of_train_yaml(empty):
    config = OmegaConf.to_container(compose([]), resolve=False)

    def compare(schema: dict, node: dict, key: str) -> None:
        extra = set(NODES) | set(COLLECTIONS) | {COMPOSITION, PHASES} if not key else set()
        assert set(schema) == set(node) - extra, key
        for name, rule in schema.items():
            if isinstance(rule, dict):
                compare(rule, node[name], f"{key}.{name}")

    compare(SCHEMA, config, "")


def test_the_first_stage_imports_neither_torch_nor_lightning(empty):
    program = (
        "import sys; from exp.check.stages import compose; from exp.check.stages import first_stage, located\n"
        "from exp.config.reading import read\n"
        "config = compose(['optimizer.lr=fast', 'monitor=los/val'])\n"
        "assert len(located(config, first_stage(read(config)))) == 2\n"
        "print([name for name in ('torch', 'lightning', 'torchmetrics', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ok_says_what_will_run(empty, capsys):
    assert check(["model=mlp", "+precision=bf16", "strategy=ddp", "launch.accelerator=cpu"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("ok: ")
    for part in ("parameters", "input [1, 8, 8] float32", "batch 64", "ddp with 2 ranks on cpu", "bf16"):
        assert part in line


def test_a_sweep_is_checked_whole(empty, commands):
    done = commands.run("-m", "optimizer.lr=1e-4,1e-3", "model=mlp,sequential", module="exp.check.__main__")
    assert (done.returncode, done.stdout) == (0, "ok: 4 jobs\n")
    assert list(empty.iterdir()) == [], "the check left something behind"


def test_the_number_of_parameters_is_the_networks(empty):
    config = compose(["model=sequential"])
    from exp.construct import build_network, plain_config
    from exp.shared_types import DataSpec

    spec = DataSpec(input_shape=(1, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
    network = build_network(plain_config(config), spec)
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
    faults = examine(resolve(compose([node, "security.allow=[sklearn]"]))).faults
    # Allowed, and then refused by its place.
    assert [fault.key for fault in faults] == ["metrics.mine._target_"]
    assert "torchmetrics.Metric" in faults[0].expected
    assert "allowed" not in faults[0].got


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
    """The file that a fault names is the one that set the key last."""

    def fault(self, command: list[str], key: str) -> Fault:
        return next(fault for fault in examine(resolve(compose(command))).faults if fault.key == key)

    def test_the_command_line_over_a_file(self, empty):
        assert self.fault(["seed=-1"], "seed").source == "command line"

    def test_a_file_of_ones_own_over_exps(self, empty):
        write(empty / "conf/experiment/mine.yaml", "# @package _global_\n# Mine\noptimizer: {lr: fast}\n")
        assert self.fault(["experiment=mine"], "optimizer.lr").source == "conf/experiment/mine.yaml, line 3"

    def test_a_parameter_that_is_missing_is_where_its_node_is(self, empty):
        write(empty / "conf/model/mine.yaml", """
            # No width: model=mine
            _target_: exp.models.containers.SequentialModel
            layers: {hidden: {_target_: torch.nn.Linear}}
            """)  # fmt: skip
        fault = self.fault(["model=mine"], "model.layers.hidden.out_features")
        assert (fault.got, fault.source) == ("nothing", "conf/model/mine.yaml, line 3")

    def test_a_program_has_line_and_column(self, empty):
        write(empty / "conf/model/mine.yaml", """
            # A program with a typo in its second line: model=mine
            _target_: exp.models.containers.ModuleDictModel
            layers: {flatten: {_target_: torch.nn.Flatten}}
            forward: |
              x = flatten(x)
              return flaten(x)
            """)  # fmt: skip
        fault = self.fault(["model=mine"], "model.forward")
        assert fault.source == "conf/model/mine.yaml, line 6, column 10"
        assert "flaten" in fault.got
        assert "flatten" in fault.expected


class TestReading:
    def faults(self, content: dict) -> dict[str, Fault]:
        return {fault.key: fault for fault in read(OmegaConf.create(content))[1]}

    def test_an_interpolation_to_nowhere_names_its_holder_and_the_nearest(self):
        faults = self.faults({"data": {"num_classes": 3}, "head": {"width": "${data.num_clases}"}})
        assert faults.keys() == {"head.width"}
        assert faults["head.width"].cure == "Did you mean ${data.num_classes}?"

    def test_an_entry_of_a_list_that_names_nothing_is_a_fault(self, empty):
        with pytest.raises(ConfigError) as caught:
            plan(resolve(compose(["data.input_shape=['${data.dataset.length}']"])))
        assert "data.input_shape" in str(caught.value)

    def test_one_missing_value_is_one_fault_however_many_use_it(self):
        assert self.faults({"a": "???", "b": "${a}", "c": "x ${a}"}).keys() == {"a"}

    def test_circles_end(self):
        assert self.faults({"a": "${b}", "b": "${a}"}).keys() == {"a", "b"}
        assert self.faults({"a": {"b": "${a}"}}).keys() == {"a.b"}

    def test_an_environment_variable_that_is_not_set(self, monkeypatch):
        monkeypatch.delenv("NOT_SET_AT_ALL", raising=False)
        fault = self.faults({"a": "${oc.env:NOT_SET_AT_ALL}"})["a"]
        assert "NOT_SET_AT_ALL" in fault.got
        assert self.faults({"a": "${oc.env:NOT_SET_AT_ALL,x}"}) == {}

    def test_doubling_interpolations_are_bounded(self):
        content = {"a0": "x"} | {f"a{index}": f"${{a{index - 1}}}${{a{index - 1}}}" for index in range(1, 60)}
        (fault,) = self.faults(content).values()
        assert "too large" in fault.got

    def test_many_nodes_are_bounded(self):
        (fault,) = self.faults({"a": list(range(MAX_NODES + 1))}).values()
        assert "too large" in fault.got


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
    """Where to go down from the root, by the share of each level's keys, and what to do there."""
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
@settings(max_examples=50, deadline=None)
def test_any_edit_of_a_config_gives_faults_or_none_and_never_raises(valid, changes):
    plain = copy.deepcopy(valid)
    for change in changes:
        edited(plain, change)
    plain.pop(COMPOSITION, None)
    config = OmegaConf.create(plain)
    for fault in [*first_stage(read(config)), *second_stage(config, read(config))]:
        assert fault.key
        assert len(str(fault)) < 2000
        assert "\n" not in str(fault)
    for fault in examine(resolve(config)).faults:
        assert isinstance(fault, Fault)


ALL_HOOKS = ["+hooks=[nan_guard,samples,confusion,operators,landscape,clip_module]"]


@pytest.mark.parametrize("words", [[], ALL_HOOKS, ["experiment=gan"]])
def test_a_config_without_one_of_its_nodes_is_faults_and_never_raises(words):
    whole = OmegaConf.to_container(compose(words))
    for name in whole:
        config = OmegaConf.create({key: value for key, value in whole.items() if key not in (name, COMPOSITION)})
        assert examine(resolve(config)).faults or name == COMPOSITION, name


@pytest.mark.parametrize("empty", [None, []])
@pytest.mark.parametrize("words", [[*ALL_HOOKS, "strategy=ddp"], ["experiment=gan"]])
def test_a_config_with_one_of_its_nodes_empty_never_raises(words, empty):
    whole = OmegaConf.to_container(compose(words))
    del whole[COMPOSITION]
    told = {name: examine(resolve(OmegaConf.create({**whole, name: empty}))).faults for name in whole}
    assert {"model", "data", "optimizer", "scheduler", "strategy", "trainer"} <= {name for name in told if told[name]}


@pytest.mark.parametrize("inner", ["local_sgd", "powersgd"])
def test_a_part_of_ddp_may_be_null_beside_a_hook_that_asks_for_it(inner):
    whole = OmegaConf.to_container(compose(["+hooks=clip_module", "strategy=ddp", "hooks.clip_module.at=parameters"]))
    config = {**whole, "strategy": {**whole["strategy"], inner: None}}
    assert not examine(resolve(OmegaConf.create(config))).faults


def test_a_config_made_by_hand_is_checked_without_a_composition(valid):
    plain = copy.deepcopy(valid)
    del plain[COMPOSITION]
    plain["optimizer"]["lr"] = "fast"
    with pytest.raises(ConfigError) as caught:
        validate(OmegaConf.create(plain))
    (fault,) = caught.value.faults
    assert (fault.key, fault.source) == ("optimizer.lr", None)


@pytest.mark.parametrize("command", [["optimizer.lrr=1", "seed=-1"], ["seed=-1"], ["-m", "optimizer.lrr=1,2"]])
def test_a_wrong_command_is_composed_once(command, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    composed = []
    whole = Loader.compose
    monkeypatch.setattr(Loader, "compose", lambda *given, **named: (composed.append(1), whole(*given, **named))[1])
    assert train(command) == 2
    assert "[command line]" in capfd.readouterr().err
    assert composed == [1]


def test_what_a_sweep_needs_torch_for_waits_until_the_rest_is_right(tmp_path, monkeypatch, capfd, commands):
    monkeypatch.chdir(tmp_path)
    command = ["-m", "seed=0,-1", "model.layers.head.out_features=7"]
    assert check(command) == 2
    early = capfd.readouterr().err
    assert early.startswith("1 fault in")
    assert "  seed: -1" in early
    done = commands.run("--all", *command, module="exp.check.__main__")
    assert done.returncode == 2
    assert "  seed: -1" in done.stderr
    assert "  model.layers.head" in done.stderr


def test_repeats_within_repeats_are_bounded_by_their_product(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    relu = "{repeat: TIMES, layer: {_target_: torch.nn.ReLU}}"
    inner = f"{{_target_: exp.models.containers.ModuleListModel, layers: {{a: {relu}}}}}"
    command = f"+model.layers.deep={{repeat: 1000, layer: {inner}}}"
    assert check(["model=mlp", command.replace("TIMES", "1000")]) == 2
    told = capfd.readouterr().err
    assert "model.layers.deep.repeat: 1000, which makes 1,0" in told
    assert "expected 100,000 layers at most" in told
    assert first_stage(read(compose(["model=mlp", command.replace("TIMES", "2")]))) == []


@pytest.mark.parametrize(
    "override",
    ["data.batch_size=1e99", "data.batch_size=99999999999999999999", "trainer.max_epochs=99999999999999999999",
     "trainer.limit_train_batches=99999999999999999999", "scheduler=step scheduler.step_size=99999999999999999999",
     "launch.nodes=1000000000", "phases=[adversarial] phases.generator.repeats=1000000000",
     "model=rnn model.layers.recurrent.num_layers=1000000", "data.input_shape=[3000000000,3000000000,3000000]"],
)  # fmt: skip
def test_a_number_that_nothing_can_count_to_is_told(override, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert check(override.split()) == 2
    assert f"  {override.split()[-1].partition('=')[0]}: " in capfd.readouterr().err


def test_a_network_that_no_memory_here_holds_is_noted(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert check(["model.layers.hidden.out_features=100000000000"]) == 0
    assert "model: its parameters alone take 71,898 GiB, and this machine has" in capfd.readouterr().err


def test_a_train_yaml_of_ones_own_that_lacks_most_keys_is_one_fault(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("# My own\nname: mine\n")
    with pytest.raises(exp.ConfigError) as caught:
        exp.validate(exp.compose([]))
    (fault,) = caught.value.faults
    assert "none of seed, monitor" in fault.got
    assert "conf/experiment/NAME.yaml" in fault.cure
