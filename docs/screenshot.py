"""Makes docs/tensorboard.png: three short trainings, TensorBoard on this machine alone, a headless Chromium.

    python docs/screenshot.py [--output docs/tensorboard.png] [override ...]

It needs `chromium` (Debian: apt-get install chromium), and ends what it starts.
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

TAGS = r"^(loss/(train|val)|accuracy/val|gradients/norm/total)$"
# Without --disable-3d-apis the charts stay empty: there is no GPU to draw them.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars")


def train(folder: Path, overrides: list[str]) -> None:
    sweep = ["-m", "optimizer.lr=1e-4,1e-3,1e-2", "hydra.sweep.dir=outputs/lr", "hydra.sweep.subdir=${optimizer.lr}"]
    command = [sys.executable, "-m", "exp.train", *sweep, *overrides]
    subprocess.run(command, cwd=folder, check=True, timeout=600)


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Its address, as long as the context is open."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/data/runs", server)
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


def photograph(address: str, output: Path, *, size: str = "1500,1040") -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium is installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, *FLAGS, "--virtual-time-budget=15000", f"--window-size={size}", f"--user-data-dir={profile}",
             f"--screenshot={output.resolve()}", address],
            check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("tensorboard.png"))
    parser.add_argument("overrides", nargs="*", help="of the trainings, such as trainer.max_epochs=30")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, arguments.overrides)
        with tensorboard(folder / "outputs") as address:
            filtered = urllib.parse.quote(TAGS, safe="")
            photograph(f"{address}/?tagFilter={filtered}&smoothing=0.8#timeseries", arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
