"""What users of Hydra, Lightning, its template, Composer and transformers type, and what it is called here.

Each cure is a sentence whose words behind `Write` can be typed as they stand: a test types them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

# Of each of Lightning's, torch's and the template's words for a precision the option.
PRECISIONS = {
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16", "fp16-mixed": "fp16", "mixed": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16", "amp": "bf16", "auto": "bf16", "bf16": "bf16", "fp16": "fp16",
    "32": "fp32", "32-true": "fp32", "float32": "fp32", "float": "fp32", "single": "fp32", "fp32": "fp32",
    "64": "fp64", "64-true": "fp64", "float64": "fp64", "double": "fp64", "fp64": "fp64",
    "16-true": "fp16_true", "bf16-true": "bf16_true", "float8": "fp8", "transformer-engine": "fp8", "fp8": "fp8",
    "tf32": "tf32", "true": "bf16", "null": "fp32", "none": "fp32", "false": "fp32",
}  # fmt: skip
# Of each of Lightning's words for a strategy what is typed here.
STRATEGIES = {
    "ddp_spawn": "strategy=ddp", "ddp_fork": "strategy=ddp", "ddp_notebook": "strategy=ddp", "dp": "strategy=ddp",
    "ddp_find_unused_parameters_true": "strategy=ddp strategy.find_unused_parameters=true",
    "ddp_find_unused_parameters_false": "strategy=ddp", "ddp2": "strategy=ddp", "horovod": "strategy=ddp",
    "ddp_spawn_find_unused_parameters_true": "strategy=ddp strategy.find_unused_parameters=true",
    "ddp_sharded": "strategy=fsdp", "fsdp_native": "strategy=fsdp", "fsdp2": "strategy=fsdp",
    "fsdp_cpu_offload": "strategy=fsdp strategy.cpu_offload=true", "zero": "strategy=deepspeed",
    "deepspeed_stage_1": "strategy=deepspeed strategy.stage=1", "deepspeed_stage_2": "strategy=deepspeed",
    "deepspeed_stage_2_offload": "strategy=deepspeed strategy.offload_optimizer=true",
    "deepspeed_stage_3": "strategy=deepspeed strategy.stage=3",
    "deepspeed_stage_3_offload": "strategy=deepspeed strategy.stage=3 strategy.offload_parameters=true",
    "model_parallel": "strategy=tensor_parallel", "tp": "strategy=tensor_parallel", "pp": "strategy=pipeline",
    "single_device": "strategy=single", "none": "strategy=auto", "null": "strategy=auto", "fsdp": "strategy=fsdp",
}  # fmt: skip
NO_CHECKPOINTS = "Write checkpoint.save_best=false checkpoint.save_last=false test=false"
STAYS = "Leave it out: the working directory never changes, and results go to the run directory"
NO_LOGGING = "Leave it out: what a run says is in train.log of its directory"
CHECKPOINTS = "Leave it out: checkpoints/best.ckpt, by monitor and mode, and last.ckpt are in each run directory"
BUILT_IN = "Leave it out: it is built in"
BEST = "Write resume=outputs/NAME/DATE/TIME/checkpoints/best.ckpt"
NO_GPU = "Write launch.accelerator=cpu"
OTHER_DEVICES = "Leave it out: launch.accelerator is auto, cpu, gpu or mps"
WRITTEN = "Leave it out: values are written after logger.tensorboard.flush_seconds at the latest"
SAME_BATCH = "Leave it out: every part has batches of data.batch_size"
SHARED = "Leave it out: exp shares data.batch_size over the ranks by itself"

# The whole key, or its beginning where the key ends in a dot. Looked up from the longest to the shortest.
KEYS = {
    "ckpt_path": "Write resume={value}",
    "ckpt": "Write resume={value}",
    "checkpoint": "Write resume={value}",
    "checkpoint_path": "Write resume={value}",
    "resume_from_checkpoint": "Write resume={value}",
    "trainer.resume_from_checkpoint": "Write resume={value}",
    "trainer.ckpt_path": "Write resume={value}",
    "trainer.devices": "Write launch.devices={value}",
    "trainer.gpus": "Write launch.devices={value}",
    "trainer.num_nodes": "Write launch.nodes={value}",
    "trainer.accelerator": "Write launch.accelerator={value}",
    "trainer.strategy": "Write strategy={value}",
    "trainer.sync_batchnorm": "Write strategy=ddp strategy.sync_batchnorm={value}",
    "strategy.verify": "It is gone: leave it out, and hold a plan of your own against strategy=single",
    "runtime.warm": "Leave it out: exp.warm was removed",
    "runtime.cuda_graph": "Write runtime.compile=true runtime.compile_mode=reduce-overhead",
    "trainer.precision": "Write precision={value}",
    "trainer.amp_backend": "Leave it out: precision=bf16 or fp16 are torch's own",
    "trainer.callbacks": "Write +callbacks=early_stopping, or another option of callbacks",
    "trainer.logger": "Write logger=[{value}]",
    "trainer.default_root_dir": "Write hydra.run.dir={value}",
    "trainer.weights_save_path": "Write hydra.run.dir={value}",
    "trainer.enable_checkpointing": CHECKPOINTS,
    "trainer.checkpoint_callback": CHECKPOINTS,
    "trainer.fast_dev_run": "Write debug=one_batch",
    "trainer.deterministic": "Write runtime.deterministic={value}",
    "trainer.benchmark": "Write runtime.cudnn_benchmark={value}",
    "trainer.barebones": "Write hooks=[] metrics=[] logger=[] for little beside the training",
    "trainer.plugins": "Leave it out: what plug-ins do are the groups precision and strategy",
    "trainer.use_distributed_sampler": SHARED,
    "trainer.replace_sampler_ddp": SHARED,
    "trainer.auto_lr_find": "Leave it out: python -m exp.find_lr looks for the learning rate",
    "trainer.auto_scale_batch_size": "Leave it out: python -m exp.find_batch looks for the batch size",
    "trainer.track_grad_norm": "Leave it out: hooks.gradients, one of the default hooks, logs the norms",
    "trainer.progress_bar_refresh_rate": "Write trainer.enable_progress_bar=true",
    "trainer.enable_progress": "Write trainer.enable_progress_bar={value}",
    "trainer.weights_summary": "Write trainer.enable_model_summary=true",
    "trainer.seed": "Write seed={value}",
    **dict.fromkeys(("trainer.tpu_cores", "trainer.ipus", "trainer.hpus"), OTHER_DEVICES),
    # Of Lightning before 2.0.
    "trainer.amp_level": "Leave it out: precision=bf16 or fp16 are torch's own",
    "trainer.use_amp": "Write precision=fp16",
    "trainer.auto_select_gpus": "Leave it out: write CUDA_VISIBLE_DEVICES=0 before the command to choose a device",
    "trainer.distributed_backend": "Write strategy={value}",
    "trainer.num_processes": "Write strategy=ddp launch.accelerator=cpu launch.devices={value}",
    "trainer.flush_logs_every_n_steps": WRITTEN,
    "trainer.log_save_interval": WRITTEN,
    "trainer.row_log_interval": "Write trainer.log_every_n_steps={value}",
    "trainer.log_gpu_memory": "Leave it out: hooks.memory, one of the default hooks, logs it",
    "trainer.print_nan_grads": "Write +hooks=nan_guard",
    "trainer.terminate_on_nan": "Leave it out: runtime.non_finite=stop, the default, ends such a run",
    "trainer.move_metrics_to_cpu": "Leave it out: metrics stay where the network is",
    "trainer.multiple_trainloader_mode": "Leave it out: several inputs come from one loader, by data.inputs",
    "trainer.prepare_data_per_node": "Leave it out: a LightningDataModule of your own has it as an attribute",
    "trainer.process_position": "Leave it out: the progress bar has a place of its own",
    "trainer.show_progress_bar": "Write trainer.enable_progress_bar={value}",
    "trainer.reload_dataloaders_every_epoch": "Write trainer.reload_dataloaders_every_n_epochs=1",
    "trainer.stochastic_weight_avg": "Write +callbacks=ema, which averages the weights",
    "trainer.early_stop_callback": "Write +callbacks=early_stopping",
    "trainer.truncated_bptt_steps": "Leave it out: gradients go back through a whole sample",
    "trainer.train_percent_check": "Write trainer.limit_train_batches={value}",
    "trainer.val_percent_check": "Write trainer.limit_val_batches={value}",
    "trainer.test_percent_check": "Write trainer.limit_test_batches={value}",
    "trainer.overfit_pct": "Write trainer.overfit_batches={value}",
    "trainer.max_nb_epochs": "Write trainer.max_epochs={value}",
    "trainer.min_nb_epochs": "Write trainer.min_epochs={value}",
    "trainer.nb_sanity_val_steps": "Write trainer.num_sanity_val_steps={value}",
    "trainer.gradient_clip": "Write trainer.gradient_clip_val={value}",
    "trainer.lr": "Write optimizer.lr={value}",
    "trainer.learning_rate": "Write optimizer.lr={value}",
    "trainer.batch_size": "Write data.batch_size={value}",
    "trainer.num_epochs": "Write trainer.max_epochs={value}",
    "trainer.n_epochs": "Write trainer.max_epochs={value}",
    "trainer.epochs": "Write trainer.max_epochs={value}",
    "trainer.max_epoch": "Write trainer.max_epochs={value}",
    "model.optimizer": "Write optimizer={value}",
    "model.optimizer.": "Write optimizer.{rest}={value}",
    "model.scheduler": "Write scheduler={value}",
    "model.scheduler.": "Write scheduler.{rest}={value}",
    "model.lr": "Write optimizer.lr={value}",
    "model.learning_rate": "Write optimizer.lr={value}",
    "model.weight_decay": "Write optimizer.weight_decay={value}",
    "model.criterion": "Write objective=[{value}]",
    "model.loss": "Write objective=[{value}]",
    "model.net": "Write model={value}",
    "model.net.": "Leave it out: the layers are below model.layers, by name, as --cfg job --package model shows",
    "model.compile": "Write runtime.compile={value}",
    "compile": "Write runtime.compile={value}",
    "torch_compile": "Write runtime.compile={value}",
    "data.train_val_test_split": "Write 'data.parts={{train: 0.7, val: 0.15, test: 0.15}}', or numbers of samples",
    "data.data_dir": "Write data_dir={value}",
    "data.val_split": "Write data.parts.val={value}",
    "data.test_split": "Write data.parts.test={value}",
    "extras": "Leave it out: print_config and tags are keys at the top",
    "extras.": "Leave it out: print_config and tags are keys at the top",
    "extras.print_config": "Write print_config={value}",
    "hparams_search": "Write -m 'optimizer.lr=interval(1e-4,1e-1)' sweep.trials=20",
    "optimized_metric": "Write monitor={value}",
    "task_name": "Write name={value}",
    "experiment_name": "Write name={value}",
    "run_name": "Write name={value}",
    "paths": "Write data_dir=PATH for data, hydra.run.dir=PATH for results",
    "paths.": "Write hydra.run.dir={value}",
    "paths.data_dir": "Write data_dir={value}",
    "callbacks.model_checkpoint": CHECKPOINTS,
    "callbacks.model_checkpoint.": CHECKPOINTS,
    "callbacks.model_checkpoint.monitor": "Write monitor={value}",
    "callbacks.model_checkpoint.mode": "Write mode={value}",
    "callbacks.model_checkpoint.save_top_k": "Write checkpoint.keep={value}",
    "callbacks.model_checkpoint.save_last": "Write checkpoint.save_last={value}",
    "callbacks.model_checkpoint.every_n_train_steps": "Write checkpoint.every_n_steps={value}",
    "callbacks.rich_progress_bar": BUILT_IN,
    "callbacks.rich_progress_bar.": BUILT_IN,
    "datamodule": "Write data={value}",
    "datamodule.": "Write data.{rest}={value}",
    "loss": "Write objective=[{value}]",
    "criterion": "Write objective=[{value}]",
    "loggers": "Write logger=[{value}]",
    "metric": "Write metrics=[{value}]",
    "hook": "Write hooks=[{value}]",
    "callback": "Write callbacks=[{value}]",
    "lr_scheduler": "Write scheduler={value}",
    "lr_scheduler.": "Write scheduler.{rest}={value}",
    "optim": "Write optimizer={value}",
    "optim.": "Write optimizer.{rest}={value}",
    "net": "Write model={value}",
    "network": "Write model={value}",
    "arch": "Write model={value}",
    "dataset": "Write data={value}",
    "exp": "Write experiment={value}",
    "accelerator": "Write launch.accelerator={value}",
    "device": "Write launch.accelerator={value}",
    "devices": "Write launch.devices={value}",
    "num_devices": "Write launch.devices={value}",
    "gpus": "Write launch.devices={value}",
    "num_nodes": "Write launch.nodes={value}",
    "epochs": "Write trainer.max_epochs={value}",
    "num_epochs": "Write trainer.max_epochs={value}",
    "max_epochs": "Write trainer.max_epochs={value}",
    "steps": "Write trainer.max_steps={value}",
    "max_steps": "Write trainer.max_steps={value}",
    "learning_rate": "Write optimizer.lr={value}",
    "weight_decay": "Write optimizer.weight_decay={value}",
    "num_workers": "Write data.num_workers={value}",
    "random_seed": "Write seed={value}",
    "seed_everything": "Write seed={value}",
    "output_dir": "Write hydra.run.dir={value}",
    "log_dir": "Write hydra.run.dir={value}",
    "debug_mode": "Write debug=one_batch",
    # Of Composer's Trainer, Hugging Face's TrainingArguments, and scripts by hand.
    "algorithms": "Leave it out: what Composer's algorithms do are callbacks such as ema, data.transforms and hooks",
    "save_folder": "Write hydra.run.dir={value}",
    "load_path": "Write resume={value}",
    "autoresume": "Write resume=auto",
    "save_steps": "Write checkpoint.every_n_steps={value}",
    "save_interval": "Write checkpoint.every_n_steps={value}",
    **dict.fromkeys(("max_duration", "trainer.max_duration"), "Write trainer.max_epochs={value}"),
    "eval_interval": "Write trainer.check_val_every_n_epoch={value}",
    "eval_steps": "Write trainer.val_check_interval={value}",
    "val_every": "Write trainer.check_val_every_n_epoch={value}",
    **dict.fromkeys(("log_every", "log_interval", "logging_steps"), "Write trainer.log_every_n_steps={value}"),
    **dict.fromkeys(
        ("grad_accum", "gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"),
        "Write trainer.accumulate_grad_batches={value}",
    ),
    "device_train_microbatch_size": "Write trainer.accumulate_grad_batches=2, or runtime.out_of_memory=halve",
    **dict.fromkeys(
        ("train_batch_size", "global_train_batch_size", "per_device_train_batch_size", "bs"),
        "Write data.batch_size={value}, of the whole batch",
    ),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size", "val_batch_size"), SAME_BATCH),
    "num_train_epochs": "Write trainer.max_epochs={value}",
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val"),
        "Write trainer.gradient_clip_val={value}",
    ),
    "wd": "Write optimizer.weight_decay={value}",
    "warmup_steps": "Write scheduler.warmup_steps={value}",
    "early_stopping": "Write +callbacks=early_stopping",
    "patience": "Write +callbacks=early_stopping callbacks.early_stopping.patience={value}",
    "use_wandb": "Write logger=[tensorboard,wandb]",
    **dict.fromkeys(("wandb.tags", "logger.wandb.tags", "logger.mlflow.tags"), "Write tags={value}"),
    "logger.mlflow.experiment_name": "Write logger.mlflow.experiment={value}",
    "wandb.": "Write +logger=wandb logger.wandb.{rest}={value}",
    **dict.fromkeys(("cuda", "use_cuda"), "Write launch.accelerator=gpu"),
    "gpu": "Write launch.accelerator=gpu launch.devices=[{value}]",
    "workers": "Write data.num_workers={value}",
    **dict.fromkeys(("data.root", "data.path"), "Write data.dataset.path={value}"),
    "model.pretrained": "Leave it out: weights.from=FILE starts from weights",
    "checkpoint.monitor": "Write monitor={value}",
    "checkpoint.mode": "Write mode={value}",
    "checkpoint.save_top_k": "Write checkpoint.keep={value}",
    "profile": "Write trainer.profiler=simple",
    "verbose": NO_LOGGING,
    "fp16": "Write precision=fp16",
    "bf16": "Write precision=bf16",
    "amp": "Write precision=bf16",
    "optimizer.learning_rate": "Write optimizer.lr={value}",
    "hydra.job.name": "Write name={value}",
    "hydra.job.chdir": STAYS,
    "hydra.job.env_set": "Leave it out: write NAME=value before the command, or in a file .env",
    "hydra.job.env_copy": "Leave it out: write NAME=value before the command, or in a file .env",
    "hydra.output_subdir": "Leave it out: config.yaml and overrides.yaml are in each run directory",
    "hydra.verbose": NO_LOGGING,
    "hydra.job_logging": NO_LOGGING,
    "hydra.hydra_logging": NO_LOGGING,
    "hydra.sweeper.n_trials": "Write sweep.trials={value}",
    "hydra.sweeper.n_jobs": "Write sweep.jobs={value}",
    "hydra.sweeper.max_batch_size": "Write sweep.jobs={value}",
    "hydra.launcher.n_jobs": "Write sweep.jobs={value}",
    "hydra.sweeper.storage": "Write sweep.storage={value}",
    "hydra.sweeper.direction": "Write mode=min, or monitor=accuracy/val mode=max",
    "hydra.sweeper.study_name": "Write name={value}",
    "hydra.sweeper.sampler": "Write sweep.sampler=tpe, or grid, random, gp, cmaes, nsga2, qmc",
    "hydra.sweeper.sampler.": "Write sweep.sampler=tpe, or grid, random, gp, cmaes, nsga2, qmc",
}
# What a value of such a key, or of one that is there, says that another does not.
OFF = ("false", "0", "null", "none")
VALUES: Mapping[str, Mapping[str, str]] = {
    "trainer.precision": {word: f"Write precision={option}" for word, option in PRECISIONS.items()},
    "trainer.strategy": {word: f"Write {typed}" for word, typed in STRATEGIES.items()},
    "trainer.distributed_backend": {word: f"Write {typed}" for word, typed in STRATEGIES.items()},
    **{
        f"trainer.{name}": dict.fromkeys(OFF, "Leave it out: it is off")
        for name in ("early_stop_callback", "stochastic_weight_avg", "reload_dataloaders_every_epoch", "use_amp")
    },
    "trainer.devices": {"-1": "Write launch.devices=auto", "all": "Write launch.devices=auto"},
    "trainer.gpus": {"-1": "Write launch.devices=auto", "0": "Write launch.accelerator=cpu"},
    "devices": {"-1": "Write launch.devices=auto"},
    "gpus": {"-1": "Write launch.devices=auto", "0": "Write launch.accelerator=cpu"},
    "trainer.accelerator": {"tpu": "Write launch.accelerator=auto", "ddp": "Write strategy=ddp"},
    "trainer.logger": {
        **dict.fromkeys(OFF, "Write logger=[]"), "true": "Leave it out: TensorBoard is the default",
    },
    "trainer.callbacks": dict.fromkeys(("null", "[]", "none"), "Write callbacks=[]"),
    "trainer.enable_checkpointing": dict.fromkeys(OFF, NO_CHECKPOINTS),
    "trainer.checkpoint_callback": dict.fromkeys(OFF, NO_CHECKPOINTS),
    "trainer.fast_dev_run": dict.fromkeys(OFF, "Leave it out: a run is whole unless debug=one_batch says otherwise"),
    "trainer.deterministic": {"warn": "Write runtime.deterministic=true", "null": "Write runtime.deterministic=false"},
    "runtime.cuda_graph": dict.fromkeys(OFF, "Leave it out: it was removed"),
    "trainer.barebones": dict.fromkeys(OFF, "Leave it out: it is off"),
    "trainer.sync_batchnorm": dict.fromkeys(OFF, "Leave it out: it is off"),
    "trainer.progress_bar_refresh_rate": {"0": "Write trainer.enable_progress_bar=false"},
    "trainer.weights_summary": dict.fromkeys(OFF, "Write trainer.enable_model_summary=false"),
    "trainer.default_root_dir": {"null": "Leave it out: results go to outputs/"},
    "hydra.sweeper.direction": {"minimize": "Write mode=min", "maximize": "Write monitor=accuracy/val mode=max"},
    **{
        key: {"true": "Write resume=auto", "last": "Write resume=auto", "latest": "Write resume=auto", "best": BEST}
        for key in ("resume", "ckpt_path", "trainer.ckpt_path", "trainer.resume_from_checkpoint", "load_path")
    },
    "seed": dict.fromkeys(("-1", "random", "null", "none"), "Write seed=0, or another number: a run can be repeated"),
    **{
        key: dict.fromkeys(OFF, "Leave it out: it is off")
        for key in ("early_stopping", "use_wandb", "profile", "verbose", "autoresume", "model.pretrained")
    },
    **{
        key: {"true": "Write launch.accelerator=gpu", **dict.fromkeys(("false", "none", "null"), NO_GPU)}
        for key in ("cuda", "use_cuda", "gpu")
    },
    "hydra.job.chdir": {},
    "data.sampler": {
        "weighted": "Write data.sampler=balanced", "weightedrandomsampler": "Write data.sampler=balanced",
        "random": "Write data.shuffle=true", "shuffle": "Write data.shuffle=true",
        "randomsampler": "Write data.shuffle=true", "sequential": "Write data.shuffle=false",
        "sequentialsampler": "Write data.shuffle=false", "none": "Write data.sampler=null",
    },
    "model.optimizer": {},
}  # fmt: skip
# Composer's times, `10ep` and `100ba`: of a key what an epoch's count is here, and what a step's.
TIME = re.compile(r"(\d+)(ep|ba)")
TIMES: Mapping[str, Mapping[str, str]] = {
    **{
        key: {"ep": "Write trainer.max_epochs={count}", "ba": "Write trainer.max_epochs=-1 trainer.max_steps={count}"}
        for key in ("max_duration", "trainer.max_duration")
    },
    "eval_interval": {
        "ep": "Write trainer.check_val_every_n_epoch={count}", "ba": "Write trainer.val_check_interval={count}",
    },
    "save_interval": {
        "ep": "Leave it out: each epoch's end is saved", "ba": "Write checkpoint.every_n_steps={count}",
    },
}  # fmt: skip
# An option that names something else here.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "default": "Leave it out: its keys are set one by one, such as trainer.max_epochs=5",
        "gpu": "Write launch.accelerator=gpu",
        "cuda": "Write launch.accelerator=cuda",
        "cpu": "Write launch.accelerator=cpu",
        "mps": "Write launch.accelerator=mps",
        "ddp": "Write strategy=ddp",
        "fsdp": "Write strategy=fsdp",
        "ddp_sim": "Write strategy=ddp launch.accelerator=cpu launch.devices=2",
    },
    "launch": {"local": "Leave it out: its keys are set one by one, such as launch.devices=2"},
    "debug": {
        "default": "Write debug=one_batch", "fdr": "Write debug=one_batch", "fast": "Write debug=one_batch",
        "fast_dev_run": "Write debug=one_batch", "true": "Write debug=one_batch", "True": "Write debug=one_batch",
        "limit": "Write debug=few_batches", "short": "Write debug=few_epochs", "step": "Write debug=one_batch",
    },
    "model": {
        "mnist": "Write model=lenet", "simple_dense_net": "Write model=mlp", "linear": "Write model=mlp",
        **dict.fromkeys(("cnn", "convnet", "conv", "conv2d", "lenet5", "simple_cnn", "small_cnn", "vgg"),
                        "Write model=lenet"),
        **dict.fromkeys(("dense", "fc", "ffn", "feedforward", "perceptron", "mlp_mixer", "logistic", "nn", "dnn"),
                        "Write model=mlp"),
        **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), "Write model=resnet"),
        **dict.fromkeys(("gpt2", "nanogpt", "mingpt", "llm"), "Write experiment=gpt"),
        **dict.fromkeys(("bert", "vit", "encoder"), "Write experiment=transformer"),
        "lstm": "Write experiment=lstm", "gru": "Write experiment=gru",
    },
    "data": {
        "cifar10": "Write data=images data.dataset.path=FOLDER, with a folder of pictures for each class",
        "cifar": "Write data=images data.dataset.path=FOLDER, with a folder of pictures for each class",
        "imagenet": "Write data=images data.dataset.path=FOLDER, with a folder of pictures for each class",
        "imagefolder": "Write data=images data.dataset.path=FOLDER, with a folder of pictures for each class",
        "pandas": "Write data=csv data.dataset.path=FILE data.dataset.target=COLUMN",
        "huggingface": "Write data=hf data.dataset.path=NAME data.dataset.target=COLUMN",
    },
    "callbacks": {
        "default": "Write callbacks=[]: checkpoints and the progress bar are built in",
        "none": "Write callbacks=[]",
        "model_checkpoint": "Leave it out: checkpoints/best.ckpt, by monitor and mode, is in each run directory",
        "rich_progress_bar": "Leave it out: the progress bar is built in",
        "lr_monitor": "Leave it out: optimizer/lr is logged",
        "learning_rate_monitor": "Leave it out: optimizer/lr is logged",
    },
    "logger": {"none": "Write logger=[]", "many_loggers": "Write logger=[tensorboard,csv]"},
    "precision": {word: f"Write precision={option}" for word, option in PRECISIONS.items() if word != option},
    "scheduler": {
        "none": "Write scheduler=constant", "null": "Write scheduler=constant",
        "reduce_on_plateau": "Write scheduler=plateau", "reduce_lr_on_plateau": "Write scheduler=plateau",
        "cosine_annealing": "Write scheduler=cosine", "step_lr": "Write scheduler=step",
        **dict.fromkeys(("warmup", "linear_warmup", "constant_with_warmup"),
                        "Write scheduler=constant scheduler.warmup_steps=100"),
        **dict.fromkeys(("warmup_cosine", "cosine_warmup", "cosine_with_warmup"),
                        "Write scheduler=cosine scheduler.warmup_steps=100"),
    },
    "objective": {
        "ce": "Write objective=[cross_entropy]", "crossentropyloss": "Write objective=[cross_entropy]",
        "mseloss": "Write objective=[mse]", "bceloss": "Write objective=[bce]", "smooth_l1": "Write objective=[huber]",
        "mae": "Write objective=[l1]", "nllloss": "Write objective=[nll]",
    },
    "metrics": {"acc": "Write metrics=[accuracy]", "none": "Write metrics=[]", "mse": "Write metrics=[rmse]"},
    "hydra/launcher": {
        "joblib": "Leave it out: hydra/launcher=exp runs several at a time; joblib's is pip install "
        "hydra-joblib-launcher",
        "submitit_slurm": "Write hydra/launcher=slurm",
        "submitit_local": "Write hydra/launcher=slurm hydra.launcher.cluster=local",
        "submitit": "Write hydra/launcher=slurm", "local": "Leave it out: hydra/launcher=exp runs them on this machine",
        "rq": "Leave it out: hydra/launcher=exp runs them on this machine, slurm and ray on a cluster",
    },
    "hydra/sweeper": {
        "optuna": "Leave it out: sweep.sampler=tpe, or an interval, searches with Optuna",
        # Their packages, both 1.2.0, do not import with this Python and these versions.
        "ax": "Write sweep.sampler=gp, which searches by a Gaussian process",
        "nevergrad": "Write sweep.sampler=cmaes, or tpe",
    },
    "strategy": {word: f"Write {typed}" for word, typed in STRATEGIES.items() if typed != f"strategy={word}"},
}  # fmt: skip
# Flags of LightningCLI and of scripts with argparse that are no value of a config.
FLAGS_OF_OTHERS = {
    "--print_config": "Write --cfg job",
    "--help_all": "Write --help",
    "--debug": "Write debug=one_batch",
    "--fast_dev_run": "Write debug=one_batch",
    "--resume": "Write resume=auto",
}
# The template's and Lightning's names for a tag, `val/acc_best` or `val_loss`.
TAG = re.compile(r"(train|val|valid|validation|test)[/_](\w+?)(?:_best|_epoch|_step)?")
MEASURES = {"acc": "accuracy"}


def cure_of_key(key: str, value: str) -> str | None:
    """What to write instead of a key that is called otherwise here; None of any other key, and of one that is there."""
    said = cure_of_value(key, value) if key in KEYS else None
    if said is not None:
        return said
    if key in KEYS:
        if KEYS[key].startswith("Write monitor="):
            value = tag_of(value)
        # Of a list that is one already, its own brackets are enough.
        template = KEYS[key].replace("[{value}]", "{value}") if value.startswith("[") else KEYS[key]
        return template.format(value=value, rest="")
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        beginning = ".".join(parts[:count]) + "."
        if beginning in KEYS:
            return KEYS[beginning].format(value=value, rest=key.removeprefix(beginning))
    return None


def cure_of_value(key: str, value: object) -> str | None:
    """What to write instead of a value that Lightning or torch has at a key, and exp calls otherwise; else None."""
    word = str(value).strip("'\"").lower()
    if key in TIMES and (time := TIME.fullmatch(word)):
        return TIMES[key][time[2]].format(count=time[1])
    return VALUES[key][word] if key in VALUES and word in VALUES[key] else None


def cure_of_flag(flag: str, value: str) -> str | None:
    """What to write instead of a flag of LightningCLI's that is no value of the config; None of any other flag."""
    if flag == "--config":
        return f"Write --config-name {PurePath(value).stem}, for conf/{PurePath(value).stem}.yaml"
    return "Write --cfg job" if flag.endswith(".help") else FLAGS_OF_OTHERS.get(flag)


def cure_of_option(group: str, option: object) -> str | None:
    """What to write instead of an option that is something else here; None of any other option."""
    return OPTIONS[group][str(option)] if group in OPTIONS and str(option) in OPTIONS[group] else None


def tag_of(value: str) -> str:
    """A tag as exp writes it, `accuracy/val`, for what the template or Lightning calls `val/acc_best`."""
    found = TAG.fullmatch(value.strip("'\""))
    if found is None:
        return value
    stage = "val" if found[1].startswith("val") else found[1]
    measure = MEASURES[found[2]] if found[2] in MEASURES else found[2]
    return f"{measure}/{stage}"
