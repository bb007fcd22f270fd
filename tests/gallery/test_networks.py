"""Networks of the gallery equal the same networks in Python. The site shows the docstrings of the tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss, relu

import exp
from exp.data.splits import random_splits
from exp.extras.export.export import main as export

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2)
        self.linear1, self.linear2, self.head = nn.Linear(64, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(relu(self.conv1(x)), 2)
        x = functional.max_pool2d(relu(self.conv2(x)), 2).flatten(1)
        return self.head(relu(self.linear2(relu(self.linear1(x)))))


def test_lenet(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of LeNet in Python to 1e-9. After the whole training,
    its test accuracy is above that of logistic regression.
    """
    gallery.descend("lenet", LeNet())
    pixels, digits = load_digits(return_X_y=True)
    parts = random_splits({"train": 0.7, "val": 0.15, "test": 0.15}, length=len(digits), seed=0)
    train, test = parts["train"].numpy(), parts["test"].numpy()
    score = (
        LogisticRegression(max_iter=2000).fit(pixels[train] / 16, digits[train]).score(pixels[test] / 16, digits[test])
    )
    assert gallery.run("lenet", "hooks=[]").metrics["accuracy/test"] > score


class HandLSTM(nn.Module):
    """LSTM with the equations of the documentation of torch.nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.recurrent
        h = c = x.new_zeros(len(x), 64)
        for row in x.squeeze(1).unbind(1):
            gates = row @ weights.weight_ih_l0.T + weights.bias_ih_l0 + h @ weights.weight_hh_l0.T + weights.bias_hh_l0
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


@pytest.mark.slow
def test_lstm(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of an LSTM written out in its equations to 1e-9."""
    gallery.descend("lstm", HandLSTM())


class FusedGRU(nn.Module):
    """torch.nn.GRU with the parameters of the program's GRU."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {
            "weight_ih": (192, 8),
            "weight_hh": (192, 64),
            "bias_ih": (192,),
            "bias_hh": (192,),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        weights = {f"{name}_l0": value for name, value in self.named_parameters() if not name.startswith("head")}
        gru = nn.GRU(8, 64, batch_first=True, dtype=x.dtype)
        _, last = torch.func.functional_call(gru, weights, (x.squeeze(1),))
        return self.head(last[0])


@pytest.mark.slow
def test_gru(gallery: Any) -> None:
    """After three SGD steps in float64, the weights of the GRU written out in the program equal those of `torch.nn.GRU`
    to 1e-9.
    """
    gallery.descend("gru", FusedGRU())


def encoder_layer(weights: dict[str, Tensor], prefix: str, *, heads: int, width: int, hidden: int) -> nn.Module:
    """Return torch's TransformerEncoderLayer with the weights of a block of conf/model/transformer.yaml or gpt.yaml."""
    layer = nn.TransformerEncoderLayer(
        width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.out_proj": "project",
        "linear1": "expand",
        "linear2": "contract",
        "norm1": "norm1",
        "norm2": "norm2",
    }
    state = {
        f"{to}.{one}": weights[f"{prefix}.{name}.{one}"] for to, name in names.items() for one in ("weight", "bias")
    }
    for one in ("weight", "bias"):
        parts = [weights[f"{prefix}.{name}.{one}"] for name in ("query", "key", "value")]
        state[f"self_attn.in_proj_{one}"] = torch.cat(parts)
    layer.load_state_dict(state)
    return layer.eval()


