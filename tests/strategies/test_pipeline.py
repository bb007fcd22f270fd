"""A network in the stages of several ranks trains what one process does, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

from exp.check.__main__ import main as check
from exp.run_report import read_report
from exp.strategies.pipeline import SCHEDULES, Pipeline
from exp.strategies.pipeline_stages import cut, joined, micro_batches, number_of, shares

pytestmark = pytest.mark.numeric

# 42 of 64 samples are left for the last batch of an epoch: a micro-batch is filled up.
RUN = (
    *("model=transformer", "optimizer=sgd", "optimizer.momentum=0.9", "trainer.gradient_clip_val=0.3"),
    *("trainer.max_epochs=null", "trainer.max_steps=30", "trainer.log_every_n_steps=1"),
    *("hooks=[gradients,memory]", "metric_stages=[train,val,test]", "trainer.limit_val_batches=2", "test=false"),
)
NARROW = ("model.constants.width=16", "model.constants.hidden=32")  # where nothing depends on the size
SINGLE = (*RUN, "strategy=single")
TWO = (*RUN, "strategy=pipeline", "launch.devices=2")


def different(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def require_same_run(one, other, *, tolerance):
    """Losses, gradients' norms, metrics of every stage, learning rates; weights and the optimizer's state."""
    assert different(one.losses, other.losses) < tolerance
    for tag, values in one.values.items():
        if not tag.startswith("memory/"):
            assert other.values[tag].keys() == values.keys(), tag
            assert different(values.values(), other.values[tag].values()) < 10 * tolerance, tag
    mine, yours = one.checkpoint(), other.checkpoint()
    assert list(mine["state_dict"]) == list(yours["state_dict"])
    for name, value in mine["state_dict"].items():
        torch.testing.assert_close(yours["state_dict"][name], value, rtol=0, atol=100 * tolerance)
    mine, yours = mine["optimizer_states"][0], yours["optimizer_states"][0]
    assert mine["param_groups"] == yours["param_groups"]
    assert mine["state"].keys() == yours["state"].keys()
    for index, state in mine["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(yours["state"][index][key], value, rtol=0, atol=100 * tolerance)


@pytest.mark.any_processor
def test_every_schedule_in_double_precision(ranks):
    # One epoch of 7 steps, its short last batch, and some of the next.
    run = ("precision=fp64", "data.batch_size=200", "trainer.max_steps=9", *NARROW)
    one = ranks.train(*SINGLE, *run)
    for schedule in SCHEDULES:
        wanted = (f"strategy.schedule={schedule}", "strategy.microbatches=4")
        many = ranks.train(*TWO, *run, *wanted, ranks=2)
        assert len(many.losses) == 9
        require_same_run(one, many, tolerance=1e-10)
        # A rank holds its own layers alone, and what it needs to train them.
        for part in ("parameters", "gradients", "optimizer"):
            mine, whole = (list(run.values[f"memory/{part}_mib"].values())[-1] for run in (many, one))
            assert mine < 0.6 * whole


@pytest.mark.any_processor
def test_data_times_pipeline(ranks):
    # An epoch is 11 steps, the last of one batch.
    changed = ("trainer.accumulate_grad_batches=2", "optimizer.weight_decay=0.1", "data.batch_size=60")
    changed += ("trainer.max_steps=14",)
    one = ranks.train(*SINGLE, *changed)
    mesh = (*changed, "launch.devices=4", "strategy.microbatches=4")
    pipeline = ranks.train(*RUN, *mesh, "strategy=pipeline", "strategy.stages=2", ranks=4)
    assert pipeline.report["world_size"] == 4
    require_same_run(one, pipeline, tolerance=1e-5)
    wanted = ("strategy=hybrid", "strategy.tensor=1", "strategy.pipeline=2")
    hybrid = ranks.train(*RUN, *mesh, *wanted, ranks=4)
    assert hybrid.losses == pipeline.losses


def test_characters_in_stages_that_the_config_names(ranks, text):
    # By SGD: AdamW makes a step of a rounding error where a gradient is next to nothing.
    short = (
        *(*text, "data.batch_size=8", "optimizer=sgd", "trainer.gradient_clip_val=1.0", "trainer.max_epochs=null"),
        *("trainer.max_steps=30", "test=false", "trainer.limit_val_batches=2", "hooks=[]"),
    )
    one = ranks.train(*short, "strategy=single")
    named = (
        "strategy.layers=[[tokens,positions],['blocks.0'],[blocks.1],[norm,head]]",
        "strategy.schedule=interleaved_1f1b",
    )
    two = ranks.train(*short, "strategy=pipeline", "launch.devices=2", *named, ranks=2)
    assert different(one.losses, two.losses) < 1e-5
    assert two.values["loss/val"][30] == pytest.approx(one.values["loss/val"][30], abs=1e-5)


@pytest.mark.any_processor
def test_batch_normalisation_in_one_micro_batch(ranks):
    run = [word.replace("transformer", "resnet") for word in TWO]
    one = ranks.train(*run, "strategy=single", "launch.devices=1", "precision=fp64", "trainer.max_steps=8")
    many = ("precision=fp64", "trainer.max_steps=8", "strategy.schedule=gpipe", "strategy.microbatches=1")
    require_same_run(one, ranks.train(*run, *many, ranks=2), tolerance=1e-10)


def test_half_precision_skips_a_step_in_all_stages(ranks):
    # So large a scale that the gradients of the first steps are infinite, of the last stage alone.
    fp16 = ("model=sequential", "optimizer=adamw", "precision=fp16", "precision.scaler.init_scale=1e9")
    one = ranks.train(*[word for word in SINGLE if "optimizer" not in word], *fp16)
    whole = ("strategy.schedule=gpipe", "strategy.microbatches=1")
    two = ranks.train(*[word for word in TWO if "optimizer" not in word], *fp16, *whole, ranks=2)
    for tag in ("precision/skipped_steps", "precision/loss_scale"):
        assert two.values[tag] == one.values[tag]
    assert one.values["precision/skipped_steps"][30] > 5
    assert different(one.losses, two.losses) < 1e-3


@pytest.mark.any_processor
def test_a_checkpoint_goes_on_and_goes_elsewhere(ranks):
    fp64 = ("precision=fp64", "data.batch_size=200", "checkpoint.every_n_steps=5", *NARROW)
    whole = ranks.train(*TWO, *fp64, "trainer.max_steps=10", ranks=2)
    half = ranks.train(*TWO, *fp64, "trainer.max_steps=5", ranks=2)
    path = half.directory / "checkpoints" / "last.ckpt"
    rest = ranks.train(*TWO, *fp64, "trainer.max_steps=10", f"resume={path}", ranks=2)
    assert half.losses + rest.losses == whole.losses
    last = whole.directory / "checkpoints" / "last.ckpt"
    evaluated = [
        ranks.train(*RUN, *fp64, "train=false", "test=true", f"resume={last}", *where, ranks=count).report["metrics"]
        for count, where in (
            (1, ("strategy=single",)),
            (1, ("strategy=layer_split",)),
            (2, ("strategy=pipeline", "launch.devices=2", "strategy.schedule=zbv_zero_bubble")),
        )
    ]
    for metrics in evaluated:
        assert metrics["loss/test"] == pytest.approx(evaluated[0]["loss/test"], abs=1e-12)
        assert metrics["accuracy/test"] == evaluated[0]["accuracy/test"]


@pytest.mark.any_processor
def test_from_the_command_line(tmp_path, commands):
    command = [
        *("strategy=pipeline", "launch.devices=2", "model=sequential"),
        *("trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=1", "test=false"),
        f"hydra.run.dir={tmp_path}/run",
    ]
    done = commands.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "run")
    assert (report.status, report.strategy, report.world_size) == ("completed", "pipeline", 2)


def _callback(kind, *options):
    """The words that add one of Lightning's callbacks."""
    return f"+callbacks.added={{{','.join([f'_target_:lightning.pytorch.callbacks.{kind}', *options])}}}"


