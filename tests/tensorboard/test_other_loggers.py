"""The loggers csv, mlflow and wandb log the same tags and numbers as TensorBoard's, also after a resume."""

from __future__ import annotations

import csv
import json
import math
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import exp
from exp.cli.check import main as check
from exp.hooks.panels import Histogram, Image, PrecisionRecallCurve, Text
from exp.run import run

STEPS = 20
Points = dict[str, dict[int, float]]


def trained_in_two_parts(directory: Path, monkeypatch, *overrides: str) -> Path:
    """Train two epochs in one run directory, with a restart after the first epoch."""
    directory.mkdir()
    monkeypatch.chdir(directory)
    small = ["model.layers.hidden.out_features=8", "model.layers.hidden2.out_features=8", "test=false"]
    report = exp.fit(exp.compose(["trainer.max_epochs=1", *small, *overrides]))
    first = Path(report.directory)
    config = OmegaConf.load(first / "config.yaml")
    config.trainer.max_epochs = 2
    OmegaConf.save(config, first / "config.yaml")
    run(first, resume=first / "checkpoints" / "last.ckpt")
    return first


def in_events(directory: Path) -> Points:
    read = EventAccumulator(str(directory / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = read.PluginTagToContent("scalars")
    return {tag: once([(e.step, make_ndarray(e.tensor_proto).item()) for e in read.Tensors(tag)]) for tag in tags}


def once(points: list[tuple[int, float]]) -> dict[int, float]:
    assert len(dict(points)) == len(points), "a step is logged twice"
    return dict(points)


def assert_same(found: Points, expected: Points) -> None:
    assert found.keys() == expected.keys()
    assert {"loss/train", "loss/val", "accuracy/val", "gradients/norm/total"} <= found.keys()
    assert list(found["loss/train"]) == list(range(1, 2 * STEPS + 1))
    for tag, points in found.items():
        # Event files have float32 numbers.
        assert points == pytest.approx(expected[tag], rel=1e-6), tag


HOOK = """
from exp.hooks.hook import Hook
from exp.hooks.panels import Histogram, Image, PrecisionRecallCurve, Text


class Glance(Hook):
    def setup(self, network):
        self.weights = next(network.parameters())

    def after_backward(self, step):
        return {"gradients/histogram/first": Histogram.of(self.weights.grad), "number": self.weights.grad.norm()}

    def after_step(self, step):
        inputs, targets = step.data
        return {
            "samples": Image.of(inputs[:4], stretched=True),
            "note": Text(f"step {step.index}"),
            "curve": PrecisionRecallCurve.of(inputs.mean((1, 2, 3)) / 16, targets > 4),
        }
"""


def test_csv_and_panels_of_a_resumed_run(tmp_path, monkeypatch):
    (tmp_path / "glance.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    hook = ("+hooks.glance={_target_: glance.Glance, every_n_steps: 10}", "security.allow=[glance]")
    directory = trained_in_two_parts(tmp_path / "here", monkeypatch, "+logger=csv", *hook)
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tags = [tag for tag in rows[0] if tag != "step"]
    found = {tag: once([(int(row["step"]), float(row[tag])) for row in rows if row[tag]]) for tag in tags}
    assert_same(found, in_events(directory))
    read = EventAccumulator(str(directory / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert {tag: len(read.Tensors(tag)) for tag in ("config", "command")} == {"config": 1, "command": 1}
    assert "+logger=csv" in read.Tensors("command")[0].tensor_proto.string_val[0].decode()
    for tag in ("number", "gradients/histogram/first", "samples", "note", "curve"):
        assert [event.step for event in read.Tensors(tag)] == [1, 10, 20, 30, 40], tag
    assert read.Tensors("note")[1].tensor_proto.string_val[0] == b"step 10"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_an_error(name, capsys, tmp_path, monkeypatch):
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    monkeypatch.chdir(tmp_path)
    assert check([f"+logger={name}"]) == 2
    message = f"needs the package {name}, which is not installed: pip install 'exp-framework[{name}]'"
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- tests that need the packages ---


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed: pip install 'exp-framework[mlflow]'")
class TestMlflow:
    pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of MLflow's dependencies

    def test_it_has_the_values_of_the_event_file(self, tmp_path, monkeypatch):
        from mlflow.tracking import MlflowClient

        directory = trained_in_two_parts(tmp_path / "here", monkeypatch, "+logger=mlflow", "tags=[a,b]")
        client = MlflowClient(f"sqlite:///{tmp_path}/here/outputs/mlflow.db")
        (experiment,) = [one for one in client.search_experiments() if one.name == "train"]
        (stored,) = client.search_runs([experiment.experiment_id])
        assert stored.info.status == "FINISHED"
        assert stored.data.tags["tags"] == "a, b"
        assert stored.data.params["optimizer.lr"] == "0.003"
        found = {
            tag: once([(metric.step, metric.value) for metric in client.get_metric_history(stored.info.run_id, tag)])
            for tag in stored.data.metrics
        }
        assert_same(found, in_events(directory))
        path = client.download_artifacts(stored.info.run_id, "config.md", str(tmp_path))
        assert "batch_size: 64" in Path(path).read_text()

    def test_a_kill_repeats_no_row(self, tmp_path, caplog):
        from mlflow.tracking import MlflowClient

        from exp.extras.mlflow.mlflow_store import MlflowLogger

        caplog.set_level("INFO", logger="exp")
        options = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "artifacts": str(tmp_path / "artifacts")}
        for first in (1, 6):
            logger = MlflowLogger(directory=tmp_path / "run", **options)
            (tmp_path / "run").mkdir(exist_ok=True)
            logger.describe(described())
            logger.purge(first)
            for step in range(first, first + 8):
                logger.log_metrics({"loss/train": float(step), "a[0]": math.nan}, step)
            logger.log_panels(PANELS, first)
            logger.save()
        logger.end("interrupted")
        client = MlflowClient(options["tracking_uri"])
        stored = client.get_run(json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"])
        history = client.get_metric_history(stored.info.run_id, "loss/train")
        assert [(metric.step, metric.value) for metric in history] == [(step, float(step)) for step in range(1, 14)]
        assert stored.info.status == "KILLED"
        assert "a_0_" in stored.data.metrics
        assert (
            len([r for r in caplog.records if "Histogram: histogram and similar panels are left out" in r.message]) == 2
        )
        assert [file.path for file in client.list_artifacts(stored.info.run_id, "text")] == ["text/1.md", "text/6.md"]
        assert len(client.list_artifacts(stored.info.run_id, "images")) >= 2


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install 'exp-framework[wandb]'")
class TestWandb:
    pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of W&B

    def test_it_has_the_values_of_the_event_file(self, tmp_path, monkeypatch):
        directory = trained_in_two_parts(tmp_path / "here", monkeypatch, "+logger=wandb")
        parts = sorted((directory / "wandb").glob("offline-run-*"))
        assert len(parts) == 2
        assert len({part.name.rpartition("-")[2] for part in parts}) == 1, "both parts must have the same id"
        rows, expected = [row for part in parts for row in history(part)], in_events(directory)
        found = {tag: [(row["trainer/global_step"], float(row[tag])) for row in rows if tag in row] for tag in expected}
        assert_same({tag: once(points) for tag, points in found.items()}, expected)

    def test_a_kill_repeats_no_step(self, tmp_path, caplog):
        from exp.extras.wandb.wandb_run import WandbLogger

        caplog.set_level("INFO", logger="exp")
        for first in (1, 6):
            logger = WandbLogger(directory=tmp_path)
            logger.describe(described())
            logger.purge(first)
            for step in range(first, first + 8):
                logger.log_metrics({"loss/train": float(step)}, step)
                logger.experiment.log({"mine": step})  # without a step
            logger.log_panels(PANELS, first + 8)
            logger.end("completed")
        rows = [row for part in sorted((tmp_path / "wandb").glob("offline-run-*")) for row in history(part)]
        steps = [row["trainer/global_step"] for row in rows if "loss/train" in row]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]
        assert [row["mine"] for row in rows if "mine" in row] == [*range(1, 9), *range(6, 14)]
        at = "trainer/global_step"
        kinds = {tag: [(row[at], row[f"{tag}/_type"]) for row in rows if f"{tag}/_type" in row] for tag in PANELS}
        assert kinds == {
            "histogram": [(9, "histogram"), (14, "histogram")],
            "images": [(9, "image-file"), (14, "image-file")],
            "text": [(9, "html-file"), (14, "html-file")],
            "curve": [],
        }
        assert len([r for r in caplog.records if "PrecisionRecallCurve: curve" in r.message]) == 2


PANELS = {
    "histogram": Histogram.of(torch.arange(10.0)),
    "images": Image.of(torch.rand(3, 1, 8, 8)),
    "text": Text("**a**"),
    "curve": PrecisionRecallCurve.of(torch.tensor([0.5]), torch.tensor([1])),
}


def described():
    from exp.loggers.run_logger import Description

    return Description(hyperparameters={"seed": 0}, metrics=[], config={"seed": 0}, texts={}, tags=[])


def history(folder: Path) -> list[dict[str, object]]:
    """Return the rows of an offline run, which are records in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    content, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows
