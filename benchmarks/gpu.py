"""Time and peak memory of a training step on a GPU: by hand and in exp.

    python benchmarks/gpu.py [lenet gpt gpt-86M] [--precision fp32 bf16] [--steps 400] [--repetitions 3] [--compile]

All variants run alternately in one process. The first quarter of the steps is a warm-up. The time is measured from the
end of the warm-up to the last step, and the device is synchronized at both points. A ratio is the median of the ratios
of the repetitions. All variants use the same network, batch size and fused AdamW. exp also writes TensorBoard events.
--compile measures a compiled loop by hand instead of the two eager ones, and exp with and without runtime.compile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from loop_clock import DeviceClock, DeviceClockHook
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import exp

# Number of classes with data.dataset.vocabulary_size=128: one class is for all other characters.
CHARACTERS = 129


class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(2, [self.heads, -1]).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, *, width: int, heads: int, blocks: int, block_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(block_size, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Task:
    """A network with its data.

    Args:
        network: builds the network
        batch_size: samples per step
        model: overrides of exp that select the same network
        share: fraction of --steps to run, below 1 for a large network with slow steps
    """

    def __init__(self, *, network: Callable[[], nn.Module], batch_size: int, model: list[str], share: float) -> None:
        self.network, self.batch_size, self.model, self.share = network, batch_size, model, share

    def tensors(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of an epoch of `steps` steps."""
        raise NotImplementedError

    def overrides(self, folder: Path, steps: int) -> list[str]:
        """Return the overrides of the same data in exp."""
        raise NotImplementedError


class Digits(Task):
    def tensors(self, steps: int) -> tuple[Tensor, Tensor]:
        images, labels = load_digits(return_X_y=True)
        index = torch.arange(steps * self.batch_size) % len(labels)
        return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[index] / 16, torch.tensor(labels)[index]

    def overrides(self, folder: Path, steps: int) -> list[str]:
        inputs, target = self.tensors(steps)
        torch.save({"input": inputs, "target": target}, folder / "digits.pt")
        return [
            *("data=tensors", f"data.dataset.path={folder}/digits.pt", "data.input_shape=[1,8,8]"),
            *("data.input_dtype=float32", "data.num_classes=10", "data.num_outputs=10"),
            *("data.parts.train=1.0", "data.parts.val=0", "data.parts.test=0"),
        ]


