"""Gallery of the site with one page per experiment. `python docs/make_gallery.py [NAME ...]` draws its pictures.

A page shows conf/experiment/NAME.yaml and the docstring of its test in tests/gallery. A picture shows a run of the
experiment, up to its first minute. Drawing pictures needs the extra `report`.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exp.cli.gallery import EXPERIMENTS, titles

ROOT = Path(__file__).resolve().parents[1]
PICTURES, TESTS = ROOT / "docs" / "gallery", ROOT / "tests" / "gallery"
HEAD = """# Gallery

*Reference*: the experiments that come with exp, one page with a picture for each. Made from conf/experiment and
tests/gallery by docs/make_gallery.py.

    python -m exp.gallery                 list all, with their pictures
    python -m exp.gallery lenet           print the YAML of one
    python -m exp.train experiment=lenet
    python -m exp.train experiment=lenet debug=few_batches

Each experiment is one YAML file with model, wiring, data, losses, hooks and strategy. It needs no Python and no
download; `tokenized_text` needs the extra `tokenizers`. A test in tests/gallery compares each with a reference: a loop
in plain PyTorch, NumPy, another library, a count or a formula. To change one, copy it to your
`conf/experiment/`.
"""
FAMILIES = {
    "Containers": "sequential sequential_ordered_dict module_list module_dict parameter_list parameter_dict",
    "Precision, penalties, several losses": "amp_fp16 amp_bf16 gradient_penalty_inputs gradient_penalty_parameters "
    "gradient_penalty_scaled two_models_two_losses jacobian label_out_of_range",
    "Adversaries": "gan wgan_gp domain_adversarial dann",
    "Devices and ranks": "toy_model_parallel resnet_in_two_parts pipeline data_parallel ddp ddp_with_layer_split fsdp "
    "tensor_parallel sync_batchnorm ring_all_reduce activation_checkpointing",
    "Networks": "lenet example conv1d upsample roi_pool super_resolution names_rnn lstm gru seq2seq_attention "
    "transformer gpt tokenized_text",
    "Tensors and functions": "einsum_and_friends custom_functions logging_tensor scalar_tensor per_sample_gradients "
    "vmap_ensembles",
    "Parts of a run": "initialisation finetune_frozen checkpoint_components memory_four_parts",
}
# Tag of metrics.csv that the second plot of a picture shows.
SECOND_CURVES = {
    "amp_fp16": "precision/loss_scale",
    "two_models_two_losses": "precision/loss_scale",
    "gradient_penalty_inputs": "loss/train/r1",
    "gradient_penalty_parameters": "loss/train/gradient_norm",
    "gradient_penalty_scaled": "precision/loss_scale",
    "jacobian": "loss/train/jacobian",
    "dann": "gradient_reversal/weight",
    "domain_adversarial": "loss/train/domain",
    "per_sample_gradients": "per_sample_gradients/noise_scale",
    "lenet": "optimizer/lr/default",
    "names_rnn": "accuracy/val",
    "gpt": "bits_per_character/val",
    "tokenized_text": "perplexity/val",
    "finetune_frozen": "gradients/norm/linear1.weight",
    "initialisation": "gradients/norm/head.weight",
}
MEMORY = ("memory_four_parts", "activation_checkpointing", "fsdp")
PARTS = ("parameters", "gradients", "optimizer", "activations")
SECONDS = 60


def pages() -> dict[str, str]:
    """Return the text of gallery.md and of each experiment's page, by its path in docs/."""
    numbers = dict(_numbers())
    found = titles()
    return {"gallery.md": "\n".join(_index(found)) + "\n"} | {
        f"gallery/{name}.md": "\n".join(_page(name, title, numbers[name])) + "\n" for name, title in found.items()
    }


def _numbers() -> Iterator[tuple[str, str]]:
    """Yield name and docstring of each experiment's test."""
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if said:
                yield node.name.removeprefix("test_"), " ".join(said.split())


def _index(found: dict[str, str]) -> Iterator[str]:
    yield HEAD
    for family, names in FAMILIES.items():
        yield f"## {family}\n\n| | |\n|---|---|"
        yield from (f"| [{name}](gallery/{name}.md) | {found[name]} |" for name in names.split())
        yield ""


def _page(name: str, title: str, number: str) -> Iterator[str]:
    yield f"# {name}\n\n*Reference*: {title}."
    yield f"One of the [gallery](../gallery.md).\n\n![{name}]({name}.png)\n"
    yield f"    python -m exp.train experiment={name}\n"
    yield f"**Tested.** {number}\n"
    yield f"```yaml\n{(EXPERIMENTS / f'{name}.yaml').read_text(encoding='utf-8').rstrip()}\n```"


