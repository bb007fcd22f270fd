"""exp.export: files that other programs run, against the network that was trained; what cannot be exported is named."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import exp
from exp.errors import ConfigError, RunError
from exp.export import main
from exp.saved_runs.graph_capture import ExportRefused
from exp.saved_runs.network_export import export
from exp.saved_runs.onnx_file import METADATA

onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra export is not installed")
pytest.importorskip("onnxscript", reason="the extra export is not installed")

SHORT = [
    *("trainer.enable_progress_bar=false", "trainer.max_steps=3", "hooks=[]", "logger=[]", "callbacks=[]"),
    "test=false",
]
ALLOW = "security.allow=[exported]"
WORDS = """# Own
_target_: exp.data.data.Data
dataset: {_target_: exported.Sentences}
collate: {_target_: exported.Padded}
batch_size: 6
num_classes: 3
inputs:
  tokens: {shape: [null], dtype: int64}
  mask: {shape: [null], dtype: bool}
  numbers: {shape: [4], dtype: float32}
"""
# What no other test here has: a batch norm, residuals, three kinds of containers, nested layers, a custom Function.
PROGRAM = """# Own
_target_: exp.models.containers.ModuleDictModel
layers:
  body:
    _target_: exp.models.containers.SequentialModel
    layers:
      conv: {_target_: torch.nn.Conv2d, out_channels: 4, kernel_size: 3}
      norm: {_target_: torch.nn.BatchNorm2d}
      blocks: {repeat: 2, layer: {_target_: torch.nn.Conv2d, in_channels: 4, out_channels: 4, kernel_size: 1}}
  step: {_target_: exp.models.layers.StraightThrough}
  rows: {_target_: torch.nn.LSTM, input_size: 6, hidden_size: 5, batch_first: true}
  head: {_target_: torch.nn.Linear, out_features: 10}
forward: |
  h = body(x)
  states, last = rows(h.flatten(1, 2))
  return head(states[:, -1]), step(h)
"""
UNKNOWN = """# Own
_target_: exp.models.containers.ModuleDictModel
layers:
  head: {_target_: torch.nn.Linear, out_features: 10}
forward: |
  y = x.flatten(1)
  z = linalg.matrix_exp(x[:, 0])
  return head(y + z.flatten(1))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exported", raising=False)
    shutil.copy(Path(__file__).with_name("exported.py"), tmp_path)
    for name, text in {"data/words": WORDS, "model/program": PROGRAM, "model/unknown": UNKNOWN}.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def trained(*overrides):
    report = exp.fit(exp.compose([*SHORT, ALLOW, "metrics=[]", *overrides]))
    assert report.status == "completed"
    return exp.load(report.directory, allow=["exported"])


def batch_of(run, size):
    inputs, _ = next(iter(run.data.loader("val"))).data
    return inputs[torch.arange(size) % len(inputs)]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["model=gpt", "data=text"], id="causal attention over characters"),
        pytest.param(["model=resnet"], id="batch norm"),
        pytest.param(["model=mlp", "lora.layers=[stem]", "lora.rank=2"], id="lora"),
        pytest.param(["model=mlp", "precision=bf16_true"], id="half parameters"),
    ],
)
def test_a_network_by_onnx_runtime_at_every_batch(words, text):
    run = trained(*[one for one in words if one != "data=text"], *(text if "data=text" in words else ()))
    told = export(run, output="net.onnx", timed=False)
    assert told.bytes == Path("net.onnx").stat().st_size
    session = runtime.InferenceSession("net.onnx")
    for size in (1, 7, 64):
        x = batch_of(run, size)
        (found,) = session.run(["output"], {"input": x.numpy()})
        network = run.network()
        half = next(network.parameters()).dtype == torch.bfloat16
        with torch.no_grad():
            wanted = network(x.bfloat16() if half else x)
        # Half parameters round at every layer; the file has their values, and computes in float32.
        tolerance = 5e-2 if half else 1e-5
        np.testing.assert_allclose(found, wanted.float().numpy(), rtol=1e-3, atol=tolerance)
    if "lora.rank=2" in words:
        names = [one.name for one in onnx.load("net.onnx").graph.initializer]
        assert not any("parametrizations" in name or "original" in name for name in names)


