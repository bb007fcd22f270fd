"""What a run tells of itself."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from exp.tensorboard import session
from exp.tensorboard.logger import TensorBoardLogger

CONFIG = {
    "seed": 3,
    "monitor": "accuracy/val",
    "metrics": {"accuracy": {}, "f1": {}},
    "optimizer": {"lr": 0.001, "betas": [0.9, 0.99], "amsgrad": False},
    "model": {"layers": {}},
    "precision": {"word": "bf16"},
    "launch": {"devices": "auto"},
    "resume": None,
}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=1e-3", {"optimizer.lr": 0.001}),
        ("seed=3", {"seed": 3}),
        ("++optimizer.amsgrad=false", {"optimizer.amsgrad": False}),
        ("launch.devices=auto", {"launch.devices": "auto"}),
        ("model=mlp", {"model": "mlp"}),
        ("+precision=bf16", {"precision": "bf16"}),
        ("optimizer.betas=[0.9,0.99]", {"optimizer.betas": "[0.9,0.99]"}),
        ("resume=null", {"resume": "null"}),
        ("~hooks.memory", {}),
        ("hydra.run.dir=outputs/here", {}),
        ("hydra/launcher=exp", {}),
    ],
)
def test_the_command_line_s_keys_have_the_config_s_values(override, expected):
    found = session.hyperparameters([override], CONFIG)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_a_run_writes_its_config_command_row_and_end(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "overrides.yaml").write_text("- optimizer.lr=1e-3\n- model=mlp\n")
    logger = TensorBoardLogger(directory=tmp_path)
    session.begin([object(), logger], directory=tmp_path, config=CONFIG)
    logger.log_metrics({"accuracy/val": 0.9}, 20)
    session.end([object(), logger], "completed")

    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("config", "command")}
    assert texts == {
        "config": "```yaml\nseed: 3\n```",
        "command": "```sh\npython -m exp.train optimizer.lr=1e-3 model=mlp\n```",
    }
    content = {tag: read.SummaryMetadata(tag).plugin_data.content for tag in read.Tags()["tensors"]}
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert [info.name.tag for info in experiment.metric_infos] == ["accuracy/val", "loss/val", "f1/val"]
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["optimizer.lr"].number_value == 0.001
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert end.status == api_pb2.STATUS_SUCCESS


def test_without_a_command_line_s_overrides_the_row_is_empty_and_there(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "overrides.yaml").write_text("[]\n")
    logger = TensorBoardLogger(directory=tmp_path)
    session.begin([logger], directory=tmp_path, config=CONFIG)
    logger.finalize("success")
    assert metadata.SESSION_START_INFO_TAG in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["tensors"]
