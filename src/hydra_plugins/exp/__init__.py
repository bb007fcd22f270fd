"""Hydra plug-ins of exp. The modules import little, because Hydra imports them at every start."""
