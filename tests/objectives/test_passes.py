"""Tests of Passes, which lets terms run more than one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.errors import ConfigError, RunError
from exp.models.containers import SequentialModel
from exp.objectives.objective import Objective, Term
from exp.objectives.passes import Passes
from exp.objectives.penalties import R1
from exp.objectives.term import AbstractTerm

pytestmark = pytest.mark.numeric


def run(runner: Callable[..., Any], data: Any) -> dict[str, Any]:
    return {"input": data[0], "target": data[1], "output": runner(data[0])}


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Slope(nn.Module):
    """Loss of a user that needs gradients with respect to the inputs."""

    needs = ("input_gradients",)

    def forward(self, output: Tensor, target: Tensor, passes: Passes) -> Tensor:
        return passes.gradients(output, passes.data[0]).square().sum(1).mean()


def test_a_user_module_gets_passes() -> None:
    passes = Passes(network=mlp(), run=run, data=(sample(5, 4), sample(5, 3)))
    values = passes.run()
    for terms in ({"slope": Slope()}, {"slope": Term(loss=Slope())}):
        objective = Objective({"mse": nn.MSELoss(), **terms})
        assert objective.needs == {"input_gradients"}
        total, parts = objective(values, None, passes)
        torch.testing.assert_close(parts["slope"], R1()(values, None, passes).detach())
        torch.testing.assert_close(total, parts["mse"] + parts["slope"])


def test_unknown_and_unmet_needs_are_reported() -> None:
    class Wrong(Slope):
        needs = ("input_gradient",)

    with pytest.raises(ConfigError, match=r"objective.wrong.loss: the unknown need 'input_gradient' in Wrong.needs"):
        Objective({"wrong": Wrong()})
    with pytest.raises(RunError, match="the objective got no passes, but its terms have the needs input"):
        Objective({"r1": R1()})({"output": sample(1), "input": sample(1)})
    with pytest.raises(TypeError, match="abstract"):
        AbstractTerm()


def test_only_selects_terms() -> None:
    objective = Objective({"mse": nn.MSELoss(), "l1": Term(loss=nn.L1Loss(), weight=2.0), "r1": R1()})
    some = objective.only(["l1"])
    assert list(some.terms) == ["l1"]
    assert some.terms["l1"] is objective.terms["l1"]
    assert (some.needs, objective.needs) == (frozenset(), {"input_gradients"})
    values = {"output": sample(3, 2), "target": sample(3, 2) + 1}
    assert some(values)[0].item() == pytest.approx(2.0)
    with pytest.raises(
        RunError, match=r"the objective has no term 'mes'; expected one of mse, l1, r1\. Did you mean mse"
    ):
        objective.only(["mes"])


def test_inputs_become_leaves_of_a_copy() -> None:
    image, tokens, target = sample(2, 4), torch.tensor([1, 2]), sample(2, 3)
    passes = Passes(network=mlp(), run=run, data=(image, target))
    assert passes.data[0].requires_grad
    assert passes.data[0].is_leaf
    assert passes.data[1] is target
    assert not image.requires_grad
    named = {"image": image, "tokens": tokens, "target": target}
    passes = Passes(network=mlp(), run=run, data=named, inputs=("image", "tokens"))
    assert [name for name, value in passes.data.items() if value.requires_grad] == ["image"]
    assert passes.data["tokens"] is tokens
    assert Passes(network=mlp(), run=run, data=(image, target), inputs_require_grad=False).data[0] is image


def test_missing_gradients_are_reported() -> None:
    model = mlp()
    passes = Passes(network=model, run=run, data=(sample(2, 4), sample(2, 3)))
    values = passes.run()
    with pytest.raises(RunError, match=r"a tensor of dtype int64; expected a float.*embedding from the network"):
        passes.gradients(values["output"], torch.tensor([1, 2]))
    with pytest.raises(RunError, match="a tensor without a graph; expected an input of the network"):
        passes.gradients(values["output"], values["target"])
    with pytest.raises(RunError, match="of a tensor that depends on no input and on no parameter"):
        passes.gradients(sample(2), values["input"])
    with pytest.raises(RunError, match="with respect to an input that does not affect it"):
        passes.gradients(values["output"], sample(2).requires_grad_())


def test_embeddings_of_integers_have_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 1)

        def forward(self, input: Tensor) -> dict[str, Tensor]:
            embedded = self.embedding(input)
            return {"embedded": embedded, "output": self.head(embedded.tanh().mean(1))}

    tokens = torch.randint(10, (3, 6))
    passes = Passes(network=Words(), run=lambda runner, data: runner(data[0]), data=(tokens, tokens))
    assert R1(input="embedded")(passes.run(), None, passes).item() > 0


def test_gradients_of_several_values_are_returned() -> None:
    passes = Passes(network=mlp(), run=run, data=(sample(2, 4), sample(2, 3)))
    values = passes.run()
    first, second = passes.gradients(values["output"], [values["input"], passes.network[0].weight])
    assert (first.shape, second.shape) == ((2, 4), (8, 4))
    assert first.requires_grad
    assert not passes.gradients(values["output"], values["input"], create_graph=False).requires_grad


@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0)], ids=["float", "tensor"])
def test_a_loss_scale_prevents_underflow(scale: float | Tensor) -> None:
    model, x = mlp(), sample(4, 4)
    with torch.no_grad():  # slopes of about 1e-8, which float16 rounds to 0 without a scale
        model[0].weight.mul_(4e-4)
        model[2].weight.mul_(4e-4)
    exact = Passes(network=model, run=run, data=(x, x))
    values = exact.run()
    whole = exact.gradients(values["output"], values["input"])
    found = {}
    for name, given in {"scaled": scale, "unscaled": None}.items():
        with torch.autocast("cpu", dtype=torch.float16):
            passes = Passes(network=model, run=run, data=(x, x), loss_scale=given)
            values = passes.run()
            assert values["output"].dtype == torch.float16
            found[name] = passes.gradients(values["output"], values["input"])
            assert found[name].dtype == torch.float32
    assert (found["unscaled"] - whole).norm() > 0.3 * whole.norm()
    assert (found["scaled"] - whole).norm() < 0.01 * whole.norm()


def test_modules_run_in_the_precision_of_the_step() -> None:
    model = SequentialModel(layers={"first": nn.Linear(4, 8), "second": nn.Linear(8, 3)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passes = Passes(network=model, run=run, data=(sample(2, 4), sample(2, 3)))
        with torch.autocast("cpu", enabled=False):  # the objective calls terms like this
            assert passes.call("first", sample(2, 4)).dtype == torch.bfloat16
            assert passes.run()["output"].dtype == torch.bfloat16
            assert passes.call("", sample(2, 4)).shape == (2, 3)
    with pytest.raises(RunError, match="the network has no submodule 'third'; expected one of first, second"):
        passes.call("third", sample(2, 4))


def test_gradients_of_half_precision_are_float32() -> None:
    x = sample(2, 4).bfloat16()
    passes = Passes(network=mlp().bfloat16(), run=run, data=(x, x))
    assert passes.gradients(passes.run()["output"], passes.data[0]).dtype == torch.float32
