"""Can a run go on from this checkpoint? Its model must be the same, and its optimizer's values must not change.

Of what else changes the numbers it may take another value: the run goes on, and a note names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import yaml
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from exp.check.phase_rules import whole_phase
from exp.check.signature import with_defaults
from exp.config.freeze import read_overrides
from exp.config.module_key import brings_data
from exp.config.plain_tree import are_same
from exp.config.versions import as_before
from exp.engine.checkpoint import State, read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION
from exp.errors import Fault
from exp.spelling import among, show

# Which of several kernels computes the same step is not part of the state.
INCIDENTAL = ("fused", "foreach", "monitor")
SHOWN = 3
# What no state of the optimizer fits that was another.
OPTIMIZER_ITSELF = ("optimizer._target_", "optimizer.groups", "optimizer.exempt_from_decay")
LIGHTNING = "pytorch-lightning_version"
# What is in a checkpoint from which a run goes on.
HELD = {
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "callbacks": dict,
    "loops": dict,
    POSITION: dict,
    CONFIG: str,
    LIGHTNING: str,
}
# Of these, what is read of them.
WITHIN: Mapping[str, Callable[..., bool]] = {
    "state_dict": lambda weights: all(isinstance(weight, Tensor) for weight in weights.values()),
    "optimizer_states": lambda states: bool(states) and all(isinstance(state, dict) and state for state in states),
    POSITION: lambda position: isinstance(position.get("epoch"), int),
    LIGHTNING: lambda version: _release(version) is not None,
}
# What steps are computed from, beside what must be the same. Of data and runtime only what changes the numbers.
NUMERIC = (
    "precision",
    "strategy",
    "seed",
    "launch.devices",
    "launch.nodes",
    "objective",
    "data.dataset",
    "data.split",
    "data.batch_size",
    "data.drop_last",
    "data.sampler",
    "data.batch_sampler",
    "data.collate",
    "data.transforms",
    "data.train_transforms",
    "data.eval_transforms",
    "data.batch_transforms",
    "data.train_batch_transforms",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.limit_train_batches",
)
# How batches are loaded, whatever is in them; and which samples are in a batch.
LOADING = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
BATCHES = ("data.batch_size", "data.batch_sampler", "data.drop_last")
# What must be the same too, for it says what an optimizer holds; as it is in a config that does not use it.
NOTHING: Mapping[str, Any] = {
    "phases": {},
    "freeze": {"parameters": [], "batch_norm": "train", "unfreeze": {}},
    "module": None,
    "lora": {"layers": [], "rank": 8, "alpha": None, "trained": []},
}
# Of these nodes: what no step depends on, and what a name or word says as well.
BESIDE = ("precision.scaler.enabled", "strategy.verify", "strategy._target_")


@dataclass(frozen=True, kw_only=True)
class Resuming:
    """faults: why the run cannot go on from there. notes: what may make other steps from there on."""

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


def examine_resume(
    config: Mapping[str, Any],
    *,
    network: nn.Module | None = None,
    build: Callable[[], nn.Module] | None = None,
    prefix: str = "network.",
    is_fork: bool = False,
) -> Resuming:
    """What `resume` comes to, for a plain and resolved config whose `resume` names a file.

    network: of this config, on the meta device; None where it could not be built. build: builds it anew; a buffer that
        has another shape then was reshaped by a forward, and may have any shape in the checkpoint.
    prefix: of its names in a checkpoint.
    is_fork: whether the optimizer may have other values, which exp.fork puts into its state.

    A checkpoint that says nothing of its config is not judged: it can be evaluated only, and the engine says so.

    Raises: RunError where the file is damaged.
    """
    path = Path(config["resume"])
    checkpoint = read_checkpoint(path)
    if LIGHTNING not in checkpoint:
        got = f"{path}, which holds {among(checkpoint)} and no {LIGHTNING}"
        return Resuming(faults=(Fault(key="resume", got=got, expected="a last.ckpt or best.ckpt of exp"),))
    if CONFIG not in checkpoint or POSITION not in checkpoint:
        return Resuming()
    if incomplete := _incomplete(checkpoint, path):
        return Resuming(faults=(incomplete,))
    # A checkpoint of before there were these had none.
    saved = _saved_config(checkpoint[CONFIG])
    if saved is None:
        got = f"{path}, whose {CONFIG} is {show(checkpoint[CONFIG])}"
        return Resuming(faults=(Fault(key="resume", got=got, expected="the config of its run"),))
    before = _whole(as_before({**NOTHING, **saved}))
    config = _whole(as_before({**NOTHING, **config}))
    faults = _other_values(before, config, "model", path) + _other_values(before, config, "module", path)
    if config["train"]:
        faults += _other_values(before, config, "optimizer", path, below=OPTIMIZER_ITSELF if is_fork else None)
        faults += _other_values(before, config, "scheduler", path)
        for node in NOTHING:
            faults += _other_values(before, config, node, path)
        faults += _epochs(config["trainer"], done=checkpoint[POSITION]["epoch"])
        faults += _other_batches(before, config, checkpoint[POSITION])
        faults += _newer(checkpoint, path)
    if network is not None and not faults:
        faults += _other_weights(checkpoint["state_dict"], network, path, build=build, prefix=prefix)
    notes = _notes(before, config, path) if config["train"] else ()
    return Resuming(faults=tuple(faults), notes=notes)


def _saved_config(text: str) -> dict[str, Any] | None:
    """The config in a checkpoint; None where it is none."""
    try:
        saved = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if not isinstance(saved, dict):
        return None
    has_module = isinstance(saved.get("module"), dict)
    nodes = ("trainer",) if has_module else ("model", "optimizer", "scheduler", "trainer")
    return saved if all(isinstance(saved.get(node), dict) for node in nodes) else None


def _incomplete(checkpoint: State, path: Path) -> Fault | None:
    """Return an error for an entry that a resume needs and that the checkpoint lacks."""
    wrong = [key for key, kind in HELD.items() if not isinstance(checkpoint.get(key), kind)]
    wrong = wrong or [key for key, is_whole in WITHIN.items() if not is_whole(checkpoint[key])]
    if not wrong:
        return None
    got = f"{path}, whose {wrong[0]} is {show(checkpoint.get(wrong[0]))}"
    return Fault(key="resume", got=got, expected="a last.ckpt or best.ckpt of exp, as it was written")


def _newer(checkpoint: State, path: Path) -> list[Fault]:
    """Lightning reads what older versions of it wrote, and not what newer ones did."""
    written, own = checkpoint[LIGHTNING], lightning.__version__
    if (_release(written) or ()) <= (_release(own) or ()):
        return []
    got, expected = f"{path}, written with Lightning {written}", f"one of Lightning {own}, which is installed, or older"
    return [Fault(key="resume", got=got, expected=expected, cure=f"Install lightning=={written}")]


def _release(version: str) -> tuple[int, ...] | None:
    """Its first two numbers; None where it is no version."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return None


