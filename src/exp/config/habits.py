"""What users of lightning-hydra-template and of Lightning type, and what it is called here."""

from __future__ import annotations

# The whole key, or its beginning where the key ends in a dot. Looked up from the longest to the shortest.
KEYS = {
    "ckpt_path": "a checkpoint is resume=PATH",
    "ckpt": "a checkpoint is resume=PATH",
    "checkpoint_path": "a checkpoint is resume=PATH",
    "resume_from_checkpoint": "a checkpoint is resume=PATH",
    "trainer.resume_from_checkpoint": "a checkpoint is resume=PATH",
    "trainer.devices": "write launch.devices={value}",
    "trainer.gpus": "write launch.devices={value}",
    "trainer.num_nodes": "write launch.nodes={value}",
    "trainer.accelerator": "write launch.accelerator={value}",
    "trainer.strategy": "write strategy={value}",
    "strategy.verify": "it is gone: leave it out, and hold a plan of your own against strategy=single",
    "trainer.precision": "write precision=fp32, bf16 or fp16",
    "trainer.callbacks": "callbacks are a group: +callbacks=early_stopping",
    "trainer.logger": "loggers are a group: logger=[tensorboard], logger=[] for none",
    "trainer.default_root_dir": "results land in hydra.run.dir=outputs/elsewhere",
    "trainer.enable_checkpointing": "checkpoints are checkpoint.save_best and checkpoint.save_last",
    "trainer.fast_dev_run": "write debug=one_batch",
    "trainer.overfit_batches": "write debug=overfit",
    "trainer.profiler": "write debug=profiler",
    "trainer.deterministic": "write runtime.deterministic=true",
    "trainer.benchmark": "write runtime.cudnn_benchmark=true",
    "model.optimizer": "the optimizer has its own node: optimizer.lr=1e-3, optimizer=sgd",
    "model.optimizer.": "write optimizer.{rest}={value}",
    "model.scheduler": "the schedule has its own node: scheduler=cosine",
    "model.scheduler.": "write scheduler.{rest}={value}",
    "model.lr": "write optimizer.lr={value}",
    "model.net": "the layers are model.layers, by name",
    "model.net.": "the layers are model.layers, by name",
    "model.compile": "exp does not compile networks: leave it out",
    "data.train_val_test_split": "the shares are data.parts.train, data.parts.val and data.parts.test",
    "data.data_dir": "write data_dir={value}",
    "extras": "print_config and tags are keys at the top: print_config=true",
    "extras.": "print_config and tags are keys at the top: print_config=true",
    "hparams_search": "name the values with -m: -m optimizer.lr=1e-4,1e-3,1e-2; "
    "a search is an interval, 'optimizer.lr=interval(1e-4,1e-1)'",
    "optimized_metric": "write monitor={value} and mode=min or mode=max",
    "task_name": "write name={value}",
    "paths": "data are in data_dir=PATH, results in hydra.run.dir=outputs/elsewhere",
    "paths.": "data are in data_dir=PATH, results in hydra.run.dir=outputs/elsewhere",
    "callbacks.model_checkpoint": "checkpoints are checkpoint.save_best and save_last; monitor and mode pick the best",
    "callbacks.model_checkpoint.": "checkpoints are checkpoint.save_best and save_last; monitor and mode pick the best",
    "callbacks.rich_progress_bar": "the progress bar is built in",
    "datamodule": "write data={value}",
    "loss": "write objective=[{value}]",
    "criterion": "write objective=[{value}]",
    "loggers": "write logger=[{value}]",
    "metric": "write metrics=[{value}]",
    "hook": "write hooks=[{value}]",
    "callback": "write callbacks=[{value}]",
    "lr_scheduler": "write scheduler={value}",
    "optim": "write optimizer={value}",
    "net": "write model={value}",
    "network": "write model={value}",
    "dataset": "write data={value}",
    "exp": "write experiment={value}",
    "accelerator": "write launch.accelerator={value}",
    "gpus": "write launch.devices={value}",
    "epochs": "write trainer.max_epochs={value}",
    "steps": "write trainer.max_steps={value}",
    "learning_rate": "write optimizer.lr={value}",
    "output_dir": "results land in hydra.run.dir=outputs/elsewhere",
    "amp": "write precision=bf16",
    "optimizer.learning_rate": "write optimizer.lr={value}",
    "trainer.epochs": "write trainer.max_epochs={value}",
    "trainer.max_epoch": "write trainer.max_epochs={value}",
}
# An option that names something else here.
OPTIONS = {
    "trainer": {
        "default": "leave it out: its keys are set one by one, such as trainer.max_epochs=5",
        "gpu": "write launch.accelerator=cuda",
        "cpu": "write launch.accelerator=cpu",
        "mps": "write launch.accelerator=mps",
        "ddp": "write strategy=ddp",
        "ddp_sim": "write strategy=ddp launch.accelerator=cpu launch.devices=2",
    },
    "launch": {"local": "leave it out: its keys are set one by one, such as launch.devices=2"},
    "debug": {
        "default": "write debug=one_batch", "fdr": "write debug=one_batch", "fast": "write debug=one_batch",
        "limit": "write debug=few_batches", "short": "write debug=few_epochs",
    },
    "model": {"mnist": "write model=mlp or model=lenet"},
    "callbacks": {
        "default": "checkpoints and the progress bar are built in: callbacks=[]",
        "none": "write callbacks=[]",
        "model_checkpoint": "write checkpoint.save_best=true; monitor and mode pick the best",
    },
    "logger": {"none": "write logger=[]", "many_loggers": "write logger=[tensorboard]"},
    "precision": {
        "16": "write precision=fp16", "32": "write precision=fp32", "16-mixed": "write precision=fp16",
        "bf16-mixed": "write precision=bf16", "32-true": "write precision=fp32", "float16": "write precision=fp16",
        "bfloat16": "write precision=bf16", "float32": "write precision=fp32", "half": "write precision=fp16",
        "64": "write precision=fp64", "64-true": "write precision=fp64", "float64": "write precision=fp64",
        "double": "write precision=fp64", "16-true": "write precision=fp16_true",
        "bf16-true": "write precision=bf16_true", "float8": "write precision=fp8", "amp": "write precision=bf16",
    },
    "hydra/launcher": {
        "joblib": "install it with pip install hydra-joblib-launcher; "
        "hydra/launcher=exp, exp's own, runs several at a time, too",
        "submitit_slurm": "write hydra/launcher=slurm",
        "submitit_local": "write hydra/launcher=slurm hydra.launcher.cluster=local",
        "submitit": "write hydra/launcher=slurm", "local": "leave it out: hydra/launcher=exp runs them on this machine",
    },
    "hydra/sweeper": {
        "optuna": "leave it out: sweep.sampler=tpe, or an interval, searches with Optuna",
        # Their packages, both 1.2.0, do not import with this Python and these versions.
        "ax": "leave it out: sweep.sampler=gp searches by a Gaussian process",
        "nevergrad": "leave it out: sweep.sampler=cmaes, or tpe, searches",
    },
    "strategy": {"dp": "write strategy=ddp", "none": "write strategy=auto"},
}  # fmt: skip


def cure_of_key(key: str, value: str) -> str | None:
    """What to write instead of a key that is called otherwise here; None of any other key."""
    # Lightning's word for what torch, and exp, call cuda.
    value = "cuda" if key.endswith("accelerator") and value == "gpu" else value
    if key in KEYS:
        # Of a list that is one already, its own brackets are enough.
        template = KEYS[key].replace("[{value}]", "{value}") if value.startswith("[") else KEYS[key]
        return template.format(value=value, rest="")
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        beginning = ".".join(parts[:count]) + "."
        if beginning in KEYS:
            return KEYS[beginning].format(value=value, rest=key.removeprefix(beginning))
    return None


def cure_of_option(group: str, option: object) -> str | None:
    """What to write instead of an option that is something else here; None of any other option."""
    return OPTIONS[group][str(option)] if group in OPTIONS and str(option) in OPTIONS[group] else None
