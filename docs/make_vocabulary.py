"""The site's page vocabulary.md, made from models/vocabulary.py. `python docs/make_vocabulary.py` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from exp.models import vocabulary
from exp.spelling import habits

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Vocabulary of forward programs

*Reference*: the functions, methods and attributes of a [forward program](models.md#the-forward-program), and what is
left out. Made from models/vocabulary.py by `python docs/make_vocabulary.py`.

In are the operators of torch's own database of tests (`op_db`) that are pure: they take tensors and numbers, give new
ones, and change nothing. tests/models/test_against_torch.py calls each of them through a program, as a function and
as a method, and holds output and gradients against torch by hand, bit for bit: [tested](tested.md).

A name that is neither here nor one of the program's own is refused before the run, with the nearest spelling.
"""
HOMES = (
    ("torch", "`relu(x)` or `torch.relu(x)`", vocabulary.TORCH_FUNCTIONS),
    ("torch.nn.functional", "`gelu(x)`, `F.gelu(x)` or `functional.gelu(x)`", vocabulary.FUNCTIONAL_FUNCTIONS),
    ("torch.linalg", "`linalg.norm(x)`", vocabulary.LINALG_FUNCTIONS),
    ("torch.fft", "`fft.rfft(x)`", vocabulary.FFT_FUNCTIONS),
    ("torch.special", "`special.expit(x)`", vocabulary.SPECIAL_FUNCTIONS),
    ("torch.masked", "`masked.mean(x, 1, mask=mask)`", vocabulary.MASKED_FUNCTIONS),
    ("torch.sparse", "`sparse.mm(a, b)`", vocabulary.SPARSE_FUNCTIONS),
    ("torch.signal.windows", "`signal.windows.hann(16)`", vocabulary.WINDOWS),
    ("math", "`math.sqrt(width)`, on numbers", vocabulary.MATHEMATICS),
)
# What has a side of its own, among what is in.
NOTES = (
    (
        "Random",
        "draw from torch's generator, which is set before each step, so that a resumed run draws the same",
        """
        alpha_dropout bernoulli binomial dropout dropout1d dropout2d dropout3d feature_alpha_dropout
        fractional_max_pool2d fractional_max_pool3d gumbel_softmax multinomial normal pca_lowrank poisson rand rand_like
        randint randint_like randn randn_like randperm rrelu svd_lowrank
        """,
    ),
    (
        "Factories",
        "make a tensor of numbers alone, on the CPU unless told otherwise: give `device=x.device`",
        """
        arange as_tensor bartlett_window blackman_window eye full hamming_window hann_window kaiser_window linspace
        logspace normal ones rand randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros
        """,
    ),
    (
        "Shapes that depend on numbers",
        "cannot be looked at before the run, so that the check says that it stops there; torch.export needs bounds",
        """
        argwhere bincount masked_select nonzero repeat_interleave unique unique_consecutive
        """,
    ),
)


def page() -> str:
    return "\n".join([HEAD, *_inside(), *_notes(), *_outside()]).rstrip() + "\n"


def _inside() -> Iterator[str]:
    yield "## In\n"
    for home, written, names in HOMES:
        yield f"**{home}**, {len(names)}: {written}\n"
        yield f"{_listed(names)}\n"
    yield f"**Methods of tensors**, {len(vocabulary.METHODS)}: `x.flatten(1)`\n"
    yield f"{_listed(vocabulary.METHODS)}\n"
    yield "| | |\n|---|---|"
    for title, names in (
        ("attributes of tensors", vocabulary.ATTRIBUTES),
        ("of what `max`, `sort`, `topk`, `linalg.svd` and their like give", vocabulary.RESULTS),
        ("of layers, beside their own sublayers, parameters and buffers", vocabulary.PARAMETER_ATTRIBUTES),
        ("of `finfo(x.dtype)` and `iinfo(x.dtype)`", vocabulary.LIMIT_ATTRIBUTES),
        ("dtypes, `torch.float32`", vocabulary.DTYPES),
        ("memory formats, `torch.channels_last`", vocabulary.MEMORY_FORMATS),
        ("numbers, `torch.pi`", vocabulary.TORCH_NUMBERS),
        ("torch's own forms, `torch.conv2d`", vocabulary.TORCH_FORMS),
        ("of Python", vocabulary.BUILTINS),
        ("of lists, dicts and containers of layers", vocabulary.CONTAINER_METHODS),
    ):
        yield f"| {title} | {_listed(names)} |"
    yield ""


def _notes() -> Iterator[str]:
    yield "## In, with something to know\n\n| | they | |\n|---|---|---|"
    for title, why, words in NOTES:
        yield f"| {title} | {why} | {_listed(_known(words.split()))} |"
    told = sorted(vocabulary.NEEDS_TRAINING)
    yield f"| Told whether the network trains | are refused without `training=training` | {_listed(told)} |"
    writing = [f"{name}({written}=...)" for name, (written, _, _) in vocabulary.WRITES.items()]
    yield f"| Writing, with an argument | are refused with it, as with `inplace=True` and `out=` | {_listed(writing)} |"
    yield ""


def _known(names: list[str]) -> list[str]:
    missing = set(names) - vocabulary.FUNCTIONS
    assert not missing, missing
    return names


def _outside() -> Iterator[str]:
    yield "## Out\n\n| name | write instead |\n|---|---|"
    yield from (f"| `{name}` | {instead} |" for name, instead in habits()["torch"].items())
    yield "| names that end in `_`, such as `relu_` | the function without it, whose result is a new tensor |"


def _listed(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names, key=str.lower))


if __name__ == "__main__":
    print(page(), end="")
