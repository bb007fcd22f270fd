"""A copy of a config is what copy.deepcopy makes of it."""

import copy
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from exp.config.copying import copied


def test_a_copy_has_the_values_the_flags_and_the_interpolations_and_is_no_part_of_the_other():
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "d": [1, "???", None]})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.d, True)
    made, known = copied(config), copy.deepcopy(config)
    assert OmegaConf.to_container(made) == OmegaConf.to_container(known)
    assert OmegaConf.is_struct(made)
    assert OmegaConf.is_readonly(made.d)
    made.a.b = 2
    assert (made.a.c, config.a.c) == (2, 1)
    with pytest.raises(ConfigAttributeError):
        made.e = 1


def test_a_part_of_a_config_still_leads_to_the_whole():
    config = OmegaConf.create({"a": {"c": "${b}"}, "b": 1})
    made = copied(config.a)
    config.b = 2
    assert made.c == 2


class Shared:
    """Neither copied nor pickled, as what a function of the user's own gave."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not pickled")


def test_what_is_kept_beside_a_config_stays_the_same_for_the_copy():
    config = OmegaConf.create({"a": 1})
    OmegaConf.get_cache(config)["kept"] = {"one": Shared()}
    made = copied(config)
    assert OmegaConf.get_cache(made)["kept"]["one"] is OmegaConf.get_cache(config)["kept"]["one"]
    assert OmegaConf.get_cache(made) is not OmegaConf.get_cache(config)


def test_a_config_of_a_class_that_pickle_does_not_find_is_copied():
    @dataclass
    class Inner:
        a: int = 1

    made = copied(OmegaConf.structured(Inner))
    assert made.a == 1
    assert OmegaConf.get_type(made) is Inner
