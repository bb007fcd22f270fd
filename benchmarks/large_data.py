"""Time and memory of loading large data: python benchmarks/large_data.py [csv pictures tokens] [--rows 10_000_000]

The benchmark writes a CSV file, a folder of pictures and a file of tokens to a temporary folder (or to --folder, which
stays). exp's loader and a loader written by hand for these data read them alternately, each in a new process with one
thread. Pictures are read by two workers:

    first             seconds from the start of the process to the first batch
    first, processor  the same in processor seconds of all processes
    memory            peak memory in MiB, with imports; for tokens the memory of the process without the mapped file,
                      for pictures that of all processes
    data              peak memory minus the memory after all imports
    rate              samples per second after the first batch
    us, processor     processor time per sample of all processes, in microseconds

The ratio is exp / by hand, the median over --pairs pairs. Below 1 means that exp is better, except for the rate.
--cold drops the file of tokens from the system's cache before each process. --step adds whole runs of `exp.train`:
seconds and memory at the end of the first optimizer step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SECONDS = 5.0
# Start of each measured program. The time starts with the process.
MEASURED = """
import os, sys, time, json
START = float(os.environ["START"])
PLACE, SECONDS = os.environ["PLACE"], float(os.environ["SECONDS"])

def status(*names):
    found = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(found[name].split()[0]) for name in names) / 1024

def held():
    import psutil
    me = psutil.Process()
    return sum(one.memory_full_info().pss for one in [me, *me.children(recursive=True)]) / 2**20

def measure(batches, size_of, *, peak, imported):
    batches = iter(batches)
    next(batches)
    first, busy = time.time() - START, processor()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + SECONDS:
        batch = next(batches, None)
        if batch is None:
            break
        count += size_of(batch)
    rate = count / (time.perf_counter() - begun)
    found = {"first": first, "first, processor": busy, "memory": peak(), "rate": rate}
    found |= {"data": found["memory"] - imported, "us, processor": 1e6 * (processor() - busy) / count}
    print(json.dumps(found), flush=True)
    os._exit(0)

def processor():
    import psutil
    me = psutil.Process()
    times = [one.cpu_times() for one in [me, *me.children(recursive=True)]]
    return sum(one.user + one.system for one in times)

def own():
    return status("RssAnon")

def peak():
    return status("VmHWM")
"""
CSV_BY_HAND = """
import numpy as np, torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
imported = own()
codes = {}
table = np.loadtxt(
    PLACE, delimiter=",", skiprows=1, dtype=np.float32, converters={6: lambda text: codes.setdefault(text, len(codes))},
    encoding=None,
)
table = torch.from_numpy(table)
places = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
train = places[: int(0.7 * len(table))]
for column in (0, 1, 2, 3, 4, 5, 7):
    values = table[train, column].double()
    table[:, column].sub_(values.mean()).div_(values.std(unbiased=False))

class Rows(Dataset):
    def __len__(self):
        return len(train)
    def __getitem__(self, indices):
        rows = table[train[indices]]
        words = torch.nn.functional.one_hot(rows[:, 6].long(), len(codes))
        return torch.cat([rows[:, :6], words], 1), rows[:, 7:]

sampler = BatchSampler(RandomSampler(Rows()), 256, drop_last=False)
measure(DataLoader(Rows(), sampler=sampler, batch_size=None), lambda batch: len(batch[0]), peak=peak, imported=imported)
"""
CSV_EXP = """
from exp.data.data import Data
from exp.data.delimited import Csv
imported = own()
table = Csv(path=PLACE, target="target", task="regression", categorical=["kind"])
data = Data(dataset=table, batch_size=256)
measure(data.loader("train"), lambda batch: batch.size, peak=peak, imported=imported)
"""
PICTURES_BY_HAND = """
import numpy as np, torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, random_split
imported = own()

class Pictures(Dataset):
    def __init__(self):
        kinds = sorted(entry.name for entry in os.scandir(PLACE) if entry.is_dir())
        self.files = [
            (entry.path, number)
            for number, kind in enumerate(kinds)
            for entry in sorted(os.scandir(os.path.join(PLACE, kind)), key=lambda entry: entry.name)
        ]
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        path, number = self.files[index]
        with Image.open(path) as picture:
            pixels = np.array(picture.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), number

