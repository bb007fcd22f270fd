"""Networks with several named inputs train in one process and on several ranks, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.engine.checkpoint import read_checkpoint
from exp.errors import ConfigError

DATA = """# Own
_target_: exp.data.data.Data
dataset: {{_target_: several.{kind}}}
batch_size: 8
parts: {{train: 0.75, val: 0.25}}
"""
YAMLS = {
    "data/twins": DATA.format(kind="Twins")
    + "num_classes: 2\ninputs: {left: {shape: [4], dtype: float32}, right: {shape: [4], dtype: float32}}",
    "data/visits": DATA.format(kind="Visits") + "num_classes: 3",
    "data/sentences": DATA.format(kind="Sentences")
    + """num_classes: 10
collate: {_target_: several.Padded}
inputs:
  source: {shape: [null], dtype: int64}
  previous: {shape: [null], dtype: int64}
  mask: {shape: [null], dtype: bool}
""",
    "data/molecules": DATA.format(kind="Molecules")
    + "inputs: {nodes: {shape: [5, 3], dtype: float32}, edges: {shape: [5, 5], dtype: float32}}",
    "model/twins": """# Own
_target_: exp.models.containers.ModuleDictModel
inputs: [left, right]
layers:
  tower: {_target_: torch.nn.Linear, out_features: 6}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
forward: return head((tower(left) - tower(right)).abs())
""",
    "model/visits": "# Own\n_target_: several.ImageAndTable",
    "model/sentences": "# Own\n_target_: several.Translator",
    "model/molecules": """# Own
_target_: exp.models.containers.ModuleDictModel
inputs: [nodes, edges]
layers:
  first: {_target_: torch.nn.Linear, out_features: 6}
  second: {_target_: torch.nn.Linear, out_features: 1}
forward: return second((edges @ first(nodes)).relu()).mean(1)
""",
}
KINDS = ("twins", "visits", "sentences", "molecules")


@pytest.fixture(autouse=True)
def files(write):
    write("several.py", Path(__file__).with_name("several.py").read_text())
    for name, text in YAMLS.items():
        write(f"conf/{name}.yaml", f"{text}\n")


def words(kind: str, name: str, *more: str) -> list[str]:
    loss = ["objective=[mse]", "data.num_outputs=1"] if kind == "molecules" else ["objective=[cross_entropy]"]
    return [
        *(f"data={kind}", f"model={kind}", *loss, "metrics=[]", "callbacks=[]", "logger=[]", "test=false"),
        *("hooks=[gradients,memory]", "precision=fp64", "trainer.max_epochs=2", "trainer.enable_progress_bar=false"),
        *(f"hydra.run.dir=outputs/{name}", "optimizer=sgd", "optimizer.lr=0.1", *more),
    ]


def weights(name: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path("outputs") / name / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("sentences", "fsdp"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (*((kind, "ddp") for kind in KINDS), ("visits", "fsdp"))
        ),
    ],
)
def test_several_inputs_resume_and_train_over_ranks(kind, strategy, commands):
    exp.fit(exp.compose(words(kind, "whole")))
    whole = weights("whole")
    exp.fit(exp.compose(words(kind, "half", "trainer.max_epochs=1")))
    exp.fit(exp.compose(words(kind, "rest", "resume=outputs/half/checkpoints/last.ckpt")))
    assert all(torch.equal(value, whole[name]) for name, value in weights("rest").items())
    done = commands.run(*words(kind, strategy, f"strategy={strategy}", "launch.devices=2"))
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(dict(weights(strategy)), dict(whole), rtol=1e-9, atol=1e-10)


def test_inputs_are_read_from_the_data_and_frozen():
    decided = plan(resolve(exp.compose(words("visits", "visits"))))
    shapes = {name: (one.shape, one.dtype) for name, one in decided.spec.inputs.items()}
    assert shapes["image"] == ((1, 6, 6), "float32")
    assert shapes["table"] == ((5,), "float32")
    assert decided.resolved.plain["data"]["inputs"]["table"] == {"shape": [5], "dtype": "float32"}
    assert decided.resolved.plain["data"]["input_shape"] is None
    # Sizes that the network omits are inferred from the shapes of the inputs.
    assert decided.shapes.network.read.in_features == 5


@pytest.mark.parametrize(
    ("kind", "overrides", "key", "message"),
    [
        ("twins", ["~data.inputs.right"], "data.inputs", "left, although samples have 3 values"),
        ("twins", ["model.inputs=[left,rigth]"], "model.forward", "right"),
        (
            "visits",
            ["model=twins"],
            "data.inputs",
            "image, table, number, but the forward of ModuleDictModel has the parameters left",
        ),
        ("visits", ["data.inputs={image: {shape: [1,6,6], dtype: float32}}"], "data.inputs", "named table"),
        (
            "visits",
            ["data.inputs={image: {shape: [1,6,7], dtype: float32}, table: {shape: [5], dtype: float32}}"],
            "data.inputs.image.shape",
            "[1, 6, 6], the shape of the data",
        ),
        (
            "visits",
            ["data.inputs={image: {shape: [1,6,6], dtype: float32}, tabel: {shape: [5], dtype: float32}}"],
            "data.inputs.tabel",
            "Did you mean table?",
        ),
        ("visits", ["data.inputs={image: [1,6,6]}"], "data.inputs", "a mapping of names to {shape: [3, 32, 32]"),
        ("visits", ["data.inputs={target: {shape: [1], dtype: int64}}"], "data.inputs", "a mapping of names"),
        ("visits", ["data.inputs={image: {shape: [0], dtype: int64}}"], "data.inputs", "a mapping of names"),
        ("molecules", ["data.inputs=null"], "data.inputs", "samples have 3 values"),
    ],
)
def test_inputs_that_do_not_fit_the_network_are_refused(kind, overrides, key, message):
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose(words(kind, "wrong", *overrides)))
    assert any(error.key == key and message in str(error) for error in caught.value.errors), str(caught.value)
    assert not Path("outputs").exists()
