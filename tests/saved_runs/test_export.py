"""exp.export: exported files equal the trained network, and errors have the unsupported operators."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from exp.errors import RunError
from exp.extras.export.export import main
from exp.extras.export.graph_capture import ExportRefused
from exp.extras.export.network_export import export
from exp.extras.export.onnx_file import METADATA

onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra export is not installed")
pytest.importorskip("onnxscript", reason="the extra export is not installed")

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())["export"]
ALLOW = "security.allow=[exported]"


@pytest.fixture(scope="module", autouse=True)
def loaded_exporter():
    """Import the exporter once, because the import takes longer than an export."""
    torch.onnx.export(torch.nn.Linear(1, 1).eval(), (torch.ones(1, 1),), dynamo=True, verbose=False)


@pytest.fixture
def trained(trained):
    """A function that trains a short run with networks of a user, and loads it."""
    return lambda *overrides: trained("callbacks=[]", ALLOW, "metrics=[]", *overrides, allow=("exported",))


def batch_of(run, size):
    inputs, _ = next(iter(run.data.loader("val"))).data
    return inputs[torch.arange(size) % len(inputs)]


def outputs_of(run, inputs):
    with torch.no_grad():
        return run.network()(inputs)


def onnx_outputs(**inputs):
    """Run net.onnx, and return its outputs."""
    return runtime.InferenceSession("net.onnx").run(None, inputs)


def assert_close(found, wanted, *, atol=1e-5):
    np.testing.assert_allclose(found, wanted.float().numpy(), rtol=1e-3, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["model=mlp", "lora.layers=[stem]", "lora.rank=2"], id="lora"),
        pytest.param(["model=gpt", "data=text"], id="causal attention"),
        pytest.param(["model=resnet"], id="batch norm"),
        pytest.param(["model=mlp", "precision=bf16_true"], id="half parameters"),
    ],
)
def test_onnx_runtime_computes_the_network(words, text, trained):
    run = trained(*[one for one in words if one != "data=text"], *(text if "data=text" in words else ()))
    exported = export(run, output="net.onnx")
    assert exported.bytes == Path("net.onnx").stat().st_size
    for size in (1, 7, 64):
        x = batch_of(run, size)
        is_half = "precision=bf16_true" in words
        # The file computes in float32 with the bfloat16 values of the parameters. The network rounds at every layer.
        (found,) = onnx_outputs(input=x.numpy())
        assert_close(found, outputs_of(run, x.bfloat16() if is_half else x), atol=5e-2 if is_half else 1e-5)
    names = [one.name for one in onnx.load("net.onnx").graph.initializer]
    assert not any("parametrizations" in name or "original" in name for name in names)


def test_inputs_and_outputs_have_names_and_variable_lengths(trained):
    run = trained("data=words", "model={_target_: exported.Reader}")
    export(run, output="net.onnx")
    session = runtime.InferenceSession("net.onnx")
    assert {one.name: one.shape for one in session.get_inputs()} == {
        "tokens": ["batch", "length"], "mask": ["batch", "length"], "numbers": ["batch", 4]
    }  # fmt: skip
    assert [one.name for one in session.get_outputs()] == ["output", "more.words", "more.length"]
    draws = np.random.default_rng(0)
    for size, length in ((1, 1), (7, 12), (64, 5)):
        tokens = torch.from_numpy(draws.integers(1, 30, (size, length)))
        numbers = torch.from_numpy(draws.normal(size=(size, 4)).astype(np.float32))
        mask = torch.ones(size, length, dtype=torch.bool)
        given = {"tokens": tokens.numpy(), "mask": mask.numpy(), "numbers": numbers.numpy()}
        output, states, count = session.run(None, given)
        with torch.no_grad():
            wanted = run.network()(tokens, mask, numbers)
        assert_close(output, wanted["output"])
        assert_close(states, wanted["more"]["words"])
        assert count.tolist() == [length] * size


def test_metadata_names_columns_and_classes(trained):
    Path("pets.csv").write_text("a,b,kind\n" + "1.5,2,cat\n2.5,7,dog\n" * 30)
    run = trained("data=csv", "data.dataset.path=pets.csv", "data.dataset.target=kind", "model=mlp")
    export(run, output="net.onnx")
    metadata = json.loads(runtime.InferenceSession("net.onnx").get_modelmeta().custom_metadata_map[METADATA])
    assert metadata["readings"]["output"]["names"] == ["cat", "dog"]
    assert metadata["columns"] == {"input": ["a", "b"]}
    fitted = metadata["served_table"]["fitted"]
    raw = np.array([[1.5, 2.0], [2.5, 7.0]])
    scaled = ((raw - fitted["means"]) / fitted["deviations"]).astype(np.float32)
    wanted = run.predict({"a": raw[:, 0], "b": raw[:, 1]}, overrides=[ALLOW]).outputs["output"]
    np.testing.assert_allclose(onnx_outputs(input=scaled)[0], wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=unknown"],
            "an operator cannot be written as ONNX: No ONNX function .*aten.linalg_matrix_exp",
        ),
        (["model={_target_: exported.Branching}"], r"model: Branching \(exported.py, line \d+\) cannot be"),
        (
            ["data=words", "model={_target_: exported.Recurrent}"],
            "the dimension length of tokens becomes the",
        ),
    ],
)
def test_a_refusal_names_the_operator_and_the_line(words, message, trained):
    run = trained(*words)
    with pytest.raises(ExportRefused, match=message):
        export(run, output="net.onnx")
    assert not Path("net.onnx").exists()


@pytest.mark.parametrize("words", [["model={_target_: exported.Drawing}"], ["experiment=gan"]])
def test_random_outputs_are_refused(words, trained):
    run = trained(*words)
    with pytest.raises(RunError, match="that draws random numbers returns other outputs"):
        export(run, output="net.onnx")


def test_a_file_with_other_outputs_is_removed(digits, monkeypatch):
    run = runtime.InferenceSession.run

    def shifted(*given, **named):
        return [one + 0.01 for one in run(*given, **named)]

    monkeypatch.setattr(runtime.InferenceSession, "run", shifted)
    with pytest.raises(RunError, match=r"output differs by 1\.00e-02 for a batch of 1"):
        export(digits, output="net.onnx")
    assert not list(Path().glob("*.onnx*"))


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_wrong_command_is_refused(words, message, capsys, digits_directory):
    assert main([f"run={digits_directory}", *words]) == 2
    assert message in capsys.readouterr().err


def test_files_of_the_run_are_not_overwritten(digits_directory, capsys, tmp_path):
    files = {path: path.read_bytes() for path in digits_directory.rglob("*") if path.is_file()}
    copied = shutil.copy(digits_directory / "checkpoints" / "best.ckpt", tmp_path / "copied.ckpt")
    assert {"best.ckpt", "config.yaml", "report.json"} <= {path.name for path in files}
    for path in (*files, digits_directory / "checkpoints" / "new"):
        assert main([f"run={digits_directory}", f"output={path}"]) == 2
        assert f"output: {path}, " in capsys.readouterr().err
    for words in ([f"run={copied}"], [f"run={digits_directory}", f"weights={copied}"]):
        assert main([*words, f"output={copied}"]) == 2
        assert "the checkpoint with the weights" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in digits_directory.rglob("*") if path.is_file()}


def test_a_full_disk_keeps_the_older_file(digits_directory, capsys):
    output = Path("network.bin")
    output.write_bytes(b"older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The limit simulates a full disk: write() writes the first part, then fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        assert main([f"run={digits_directory}", f"output={output}"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"the network cannot be written to {output}: ")
    assert line.endswith("File too large. Free disk space there")
    assert output.read_bytes() == b"older"
    assert [path.name for path in Path().glob(".*.partial")] == []
