"""Copy configs, and convert them to plain dicts and lists."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf


def raw_values(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain dicts and lists. Interpolations are not resolved."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


def copy_config(config: DictConfig) -> DictConfig:
    """Return a deep copy of a config.

    A whole config is copied by pickle, in an eighth of the time of copy.deepcopy. A node inside a config is copied by
    copy.deepcopy. OmegaConf's cache is copied separately, because it may contain objects of users that cannot be
    pickled.
    """
    if config._get_parent() is not None:
        return copy.deepcopy(config)
    cache = OmegaConf.get_cache(config)
    kept = dict(cache)
    cache.clear()
    try:
        made = cast(DictConfig, pickle.loads(pickle.dumps(config, pickle.HIGHEST_PROTOCOL)))
    except (pickle.PicklingError, AttributeError, TypeError):  # the class of a value is not importable
        made = copy.deepcopy(config)
    finally:
        cache.update(kept)
    OmegaConf.get_cache(made).update(copy.deepcopy(kept))
    return made
