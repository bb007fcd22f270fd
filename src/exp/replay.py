"""python -m exp.replay FILE: runs the step that hooks.nan_guard kept, alone, and shows where it is not finite."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault, RunError
from exp.interpreter_exit import without_teardown
from exp.output import exit_status, loading_torch

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from exp.engine.module import TrainingModule
    from exp.engine.step_hooks import StepHooks
    from exp.hooks.step_file import StepFile
    from exp.hooks.step_trace import Trace

SHOWN_AGAIN, NOT_SHOWN, NO_FILE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs forward and backward of a step again, with its weights, micro-batches and random numbers, and no update.

    Returns: 0 where loss or gradients are not finite again, 1 where they are; 2 where the file is not a step's, or its
        config is refused.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv), fault=NO_FILE)


def _command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m exp.replay", description=main.__doc__)
    parser.add_argument("file", type=Path, help="nan_guard/step-<n>.pt of a run directory")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:<n>")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PACKAGE", help="as security.allow of the run: trust it first"
    )
    arguments = parser.parse_args(argv)
    with loading_torch():  # behind --help, which needs none
        from exp.hooks.findings import report

    file = read_step(arguments.file)
    with _quiet():
        trace = replay(file, path=arguments.file, device=arguments.device, allow=arguments.allow)
    print(report(file, trace, path=arguments.file, device=arguments.device))
    return SHOWN_AGAIN if trace.is_bad else NOT_SHOWN


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what a Trainer says of devices when it is made."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_step(path: Path) -> StepFile:
    """Tensors and plain values alone are read.

    Raises: RunError where the file is not there, is damaged, or is not a step's.
    """
    from exp.engine.checkpoint import read_plain
    from exp.hooks.step_file import StepFile

    if not path.is_file() or not zipfile.is_zipfile(path):
        what = "is not a file that torch wrote" if path.is_file() else "is not there"
        raise RunError(f"{path} {what}; expected a step that the hook nan_guard kept, nan_guard/step-<n>.pt of a run")
    return StepFile.of(read_plain(path), path=path)


def replay(file: StepFile, *, path: Path, device: str, allow: Sequence[str] = ()) -> Trace:
    """Builds the network of the file's config, which is checked as every config is, and runs the step.

    path: for messages. allow: the packages that its targets may name, as security.allow.
    Raises: ConfigError for a config with faults; RunError where the state is not that of its network.
    """
    from exp.engine.step_replay import run_again
    from exp.hooks.step_trace import trace_of

    place = _device(device)
    config = _checked(file, path=path, device=place, allow=allow)
    module = _built(file, config, device=place)
    transforms = _transforms(file, config, module, device=place)
    try:
        window = _window(file, module, device=place)
        return trace_of(partial(run_again, module), window, network=module.network, objective=module.objective)
    finally:
        transforms.detach()
        module.trainer.precision_plugin.teardown()


def _device(word: str) -> torch.device:
    import torch

    try:
        device = torch.device(word)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        fault = Fault(
            key="--device", got=word, expected=f"cpu, or a GPU of this machine ({str(error).splitlines()[0]})"
        )
        raise ConfigError([fault]) from error
    return device


def _checked(file: StepFile, *, path: Path, device: torch.device, allow: Sequence[str]) -> DictConfig:
    """The file's config on one device, with nothing that writes."""
    from omegaconf import OmegaConf

    from exp.check.plan import examine, resolve
    from exp.config.freeze import untrusted
    from exp.config.yaml_files import parse_yaml

    if file.config is None:
        raise RunError(f"{path} has no config, so the network cannot be built: its run gave none")
    # Bounded: a file may come from anywhere.
    content = parse_yaml(file.config, name=str(path))
    fixed = ("security", "launch", "runtime")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in fixed):
        raise RunError(f"{path} is a step's file without the config of a run")
    fault = untrusted(content["security"].get("allow"), allow=allow)
    if fault is not None:
        raise ConfigError([fault])
    content["security"]["allow"] = list(allow)
    content |= {"resume": None, "logger": {}, "callbacks": {}}
    content["strategy"] = {"_target_": "exp.strategies.single.Single", "name": "single"}
    content["launch"] |= {"devices": 1, "nodes": 1, "accelerator": device.type}
    # Layers are called one by one.
    content["runtime"]["compile"] = False
    config = OmegaConf.create(content)
    faults = examine(resolve(config)).faults
    if faults:
        raise ConfigError([_of_this_command(fault) for fault in faults])
    return config


