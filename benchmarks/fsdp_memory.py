"""Memory of a rank with strategy=fsdp, compared with one process: python benchmarks/fsdp_memory.py

A GPT of 31.6 million parameters makes two steps in one process and on four gloo ranks. The hook `memory` measures.
"""

from __future__ import annotations

import os
import sys
import tempfile

import exp

GPT = (
    "data=text", "data.batch_size=4", "model.constants.width=512", "model.constants.hidden=2048",
    "model.constants.heads=8", "model.layers.blocks.repeat=10", "hooks=[memory]", "logger=[]", "test=false",
    "trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false", "checkpoint.save_best=false", "checkpoint.save_last=false",
    "launch.accelerator=cpu",
)  # fmt: skip
PARTS = ("parameters", "gradients", "optimizer")
LIMIT = 0.27


def measured(directory: str, *overrides: str) -> dict[str, float]:
    """Return the MiB of parameters, gradients and optimizer state on rank 0."""
    report = exp.fit(exp.compose([*GPT, f"hydra.run.dir={directory}", *overrides]))
    return {part: report.metrics[f"memory/{part}_mib"] for part in PARTS}


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        one = measured("one", "strategy=single")
        four = measured("four", "strategy=fsdp", "launch.devices=4")
    shares = {part: four[part] / one[part] for part in PARTS}
    for part in PARTS:
        print(
            f"{part:<12} {one[part]:8.1f} MiB in one process {four[part]:8.1f} MiB in a rank of four {shares[part]:.4f}"
        )
    return int(max(shares.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
