"""Transforms of torchvision.transforms.v2: masks and boxes move with their picture, whoever reads it, and when."""

from __future__ import annotations

import pytest
import torch
from PIL import Image as Pillow
from torch.utils.data import Dataset

from exp.data.data import Data
from exp.data.randomness import preserve_generators, reseed_batch, reseed_sample
from exp.errors import ConfigError, RunError, is_installed
from exp.train import main as train

if not is_installed("torchvision"):
    pytest.skip("the extra `vision` is not installed", allow_module_level=True)

from torchvision import tv_tensors
from torchvision.transforms import v2

COUNT, HEIGHT, WIDTH = 12, 9, 7


def picture(index):
    """Of three channels, each pixel of its own value."""
    return torch.rand(3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(index))


def spot(index):
    """A picture that is 1 in one box, and the box."""
    left, top = index % 3, index % 4
    made = torch.zeros(3, HEIGHT, WIDTH)
    made[:, top : top + 3, left : left + 2] = 1
    return made, torch.tensor([[left, top, left + 2, top + 3]])


def mask_of(pixels):
    """What a mask must be, wherever its picture went."""
    return (pixels[..., 0, :, :] * 7).long()


class Masked(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return picture(index), mask_of(picture(index))


class Named(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        pixels, boxes = spot(index)
        found = {"boxes": boxes, "labels": torch.tensor([index % 2]), "masks": pixels[:1].bool()}
        return {"input": pixels, "found": found, "target": torch.tensor(index % 2)}


class Wrapped(Dataset):
    """As torchvision's own detection references give samples."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        pixels, boxes = spot(index)
        size = (HEIGHT, WIDTH)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)
        return tv_tensors.Image(pixels), {"boxes": boxes, "mask": tv_tensors.Mask(pixels[0].long())}


class Classes(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return picture(index), torch.tensor(index % 4)


FLIPS = {"flip": v2.RandomHorizontalFlip(), "turn": v2.RandomVerticalFlip(), "cut": v2.RandomCrop((5, 5))}


def data(dataset, **settings):
    return Data(
        **{"train": dataset, "num_classes": 7, "batch_size": 5, "seed": 3, "train_transforms": FLIPS, **settings}
    )


def batches(made, **position):
    loader = made.loader("train")
    loader.set_position(position.pop("epoch", 0), position.pop("batch", 0))
    return [batch.data for batch in loader]


def test_a_picture_alone_is_transformed_by_the_samples_own_generators():
    cut, flip = v2.RandomResizedCrop((4, 4)), FLIPS["flip"]
    made = data(Classes(), shuffle=False, train_transforms={"cut": cut, "flip": flip})
    seen = torch.cat([pictures for pictures, _ in batches(made, epoch=2)])
    with preserve_generators():
        for index, pixels in enumerate(seen):
            reseed_sample(seed=3, epoch=2, index=index)
            assert torch.equal(pixels, flip(cut(picture(index))))


@pytest.mark.parametrize("kinds", [{"target": "mask"}, {"input": "image", "target": "mask"}])
def test_a_mask_moves_with_its_picture_with_any_workers_and_from_any_position(kinds):
    first, second = (batches(data(Masked(), tv_tensors=kinds), epoch=epoch) for epoch in range(2))
    for pictures, masks in (*first, *second):
        assert pictures.shape[1:] == (3, 5, 5)
        assert torch.equal(masks, mask_of(pictures))
        assert (type(pictures), type(masks), masks.dtype) == (torch.Tensor, torch.Tensor, torch.int64)
    assert not torch.equal(first[0][0], second[0][0])
    apart = batches(data(Masked(), tv_tensors=kinds, num_workers=2), epoch=1, batch=1)
    for mine, other in zip(apart, second[1:], strict=True):
        assert all(type(part) is torch.Tensor for part in mine)
        assert all(torch.equal(*parts) for parts in zip(mine, other, strict=True))


def boxes_in(pixels):
    rows, columns = pixels[0].nonzero(as_tuple=True)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


def test_boxes_and_masks_in_a_mapping_move_with_their_picture():
    kinds = {"input": "image", "found": {"boxes": "xyxy", "masks": "mask"}}
    moves = [FLIPS["flip"], FLIPS["turn"], v2.Pad(2), v2.ClampBoundingBoxes()]
    for workers in (0, 2):
        made = data(Named(), num_classes=2, tv_tensors=kinds, train_transforms=moves, num_workers=workers)
        for batch in batches(made):
            for pixels, boxes, mask in zip(
                batch["input"], batch["found"]["boxes"], batch["found"]["masks"], strict=True
            ):
                assert boxes.tolist() == [boxes_in(pixels)]
                assert torch.equal(mask[0], pixels[0].bool())
                assert type(boxes) is torch.Tensor


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_tv_tensors_are_given_whole(workers):
    moves = [FLIPS["flip"], FLIPS["turn"], v2.Pad(1)]
    made = data(Wrapped(), num_outputs=4, num_classes=None, train_transforms=moves, num_workers=workers)
    for pictures, found in batches(made):
        for pixels, boxes, mask in zip(pictures, found["boxes"], found["mask"], strict=True):
            assert boxes.tolist() == [boxes_in(pixels)]
            assert torch.equal(mask, pixels[0].long())


def test_a_stream_is_transformed_alike():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Masked()[index] for index in range(COUNT))

    settings = {"tv_tensors": {"target": "mask"}, "shuffle": False}
    for pictures, masks in batches(data(Stream(), num_workers=1, **settings)):
        assert torch.equal(masks, mask_of(pictures))
        assert type(masks) is torch.Tensor


def test_a_mask_that_would_stay_behind_is_told():
    told = (
        r"null, and input and target of one size beside Rand.* \{input: image, target: mask\}; what it leaves out stays"
    )
    with pytest.raises(ConfigError, match=f"data.tv_tensors: {told}"):
        data(Masked())
    # Who says so leaves it.
    for pictures, masks in batches(
        data(Masked(), tv_tensors={"input": "image"}, train_transforms=[v2.RandomInvert(1.0)])
    ):
        assert torch.equal(masks, mask_of(1 - pictures))


@pytest.mark.parametrize(
    ("dataset", "kinds", "message"),
    [
        (Masked, {"target": "maks"}, r"data.tv_tensors.target: 'maks'; expected one of image, .*Did you mean mask"),
        (
            Masked,
            {"mask": "mask"},
            r"data.tv_tensors: TVTensors, which takes mask; expected parameters among the entries",
        ),
        (Masked, {"target": {"a": "mask"}}, r"data.tv_tensors.target: a mapping; expected the word for a Tensor"),
        (Named, {"found": {"box": "xyxy"}}, r"data.tv_tensors.found.box: box; .*Did you mean boxes"),
    ],
)
def test_faults_of_kinds(dataset, kinds, message):
    with pytest.raises(ConfigError, match=message):
        data(dataset(), tv_tensors=kinds)


MIXED = {
    "mixup": v2.MixUp(num_classes=4, alpha=1.0),
    "cutmix": v2.CutMix(num_classes=4, alpha=1.0),
    "one": v2.RandomChoice([v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)]),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("is_mapping", [False, True])
def test_mixed_batches_hold_what_their_targets_say(name, is_mapping):
    class Flat(Classes):
        """Each picture is one number, so that its share can be read from the mean."""

        def __getitem__(self, index):
            pair = torch.full((3, HEIGHT, WIDTH), float(index % 4)), torch.tensor(index % 4)
            return dict(zip(("input", "target"), pair, strict=True)) if is_mapping else pair

    made = data(Flat(), num_classes=4, batch_size=6, train_transforms=None, train_batch_transforms={name: MIXED[name]})
    seen = []
    with preserve_generators():
        for rank in range(2):
            for number, batch in enumerate(made.loader("train", rank=rank, world_size=2)):
                found = made.transform_batch(batch, stage="train", rank=rank, epoch=0, number=number).data
                inputs, targets = found.values() if is_mapping else found
                torch.testing.assert_close(targets.sum(1), torch.ones(3))
                torch.testing.assert_close(inputs.mean((1, 2, 3)), targets @ torch.arange(4.0), rtol=1e-5, atol=1e-5)
                reseed_batch(seed=3, stage="train", rank=rank, epoch=0, batch=number)
                plain = batch.data.values() if is_mapping else batch.data
                assert all(map(torch.equal, MIXED[name](*plain), (inputs, targets)))
                seen.append(targets)
    assert not torch.equal(seen[0], seen[1])


WORDS = [
    "data=images", "data.dataset.path=pets", "data.dataset.mode=RGB", "security.allow=[torchvision]", "model=mlp",
    "trainer.max_epochs=1", "test=false", "hooks=[]", "logger=[]", "data.batch_size=4",
    "objective.cross_entropy.loss={_target_: torch.nn.CrossEntropyLoss}",
    "+data.train_transforms.cut={_target_: torchvision.transforms.v2.RandomResizedCrop, size: [6, 6]}",
    "+data.train_transforms.colour={_target_: torchvision.transforms.v2.ColorJitter, brightness: 0.5}",
    "+data.transforms.size={_target_: torchvision.transforms.v2.Resize, size: [6, 6]}",
    "data.train_batch_transforms={mix: {_target_: torchvision.transforms.v2.RandomChoice, transforms: "
    "[{_target_: torchvision.transforms.v2.CutMix, num_classes: 2}, {_target_: torchvision.transforms.v2.MixUp, "
    "num_classes: 2}]}}",
]  # fmt: skip


def test_a_run_of_pictures_is_the_same_with_any_workers(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(9):
            pixels = (picture(number + len(kind)).permute(1, 2, 0) * 255).byte().numpy()
            Pillow.fromarray(pixels).save(tmp_path / "pets" / kind / f"{number}.png")
    for workers in (0, 2):
        assert train([*WORDS, f"data.num_workers={workers}", f"hydra.run.dir=run{workers}"]) == 0
    one, two = (torch.load(f"run{w}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for w in (0, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    capfd.readouterr()
    assert train([*WORDS, "metric_stages=[train,val]"]) == 2
    assert "CutMix makes probabilities of the classes" in capfd.readouterr().err


def test_a_transform_that_fails_is_told_with_its_sample():
    with pytest.raises(RunError, match=r"reading sample 0 of train failed with ValueError: Required crop size"):
        data(Classes(), train_transforms=[v2.RandomCrop(99)])
