"""Names of runs in TensorBoard, which are the overrides of the command, unique and stable."""

from __future__ import annotations

import datetime
import json
import urllib.parse

import pytest
import yaml

from exp.extras.dashboard.overview import in_order, question
from exp.extras.dashboard.run_names import LinkedRuns, run_name
from exp.tensorboard.hparams import OF_SWEEP
from exp.tensorboard.logger import TensorBoardLogger

TODAY = f"{datetime.date.today():%Y-%m-%d}"


def made(directory, *typed: str):
    (directory / "tensorboard").mkdir(parents=True)
    (directory / "tensorboard" / "events.out.tfevents.1.here").write_bytes(b"")
    (directory / "overrides.yaml").write_text(yaml.safe_dump([*typed]))
    return directory / "tensorboard"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ([], "defaults"),
        (["optimizer.lr=0.01", "model=lenet"], "lr=0.01 model=lenet"),
        (["hydra.run.dir=x", "name=mine", "resume=outputs/a/last.ckpt", "seed=2"], "seed=2"),
        (["model.layers.a.out_features=8", "model.layers.b.out_features=16"],
         "model.layers.a.out_features=8 model.layers.b.out_features=16"),
        (["monitor=accuracy/val", "+aug/train=strong"], "monitor=accuracy:val +aug:train=strong"),
        (["vars.note=\u00e9\nx"], "note=\u00e9 x"),
        (["~hooks.memory", "+hooks=activations", "data.dataset.path=/data/my/table.csv"],
         "~hooks.memory +hooks=activations path=table.csv"),
    ],
)  # fmt: skip
def test_a_name_has_the_typed_overrides(tmp_path, typed, name):
    folder = made(tmp_path / "train" / TODAY / "09-39-17", *typed)
    assert run_name(folder, below=tmp_path) == f"{name} · {TODAY} 09-39-17"


def test_a_job_has_its_number_and_long_names_are_cut(tmp_path):
    job = made(tmp_path / "train" / "sweeps" / TODAY / "09-39-17" / "3", "seed=3")
    assert run_name(job, below=tmp_path) == "seed=3 · 09-39-17 3"
    long = run_name(made(tmp_path / TODAY / "10-00-00", f"tag={chr(0x4E2D) * 200}"), below=tmp_path)
    assert 100 < len(long.encode()) <= 120


def test_links_follow_new_and_removed_runs(tmp_path):
    outputs, place = tmp_path / "outputs", tmp_path / "links"
    place.mkdir()
    first = made(outputs / "a" / TODAY / "09-39-17", "seed=1")
    links = LinkedRuns(outputs, place)
    links.refresh()
    second = made(outputs / "b" / TODAY / "09-39-17", "seed=1")
    sweep = outputs / "train" / "sweeps" / TODAY / "12-00-00"
    sweep.mkdir(parents=True)
    (sweep / f"events.out.tfevents.1.here{OF_SWEEP}").write_bytes(b"")
    links.refresh()
    found = {link.name: link.resolve() for link in place.iterdir()}
    name = f"seed=1 · {TODAY} 09-39-17"
    assert found == {name: first, f"{name} (2)": second}
    (first / "events.out.tfevents.1.here").unlink()
    links.refresh()
    assert [link.name for link in place.iterdir()] == [f"{name} (2)"]


def test_important_tags_come_first():
    ordered = ["loss/train", "loss/val", "accuracy/val", "optimizer/lr/default", "throughput/samples_per_second"]
    assert in_order(["loss/test", *reversed(ordered)]) == ordered
    assert in_order(["val/acc", "train/loss", "val/loss", "test/acc"]) == ["train/loss", "val/loss", "val/acc"]


def test_the_newest_run_with_scalars_is_pinned(tmp_path):
    for place, tags in enumerate((["loss/train", "accuracy/val"], [])):
        logger = TensorBoardLogger(directory=tmp_path / str(place))
        logger.log_metrics(dict.fromkeys(tags, 1.0), 1)
        logger.finalize("success")
    (links := tmp_path / "links").mkdir()
    (links / "sweep").mkdir()
    for place in range(2):
        (links / str(place)).symlink_to(tmp_path / str(place) / "tensorboard")
    (links / "gone").symlink_to(tmp_path / "gone")
    (pinned,) = urllib.parse.parse_qs(question(links))["pinnedCards"]
    assert [card["tag"] for card in json.loads(pinned)] == ["loss/train", "accuracy/val"]
