"""A callback and a layer that end the process of their job in the way that the config selects."""

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

from exp.objectives.terms import CrossEntropy

FOUND = Path("found")


class Ends(Callback):
    """Callback that ends the process after the first training batch."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        getattr(self, self.how)()

    def well(self):
        # Record if an earlier job has changed this process.
        with FOUND.open("a") as file:
            is_in_place = Path.cwd() == FOUND.absolute().parent
            file.write(f"{torch.get_default_dtype()} {os.environ.get('LEFT')} {is_in_place}\n")

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
        raise MemoryError("raised by the user")

    def raises(self):
        raise ValueError("raised by the user")

    def limited_memory(self):
        # The same as `ulimit -v` with a little more than the current size of the process.
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))
        self.kept = torch.ones(2**28)

    def full_disk(self):
        # Simulates a disk that has no space for a checkpoint.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    def one_rank(self):
        if os.environ.get("RANK") == "1":
            os._exit(0)

    def aborts(self):
        print("last words of a library", flush=True)
        os.abort()

    def threads(self):
        # Number of threads in this process, and in processes that it starts.
        words = {"threads": torch.get_num_threads(), "variable": os.environ["OMP_NUM_THREADS"]}
        Path(f"threads{os.environ.get('RANK', '')}.json").write_text(json.dumps(words))

    def meets(self):
        # Continues only if another job runs at the same time.
        Path(f"here{os.getpid()}").touch()
        while len(list(Path().glob("here*"))) < 2:
            time.sleep(0.01)

    def waits(self):
        FOUND.touch()
        Path(f"waits{os.getpid()}").touch()

    def ignores_signals(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        self.waits()
        time.sleep(600)


class Layer(torch.nn.Module):
    """Layer that ends the process during the check, in its constructor or in its forward."""

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

    def raises_later(self):
        # The calls are kept outside the network, because a network with such state is not stacked.
        CALLS.append(self.how)
        if len(CALLS) == 12:
            raise ValueError("raised by a layer of the user")

    def raises_in_a_stack(self):
        if torch._C._functorch.maybe_current_level() is not None:
            self.raises_later()

    def ctrl_c(self):
        raise KeyboardInterrupt

    def base(self):
        raise BaseException("raised by the user")

    def hangs(self):
        FOUND.touch()
        time.sleep(600)

    def well(self):
        pass


CALLS: list[str] = []


class Running(torch.nn.Module):
    """Layer that subtracts a running mean in a buffer, which each step replaces, and counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
            self.calls += 1
        return (x - self.mean) / (1 + self.calls)


class Counted(CrossEntropy):
    """Loss that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, output, target):
        self.steps += 1
        return super().forward(output, target)
