"""Tests of torchvision.transforms.v2: masks and boxes get the same random transform as their picture."""

from __future__ import annotations

import functools

import pytest
import torch
from PIL import Image as Pillow
from torch.utils.data import Dataset

import exp
from exp.data.data import Data
from exp.data.randomness import preserve_generators, reseed_batch, reseed_sample
from exp.errors import ConfigError, RunError, is_installed

if not is_installed("torchvision"):
    pytest.skip("the extra `vision` is not installed", allow_module_level=True)

from torchvision import tv_tensors
from torchvision.transforms import v2

COUNT, HEIGHT, WIDTH = 12, 9, 7


def picture(index):
    """Return a picture of random values."""
    return torch.rand(3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(index))


def spot(index):
    """Return a picture with ones in a box and zeros elsewhere, and the box."""
    left, top = index % 3, index % 4
    made = torch.zeros(3, HEIGHT, WIDTH)
    made[:, top : top + 3, left : left + 2] = 1
    return made, torch.tensor([[left, top, left + 2, top + 3]])


def mask_of(pixels):
    """Return the mask of a picture, computed from its pixels before or after a transform."""
    return (pixels[..., 0, :, :] * 7).long()


class Masked(Dataset):
    """Data set of pictures and masks; `kinds` are the functions that wrap them."""

    def __init__(self, *kinds):
        self.kinds = kinds or (tv_tensors.Image, tv_tensors.Mask)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return tuple(
            kind(part) for kind, part in zip(self.kinds, (picture(index), mask_of(picture(index))), strict=True)
        )


class Named(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        pixels, boxes = spot(index)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(HEIGHT, WIDTH))
        found = {"boxes": boxes, "labels": torch.tensor([index % 2]), "masks": tv_tensors.Mask(pixels[:1].bool())}
        return {"input": tv_tensors.Image(pixels), "found": found, "target": torch.tensor(index % 2)}


class Classes(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return picture(index), torch.tensor(index % 4)


FLIPS = {"flip": v2.RandomHorizontalFlip(), "turn": v2.RandomVerticalFlip(), "cut": v2.RandomCrop((5, 5))}


def data(dataset, **settings):
    given = {"train": dataset, "num_classes": 7, "batch_size": 5, "seed": 3, "train_transforms": FLIPS, **settings}
    return Data(**given)


def batches(made, **position):
    loader = made.loader("train")
    loader.set_position(position.pop("epoch", 0), position.pop("batch", 0))
    return [batch.data for batch in loader]


def test_transforms_use_the_generators_of_the_sample():
    cut, flip = v2.RandomResizedCrop((4, 4)), FLIPS["flip"]
    made = data(Classes(), shuffle=False, train_transforms={"cut": cut, "flip": flip})
    seen = torch.cat([pictures for pictures, _ in batches(made, epoch=2)])
    with preserve_generators():
        for index, pixels in enumerate(seen):
            reseed_sample(seed=3, epoch=2, index=index)
            assert torch.equal(pixels, flip(cut(picture(index))))


def test_a_mask_is_transformed_with_its_picture():
    made = functools.partial(data, Masked())
    first, second = (batches(made(), epoch=epoch) for epoch in range(2))
    for pictures, masks in (*first, *second):
        assert pictures.shape[1:] == (3, 5, 5)
        assert torch.equal(masks, mask_of(pictures))
        assert (type(pictures), type(masks), masks.dtype) == (torch.Tensor, torch.Tensor, torch.int64)
    assert not torch.equal(first[0][0], second[0][0])
    apart = batches(made(num_workers=2), epoch=1, batch=1)
    for mine, other in zip(apart, second[1:], strict=True):
        assert all(type(part) is torch.Tensor for part in mine)
        assert all(torch.equal(*parts) for parts in zip(mine, other, strict=True))


def boxes_in(pixels):
    rows, columns = pixels[0].nonzero(as_tuple=True)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


def test_boxes_and_masks_are_transformed_with_their_picture():
    moves = [FLIPS["flip"], FLIPS["turn"], v2.Pad(2), v2.ClampBoundingBoxes()]
    for batch in batches(data(Named(), num_classes=2, train_transforms=moves, num_workers=2)):
        found = batch["found"]
        for pixels, boxes, mask in zip(batch["input"], found["boxes"], found["masks"], strict=True):
            assert boxes.tolist() == [boxes_in(pixels)]
            assert torch.equal(mask[0], pixels[0].bool())
            assert type(boxes) is torch.Tensor


def test_a_mask_without_tv_tensors_is_refused():
    with pytest.raises(ConfigError, match=r"data.transforms: Rand.*, which would change only one of input and target"):
        data(Masked(torch.clone, torch.clone))
    # A mask that is not wrapped as tv_tensors.Mask is not transformed.
    kept = data(Masked(tv_tensors.Image, torch.clone), train_transforms=[v2.RandomInvert(1.0)])
    for pictures, masks in batches(kept):
        assert torch.equal(masks, mask_of(1 - pictures))


MIXED = v2.RandomChoice([v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)])


def test_mixed_batches_use_the_generators_of_the_batch():
    made = data(Classes(), num_classes=4, batch_size=6, train_transforms=None, train_batch_transforms=[MIXED])
    seen = []
    with preserve_generators():
        for number, batch in enumerate(made.loader("train")):
            found = made.transform_batch(batch, stage="train", rank=0, epoch=0, number=number).data
            reseed_batch(seed=3, stage="train", rank=0, epoch=0, batch=number)
            assert all(map(torch.equal, MIXED(*batch.data), found))
            seen.append(found[1])
    assert not torch.equal(seen[0], seen[1])


WORDS = [
    "data=images", "data.dataset.path=pets", "data.dataset.mode=RGB", "security.allow=[torchvision]", "model=mlp",
    "objective.cross_entropy.loss={_target_: torch.nn.CrossEntropyLoss}",
    "+data.train_transforms.cut={_target_: torchvision.transforms.v2.RandomResizedCrop, size: [6, 6]}",
    "+data.transforms.size={_target_: torchvision.transforms.v2.Resize, size: [6, 6]}",
    "data.train_batch_transforms={mix: {_target_: torchvision.transforms.v2.CutMix, num_classes: 2}}",
]  # fmt: skip


def test_the_check_accepts_torchvision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(9):
            pixels = (picture(number).permute(1, 2, 0) * 255).byte().numpy()
            Pillow.fromarray(pixels).save(tmp_path / "pets" / kind / f"{number}.png")
    exp.validate(exp.compose(WORDS))
    with pytest.raises(ConfigError, match="CutMix makes probabilities of the classes"):
        exp.validate(exp.compose([*WORDS, "metric_stages=[train,val]"]))


def test_errors_of_transforms_name_the_sample():
    with pytest.raises(RunError, match=r"reading sample 0 of train failed with ValueError: Required crop size"):
        data(Classes(), train_transforms=[v2.RandomCrop(99)])
