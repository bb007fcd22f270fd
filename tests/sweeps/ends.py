"""A callback of the user's own that ends the process of its job in the way that the config names."""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback

FOUND = Path("found")


class Ends(Callback):
    def __init__(self, *, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        getattr(self, self.how)()

    def well(self):
        # What an earlier job did to its process.
        with FOUND.open("a") as file:
            file.write(
                f"{torch.get_default_dtype()} {os.environ.get('LEFT')} {Path.cwd() == FOUND.absolute().parent}\n"
            )

    def changes(self):
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def exit_0(self):
        os._exit(0)

    def sys_exit(self):
        sys.exit(0)

    def segmentation_fault(self):
        ctypes.string_at(0)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def no_memory(self):
        raise MemoryError("of the user's own")

    def raises(self):
        raise ValueError("of the user's own")

    def limited_memory(self):
        # As after `ulimit -v`, a little above what the process has.
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))
        self.kept = torch.ones(2**28)

    def full_disk(self):
        # As on a disk with no room for a checkpoint.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    def one_rank(self):
        if os.environ.get("RANK") == "1":
            os._exit(0)

    def aborts(self):
        print("a library's last words", flush=True)
        os.abort()

    def says(self):
        # Threads of operators: of this process, and what its own children would take.
        words = {"threads": torch.get_num_threads(), "variable": os.environ["OMP_NUM_THREADS"]}
        Path(f"threads{os.environ.get('RANK', '')}.json").write_text(json.dumps(words))

    def meets(self):
        # Goes on only where another job is here at the same time.
        Path(f"here{os.getpid()}").touch()
        while len(list(Path().glob("here*"))) < 2:
            time.sleep(0.01)

    def waits(self):
        FOUND.touch()
        Path(f"waits{os.getpid()}").touch()

    def waits_in_vain(self):
        # A user's own code that answers no signal.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        self.waits()
        time.sleep(600)


class Layer(torch.nn.Module):
    """Ends the process of a check in the same ways, as it is made or in its forward."""

    def __init__(self, *, how: str, at: str) -> None:
        super().__init__()
        self.how, self.at = how, at
        if at == "constructor":
            getattr(self, how)()

    def forward(self, x):
        if self.at == "forward":
            getattr(self, self.how)()
        return x

    exit_0, segmentation_fault, killed, sys_exit = Ends.exit_0, Ends.segmentation_fault, Ends.killed, Ends.sys_exit

    def raises_in_a_stack(self):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 100 and torch._C._functorch.maybe_current_level() is not None:
            raise ValueError("of a layer of the user's own")

    def raises_later(self):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 100:
            raise ValueError("of a layer of the user's own")

    def ctrl_c(self):
        raise KeyboardInterrupt

    def base(self):
        raise BaseException("of the user's own")

    def hangs(self):
        FOUND.touch()
        time.sleep(600)

    def hangs_beside_a_job(self):
        is_job = os.readlink("/proc/self/fd/1").endswith("output.log")
        if not is_job and list(Path("outputs").rglob("output.log")):
            while not list(Path().glob("waits*")):
                time.sleep(0.01)
            Path("checks").touch()
            time.sleep(600)

    def well(self):
        pass
