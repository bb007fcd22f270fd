"""python -m exp.doctor: checks the installation and the machine, and prints a fix for each error.

python -m exp.doctor                        everything, with three steps of a run on each device and precision
python -m exp.doctor --quick                everything except the runs
python -m exp.doctor --outputs /big/outputs   checks the disk of another directory for results
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from exp.extras.doctor import installation, machine, torch_findings
from exp.extras.doctor.finding import Finding
from exp.extras.doctor.trial_process import tried
from exp.output import exit_status

# What a run imports, with the distribution of each module.
MODULES = {
    "lightning.pytorch": "lightning", "torchmetrics": "torchmetrics", "tensorboard": "tensorboard",
    "sklearn": "scikit-learn", "numpy": "numpy", "PIL": "pillow",
}  # fmt: skip
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")


def main(argv: Sequence[str] | None = None, *, modules: Mapping[str, str] = MODULES) -> int:
    """Print one line for each part: ok, a note that breaks nothing, or an error with its fix.

    Args:
        argv: The command line; None reads `sys.argv`.
        modules: The modules to import, with the distribution of each.

    Returns:
        0 without an error, else 1.
    """
    return exit_status(lambda: _command(argv, modules))


def _command(argv: Sequence[str] | None, modules: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exp.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="train nothing")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="default: outputs")
    arguments = parser.parse_args(argv)
    errors = 0
    for finding in findings(arguments.outputs, modules, () if arguments.quick else PRECISIONS):
        errors += finding.state == "error"
        print(finding.text(), flush=True)  # the next finding can take seconds
    print(f"\n{errors} error{'s' if errors != 1 else ''}: fix the first one first" if errors else "\nall well")
    return 1 if errors else 0


def findings(outputs: Path, modules: Mapping[str, str], precisions: Sequence[str]) -> Iterator[Finding]:
    """Check everything, and stop at an error on which the rest depends. Only other processes import torch."""
    yield from installation.findings()
    yield from machine.findings(outputs)
    torch = tried(["torch"])["torch"]
    if "error" in torch:
        yield torch_findings.broken(torch["error"], PathFinder.find_spec("torch"))
        return
    build = f"built for CUDA or ROCm {torch['cuda']}" if torch["cuda"] else "built for the CPU only"
    yield Finding("ok", "torch", f"{torch['version']}, {build}, {torch['threads']} threads, {torch['file']}")
    gpus, driver = machine.nvidia()
    yield from torch_findings.gpu_findings(torch, gpus=gpus, driver=driver, environment=os.environ)
    if find_spec("torchvision") is not None:
        modules = {**modules, "torchvision": "torchvision"}
    backends = ["gloo", "nccl"] if torch["gpus"] else ["gloo"]
    yield from torch_findings.group_findings(tried([f"group:{name}" for name in backends]))
    broken = list(torch_findings.import_findings(tried([f"import:{name}" for name in modules]), modules))
    yield from broken or [Finding("ok", "imports", ", ".join(modules))]
    if broken:
        return
    for device in ["cpu", *(["cuda"] if torch["gpus"] else []), *(["mps"] if torch["mps"] else [])]:
        yield from torch_findings.run_findings(device, tried([f"run:{device}:{word}" for word in precisions]))