def _of_this_command(fault: Fault) -> Fault:
    """With a cure that replay has: it takes no overrides."""
    cure = re.sub(r"'security\.allow=\[([\w.]+)\]'", r"--allow \1, where the module can be found,", fault.cure or "")
    return dataclasses.replace(fault, cure=cure or None)


def _built(file: StepFile, config: DictConfig, *, device: torch.device) -> TrainingModule:
    """The module as it stood before the step, without a run around it."""
    from lightning.pytorch import Trainer

    from exp.construct import (
        build_network,
        build_objective,
        build_optimization,
        build_phases,
        build_run_precision,
        plain_config,
    )
    from exp.engine.module import TrainingModule
    from exp.engine.phased_module import PhasedModule
    from exp.engine.runtime import switch_on
    from exp.shared_types import DataSpec

    plain = plain_config(config)
    runtime, spec = plain["runtime"], DataSpec.of(plain["data"])
    if file.scale is not None:
        plain["precision"]["scaler"]["init_scale"] = file.scale
    plugin = build_run_precision(plain, device_type=device.type)
    phases = build_phases(plain)
    kind: Callable[..., TrainingModule] = partial(PhasedModule, phases=phases) if phases else TrainingModule
    module = kind(
        network=build_network(plain, spec),
        objective=build_objective(plain),
        optimization=build_optimization(plain),
        seed=file.seed,
        rank=file.rank,
        inputs=tuple(spec.inputs),
    )
    plugin.represent(module)
    switch_on(module, runtime)
    _fill(module.network, file.network, what="network")
    _fill(module.objective, file.objective, what="objective")
    module.to(device)
    plugin.convert_module(module)
    network = module.network.train()
    for name, part in network.named_modules():
        part.training = name not in file.evaluating
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in file.frozen)
    module.trainer = Trainer(
        plugins=[plugin],
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=1,
        accumulate_grad_batches=1 if phases else plain["trainer"]["accumulate_grad_batches"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=runtime["deterministic"],
        benchmark=runtime["cudnn_benchmark"],
    )
    # Randomness is a function of it.
    module.trainer.fit_loop.epoch_progress.current.load_state_dict({"processed": file.window.epoch})
    return module


def _transforms(file: StepFile, config: DictConfig, module: TrainingModule, *, device: torch.device) -> StepHooks:
    """The hooks that change what the network does, attached as in a run, and told of the step.

    They have no directory: nothing is written.
    """
    from exp.construct import build_entries, plain_config
    from exp.engine.step_hooks import StepHooks
    from exp.hooks.step import Step

    step = Step(
        index=file.step,
        network=module.network,
        optimizers=[],
        batch_size=sum(batch.global_size for batch, _ in file.window.batches),
        device=device,
        epoch=file.window.epoch,
        seed=file.seed,
        rank=file.rank,
        total_steps=file.total_steps,
    )
    hooks = build_entries(plain_config(config), "hooks")
    transforms = StepHooks({name: hook for name, hook in hooks.items() if hook.transforms})
    transforms.attach(module.trainer, module)
    for hook in transforms.hooks.values():
        if hook.overrides("passed"):
            hook.passed("batch", step)
        if hook.overrides("around_forward"):
            # The context that it may give belongs to the first run of a step: run again for nan_guard, it has none.
            hook.around_forward(step)
    return transforms


def _fill(module: Any, tensors: Any, *, what: str) -> None:
    """Every parameter and buffer takes the file's numbers."""
    import torch

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    missing, more = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if missing or more or wrong:
        first = (missing + more + sorted(wrong))[0]
        raise RunError(
            f"the file's {what} is not that of its config: {len(missing)} tensors are not in it, {len(more)} are in it "
            f"alone, {len(wrong)} have another shape, {first} among them. Run it with the program that wrote it"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _window(file: StepFile, module: TrainingModule, *, device: torch.device) -> Any:
    from exp.nested import moved

    batches = []
    for batch, batch_idx in file.window.batches:
        batch = batch._replace(data=moved(batch.data, device))
        if module.objective.weighed:
            # Its terms would ask other ranks for the weights of their samples.
            batch = batch._replace(world_size=1, global_size=max(batch.size, 1))
        batches.append((batch, batch_idx))
    return dataclasses.replace(file.window, batches=batches)


if __name__ == "__main__":
    sys.exit(without_teardown(main()))
