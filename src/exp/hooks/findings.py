"""What a stop says, as text: the finding of each rank, and the message that all ranks end with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from exp.hooks.step_trace import Trace

# Of a finding on its way to the other ranks.
BYTES = 8192
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rank's.

    index: the optimizer step. loss: the first of its losses that is not finite; 0.0 where all are. phase: whose step.
    is_bad: whether the step, run again on this rank alone, is not finite; None where it could not be run.
    where: the sentences on the first module. path: its file; None without one.
    """

    index: int
    loss: float
    phase: str | None
    is_bad: bool | None
    where: str
    path: str | None
    problems: Sequence[str]

    def encoded(self) -> Tensor:
        """As bytes, uint8 `[BYTES]`: what ranks gather."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode()
        if len(text) > BYTES:
            short = replace(self, where=self.where[:LONGEST], problems=())
            text = json.dumps(asdict(short), ensure_ascii=False).encode()
        return torch.frombuffer(bytearray(text.ljust(BYTES)[:BYTES]), dtype=torch.uint8)

    @classmethod
    def decoded(cls, row: Tensor) -> Finding:
        return cls(**json.loads(bytes(row.tolist()).decode()))


def finding_of(
    trace: Trace | None,
    *,
    index: int,
    losses: Sequence[float],
    phase: str | None,
    path: str | None,
    problems: Sequence[str],
) -> Finding:
    """Of this rank. trace: None where the step could not be run again."""
    return Finding(
        index=index,
        loss=next((loss for loss in losses if not math.isfinite(loss)), 0.0),
        phase=phase,
        is_bad=None if trace is None else trace.is_bad,
        where="" if trace is None else described(trace),
        path=path,
        problems=[problem[:LONGEST] for problem in problems],
    )


def described(trace: Trace) -> str:
    """Where the first number that is not finite comes from, in a few sentences; empty where all are finite."""
    if not trace.is_bad:
        return ""
    sentences = [] if trace.batch and trace.origin is None else [_first(trace)]
    if trace.count > 1 and (trace.origin is not None or trace.batch):
        sentences.append(f"It is micro-batch {trace.place + 1} of {trace.count}.")
    if trace.batch:
        sentences.append(f"The data are not finite: {', '.join(trace.batch)}.")
    if trace.tensors:
        sentences.append(f"Not finite before the step already: {_some(trace.tensors)}.")
    return " ".join(sentences)[: 4 * LONGEST]


def message(findings: Sequence[Finding]) -> str:
    """Of all ranks: the first that is bad is named. The ranks are in their order."""
    count = len(findings)
    # Also where none could be run again, or none is bad by itself.
    rank = next((n for n, one in enumerate(findings) if one.is_bad or not math.isfinite(one.loss)), 0)
    one = findings[rank]
    what = f"the loss is {one.loss:g}" if not math.isfinite(one.loss) else "a gradient is not finite"
    of_phase = "" if one.phase is None else f" in phase {one.phase}"
    on_rank = f" on rank {rank} of {count}" if count > 1 else ""
    lines = [
        f"step {one.index}: {what}{of_phase}{on_rank}; the run ends before the optimizer's step, with the weights as "
        "they were before it."
    ]
    if one.where:
        lines.append(one.where)
    elif any(other.is_bad is False for other in findings):
        ranks = "on each rank alone: it is their mean that is not" if count > 1 else "uncompiled and alone"
        lines.append(f"Run again, the step is finite {ranks}.")
    lines += one.problems
    if one.path is not None:
        others = " (each rank has its own)" if count > 1 else ""
        lines.append(f"Its batches are in {one.path}{others}.")
    return "\n".join(lines)


def _first(trace: Trace) -> str:
    origin = trace.origin
    if origin is not None:
        kind = f" ({origin.kind})" if origin.kind else ""
        name = f"`{origin.name}`{kind}" if origin.name else f"the network itself{kind}"
        if origin.direction == "forward":
            return f"The first is {name}, in the forward: its output has {origin.extent}, and its inputs were finite."
        return (
            f"The first is {name}, in the backward: {origin.operator} gave {origin.extent}, from gradients that were "
            "finite."
        )
    if trace.overflown and not trace.gradients.bad:
        return (
            f"Every gradient is finite, but its norm is not: {_some(trace.overflown)}; the greatest number is "
            f"{trace.gradients.largest:.3g}."
        )
    if trace.loss - trace.loss != 0.0:
        return "No module gave it: it is in what the step makes of their outputs."
    return "The gradients of each micro-batch are finite; their sum is not."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
