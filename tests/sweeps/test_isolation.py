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


def test_a_process_group_left_open_is_closed(tmp_path):
    with isolated():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
        )
    assert not torch.distributed.is_initialized()
