"""python -m exp.schema: every YAML file of conf/ is valid by its schema, and files with typing errors are not."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from exp.config.settings import SCHEMA, VALUES, Unfreezing
from exp.config.yaml_files import read_yaml
from exp.extras.schema.json_schema import annotation_schema
from exp.extras.schema.schema import FOLDER, GROUPS, main, make_schemas, settings

jsonschema = pytest.importorskip("jsonschema")
CONF = Path(__file__).parents[2] / "conf"
NEWCOMER = Path(__file__).parents[2] / ".ci" / "newcomer"
FILES = sorted(CONF.rglob("*.yaml"))


def schema_of(file: Path, conf: Path) -> str:
    """Return the name of the schema for a YAML file in a config folder."""
    parts = file.relative_to(conf).parts
    return "train" if len(parts) == 1 or "@package _global_" in file.read_text() else parts[0]


@pytest.fixture(scope="module")
def validators(tmp_path_factory):
    """The validators of a working directory with the files of docs/extending.md."""
    place = tmp_path_factory.mktemp("schemas")
    shutil.copytree(NEWCOMER, place, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        for module in ("spirals", "lit"):  # another test may have imported other modules of these names
            patch.delitem(sys.modules, module, raising=False)
        schemas = make_schemas(libraries=("torch.optim",))  # all classes of torch.nn would take 5 s
    found = {}
    for name, schema in schemas.items():
        jsonschema.Draft7Validator.check_schema(schema)
        found[name] = jsonschema.Draft7Validator(json.loads(json.dumps(schema)))
    return found


def test_every_yaml_is_valid_by_its_schema(validators):
    for file in FILES:
        errors = validators[schema_of(file, CONF)].iter_errors(read_yaml(file))
        assert [f"{list(error.absolute_path)}: {error.message[:200]}" for error in errors] == [], file


def test_the_schema_knows_user_classes(validators):
    conf = NEWCOMER / "conf"
    for file in sorted(conf.rglob("*.yaml")):
        assert validators[schema_of(file, conf)].is_valid(read_yaml(file)), file
    assert not validators["hooks"].is_valid({"mine": {"_target_": "spirals.WeightNorm", "every_n_stepz": 10}})


WRONG = [
    ("optimizer", "{_target_: torch.optim.AdamW, lrr: 0.1}"),
    ("optimizer", "{_target_: torch.optim.AdamW, lr: fast}"),
    ("optimizer", "{_target_: torch.optim.AdamW, params: 3, exempt: [norms]}"),
    ("scheduler", "{_target_: exp.optim.schedules.Cosine, intervall: step}"),
    ("data", "{defaults: [_loader, _self_], batchsize: 32}"),
    ("data", "{_target_: exp.data.data.Data, dataset: {_target_: exp.data.delimited.Csv, paht: a.csv}}"),
    ("hooks", "{gradients: {_target_: exp.hooks.gradients.Gradients, every_n_step: 3}}"),
    ("model", "{layers: {a: {repeat: 2, layer: {_target_: torch.nn.Dropout, p: x}}}}"),
    ("precision", "{word: bf61}"),
    ("phases", "{one: {term: [a]}}"),
    ("phases", "{one: {optimizer: {_target_: torch.optim.AdamW, lr: fast}}}"),
    ("metrics", "{accuracy: {_target_: exp.objectives.metrics.Accuracy, outputs: logits}}"),
    ("objective", "{mse: {_target_: torch.nn.MSELoss, reduktion: mean}}"),
    ("strategy", "{_target_: exp.strategies.ddp.DDP, bucket_cap_mb: large}"),
    ("train", "{precison: {word: bf16}}"),
    ("train", "{trainer: {max_epoch: 3}}"),
    ("train", "{trainer: {_target_: lightning.pytorch.Trainer, devices: 2}}"),
    ("train", "{mode: minimum}"),
    ("train", "{optimizer: {lr: fast}}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_wrong_yaml_is_not_valid(name, text, validators):
    assert not validators[name].is_valid(yaml.safe_load(text))


RIGHT = [
    ("optimizer", "{_target_: torch.optim.AdamW, lr: '${vars.lr}', betas: [0.9, '${b}'], weight_decay: '???'}"),
    ("optimizer", "{_target_: mine.Optimizer, anything: 3}"),
    ("model", "{_target_: mine.Net, sizes: [1, 2], inner: {_target_: torch.nn.Linear, out_features: 3}}"),
    ("model", "{_target_: exp.models.containers.SequentialModel, layers: '${other.layers}'}"),
    ("train", "{model: {layers: {hidden: {out_features: 3}}}, hooks: {mine: {_target_: a.B, x: 1}}, data: '${other}'}"),
    ("metrics", "{a: {_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 3, output: logits}}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), RIGHT)
def test_a_right_yaml_is_valid(name, text, validators):
    assert [error.message for error in validators[name].iter_errors(yaml.safe_load(text))] == []


def test_annotations_become_types_and_words():
    whole = {"definitions": {"interpolation": {"pattern": r"\$\{", "type": "string"}}}

    def takes(annotation, value):
        return jsonschema.Draft7Validator({**whole, **annotation_schema(annotation)}).is_valid(value)

    scaler = SCHEMA["precision"]["scaler"]
    assert [takes(scaler["backoff_factor"], value) for value in (0.5, 1, "x")] == [True, True, False]
    assert [takes(VALUES["data.input_mean"], value) for value in ([0.5], None, "a")] == [True, True, False]
    assert [takes(SCHEMA["launch"]["devices"], value) for value in ("auto", 2, [0, 2], "two")] == [True] * 3 + [False]
    assert takes(tuple[int, float], [1, 0.5])
    assert not takes(tuple[int, float], 1)
    assert takes(Unfreezing, {"10": ["a"]})


def test_the_command_writes_schemas_and_settings(tmp_path, monkeypatch, capsys):
    shutil.copytree(NEWCOMER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main([], libraries=()) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :])["yaml.schemas"] == settings()
    assert {file.stem for file in FOLDER.glob("*.json")} == {"train", *GROUPS}
