"""python -m exp.doctor: checks the installation and the machine, and prints a fix for each error.

python -m exp.doctor                          all checks, with a run of three steps on each device
python -m exp.doctor --quick                  all checks except the runs
python -m exp.doctor --outputs /big/outputs   checks the disk of this directory instead of the disk of outputs
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from exp.extras.doctor import installation, machine, torch_findings
from exp.extras.doctor.finding import Finding
from exp.output import command

# Time limit of a check in seconds. The first import of torch from a network file system can take minutes.
SECONDS = 300.0


@command()
def main(argv: Sequence[str]) -> int:
    """Print one line for each finding: ok, a note that needs no action, or an error with its fix.

    Returns:
        Exit status: 0 if no finding is an error, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m exp.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="skip the training runs")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="default: outputs")
    arguments = parser.parse_args(argv)
    errors = 0
    for finding in findings(arguments.outputs, trains=not arguments.quick):
        errors += finding.state == "error"
        print(finding.text(), flush=True)  # the next finding can take seconds
    print(f"\n{errors} error{'s' if errors != 1 else ''}: fix the first error first" if errors else "\nall well")
    return 1 if errors else 0


def findings(outputs: Path, *, trains: bool) -> Iterator[Finding]:
    """Yield the findings of all checks. If torch cannot be imported, the remaining checks are skipped.

    This process does not import torch, because the import may crash or hang.

    Args:
        outputs: Directory for results.
        trains: Whether to train for three steps on each device.
    """
    yield from installation.findings()
    yield from machine.findings(outputs)
    torch = try_in_process("torch")
    if "error" in torch:
        yield torch_findings.explain_import_error(torch["error"], PathFinder.find_spec("torch"))
        return
    build = f"built for CUDA or ROCm {torch['cuda']}" if torch["cuda"] else "built for the CPU only"
    yield Finding("ok", "torch", f"{torch['version']}, {build}, {torch['threads']} threads, {torch['file']}")
    yield from torch_findings.gpu_findings(torch, drivers=machine.nvidia_drivers(), environment=os.environ)
    imports = torch_findings.import_finding(try_in_process("import"))
    yield imports
    devices = ["cpu", *(["cuda"] if torch["gpus"] else []), *(["mps"] if torch["mps"] else [])]
    for device in devices if trains and imports.state == "ok" else ():
        yield torch_findings.run_finding(device, try_in_process(f"run:{device}"))


def try_in_process(what: str) -> Mapping[str, Any]:
    """Run a check in another process, because the check may crash or hang, and return the check's results.

    Args:
        what: Name of the check in `exp.extras.doctor.probe`: torch, import or run:DEVICE.

    Returns:
        Results by name. They are {"error": message} if the check failed, crashed or took longer than SECONDS.
    """
    command = [sys.executable, "-m", "exp.extras.doctor.probe", what]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {SECONDS:g} s"}
    if done.returncode:
        end = f"status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        return {"error": f"its process was ended by {end}: {''.join(done.stderr.strip().splitlines()[-1:])}"}
    facts: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
