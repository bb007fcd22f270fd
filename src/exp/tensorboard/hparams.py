"""The HParams page of TensorBoard: which columns it has, and how each session (a run) began and ended.

A sweep declares the columns once, in an event file of its own directory, with the domain of each key that it sweeps;
its jobs repeat that, for TensorBoard takes the first declaration that it meets. Neither torch nor, before something is
written, NumPy is imported here: the process of a sweep needs neither.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from exp.spelling import show

# Those of tensorboard.plugins.hparams.metadata, whose import takes longer than the sweep's own; a test compares them.
PLUGIN = "hparams"
EXPERIMENT_TAG = "_hparams_/experiment"
START_TAG = "_hparams_/session_start_info"
END_TAG = "_hparams_/session_end_info"

EVENTS = "events.out.tfevents.*"
# The last parts of the names of event files: of an end that a restart may yet undo, and of a sweep's declaration.
UNFINISHED = ".unfinished"
OF_SWEEP = ".sweep"
# How far above a job its sweep's directory is, at most: hydra.sweep.subdir may have folders in it.
LEVELS = 4
# Of a record: its length and that length's checksum; behind its content another checksum.
_HEADER, _CHECKSUM = struct.Struct("<QI"), 4

_STATUS = {
    "completed": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
    "interrupted": api_pb2.STATUS_FAILURE,
    "pruned": api_pb2.STATUS_SUCCESS,  # it was ended for what it had shown, which is no failure; PRUNED_TAG says so
}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What a sweep goes over with one key. values: of a list; None of an interval, from low to high."""

    values: Sequence[object] | None = None
    low: float = 0.0
    high: float = 0.0


def declaration(
    params: Mapping[str, Sequence[object]], metrics: Sequence[str], *, domains: Mapping[str, Domain] | None = None
) -> api_pb2.Experiment:
    """Which columns there are.

    params: values of each dotted key. Keys with values of several types have text, so that 1 and 1.0 are different.
    metrics: tags of scalars, `loss/val`. domains: of the keys that a sweep goes over, which are shown first.
    """
    found = api_pb2.Experiment(
        time_created_secs=time.time(),
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    for key, values in params.items():
        domain = (domains or {}).get(key)
        listed = list(values if domain is None or domain.values is None else domain.values)
        kind = _data_type(listed)
        shown = [_text(value) for value in listed] if kind == api_pb2.DATA_TYPE_STRING else listed
        info = found.hparam_infos.add(name=key, type=kind, differs=domain is not None)
        if domain is not None and domain.values is None:
            info.domain_interval.min_value, info.domain_interval.max_value = domain.low, domain.high
        elif domain is not None:
            info.domain_discrete.extend(shown)
    return found


def declare(directory: Path, declared: api_pb2.Experiment) -> None:
    """Write the declaration of a sweep into its directory, in the place of one that is there.

    Raises: RunError where it cannot be written.
    """
    from exp.tensorboard.event_file import EventFile

    withdraw(directory)
    file = EventFile(directory, suffix=OF_SWEEP)
    file.write([Event(wall_time=time.time(), summary=_experiment(declared))])
    file.close()


def withdraw(directory: Path) -> None:
    """Take away the declaration of a sweep."""
    for path in directory.glob(EVENTS + OF_SWEEP):
        path.unlink(missing_ok=True)


def declared_above(directory: Path) -> api_pb2.Experiment | None:
    """The declaration of the sweep whose job has this run directory; None where there is none that can be read."""
    for parent in [*directory.absolute().parents][:LEVELS]:
        for path in parent.glob(EVENTS + OF_SWEEP):
            try:
                return _read(path.read_bytes())
            except (OSError, DecodeError, struct.error):  # nothing of a run depends on it
                return None
    return None


def _read(content: bytes) -> api_pb2.Experiment | None:
    """The declaration in an event file; None where it has none. Raises: DecodeError, struct.error."""
    place = 0
    while place < len(content):
        size, _ = _HEADER.unpack_from(content, place)
        place += _HEADER.size
        for value in Event.FromString(content[place : place + size]).summary.value:
            if value.tag == EXPERIMENT_TAG:
                data = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
                return data.experiment
        place += size + _CHECKSUM
    return None


def start_summaries(
    params: Mapping[str, object], metrics: Sequence[str], *, declared: api_pb2.Experiment | None = None
) -> list[Summary]:
    """The declaration and the session's start.

    params: by dotted key. metrics: tags of scalars.
    declared: by the sweep; where it lacks one of these keys, it is another's, and left aside.
    """
    if declared is None or not params.keys() <= {info.name for info in declared.hparam_infos}:
        declared = declaration({key: [value] for key, value in params.items()}, metrics)
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    kinds = {info.name: info.type for info in declared.hparam_infos}
    for key, value in params.items():
        if kinds[key] == api_pb2.DATA_TYPE_STRING or not isinstance(value, bool | int | float):
            start.hparams[key].string_value = _text(value)
        elif isinstance(value, bool):
            start.hparams[key].bool_value = value
        else:
            start.hparams[key].number_value = value
    return [
        _experiment(declared),
        _summary(START_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ]


def end_summary(status: str) -> Summary:
    """The session's end. status: completed, failed, interrupted or pruned, the words of report.json."""
    end = plugin_data_pb2.SessionEndInfo(status=_STATUS[status], end_time_secs=time.time())
    return _summary(END_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def write_bad_end(directory: Path, params: Mapping[str, object], metrics: Sequence[str], *, status: str) -> None:
    """Write the end, and where it is missing the start, of a run whose own process could not.

    directory: of the run. params, metrics: as of `start_summaries`. status: failed or interrupted.
    Raises: RunError where it cannot be written.
    """
    from exp.tensorboard.event_file import EventFile

    below = directory / "tensorboard"
    if any(below.glob(EVENTS + UNFINISHED)):
        return
    summaries = [end_summary(status)]
    if not has_begun(below):
        summaries = [*start_summaries(params, metrics, declared=declared_above(directory)), *summaries]
    file = EventFile(below, suffix=UNFINISHED)
    file.write([Event(wall_time=time.time(), summary=one) for one in summaries])
    file.close()


def has_begun(directory: Path) -> bool:
    """Whether a process of the run has written events there."""
    return any(not path.name.endswith(UNFINISHED) for path in directory.glob(EVENTS))


def _text(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _data_type(values: Sequence[object]) -> int:
    """Return the type of a column: text for values of several types, and for equal numbers of different types."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return int(api_pb2.DATA_TYPE_BOOL)
    if kinds and kinds <= {int, float} and len(set(values)) == len({(type(value), value) for value in values}):
        return int(api_pb2.DATA_TYPE_FLOAT64)
    return int(api_pb2.DATA_TYPE_STRING)


def _experiment(declared: api_pb2.Experiment) -> Summary:
    return _summary(EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=declared))


def _summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    about = SummaryMetadata.PluginData(plugin_name=PLUGIN, content=content.SerializeToString())
    # What has nothing to say but its metadata: a vector without a number.
    nothing = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)]))
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=about), tensor=nothing)])