def test_several_inputs_and_outputs_by_name_with_lengths_that_change():
    run = trained("data=words", "model={_target_: exported.Reader}")
    told = export(run, output="net.onnx", timed=False)
    assert any("note" in note for note in told.notes)
    session = runtime.InferenceSession("net.onnx")
    assert {one.name: one.shape for one in session.get_inputs()} == {
        "tokens": ["batch", "length"], "mask": ["batch", "length"], "numbers": ["batch", 4]
    }  # fmt: skip
    assert [one.name for one in session.get_outputs()] == ["output", "more.words", "more.length"]
    network, draws = run.network(), np.random.default_rng(0)
    for size, length in ((1, 1), (7, 12), (64, 5)):
        tokens = torch.from_numpy(draws.integers(1, 30, (size, length)))
        numbers = torch.from_numpy(draws.normal(size=(size, 4)).astype(np.float32))
        mask = torch.ones(size, length, dtype=torch.bool)
        output, states, count = session.run(
            None, {"tokens": tokens.numpy(), "mask": mask.numpy(), "numbers": numbers.numpy()}
        )
        with torch.no_grad():
            wanted = network(tokens, mask, numbers)
        np.testing.assert_allclose(output, wanted["output"].numpy(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(states, wanted["more"]["words"].numpy(), rtol=1e-3, atol=1e-5)
        assert count.tolist() == [length] * size


def test_a_graph_of_torch_export_takes_inputs_by_name_and_any_batch():
    run = trained("model=program", "objective=[]", "+objective.class.output=output_0",
                  "+objective.class._target_=exp.objectives.objective.Term",
                  "+objective.class.loss._target_=exp.objectives.terms.CrossEntropy")  # fmt: skip
    export(run, format="torch_export", output="net.pt2", timed=False)
    module = torch.export.load("net.pt2").module()
    for size in (1, 7, 64):
        x = batch_of(run, size)
        with torch.no_grad():
            found, wanted = module(input=x), run.network()(x)
        torch.testing.assert_close(tuple(found.values()), wanted, rtol=1e-5, atol=1e-6)
        assert list(found) == ["output_0", "output_1"]
    export(run, output="net.onnx", timed=False)


def test_a_graph_of_a_run_in_double_has_its_very_numbers():
    run = trained("model=mlp", "precision=fp64")
    export(run, format="torch_export", output="net.pt2", timed=False)
    module = torch.export.load("net.pt2").module()
    x = batch_of(run, 7).float()
    network = run.network()
    with torch.no_grad():
        found, wanted = module(input=x)["output"].numpy(), network(x.double()).numpy()
        rounded = network.float().double()(x.double()).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-14)
    assert np.abs(rounded - wanted).max() > 1e-9, "which weights in float32 would not have"


def test_noise_becomes_an_input():
    run = trained("experiment=gan", "trainer.max_steps=2")
    told = export(run, output="net.onnx", timed=False)
    assert "noise takes the numbers of the Noise layer noise" in told.notes
    noise = torch.randn(5, 16)
    (found,) = runtime.InferenceSession("net.onnx").run(
        None, {"input": np.zeros((5, 1, 8, 8), np.float32), "noise": noise.numpy()}
    )
    network = run.network()
    with torch.no_grad():
        wanted = network.generator(noise)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=1e-5)


def test_a_further_dimension_has_the_name_that_it_is_given(capsys):
    run = trained("model=resnet")
    command = [f"run={run.directory}", "output=net.onnx", "dynamic={input: {2: height, 3: width}}"]
    assert main([*command, ALLOW]) == 0
    out = capsys.readouterr().out
    assert re.search(r"net.onnx  0.\d\d MiB, [\d,]+ numbers", out)
    assert re.search(r"a batch of 64: \d+\.\d+ ms, in torch \d+\.\d+ ms", out)
    session = runtime.InferenceSession("net.onnx")
    assert session.get_inputs()[0].shape == ["batch", 1, "height", "width"]
    x = torch.randn(3, 1, 12, 10)
    with torch.no_grad():
        wanted = run.network()(x)
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], wanted.numpy(), rtol=1e-3, atol=1e-5)


def test_a_dimension_that_the_graph_has_made_a_constant_of_is_refused():
    run = trained("model=lenet", "model.layers.pool2={_target_: torch.nn.AdaptiveAvgPool2d, output_size: 2}")
    with pytest.raises(RunError, match=r"ONNX Runtime cannot run it for a batch of .* Nothing was written"):
        export(run, output="net.onnx", dynamic={"input": {2: "height"}}, timed=False)
    assert not Path("net.onnx").exists()


