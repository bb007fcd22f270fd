"""What a device can do at best: FLOPs and bytes a second, its memory, and what it can send to a neighbour.

In GB and GB/s, by NVIDIA's datasheets of each card (of V100, T4, A100, L4, L40S, H100, H200, HGX B200) and its
whitepapers of Ada and GA102; memory is in GiB, which is how these cards are named. A link is NVLink's where there is
one, else PCIe's, and half of the figure that is listed, which adds up both directions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch

from exp.errors import config_error, shorten
from exp.hooks.utilisation import arithmetic, card_of, card_peaks, measured_peak
from exp.spelling import did_you_mean

GIGA = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    flops: a second, by the word of arithmetic. bandwidth: bytes a second of its memory. memory: bytes.
    link: bytes a second to a neighbour. overhead: seconds that every operator takes, however small.
    latency: seconds of a message between neighbours, however small. overlaps: whether it sends while it computes.
    source: where the figures are from.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    link: float
    overhead: float = 0.0
    latency: float = 0.0
    overlaps: bool = True
    source: str = "as its maker lists it"

    def seconds(self, flops: float, moved: float, *, word: str) -> tuple[float, float]:
        """Of an operator: what its arithmetic takes, and what its memory does. word: of the arithmetic.

        Where the device is not listed for it, as float32's.
        """
        peak = self.flops.get(word, self.flops["fp32"])
        return flops / peak, moved / self.bandwidth


# Memory in GiB, its bandwidth, the link.
_CARDS: dict[str, tuple[float, float, float]] = {
    "B200": (180, 7700, 900),
    "H200": (141, 4800, 450),
    "H200 NVL": (141, 4800, 450),
    "H100 SXM": (80, 3350, 450),
    "H100 NVL": (94, 3900, 300),
    "H100 PCIe": (80, 2000, 300),
    "A100": (80, 2039, 300),
    "L40S": (48, 864, 32),
    "L4": (24, 300, 32),
    "T4": (16, 320, 16),
    "V100 SXM2": (32, 900, 150),
    "V100 PCIe": (32, 900, 16),
    "RTX 4090": (24, 1008, 32),
    "RTX 3090": (24, 936, 32),
}
SHORT = {"H100": "H100 SXM", "V100": "V100 SXM2"}
# Of a measured CPU.
TRIES = 4
COUNTED = re.compile(r"(?:([0-9]+)x)?(.+)")
# A plan looks at every rank of a run, one by one.
MOST_DEVICES = 100_000
# What launching an operator costs a GPU's host, about: a CUDA kernel's launch from PyTorch's eager mode.
LAUNCH = 5e-6
# Of a small collective, about: NCCL between GPUs of a node, and gloo between processes with torch's hooks around it.
NCCL, GLOO = 2e-5, 3e-4


def read_devices(text: str) -> tuple[Device, int | None]:
    """The device that `64xH100` names, and how many; None where no number stands before it.

    Raises: ConfigError for a card that is not listed, none of them, or more than MOST_DEVICES.
    """
    found = COUNTED.fullmatch(text.strip())
    if found is None:
        expected = "a card, with a number before it where there are several: 64xH100"
        raise config_error("device", got="an empty value", expected=expected)
    names = {name.lower().replace(" ", "_"): name for name in _CARDS}
    names |= {short.lower(): card for short, card in SHORT.items()}
    word = found[2].lower().replace(" ", "_")
    if word not in names:
        expected = f"one of {', '.join(_CARDS)}, with a number before it where there are several: 64xH100"
        raise config_error("device", got=text, expected=expected, fix=did_you_mean(word, list(names)))
    # Python refuses to read a number of thousands of digits.
    digits = None if found[1] is None else found[1].lstrip("0")
    if digits is not None and not (0 < len(digits) <= len(str(MOST_DEVICES)) and int(digits) <= MOST_DEVICES):
        expected = f"1 to {MOST_DEVICES:,} of them: 64x{found[2]}"
        raise config_error("device", got=shorten(text), expected=expected)
    return listed_device(names[word]), None if digits is None else int(digits)


def listed_device(card: str) -> Device:
    """A card of the table."""
    memory, bandwidth, link = _CARDS[card]
    return Device(
        name=card,
        flops=card_peaks(card),
        bandwidth=bandwidth * GIGA,
        memory=int(memory * GIB),
        link=link * GIGA,
        overhead=LAUNCH,
        latency=NCCL,
    )


def own_gpu() -> Device | None:
    """The first GPU of this machine; None where there is none, or it is not in the table."""
    if not torch.cuda.is_available():
        return None
    card = card_of(torch.cuda.get_device_name(0))
    return None if card is None else listed_device(card)


def own_cpu(*, word: str, ranks: int) -> Device:
    """This machine's CPU, measured for a second by matrix products, copies and small operators.

    ranks: that share it.
    """
    kinds = dict.fromkeys(["fp32", arithmetic(word)])
    device = torch.device("cpu")
    flops: dict[str, float] = {}
    for kind in kinds:
        # Several times: others may be at work on this machine, too.
        peaks = [peak for _ in range(TRIES) if (peak := measured_peak(device, kind)) is not None]
        flops |= {kind: max(peaks)} if peaks else {}
    source = torch.ones(2**22)
    target = torch.empty_like(source)
    copied = _fastest(lambda: target.copy_(source))
    small, weight = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)

    def few() -> None:
        x = small
        for _ in range(10):
            x = torch.add(x, weight)
        x.sum().backward()

    memory = psutil.virtual_memory()
    return Device(
        name="this machine's CPU",
        flops=flops,
        bandwidth=2 * source.nbytes / copied,
        memory=memory.available // ranks,
        # gloo over loopback copies each message a few times.
        link=2 * source.nbytes / copied / 8,
        latency=GLOO,
        overlaps=False,
        # Ten forward and ten backward, and the step's own share.
        overhead=_fastest(few) / 20,
        source=f"measured on {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
    )


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
