"""python -m exp.doctor: checks the installation and the machine, and prints a fix for each error.

python -m exp.doctor                        everything, with three steps of a run on each device and precision
python -m exp.doctor --quick                everything except the runs
python -m exp.doctor --outputs /big/outputs   checks the disk of another directory for results
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from exp.extras.doctor import installation, machine, torch_findings
from exp.extras.doctor.finding import Finding
from exp.extras.doctor.trial_process import tried
from exp.output import exit_status

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each part: ok, a note that breaks nothing, or an error with its fix.

    Returns:
        0 without an error, else 1.
    """
    return exit_status(lambda: _command(argv))


def _command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exp.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="train nothing")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="default: outputs")
    arguments = parser.parse_args(argv)
    errors = 0
    for finding in findings(arguments.outputs, () if arguments.quick else PRECISIONS):
        errors += finding.state == "error"
        print(finding.text(), flush=True)  # the next finding can take seconds
    print(f"\n{errors} error{'s' if errors != 1 else ''}: fix the first one first" if errors else "\nall well")
    return 1 if errors else 0


def findings(outputs: Path, precisions: Sequence[str]) -> Iterator[Finding]:
    """Check everything, and stop at an error on which the rest depends. Only other processes import torch."""
    yield from installation.findings()
    yield from machine.findings(outputs)
    torch = tried(["torch"])["torch"]
    if "error" in torch:
        yield torch_findings.broken(torch["error"], PathFinder.find_spec("torch"))
        return
    build = f"built for CUDA or ROCm {torch['cuda']}" if torch["cuda"] else "built for the CPU only"
    yield Finding("ok", "torch", f"{torch['version']}, {build}, {torch['threads']} threads, {torch['file']}")
    yield from torch_findings.gpu_findings(torch, drivers=machine.nvidia_drivers(), environment=os.environ)
    groups = ["group:gloo", *(["group:nccl"] if torch["gpus"] else [])]
    trials = tried([*groups, "import"])
    imports = torch_findings.import_finding(trials.pop("import"))
    yield from torch_findings.group_findings(trials)
    yield imports
    if imports.state == "error":
        return
    for device in ["cpu", *(["cuda"] if torch["gpus"] else []), *(["mps"] if torch["mps"] else [])]:
        yield from torch_findings.run_findings(device, tried([f"run:{device}:{word}" for word in precisions]))
