"""Starts a frozen run: one fresh interpreter a rank, watched until all of them have ended.

Signatures the rest of exp uses (the run directory holds the frozen config.yaml):

    placement(config.strategy.name, devices=config.launch.devices, nodes=config.launch.nodes,
              accelerator=config.launch.accelerator) -> Placement        exp.strategies.placement; ConfigError
    in_process(placement, max_restarts=...) -> bool                      call run.run(directory) in this process
    launch(directory, placement=..., max_restarts=..., threads=...)      else; read the report afterwards
        raises RankError, ConfigError (a rank's own), Interrupted

and in a rank (exp.worker calls `run.run(directory, rank=rank, resume=resume)`, ALONE and None in process):

    adopted(rank, config.strategy.name, devices=..., nodes=..., accelerator=...) -> Placement
    trainer_arguments(construct(config.strategy), placement=placement, rank=rank) -> dict    exp.strategies.strategy
"""
