"""Parts of a run in the gallery equal counts and loops by hand. The site shows the docstrings of the tests."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils._python_dispatch import TorchDispatchMode

from exp.extras.gallery.ensemble import Ensemble
from exp.extras.gallery.letter_names import ALPHABET
from exp.extras.gallery.scalar_tensor import ScalarTensor

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]

# Widths of conf/model/sequential.yaml on digits.
WIDTHS = (64, 256, 128, 10)
WEIGHTS = sum(one * other + other for one, other in itertools.pairwise(WIDTHS))


class Perceptron(nn.Module):
    """Network of conf/model/sequential.yaml."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.hidden2, self.head = (nn.Linear(one, other) for one, other in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        gelu = nn.functional.gelu
        return self.head(gelu(self.hidden2(gelu(self.hidden(x.flatten(1))))))


@pytest.mark.slow
def test_checkpoint_components(gallery: Any, hand: Any) -> None:
    """Network and optimizer of a checkpoint of step 3 are loaded into plain torch, and make three more steps with
    momentum in float64. Their weights equal those of a run of six steps to 1e-9.
    """
    words = [*hand.DESCENT, *hand.SHORT, "optimizer.momentum=0.9"]
    short, long = (
        gallery.run("checkpoint_components", *words, f"trainer.limit_train_batches={count}") for count in (3, 6)
    )
    network = Perceptron().double()
    network.load_state_dict(short.weights)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    saved = short.checkpoint["optimizer_states"][0]
    optimizer.load_state_dict(saved)
    assert short.checkpoint["global_step"] == 3
    for x, target in gallery.batches("checkpoint_components", count=6)[3:]:
        optimizer.zero_grad()
        cross_entropy(network(x), target).backward()
        optimizer.step()
    hand.assert_equal(long.weights, network.state_dict())


def test_finetune_frozen(gallery: Any, hand: Any, build_model: Any) -> None:
    """The weights after two epochs in float64, in which the linear layers are unfrozen for the second, equal those of a
    loop to 1e-9. The loop's optimizer first has the head, then also the linear layers. The convolutions do not change.
    """
    network = build_model("lenet").double()
    torch.save(network.state_dict(), hand.START)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    sooner = [
        "~freeze.unfreeze.5",
        "+freeze.unfreeze.1=['linear*']",
        "trainer.max_epochs=2",
        f"weights.from={hand.START}",
    ]
    ran = gallery.run("finetune_frozen", *hand.DESCENT, *hand.SHORT, *sooner)
    loader = gallery.data("finetune_frozen").loader("train")
    for epoch in range(2):
        groups = [{"params": network.head.parameters(), "lr": hand.RATE}]
        if epoch == 1:
            groups.append({"params": [*network.linear1.parameters(), *network.linear2.parameters()], "lr": 0.001})
        optimizer = torch.optim.SGD(groups)
        loader.set_position(epoch, 0)
        for batch in itertools.islice(loader, hand.STEPS):
            network.zero_grad()
            cross_entropy(network(batch.data[0].double()), batch.data[1]).backward()
            optimizer.step()
    hand.assert_equal(ran.weights, network.state_dict())
    assert all(torch.equal(ran.weights[name], value) for name, value in before.items() if name.startswith("conv"))


@pytest.mark.slow
def test_initialisation(gallery: Any) -> None:
    """The deviation of conv2's weights is He's sqrt(2 / 150) within 5 percent. The weights of linear1 fill Glorot's
    bound sqrt(2) sqrt(6 / 184). The rows of linear2 are orthonormal to 1e-5. The head is 0, and biases are 0.01.
    """
    still = ("optimizer=sgd", "optimizer.lr=1e-20", "optimizer.momentum=0.0")
    weights = gallery.run("initialisation", "debug=one_batch", "test=false", *still).weights
    assert weights["conv2.weight"].std().item() == pytest.approx(math.sqrt(2 / 150), rel=0.05)
    bound = math.sqrt(2) * math.sqrt(6 / (64 + 120))
    assert 0.99 * bound < weights["linear1.weight"].abs().max().item() <= bound
    rows = weights["linear2.weight"]
    torch.testing.assert_close(rows @ rows.T, torch.eye(84), rtol=0, atol=1e-5)
    assert weights["head.weight"].abs().max() < 1e-15
    assert all(torch.allclose(value, torch.tensor(0.01)) for name, value in weights.items() if name.endswith("bias"))


