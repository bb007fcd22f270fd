"""Tests of metrics of several heads, with one or several values, compared with torchmetrics."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torchmetrics import classification, regression

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.errors import ConfigError, ExpError, RunError
from exp.objectives.measures import as_measure

T, R, OWN = "torchmetrics.classification", "torchmetrics.regression", "exp.objectives.metrics"
pytestmark = pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
TERM = "{_target_: exp.objectives.objective.Term, loss: {_target_: %s}, output: %s, target: %s}"
CE = "exp.objectives.terms.CrossEntropy"
TERMS = {
    "digit": TERM % (CE, "digits", "digit"),
    "kind": TERM % (CE, "kinds", "kind"),
    "age": TERM % ("torch.nn.MSELoss", "years", "age"),
}
KINDS = "output: kinds, target: kind"
COLLECTED = f"acc: {{_target_: {T}.MulticlassAccuracy, num_classes: 3}}"
COLLECTED += f", f1: {{_target_: {T}.MulticlassF1Score, num_classes: 3, average: none}}"
RECALL = f"{{_target_: {T}.MulticlassRecall, num_classes: 3, average: none}}"
METRICS = {
    "digit": f"{{_target_: {OWN}.Accuracy, num_classes: 10, average: none, output: digits, target: digit}}",
    "kind": f"{{_target_: {T}.MulticlassF1Score, num_classes: 3, {KINDS}}}",
    "area": f"{{_target_: {T}.MulticlassAUROC, num_classes: 3, {KINDS}}}",
    "age": f"{{_target_: {R}.MeanAbsoluteError, output: years, target: age}}",
    "line": f"{{_target_: {R}.PearsonCorrCoef, output: years, target: age}}",
    "rank": f"{{_target_: {R}.SpearmanCorrCoef, output: years, target: age}}",
    "both": f"{{_target_: torchmetrics.MetricCollection, metrics: {{{COLLECTED}}}, {KINDS}}}",
    "recall": f"{{_target_: torchmetrics.wrappers.ClasswiseWrapper, metric: {RECALL}, labels: [a, b, c], {KINDS}}}",
    "mean": "{_target_: torchmetrics.MeanMetric, inputs: {value: years, weight: side}}",
}
COMMON = [
    "data={_target_: exp.data.data.Data, dataset: {_target_: heads.Rows}, parts: {train: 0.5, val: 0.25, test: 0.25}}",
    *("data.inputs={x: {shape: [6], dtype: float64}}", "data.batch_size=7", "precision=fp64"),
    *("model={_target_: heads.Heads}", "security.allow=[heads]", "objective=[]", "metrics=[]", "hooks=[]"),
    *("callbacks=[]", "optimizer=sgd", "optimizer.lr=0.05", "trainer.max_epochs=2"),
    *("trainer.enable_progress_bar=false", *(f"+objective.{name}={node}" for name, node in TERMS.items())),
]  # fmt: skip
ALL = [f"+metrics.{name}={node}" for name, node in METRICS.items()]
STAGES = "metric_stages=[train,val,test]"


@pytest.fixture(autouse=True)
def importable(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def by_hand(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the metrics of the validation split, each from one call of torchmetrics."""
    module = importlib.import_module("heads")
    network = module.Heads().double()
    network.load_state_dict({name.removeprefix("network."): value for name, value in state.items()})
    split = plan(resolve(exp.compose(COMMON))).data.part("val")
    values = {name: torch.stack([split[place][name] for place in range(len(split))]) for name in split[0]}
    with torch.no_grad():
        values |= network(values["x"])
    digit = classification.MulticlassAccuracy(num_classes=10, average=None)(values["digits"], values["digit"])
    recall = classification.MulticlassRecall(num_classes=3, average=None)(values["kinds"], values["kind"])
    several = classification.MulticlassF1Score(num_classes=3, average=None)(values["kinds"], values["kind"])
    found = {f"digit/val/{place}": number for place, number in enumerate(digit)}
    found |= {f"recall/val/multiclassrecall_{name}": number for name, number in zip("abc", recall, strict=True)}
    found |= {f"both/val/f1/{place}": number for place, number in enumerate(several)}
    found |= {
        "kind/val": classification.MulticlassF1Score(num_classes=3)(values["kinds"], values["kind"]),
        "area/val": classification.MulticlassAUROC(num_classes=3)(values["kinds"], values["kind"]),
        "mean/val": values["years"][values["side"] == 1].mean(),
        "age/val": (values["years"] - values["age"]).abs().mean(),
        "both/val/acc": classification.MulticlassAccuracy(num_classes=3)(values["kinds"], values["kind"]),
        "line/val": regression.PearsonCorrCoef()(values["years"], values["age"]),
        "rank/val": regression.SpearmanCorrCoef()(values["years"], values["age"]),
    }
    return {tag: float(number) for tag, number in found.items()}


