"""Findings about torch, its GPUs, imports and runs, with a fix for each error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from exp.errors import shorten
from exp.extras.doctor.finding import Finding
from exp.extras.doctor.installation import torch_requirement
from exp.extras.doctor.machine import GIB

Facts = Mapping[str, Any]

REQUIREMENT = torch_requirement()
AGAIN = f"pip uninstall -y torch, then pip install --no-cache-dir {REQUIREMENT}"
BUILD = "install the build of torch for your GPU with the command that pytorch.org shows for it"
HIDDEN = "CUDA_VISIBLE_DEVICES"


def explain_import_error(error: str, spec: ModuleSpec | None) -> Finding:
    """Return the finding that torch cannot be imported.

    Args:
        error: Message of the import error.
        spec: Location at which Python finds torch. None: torch is not installed.
    """
    if spec is None or spec.origin is None:
        return Finding("error", "torch", "it is not installed", f"pip install {REQUIREMENT}")
    place = Path(spec.origin).parent
    found = f"importing it from {place} fails: {shorten(error, most=200)}"
    if "site-packages" not in place.parts:
        return Finding("error", "torch", found, f"Take {place.parent} off PYTHONPATH, or move {place} away")
    return Finding("error", "torch", found, AGAIN)


def gpu_findings(torch: Facts, *, drivers: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about the GPUs that torch can use. If torch can use no GPU, yield the reason.

    Args:
        torch: Results of the check `torch` in probe.py.
        drivers: Driver version of each GPU that nvidia-smi lists.
        environment: Environment variables.
    """
    hidden = f", {HIDDEN}={environment[HIDDEN]!r}" if HIDDEN in environment else ""
    machine = f"{len(drivers)} NVIDIA GPUs, driver {', '.join({*drivers}) or 'unknown'}{hidden}"
    if torch["gpus"]:
        yield Finding("ok", "CUDA", f"torch for CUDA {torch['cuda']} sees {len(torch['gpus'])} of {machine}")
        yield from _each_gpu(torch)
    elif not drivers:
        fix = "If the machine has a GPU, install its driver. Start containers with --gpus all" if torch["cuda"] else ""
        yield Finding("note" if fix else "ok", "CUDA", "nvidia-smi finds no NVIDIA GPU: runs use the CPU", fix)
    elif torch["cuda"] is None:
        found = f"this machine has {machine}, and torch is built for the CPU only"
        yield Finding("error", "CUDA", found, f"pip uninstall -y torch, then {BUILD}")
    else:
        fix = "Check that nvidia-smi works; restart the machine after an update of the driver"
        if hidden:
            fix = f"unset {HIDDEN}, or write {HIDDEN}=0"
        elif "too old" in torch["cuda_error"] or "insufficient" in torch["cuda_error"]:
            fix = f"Update NVIDIA's driver, or {BUILD}"
        found = f"torch sees none of {machine}: {shorten(torch['cuda_error'], most=200)}"
        yield Finding("error", "CUDA", found, fix)


def _each_gpu(torch: Facts) -> Iterator[Finding]:
    for index, gpu in enumerate(torch["gpus"]):
        part, free, total = f"cuda:{index}", gpu["free"] / GIB, gpu["total"] / GIB
        found = f"{gpu['name']}, capability {gpu['capability']}, {free:.1f} of {total:.1f} GiB free"
        if gpu["error"]:
            yield Finding("error", part, f"{found}; an addition fails: {shorten(gpu['error'], most=200)}", BUILD)
        elif free < 0.05 * total:
            yield Finding("note", part, found, "Other programs hold its memory: nvidia-smi lists them")
        else:
            yield Finding("ok", part, found)


def import_finding(trial: Facts) -> Finding:
    """Return the finding about the import of the packages that a run needs.

    Args:
        trial: Results of the check `import` in probe.py.
    """
    if "error" not in trial:
        return Finding("ok", "imports", "all packages of a run")
    fix = "pip install --force-reinstall --no-deps the package that the error names"
    if "torchvision" in trial["error"]:
        fix = "Install torch and torchvision of one build, such as +cpu for both, or uninstall torchvision"
    return Finding("error", "imports", shorten(trial["error"], most=200), fix)


def run_finding(device: str, trial: Facts) -> Finding:
    """Return the finding about a run of three steps.

    Args:
        device: Device of the run, such as cuda.
        trial: Results of the check `run:DEVICE` in probe.py.
    """
    if "error" not in trial:
        return Finding("ok", f"run on {device}", "three steps")
    error = shorten(trial["error"], most=200)
    return Finding("error", f"run on {device}", f"a run of three steps fails: {error}", AGAIN)