class Characters(Task):
    def __init__(self, *, block_size: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.block_size = block_size

    def tensors(self, steps: int) -> tuple[Tensor, Tensor]:
        blocks = torch.randint(CHARACTERS, (steps * self.batch_size, self.block_size + 1))
        return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()

    def overrides(self, folder: Path, steps: int) -> list[str]:
        # 20 percent more than the training split needs.
        characters = int(1.2 * steps * self.batch_size * self.block_size)
        source = "".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
        (folder / "text.txt").write_text((source * (characters // len(source) + 1))[:characters])
        return ["data=text", f"data.dataset.files={folder}/text.txt", f"data.dataset.block_size={self.block_size}"]


TASKS = {
    "lenet": Digits(network=LeNet, batch_size=256, model=["model=lenet"], share=1.0),
    "gpt": Characters(
        network=lambda: GPT(width=64, heads=4, blocks=2, block_size=64),
        batch_size=32,
        block_size=64,
        model=["model=gpt"],
        share=1.0,
    ),
    "gpt-86M": Characters(
        network=lambda: GPT(width=768, heads=12, blocks=12, block_size=1024),
        batch_size=8,
        block_size=1024,
        share=0.1,
        model=[
            *("model=gpt", "model.constants.width=768", "model.constants.hidden=3072", "model.constants.heads=12"),
            "model.layers.blocks.repeat=12",
        ],
    ),
}


class Result:
    """Microseconds per step, peak memory in MiB, and loss of the last step."""

    def __init__(self, microseconds: float, peak_mib: float, loss: float) -> None:
        self.microseconds, self.peak_mib, self.loss = microseconds, peak_mib, loss


def by_hand(
    task: Task, steps: int, *, precision: str, device: str, on_device: bool = False, compiled: str | None = None
) -> Result:
    """Train in a PyTorch loop.

    Args:
        task: network and data
        steps: optimizer steps
        precision: fp32 or bf16
        device: cuda or cpu
        on_device: gather the batches from a data set on the device; a stock DataLoader loads them by default
        compiled: mode of torch.compile; None for an eager network
    """
    torch.manual_seed(0)
    inputs, target = task.tensors(steps)
    net = task.network().to(device)
    forward = net if compiled is None else torch.compile(net, mode=compiled)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        if on_device:
            x, y = inputs.to(device), target.to(device)
            for index in torch.randperm(len(x), device=device).split(task.batch_size):
                yield x[index], y[index]
        else:
            data = TensorDataset(inputs, target)
            for x, y in DataLoader(data, batch_size=task.batch_size, shuffle=True, pin_memory=device == "cuda"):
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    clock, loss = DeviceClock(warm_up=steps // 4, steps=steps), torch.zeros(())
    for step, (x, y) in enumerate(batches(), start=1):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = forward(x)
            loss = functional.cross_entropy(output.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        clock.step(step)
    return Result(clock.microseconds, peak_mib(device), float(loss))


def in_exp(task: Task, steps: int, *overrides: str, precision: str, device: str) -> Result:
    with tempfile.TemporaryDirectory(dir=".", prefix="gpu-") as folder:
        place = Path(folder).resolve()
        config = exp.compose(
            [
                f"hydra.run.dir={place}/run",
                *task.model,
                *task.overrides(place, steps),
                *(f"data.batch_size={task.batch_size}", f"precision={precision}", f"launch.accelerator={device}"),
                *("launch.devices=1", "trainer.max_epochs=null", f"trainer.max_steps={steps}", "optimizer.lr=1e-3"),
                *("trainer.limit_val_batches=0", "test=false", "metrics=[]", "monitor=loss/train"),
                *("checkpoint.save_last=false", "checkpoint.save_best=false", "trainer.enable_progress_bar=false"),
                *overrides,
                f"+hooks.clock={{_target_: loop_clock.DeviceClockHook, warm_up: {steps // 4}, steps: {steps}}}",
                "security.allow=[loop_clock]",
            ]
        )
        report = exp.fit(config)
    return Result(DeviceClockHook.measured, report.peak_memory_mib or 0.0, report.metrics["loss/train"])


def peak_mib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0


def contenders_of(*, is_compiled: bool) -> dict[str, Callable[..., Result]]:
    hooks = "hooks=[gradients,memory]"
    if is_compiled:
        compiled = ("hooks=[]", "runtime.compile=true")
        return {
            "(a) by hand, torch.compile": lambda *args, **where: by_hand(*args, compiled="default", **where),
            "(c) exp, no hooks": lambda *args, **where: in_exp(*args, "hooks=[]", **where),
            "(c') exp, runtime.compile=true": lambda *args, **where: in_exp(*args, *compiled, **where),
            "(c'') the same, compile_mode=reduce-overhead": lambda *args, **where: in_exp(
                *args, *compiled, "runtime.compile_mode=reduce-overhead", **where
            ),
        }
    return {
        "(a) by hand, stock DataLoader": by_hand,
        "(e) by hand, data set on the device": lambda *args, **where: by_hand(*args, on_device=True, **where),
        "(c) exp, no hooks": lambda *args, **where: in_exp(*args, "hooks=[]", **where),
        "(c') exp, gradients and memory": lambda *args, **where: in_exp(*args, hooks, **where),
    }


def measure(name: str, *, precision: str, device: str, steps: int, repetitions: int, is_compiled: bool) -> None:
    task, contenders = TASKS[name], contenders_of(is_compiled=is_compiled)
    steps = max(20, int(steps * task.share)) // 4 * 4
    results: dict[str, list[Result]] = {contender: [] for contender in contenders}
    for _ in range(repetitions):
        for contender, train in contenders.items():
            gc.collect()
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    results[contender].append(train(task, steps, precision=precision, device=device))
            except exp.ExpError as error:
                print(f"{contender}: {error}", flush=True)
    bases = list(contenders)[:2]
    heads = "".join(f"{base.partition(' ')[0]:>8}" for base in bases)
    print(f"\n{name}, {precision}, {steps} steps, {repetitions} repetitions: time per step, and its ratio to {heads}")
    for contender, own in results.items():
        if not own:
            continue
        ratios = [
            statistics.median(
                one.microseconds / base.microseconds for one, base in zip(own, results[other], strict=True)
            )
            for other in bases
        ]
        times = statistics.median(one.microseconds for one in own)
        cells = "".join(f"{ratio:8.3f}" for ratio in ratios)
        spread = " ".join(f"{one.microseconds:.0f}" for one in own)
        peak = max(one.peak_mib for one in own)
        print(f"{contender:48}{times:9.0f} us{cells}{peak:10.1f} MiB  loss {own[-1].loss:.6f}  ({spread})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in arguments.tasks:
        for precision in arguments.precision:
            measure(
                name,
                precision=precision,
                device=arguments.device,
                steps=arguments.steps,
                repetitions=arguments.repetitions,
                is_compiled=arguments.compile,
            )


if __name__ == "__main__":
    main()
