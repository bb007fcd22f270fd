"""Hydra plug-ins of exp. Thin: Hydra executes these modules at every start."""
