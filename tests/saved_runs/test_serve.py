"""exp.serve: responses, errors, limits and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

from exp.extras.serve.serve import main
from exp.saved_runs.answers import Reading

onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
pytest.importorskip("onnxruntime", reason="the extra export is not installed")
for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="the extra serve is not installed")

# These modules import the packages above.
from exp.cli.prediction_files import rows_of as said_of  # noqa: E402
from exp.extras.export.network_export import export  # noqa: E402
from exp.extras.export.onnx_file import METADATA, Description, OnnxModel  # noqa: E402
from exp.extras.serve.json_samples import answer_of  # noqa: E402
from exp.extras.serve.model_server import AddressError, ModelServer  # noqa: E402

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())["serve"]
READINGS = {"output": vars(Reading(target="target", kind="classes", names=["ant", "bee", "cow"]))}
TABLE = np.arange(30, dtype=np.float32).reshape(10, 3)


def model_file(**described):
    """Return an ONNX file of output = table[ids] + shift with ids `[batch, length]` below 10, shift `[batch, 1, 3]`."""
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("Add", ["rows", "shift"], ["output"]),
        ],
        "table",
        [
            helper.make_tensor_value_info("ids", kinds.INT64, ["batch", "length"]),
            helper.make_tensor_value_info("shift", kinds.FLOAT, ["batch", 1, 3]),
        ],
        [helper.make_tensor_value_info("output", kinds.FLOAT, ["batch", "length", 3])],
        [onnx.numpy_helper.from_array(TABLE, "table")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if described:
        helper.set_model_props(proto, {METADATA: json.dumps(described)})
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def server():
    with ModelServer(OnnxModel(model_file(run="runs/one", readings=READINGS, quantization=None), threads=1)) as started:
        yield started


def ask(server, body, *, path="/predict", headers=None):
    """Send a request, and return status and content of the response."""
    given = {"content-type": "application/json", **(headers or {})}
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    address = server if isinstance(server, str) else server.address
    request = urllib.request.Request(address + path, content, given)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def rows_of(ids, shift):
    return {"inputs": {"ids": ids, "shift": [[[shift] * 3] for _ in ids]}}


def test_an_answer_has_outputs_and_classes(server):
    status, content = ask(server, rows_of([[1, 4], [9, 0]], 0.5))
    found = json.loads(content)
    assert status == 200
    np.testing.assert_array_equal(found["outputs"]["output"], TABLE[[[1, 4], [9, 0]]] + 0.5)
    assert [one["class"] for one in found["predictions"]] == [["cow", "cow"], ["cow", "cow"]]
    # JSON has no nan, so nan is null.
    status, content = ask(server, {"inputs": {"ids": [[2]], "shift": [[[None, 0, 0]]]}})
    assert json.loads(content)["outputs"]["output"] == [[[None, 7.0, 8.0]]]
    scores = np.array([[np.nan] * 3, [1.0, np.nan, 0.0], [-np.inf, 1.0, 0.0], [-np.inf] * 3], np.float32)
    found = answer_of({"output": scores}, Description(readings=READINGS))
    assert [one["class"] for one in found["predictions"]] == [None, None, "bee", None]
    assert json.loads(json.dumps(found))["outputs"]["output"][0] == [None] * 3


def inputs(ids, shift):
    return {"inputs": {"ids": ids, "shift": shift}}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff\xfe", 400, "the body is not JSON"),
        (b"[" * 19_000, 400, "nested too deeply"),
        (b'{"inputs": {"ids": ' + b"[" * 900 + b"]" * 900 + b', "shift": [[[0, 0, 0]]]}}', 400, "nested too deeply"),
        ([1], 400, "the body is no valid request; expected"),
        ({"inputs": {"ids": [[1]]}}, 400, "the input shift is missing; expected ids, shift"),
        (
            {"inputs": {"idz": [], **rows_of([[1]], 0)["inputs"]}},
            400,
            "idz: unknown input; expected ids, shift. Did you",
        ),
        (inputs([[1, 2], [3]], [[[0, 0, 0]]] * 2), 400, "ids has parts of different shapes"),
        (inputs([1], [[[0, 0, 0]]]), 422, "ONNX Runtime rejects the inputs"),
        (inputs([[1]], [[[0, 0]]]), 422, "ONNX Runtime rejects the inputs"),
        (inputs([[1.5]], [[[0, 0, 0]]]), 400, "ids holds 1.5; expected whole numbers"),
        (inputs([[True]], [[[0, 0, 0]]]), 400, "ids holds true; expected whole numbers"),
        (
            inputs([[2**63]], [[[0, 0, 0]]]),
            400,
            "ids holds 9223372036854775808; expected whole numbers within the range of int64",
        ),
        (b'{"inputs": {"ids": [[1]], "shift": [[[NaN, 0, 0]]]}}', 400, "NaN is no number in JSON"),
        (inputs([[1]], [[[10**400, 0, 0]]]), 400, "shift has a number outside the range of float64"),
        (b'{"inputs": {"ids": [[1]], "shift": [[[1e39, 0, 0]]]}}', 400, "of float32"),
        (inputs([], []), 400, "0 samples; expected 1 to 256"),
        (inputs([[1]] * 257, [[[0, 0, 0]]] * 257), 400, "257 samples; expected 1 to 256"),
        (inputs(1, 2), 400, "ids is a int; expected a list"),
        (inputs([[1]] * 2, [[[0, 0, 0]]]), 400, "2 (ids), 1 (shift) samples"),
        (inputs([[77]], [[[0, 0, 0]]]), 422, "ONNX Runtime rejects the inputs"),
        (b" " * (2**20 + 1), 413, "larger than 1,048,576 bytes"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_request_gets_a_reason(server, body, status, reason):
    found, content = ask(server, body)
    assert found == status
    assert reason in json.loads(content)["error"]


def test_only_this_machine_may_ask(server):
    good = rows_of([[1]], 0)
    # Forms of other web sites can send text/plain, so it is refused.
    assert ask(server, good, headers={"content-type": "text/plain"})[0] == 415
    assert ask(server, good, headers={"host": "rebound.example"})[0] == 400
    assert ask(server, None, path="/nothing")[0] == 404
    assert ask(server, None, path="/predict")[0] == 405
    assert server.address.startswith("http://127.0.0.1:")
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    with pytest.raises(AddressError, match=f"port {port} of 127.0.0.1: .*expected a free port"):
        ModelServer(OnnxModel(model_file()), port=port)


async def exchange(port, bodies):
    """Send each body on its own connection, all at once, and return the statuses and contents in their order."""

    async def one(body):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ") for line in answer.lower().split(b"\r\n")[1:] if b": " in line)
        content = await reader.readexactly(int(fields[b"content-length"]))
        writer.close()
        return int(answer.split()[1]), json.loads(content)

    return await asyncio.gather(*map(one, bodies))


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_request_of_many_at_once_is_lost(count, server):
    port = int(server.address.rpartition(":")[2])
    bodies, wanted = [], []
    for number in range(count):
        ids = [[number % 10] * (1 + number % 3)]
        if number % 10 == 9:
            bodies.append(b"{" if number % 20 == 9 else json.dumps(rows_of([[10 + number]], 0)).encode())
            wanted.append(400 if number % 20 == 9 else 422)
        else:
            bodies.append(json.dumps(rows_of(ids, number)).encode())
            wanted.append(TABLE[ids] + number)
    found = asyncio.run(exchange(port, bodies))
    for (status, content), expected in zip(found, wanted, strict=True):
        if isinstance(expected, int):
            assert status == expected
            assert content["error"]
        else:
            assert status == 200, content
            np.testing.assert_array_equal(content["outputs"]["output"], expected)


def test_health_is_shown(server):
    assert ask(server, rows_of([[1]], 0))[0] == 200
    assert json.loads(ask(server, None, path="/health")[1]) == {"status": "ok"}


def test_a_table_is_served_by_its_columns(trained, pets, write_csv):
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    rows = pets(120, seed=0)
    built = np.array([f"2024-02-{1 + row % 28:02}" for row in range(120)])
    write_csv("pets.csv", {"built": built, **{name: rows[name] for name in ("colour", "height", "kind")}})
    run = trained(
        "data=csv", "data.dataset.path=pets.csv", "data.dataset.dates=[built]", "data.dataset.impute=mean",
        "data.dataset.categorical=[colour]", "data.dataset.target={species: kind}", "metrics=[]",
        "+objective.cross_entropy.target=species", "model=mlp",
    )  # fmt: skip
    model = OnnxModel(export(run, output="net.onnx").path, threads=1)
    new = {"height": [1.5, 2.5, "3e0"], "colour": ["red", "violet", None], "built": ["2024-02-01", "2024-03-09", None]}
    rows = (dict(zip(new, row, strict=True)) for row in zip(*new.values(), strict=True))
    Path("new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = list(said_of(run.predict("new.jsonl"), is_flat=False))
    with ModelServer(model, port=0) as server:
        _, content = ask(server, {"inputs": {**new, "id": [7, 8, 9]}})
        found = json.loads(content)
        for one, row in zip(found["predictions"], wanted, strict=True):
            assert one.pop("class") == row.pop("class")
            assert one == pytest.approx(row, rel=1e-4)
        assert found["unknown"] == {"colour": {"": 1, "violet": 1}}
        for changed, reason in (
            ({"height": ["tall"] * 3}, "'tall' in row 0 of the request, column height; expected a finite number"),
            ({"built": [19753] * 3}, "column built; expected a date in ISO 8601"),
            ({"height": [1.0]}, "3 (built), 1 (height), 3 (colour) samples"),
            ({"height": 1.0}, "height is a float; expected a list"),
            ({"height": [[1.0]] * 3}, "height holds a list"),
        ):
            status, content = ask(server, {"inputs": {**new, **changed}})
            assert (status, reason in json.loads(content)["error"]) == (400, True), content
        assert b"the input built is missing" in ask(server, {"inputs": {"colour": ["red"]}})[1]


@pytest.mark.slow
def test_open_requests_are_answered_before_the_end(commands, trained):
    run = trained("data=wine", "model=mlp")
    started = commands.start(f"run={run.directory}", "port=0", module="exp.serve")
    ends = time.monotonic() + 120
    while "http" not in (shown := started.streams[0].read_text() if started.streams[0].exists() else ""):
        assert time.monotonic() < ends
        assert started.process.is_alive(), started.streams[1].read_text()
        time.sleep(0.05)
    address = next(word for word in shown.split() if word.startswith("http"))
    inputs, _ = next(iter(run.data.loader("val"))).data
    fitted = run.data.fitted["table"]
    columns = (inputs[:5].double() * fitted["deviations"] + fitted["means"]).T.tolist()
    body = json.dumps({"inputs": dict(zip(fitted["numbers"], columns, strict=True))}).encode()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=60) as connection:
        head = "POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:10])
        time.sleep(0.5)
        os.kill(started.process.pid, signal.SIGTERM)
        time.sleep(0.5)
        connection.sendall(body[10:])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], answer
    found = json.loads(content)
    scores = run.network()(inputs[:5]).detach().numpy()
    np.testing.assert_allclose(found["outputs"]["output"], scores, rtol=1e-3, atol=1e-5)
    assert [one["class"] for one in found["predictions"]] == [f"class_{place}" for place in scores.argmax(1)]
    done = started.end(seconds=60)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("words", "status", "message"), REFUSED)
def test_a_wrong_command_is_refused(words, status, message, capsys):
    Path("broken.onnx").write_bytes(b"none")
    Path("whole.onnx").write_bytes(model_file())
    assert main(words) == status
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_before_the_export(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["run=nowhere"]) == 2
    assert "pip install 'exp-framework[serve]'" in capsys.readouterr().err