def test_raw_numbers_go_in_with_preprocessing():
    rows = np.random.default_rng(0).normal([5.0, 1e8, -3.0], [2.0, 1.0, 1e-3], (90, 3))
    kinds = (rows[:, 0] > 5).astype(int)
    lines = [f"{a!r},{b!r},{c!r},{('cat', 'dog')[kind]}" for (a, b, c), kind in zip(rows.tolist(), kinds, strict=True)]
    Path("pets.csv").write_text("\n".join(["a,b,c,kind", *lines]) + "\n")
    run = trained("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind", "data.dataset.impute=mean")
    export(run, output="net.onnx", preprocessing=True, timed=False)
    session = runtime.InferenceSession("net.onnx")
    part = rows[run.data.part("train").indices.numpy()]
    raw = rows[:20].copy()
    raw[3, 1] = np.nan
    filled = np.where(np.isnan(raw), part.mean(0), raw)
    scaled = torch.from_numpy(((filled - part.mean(0)) / part.std(0)).astype(np.float32))
    with torch.no_grad():
        wanted = run.network()(scaled)
    np.testing.assert_allclose(session.run(None, {"input": raw})[0], wanted.numpy(), rtol=1e-3, atol=1e-5)
    described = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
    assert described["classes"] == ["cat", "dog"]
    assert described["columns"] == {"input": ["a", "b", "c"]}


def test_pixels_go_in_with_preprocessing():
    run = trained("model=mlp")
    export(run, output="net.onnx", preprocessing=True, timed=False)
    pixels = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
    (found,) = runtime.InferenceSession("net.onnx").run(None, {"input": pixels})
    with torch.no_grad():
        wanted = run.network()(torch.from_numpy((pixels * 16 - 5) / 6))  # as the digits of data=digits are centred
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=1e-5)


def test_preparation_that_is_no_graph_is_refused_by_name(text):
    run = trained(*text, "model=gpt")
    with pytest.raises(ConfigError, match="characters, which a vocabulary numbers"):
        export(run, output="net.onnx", preprocessing=True)
    Path("pets.csv").write_text("height,colour,kind\n" + "1.5,red,cat\n2.5,blue,dog\n" * 30)
    table = ["data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind"]
    run = trained(*table, "data.dataset.categorical=[colour]", "model=mlp")
    with pytest.raises(ConfigError, match="colour, whose words are numbered"):
        export(run, output="net.onnx", preprocessing=True)
    assert not Path("net.onnx").exists()


@pytest.mark.parametrize(
    ("words", "operator", "where", "line"),
    [
        (["model=unknown"], "aten.linalg_matrix_exp", "model.forward, line 2", "linalg.matrix_exp"),
        (["model={_target_: exported.Drawing}"], "aten.dropout", "exported.py:9", "exported.Drawing"),
        (["model={_target_: exported.Branching}"], None, "exported.py:8", "exported.Branching"),
        (["data=words", "model={_target_: exported.Recurrent}"], "GRU", "model.gru: GRU", "exported.Recurrent"),
    ],
)
def test_a_refusal_names_the_operator_and_the_line(words, operator, where, line):
    run = trained(*words)
    with pytest.raises(ExportRefused) as caught:
        export(run, output="net.onnx", timed=False)
    assert caught.value.operator == operator
    assert where in str(caught.value)
    assert operator is None or operator in str(caught.value)
    # The file and line at the end is where it stands in the frozen config.
    file, number = re.search(r"\[([^\[\]]+):(\d+)\]$", str(caught.value)).groups()
    near = Path(file).read_text().splitlines()[int(number) - 1 : int(number) + 2]
    assert any(line in one for one in near), near
    assert not Path("net.onnx").exists()


def test_a_file_that_differs_is_not_left(monkeypatch):
    run = trained("model=mlp")
    calls = runtime.InferenceSession.run
    monkeypatch.setattr(
        runtime.InferenceSession, "run", lambda *given, **named: [one + 0.01 for one in calls(*given, **named)]
    )
    with pytest.raises(RunError, match=r"output differs by 1\.00e-02 for a batch of 1"):
        export(run, output="net.onnx")
    assert not list(Path().glob("*.onnx*"))


