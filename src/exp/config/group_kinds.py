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


def package_of_flat(config_path: str, content: object) -> str | None:
    """Where a file of a group of many that holds one entry itself stands: under its own name.

    Options of Hydra's own groups are written so. config_path: with the ending or without.
    Returns: None of any other file.
    """
    folder, _, option = config_path.removesuffix(".yaml").rpartition("/")
    group = folder.partition("/")[0]
    if group not in MANY or not isinstance(content, dict):
        return None
    is_entry = "_target_" in content or (group == "phases" and isinstance(content.get("terms"), list))
    return f"{group}.{option}" if is_entry else None
