"""Scalars that differ between YAML 1.1 and YAML 1.2."""

from __future__ import annotations

from pathlib import Path

import pytest

from exp.config.yaml_files import parse_yaml, read_yaml, yaml_text
from exp.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("yes", "Write true, or 'yes' in quotes"),
        ("No", "Write false, or 'No' in quotes"),
        ("ON", "Write true"),
        ("off", "Write false"),
        ("012", "Write 12, or '012' in quotes"),
        ("-017", "Write -17"),
        ("00", "Write 0"),
        ("0b101", "'0b101' in quotes"),
        ("1:30", "'1:30' in quotes"),
        ("190:20:30.15", "'190:20:30.15' in quotes"),
    ],
)
def test_ambiguous_scalars_are_refused_with_a_spelling(text, fix):
    for written in (f"first: 1\nkey: {text}\n", f"first: 1\nkey: [a, {text}]\n", f"first: 1\n{text}: a\n"):
        with pytest.raises(ConfigError) as refused:
            parse_yaml(written, name="x.yaml")
        (error,) = refused.value.errors
        assert error.source == "x.yaml, line 2"
        assert error.got.startswith(f"{text}, which YAML 1.1 and YAML 1.2 read differently")
        assert fix in error.fix


def test_every_ambiguous_scalar_of_a_file_is_reported():
    with pytest.raises(ConfigError) as refused:
        parse_yaml("seed: 012\nsweep: {timeout: 1:30}\nvars:\n  - off\n", name="x.yaml")
    assert [(error.key, error.source) for error in refused.value.errors] == [
        ("seed", "x.yaml, line 1"),
        ("sweep.timeout", "x.yaml, line 2"),
        ("vars.0", "x.yaml, line 4"),
    ]


def test_other_scalars_keep_their_values():
    written = "[0, 0x1F, 1_000, 1e-3, 1e5, .5, .inf, true, False, ~, 'yes', \"012\", 08, 2026-11-27, a:b, on time]"
    values = [
        0,
        31,
        1000,
        1e-3,
        1e5,
        0.5,
        float("inf"),
        True,
        False,
        None,
        "yes",
        "012",
        "08",
        "2026-11-27",
        "a:b",
        "on time",
    ]
    assert parse_yaml(written, name="x.yaml") == values


def test_a_frozen_config_keeps_ambiguous_texts():
    values = {"on": "yes", "octal": ["010", "-017", "08", "0o17"], "time": "1:30", "binary": "0b1", "number": "1_000"}
    assert parse_yaml(yaml_text(values), name="config.yaml") == values


def test_all_files_of_conf_are_unambiguous():
    for file in CONF.rglob("*.yaml"):
        read_yaml(file)
