"""The config keys are a public contract. A change of the snapshot needs an entry in the changelog."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import exp
from exp.check.signature import signature_of
from exp.config.targets import resolve
from exp.spelling import fix_of_key

SNAPSHOT = Path(__file__).with_name("config_keys.txt")
# Parameters that exp sets itself.
FILLED = {
    "data.earlier",
    "data.keeps_doubles",
    "data.keeps_raw",
    "data.seed",
    "hooks.throughput.workload",
    "logger.tensorboard.directory",
    "scheduler.optimizer",
}


def keys_of(node, prefix=""):
    """Yield the keys of the files and the other parameters of exp's classes."""
    target = str(OmegaConf.to_container(node, resolve=False).get("_target_"))
    # Metrics have the parameters of torchmetrics.
    if target.startswith("exp.") and not target.startswith("exp.objectives.metrics."):
        taken = signature_of(resolve(target)).parameters
        yield from (f"{prefix}{name}" for name in taken if name not in node)
    for key in node:
        dotted = f"{prefix}{key}"
        value = OmegaConf.to_container(node, resolve=False)[key]
        if isinstance(value, dict) and value:
            yield from keys_of(DictConfig(value), f"{dotted}.")
        else:
            yield dotted


def test_config_keys_match_the_snapshot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {key for key in keys_of(exp.compose([])) if not key.startswith("_composition_")}
    assert sorted(keys - FILLED) == SNAPSHOT.read_text().split(), "write the new keys into config_keys.txt and the log"


def test_every_key_can_be_set_without_a_plus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torchs_own = ["optimizer.weight_decay", "optimizer.betas", "metrics.accuracy.top_k", "trainer.min_epochs"]
    # Some keys are set by another option, such as trainer.profiler by debug=profiler.
    dotted = [key for key in SNAPSHOT.read_text().split() if "." in key and fix_of_key(key, "12") is None]
    config = exp.compose([f"{key}=12" for key in [*dotted, *torchs_own]])
    assert [key for key in [*dotted, *torchs_own] if OmegaConf.select(config, key) != 12] == []
