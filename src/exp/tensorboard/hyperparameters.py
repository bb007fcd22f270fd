"""The HParams tab of TensorBoard: hyperparameters with their true types, the metrics to compare, the run's status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

Hyperparameter = bool | int | float | str

_STATUS = {
    "completed": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
    "interrupted": api_pb2.STATUS_FAILURE,
}


def start_summaries(params: Mapping[str, object], metrics: Sequence[str]) -> list[Summary]:
    """The experiment (which columns there are) and the session's start (what this run's are).

    params: by dotted key; a value that is no bool, number or text becomes text.
    metrics: tags of scalars, `loss/val`.
    """
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in params.items()}
    experiment = api_pb2.Experiment(
        time_created_secs=time.time(),
        hparam_infos=[api_pb2.HParamInfo(name=key, type=_data_type(value)) for key, value in plain.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in plain.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = value
    return [
        _summary(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ]


def end_summary(status: str) -> Summary:
    """The session's end. status: completed, failed or interrupted, the words of report.json."""
    end = plugin_data_pb2.SessionEndInfo(status=_STATUS[status], end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def _data_type(value: Hyperparameter) -> int:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_FLOAT64 if isinstance(value, int | float) else api_pb2.DATA_TYPE_STRING


def _summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
