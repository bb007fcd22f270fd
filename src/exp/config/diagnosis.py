"""What Hydra stumbled over, override by override: Hydra stops at the first, a person wants all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.groups import COMMAND_LINE, Vocabulary
from exp.config.hydra_adapter import HYDRA_ERRORS, Loader, dotted_keys
from exp.config.overrides import Line, for_hydra, missing_key_fault
from exp.errors import ConfigError, Fault
from exp.spelling import among, did_you_mean

MAX_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What failed, and what is left without it.

    config: None where not even the choices of groups compose. healthy: the overrides that it holds.
    """

    faults: tuple[Fault, ...]
    config: DictConfig | None
    healthy: tuple[Line, ...]


def diagnose(
    loader: Loader, vocabulary: Vocabulary, lines: Sequence[Line], *, config_name: str, multirun: bool
) -> Diagnosis:
    """Composes with the choices of groups alone, then applies the values one by one, and says which of them fail."""
    choices = [line for line in lines if line.group]
    try:
        config = loader.compose(config_name=config_name, overrides=for_hydra(choices, vocabulary), multirun=multirun)
    except ConfigError as error:
        return Diagnosis(faults=error.faults, config=None, healthy=())
    except HYDRA_ERRORS as error:
        return Diagnosis(faults=(fault_of(error),), config=None, healthy=())
    faults, healthy = [], list(choices)
    for line in lines:
        if line.group or line.is_sweep:
            continue
        try:
            loader.apply(line.parsed, config)
            healthy.append(line)
        except HYDRA_ERRORS as error:
            faults.append(_value_fault(line, config, error))
    return Diagnosis(faults=tuple(faults), config=config, healthy=tuple(healthy))


def fault_of(error: Exception) -> Fault:
    """One fault from what Hydra or OmegaConf raised."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_config_fault(error, error.missing_cfg_file)
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, RecursionError) for cause in causes):
        return Fault(key="config", got="nested too deeply, or into itself", expected="a few levels")
    told = [text for text in (_short(cause) for cause in causes) if text]
    key = next((cause.full_key for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), "")
    detail = "; ".join(dict.fromkeys(told)) or type(error).__name__
    return Fault(key=str(key) or "config", got=detail, expected="a config that can be composed")


def _missing_config_fault(error: MissingConfigException, path: str) -> Fault:
    group, _, option = path.rpartition("/")
    options = error.options or []
    named_by = re.match(r"In '([^']+)'", str(error))
    return Fault(
        key=group or path, got=f"there is no option {option!r}" if group else "no such config",
        expected=f"one of {among(options, word=option)}" if options else "a config on the search path",
        cure=did_you_mean(option, options), source=f"defaults list of {named_by[1]}" if named_by else None,
    )  # fmt: skip


def _value_fault(line: Line, config: DictConfig, error: Exception) -> Fault:
    parent, node = _longest_part(config, line.key)
    if parent == line.key and line.sign == "+":
        return Fault(
            key=line.key, got="+ on a key that is there", expected="= to change it", cure=f"Write {line.text[1:]}",
            source=COMMAND_LINE,
        )  # fmt: skip
    if parent == line.key:
        short = line.text if len(line.text) <= 60 else line.text[:57] + "..."
        is_mapping = line.sign == "" and isinstance(node, DictConfig)
        adds = f"Write '+{line.text}', which adds to the mapping" if is_mapping else None
        return Fault(
            key=line.key, got=f"{short}: {fault_of(error).got}", expected="a value that fits", cure=adds,
            source=COMMAND_LINE,
        )  # fmt: skip
    if isinstance(node, DictConfig):
        siblings = [str(key) for key in node if key != "hydra"]
        target = str(node["_target_"]) if "_target_" in node else None
        return missing_key_fault(line, dotted_keys(config), parent=parent, siblings=siblings, target=target)
    return missing_key_fault(line, dotted_keys(config), parent=parent, siblings=None, target=None)


def _longest_part(config: DictConfig, key: str) -> tuple[str, object]:
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        part = ".".join(parts[:count])
        try:
            node = OmegaConf.select(config, part, throw_on_missing=False)
        except HYDRA_ERRORS:
            node = None
        if node is not None or _holds(config, part):
            return part, node
    return "", config


def _holds(config: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    try:
        node = OmegaConf.select(config, parent) if parent else config
    except HYDRA_ERRORS:
        return False
    return isinstance(node, DictConfig) and last in node


def _short(error: BaseException) -> str:
    text = str(error).partition("\nConfig search path:")[0].partition("\nTo append to your")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept)[:MAX_MESSAGE]