@pytest.mark.slow
def test_transformer(gallery: Any) -> None:
    """The validation loss of a run in float64 equals that of two `torch.nn.TransformerEncoderLayer` with its weights to
    1e-9.
    """
    ran = gallery.run("transformer", "precision=fp64", "debug=few_batches", "test=false")
    weights, losses = ran.weights, []
    for x, target in gallery.batches("transformer", "precision=fp64", part="val", count=2):
        x = (
            functional.linear(x.squeeze(1), weights["embedding.weight"], weights["embedding.bias"])
            + weights["positions"]
        )
        for block in range(2):
            x = encoder_layer(weights, f"blocks.{block}", heads=4, width=64, hidden=128)(x)
        x = functional.layer_norm(x, (64,), weights["norm.weight"], weights["norm.bias"]).mean(1)
        losses.append(cross_entropy(functional.linear(x, weights["head.weight"], weights["head.bias"]), target))
    assert ran.metrics["loss/val"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


@pytest.mark.slow
def test_gpt(gallery: Any, text: tuple[str, ...]) -> None:
    """The bits per character of a run in float64 equal those of two causal `torch.nn.TransformerEncoderLayer` with its
    weights to 1e-6.
    """
    words = (text[1], "precision=fp64")
    ran = gallery.run("gpt", *words, "debug=few_batches", "test=false")
    wanted = causal_loss(ran.weights, gallery.batches("gpt", *words, part="val", count=2)) / math.log(2)
    assert ran.metrics["bits_per_character/val"] == pytest.approx(wanted, rel=1e-6)


def causal_loss(weights: dict[str, Tensor], batches: list[Any]) -> float:
    """Return the mean cross entropy of conf/model/gpt.yaml, computed with torch's TransformerEncoderLayer."""
    losses = []
    for x, target in batches:
        x = functional.embedding(x, weights["tokens.weight"]) + weights["positions"][: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        for block in range(2):
            layer = encoder_layer(weights, f"blocks.{block}", heads=4, width=64, hidden=256)
            x = layer(x, src_mask=mask, is_causal=True)
        x = functional.layer_norm(x, (64,), weights["norm.weight"], weights["norm.bias"])
        losses.append(cross_entropy((x @ weights["head.weight"].T).flatten(0, 1), target.flatten()))
    return torch.stack(losses).mean().item()


@pytest.mark.slow
def test_tokenized_text(gallery: Any, text: tuple[str, ...]) -> None:
    """The tokens of the training split decode to its text. The perplexity of a run in float64 equals that of two causal
    `torch.nn.TransformerEncoderLayer` with its weights to 1e-6.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    words = (text[1], "data.dataset.vocabulary_size=300", "precision=fp64", "data.batch_size=16")
    data = gallery.data("tokenized_text", *words)
    tokenizer = tokenizers.Tokenizer.from_str(data.fitted["tokenizer"])
    written = tokenizer.decode(data.part("train").tokens[:500].tolist())
    assert len(written) > 500
    assert (gallery.place / "text.txt").read_text().startswith(written)
    ran = gallery.run("tokenized_text", *words, "debug=few_batches", "test=false")
    batches = gallery.batches("tokenized_text", *words, part="val", count=2)
    assert ran.metrics["perplexity/val"] == pytest.approx(math.exp(causal_loss(ran.weights, batches)), rel=1e-6)


class Conv1d(nn.Module):
    """Network with correlations along the columns, written as sums over shifted pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 32, 3), nn.Conv1d(32, 64, 3)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(correlated(functional.pad(x.squeeze(1), (1, 1)), self.conv1, stride=1))
        return self.head(relu(correlated(x, self.conv2, stride=2)).flatten(1))


def correlated(x: Tensor, layer: nn.Conv1d, *, stride: int) -> Tensor:
    pieces = torch.stack([x[:, :, at : at + 3] for at in range(0, x.shape[2] - 2, stride)], 1)
    return torch.einsum("btck,ock->bot", pieces, layer.weight) + layer.bias[:, None]


@pytest.mark.slow
def test_conv1d(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of correlations written as sums over shifted pieces to
    1e-9.
    """
    gallery.descend("conv1d", Conv1d())


class Autoencoder(nn.Module):
    """Autoencoder that upsamples by the definitions: repeated pixels, and weighted means of neighboring pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 8, 3, 2, 1)
        self.conv1, self.conv2 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down2(relu(self.down1(x)))
        x = relu(self.conv1(x.repeat_interleave(2, 2).repeat_interleave(2, 3)))
        along = interpolation(x.shape[-1]).to(x)
        return self.conv2(along @ x @ along.T)


def interpolation(size: int) -> Tensor:
    """Return the bilinear weights `[2 size, size]` along one axis; the center of pixel i is at i + 1/2."""
    weights = torch.zeros(2 * size, size, dtype=torch.float64)
    for new in range(2 * size):
        at = min(max((new + 0.5) / 2 - 0.5, 0.0), size - 1)
        low = int(at)
        weights[new, low] += 1 - (at - low)
        weights[new, min(low + 1, size - 1)] += at - low
    return weights


@pytest.mark.slow
def test_upsample(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a loop whose upsampling is a product with a matrix
    of weights to 1e-9.
    """
    gallery.descend("upsample", Autoencoder(), loss=lambda network, batch: mse_loss(network(batch[0]), batch[0]))


class Regions(nn.Module):
    """Network that finds the largest number of each quarter of each region in a loop."""

    boxes = ((0, 0, 5, 5), (0, 3, 5, 5), (3, 0, 5, 5), (3, 3, 5, 5), (1, 2, 6, 4))

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(320, 10)

    def forward(self, x: Tensor) -> Tensor:
        features, pooled = relu(self.conv(x)), []
        for top, left, height, width in self.boxes:
            region = features[:, :, top : top + height, left : left + width]
            rows, columns = halves(height), halves(width)
            cells = [region[:, :, row, column].amax((2, 3)) for row in rows for column in columns]
            pooled.append(torch.stack(cells, 2).flatten(1))
        return self.head(torch.cat(pooled, 1))


def halves(size: int) -> tuple[slice, slice]:
    return slice(0, math.ceil(size / 2)), slice(size // 2, size)


@pytest.mark.slow
def test_roi_pool(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a loop that finds the largest number of each cell to
    1e-9.
    """
    gallery.descend("roi_pool", Regions())


class SuperResolution(nn.Module):
    """Network with a sub-pixel shuffle by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small = x.unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean((3, 5))
        four = self.conv3(relu(self.conv2(relu(self.conv1(small)))))
        large = x.new_zeros(len(x), 1, 8, 8)
        for channel in range(4):
            large[:, 0, channel // 2 :: 2, channel % 2 :: 2] = four[:, channel]
        return large


@pytest.mark.slow
def test_super_resolution(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of a loop that shuffles by indices to 1e-9. After the
    whole training, its squared error on the test split is less than half of that of bicubic interpolation. Exported by
    `python -m exp.export run=DIR`, it has the same error in ONNX Runtime to 1e-5, and the same pictures to 1e-4.
    """
    gallery.descend(
        "super_resolution", SuperResolution(), loss=lambda network, batch: mse_loss(network(batch[0]), batch[0])
    )
    ran = gallery.run("super_resolution", "hooks=[]")
    x = torch.cat([batch[0] for batch in gallery.batches("super_resolution", part="test", count=None)])
    bicubic = functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2, mode="bicubic")
    assert ran.metrics["loss/test"] < mse_loss(bicubic, x).item() / 2
    assert export([f"run={ran.directory}"]) == 0
    x = x.float()
    (pictures,) = InferenceSession(ran.directory / "exports" / "network.onnx").run(None, {"input": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(pictures, exp.load(ran.directory).network(weights="best")(x).numpy(), atol=1e-4)
    assert mse_loss(torch.from_numpy(pictures), x).item() == pytest.approx(ran.metrics["loss/test"], rel=1e-5)


class Backwards(nn.Module):
    """Encoder and decoder with Bahdanau's attention and dot products as scores, one decoder step at a time."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, 64)
        self.encoder, self.decoder = (nn.GRU(64, 64, batch_first=True) for _ in range(2))
        self.query, self.head = nn.Linear(64, 64, bias=False), nn.Linear(128, characters)
        self.positions = nn.Parameter(torch.randn(16, 64) / 10)

    def forward(self, x: Tensor) -> Tensor:
        keys, hidden = self.encoder(self.tokens(x) + self.positions)
        written, scores = torch.zeros(len(x), 64, dtype=keys.dtype), []
        for step in range(16):
            state, hidden = self.decoder((written + self.positions[step])[:, None], hidden)
            weights = torch.softmax(torch.einsum("bsw,bw->bs", keys, self.query(state[:, 0])) / 8, 1)
            context = (weights[:, :, None] * keys).sum(1)
            scores.append(self.head(torch.cat([state[:, 0], context], 1)))
            written = self.tokens(x[:, 15 - step])
        return torch.stack(scores, 1)


@pytest.mark.slow
def test_seq2seq_attention(gallery: Any, text: tuple[str, ...]) -> None:
    """After three SGD steps in float64, the weights equal those of a decoder written step by step to 1e-9. After 200
    steps, more than 90 percent of the characters are right; the most frequent character has a share below 20 percent.
    """
    words = (text[1],)
    characters = int(gallery.data("seq2seq_attention", *words).spec.num_classes)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(network(batch[0]).flatten(0, 1), batch[0].flip(1).flatten())

    gallery.descend("seq2seq_attention", Backwards(characters), *words, loss=loss)
    ran = gallery.run(
        "seq2seq_attention",
        *words,
        "trainer.max_steps=200",
        "trainer.val_check_interval=200",
        "trainer.check_val_every_n_epoch=null",
        "hooks=[]",
        "test=false",
    )
    (x, _), *_ = gallery.batches("seq2seq_attention", *words, part="val", count=1)
    assert np.bincount(x.flatten().numpy()).max() / x.numel() < 0.2
    assert ran.metrics["accuracy/val"] > 0.9


def test_example(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of LeNet in Python to 1e-9."""
    gallery.descend("example", LeNet())
