"""User-defined parts of a run. Each raises an exception at a place that its arguments select."""

import errno
import os
import signal

import torch
from lightning.pytorch import Callback
from torch.utils.data import Dataset, IterableDataset
from torchmetrics import Metric

from exp.hooks.hook import Hook


class Corrupted(Exception):
    def __init__(self, number, *, reason):
        super().__init__(f"number {number}: {reason}")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")


ERRORS = {
    "value": lambda: ValueError("not a picture"),
    "missing": lambda: FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "images/40.png"),
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cache/40.png"),
    "stop": StopIteration,
    "key": lambda: KeyError("width"),
    "exit": lambda: SystemExit(3),
    "closed": GeneratorExit,
    "interrupt": KeyboardInterrupt,
    "base": lambda: BaseException("of no kind"),
    "mute": Mute,
    "group": lambda: ExceptionGroup("many", [ValueError("first"), KeyError("second")]),
    "custom": lambda: Corrupted(40, reason="a header"),
}


def fail(error):
    raise ERRORS[error]()


class Rows(Dataset):
    """Data set of 80 samples. Sample 40 raises `error`; "length" raises in `__len__`, and "killed" ends the process."""

    def __init__(self, *, error=None):
        self.error = error

    def __len__(self):
        if self.error == "length":
            fail("value")
        return 80

    def __getitem__(self, index):
        if index == 40 and self.error == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 40 and self.error:
            fail(self.error)
        return torch.ones(4), index % 3


class Stream(IterableDataset):
    def __init__(self, *, error=None):
        self.error = error

    def __iter__(self):
        for index in range(80):
            if index == 40 and self.error:
                fail(self.error)
            yield torch.ones(4), index % 3


class Gathering:
    def __len__(self):
        return 80

    def gather(self, indices):
        if len(indices) > 1:
            fail("value")
        return torch.ones(len(indices), 4), indices % 3


class Transform:
    def __init__(self, *, error):
        self.error, self.count = error, 0

    def __call__(self, value):
        self.count += 1
        if self.count > 20:
            fail(self.error)
        return value


class Collate:
    def __init__(self, *, error):
        self.error = error

    def __call__(self, samples):
        if len(samples) > 1:
            fail(self.error)
        return torch.utils.data.default_collate(samples)


def failing(name):
    """Return a method of a Lightning callback that raises if `at` is its name."""

    def hook(self, *_, **__):
        if self.at == name:
            fail(self.error)
        return {}

    hook.__code__ = hook.__code__.replace(co_name=name)
    return hook


class Faulty(Callback):
    def __init__(self, *, at="on_train_batch_end", error="value"):
        self.at, self.error = at, error


for name in (
    "state_dict",
    "on_exception",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
):
    setattr(Faulty, name, failing(name))


class Measure(Metric):
    def __init__(self, *, at="update", error="value"):
        super().__init__()
        self.at, self.error = at, error

    def update(self, output, target):
        if self.at == "update":
            fail(self.error)

    def compute(self):
        if self.at == "compute":
            fail(self.error)
        return torch.tensor(0.0)


class Watch(Hook):
    def after_step(self, step):
        fail("value")


class Layer(torch.nn.Module):
    def __init__(self, *, error="value"):
        super().__init__()
        self.error, self.count = error, 0

    def forward(self, x):
        self.count += 1
        if self.count > 3 and x.device.type != "meta":
            fail(self.error)
        return x
