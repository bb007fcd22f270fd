"""The config as a tree on the screen, for `print_config=true`."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from exp.config.freeze import COMPOSITION


def print_tree(config: DictConfig) -> None:
    """Prints a branch for each node at the top, its values resolved."""
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.tree import Tree

    tree = Tree("config", guide_style="dim")
    for key in config:
        if key == COMPOSITION:
            continue
        if OmegaConf.is_config(config[key]):
            text = OmegaConf.to_yaml(config[key], resolve=True).rstrip() or "{}"
            tree.add(str(key)).add(Syntax(text, "yaml", background_color="default"))
        else:
            tree.add(f"{key!s}: {config[key]}")
    Console(highlight=False).print(tree)
