"""Load pretrained weights into a network, by the names and shapes that match.

keys: {"backbone.*": "body.*", "head.*": null} renames the weights. The first matching pattern is used, `*` keeps its
text, and null skips a tensor. A name that matches no pattern stays.
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
# A buffer of BatchNorm for a momentum of null. Weights older than torch 0.4.1 do not have it.
COUNTER = ".num_batches_tracked"


@dataclass(frozen=True, kw_only=True)
class Matching:
    """The match between a network and weights.

    Args:
        taken: Names in the network to names in the weights, with the same shape.
        shapes: Names in the network to name there, shape there and shape here, for tensors whose shapes differ.
        missing: Names in the network that the weights do not have.
        unused: Names of the weights that the network does not have.
        left_out: Names that a null skips.
        count: The number of the network's tensors.
        unmatched: Patterns that match no name of the weights, with all these names.
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
        """True if all tensors of the network and all weights match."""
        return not (self.shapes or self.missing or self.unused)

    def summary(self, source: str) -> str:
        """Return a line about the tensors that match and those that do not."""
        line = f"weights: {len(self.taken)} of {self.count} tensors start from {source}"
        left_out = f"left out by weights.keys: {among(self.left_out, count=4)}" if self.left_out else ""
        return "; ".join(filter(None, [line, self._words(), left_out]))

    def errors(self, source: str, *, is_strict: bool) -> Iterator[ErrorDetails]:
        """Yield an error for each pattern without a match, for no match at all and, if strict, for a partial match."""
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
                got=f"{source}, of which no tensor has the name and shape of one of the network: {self._words()}",
                expected="weights of this network, or of a part of it",
                fix=self._proposal() or 'Rename them: weights.keys: {"PATTERN THERE": "PATTERN HERE"}',
            )
        elif is_strict and not self.is_whole:
            fix = "weights.strict=false keeps their initial values; weights.keys renames them"
            yield ErrorDetails(
                key="weights.strict",
                got=f"true, and {source} is not this network's: {self._words()}",
                expected="the same names and shapes in both",
                fix=self._proposal() or fix,
            )

    def _words(self) -> str:
        differing = [f"{own} is {there} there and {here} here" for own, (_, there, here) in self.shapes.items()]
        texts = [
            "; ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else ""),
            f"not there: {among(self.missing, count=4)}" if self.missing else "",
            f"not here: {among(self.unused, count=4)}" if self.unused else "",
        ]
        return "; ".join(filter(None, texts))

    def _proposal(self) -> str | None:
        """Return the renaming of a prefix by which most names would match, or None."""
        there: Counter[tuple[str, str]] = Counter()
        for own in self.missing:
            there.update((f"{theirs.removesuffix(own)}*", "*") for theirs in self.unused if theirs.endswith(f".{own}"))
        if not there:
            return None
        (old, new), count = there.most_common(1)[0]
        return f'With weights.keys: {{"{old}": "{new}"}} {count} more have the same names'


def match_weights(weights: Mapping[str, Tensor], network: nn.Module, *, keys: Keys) -> Matching:
    """Compare the names and shapes of weights with those of a network, which may be on the meta device.

    Raises:
        ConfigError: If two weights get the same name, or a new name has more stars than its pattern.
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
            raise config_error(f"weights.keys.{pattern}", got=got, expected="a name for each")
        else:
            renamed[found] = theirs
    own = tensors_of(network)
    both = {name: renamed[name] for name in own if name in renamed}
    taken = {name: theirs for name, theirs in both.items() if weights[theirs].shape == own[name].shape}
    # The weights may have a tied tensor under one of its names.
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
    """Copy the matching weights into the network, in the network's dtypes."""
    own = tensors_of(network)
    for name, theirs in matching.taken.items():
        own[name].copy_(weights[theirs])


def follow_saved_shapes(network: nn.Module) -> None:
    """Make load_state_dict resize the buffers of users' modules to the shapes in the state dict.

    A forward may give a buffer the size of the batch, which a new network does not know.
    """
    for module in network.modules():
        if any(True for _ in _reshaped_buffers(module)):
            module.register_load_state_dict_pre_hook(_take_shapes)


def _reshaped_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's own buffers that a forward may reshape. torch's modules never do."""
    if type(module).__module__.partition(".")[0] != "torch":
        yield from module.named_buffers(recurse=False)


def _take_shapes(module: nn.Module, state: Mapping[str, object], prefix: str, *_: object) -> None:
    for name, buffer in _reshaped_buffers(module):
        saved = state.get(f"{prefix}{name}")
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            setattr(module, name, buffer.new_empty(saved.shape))


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's parameters and persistent buffers by their names in the state dict, without LoRA's."""
    named = network.state_dict(keep_vars=True).items()
    return originals({name: one for name, one in named if isinstance(one, Tensor)})


def _rename(name: str, keys: Keys) -> tuple[str, str | None]:
    """Return the pattern that a name matches, and the new name; "" and the name itself without a match."""
    for pattern, new in keys.items():
        found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
        if found is None:
            continue
        if new is None:
            return pattern, None
        if new.count("*") > len(found.groups()):
            got, expected = f"{new}, with {new.count('*')} stars", f"at most {len(found.groups())}, as {pattern} has"
            raise config_error(f"weights.keys.{pattern}", got=got, expected=expected)
        texts = new.split("*")
        return pattern, "".join(
            text + part for text, part in zip(texts, [*found.groups()[: len(texts) - 1], ""], strict=True)
        )
    return "", name


def _part(name: str) -> str:
    return name.partition(".")[0]
