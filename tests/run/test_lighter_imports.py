"""A run does not import what it does not use, and finds it when it does.

Each program runs in a fresh interpreter: the imports of this process would hide its own.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Half of the seconds of `import torch, lightning`, and other packages that a run on digits does not use.
UNUSED = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx"),
    *("scipy.signal", "scipy.stats", "sklearn", "pandas", "matplotlib", "tensorboard.backend", "optuna", "onnx"),
)


def last_line(program: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_default_runs_import_only_what_they_use(tmp_path):
    program = """
        import sys
        from exp.train import main
        short = ["trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=1", "test=false"]
        for words in (["model=lenet"], ["model=resnet", "precision=bf16"], ["model=rnn"]):
            assert main([*words, *short]) == 0
        print([name for name in sys.argv[1:] if name in sys.modules])
    """
    assert last_line(program, *UNUSED, cwd=tmp_path) == "[]"


@pytest.mark.slow
def test_a_package_left_out_is_found_when_used(tmp_path):
    program = """
        import exp, sys, torch
        double = torch.compiler.disable(lambda x: 2 * x)
        assert "torch._dynamo" not in sys.modules
        print(torch.distributed.tensor.DTensor.__name__, double(1))
    """
    assert last_line(program, cwd=tmp_path) == "DTensor 2"
