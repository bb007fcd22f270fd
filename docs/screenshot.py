"""Screenshots of docs/tensorboard.md and docs/sweeps.md.

    python docs/screenshot.py [--folder docs] [--only tensorboard_hparams] [override ...]

The program trains in a temporary folder for about a minute: a grid of 12 small runs, a search of 12 trials, an MLP and
a GPT. It starts the dashboards and takes the screenshots with headless Chromium (Debian: apt-get install chromium). If
optuna-dashboard is not installed, the program skips its picture.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

SWEEP = (
    "optimizer.lr=1e-3,3e-3,1e-2",
    "model.layers.linear1.out_features=16,120",
    "precision=fp32,fp16",
    "experiment=pictures",
    "hydra.sweep.dir=outputs/digits",
    "hydra.sweep.subdir=${hydra.job.num}",
)
SEARCH = (
    "model=mlp",
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "model.constants.width=8,16,32",
    "sweep.trials=12",
    "sweep.sampler=tpe",
    "sweep.pruner=median",
    "trainer.max_epochs=6",
    "hydra.sweep.dir=outputs/search",
)
RUNS = (
    ("trainer.max_epochs=20", "optimizer.lr=0.002", "hydra.run.dir=outputs/mlp/09-39-00"),
    (
        *("model=gpt", "data=text", "experiment=[]", "data.dataset.block_size=64", "data.batch_size=32"),
        *("+hooks=activations", "hooks.activations.modules=['*']", "trainer.max_epochs=1"),
        *("trainer.limit_train_batches=80", "trainer.val_check_interval=20", "trainer.limit_val_batches=10"),
        *("trainer.limit_test_batches=10", "hydra.run.dir=outputs/gpt/09-41-00"),
    ),
)
# Written to a file, because HParams would show these settings if they were on the command line.
EXPERIMENT = """# @package _global_
# A small convolutional network, with pictures of what it sees: experiment=pictures
defaults:
  - override /model: lenet
  - override /hooks: [gradients, memory, throughput, activations, features, samples, confusion, pr_curve]
  - _self_
trainer: {max_epochs: 6}
hooks:
  activations: {every_n_steps: 10, modules: ["relu*"]}
  features: {every_n_steps: 100}
  pr_curve: {max_classes: 4}
"""
IMAGES = r"^(confusion|features|samples)/"
HEAT_MAPS = r"^(gradients|activations)/"
OVERVIEW = "data/plugin/exp/overview"
# Name of each picture: folder in outputs/, end of the address in the dashboard, and size of the window in pixels.
PICTURES = {
    "tensorboard_overview": ("mlp", OVERVIEW, "1500,1240"),
    "tensorboard_scalars": ("digits", OVERVIEW, "1500,1040"),
    "tensorboard_heat_maps": ("digits/0", f"#images&tagFilter={urllib.parse.quote(HEAT_MAPS, safe='')}", "1500,1240"),
    "tensorboard_gpt": ("gpt", f"#images&tagFilter={urllib.parse.quote(HEAT_MAPS, safe='')}", "1500,1240"),
    "tensorboard_hparams": ("digits", "#hparams", "1500,760"),
    "tensorboard_custom_scalars": ("digits/11", "?smoothing=0.6#custom_scalars", "1500,1240"),
    "tensorboard_pr_curves": ("digits/0", "#pr_curves", "1500,1000"),
    "tensorboard_images": ("digits/0", f"#images&tagFilter={urllib.parse.quote(IMAGES, safe='')}", "1500,1400"),
    "sweep_hparams": ("search", "#hparams", "1840,740"),
}
OPTUNA = "sweep_optuna_dashboard"
# Without --disable-3d-apis the charts stay empty on a machine without a GPU.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars")


def train(folder: Path, overrides: list[str]) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "pictures.yaml").write_text(EXPERIMENT)
    for sweep in (SWEEP, SEARCH):
        command = [sys.executable, "-m", "exp.train", "-m", *sweep, *overrides]
        subprocess.run(command, cwd=folder, check=True, timeout=1200)
    for run in RUNS:
        subprocess.run([sys.executable, "-m", "exp.train", *run, *overrides], cwd=folder, check=True, timeout=1200)


@contextlib.contextmanager
def dashboard(folder: Path, shown: str) -> Iterator[str]:
    """Run the dashboard of outputs/`shown` and yield its address; the page shows this path."""
    command = [sys.executable, "-m", "exp.dashboard", f"outputs/{shown}", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[2].partition("data/")[0].partition("#")[0]
        wait_for(f"{address}data/runs", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=10)


@contextlib.contextmanager
def optuna_dashboard(folder: Path, command: str) -> Iterator[str]:
    """Run optuna-dashboard for the search and yield the address of its study."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    journal = folder / "outputs" / "search" / "sweep.journal"
    server = subprocess.Popen(
        [command, str(journal), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/api/studies", server)
        yield f"http://127.0.0.1:{port}/dashboard/studies/0"
    finally:
        server.terminate()
        server.wait(timeout=10)


def wait_for(address: str, server: subprocess.Popen, seconds: float = 60) -> None:
    """Wait until a dashboard answers and TensorBoard has found a run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as reply:
            if reply.read().strip() != b"[]":
                return
        time.sleep(0.5)
    raise SystemExit(f"{address} has shown no run after {seconds:.0f} s")


def photograph(address: str, output: Path, *, size: str) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium is installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, *FLAGS, "--virtual-time-budget=60000", f"--window-size={size}", f"--user-data-dir={profile}",
             f"--screenshot={output.resolve()}", address],
            check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    # Charts have few colors: 128 colors look the same and make the file a third as large.
    with Image.open(output) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size // 1000} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=(*PICTURES, OPTUNA))
    parser.add_argument("--trained", type=Path, help="a folder with the outputs/ of an earlier call; no training")
    parser.add_argument("overrides", nargs="*", help="overrides of all runs, such as trainer.max_epochs=30")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.trained or Path(name)
        if arguments.trained is None:
            train(folder, arguments.overrides)
        for picture in [arguments.only] if arguments.only else [*PICTURES, OPTUNA]:
            output = arguments.folder / f"{picture}.png"
            if picture == OPTUNA:
                if (command := shutil.which("optuna-dashboard")) is None:
                    print("optuna-dashboard is not installed: its picture is skipped")
                    continue
                with optuna_dashboard(folder, command) as address:
                    photograph(address, output, size="1500,1240")
                continue
            shown, ending, size = PICTURES[picture]
            with dashboard(folder, shown) as address:
                photograph(address + ending, output, size=size)


if __name__ == "__main__":
    main()
