"""python -m exp.extras.doctor.probe WHAT: runs a check that may fail, crash or hang, and prints its results as JSON.

WHAT is one of these checks: `torch` imports torch and lists GPUs. `import` imports the packages that a run needs.
`run:DEVICE` trains three steps on a device.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec

RUN = ("name=doctor", "model=mlp", "data=digits", "hooks=[]", "trainer.max_steps=3", "test=false", "launch.devices=1")


def attempt(what: str) -> dict[str, object]:
    """Run one check, and return its results by name. The results are {"error": message} if the check raises.

    Args:
        what: Name of the check: torch, import or run:DEVICE.
    """
    kind, *words = what.split(":")
    try:
        return TRIES[kind](*words)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _torch() -> dict[str, object]:
    import torch

    facts: dict[str, object] = {
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": torch.version.cuda or torch.version.hip,
        "threads": torch.get_num_threads(),
        "mps": torch.backends.mps.is_available(),
        "gpus": [],
        "cuda_error": "",
    }
    if facts["cuda"] is not None:
        try:
            torch.cuda.init()
            facts["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            facts["cuda_error"] = str(error)
    return facts


def _gpu(index: int) -> dict[str, object]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    try:
        torch.ones(4, device=f"cuda:{index}").sum().item()
        error = ""
    except RuntimeError as raised:  # such as "no kernel image is available for execution on the device"
        error = str(raised)
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return {"name": torch.cuda.get_device_name(index), "capability": capability, "free": free, "total": total,
            "error": error}  # fmt: skip


def _run(device: str) -> dict[str, object]:
    """Return the loss of a small network after three training steps in a temporary directory."""
    import exp

    silent = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory(prefix="exp-doctor-") as folder, contextlib.chdir(folder), silent:
        report = exp.fit(exp.compose([*RUN, f"launch.accelerator={device}"]))
    loss = float(report.metrics["loss/train"])
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss after three steps is {loss}")
    return {"loss": loss}


def _import() -> dict[str, object]:
    names = ["exp.run", *(["torchvision"] if find_spec("torchvision") else [])]
    return {"imported": [importlib.import_module(name).__name__ for name in names]}


TRIES: dict[str, Callable[..., dict[str, object]]] = {"torch": _torch, "import": _import, "run": _run}


if __name__ == "__main__":
    print(json.dumps(attempt(sys.argv[1])))
