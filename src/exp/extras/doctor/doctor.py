"""python -m exp.doctor: looks at the installation and the machine, and names the cure of all that does not work.

python -m exp.doctor                        everything, with three steps of a run on each device and precision
python -m exp.doctor --quick                without these steps
python -m exp.doctor --outputs /big/outputs   of another directory for results
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from exp.extras.doctor import installation, machine, torch_findings
from exp.extras.doctor.finding import Finding, note
from exp.extras.doctor.trial_process import Facts, tried
from exp.output import exit_status

# What a run imports, by the distribution that brings it; torch has lines of its own.
MODULES = {
    "lightning.pytorch": "lightning",
    "torchmetrics": "torchmetrics",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "tensorboard": "tensorboard",
    "sklearn": "scikit-learn",
    "numpy": "numpy",
    "PIL": "pillow",
    "rich": "rich",
    "psutil": "psutil",
}
# Beside torch's build it breaks what Lightning imports.
OPTIONAL = {"torchvision": "torchvision"}
WORDS = ("fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "fp8")


def main(
    argv: Sequence[str] | None = None, *, modules: Mapping[str, str] = MODULES, words: Sequence[str] = WORDS
) -> int:
    """Print a line for each part: ok, a note that breaks nothing, or an error with its fix.

    modules: to import, with the distribution of each. words: the precisions to train with.
    Returns: 0 if all is well, 1 if something is broken.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv, modules, words))


def _command(argv: Sequence[str], modules: Mapping[str, str], words: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    faults = 0
    for finding in findings(arguments.outputs, modules, words, is_quick=arguments.quick):
        faults += finding.state == "fault"
        # At once, for the next one may take seconds.
        print("\n".join(finding.lines(16)), flush=True)
    print(f"\n{faults} fault{'s' if faults != 1 else ''}: mend the first one first" if faults else "\nall well")
    return 1 if faults else 0


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m exp.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="train nothing: a second or two less for each precision")
    found.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="by default outputs")
    return found


def findings(outputs: Path, modules: Mapping[str, str], words: Sequence[str], *, is_quick: bool) -> Iterator[Finding]:
    """Look at everything, what needs nothing first. Torch is imported by processes that may be lost, never by this."""
    yield from installation.findings()
    yield from machine.findings(outputs)
    first = tried(["place:torch", "torch"])
    trial, place = first["torch"], first["place:torch"].get("place")
    broken = torch_findings.broken(trial, place=place, installed=installation.installed_torch())
    if broken is not None:
        yield broken
        yield note("not looked at", "devices, process groups, other packages and runs: all need torch")
        return
    nvidia = machine.nvidia()
    yield from torch_findings.torch_findings(trial)
    yield from torch_findings.gpu_findings(trial, nvidia, os.environ)
    names = {**modules} | {module: name for module, name in OPTIONAL.items() if _is_installed(name)}
    imports = [f"import:{module}" for module in names]
    trials = tried([*_groups(trial), *imports])
    yield from torch_findings.group_findings(trial, trials)
    yield from torch_findings.import_findings(trials, names)
    if is_quick or any("version" not in trials[one] for one in imports):
        why = "--quick leaves them out" if is_quick else "they need every package above"
        yield note("not looked at", f"runs: {why}")
        return
    yield from torch_findings.run_findings(tried([f"run:{one}:{word}" for one in _devices(trial) for word in words]))


def _groups(torch: Facts) -> list[str]:
    found = ["group:gloo"] if torch["groups"]["gloo"] else []
    return [*found, "group:nccl"] if torch["groups"]["nccl"] and torch["gpus"] else found


def _devices(torch: Facts) -> list[str]:
    """By the words of launch.accelerator."""
    return ["cpu", *(["cuda"] if torch["gpus"] else []), *(["mps"] if torch["mps"] else [])]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
