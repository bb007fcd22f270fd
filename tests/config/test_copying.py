"""`copy_config` returns what copy.deepcopy returns."""

import copy
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from exp.config.reading import copy_config


def test_a_copy_has_values_flags_and_interpolations():
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "d": [1, "???", None]})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.d, True)
    made, known = copy_config(config), copy.deepcopy(config)
    assert OmegaConf.to_container(made) == OmegaConf.to_container(known)
    assert OmegaConf.is_struct(made)
    assert OmegaConf.is_readonly(made.d)
    made.a.b = 2
    assert (made.a.c, config.a.c) == (2, 1)
    with pytest.raises(ConfigAttributeError):
        made.e = 1


def test_a_config_of_a_local_class_is_copied():
    @dataclass
    class Inner:
        a: int = 1

    made = copy_config(OmegaConf.structured(Inner))
    assert made.a == 1
    assert OmegaConf.get_type(made) is Inner
