"""Which jobs go together, and the key that forbids it of the others."""

import subprocess
import sys

import pytest

from exp import compose
from exp.check.plan import resolve
from exp.sweeps.stacking import groups, obstacle, signature


def plain(*overrides):
    return resolve(compose(overrides=list(overrides))).plain


def test_jobs_go_together_that_differ_in_what_a_member_has_for_itself():
    jobs = [
        plain(),
        plain("seed=5", "optimizer.lr=0.1", "name=other", "tags=[x]"),
        plain("optimizer=sgd", "scheduler=cosine", "trainer.gradient_clip_val=1.0"),
        plain("objective.cross_entropy.weight=2.0", "objective.cross_entropy.loss.label_smoothing=0.1"),
        plain("+initialisation={Linear.weight: {name: normal, std: 0.02}}"),
        plain("model.layers.hidden.out_features=128"),
        plain("data.batch_size=32"),
        plain("data.batch_size=32", "seed=1"),
        plain("callbacks=[early_stopping]"),
    ]
    found = groups(jobs)
    assert found.stacked == ((0, 1, 2, 3, 4), (6, 7))
    assert found.reasons == {
        5: "no other job has the same model, data, objective and length",
        8: "callbacks.early_stopping cannot be stacked: it acts on one run",
    }


def test_a_stack_is_split_as_evenly_as_it_goes():
    job = plain()
    assert groups([job] * 10, most=4).stacked == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert groups([job] * 4, most=4).stacked == ((0, 1, 2, 3),)


def test_rates_of_dropouts_differ_within_a_stack_and_what_a_program_names_does_not():
    assert signature(plain("model=mlp")) == signature(plain("model=mlp", "model.constants.dropout=0.4"))
    assert signature(plain("model=mlp")) != signature(plain("model=mlp", "model.constants.width=128"))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.max_time=60"], "trainer.max_time"),
        (["strategy=ddp"], "strategy.name"),
        (["launch.accelerator=cuda"], "launch.accelerator"),
        (["precision=fp16"], "precision.word"),
        (["optimizer=lbfgs"], "optimizer"),
        (["runtime.non_finite=skip"], "runtime.non_finite"),
        (["trainer.limit_train_batches=1"], "trainer.limit_train_batches"),
        (["trainer.max_epochs=null", "trainer.max_steps=10"], "trainer.max_epochs"),
        (["+hooks=nan_guard"], "hooks.nan_guard"),
        (["logger=[tensorboard,csv]"], "logger.csv"),
        (["metric_stages=[train,val]"], "metric_stages"),
        (["hooks.throughput.peak_flops=1e12"], "hooks.throughput.peak_flops"),
        (["checkpoint.keep=3"], "checkpoint.keep"),
        (["+freeze.unfreeze={1: ['head.*']}"], "freeze.unfreeze"),
        (["scheduler=plateau", "scheduler.interval=step"], "scheduler.interval"),
        (["phases=[body_and_head]"], "phases.head"),
    ],
)
def test_the_key_that_forbids_a_stack_is_named(overrides, key):
    found = obstacle(resolve(compose(overrides=overrides)).plain)
    assert found.startswith(f"{key} cannot be stacked: "), found
    assert "\n" not in found


def test_torch_is_not_imported_for_it():
    program = "import sys, exp.sweeps.stacking; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
