"""A callback of the user's own that ends the process of its job in the way that the config names."""

import ctypes
import os
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

    def waits(self):
        FOUND.touch()


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

    def ctrl_c(self):
        raise KeyboardInterrupt

    def base(self):
        raise BaseException("of the user's own")

    def hangs(self):
        FOUND.touch()
        time.sleep(600)

    def well(self):
        pass