def draw(name: str, place: Path) -> None:
    """Run an experiment for at most SECONDS, and draw its picture."""
    directory = place / name
    words = [f"experiment={name}", f"hydra.run.dir={directory.name}", "logger=[csv]"]
    words += [
        "trainer.enable_progress_bar=false",
        f"trainer.max_time='00:00:00:{SECONDS - 1}'",
        "launch.accelerator=cpu",
    ]
    if SECOND_CURVES.get(name, "").startswith("gradients/norm/"):
        words.append("hooks.gradients.each_parameter=true")
    done = subprocess.run(
        [sys.executable, "-m", "exp.train", *words], cwd=place, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    second = _second_plot(name)
    figure, axes = pyplot.subplots(1, 2 if second else 1, figsize=(7.5 if second else 4.5, 2.8), squeeze=False)
    curve(axes[0][0], rows, ["loss/train", "loss/val"])
    if second:
        second(axes[0][1], rows, directory)
    figure.tight_layout()
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=72, metadata={"Software": None})
    pyplot.close(figure)


def curve(axes: Any, rows: list[dict[str, str]], tags: list[str]) -> None:
    """Plot tags over steps, on a logarithmic axis if all values are above 0 and span a factor of ten."""
    least, most = [], []
    for tag in tags:
        points = [(int(row["step"]), float(row[tag])) for row in rows if row.get(tag)]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=tag, marker="" if len(points) > 40 else ".", linewidth=1)
            least.append(min(values))
            most.append(max(values))
    if least and min(least) > 0 and max(most) > 10 * min(least):
        axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)


def _second_plot(name: str) -> Callable[..., None] | None:
    if name in MEMORY:
        return _memory
    if name in OUTPUTS:
        return lambda axes, rows, directory: _shown(axes, OUTPUTS[name](directory))
    if name in SECOND_CURVES:
        return lambda axes, rows, directory: curve(axes, rows, [SECOND_CURVES[name]])
    return None


def _memory(axes: Any, rows: list[dict[str, str]], directory: Path) -> None:
    """Plot the last measured bytes of each part as bars."""
    tags = [f"memory/{part}_mib" for part in PARTS]
    axes.barh(PARTS, [[float(row[tag]) for row in rows if row.get(tag)][-1] for tag in tags])
    axes.set_xlabel("MiB", fontsize=8)
    axes.tick_params(labelsize=7)


def _shown(axes: Any, picture: Any) -> None:
    axes.imshow(picture, cmap="gray")
    axes.set_axis_off()


def _network(directory: Path) -> tuple[Any, Any]:
    """Return the trained network of a run in evaluation mode, and inputs `[32, ...]` of its test split."""
    import torch

    from exp.config.frozen import read_frozen
    from exp.construct import build_data, build_network, plain_config

    plain = plain_config(read_frozen(directory))
    data = build_data(plain)
    network = build_network(plain, data.spec)
    state = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    network.load_state_dict({key.removeprefix("network."): value for key, value in state.items()})
    loader = data.loader("test")
    loader.set_position(0, 0)
    values = next(iter(loader)).data
    return network.eval(), (values[0] if isinstance(values, tuple) else values["input"])[:32]


def _grid(pictures: Any, columns: int) -> Any:
    """Return pictures `[N, H, W]` as one picture with `columns` per row and a line between them."""
    import torch

    padded = torch.nn.functional.pad(pictures, (0, 1, 0, 1), value=float(pictures.max()))
    return torch.cat([torch.cat(list(row), 1) for row in padded.split(columns)]).numpy()


def _generated(directory: Path) -> Any:
    import torch

    network, x = _network(directory)
    torch.manual_seed(0)
    with torch.no_grad():
        return _grid(network(x)[:, 0], 8)


def _pairs(directory: Path) -> Any:
    """Return a picture with a row of the network's outputs and a row of its inputs.

    For super_resolution, a row of the inputs in half the resolution comes first.
    """
    import torch
    from torch.nn.functional import avg_pool2d, interpolate

    network, x = _network(directory)
    x = x[:8]
    with torch.no_grad():
        rows = [network(x), x]
        if directory.name == "super_resolution":
            rows.insert(0, interpolate(avg_pool2d(x, 2), scale_factor=2))
        return _grid(torch.cat(rows)[:, 0], 8)


def _attention(directory: Path) -> Any:
    import torch

    network, x = _network(directory)
    with torch.no_grad():
        return network(x[:1])["attention"][0].numpy()


OUTPUTS: dict[str, Callable[[Path], Any]] = {
    "gan": _generated,
    "wgan_gp": _generated,
    "super_resolution": _pairs,
    "upsample": _pairs,
    "seq2seq_attention": _attention,
}


def main() -> None:
    """Draw the pictures of the experiments on the command line, or of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    names: list[str] = parser.parse_args().names
    with tempfile.TemporaryDirectory() as place:
        for name in titles():
            if not names or name in names:
                draw(name, Path(place))
                print(name, os.path.getsize(PICTURES / f"{name}.png"), flush=True)


if __name__ == "__main__":
    main()