def _other_weights(
    weights: Mapping[str, Any],
    network: nn.Module,
    path: Path,
    *,
    build: Callable[[], nn.Module] | None,
    prefix: str,
) -> Iterator[Fault]:
    """Weights that the network has and the checkpoint has not, or in another shape: its class was changed since."""
    own = {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}
    other = [name for name, tensor in own.items() if name not in weights or weights[name].shape != tensor.shape]
    if other and build is not None:
        fresh = {f"{prefix}{name}": tensor.shape for name, tensor in build().state_dict().items()}
        other = [name for name in other if name not in weights or fresh[name] == own[name].shape]
    if other:
        name = other[0]
        has = f"{list(weights[name].shape)}" if name in weights else "not there"
        yield Fault(
            key="resume",
            got=f"{path}, where {name} is {has}" + (f", and {len(other) - 1} more are other" if other[1:] else ""),
            expected=f"weights of this network, which has {list(own[name].shape)} there",
            cure="Its class was changed since, or the file was",
        )


def _notes(before: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    told = _differences(_leaves(before, ""), _leaves(config, ""), NUMERIC)
    if not told:
        return ()
    return (f"{path}: {told}. The run goes on from the same place; from there on its losses may be others",)


def _other_values(
    before: Mapping[str, Any], config: Mapping[str, Any], node: str, path: Path, *, below: Sequence[str] | None = None
) -> list[Fault]:
    """below: of the node, what must be the same; None is all of it."""
    told = _differences(_leaves(before[node], node), _leaves(config[node], node), below or (node,))
    if not told:
        return []
    return [
        Fault(
            key="resume",
            got=f"a checkpoint of another {node}: {told}",
            expected=f"the {node} that it was trained with, whose state it holds",
            cure=_cure(path),
        )
    ]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], below: Sequence[str]) -> str:
    """The keys at or below these names that have another value, the first few of them by name; empty: none."""
    keys = [key for key in {**saved, **now} if key not in BESIDE and key.rpartition(".")[2] not in INCIDENTAL]
    keys = [key for name in below for key in keys if key == name or key.startswith(f"{name}.")]
    other = [key for key in keys if not are_same(saved.get(key), now.get(key))]
    told = [f"{key} was {saved.get(key, 'not there')} and is {now.get(key, 'not there')}" for key in other[:SHOWN]]
    return "; ".join(told) + (f", and {len(other) - SHOWN} more" if len(other) > SHOWN else "")