def test_memory_four_parts(gallery: Any) -> None:
    """The measured bytes equal a count by hand. Parameters and gradients have 4 bytes per number. Adam's state has
    twice as many for its two moments, and 4 for each of six step counters. Activations are the tensors that layers and
    loss keep.
    """
    ran = gallery.run("memory_four_parts", "debug=one_batch", "test=false", "logger=[csv]")
    parts = ("parameters", "gradients", "optimizer", "activations")
    parameters, gradients, optimizer, activations = (round(2**20 * ran.column(f"memory/{one}_mib")[0]) for one in parts)
    assert parameters == gradients == 4 * WEIGHTS
    assert optimizer == 2 * 4 * WEIGHTS + 6 * 4
    # Pixels; input and output of each GELU; log probabilities; classes; total weight of the classes.
    assert activations == 64 * (4 * (64 + 2 * 256 + 2 * 128 + 10) + 8) + 4


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_logging_tensor(gallery: Any) -> None:
    """The operators of the first step and their numbers of calls equal those that a TorchDispatchMode counts in the
    same step of a loop by hand, in forward and backward.
    """
    ran = gallery.run("logging_tensor", "debug=one_batch", "test=false", "logger=[tensorboard]")
    events = EventAccumulator(str(ran.directory / "tensorboard")).Reload()
    text = events.Tensors("operators")[0].tensor_proto.string_val[0].decode()
    found: Counter[str] = Counter()
    for calls, operator in re.findall(r"^\| (\d+) \| [^|]+ \| ([\w.]+) \|", text, re.MULTILINE):
        found[operator.partition(".")[0]] += int(calls)
    ((x, target),) = gallery.batches("logging_tensor", count=1)
    network = Perceptron()
    with Logged() as logged:
        cross_entropy(network(x.float()), target).backward()
    products = (
        "addmm",
        "mm",
        "gelu",
        "gelu_backward",
        "_log_softmax",
        "nll_loss_forward",
        "nll_loss_backward",
        "t",
        "sum",
    )
    assert {name: found[name] for name in products} == {name: logged.calls[name] for name in products}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.scale2 = (nn.ParameterDict({"value": nn.Parameter(torch.tensor(1.0))}) for _ in range(2))
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        unit = torch.eye(64, dtype=x.dtype)
        h = self.hidden(x.flatten(1) @ (self.scale["value"] * unit)).tanh()
        return self.head(h @ (self.scale2["value"] * unit))


