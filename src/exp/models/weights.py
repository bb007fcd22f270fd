"""Loading of pretrained weights into a network, by names and shapes.

keys: {"backbone.*": "body.*", "head.*": null} renames the weights. The first pattern that matches a name is used. The
text that `*` matches does not change. null skips a tensor. A name that no pattern matches does not change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from exp.errors import ErrorDetails, config_error
from exp.models.lora import originals
from exp.spelling import among, did_you_mean

Keys = Mapping[str, str | None]
# A buffer of BatchNorm that is used only if momentum is None. Weights older than torch 0.4.1 lack this buffer.
COUNTER = ".num_batches_tracked"


@dataclass(frozen=True, kw_only=True)
class Matching:
    """The result of comparing a network with weights.

    Args:
        taken: The names in the weights by name in the network, for tensors of the same shape.
        shapes: The name in the weights, the shape in the weights and the shape in the network, by name in the network.
            Only tensors with different shapes are included.
        missing: Names in the network that the weights lack.
        unused: Names in the weights that the network lacks.
        left_out: Names of weights that are skipped, because their pattern in `weights.keys` has the value null.
        count: The number of tensors in the network.
        unmatched: All names in the weights, by pattern in `weights.keys` that matches none of these names. Default:
            empty.
    """

    taken: Mapping[str, str]
    shapes: Mapping[str, tuple[str, list[int], list[int]]]
    missing: Sequence[str]
    unused: Sequence[str]
    left_out: Sequence[str]
    count: int
    unmatched: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if the network and the weights have the same names and shapes."""
        return not (self.shapes or self.missing or self.unused)

    def summary(self, source: str) -> str:
        """Return a line that lists the tensors that match and those that do not.

        Args:
            source: The name of the weights.
        """
        line = f"weights: {len(self.taken)} of {self.count} tensors start from {source}"
        left_out = f"left out by weights.keys: {among(self.left_out, count=4)}" if self.left_out else ""
        return "; ".join(filter(None, [line, self._words(), left_out]))

    def errors(self, source: str, *, is_strict: bool) -> Iterator[ErrorDetails]:
        """Yield the errors of the comparison.

        Two errors do not depend on `is_strict`: a pattern without a match, and weights without any matching tensor.

        Args:
            source: The name of the weights.
            is_strict: Whether a tensor that does not match is an error.
        """
        for pattern, names in self.unmatched.items():
            yield ErrorDetails(
                key=f"weights.keys.{pattern}",
                got=f"no tensor of {source} matches",
                expected=f"a pattern of its names: {among(names, word=pattern)}",
                fix=did_you_mean(pattern.replace("*", ""), {_part(name) for name in names}),
            )
        if self.unmatched:
            return
        if not self.taken:
            yield ErrorDetails(
                key="weights.from",
                got=f"{source}, which has no tensor with a name and shape of the network: {self._words()}",
                expected="weights of this network, or of a part of it",
                fix=self._proposal()
                or 'Rename its tensors: weights.keys: {"PATTERN IN THE FILE": "PATTERN IN THE NETWORK"}',
            )
        elif is_strict and not self.is_whole:
            fix = "Write weights.strict=false to load only the matching tensors, or rename tensors with weights.keys"
            yield ErrorDetails(
                key="weights.strict",
                got=f"true, and {source} does not match the network: {self._words()}",
                expected="the same names and shapes in the file and in the network",
                fix=self._proposal() or fix,
            )

    def _words(self) -> str:
        differing = [
            f"{own} is {there} in the file and {here} in the network" for own, (_, there, here) in self.shapes.items()
        ]
        texts = [
            "; ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else ""),
            f"missing in the file: {among(self.missing, count=4)}" if self.missing else "",
            f"missing in the network: {among(self.unused, count=4)}" if self.unused else "",
        ]
        return "; ".join(filter(None, texts))

    def _proposal(self) -> str | None:
        """Return a sentence that proposes to rename a prefix of the weights, so that most missing names match.

        Return None if no renaming helps.
        """
        there: Counter[tuple[str, str]] = Counter()
        for own in self.missing:
            there.update((f"{theirs.removesuffix(own)}*", "*") for theirs in self.unused if theirs.endswith(f".{own}"))
        if not there:
            return None
        (old, new), count = there.most_common(1)[0]
        return f'Write weights.keys: {{"{old}": "{new}"}}, with which {count} more names match'


