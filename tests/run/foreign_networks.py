"""Networks of torchvision, timm and transformers from a config alone: makes the table of docs/foreign-networks.md.

    python tests/run/foreign_networks.py [NAME ...]

Needs the three packages, no network and no GPU; the suite does not collect it. Each step is a run of exp of its own, in
an empty directory with a ./conf and one module of data, as a user would have them. What stops one is printed in the
place of its result.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import yaml

import exp
from exp.errors import ExpError
from exp.run_report import Report

ALLOW = "security.allow=[torchvision,timm,transformers]"
DATA = """
import torch
from torch.utils.data import Dataset


def draws(index, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


class Pictures(Dataset):
    def __init__(self, classes: int = 10) -> None:
        self.classes = self.num_classes = classes

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return draws(index, 3, 32, 32) + index % self.classes, index % self.classes


class NamedPictures(Pictures):
    def __getitem__(self, index):
        picture, target = super().__getitem__(index)
        return {"pixel_values": picture, "target": target}


class Sentences(Pictures):
    def __getitem__(self, index):
        words = torch.randint(2, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones(12, dtype=torch.int64), "target": index % self.classes}
"""
# name: data set, the pattern of its head, the node in YAML
NETWORKS: dict[str, tuple[str, str, str]] = {
    "resnet18": ("Pictures", "fc.*", "{_target_: torchvision.models.resnet18, num_classes: '${data.num_classes}'}"),
    "mobilenet_v3_small": (
        "Pictures",
        "classifier.3.*",
        "{_target_: torchvision.models.mobilenet_v3_small, num_classes: '${data.num_classes}'}",
    ),
    "vision_transformer": (
        "Pictures",
        "heads.*",
        "{_target_: torchvision.models.VisionTransformer, image_size: 32, patch_size: 8, num_layers: 2, num_heads: 2, "
        "hidden_dim: 32, mlp_dim: 64, num_classes: '${data.num_classes}'}",
    ),
    "resnet10t": (
        "Pictures",
        "fc.*",
        "{_target_: timm.create_model, model_name: resnet10t, num_classes: '${data.num_classes}'}",
    ),
    "vit_tiny_patch16_224": (
        "Pictures",
        "head.*",
        "{_target_: timm.create_model, model_name: vit_tiny_patch16_224, img_size: 32, patch_size: 8, depth: 2, "
        "num_classes: '${data.num_classes}'}",
    ),
    "convnext_atto": (
        "Pictures",
        "head.fc.*",
        "{_target_: timm.create_model, model_name: convnext_atto, num_classes: '${data.num_classes}'}",
    ),
    "BertForSequenceClassification": (
        "Sentences",
        "classifier.*",
        "{_target_: transformers.BertForSequenceClassification, config: {_target_: transformers.BertConfig, "
        "vocab_size: 50, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
        "num_labels: '${data.num_classes}'}}",
    ),
    "ViTForImageClassification": (
        "NamedPictures",
        "classifier.*",
        "{_target_: transformers.ViTForImageClassification, config: {_target_: transformers.ViTConfig, image_size: 32, "
        "patch_size: 8, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, "
        "num_labels: '${data.num_classes}'}}",
    ),
    "DistilBert, from_config": (
        "Sentences",
        "*classifier.*",
        "{_target_: transformers.AutoModelForSequenceClassification.from_config, config: "
        "{_target_: transformers.DistilBertConfig, vocab_size: 50, dim: 32, n_layers: 2, n_heads: 2, hidden_dim: 64, "
        "num_labels: '${data.num_classes}'}}",
    ),
}
HOOKS = "hooks=[gradients,memory,activations,throughput]"
SHORT = [
    ALLOW, "data.batch_size=16", "trainer.max_epochs=1", "trainer.enable_progress_bar=false", "metrics=[]",
    "test=false", "launch.accelerator=cpu", "optimizer=sgd", "optimizer.lr=0.01",
]  # fmt: skip


def write_conf(place: Path) -> None:
    """A ./conf as a user would write it: one YAML a network and one a data set."""
    os.chdir(place)
    sys.path.insert(0, str(place))
    Path("foreign_data.py").write_text(DATA)
    for group in ("model", "data"):
        Path("conf", group).mkdir(parents=True)
    for index, (_, _, node) in enumerate(NETWORKS.values()):
        text = yaml.safe_dump(yaml.safe_load(node), sort_keys=False)
        Path(f"conf/model/network{index}.yaml").write_text(f"# model=network{index}\n{text}")
    for kind in ("Pictures", "NamedPictures", "Sentences"):
        text = f"""
            # data={kind.lower()}
            defaults: [_loader, _self_]
            dataset: {{_target_: foreign_data.{kind}}}
            num_classes: null
            num_outputs: null
            """
        Path(f"conf/data/{kind.lower()}.yaml").write_text(textwrap.dedent(text).lstrip())


class Steps:
    """The runs of one network, each a column of the table."""

    def __init__(self, name: str) -> None:
        index = list(NETWORKS).index(name)
        kind, self.head, _ = NETWORKS[name]
        self.place = f"runs/{index}"
        self.base = [*SHORT, f"model=network{index}", f"data={kind.lower()}"]
        self.layers = "[Conv2d]" if name.startswith(("resnet", "mobilenet", "convnext")) else "[Linear]"
        if name in list(NETWORKS)[6:]:
            self.base += ["+objective.cross_entropy.output=logits"]

    def fit(self, name: str, *overrides: str) -> dict[str, torch.Tensor]:
        """A run's weights by name."""
        directory = f"{self.place}/{name}"
        self.run(name, *overrides)
        weights = torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        assert all(bool(one.isfinite().all()) for one in weights.values() if one.is_floating_point())
        return {name.removeprefix("network."): one for name, one in weights.items()}

    def run(self, name: str, *overrides: str) -> Report:
        report = exp.fit(exp.compose([f"hydra.run.dir={self.place}/{name}", *self.base, *overrides]))
        assert report.status == "completed", report
        return report

    def epoch(self) -> str:
        weights = self.fit("first", HOOKS, "precision=bf16", "precision.report=true")
        told = Path(self.place, "first", "precision.md").read_text()
        layers = sum(line.startswith("| ") for line in told.splitlines()) - 1
        return f"{sum(one.numel() for one in weights.values()):,} numbers; {layers} layers in the report"

    def new_head(self) -> str:
        """Three classes on the body, of which nothing learns, its statistics included."""
        before = self.fit_once()
        found = self.fit(
            "head", f"weights.from={self.place}/first", "weights.strict=false", "+data.dataset.classes=3",
            "freeze.parameters=['*']", f"+freeze.unfreeze={{0: ['{self.head}']}}", "freeze.batch_norm=eval",
        )  # fmt: skip
        changed = [name for name, one in found.items() if one.shape != before[name].shape]
        kept = [name for name, one in found.items() if name not in changed and torch.equal(one, before[name])]
        moved = sorted(set(found) - set(changed) - set(kept))
        assert all(fnmatchcase(name, self.head) for name in (*changed, *moved)), (changed, moved)
        return f"{len(kept)} of {len(found)} tensors are the body's"

    def lora(self) -> str:
        """On its linear layers, with a new head; then merged into a network without LoRA, which gives the same."""
        start = [f"weights.from={self.place}/first", "weights.strict=false", "+data.dataset.classes=3"]
        adapted = [f"lora.layers={self.layers}", "lora.rank=2", f"lora.trained=['{self.head}']"]
        found = self.fit("lora", *start, *adapted, "precision=fp64")
        here = ["train=false", "test=true", "precision=fp64", "+data.dataset.classes=3"]
        first = self.run("lora_test", *adapted, *here, f"resume={self.place}/lora/checkpoints/last.ckpt")
        second = self.run("lora_merged", *here, f"weights.from={self.place}/lora/checkpoints/last.ckpt")
        difference = abs(first.metrics["loss/test"] - second.metrics["loss/test"])
        assert difference < 1e-6, (first.metrics, second.metrics)
        return f"{sum(name.endswith('.0.a') for name in found)} layers"

    def ranks(self) -> str:
        """In float64: both see the same shares and draw the same numbers, so that their weights are the same."""
        whole, parts = (
            self.fit(strategy, f"strategy={strategy}", "launch.devices=2", "precision=fp64", HOOKS)
            for strategy in ("ddp", "fsdp")
        )
        assert whole.keys() == parts.keys()
        statistics = [name for name in whole if "running_" in name or "num_batches" in name]
        worst = max(float((whole[name] - parts[name]).abs().max()) for name in whole.keys() - set(statistics))
        assert worst < 1e-9, worst
        return f"both run; their weights differ by {worst:.0e}"

    def fit_once(self) -> dict[str, torch.Tensor]:
        weights = torch.load(f"{self.place}/first/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        return {name.removeprefix("network."): one for name, one in weights.items()}


def result(step: Callable[[Steps], str], steps: Steps) -> str:
    """What a step gives, or in bold what stopped it."""
    try:
        return step(steps)
    except ExpError as error:
        return f"**refused: {' '.join(str(error).split())[:300]}**"
    except Exception as error:
        return f"**{type(error).__name__}: {' '.join(str(error).split())[:300]}**"


def main(names: list[str]) -> None:
    packages = ("torch", "torchvision", "timm", "transformers", "lightning")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), end="\n\n")
    columns = {
        "one epoch in bf16, with hooks and precision.report": Steps.epoch,
        "a new head on its body": Steps.new_head,
        "LoRA on it, merged": Steps.lora,
        "ddp and fsdp, 2 ranks": Steps.ranks,
    }
    print("| network |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    with tempfile.TemporaryDirectory() as place:
        write_conf(Path(place))
        for name in names or NETWORKS:
            steps = Steps(name)
            cells = []
            for step in columns.values():
                begun = time.perf_counter()
                with contextlib.redirect_stdout(sys.stderr):
                    cells.append(result(step, steps))
                print(f"{name}: {time.perf_counter() - begun:.1f} s: {cells[-1]}", file=sys.stderr)
            print("|", " | ".join([f"`{name}`", *cells]), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