train, _, _ = random_split(Pictures(), [0.7, 0.15, 0.15], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
measure(loader, lambda batch: len(batch[0]), peak=held, imported=imported)
"""
PICTURES_EXP = """
from exp.data.data import Data
from exp.data.images import Images
imported = own()
data = Data(dataset=Images(path=PLACE, mode="RGB"), batch_size=64, num_workers=2)
measure(data.loader("train"), lambda batch: batch.size, peak=held, imported=imported)
"""
# nanoGPT's train.py loads batches like this: from random positions, so that an epoch may repeat or miss a block.
TOKENS_BY_HAND = """
import numpy as np, torch
imported = own()
tokens = np.memmap(PLACE, dtype=np.uint16, mode="r")
length, size = 1024, 16

def batches():
    while True:
        starts = torch.randint(int(0.9 * len(tokens)) - length, (size,))
        inputs = torch.stack([torch.from_numpy(tokens[at : at + length].astype(np.int64)) for at in starts])
        targets = torch.stack([torch.from_numpy(tokens[at + 1 : at + 1 + length].astype(np.int64)) for at in starts])
        yield inputs, targets

measure(batches(), lambda batch: len(batch[0]), peak=own, imported=imported)
"""
TOKENS_EXP = """
from exp.data.data import Data
from exp.extras.tokenizers.token_file import TokenFile
imported = own()
made = TokenFile(path=PLACE, vocabulary_size=50257, block_size=1024)
data = Data(dataset=made, batch_size=16, parts={"train": 0.9, "val": 0.05, "test": 0.05})
measure(data.loader("train"), lambda batch: batch.size, peak=own, imported=imported)
"""
STEP = """
import exp
from torch.optim.optimizer import register_optimizer_step_post_hook
def stop(*_):
    print(json.dumps({"first": time.time() - START, "memory": peak()}), flush=True)
    os._exit(0)
register_optimizer_step_post_hook(stop)
from exp.cli.train import main
sys.exit(main(sys.argv[1:] + ["trainer.max_steps=1"]))
"""
WORDS = {
    "csv": [
        "data=csv_regression", "data.dataset.target=target", "data.dataset.categorical=[kind]", "data.batch_size=256",
    ],
    "pictures": ["data=images", "data.dataset.mode=RGB", "data.batch_size=64"],
    "tokens": [
        "data=token_file", "data.dataset.vocabulary_size=50257", "data.dataset.block_size=1024", "data.batch_size=2",
    ],
}  # fmt: skip
PROGRAMS = {
    "csv": (CSV_EXP, CSV_BY_HAND),
    "pictures": (PICTURES_EXP, PICTURES_BY_HAND),
    "tokens": (TOKENS_EXP, TOKENS_BY_HAND),
}


def make_csv(place: Path, *, rows: int) -> None:
    """Write a CSV file of six numeric columns, one of words and a numeric target; 200,000 different rows repeat."""
    generator = np.random.default_rng(0)
    block = min(rows, 200_000)
    numbers = generator.normal(size=(block, 7)) * [1, 10, 100, 1000, 0.1, 5, 2]
    words = generator.integers(0, 12, block)
    text = "".join(
        "%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,kind%d,%.6g\n" % (*row[:6], word, row[6])  # noqa: UP031 - a third faster
        for row, word in zip(numbers.tolist(), words.tolist(), strict=True)
    )
    lines = text.splitlines(keepends=True)
    with place.open("w") as file:
        file.write("a,b,c,d,e,f,kind,target\n")
        for start in range(0, rows, block):
            file.writelines(lines[: rows - start])


def make_pictures(place: Path, *, count: int) -> None:
    """Write JPEG files of 48 x 48 pixels to ten folders; a thousand different pictures repeat."""
    from PIL import Image

    generator = np.random.default_rng(0)
    contents = []
    for _ in range(min(count, 1000)):
        coarse = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        content = io.BytesIO()
        Image.fromarray(coarse).resize((48, 48), Image.Resampling.BILINEAR).save(content, "JPEG", quality=90)
        contents.append(content.getvalue())
    for kind in range(10):
        (place / f"kind{kind}").mkdir(parents=True)
    for number in range(count):
        (place / f"kind{number % 10}" / f"{number:07}.jpg").write_bytes(contents[number % len(contents)])


def make_tokens(place: Path, *, size: int) -> None:
    """Write a file of random uint16 numbers below 50257; a block of 256 MiB repeats."""
    chunk = np.random.default_rng(0).integers(0, 50257, min(size // 2, 2**27), dtype=np.uint16).tobytes()
    with place.open("wb") as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        file.flush()
        os.fsync(file.fileno())


def forget(place: Path) -> None:
    """Drop a file from the system's cache."""
    descriptor = os.open(place, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measured(program: str, place: Path, *words: str) -> dict[str, float]:
    sources = str(Path(__file__).resolve().parents[1] / "src")
    environment = os.environ | {
        "PYTHONPATH": sources,
        "OMP_NUM_THREADS": "1",
        "PLACE": str(place),
        "SECONDS": str(SECONDS),
        "START": str(time.time()),
    }
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED + program, *words],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
        )
    for line in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            return dict(json.loads(line))
    raise SystemExit(f"a measurement failed:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help=f"{', '.join(PROGRAMS)}; default: all of them")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=10 * 10**9, help="size of the file of tokens")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        places = {"csv": folder / "table.csv", "pictures": folder / "pictures", "tokens": folder / "tokens.bin"}
        print(f"{'':24}{'exp':>12}{'by hand':>12}{'ratio':>8}   all pairs")
        for name in arguments.which or PROGRAMS:
            place = places[name]
            if not place.exists() and name == "csv":
                make_csv(place, rows=arguments.rows)
            elif not place.exists() and name == "pictures":
                make_pictures(place, count=arguments.pictures)
            elif not place.exists():
                make_tokens(place, size=arguments.bytes)
            pairs = []
            for number in range(arguments.pairs):
                found = {}
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    if arguments.cold and name == "tokens":
                        forget(place)
                    found[which] = measured(PROGRAMS[name][which], place)
                pairs.append((found[0], found[1]))
            for figure in pairs[0][0]:
                ours, theirs = ([pair[which][figure] for pair in pairs] for which in (0, 1))
                ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
                middle = [statistics.median(one) for one in (ours, theirs, ratios)]
                print(
                    f"{name + ': ' + figure:24}{middle[0]:12.1f}{middle[1]:12.1f}{middle[2]:8.2f}"
                    f"   {ratios[0]:.2f} to {ratios[-1]:.2f}",
                    flush=True,
                )
            if arguments.step:
                runs = [
                    measured(STEP, place, *WORDS[name], f"data.dataset.path={place}") for _ in range(arguments.pairs)
                ]
                for figure in runs[0]:
                    print(
                        f"{name + ': run, ' + figure:24}{statistics.median(run[figure] for run in runs):12.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
