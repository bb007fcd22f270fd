"""What a run's data does to the numbers of its inputs, as a part of the graph, so that raw numbers go in.

Standardisation by the training part's mean and deviation, fills of missing numbers, and the normalisation of pixels are
sums and products. Words, classes, texts, decoding and Python functions are none, and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exp.data.data import Data
from exp.data.tables import FITTED as TABLE
from exp.data.text import FITTED as CHARACTERS
from exp.data.tokens import FITTED as TOKENIZER
from exp.data.value_names import value_names
from exp.data.windows import FITTED as WINDOWS
from exp.errors import ConfigError, Fault
from exp.spelling import among

KEY = "preprocessing"
TEXTS = {CHARACTERS: "characters, which a vocabulary numbers", TOKENIZER: "texts, which a tokenizer numbers"}
TRANSFORMS = ("tv_tensors", "transforms", "eval_transforms", "batch_transforms", "collate")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """(x - mean) / deviation of raw numbers, missing ones filled, in float64, and then float32.

    means, deviations, fills: float64, of a shape that a sample `[...]` broadcasts with. Without fills an input that
        holds nan is answered by nan.
    raw_dtype: of the raw numbers. unit: what these are, in words.
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor | None
    raw_dtype: torch.dtype
    unit: str

    def module(self) -> Standardisation:
        """The same as a layer."""
        return Standardisation(means=self.means, deviations=self.deviations, fills=self.fills)

    def raw(self, prepared: Tensor) -> Tensor:
        """Raw numbers from which `prepared` is made, `[B, ...]`."""
        return (prepared.double() * self.deviations + self.means).to(self.raw_dtype)


class Standardisation(nn.Module):
    """Fills, centres and scales `[B, ...]` in the raw numbers' dtype, and gives float32.

    Tables are standardised in float64, as the data does it: of 1e8 + 1 nothing is left in float32.
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor | None

    def __init__(self, *, means: Tensor, deviations: Tensor, fills: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.register_buffer("deviations", deviations)
        self.register_buffer("fills", fills)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        if self.fills is not None:
            x = torch.where(x.isnan(), self.fills, x)
        return ((x - self.means) / self.deviations).float()


def preparations(plain: Mapping[str, Any], data: Data) -> dict[str, Preparation]:
    """What the data of a run does to its inputs, by name. plain: the run's config.

    Raises: ConfigError where it is no graph, with what of it is not.
    """
    node = plain["data"]
    faults = [
        _fault(f"data.{key}", got=f"{_named(node[key])}, which is Python", expected="none")
        for key in TRANSFORMS
        if node.get(key)
    ]
    kind = next((word for word in TEXTS if word in data.fitted), None)
    if kind is not None:
        faults.append(_fault("data.dataset", got=TEXTS[kind], expected="numbers"))
    table = data.fitted.get(TABLE)
    if isinstance(table, Mapping) and table.get("words"):
        got = f"the columns {among(table['words'])}, whose words are numbered by training"
        faults.append(_fault("data.dataset", got=got, expected="columns of numbers"))
    if faults:
        raise ConfigError(faults)
    standardise = bool(_option(plain, "standardise", otherwise=True))  # as the data sets do that have this option
    if isinstance(table, Mapping):
        return {"input": _of_table(table, standardise=standardise, fills=_option(plain, "impute", otherwise=None))}
    windows = data.fitted.get(WINDOWS)
    if isinstance(windows, Mapping):
        return {"input": _of_windows(windows, data, standardise=standardise)}
    if data.input_mean is not None and data.input_std is not None:
        return _of_pixels(data)
    target = node["dataset"]["_target_"] if isinstance(node.get("dataset"), Mapping) else "the run's data"
    got = f"{target}, of which no preparation is known"
    cure = "Leave preprocessing out, or state data.input_mean and data.input_std of pixels that were normalised"
    raise ConfigError([_fault("data.dataset", got=got, expected="a table, windows of a series, or pixels", cure=cure)])


def _option(plain: Mapping[str, Any], name: str, *, otherwise: object) -> object:
    """Return an option of the training data set. otherwise: its default."""
    nodes = [plain["data"].get(part) for part in ("dataset", "train")]
    given = [node[name] for node in nodes if isinstance(node, Mapping) and name in node]
    return given[0] if given else otherwise


def _of_table(told: Mapping[str, Any], *, standardise: bool, fills: object) -> Preparation:
    """fills: data.dataset.impute, without which an answer to a missing number is nan."""
    means, deviations = told["means"].double(), told["deviations"].double()
    unit = f"the columns {among(told['numbers'], count=len(told['numbers']))}"
    if told.get("dates"):  # of which checkpoints before this version say nothing
        unit += f", {among(told['dates'])} in days since 1970"
    return Preparation(
        means=means if standardise else torch.zeros_like(means),
        deviations=deviations if standardise else torch.ones_like(deviations),
        fills=None if fills is None else told["fills"].double(),
        raw_dtype=torch.float64,
        unit=f"{unit}, {'without missing numbers' if fills is None else 'nan for a missing number'}",
    )


def _of_windows(told: Mapping[str, Any], data: Data, *, standardise: bool) -> Preparation:
    seen = value_names(data.part(data.stages[0])).columns["input"]
    places = [list(told["columns"]).index(name) for name in seen]
    means, deviations = told["means"][places].double(), told["deviations"][places].double()
    return Preparation(
        means=means if standardise else torch.zeros_like(means),
        deviations=deviations if standardise else torch.ones_like(deviations),
        fills=None,
        raw_dtype=torch.float64,
        unit=f"rows of the columns {among(seen, count=len(seen))}",
    )


def _of_pixels(data: Data) -> dict[str, Preparation]:
    """Of every input that has axes for channels, height and width; there is one in most cases."""
    mean, deviation = (
        torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1, 1) for value in (data.input_mean, data.input_std)
    )
    found = {
        name: Preparation(
            means=mean,
            deviations=deviation,
            fills=None,
            raw_dtype=torch.float32,
            unit="pixels from 0 (black) to 1 (white), of the size that the network takes",
        )
        for name, one in data.spec.inputs.items()
        if len(one.shape) == 3 and one.dtype.startswith("float")
    }
    if not found:
        got = f"pixels, and inputs {among(data.spec.inputs)}"
        raise ConfigError([_fault("data.inputs", got=got, expected="a picture, [C, H, W]")])
    return found


def _named(node: object) -> str:
    if isinstance(node, Mapping) and "_target_" in node:
        return str(node["_target_"])
    parts = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else [node]
    return among(str(one["_target_"]) if isinstance(one, Mapping) and "_target_" in one else str(one) for one in parts)


def _fault(key: str, *, got: str, expected: str, cure: str | None = None) -> Fault:
    # Whole: a sentence that names the word of the command and the place in the config.
    return Fault(
        key=KEY,
        got=f"true, and {key} has {got}",
        expected=f"{expected} there, which a graph can prepare",
        cure=cure or "Leave preprocessing out: what goes in is then what the network was trained with",
        source="command line",
    )
