"""Each data option of conf/ builds the data that it declares."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

import exp
from exp.data.data import Data
from exp.data.workers import as_batch

CONF = Path(exp.__file__).parent / "conf" / "data"
LOADER = OmegaConf.load(CONF / "_loader.yaml")
DECLARED = OmegaConf.load(CONF.parent / "train.yaml").data


def node(option: str) -> dict:
    """The node that an option composes to, without Hydra."""
    own = OmegaConf.load(CONF / f"{option}.yaml")
    base = OmegaConf.load(CONF / "csv.yaml") if option == "csv_regression" else OmegaConf.create()
    base.pop("defaults", None)
    own.pop("defaults")
    whole = OmegaConf.merge(
        {"data_dir": "data"}, {"data": OmegaConf.merge(DECLARED, LOADER, base, own.get("data", own))}
    )
    return OmegaConf.to_container(whole, resolve=True)["data"]


def build(option: str, **settings) -> Data:
    plain = node(option)
    assert plain.pop("_target_") == "exp.data.data.Data"
    dataset = {**plain.pop("dataset"), **settings}
    module, name = dataset.pop("_target_").rsplit(".", 1)
    return Data(dataset=getattr(__import__(module, fromlist=[name]), name)(**dataset), **plain)


@pytest.mark.parametrize("option", ["breast_cancer", "diabetes", "digits", "letter_names", "text", "wine"])
def test_an_option_declares_what_its_data_holds(option):
    data = build(option)
    assert data.stages == ("train", "val", "test")
    assert data.spec.num_outputs > 0
    batch = next(iter(data.loader("train")))
    assert batch.global_size == node(option)["batch_size"]
    assert tuple(batch.data[0].shape[1:]) == data.spec.input_shape


def test_options_of_your_own_files(tmp_path):
    rows = np.arange(40.0).reshape(20, 2)
    np.savez(tmp_path / "a.npz", input=rows, target=np.arange(20) % 4)
    np.savetxt(tmp_path / "a.csv", rows, delimiter=",", header="x,y", comments="")
    assert build("tensors", path=str(tmp_path / "a.npz")).spec.num_classes == 4
    assert build("csv", path=str(tmp_path / "a.csv"), target="y").spec.num_classes == 20
    assert build("csv_regression", path=str(tmp_path / "a.csv"), target="y").spec.num_outputs == 1


def test_built_data_can_be_sent_to_another_process():
    data = build("wine")
    assert pickle.loads(pickle.dumps(data)).spec == data.spec


def test_pinning_turns_a_pair_into_a_list_and_a_batch_is_a_pair_again():
    assert as_batch([1, 2]) == (1, 2)
    assert as_batch({"input": 1}) == {"input": 1}