@pytest.mark.any_processor
@pytest.mark.parametrize(("command", "key", "said"), [
    ("strategy.schedule=1f2b", "strategy.schedule", "1f1b"),
    ("strategy.microbatches=0", "strategy.microbatches", "1 or more"),
    ("strategy.microbatches=1", "strategy.microbatches", "one a stage, for 1f1b"),
    ("strategy.microbatches=1", "strategy.microbatches", "Write strategy.schedule=gpipe"),
    ("model=resnet", "strategy.microbatches", "(strategy.schedule=gpipe takes one)"),
    ("strategy.stages=3;launch.devices=2", "launch.devices", "multiple of 3"),
    ("strategy.stages_per_rank=2", "strategy.stages_per_rank", "1: 1f1b"),
    ("strategy.schedule=interleaved_1f1b;strategy.stages=3", "strategy.stages", "multiple of 2"),
    ("strategy.schedule=interleaved_1f1b;strategy.microbatches=7", "strategy.microbatches", "multiple of the 2"),
    ("launch.devices=1", "launch.devices", "2 or more"),
    ("launch.devices=8", "strategy.layers", "layers with parameters"),
    ("strategy.layers=[[hidden],[headd]]", "strategy.layers.1", "hidden2"),
    ("strategy.layers=[[hidden],[head]]", "strategy.layers", "no part for hidden2"),
    ("strategy.layers=[[head],[hidden,hidden2]]", "strategy.layers", "in the order in which the layers run"),
    ("strategy.layers=[hidden,head]", "strategy.layers", "expected a list, each a list of texts"),
    ("strategy.layers=[[hidden],[hidden2,hidden,head]]", "strategy.layers.1", "each layer in one part"),
    ("data.batch_size=2;strategy.microbatches=4", "data.batch_size", "4 or more"),
    ("model=resnet", "strategy.microbatches", "batch normalisation"),
    ("+optimizer.max_iter=1;optimizer._target_=torch.optim.LBFGS;~optimizer.betas;~optimizer.eps;"
     "~optimizer.weight_decay;~optimizer.amsgrad", "optimizer._target_", "updates each parameter"),
    ("runtime.compile=true;runtime.compile_backend=aot_eager", "runtime.compile", "stages are not compiled"),
    ("callbacks=[ema]", "callbacks.ema", "average of the weights"),
    ("phases=[body_and_head]", "phases", "one backward a step"),
    (_callback("ModelPruning", "pruning_fn:l1_unstructured"), "callbacks.added", "leave weights and optimizer"),
    (_callback("EMAWeightAveraging"), "callbacks.added", "average of the weights"),
    ("objective.cross_entropy.loss.ignore_index=3", "objective", "means over samples"),
])  # fmt: skip
def test_what_a_pipeline_cannot_do_is_said_before_it_starts(tmp_path, monkeypatch, capsys, command, key, said):
    monkeypatch.chdir(tmp_path)
    words = command.split(";")
    devices = [] if any(word.startswith("launch.devices") for word in words) else ["launch.devices=2"]
    assert check(["strategy=pipeline", *devices, *words]) == 2
    text = capsys.readouterr().err
    assert f"  {key}: " in text
    assert said in text


