"""python -m exp.extras.doctor.probe FILE WHAT...: tries what may fail, crash or hang, in a process that may be lost.

Each try is two lines of JSON in FILE: that it begins, and what came of it. A process that died in between is told by
the first alone. WHAT is place:MODULE, torch, import:MODULE, group:BACKEND or run:DEVICE:WORD.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# One run of a few steps, which meets the data, the loop, the precision and the files of a run.
RUN = (
    "name=doctor",
    "model=mlp",
    "data=digits",
    "hooks=[]",
    "trainer.max_steps=3",
    "trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "test=false",
    "optimizer.eps=1e-4",  # what fp16_true needs, so that every precision makes the same steps
    "launch.devices=1",
)


def main(argv: Sequence[str]) -> int:
    """Try one thing after another. Returns: 0; what failed is in the file."""
    file, *wanted = argv
    with open(file, "a", encoding="utf-8") as results:
        for what in wanted:
            _write(results, {"what": what, "begins": True})
            try:
                facts = tried(what)
            except (Exception, SystemExit) as error:
                facts = {"error": _told(error)}
            _write(results, {"what": what, **facts})
    return 0


def _write(results: io.TextIOBase | Any, line: Mapping[str, Any]) -> None:
    results.write(json.dumps(line, default=str) + "\n")
    results.flush()


def _told(error: BaseException) -> dict[str, Any]:
    text = str(error).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return {"type": type(error).__name__, "text": text, "file": frames[-1].filename if frames else ""}


def tried(what: str) -> dict[str, Any]:
    """Try one thing. Returns: what is to be said of it, as plain values."""
    kind, _, rest = what.partition(":")
    if kind == "place":
        return place_facts(rest)
    if kind == "torch":
        return torch_facts()
    if kind == "import":
        return {"version": str(getattr(importlib.import_module(rest), "__version__", ""))}
    if kind == "group":
        return group_facts(rest)
    device, _, word = rest.partition(":")
    return run_facts(device, word)


def place_facts(module: str) -> dict[str, Any]:
    """Where an import would find a module, None where nowhere. Does not import it."""
    spec = find_spec(module)
    if spec is None:
        return {"place": None}
    if spec.origin is not None:
        path = Path(spec.origin)
        return {"place": str(path.parent if path.name == "__init__.py" else path)}
    # A folder without an __init__, as a half removed package leaves it.
    return {"place": next(iter(spec.submodule_search_locations or ()), None)}


def torch_facts() -> dict[str, Any]:
    """What torch says of itself and of the devices that it sees."""
    import torch

    # A half removed torch is a folder without an __init__, which Python imports all the same.
    if getattr(torch, "__file__", None) is None or not hasattr(torch, "Tensor"):
        raise ImportError("torch has no __init__.py, or an empty one: it is half installed")
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "sum": float(torch.arange(1000, dtype=torch.float32).sum()),
        "mps_built": torch.backends.mps.is_built(),
        "mps": torch.backends.mps.is_available(),
        "groups": _groups(),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "gpus": [],
        "cuda_error": None,
    }
    if facts["cuda"] is not None or facts["hip"] is not None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            facts["available"] = torch.cuda.is_available()
        try:
            torch.cuda.init()
            facts["archs"] = torch.cuda.get_arch_list()
            facts["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            facts["cuda_error"] = " ".join([str(error), *(str(one.message) for one in told)])
    return facts


def _groups() -> dict[str, Any]:
    """The backends of torch.distributed; None without it."""
    import torch.distributed as dist

    if not dist.is_available():
        return {"distributed": False, "gloo": False, "nccl": False, "nccl_version": None}
    nccl_version = None
    if dist.is_nccl_available():
        with contextlib.suppress(RuntimeError, AttributeError):  # a build with NCCL in a machine without CUDA
            import torch.cuda.nccl

            nccl_version = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "distributed": True,
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "nccl_version": nccl_version,
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "free": free,
        "total": total,
    }


def group_facts(backend: str) -> dict[str, Any]:
    """A process group of one rank, and one sum in it, by the way that exp takes on one machine."""
    import torch
    import torch.distributed as dist

    from exp.launch.spawn import LOOPBACK
    from exp.strategies.placement import Dimensions, Placement
    from exp.strategies.process_group import join
    from exp.strategies.rank import Rank

    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    placement = Placement(
        strategy="ddp",
        accelerator="cuda" if backend == "nccl" else "cpu",
        backend=backend,
        nodes=1,
        dimensions=Dimensions(),
        device_indices=(0,) if backend == "nccl" else (),
    )
    with tempfile.TemporaryDirectory(prefix="exp-doctor-") as folder:
        rank = Rank(global_rank=0, local_rank=0, world_size=1, local_world_size=1, store=str(Path(folder, "store")))
        join(rank, placement, timeout_seconds=60.0)
        try:
            one = torch.ones(4, device=placement.device(0))
            dist.all_reduce(one)
            return {"sum": float(one.sum())}
        finally:
            dist.destroy_process_group()


def run_facts(device: str, word: str) -> dict[str, Any]:
    """Three steps of a small network on a device in a precision, in a directory that is taken away again.

    Returns: the losses' last value; or what the check refuses.
    """
    import exp
    from exp.errors import ConfigError, MissingExtraError

    here = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="exp-doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            report = exp.fit(exp.compose([*RUN, f"precision={word}", f"launch.accelerator={device}"]))
        except ConfigError as error:
            return {"refused": "; ".join(f"{one.got}; expected {one.expected}" for one in error.faults)}
        except MissingExtraError as error:
            return {"refused": str(error)}
        finally:
            os.chdir(here)
    loss = float(report.metrics["loss/train"])
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss of three steps is {loss}")
    return {"loss": loss, "seconds": report.wall_seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
