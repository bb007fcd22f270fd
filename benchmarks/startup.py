"""Start-up time of exp. Run it on a machine without other load: python benchmarks/startup.py [repetitions]

Prints the medians of paired repetitions and their ratio:
    --help, --cfg job  whole commands, compared with those of an empty Hydra program
    first step         from the command to the end of the first optimizer step, compared with `import torch, lightning`
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMPTY = """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(config): pass
main()
"""
# torch's hook on all optimizers ends the process after the first step, without changes to exp.
FIRST_STEP = """
import os, sys, time
import exp  # first, as in a command
import torch
def stop(*_):
    print("AT", time.time(), flush=True)
    os._exit(0)
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(stop)
from exp.cli.train import main
sys.exit(main(["trainer.max_steps=1"]))
"""
IMPORTS = """
import time
import torch, lightning
print("AT", time.time(), flush=True)
"""


def wall_seconds(*arguments: str, directory: str) -> float:
    """Return the wall seconds of a whole process."""
    begun = time.time()
    subprocess.run([sys.executable, *arguments], cwd=directory, check=True, capture_output=True)
    return time.time() - begun


def seconds_until(*arguments: str, directory: str) -> float:
    """Return the seconds from the start of a process to the time that it prints after AT."""
    begun = time.time()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    return next(float(line.split()[1]) for line in done.splitlines() if line.startswith("AT ")) - begun


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "empty.py").write_text(EMPTY)
        rows = {
            "--help": (
                lambda: wall_seconds("-m", "exp.train", "--help", directory=directory),
                lambda: wall_seconds("empty.py", "--help", directory=directory),
            ),
            "--cfg job": (
                lambda: wall_seconds("-m", "exp.train", "--cfg", "job", directory=directory),
                lambda: wall_seconds("empty.py", "--cfg", "job", directory=directory),
            ),
            "first step": (
                lambda: seconds_until("-c", FIRST_STEP, directory=directory),
                lambda: seconds_until("-c", IMPORTS, directory=directory),
            ),
        }
        print(f"{'what':<12} {'exp s':>8} {'base s':>8} {'ratio':>6}   median of {repetitions} pairs")
        for name, (ours, base) in rows.items():
            ours(), base()  # not measured, because it reads the files from disk
            pairs = [(ours(), base()) for _ in range(repetitions)]
            ratio = statistics.median(one / other for one, other in pairs)
            one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{name:<12} {one:8.2f} {other:8.2f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
