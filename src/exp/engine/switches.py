"""What `runtime` does to a network: its layout in memory, its graphs, its compilation. In this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exp.engine.channels_last import channels_last_faults, put_channels_last
from exp.engine.compiling import compile_faults, compile_network
from exp.engine.cuda_graphs import GraphedNetwork, cuda_graph_faults
from exp.engine.module import TrainingModule
from exp.errors import Fault
from exp.strategies.strategy import Planned


def switch_on(module: TrainingModule, runtime: Mapping[str, Any]) -> None:
    """Before the module is placed on a device. runtime: the config's node."""
    if runtime["channels_last"]:
        put_channels_last(module.network)
    if runtime["cuda_graph"]:
        # Past nn.Module: the state dict has the network once.
        vars(module)["run_network"] = GraphedNetwork(module.network)
    if runtime["compile"]:
        for network, needs in module.runs():
            compile_network(network, backend=runtime["compile_backend"], needs=needs)


def switch_faults(planned: Planned) -> Sequence[Fault]:
    """What the switches cannot do for a run."""
    runtime, faults = planned.config["runtime"], []
    if runtime["compile"]:
        backend, accelerator = runtime["compile_backend"], planned.placement.accelerator
        faults += compile_faults(planned.network, backend=backend, accelerator=accelerator)
    if runtime["channels_last"]:
        faults += channels_last_faults(planned.network, planned.config["data"]["input_shape"])
    if runtime["cuda_graph"]:
        faults += cuda_graph_faults(planned)
    return faults