def test_scalar_tensor(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of products with the whole matrices to 1e-9."""
    gallery.descend("scalar_tensor", Dense())


def test_a_scalar_tensor_is_its_matrix_to_torch() -> None:
    one, other, x = ScalarTensor(3.0, 4), ScalarTensor(2.0, 4), torch.randn(5, 4)
    for function in (torch.add, torch.mul, torch.matmul):
        assert torch.equal(function(one, other).dense(), function(one.dense(), other.dense())), function
    assert torch.equal(torch.mul(one, 2.0).dense(), 2 * one.dense())
    torch.testing.assert_close(torch.matmul(x, one), x @ one.dense())
    assert torch.mean(one) == one.dense().mean()
    assert torch.trace(one) == one.dense().trace()
    torch.testing.assert_close(torch.inverse(one).dense(), torch.inverse(one.dense()))
    with pytest.raises(TypeError, match="svd"):
        torch.svd(one)


@pytest.mark.slow
def test_per_sample_gradients(gallery: Any, hand: Any) -> None:
    """Mean and largest norm of the first step's 64 gradients equal those of a loop with one backward per sample in
    float64 to 1e-9.
    """
    network = Perceptron().double()
    torch.save(network.state_dict(), hand.START)
    words = ("precision=fp64", "debug=one_batch", "test=false", "logger=[csv]", f"weights.from={hand.START}")
    ran = gallery.run("per_sample_gradients", *words)
    ((x, target),) = gallery.batches("per_sample_gradients", count=1)
    norms = []
    for row, kind in zip(x.split(1), target.split(1), strict=True):
        gradients = torch.autograd.grad(cross_entropy(network(row), kind), list(network.parameters()))
        norms.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))
    assert ran.column("per_sample_gradients/norm_mean")[0] == pytest.approx(np.mean(norms), rel=1e-9)
    assert ran.column("per_sample_gradients/norm_max")[0] == pytest.approx(max(norms), rel=1e-9)


def test_vmap_ensembles(gallery: Any, hand: Any) -> None:
    """After three SGD steps in float64, row e of the stacked weights equals member e trained in a separate loop to
    1e-9, and the members differ.
    """
    member = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ensemble = Ensemble(members=8, member=member).double()
    start = {f"ensemble.{name}": value for name, value in ensemble.state_dict().items()}
    torch.save(start, hand.START)
    ran = gallery.run("vmap_ensembles", *hand.DESCENT, *hand.SHORT, f"weights.from={hand.START}")
    batches = gallery.batches("vmap_ensembles")
    ends = []
    for row in range(8):
        alone = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        alone.load_state_dict({name: start[f"ensemble.member.{name}"][row] for name in alone.state_dict()})
        flat = [(x.flatten(1), target) for x, target in batches]
        hand.by_hand(alone, flat, lr=hand.RATE / 8)
        ends.append(alone[0].weight.detach())
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(ran.weights[f"ensemble.member.{name}"][row], value, rtol=1e-9, atol=1e-11)
    assert all((one - other).abs().max() > 0.01 for one, other in itertools.combinations(ends, 2))


def test_an_ensemble_refuses_what_it_cannot_stack() -> None:
    with pytest.raises(ValueError, match="in_features"):
        Ensemble(members=2, member=nn.LazyLinear(3))
    with pytest.raises(ValueError, match="running statistics"):
        Ensemble(members=2, member=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


class Functions(nn.Module):
    """Network with the same functions in torch's operators, differentiated by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(0.5 * x.flatten(1))
        return self.head(torch.exp(-((h**3) ** 2)) + h + (h.round() - h).detach())


def test_custom_functions(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a network with torch's operators and autograd to
    1e-9.
    """
    gallery.descend("custom_functions", Functions())


def einsum_and_friends(a: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """Return the values of the program, computed with NumPy."""
    rows = range(len(a))
    products = [
        np.array([[(one * mix[:, :, k]).sum() for k in range(4)] for one in a]),
        np.array([np.diag(one) for one in a]),
        a.sum(1),
        (a**2).sum(2),
        np.array([(one @ mix[:, :, 0]).sum(1) for one in a]),
        np.array([[(one * mix[:, :, k]).sum() for k in range(4)] for one in a]),
        np.array([one @ mix[:, 0, 1] for one in a]),
        np.array([(one + one @ one).mean(0) for one in a]),
        np.array([np.kron(one[0, :2], mix[0, :2, 0]) for one in a]),
    ]
    shapes = [
        np.array([one.T.ravel()[:8] for one in a]),
        a.reshape(-1, 4, 16).max(2),
        a.reshape(-1, 2, 32).mean(2),
        np.array([np.concatenate([one[0], one[4]])[4:12] for one in a]),
        np.array([[one[:, :4].sum(), one[:, 4:].sum()] for one in a]),
        np.array([[one[:, start : start + 4].sum() for start in (0, 2, 4)] for one in a]),
        np.array([np.tile(one[0], 2)[4:12] for one in a]),
        np.tile(a[:, 0, :4], (1, 2)),
        np.repeat(a[:, 0, :4], 2, axis=1),
        a[:, :, 3],
        np.concatenate([a[:, 1, :4], a[:, 2, :4]], 1),
        a[:, 4, ::-1],
        np.roll(a, 3, 2)[:, 4],
        np.pad(a[:, 5, :6], ((0, 0), (1, 1))),
    ]
    # The order of equal numbers does not matter: the sorted rows and the norm of the scattered values are the same.
    ranked = np.sort(a, 2)
    order = torch.argsort(torch.tensor(a), 2).numpy()
    scattered = np.zeros_like(a)
    np.put_along_axis(scattered, order, a, 2)
    choices = [
        ranked[:, 6],
        ranked[:, 7],
        ranked[:, :, :-3:-1].sum(1),
        a[:, 1] + a[:, 3],
        a[:, 0] * a[:, 2] * a[:, 4],
        np.abs(a).mean(2),
        np.maximum(a, 0).std(2, ddof=1),
        np.clip(a, -1, 1).sum(2),
        np.sqrt((scattered**2).sum(2)),
        np.array([[np.tril(one).sum()] for one in a]),
        np.log(np.exp(a).sum(2)),
        np.array([[np.trace(np.outer(mix[0, 0], mix[0, 1])) * a[row, 0, 0]] for row in rows]),
    ]
    return np.concatenate([*products, *shapes, *choices], 1)


@pytest.mark.slow
def test_einsum_and_friends(gallery: Any) -> None:
    """The validation loss of a run in float64 equals that of the same 35 values computed in NumPy to 1e-9."""
    ran = gallery.run("einsum_and_friends", "precision=fp64", "debug=few_batches", "test=false")
    losses = []
    for x, target in gallery.batches("einsum_and_friends", "precision=fp64", part="val", count=2):
        values = einsum_and_friends(x[:, 0].numpy(), ran.weights["mix"].numpy())
        scores = values @ ran.weights["head.weight"].numpy().T + ran.weights["head.bias"].numpy()
        losses.append(cross_entropy(torch.tensor(scores), target).item())
    assert ran.metrics["loss/val"] == pytest.approx(np.mean(losses), rel=1e-9)


class Reader(nn.Module):
    """torch.nn.RNN with the parameters of the program's network."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.i2o = nn.Linear(94, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        rnn = nn.RNN(30, 64, batch_first=True, dtype=self.i2h.weight.dtype)
        weight = self.i2h.weight
        state = {"weight_ih_l0": weight[:, :30], "weight_hh_l0": weight[:, 30:], "bias_ih_l0": self.i2h.bias}
        state["bias_hh_l0"] = torch.zeros_like(self.i2h.bias)
        _, last = torch.func.functional_call(rnn, state, (one_hot(x, 30).to(weight.dtype),))
        return self.i2o(last[0])


def test_names_rnn(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of `torch.nn.RNN` to 1e-9. After the whole training,
    its test accuracy is 0.1 above that of naive Bayes on counts of letters.
    """
    gallery.descend("names_rnn", Reader(), "trainer.gradient_clip_val=null")
    data = gallery.data("names_rnn")
    parts = {name: data.part(name) for name in ("train", "test")}
    texts = {
        name: ["".join(ALPHABET[letter] for letter in row if letter) for row in part.entries[0].tolist()]
        for name, part in parts.items()
    }
    counts = CountVectorizer(analyzer="char", lowercase=False)
    bayes = MultinomialNB().fit(counts.fit_transform(texts["train"]), parts["train"].entries[1].numpy())
    score = bayes.score(counts.transform(texts["test"]), parts["test"].entries[1].numpy())
    assert gallery.run("names_rnn", "hooks=[]").metrics["accuracy/test"] > score + 0.1
