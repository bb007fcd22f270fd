"""python -m exp.gradcheck TARGET: whether a backward of your own is the derivative of its forward.

python -m exp.gradcheck mine.Cube                                   a torch.autograd.Function, of floats [4, 3]
python -m exp.gradcheck mine.Scale factor=2.0 --input 8             with an argument of its forward by name
python -m exp.gradcheck mine.lookup --input 4:10 --input 10x3       whole numbers from 0 to 9, and floats
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, config_error, one_line
from exp.output import command, loading_torch

if TYPE_CHECKING:
    from torch import Tensor

    from exp.cli.derivatives import Subject, Verdict

RIGHT, WRONG = 0, 1
SHAPE = re.compile(r"(\d+(?:x\d+)*)?(?::([1-9]\d*))?")
WORDS = {True: "right", False: "WRONG", None: "not compared"}


@command()
def main(argv: Sequence[str]) -> int:
    """Compare first and second derivatives with differences in float64.

    Returns: 0 where all that there is is right, 1 where something is wrong, 2 for a fault in the command.
    """
    parser = argparse.ArgumentParser(
        prog="python -m exp.gradcheck", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help="a Function, or a function of tensors")
    parser.add_argument("values", nargs="*", metavar="NAME=VALUE", help="of forward")
    parser.add_argument("--input", action="append", metavar="SHAPE", help="4x3 for floats, 4:10 for 4 numbers below 10")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="as security.allow would")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs, and of what is random in the forward")
    given = parser.parse_intermixed_args(argv)
    verdicts = gradcheck(
        given.target, _values(given.values), inputs=given.input or ["4x3"], allow=given.allow, seed=given.seed
    )
    for verdict in verdicts:
        print(f"{verdict.what:16} {WORDS[verdict.is_right]}{'; ' if verdict.said else ''}{verdict.said}")
    return WRONG if any(verdict.is_right is False for verdict in verdicts) else RIGHT


def gradcheck(
    target: str, values: Mapping[str, Any], *, inputs: Sequence[str], allow: Sequence[str] = (), seed: int = 0
) -> list[Verdict]:
    """The verdicts on a target that passes the wall.

    values: arguments of the forward. inputs: the shapes of the tensors.
    Raises: ConfigError where the target, a value or a shape does not fit.
    """
    with loading_torch():
        from exp.cli.derivatives import compared

    tensors = [_tensor(text, seed=seed + index) for index, text in enumerate(inputs)]
    subject = _subject(target, values, tensors, allow=allow, seed=seed)
    try:
        outputs = subject.function(*subject.inputs)
    except Exception as error:
        raise _unfit(error, inputs) from error
    if not any(one.requires_grad for one in outputs):
        got = f"{target}, of which no floating output depends on a floating input or a parameter"
        raise config_error("TARGET", got=got, expected="something to differentiate")
    return compared(subject)


def _values(texts: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for text in texts:
        if not re.match(r"\w[\w.]*=", text):
            raise config_error("NAME=VALUE", got=repr(text), expected="a name, = and a value: width=16")
    try:
        found = OmegaConf.to_container(OmegaConf.from_dotlist(list(texts)), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise config_error("NAME=VALUE", got=one_line(error), expected="values in YAML") from error
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def _tensor(text: str, *, seed: int) -> Tensor:
    """The input of a `4x3`, of an empty text a single number, of a `4x3:10` whole numbers."""
    import torch

    match = SHAPE.fullmatch(text)
    if match is None:
        expected = "sizes with x between them, as 4x3; of whole numbers with how many there are, as 4x3:10"
        raise config_error("--input", got=repr(text), expected=expected)
    shape = [int(size) for size in (match[1] or "").split("x") if size]
    draw = torch.Generator().manual_seed(seed)
    if match[2]:
        return torch.randint(int(match[2]), shape, generator=draw)
    return torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_()


def _subject(
    target: str, values: Mapping[str, Any], inputs: Sequence[Tensor], *, allow: Sequence[str], seed: int
) -> Subject:
    from torch.autograd import Function

    from exp.cli.derivatives import of_function, parameters_of
    from exp.config.targets import resolve

    found = resolve(target, returns=("builtins.object",), allow=allow)
    if inspect.isclass(found) and not issubclass(found, Function):
        expected = "a torch.autograd.Function, or a function of tensors"
        raise config_error("TARGET", got=f"{target}, another class", expected=expected)
    try:
        names = parameters_of(found)
    except (TypeError, ValueError) as error:  # a function that is built into torch
        got, expected = f"{target}, which does not name its parameters", "a function written in Python that calls it"
        raise config_error("TARGET", got=got, expected=expected) from error
    unknown = [name for name in values if name not in names]
    if unknown:
        expected = f"one of {', '.join(names)}"
        raise config_error(unknown[0], got="no parameter of its forward", expected=expected)
    if len(inputs) > len(names) - len(values):
        expected = f"at most one --input for each of {', '.join(name for name in names if name not in values)}"
        raise config_error("--input", got=f"{len(inputs)} of them", expected=expected)
    return of_function(found, inputs, values, seed=seed)


def _unfit(error: Exception, inputs: Sequence[str]) -> ConfigError:
    got = f"{', '.join(inputs)}, with which the forward failed with {one_line(error)}"
    return config_error("--input", got=got, expected="shapes and values that the forward takes")