def _cure(path: Path) -> str:
    directory = path.absolute().parent.parent
    if not (directory / "overrides.yaml").is_file():
        return "Repeat the overrides of that run"
    overrides = " ".join(read_overrides(directory))
    return f"That run was started with: {overrides}" if overrides else "That run was started without overrides"


def _epochs(trainer: Mapping[str, Any], *, done: int) -> list[Fault]:
    most = trainer["max_epochs"]
    if most is None or most < 0 or most >= done:
        return []
    return [
        Fault(
            key="trainer.max_epochs",
            got=str(most),
            expected=f"at least the {done} epochs that the checkpoint has done",
            cure=f"It counts the whole run: trainer.max_epochs={done + most} does {most} more",
        )
    ]


def _other_batches(before: Mapping[str, Any], config: Mapping[str, Any], position: Mapping[str, Any]) -> list[Fault]:
    """Return an error if the batches of an epoch that has begun are others: their samples are not known."""
    if not position["batch"]:
        return []
    saved, now = _leaves(before["data"], "data"), _leaves(config["data"], "data")
    # Of loaders of the user's own any argument may be a batch's size.
    own = [key for key in {**saved, **now} if key.rpartition(".")[2] not in LOADING]
    told = _differences(saved, now, own if brings_data(config) else BATCHES)
    if not told:
        return []
    got = f"a checkpoint within epoch {position['epoch']}, with other batches: {told}"
    cure = "A checkpoint of an epoch's end goes on with other batches"
    return [Fault(key="resume", got=got, expected="the batches that the epoch began with", cure=cure)]


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its classes and phases, so that one that is written out makes no difference."""
    phases = {name: whole_phase(phase) for name, phase in config["phases"].items()}
    allow = config["security"]["allow"] if "security" in config else []
    return dict(with_defaults({**config, "phases": phases}, allow=allow))


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every dotted key of two configs whose value is another now: what it was, and what it is; None: not there."""
    was, found = (_leaves(_whole(as_before(one)), "") for one in (before, now))
    keys = [key for key in {**was, **found} if not are_same(was.get(key), found.get(key))]
    return {key: (was.get(key), found.get(key)) for key in keys}


def _leaves(node: Any, key: str) -> dict[str, Any]:
    """Every value of a node that holds no other, by its dotted key."""
    if isinstance(node, Mapping) and node:
        below = [_leaves(value, f"{key}.{name}" if key else name) for name, value in node.items()]
        return {name: value for part in below for name, value in part.items()}
    return {key: node}