@pytest.mark.any_processor
def test_micro_batches_hold_each_sample_once():
    data = {"x": torch.arange(10.0).reshape(5, 2), "names": ["a"]}
    found = micro_batches(data, size=5, count=4)
    assert [piece.data["x"].shape for piece in found] == [(2, 2)] * 4
    assert [piece.size for piece in found] == [2, 2, 1, 0]
    held = torch.cat([cut(piece.data["x"], piece.size) for piece in found])
    assert torch.equal(held, data["x"])
    # Filled up with the last sample, which is a right input of the network.
    assert torch.equal(found[3].data["x"], data["x"][4:].expand(2, 2))
    pieces = shares(data, size=5, count=4)
    assert torch.equal(joined([piece["x"] for piece in pieces]), data["x"])
    assert len(shares(data, size=5, count=9)) == 5


@pytest.mark.any_processor
@pytest.mark.parametrize(("batch", "ranks", "least", "multiple", "expected"), [
    (64, 2, 2, 1, 8), (60, 2, 2, 1, 6), (61, 2, 2, 1, 2), (64, 4, 4, 4, 16), (60, 4, 4, 4, 12), (8, 4, 8, 1, 8),
])  # fmt: skip
def test_automatic_micro_batches_cut_a_share_without_a_rest(batch, ranks, least, multiple, expected):
    found = number_of("auto", batch_size=batch, ranks=ranks, least=least, multiple_of=multiple)
    assert found == expected


@pytest.mark.any_processor
def test_stages_go_round_the_ranks_or_down_and_up():
    assert Pipeline(schedule="interleaved_1f1b", stages=6).owners(3) == [0, 1, 2, 0, 1, 2]
    assert Pipeline(schedule="dualpipe_v", stages=6).owners(3) == [0, 1, 2, 2, 1, 0]


