"""Page vocabulary.md of the site, made from models/vocabulary.py. `python docs/make_vocabulary.py` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from exp.models import vocabulary
from exp.spelling import habits

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Vocabulary of forward programs

*Reference*: the functions, methods and attributes of a [forward program](models.md#the-forward-program), and the
names that are not supported. Made from models/vocabulary.py by `python docs/make_vocabulary.py`.

The list has the pure operators of `op_db`, torch's database of operator tests. A pure operator takes tensors and
numbers, returns new ones, and changes nothing. tests/models/test_against_torch.py calls each operator in a program, as
a function and as a method. Outputs and gradients equal those of torch bit for bit: [tested](tested.md).

A name that is neither on the list nor defined by the program is an error before the run. The error suggests the nearest
spelling.
"""
HOMES = (
    ("torch", "`relu(x)` or `torch.relu(x)`", vocabulary.TORCH_FUNCTIONS),
    ("torch.nn.functional", "`gelu(x)`, `F.gelu(x)` or `functional.gelu(x)`", vocabulary.FUNCTIONAL_FUNCTIONS),
    ("torch.linalg", "`linalg.norm(x)`", vocabulary.LINALG_FUNCTIONS),
    ("torch.fft", "`fft.rfft(x)`", vocabulary.FFT_FUNCTIONS),
    ("math", "`math.sqrt(width)`, on numbers", vocabulary.MATHEMATICS),
)
# Functions of the list with a special property: title, property, names.
NOTES = (
    (
        "Random",
        "draw from torch's generator, which is seeded before each step, so that a resumed run draws the same numbers",
        """
        alpha_dropout bernoulli binomial dropout dropout1d dropout2d dropout3d feature_alpha_dropout
        fractional_max_pool2d fractional_max_pool3d gumbel_softmax multinomial normal pca_lowrank poisson rand rand_like
        randint randint_like randn randn_like randperm rrelu svd_lowrank
        """,
    ),
    (
        "Factories",
        "make a tensor from numbers, on the CPU by default: pass `device=x.device`",
        """
        arange as_tensor bartlett_window blackman_window eye full hamming_window hann_window kaiser_window linspace
        logspace normal ones rand randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros
        """,
    ),
    (
        "Shapes that depend on numbers",
        "cannot be checked before the run, which the check reports; torch.export needs bounds",
        """
        argwhere bincount masked_select nonzero repeat_interleave unique unique_consecutive
        """,
    ),
)


def page() -> str:
    return "\n".join([HEAD, *_inside(), *_notes(), *_outside()]).rstrip() + "\n"


def _inside() -> Iterator[str]:
    yield "## Supported\n"
    for home, written, names in HOMES:
        yield f"**{home}**, {len(names)}: {written}\n"
        yield f"{_listed(names)}\n"
    yield f"**Methods of tensors**, {len(vocabulary.METHODS)}: `x.flatten(1)`\n"
    yield f"{_listed(vocabulary.METHODS)}\n"
    yield "| | |\n|---|---|"
    for title, names in (
        ("attributes of tensors", vocabulary.ATTRIBUTES),
        ("attributes of the results of `max`, `sort`, `topk`, `linalg.svd` and similar functions", vocabulary.RESULTS),
        (
            "attributes of layers, in addition to their sublayers, parameters and buffers",
            vocabulary.PARAMETER_ATTRIBUTES,
        ),
        ("dtypes, `torch.float32`", vocabulary.DTYPES),
        ("memory formats, `torch.channels_last`", vocabulary.MEMORY_FORMATS),
        ("numbers, `torch.pi`", vocabulary.TORCH_NUMBERS),
        ("functions of Python", vocabulary.BUILTINS),
        ("methods of lists, dicts and containers of layers", vocabulary.CONTAINER_METHODS),
    ):
        yield f"| {title} | {_listed(names)} |"
    yield ""


def _notes() -> Iterator[str]:
    yield "## Notes\n\n| functions | property | names |\n|---|---|---|"
    for title, why, words in NOTES:
        yield f"| {title} | {why} | {_listed(_known(words.split()))} |"
    modal = sorted(vocabulary.NEEDS_TRAINING)
    yield f"| With a training mode | are errors without `training=training` | {_listed(modal)} |"
    writing = [f"{name}({written}=...)" for name, (written, _, _) in vocabulary.WRITES.items()]
    yield f"| Writing, with an argument | are errors with it, with `inplace=True` and `out=` | {_listed(writing)} |"
    yield ""


def _known(names: list[str]) -> list[str]:
    missing = set(names) - vocabulary.FUNCTIONS
    assert not missing, missing
    return names


def _outside() -> Iterator[str]:
    yield "## Not supported\n\n| name | write instead |\n|---|---|"
    yield from (f"| `{name}` | {instead} |" for name, instead in habits()["torch"].items())
    yield "| names that end in `_`, such as `relu_` | the function without it, which returns a new tensor |"


def _listed(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names, key=str.lower))


if __name__ == "__main__":
    print(page(), end="")
