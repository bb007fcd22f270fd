"""From the config's word to its plugin."""

from __future__ import annotations

from collections.abc import Mapping

from exp.precision.plugin import RunPrecision
from exp.precision.scaled import ScaledPrecision
from exp.precision.scaler import CountingScaler
from exp.precision.words import read_word


def build_precision(
    word: str,
    *,
    device_type: str,
    keep: Mapping[str, str] | None = None,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = False,
    matmul: str | None = None,
) -> RunPrecision:
    """The plugin for a word of `precision.word`.

    device_type: torch's, such as cpu or cuda.
    keep: pattern of module names or name of a type to fp32 or fp64, as precision.keep.
    init_scale, growth_factor, backoff_factor, growth_interval, enabled: of the loss scale (precision.scaler), which
        only fp16 has.
    matmul: how exact float32 matrix products are, as runtime.matmul; None leaves it to the word.
    Raises: ConfigError for an unknown word, or a scaler that is enabled for a word without one.
    """
    meaning = read_word(word)
    if meaning.needs_scaler:
        scaler = CountingScaler(
            device=device_type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        return ScaledPrecision(word=meaning, device_type=device_type, scaler=scaler, keep=keep, matmul=matmul)
    if enabled:
        meaning.refuse_scaler()
    return RunPrecision(word=meaning, device_type=device_type, keep=keep, matmul=matmul)
