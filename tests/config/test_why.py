"""python -m exp.why: the files and overrides that set a key, references, sizes from the data, and past runs."""

from pathlib import Path

import pytest

import exp
from exp.cli.why import main
from exp.config.freeze import freeze

FILES = {
    "conf/model/mine.yaml": (
        "# A model. Select it with model=mine\n"
        "_target_: exp.models.containers.SequentialModel\n"
        "constants:\n  width: 24\n"
        "layers:\n"
        "  flatten: {_target_: torch.nn.Flatten}\n"
        "  hidden: {_target_: torch.nn.Linear, out_features: '${model.constants.width}'}\n"
        "  head:\n"
        "    _target_: torch.nn.Linear\n"
        "    in_features: ${..hidden.out_features}\n"
        "    out_features: ${data.num_outputs}\n"
    ),
    "conf/experiment/e.yaml": (
        "# @package _global_\n# E. Select it with experiment=e\n"
        "defaults:\n  - override /model: mine\n  - override /scheduler: cosine\n"
        "seed: 4\n"
        "optimizer: {lr: 0.25}\n"
        "initialisation: {'*.bias': zeros}\n"
    ),
    "people.csv": "a,b,kind\n" + "".join(f"{n},{n % 7},{'xyz'[n % 3]}\n" for n in range(30)),
}
CSV = ("data=csv", "data.dataset.path=people.csv", "data.dataset.target=kind")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXP_DATA_DIR", raising=False)
    for path, text in FILES.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


@pytest.fixture
def why(capsys):
    def ask(*words, status=0):
        assert main(list(words)) == status, capsys.readouterr().err
        told = capsys.readouterr()
        return (told.err if status else told.out).splitlines()

    return ask


def columns(lines):
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines]


def test_every_layer_of_a_key_is_listed(why):
    head, *rows = why("optimizer.lr", "experiment=e", "optimizer.lr=0.5", "optimizer.lr=0.75")
    assert head == "optimizer.lr = 0.75"
    first, second, third, last = columns(rows)
    assert first[0].endswith("conf/optimizer/adamw.yaml:3")
    assert first[2] == "optimizer/adamw"
    assert second == ["conf/experiment/e.yaml:7", "0.25", "experiment/e"]
    assert (third[1], last) == ("0.5", ["command line", "0.75", "optimizer.lr=0.75"])


def test_references_are_followed_step_by_step(why):
    head, row, *steps = why("model.layers.head.in_features", "model=mine")
    assert head == "model.layers.head.in_features = 24"
    assert row.startswith("  conf/model/mine.yaml:10  ${..hidden.out_features}")
    hidden = "model.layers.hidden.out_features is ${model.constants.width}  [conf/model/mine.yaml:7]"
    width = "model.constants.width is 24  [conf/model/mine.yaml:4]"
    assert steps == [f"  ${{..hidden.out_features}}: {hidden}", f"    ${{model.constants.width}}: {width}"]


def test_variables_are_named_and_secrets_hidden(why, monkeypatch):
    assert why("data_dir")[-1].endswith("EXP_DATA_DIR is not set")
    monkeypatch.setenv("EXP_DATA_DIR", "/elsewhere")
    assert why("data_dir")[0] == "data_dir = /elsewhere"
    monkeypatch.setenv("MY_TOKEN", "hush-hush-hush")
    printed = "\n".join(why("data_dir", "data_dir='${oc.env:MY_TOKEN}'"))
    assert "MY_TOKEN is set" in printed
    assert "hush" not in printed


def test_sizes_from_the_data_are_named(why):
    for key in ("data.num_outputs", "model.layers.head.out_features"):
        lines = why(key, "model=mine", *CSV)
        assert lines[0] == f"{key} = 3"
        assert lines[-1] == "  the data, exp.data.data.Data, filled in 3"
    missing = why("data.num_outputs", "data=csv", "data.dataset.path=peple.csv", "data.dataset.target=kind")
    assert missing[0] == "data.num_outputs = null"
    assert "Did you mean people.csv?" in missing[-1]


def test_a_node_lists_its_keys(why):
    rows = {row[0]: row[1:] for row in columns(why("optimizer", "experiment=e", "+optimizer.amsgrad=true"))}
    assert rows["optimizer.lr"] == ["0.25", "conf/experiment/e.yaml:7"]
    assert rows["optimizer.amsgrad"] == ["true", "command line"]
    assert rows["optimizer.groups"][0] == "{}"
    layers = {row[0]: row[1] for row in columns(why("model.layers.head", "model=mine"))[1:]}
    assert layers["model.layers.head.in_features"] == "${..hidden.out_features} = 24"


def test_names_with_dots_and_numbers_are_found(why):
    assert why("initialisation.*.bias", "experiment=e")[0] == "initialisation.*.bias = zeros"
    assert why("freeze.unfreeze.10", "+freeze.unfreeze.10=[a]")[0] == "freeze.unfreeze.10 = [a]"


def test_a_removed_key_names_the_removal(why):
    lines = why("hooks.memory", "~hooks.memory")
    assert lines[0] == "hooks.memory: removed"
    assert columns(lines)[-1] == ["command line", "(removed)", "~hooks.memory"]
    lines = why("model.layers.hidden", "model={_target_:torch.nn.Linear,in_features:3,out_features:4}")
    assert "(the whole node)" in lines[-1]


def test_a_default_of_the_class_is_named(why):
    assert why("optimizer.weight_decay") == [
        "optimizer.weight_decay = 0.01",
        "  not set: the default of torch.optim.AdamW",
    ]


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("optimizer.lrr", "Did you mean optimizer.lr?"),
        ("lr", "Did you mean optimizer.lr?"),
        ("trainer.devices", "Write launch.devices="),
        ("hydra.run.dir", "--cfg hydra"),
    ],
)
def test_a_wrong_key_suggests_the_nearest(why, key, fix):
    assert fix in why(key, status=2)[1]


def test_a_wrong_command_is_reported(why):
    assert "2 keys" in why("seed", "name", status=2)[1]
    assert "only overrides" in why("seed=3", status=2)[1]


def test_a_past_run_explains_its_config(why):
    freeze(exp.compose(["experiment=e", "hydra.run.dir=outputs/r", "seed=9"]))
    lines = why("seed", "from_run=outputs/r")
    assert lines[0] == "seed = 9"
    assert columns(lines)[-1] == ["from_run", "9", "seed=9"]
