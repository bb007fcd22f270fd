"""Networks of torchvision, timm and transformers train from a config without Python code; see docs/tested.md.

A test is skipped if its package is not installed. The standard environment of the tests has none of the packages.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import yaml

import exp
from exp.extras.debugging.precision_report import main

# For each network: data set, pattern of the head, layers for LoRA, node of conf/model.
NETWORKS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
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
OPTION = """# data=own
defaults: [_loader, _self_]
dataset: {{_target_: foreign_data.{kind}}}
num_classes: null
num_outputs: null
"""
HOOKS = "hooks=[gradients,memory,activations,throughput]"
SHORT = [
    "model=own", "data=own", "data.batch_size=16", "trainer.max_epochs=1", "trainer.enable_progress_bar=false",
    "metrics=[]", "test=false", "launch.accelerator=cpu", "optimizer=sgd", "optimizer.lr=0.01",
]  # fmt: skip
NEW_HEAD = ["weights.from=first", "weights.strict=false", "+data.dataset.classes=3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_foreign_network_trains_and_is_adapted(name, write, ranks, capsys):
    network = NETWORKS[name]
    package = network["model"]["_target_"].partition(".")[0]
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    write("foreign_data.py", DATA)
    write("conf/data/own.yaml", OPTION.format(kind=network["data"]))
    write("conf/model/own.yaml", f"# model=own\n{yaml.safe_dump(network['model'])}")
    base = [*SHORT, f"security.allow=[{package}]"]
    if package == "transformers":
        base.append("+objective.cross_entropy.output=logits")

    def fit(directory, *overrides):
        return exp.fit(exp.compose([f"hydra.run.dir={directory}", *base, *overrides]))

    def weights(directory):
        state = torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        return {name.removeprefix("network."): tensor for name, tensor in state.items()}

    fit("first", HOOKS, "precision=bf16")
    before = weights("first")
    assert main([*base, "precision=bf16"]) == 0
    assert "| Linear |" in capsys.readouterr().out

    unfreeze = f"+freeze.unfreeze={{0: ['{network['head']}']}}"
    fit("head", *NEW_HEAD, "freeze.parameters=['*']", unfreeze, "freeze.batch_norm=eval")
    changed = [
        name
        for name, tensor in weights("head").items()
        if tensor.shape != before[name].shape or not torch.equal(tensor, before[name])
    ]
    assert changed
    assert all(fnmatchcase(name, network["head"]) for name in changed)

    # A network with merged LoRA weights has the same loss.
    adapted = [f"lora.layers=[{network['lora']}]", "lora.rank=2", f"lora.trained=['{network['head']}']"]
    fit("lora", *NEW_HEAD, *adapted, "precision=fp64")
    test = ["train=false", "test=true", "precision=fp64", "+data.dataset.classes=3"]
    one = fit("adapted", *adapted, *test, "resume=lora/checkpoints/last.ckpt")
    other = fit("merged", *test, "weights.from=lora/checkpoints/last.ckpt")
    assert one.metrics["loss/test"] == pytest.approx(other.metrics["loss/test"], abs=1e-6)

    # Ranks have the same samples with both strategies, so that the running statistics of a rank are equal.
    ddp, fsdp = (
        ranks.train(*base, HOOKS, f"strategy={strategy}", "launch.devices=2", "precision=fp64", ranks=2).checkpoint()
        for strategy in ("ddp", "fsdp")
    )
    for name, tensor in ddp["state_dict"].items():
        if "running_" not in name and "num_batches" not in name:
            torch.testing.assert_close(fsdp["state_dict"][name], tensor, rtol=0, atol=1e-9)


TAGS = ("loss/train", "loss/val", "loss/test", "gradients/norm/total")
LAST = """
import torch
from torch import nn


class Last(nn.Module):
    def __init__(self, size: int = 0):
        super().__init__()
        self.head = nn.Linear(13, 3)
        self.register_buffer("last", torch.zeros(size, 3))

    def forward(self, x):
        output = self.head(x)
        before, self.last = self.last, output.detach()
        return output + before.mean(0) if len(before) else output
"""


@pytest.mark.parametrize("size", [0, 16])
def test_a_buffer_of_the_batch_size_resumes_and_is_evaluated(size, write):
    write("keeps_last.py", LAST)
    model = f"{{_target_: keeps_last.Last, size: {size}}}"
    words = [f"model={model}", "data=wine", "data.batch_size=16", "precision=fp64", "security.allow=[keeps_last]"]
    exp.fit(exp.compose([*words, "trainer.max_epochs=1", "hydra.run.dir=first"]))
    resumed = ["hydra.run.dir=rest", "resume=first/checkpoints/last.ckpt"]
    rest = exp.fit(exp.compose([*words, "trainer.max_epochs=2", *resumed]))
    whole = exp.fit(exp.compose([*words, "trainer.max_epochs=2", "hydra.run.dir=whole"]))
    assert [rest.metrics[tag] for tag in TAGS] == [whole.metrics[tag] for tag in TAGS]
    kept = exp.load("first", allow=["keeps_last"]).network("last").last
    assert torch.equal(kept, torch.load("first/checkpoints/last.ckpt")["state_dict"]["network.last"])