def collected_beside_nccl(rank):
    """What a strategy of NCCL ranks gathers of whole tensors on the CPU, and by which group."""
    import torch.distributed as dist

    from exp.strategies.pipeline import PipelineStrategy
    from exp.strategies.placement import Dimensions, Placement
    from exp.strategies.whole_state import Whole

    class Beside(PipelineStrategy):
        global_rank, is_global_zero = rank.global_rank, rank.global_rank == 0

    placed = Placement(
        strategy="pipeline", accelerator="cuda", backend="nccl", nodes=1, dimensions=Dimensions(pipeline=2)
    )
    strategy = Beside(placement=placed, plan=Pipeline(stages=2))
    strategy._make_groups()
    strategy.whole = {name: Whole(shape=torch.Size([2]), dtype=torch.float32) for name in ("part0", "part1")}
    found = strategy._collected({f"part{rank.global_rank}": torch.full((2,), float(rank.global_rank))})
    return (
        strategy.host_group is not None,
        dist.get_backend(strategy.host_group),
        {name: value.tolist() for name, value in found.items()},
    )


@pytest.mark.any_processor
def test_whole_checkpoints_are_gathered_over_the_cpu(ranks):
    """NCCL would gather them in the memory of rank 0's device. Here the ranks are on CPU, the groups as beside NCCL."""
    whole = {"part0": [0.0, 0.0], "part1": [1.0, 1.0]}
    assert ranks.call(collected_beside_nccl, ranks=2) == [(True, "gloo", whole), (True, "gloo", {})]


def sent_and_received(rank, *, directory):
    """What a rank's evaluations send and receive, in order: (is sent, which group, the other rank)."""
    import torch.distributed as dist

    from exp import run
    from exp.strategies import pipeline_stages

    seen = []

    class Watched:
        def __getattr__(self, name):
            return getattr(dist, name)

        def isend(self, tensor, *, dst, group):
            seen.append((True, group.group_name, dst))
            return dist.isend(tensor, dst=dst, group=group)

        def recv(self, tensor, *, src, group):
            seen.append((False, group.group_name, src))
            return dist.recv(tensor, src=src, group=group)

    pipeline_stages.dist = Watched()
    run.run(directory, rank=rank)
    return seen


def ends(orders, *, queue_of):
    """Whether all of it is sent where nothing is sent before it is received, and each queue of a rank keeps its order.

    What a rank sends waits for all that it has received before, of which it may be made.
    """
    done = [[False] * len(order) for order in orders]

    def is_ready(rank, place):
        _, group, other = orders[rank][place]
        return not any(
            not done[rank][earlier] and (not is_sent or (queue_of(name), to) == (queue_of(group), other))
            for earlier, (is_sent, name, to) in enumerate(orders[rank][:place])
        )

    def ready(rank, is_sent):
        places = range(len(orders[rank]))
        return [at for at in places if not done[rank][at] and orders[rank][at][0] == is_sent and is_ready(rank, at)]

    while True:
        for sender, receiver in ((0, 1), (1, 0)):
            pairs = [
                (one, other)
                for one in ready(sender, True)
                for other in ready(receiver, False)
                if orders[sender][one][1] == orders[receiver][other][1]
            ]
            if pairs:
                done[sender][pairs[0][0]] = done[receiver][pairs[0][1]] = True
                break
        else:
            return all(all(rank) for rank in done)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
@pytest.mark.any_processor
def test_two_ranks_that_send_to_each_other_do_not_wait_for_ever(ranks, schedule):
    """NCCL keeps the order of all that goes between two ranks by one group, and may send nothing before it is read."""
    short = ("trainer.max_steps=1", "trainer.limit_val_batches=1", "hooks=[]", "strategy.microbatches=4")
    directory = ranks.freeze(*TWO, *short, f"strategy.schedule={schedule}")
    orders = ranks.call(sent_and_received, ranks=2, directory=str(directory))
    assert len(orders[0]) == len(orders[1]) > 8
    assert ends(orders, queue_of=lambda group: group)
    if schedule == "interleaved_1f1b":
        assert not ends(orders, queue_of=lambda group: "one for both directions")
