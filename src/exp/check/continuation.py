"""The comparison of a run's config with the checkpoint from which the run resumes.

The values of the model and the optimizer must be equal. Other values that change the results of later steps may differ,
and a note lists these values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import yaml
from torch import Tensor, nn

from exp.check.phase_rules import whole_phase
from exp.check.signature import with_defaults
from exp.config.frozen import read_overrides
from exp.config.module_key import brings_data
from exp.config.plain_tree import are_same
from exp.config.versions import as_before
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import CONFIG, POSITION
from exp.errors import ErrorDetails, invalid_value, unsuitable
from exp.spelling import among, show

# Last words of dotted keys that are not compared. They select kernels of an optimizer or configure data loading, so
# they change neither the state of a run nor the result of a step.
INCIDENTAL = (
    "fused", "foreach", "monitor",
    "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context",
)  # fmt: skip
SHOWN = 3
# Keys that determine the structure of the optimizer state.
OPTIMIZER_ITSELF = ("optimizer._target_", "optimizer.groups", "optimizer.exempt_from_decay")
LIGHTNING = "pytorch-lightning_version"
RELEASE = re.compile(r"(\d+)\.(\d+)")
# Entries of a checkpoint that a resume needs, each with a function that checks its type.
HELD: Mapping[str, Callable[[Any], bool]] = {
    "state_dict": lambda held: isinstance(held, dict) and all(isinstance(one, Tensor) for one in held.values()),
    "optimizer_states": lambda held: (
        isinstance(held, list) and bool(held) and all(isinstance(one, dict) for one in held)
    ),
    "lr_schedulers": lambda held: isinstance(held, list),
    "callbacks": lambda held: isinstance(held, dict),
    "loops": lambda held: isinstance(held, dict),
    POSITION: lambda held: isinstance(held, dict) and isinstance(held.get("epoch"), int),
    LIGHTNING: lambda held: isinstance(held, str) and RELEASE.match(held) is not None,
}
# Keys that change the results of later steps. Their values may differ, and a note reports each difference.
NUMERIC = (
    "precision",
    "strategy",
    "seed",
    "launch.devices",
    "launch.nodes",
    "objective",
    "data",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.limit_train_batches",
)
# Keys that decide which samples are in a batch.
BATCHES = ("data.batch_size", "data.batch_sampler", "data.drop_last")
# Nodes of the config that decide which parameters the optimizer has, with their defaults. They must not change.
NOTHING: Mapping[str, object] = {
    "phases": {},
    "freeze": {"parameters": [], "batch_norm": "train", "unfreeze": {}},
    "module": None,
    "lora": {"layers": [], "rank": 8, "alpha": None, "trained": []},
}
# A fused optimizer computes wrong steps if its state and the weights have different memory formats (torch 2.13).
MEMORY = ("runtime.channels_last",)
# Keys that are not compared, because they do not change a step or repeat another key.
BESIDE = ("precision.scaler.enabled", "strategy.verify", "strategy._target_")


@dataclass(frozen=True, kw_only=True)
class Resuming:
    """The differences between a config and the checkpoint from which a run resumes.

    Attributes:
        errors: Differences that prevent a resume. Default: no differences.
        notes: Allowed differences that may change the results of later steps. Default: no differences.
    """

    errors: tuple[ErrorDetails, ...] = ()
    notes: tuple[str, ...] = ()


def examine_resume(
    config: Mapping[str, Any],
    *,
    network: nn.Module | None = None,
    prefix: str = "network.",
    is_fork: bool = False,
) -> Resuming:
    """Return the differences between a config and the checkpoint at its key `resume`.

    A checkpoint that another program wrote contains no config, so there is no comparison. A run can evaluate such a
    checkpoint. If the run trains, the engine raises an error.

    Args:
        config: Config as plain values, with resolved interpolations.
        network: Network of the config on the meta device. None if the network could not be built.
        prefix: Prefix of the names of network parameters in the checkpoint. Default: `network.`.
        is_fork: Whether optimizer values may differ, because exp.fork changes them in the optimizer state. Default:
            false.

    Raises:
        RunError: The file is damaged.
    """
    path = Path(config["resume"])
    checkpoint = read_checkpoint(path)
    if LIGHTNING in checkpoint and not {CONFIG, POSITION} <= checkpoint.keys():
        return Resuming()
    saved = _saved_config(checkpoint.get(CONFIG))
    damage = _damage(checkpoint, saved)
    if saved is None or damage:
        expected = "an unchanged last.ckpt or best.ckpt of exp"
        return Resuming(errors=(unsuitable("resume", path, damage, expected),))
    # Add defaults, because a checkpoint of an earlier version of exp lacks these nodes.
    before, now = (_whole(as_before({**NOTHING, **one})) for one in (saved, config))
    compared = ["model", "module", *(["scheduler", *NOTHING] if now["train"] else [])]
    errors = [error for node in compared for error in _other_values(before, now, node, path)]
    if now["train"]:
        errors += _other_values(before, now, "optimizer", path, below=OPTIMIZER_ITSELF if is_fork else None)
        errors += _other_values(before, now, "runtime", path, below=MEMORY)
        errors += _other_positions(before, now, checkpoint[POSITION], path)
        errors += _other_version(checkpoint[LIGHTNING], path)
    if network is not None and not errors:
        errors += _other_weights(checkpoint["state_dict"], network, path, prefix=prefix)
    told = _differences(_leaves(before, ""), _leaves(now, ""), NUMERIC) if now["train"] else ""
    notes = (f"{path}: {told}. The run resumes from the saved position, but its losses may differ",)
    return Resuming(errors=tuple(dict.fromkeys(errors)), notes=notes if told else ())


def _damage(checkpoint: Mapping[str, object], saved: object) -> str:
    """Return the reason why a checkpoint is damaged. Return "" if the checkpoint is complete.

    Args:
        checkpoint: Entries of the checkpoint.
        saved: Config in the checkpoint. None if the checkpoint contains no valid config.
    """
    if LIGHTNING not in checkpoint:
        return f"which contains the entries {among(checkpoint)}, but no entry {LIGHTNING}"
    wrong = [key for key, is_whole in HELD.items() if not is_whole(checkpoint.get(key))]
    wrong += [] if saved is not None else [CONFIG]
    return f"whose entry {wrong[0]} is {show(checkpoint.get(wrong[0]))}" if wrong else ""


def _other_version(written: str, path: Path) -> Iterator[ErrorDetails]:
    """Yield an error if the release of Lightning that wrote the checkpoint is newer than the installed release."""
    found, own = RELEASE.match(written), RELEASE.match(lightning.__version__)
    if found and own and tuple(map(int, found.groups())) > tuple(map(int, own.groups())):
        expected = f"a checkpoint of the installed Lightning {lightning.__version__} or an older release"
        fix = f"Install lightning=={written}"
        yield unsuitable("resume", path, f"which Lightning {written} wrote", expected, fix)


def _saved_config(text: object) -> dict[str, Any] | None:
    """Return the config that a checkpoint contains as YAML text. Return None if the text is not a config."""
    try:
        saved = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError:
        return None
    if not isinstance(saved, dict):
        return None
    has_module = isinstance(saved.get("module"), dict)
    nodes = ("trainer",) if has_module else ("model", "optimizer", "scheduler", "trainer")
    return saved if all(isinstance(saved.get(node), dict) for node in nodes) else None


def _other_weights(
    weights: Mapping[str, Any], network: nn.Module, path: Path, *, prefix: str
) -> Iterator[ErrorDetails]:
    """Yield an error if a parameter of the network is missing or has another shape in the checkpoint.

    Buffers are not compared, because a forward may change their shape.
    """
    own = {f"{prefix}{name}": parameter for name, parameter in network.named_parameters(remove_duplicate=False)}
    other = [name for name, tensor in own.items() if name not in weights or weights[name].shape != tensor.shape]
    if other:
        name = other[0]
        has = f"of shape {list(weights[name].shape)}" if name in weights else "missing"
        because = f"where {name} is {has}" + (f", and {len(other) - 1} more parameters differ" if other[1:] else "")
        expected = f"weights of this network, where {name} has the shape {list(own[name].shape)}"
        fix = "The class of the network or the file has changed since the checkpoint was saved. Undo this change"
        yield unsuitable("resume", path, because, expected, fix)


def _other_values(
    before: Mapping[str, object],
    config: Mapping[str, object],
    node: str,
    path: Path,
    *,
    below: Sequence[str] | None = None,
) -> Iterator[ErrorDetails]:
    """Yield an error if a top-level node of the config differs from the node in the checkpoint.

    Args:
        before: Config in the checkpoint.
        config: Config of the run.
        node: Key of the node, such as `model`.
        path: Path of the checkpoint.
        below: Keys in the node to compare. None (default) compares all keys of the node.
    """
    told = _differences(_leaves(before[node], node), _leaves(config[node], node), below or (node,))
    if told:
        directory, fix = path.absolute().parent.parent, "Use the same overrides as that run"
        if (directory / "overrides.yaml").is_file():
            fix = (
                f"The run of the checkpoint was started with: {' '.join(read_overrides(directory)) or '(no overrides)'}"
            )
        expected = f"the {node} of the run that saved the checkpoint"
        yield unsuitable("resume", path, f"a checkpoint of another {node}: {told}", expected, fix)


def _differences(saved: Mapping[str, object], now: Mapping[str, object], below: Sequence[str]) -> str:
    """Return a text with the first changed keys and their values before and now. Return "" if no key changed.

    Args:
        saved: Values in the checkpoint by dotted key.
        now: Values of the run by dotted key.
        below: Keys to compare. All keys inside these keys are also compared.
    """
    keys = [key for key in {**saved, **now} if key not in BESIDE and key.rpartition(".")[2] not in INCIDENTAL]
    keys = [key for name in below for key in keys if key == name or key.startswith(f"{name}.")]
    other = [key for key in keys if not are_same(saved.get(key), now.get(key))]
    told = [f"{key} was {saved.get(key, 'missing')} and is now {now.get(key, 'missing')}" for key in other[:SHOWN]]
    return "; ".join(told) + (f", and {len(other) - SHOWN} more" if len(other) > SHOWN else "")


def _other_positions(
    before: Mapping[str, Any], config: Mapping[str, Any], position: Mapping[str, Any], path: Path
) -> Iterator[ErrorDetails]:
    """Yield the errors of a run that cannot continue from the training position in the checkpoint.

    trainer.max_epochs must be at least the number of completed epochs. In the middle of an epoch, the batches must not
    change.
    """
    most, done = config["trainer"]["max_epochs"], position["epoch"]
    if most is not None and 0 <= most < done:
        fix = f"The key counts all epochs of the run. For {most} more epochs, write trainer.max_epochs={done + most}"
        expected = f"at least {done}, the completed epochs of the checkpoint"
        yield invalid_value("trainer.max_epochs", most, expected, fix)
    if not position["batch"]:
        return
    saved, now = _leaves(before["data"], "data"), _leaves(config["data"], "data")
    # Any argument of a LightningDataModule may change the batches, so all of them are compared.
    told = _differences(saved, now, ("data",) if brings_data(config) else BATCHES)
    if told:
        because = f"a checkpoint within epoch {done}, whose batches differ: {told}"
        fix = "Restore these values, or resume from a checkpoint of the end of an epoch"
        yield unsuitable("resume", path, because, "the same batches until the end of the epoch", fix)


def _whole(config: Mapping[str, Any]) -> dict[str, object]:
    """Return a config in which missing keys have the defaults of their classes and phases.

    Two configs are therefore equal if only one of them states a default.
    """
    phases = {name: whole_phase(phase) for name, phase in config["phases"].items()}
    allow = config["security"]["allow"] if "security" in config else []
    return dict(with_defaults({**config, "phases": phases}, allow=allow))


def changed_values(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the dotted keys with different values in two configs.

    Returns:
        For each key, the value in `before` and the value in `now`. None stands for a missing key.
    """
    was, found = (_leaves(_whole(as_before(one)), "") for one in (before, now))
    keys = [key for key in {**was, **found} if not are_same(was.get(key), found.get(key))]
    return {key: (was.get(key), found.get(key)) for key in keys}


def _leaves(node: object, key: str) -> dict[str, object]:
    """Return the values inside a node by dotted key. Nested mappings are flattened."""
    if isinstance(node, Mapping) and node:
        below = [_leaves(value, f"{key}.{name}" if key else name) for name, value in node.items()]
        return {name: value for part in below for name, value in part.items()}
    return {key: node}
