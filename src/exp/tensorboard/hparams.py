"""Events for TensorBoard's HParams page: the declaration of its columns, and the start and end of each run.

TensorBoard calls a run a session. A sweep declares the columns in an event file in the directory of the sweep, with the
allowed values of each swept key. The jobs of the sweep write the same declaration, because TensorBoard uses the first
declaration that it finds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from exp.spelling import show
from exp.tensorboard.event_file import EVENTS, EventFile, read_records

# Suffix of the event file with the end of a run that is not completed. A restart of the run removes the file.
UNFINISHED = ".unfinished"
# Suffix of the event file with the declaration of a sweep.
OF_SWEEP = ".sweep"
# Maximum number of directory levels from a job up to its sweep. It is above 1 because hydra.sweep.subdir may contain
# folders.
LEVELS = 4

_STATUS = {
    "completed": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
    "interrupted": api_pb2.STATUS_FAILURE,
    "pruned": api_pb2.STATUS_SUCCESS,  # the value of PRUNED_TAG distinguishes it from a completed job
}


# Allowed values of a swept key: a list of values, or the two ends of an interval.
Domain = list[object] | tuple[float, float]


def declaration(
    params: Mapping[str, Sequence[object]], metrics: Sequence[str], *, domains: Mapping[str, Domain] | None = None
) -> api_pb2.Experiment:
    """Return the declaration of the columns of the HParams page.

    Args:
        params: List of values by dotted key. If the values of a key have several types, they are converted to text, so
            that 1 and 1.0 differ.
        metrics: Tags of scalars that are shown as columns, such as `loss/val`.
        domains: Allowed values by swept key. The page shows these keys first. Default: None, no swept keys.
    """
    found = api_pb2.Experiment(
        time_created_secs=time.time(),
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    for key, values in params.items():
        domain = (domains or {}).get(key)
        listed = domain if isinstance(domain, list) else list(values)
        kind = _data_type(listed)
        shown = [_text(value) for value in listed] if kind == api_pb2.DATA_TYPE_STRING else listed
        info = found.hparam_infos.add(name=key, type=kind, differs=domain is not None)
        if isinstance(domain, tuple):
            info.domain_interval.min_value, info.domain_interval.max_value = domain
        elif domain is not None:
            info.domain_discrete.extend(shown)
    return found


def declare(directory: Path, declared: api_pb2.Experiment) -> None:
    """Write the declaration of a sweep to an event file. An existing declaration is replaced.

    Args:
        directory: Directory of the sweep.
        declared: Declaration of the columns.

    Raises:
        OSError: The file cannot be written.
    """
    for path in directory.glob(EVENTS + OF_SWEEP):
        path.unlink(missing_ok=True)
    file = EventFile(directory, suffix=OF_SWEEP)
    file.write([Event(wall_time=time.time(), summary=_experiment(declared))])
    file.close()


def declared_above(directory: Path) -> api_pb2.Experiment | None:
    """Return the declaration of the sweep that contains a run; None if it is missing or damaged.

    Args:
        directory: Run directory. The LEVELS directories above it are searched for the declaration.
    """
    for parent in [*directory.absolute().parents][:LEVELS]:
        for path in parent.glob(EVENTS + OF_SWEEP):
            try:
                with path.open("rb") as file:
                    values = (value for one in read_records(file) for value in Event.FromString(one).summary.value)
                    found = next((value for value in values if value.tag == metadata.EXPERIMENT_TAG), None)
                if found is not None:
                    content = found.metadata.plugin_data.content
                    return plugin_data_pb2.HParamsPluginData.FromString(content).experiment
            except (OSError, DecodeError, EOFError):  # a run does not need the sweep's declaration
                return None
    return None


def start_summaries(
    params: Mapping[str, object], metrics: Sequence[str], *, declared: api_pb2.Experiment | None = None
) -> list[Summary]:
    """Return the summaries that declare the columns of the HParams page and report the start of a run to it.

    Args:
        params: Values of the run by dotted key.
        metrics: Tags of scalars that are shown as columns.
        declared: Declaration of the sweep. It is ignored if it lacks a key of `params`. Default: None, the run is not a
            job.
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
        _summary(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ]


def end_summary(status: str) -> Summary:
    """Return the summary that reports the end of a run to the HParams page.

    Args:
        status: Status in report.json: completed, failed, interrupted or pruned.
    """
    end = plugin_data_pb2.SessionEndInfo(status=_STATUS[status], end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def has_begun(directory: Path) -> bool:
    """Return whether an event file of the run exists in a directory. Files with the suffix UNFINISHED do not count."""
    return any(not path.name.endswith(UNFINISHED) for path in directory.glob(EVENTS))


def _text(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _data_type(values: Sequence[object]) -> int:
    """Return TensorBoard's data type for a column of the HParams page: boolean, number or text.

    Values of several types are text. An exception is a mix of ints and floats, which are numbers. If an int and a float
    are equal, such as 1 and 1.0, all values are text, so that they differ.

    Args:
        values: Values in the column.
    """
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return int(api_pb2.DATA_TYPE_BOOL)
    if kinds and kinds <= {int, float} and len(set(values)) == len({(type(value), value) for value in values}):
        return int(api_pb2.DATA_TYPE_FLOAT64)
    return int(api_pb2.DATA_TYPE_STRING)


def _experiment(declared: api_pb2.Experiment) -> Summary:
    return _summary(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=declared))


def _summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    about = metadata.create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