@pytest.mark.parametrize(
    ("words", "how"), [(["model=mlp"], "dynamic"), (["model=lenet"], "static")], ids=["products", "convolutions"]
)
def test_eight_bits_keep_the_metrics(words, how, capsys):
    report = exp.fit(exp.compose([*SHORT, *words, "metrics=[accuracy]", "trainer.max_steps=60", "optimizer.lr=3e-3"]))
    run = exp.load(report.directory)
    told = export(run, output="net.onnx", quantize="int8", timed=False)
    whole = export(run, output="whole.onnx", timed=False)
    assert told.bytes < 0.5 * whole.bytes
    assert any(how in note for note in told.notes)
    evaluated = run.evaluate(stage="test")
    before, after = told.scores["accuracy/test"]
    assert before == pytest.approx(evaluated.metrics["accuracy/test"], abs=1e-6)
    assert told.scores["loss/test"][0] == pytest.approx(evaluated.metrics["loss/test"], rel=1e-5)
    # The second by hand, from the file.
    session, right, count = runtime.InferenceSession("net.onnx"), 0, 0
    for inputs, targets in (batch.data for batch in run.data.loader("test")):
        right += int((session.run(None, {"input": inputs.numpy()})[0].argmax(1) == targets.numpy()).sum())
        count += len(targets)
    assert after == pytest.approx(right / count, abs=1e-6)
    # By hand from the file, over the whole part; dynamic ranges depend on what else is in a batch.
    inputs = torch.cat([batch.data[0] for batch in run.data.loader("val")])
    with torch.no_grad():
        apart = np.abs(session.run(None, {"input": inputs.numpy()})[0] - run.network()(inputs).numpy()).max()
    assert told.largest_difference < 1e-4 < told.quantized_difference <= apart * 1.5
    first, second = f"{told.largest_difference:.1e}", f"{told.quantized_difference:.1e}"
    assert f"{first} before quantization, {second} quantized, on 72 samples" in str(told)
    assert "quantiz" not in str(whole)
    assert abs(after - before) < 0.05
    kinds = {one.data_type for one in onnx.load("net.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds


def test_weights_start_another_run(capsys):
    pytest.importorskip("safetensors", reason="the extra safetensors is not installed")
    run = trained("model={_target_: exported.Tied}")
    wanted = run.network().state_dict()
    for format, file in (("state_dict", "weights.pt"), ("safetensors", "weights.safetensors")):
        assert main([f"run={run.directory}", f"format={format}", f"output={file}", ALLOW]) == 0
        begun = trained("model={_target_: exported.Tied}", f"weights.from={file}", "optimizer.lr=0")
        found = begun.network().state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "second.weight and first.weight are one tensor" in capsys.readouterr().out
    plain = torch.load("weights.pt", weights_only=True)
    assert list(plain) == list(wanted)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["format=tflite"], "format: tflite; expected onnx, torch_export, state_dict, safetensors"),
        (["format=state_dict", "preprocessing=true"], "preprocessing: beside format=state_dict"),
        (["format=torch_export", "quantize=int8"], "quantize: int8 with format=torch_export; expected format=onnx"),
        (["dynamic={input: 3}"], "dynamic: {input: 3}; expected names of dimensions"),
        (["dynamic={picture: {1: time}}"], "dynamic: picture; expected an input of the network: input"),
        (["dynamic={input: {9: time}}"], "dynamic: axis 9 of input"),
        (
            ["output=x.pt"],
            "output: x.pt, whose suffix is that of format=state_dict, beside format=onnx; expected a file "
            "in .onnx. Write output=x.onnx, or format=state_dict",
        ),
        (["format=state_dict", "output=a.ONNX"], "expected a file in .pt. Write output=a.pt, or format=onnx"),
        (["format=torch_export", "output=a.safetensors"], "expected a file in .pt2. Write output=a.pt2"),
        (["format=safetensors", "output=a.pth"], "whose suffix is that of format=state_dict"),
        (["output=."], "output: ., a directory; expected a file. Write output=network.onnx"),
    ],
)
def test_a_command_that_cannot_be(words, told, capsys, run_of_digits):
    assert main([f"run={run_of_digits}", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def run_of_digits(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("digits")):
        return exp.fit(exp.compose(SHORT)).directory


def test_what_a_run_holds_is_not_written_over(run_of_digits, capsys, tmp_path):
    directory = Path(run_of_digits)
    files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    copied = shutil.copy(directory / "checkpoints" / "best.ckpt", tmp_path / "copied.ckpt")
    assert {"best.ckpt", "config.yaml", "report.json"} <= {path.name for path in files}
    for format in ("onnx", "state_dict"):
        for path in (*files, directory / "checkpoints" / "new"):
            assert main([f"run={directory}", f"format={format}", f"output={path}"]) == 2
            assert f"output: {path}, " in capsys.readouterr().err
    for words in ([f"run={copied}"], [f"run={directory}", f"weights={copied}"]):
        assert main([*words, "format=state_dict", f"output={copied}"]) == 2
        assert "from which the weights are read" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for _ in range(2):
        assert main([f"run={directory}", "format=state_dict"]) == 0


@pytest.mark.parametrize(
    "words",
    [["format=onnx"], ["quantize=int8"], ["format=torch_export"], ["format=state_dict"], ["format=safetensors"]],
)
def test_a_full_disk_is_told_in_a_line_and_keeps_the_older_file(words, run_of_digits, capsys):
    if words == ["format=safetensors"]:
        pytest.importorskip("safetensors", reason="the extra safetensors is not installed")
    output = Path("network.bin")
    output.write_bytes(b"older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The limit stands for the disk's end: write() gives the first part, then an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        assert main([f"run={run_of_digits}", *words, f"output={output}"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the network cannot be written ")
    assert line.endswith("File too large. Make room there")
    assert "quantize=int8" in words or f"to {output}: " in line
    assert output.read_bytes() == b"older"
    assert [path.name for path in Path().glob(".*.partial")] == []
