"""What the process imports and does once from which the tests fork their ranks and commands. It starts no thread."""

import importlib

from exp.check.plan import validate
from exp.check.stages import compose
from exp.sweeps.job import MODULES

for name in (*MODULES, "exp.train", "exp.worker", "exp.config.command", "hydra_plugins.exp.launcher"):
    importlib.import_module(name)
# Parsers that learn, plug-ins that are looked for once.
validate(compose())
