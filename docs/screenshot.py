"""Makes the pictures of docs/tensorboard.md: a sweep of 12 small runs, the dashboard, and a headless Chromium.

    python docs/screenshot.py [--folder docs] [--only hparams] [override ...]

It trains in a temporary folder for about a minute, needs `chromium` (Debian: apt-get install chromium), and ends
what it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
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
# Not on the command line, which HParams shows.
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
TAGS = r"^(loss/(train|val)|accuracy/val|gradients/norm/total)$"
IMAGES = r"^(confusion|features|samples)/"
# The name of each picture: of the sweep or of which job, what to put behind the address, and the window's size.
PICTURES = {
    "scalars": (".", f"?tagFilter={urllib.parse.quote(TAGS, safe='')}&smoothing=0.8#timeseries", "1500,1040"),
    "hparams": (".", "#hparams", "1500,760"),
    "custom_scalars": ("11", "?smoothing=0.6#custom_scalars", "1500,1240"),
    "pr_curves": ("0", "#pr_curves", "1500,1000"),
    "images": ("0", f"#images&tagFilter={urllib.parse.quote(IMAGES, safe='')}", "1500,1400"),
}
# Without --disable-3d-apis the charts stay empty: there is no GPU to draw them.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars")


def train(folder: Path, overrides: list[str]) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "pictures.yaml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "exp.train", "-m", *SWEEP, *overrides]
    subprocess.run(command, cwd=folder, check=True, timeout=1200)


@contextlib.contextmanager
def dashboard(folder: Path, below: str) -> Iterator[str]:
    """Its address, as long as the context is open. The page shows the path as it is given here."""
    shown = str(Path("outputs", "digits", below))
    command = [sys.executable, "-m", "exp.dashboard", shown, "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[2].partition("#")[0]
        wait_for(f"{address}data/runs", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=10)


def wait_for(address: str, server: subprocess.Popen, seconds: float = 60) -> None:
    """Until TensorBoard has found a run there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as reply:
            if reply.read().strip() != b"[]":
                return
        time.sleep(0.5)
    raise SystemExit(f"TensorBoard has shown no run at {address} in {seconds:.0f} s")


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
    # The colours of a chart are few: a third of the size, and no difference to see.
    with Image.open(output) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size // 1000} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=tuple(PICTURES))
    parser.add_argument("--trained", type=Path, help="a folder in which outputs/digits is there already")
    parser.add_argument("overrides", nargs="*", help="of the trainings, such as trainer.max_epochs=30")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.trained or Path(name)
        if arguments.trained is None:
            train(folder, arguments.overrides)
        for picture in [arguments.only] if arguments.only else PICTURES:
            below, ending, size = PICTURES[picture]
            with dashboard(folder, below) as address:
                photograph(address + ending, arguments.folder / f"tensorboard_{picture}.png", size=size)


if __name__ == "__main__":
    main()
