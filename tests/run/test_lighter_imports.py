"""A run does not import packages that it does not use."""

import subprocess
import sys

import pytest

# Packages that a run on digits does not use.
UNUSED = ("scipy.signal", "scipy.stats", "sklearn", "pandas", "matplotlib", "tensorboard.backend", "optuna", "onnx")

PROGRAM = """
import sys
from exp.cli.train import main
short = ["trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=1", "test=false"]
for words in (["model=lenet"], ["model=resnet", "precision=bf16"], ["model=rnn"]):
    assert main([*words, *short]) == 0
print([name for name in sys.argv[1:] if name in sys.modules])
"""


@pytest.mark.slow
def test_default_runs_import_only_what_they_use(tmp_path):
    # A new interpreter, because this process has already imported more.
    command = [sys.executable, "-c", PROGRAM, *UNUSED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