@pytest.mark.numeric
def test_each_head_has_its_metrics() -> None:
    report = exp.fit(exp.compose([*COMMON, *ALL, "monitor=digit/val/3", "mode=max"]))
    state = torch.load(Path(report.directory) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    found = {tag: value for tag, value in report.metrics.items() if "/val" in tag and not tag.startswith("loss/")}
    assert found == pytest.approx(by_hand(state), abs=1e-6)
    written = json.loads((Path(report.directory) / "report.json").read_text())
    assert written["best"]["metric"] == "digit/val/3"
    assert {tag for tag in written["metrics"] if tag.startswith("digit/test")} == {f"digit/test/{n}" for n in range(10)}


@pytest.mark.numeric
def test_ranks_with_uneven_shares_equal_one_process(ranks) -> None:
    lines = [*COMMON, *ALL, STAGES, "test=true"]
    alone = ranks.train(*lines)
    distributed = ("strategy=ddp", "strategy.find_unused_parameters=true", "launch.devices=2", "launch.accelerator=cpu")
    both = ranks.train(*lines, *distributed, ranks=2)
    tags = {tag for tag in alone.values if tag.partition("/")[0] in METRICS}
    assert len({tag.partition("/")[0] for tag in tags}) == len(METRICS)
    for tag in tags:
        assert both.values[tag] == pytest.approx(alone.values[tag], abs=1e-6), tag


@pytest.mark.numeric
def test_a_resumed_run_measures_the_whole_epoch() -> None:
    lines = [*COMMON, *ALL, STAGES, "test=false"]
    whole = exp.fit(exp.compose([*lines, "hydra.run.dir=outputs/whole"]))
    # The run has 10 steps in epochs of 5.
    half = ["hydra.run.dir=outputs/half", "checkpoint.every_n_steps=7"]
    half += ["+callbacks.fails={_target_: heads.Fails, at: 9}"]
    with pytest.raises(ExpError, match="at step 9"):
        exp.fit(exp.compose([*lines, *half]))
    rest = exp.fit(exp.compose([*lines, "hydra.run.dir=outputs/rest", "resume=outputs/half/checkpoints/last.ckpt"]))
    tags = [tag for tag in whole.metrics if tag.partition("/")[0] in METRICS]
    for tag in tags:
        assert rest.metrics[tag] == pytest.approx(whole.metrics[tag], abs=1e-9), tag


def resumed_calibration_error(rank) -> float:
    output = torch.tensor([[3.0, 1, 0], [0, 1, 0.5], [2, 0, 1], [1, 0.5, 0.25]], dtype=torch.float64).softmax(1)
    values = {"output": output, "target": torch.tensor([0, 2, 0, 1])}
    first, second = (as_measure("it", classification.MulticlassCalibrationError(num_classes=3)) for _ in range(2))
    first.update({name: value[rank.global_rank : 2 : 2] for name, value in values.items()})
    second.restore(first.states(), rank=rank.global_rank, ranks=2)
    second.update({name: value[2 + rank.global_rank :: 2] for name, value in values.items()})
    by_hand = classification.MulticlassCalibrationError(num_classes=3, sync_on_compute=False)
    return float(second.compute()[""] - by_hand(values["output"], values["target"]))


@pytest.mark.numeric
def test_lists_of_float32_go_on_over_two_ranks(ranks) -> None:
    assert ranks.call(resumed_calibration_error) == pytest.approx([0.0, 0.0], abs=1e-6)


FAIR = f"{{_target_: {T}.BinaryFairness, num_groups: 3, inputs: {{preds: sided, target: side, groups: kind}}}}"
CONFUSION = f"{{_target_: {T}.MulticlassConfusionMatrix, num_classes: 3, {KINDS}}}"
CURVE = f"{{_target_: {T}.MulticlassPrecisionRecallCurve, num_classes: 3, {KINDS}}}"
ERRORS = [
    ("metrics.kind.output=kids", "metrics.kind.output", "Did you mean kinds?"),
    ("+metrics.mean.inputs.weigth=side", "metrics.mean.inputs.weigth", "Did you mean weight?"),
    ("+metrics.x={_target_: torchmetrics.CatMetric, inputs: {value: age}}", "metrics.x", "the same length"),
    ("+metrics.x={_target_: torchmetrics.CatMetric}", "metrics.x", "metrics.x.inputs={value: ...}"),
    ("metrics.kind.output=output", "metrics.kind.output", "the metric. Set metrics.kind.output to one of digits"),
    ("metrics.kind.num_classes=4", "metrics.kind.num_classes", "Write num_classes: 3"),
    ("metrics.kind._target_=exp.objectives.metrics.Accuracy;metrics.kind.target=age", "metrics.kind", "dtype float64"),
    (f"+metrics.x={CONFUSION}", "metrics.x", "of shape [3, 3]"),
    (f"+metrics.x={FAIR}", "metrics.x", "counts samples under wrong groups"),
    (f"+metrics.x={CURVE}", "metrics.x", "MulticlassPrecisionRecallCurve, which returns"),
    (f"+metrics.x={{_target_: {R}.KLDivergence, reduction: none, output: kinds, target: kinds}}", "metrics.x", "mean"),
    ("+metrics.kind.sync_on_compute=false", "metrics.kind.sync_on_compute", "each rank has another value"),
    ("monitor=recall/val/multiclassrecall_a;mode=min", "mode", "a higher recall/val/multiclassrecall_a is better"),
    ("metrics.recall.labels=[a,b]", "metrics.recall.labels", "2 labels; expected 3 labels, one for each value"),
    ("monitor=both/val/f1;mode=max", "monitor", "both/val/f1/2"),
    ("scheduler=plateau;scheduler.monitor=recall/val/a;scheduler.mode=max", "scheduler.monitor", "Did you mean"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "words"), ERRORS)
def test_the_check_refuses_wrong_metrics(overrides, key, words) -> None:
    with pytest.raises(ConfigError) as raised:
        exp.validate(exp.compose([*COMMON, *ALL, *overrides.split(";")]))
    (error,) = raised.value.errors
    assert error.key == key
    assert words in str(error)
    assert not Path("outputs").exists()


@pytest.mark.parametrize("gives", ["vector", "mapping", "matrix"])
def test_the_check_calls_no_user_metric(gives) -> None:
    own = f"+metrics.own={{_target_: heads.Own, gives: {gives}, output: years, target: age}}"
    config = exp.compose([*COMMON, own, "trainer.max_epochs=1", "test=false"])
    exp.validate(config)
    if gives == "matrix":
        with pytest.raises(RunError, match=r"metrics.own: Own returns a tensor of shape \[2, 2\]; expected a number"):
            exp.fit(config)
        return
    found = exp.fit(config).metrics
    names = ["own/val/0", "own/val/1"] if gives == "vector" else ["own/val/least", "own/val/most"]
    assert [found[name] for name in names] == [1.0, 2.0]


@pytest.mark.numeric
@pytest.mark.parametrize("node", [METRICS["area"], METRICS["recall"], METRICS["line"]])
def test_metrics_of_half_precision_outputs_are_in_full(node) -> None:
    config = exp.compose([*COMMON, f"+metrics.it={node}"])
    (measure,) = plan(resolve(config)).metrics.values()
    values = {"kinds": torch.randn(31, 3).bfloat16(), "kind": torch.arange(31) % 3}
    values |= {"years": torch.randn(31).bfloat16(), "age": torch.randn(31)}
    with torch.autocast("cpu", torch.bfloat16):
        measure.update(measure.read(values))
    found = measure.compute()
    measure.metric.reset()
    measure.update({name: value.float() if value.is_floating_point() else value for name, value in values.items()})
    assert found == measure.compute()
    assert all(one.dtype in (torch.float32, torch.float64) for one in found.values())
