"""Peak rates of GPUs: FLOPs per second, memory bandwidth, memory size, and bandwidth of links.

The numbers come from NVIDIA's datasheets (V100, T4, A100, L4, L40S, H100, H200, HGX B200) and whitepapers (Ada, GA102).
A link is NVLink if the card has NVLink, and PCIe otherwise. The bandwidth of a link is for one direction, which is half
of the number in a datasheet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exp.errors import config_error, shorten
from exp.hooks.utilisation import card_of, card_peaks
from exp.spelling import did_you_mean

GIGA = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """The peak rates of a device.

    Attributes:
        name: Name of the card.
        flops: FLOPs per second, by name of the number format, such as bf16.
        bandwidth: Memory bandwidth in bytes per second.
        memory: Memory in bytes.
        link: Bandwidth between two devices in bytes per second, in one direction.
        overhead: Smallest time of an operator in seconds. Default: 0.
        latency: Smallest time of a message in seconds. Default: 0.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    link: float
    overhead: float = 0.0
    latency: float = 0.0

    def seconds(self, flops: float, moved: float, *, word: str) -> tuple[float, float]:
        """Return two times of an operator in seconds: the time of its arithmetic, and the time of its memory traffic.

        Args:
            flops: FLOPs of the operator.
            moved: Bytes that the operator reads and writes.
            word: Name of the number format. If the device lists no peak for the format, the peak of fp32 is used.
        """
        peak = self.flops.get(word, self.flops["fp32"])
        return flops / peak, moved / self.bandwidth


# For each card: memory in GiB, memory bandwidth in GB/s, link bandwidth in GB/s.
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
COUNTED = re.compile(r"(?:([0-9]{1,6})x)?(.+)")
# Largest number of devices. A plan computes the memory of every rank, so this number limits the time of a plan.
MOST_DEVICES = 100_000
# Approximate time in seconds to launch a CUDA kernel in PyTorch's eager mode.
LAUNCH = 5e-6
# Approximate time in seconds of a small NCCL collective between GPUs of a node.
NCCL = 2e-5


def read_devices(text: str) -> tuple[Device, int | None]:
    """Parse a text such as `64xH100` into a device and a number of devices.

    Returns:
        The device and the number. The number is None if the text contains no number.

    Raises:
        ConfigError: The card is not listed, or the number is 0 or above MOST_DEVICES.
    """
    found = COUNTED.fullmatch(text.strip())
    if found is None:
        expected = "the name of a GPU, or a number and a GPU, such as 64xH100"
        raise config_error("device", got="an empty value", expected=expected)
    names = {name.lower().replace(" ", "_"): name for name in _CARDS}
    names |= {short.lower(): card for short, card in SHORT.items()}
    word = found[2].lower().replace(" ", "_")
    if word not in names:
        expected = f"one of {', '.join(_CARDS)}, or a number and such a name, as in 64xH100"
        raise config_error("device", got=text, expected=expected, fix=did_you_mean(word, list(names)))
    count = None if found[1] is None else int(found[1])
    if count is not None and not 0 < count <= MOST_DEVICES:
        expected = f"a number of devices from 1 to {MOST_DEVICES:,}, such as 64x{found[2]}"
        raise config_error("device", got=shorten(text), expected=expected)
    return listed_device(names[word]), count


def listed_device(card: str) -> Device:
    """Return the peak rates of a card in _CARDS."""
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
    """Return the peak rates of the first GPU of this machine. None if it has no GPU, or the GPU is not in _CARDS."""
    if not torch.cuda.is_available():
        return None
    card = card_of(torch.cuda.get_device_name(0))
    return None if card is None else listed_device(card)
