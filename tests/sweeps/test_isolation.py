"""What one job does to the process is undone before the next."""

import logging
import os
import random
import signal
import warnings

import numpy
import pytest
import torch

from exp.sweeps.isolation import isolated


def test_everything_a_job_may_change_is_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("EXP_TEST_KEPT", "1")
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)

    def state():
        return {
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            "warnings": list(warnings.filters),
            "python": random.getstate(),
            "numpy": str(numpy.random.get_state()),
            "torch": torch.get_rng_state().tolist(),
            "threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
        }

    before = state()

    def job():
        with isolated():
            os.environ.update(LOCAL_RANK="1", WORLD_SIZE="2", EXP_TEST_KEPT="2")
            del os.environ["HOME"]
            os.chdir(tmp_path)
            logging.getLogger().setLevel(1)
            logging.getLogger().addHandler(logging.NullHandler())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            warnings.simplefilter("ignore")
            random.random(), numpy.random.rand(), torch.rand(1)
            torch.set_num_threads(torch.get_num_threads() + 1)
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            torch.use_deterministic_algorithms(True)
            torch.set_float32_matmul_precision("medium")
            raise RuntimeError("job")

    with pytest.raises(RuntimeError, match="job"):
        job()
    assert state() == before


class OfWidth(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, width), torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_every_job_compiles_its_network_however_many_widths_came_before():
    """torch counts by the code of a class: later jobs had what the first ones left, and from the eighth on none."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    from exp.engine.compilation import compile_network

    torch._dynamo.reset()
    before, compiled = torch._dynamo.config.skip_nnmodule_hook_guards, []
    for width in range(8, 13):
        counters.clear()
        with isolated():
            network = OfWidth(width)
            compile_network(network, backend="aot_eager", needs=frozenset())
            for mode in (True, False):
                for rows in (5, 6):
                    network.train(mode)(torch.zeros(rows, 4)).sum().backward()
        compiled.append(counters["frames"]["ok"])
    assert compiled == [compiled[0]] * 5
    assert compiled[0] > 0
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before


def test_a_process_group_left_open_is_closed(tmp_path):
    with isolated():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
        )
    assert not torch.distributed.is_initialized()
