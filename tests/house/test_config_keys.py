"""The config's keys are a public contract: a change here is a change for users, and belongs in the changelog."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import exp

SNAPSHOT = Path(__file__).with_name("config_keys.txt")


def keys_of(node, prefix=""):
    for key in node:
        dotted = f"{prefix}{key}"
        value = OmegaConf.to_container(node, resolve=False)[key]
        if isinstance(value, dict) and value:
            yield from keys_of(DictConfig(value), f"{dotted}.")
        else:
            yield dotted


def test_the_keys_of_the_default_config_are_the_committed_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = exp.compose([])
    keys = [key for key in keys_of(config) if not key.startswith("_composition_")]
    assert sorted(keys) == SNAPSHOT.read_text().split(), "write the new keys into config_keys.txt and CHANGELOG.md"
