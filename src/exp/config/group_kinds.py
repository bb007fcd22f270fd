"""The three kinds of config group, of which each of exp's is one: `=` replaces, `+` adds.

one   owns the node of its name: model=mlp
many  named entries: hooks=[gradients,memory] replaces the set, +hooks=memory adds one
axis  tunes what train.yaml declares whole: precision=bf16 and +precision=bf16 are one command
"""

from __future__ import annotations

ONE = ("model", "data", "optimizer", "scheduler", "strategy", "sweep")
MANY = ("hooks", "callbacks", "objective", "metrics", "phases", "logger")
AXIS = ("experiment", "debug", "precision", "local", "module")
# Nodes of a class that may be the user's own, which has its own words: the composed config says what is there.
OF_CLASSES = (*ONE, *MANY, "module")


def is_flat_entry(config_path: str, content: object) -> bool:
    """Whether a file of a group of many holds one entry itself, as options of Hydra's own groups do: named as it is."""
    group = config_path.partition("/")[0]
    if group not in MANY or not isinstance(content, dict):
        return False
    return "_target_" in content or (group == "phases" and isinstance(content.get("terms"), list))