def match_weights(weights: Mapping[str, Tensor], network: nn.Module, *, keys: Keys) -> Matching:
    """Compare the names and shapes of weights with those of a network.

    Args:
        weights: The weights by name.
        network: The network. Its tensors may be on the meta device.
        keys: New name of each pattern, as in the module docstring.

    Raises:
        ConfigError: Two weights get the same name, or a new name has more stars than its pattern.
    """
    renamed: dict[str, str] = {}
    left_out: list[str] = []
    unmatched = {pattern: list(weights) for pattern in keys}
    for theirs in weights:
        pattern, found = _rename(theirs, keys)
        unmatched.pop(pattern, None)
        if found is None:
            left_out.append(theirs)
        elif found in renamed:
            got = f"{theirs} and {renamed[found]}, which both become {found}"
            raise config_error(f"weights.keys.{pattern}", got=got, expected="a different new name for each tensor")
        else:
            renamed[found] = theirs
    own = tensors_of(network)
    both = {name: renamed[name] for name in own if name in renamed}
    taken = {name: theirs for name, theirs in both.items() if weights[theirs].shape == own[name].shape}
    # The weights may contain a tied tensor under only one of its names.
    given = {id(own[name]) for name in taken}
    missing = [name for name in own if name not in both and id(own[name]) not in given and COUNTER not in f".{name}"]
    return Matching(
        taken=taken,
        shapes={
            name: (theirs, list(weights[theirs].shape), list(own[name].shape))
            for name, theirs in both.items()
            if name not in taken
        },
        missing=missing,
        unused=[theirs for name, theirs in renamed.items() if name not in own],
        left_out=left_out,
        count=len(own),
        unmatched=unmatched,
    )


@torch.no_grad()
def load_weights(network: nn.Module, weights: Mapping[str, Tensor], matching: Matching) -> None:
    """Copy the matching weights into the network, converted to the dtypes of the network."""
    own = tensors_of(network)
    for name, theirs in matching.taken.items():
        own[name].copy_(weights[theirs])


def follow_saved_shapes(network: nn.Module) -> None:
    """Make load_state_dict resize the buffers of users' modules to the shapes in the state dict.

    A forward pass may give a buffer the size of the batch. A new network has buffers of other sizes.
    """
    for module in network.modules():
        if any(True for _ in _reshaped_buffers(module)):
            module.register_load_state_dict_pre_hook(_take_shapes)


def _reshaped_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module that a forward pass may resize, without submodules.

    torch's modules never resize buffers.
    """
    if type(module).__module__.partition(".")[0] != "torch":
        yield from module.named_buffers(recurse=False)


def _take_shapes(module: nn.Module, state: Mapping[str, object], prefix: str, *_: object) -> None:
    for name, buffer in _reshaped_buffers(module):
        saved = state.get(f"{prefix}{name}")
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            setattr(module, name, buffer.new_empty(saved.shape))


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a network by their names in the state dict.

    Tensors of LoRA are left out, and adapted weights have their names from before the adaptation.
    """
    named = network.state_dict(keep_vars=True).items()
    return originals({name: one for name, one in named if isinstance(one, Tensor)})


def _rename(name: str, keys: Keys) -> tuple[str, str | None]:
    """Return the pattern that matches a name, and the new name.

    If no pattern matches, return an empty pattern and the unchanged name. The new name None skips the tensor.
    """
    for pattern, new in keys.items():
        found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
        if found is None:
            continue
        if new is None:
            return pattern, None
        if new.count("*") > len(found.groups()):
            got, expected = (
                f"{new}, with {new.count('*')} stars",
                f"at most {len(found.groups())} stars, as in {pattern}",
            )
            raise config_error(f"weights.keys.{pattern}", got=got, expected=expected)
        texts = new.split("*")
        return pattern, "".join(
            text + part for text, part in zip(texts, [*found.groups()[: len(texts) - 1], ""], strict=True)
        )
    return "", name


def _part(name: str) -> str:
    return name.partition(".")[0]
