"""Tests of pictures in folders and lists: pixels, classes, orientation, random transforms and errors."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import exp
from exp.check.examination import plan
from exp.check.first_samples import refuse_other_data
from exp.check.resolution import resolve
from exp.data.data import Data
from exp.data.images import Images, RandomCrop, RandomFlip
from exp.data.unlabelled import UnlabelledImages
from exp.errors import ConfigError

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def pets(tmp_path):
    """Three classes of four pictures of 8 x 6 pixels with different brightness."""
    folder = tmp_path / "pets"
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((6, 8, 3), colour, dtype=np.uint8) // (number + 1)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    (folder / "red" / "notes.txt").write_text("no picture")
    return folder


def test_samples_are_pixels_and_classes_of_folders(pets):
    data = Data(dataset=Images(path=str(pets)), parts={"train": 6, "val": 6}, batch_size=3)
    assert (data.spec.input_shape, data.spec.input_dtype, data.spec.num_classes) == ((3, 6, 8), "float32", 3)
    assert data.fitted == {"images": {"classes": ["blue", "green", "red"]}}
    part = data.part("val")
    for index in range(len(part)):
        pixels, target = part[index]
        with Image.open(part.files[index]) as picture:
            expected = np.asarray(picture)
        assert np.array_equal((pixels * 255).round().permute(1, 2, 0).numpy(), expected)
        assert Path(part.files[index]).parent.name == list(COLOURS)[int(target)]


def test_folders_of_parts_are_the_parts(pets):
    for part, classes in {"Train": COLOURS, "test": ("blue", "red")}.items():
        for name in classes:
            shutil.copytree(pets / name, pets / "parts" / part / name)
    made = Images(path=str(pets / "parts"))
    data = Data(dataset=made)
    files = {stage: data.part(stage).files for stage in data.stages}
    assert {stage: len(own) for stage, own in files.items()} == {"train": 10, "val": 2, "test": 8}
    assert {Path(file).parts[-3] for file in {*files["train"], *files["val"]}} == {"Train"}
    assert data.part("test").targets.tolist() == [0] * 4 + [2] * 4
    assert len(Data(dataset=made, parts={"test": 1.0}, earlier=lambda: data.fitted).part("test")) == 20
    with pytest.raises(ConfigError, match=r"data.split: rules, although Images is a stream or defines its own splits"):
        Data(dataset=made, split={"folds": 3})
    with pytest.raises(
        ConfigError, match=r"data.parts.test: 0.5, although the data set has a test split; expected null"
    ):
        Data(dataset=made, parts={"train": 0.5, "test": 0.5})


def test_hidden_files_and_folders_of_systems_are_no_samples(pets):
    for name in (".ipynb_checkpoints", "@eaDir", "red/.ipynb_checkpoints", "red/@eaDir/0.png", "red/__MACOSX"):
        shutil.copytree(pets / "blue", pets / name)
    shutil.copy(pets / "red/0.png", pets / "red/._0.png")
    assert Counter(Path(file).parent.name for file in Images(path=str(pets)).files) == dict.fromkeys(COLOURS, 4)
    assert len(UnlabelledImages(path=str(pets))) == 12


def test_transparent_pictures_are_laid_on_white(tmp_path):
    draw = np.random.default_rng(0)
    pixels, opacity = (draw.integers(0, 256, (6, 8, count), dtype=np.uint8) for count in (3, 1))
    icon = Image.fromarray(np.concatenate([pixels, opacity], 2))
    for name, picture in {"a": icon, "b": icon.convert("LA"), "c": icon.convert("RGB").quantize(4)}.items():
        (tmp_path / name).mkdir()
        picture.save(tmp_path / name / "0.png", **({"transparency": 1} if name == "c" else {}))
    found = Images(path=str(tmp_path), mode="RGB")
    for place, file in enumerate(found.files):
        with Image.open(file) as picture:
            rgba = np.asarray(picture.convert("RGBA"), np.float64)
        share = rgba[..., 3:] / 255
        expected = rgba[..., :3] * share + 255 * (1 - share)
        assert np.abs((found[place][0] * 255).permute(1, 2, 0).numpy() - expected).max() < 1.6


def test_pictures_are_resized_cropped_and_normalized(pets):
    made = Images(path=str(pets), resize=12, crop=[12, 10], mode="L", mean=[0.5], std=[0.25])
    pixels, _ = made[0]
    with Image.open(made.files[0]) as picture:
        grey = picture.convert("L").resize((16, 12), Image.Resampling.BILINEAR).crop((3, 0, 13, 12))
    assert pixels.shape == (1, 12, 10)
    expected = (torch.from_numpy(np.array(grey, dtype=np.float32)) / 255 - 0.5) / 0.25
    assert torch.allclose(pixels[0], expected)


def test_transforms_bring_pictures_of_any_size_to_one(pets):
    Image.new("RGB", (20, 10)).save(pets / "red/9.png")
    moves = {"train_transforms": [RandomCrop(size=4)], "eval_transforms": [torch.nn.AdaptiveAvgPool2d(4)]}
    parts = {"train": 0.5, "val": 0.5}
    data = Data(dataset=Images(path=str(pets), any_size=True), parts=parts, batch_size=2, **moves)
    assert data.spec.input_shape == (3, 4, 4)
    whole = data.part("val")
    pooled = [torch.nn.functional.adaptive_avg_pool2d(whole[index][0], 4) for index in range(len(whole))]
    assert torch.equal(torch.cat([batch.data[0] for batch in data.loader("val")]), torch.stack(pooled))
    assert all(batch.data[0].shape[1:] == (3, 4, 4) for batch in data.loader("train"))


def test_a_list_names_files_and_targets(pets):
    rows = [f"{name}/{number}.png,{name},{number}.5" for name in ("red", "blue") for number in range(3)]
    (pets / "list.csv").write_text("\n".join(["path,kind,age", *rows]))
    classes = Images(path=str(pets / "list.csv"), target="kind")
    assert (classes.classes, classes.targets.tolist()) == (("blue", "red"), [1, 1, 1, 0, 0, 0])
    numbers = Images(path=str(pets / "list.csv"), target="age", task="regression")
    assert numbers[2][1].tolist() == [2.5]
    assert Data(train=numbers).spec.num_classes is None


def test_validation_uses_the_classes_of_training(pets, tmp_path):
    for name in ("green", "red"):
        (tmp_path / "val" / name).mkdir(parents=True)
        (pets / name / "0.png").rename(tmp_path / "val" / name / "0.png")
    train, val = Images(path=str(pets)), Images(path=str(tmp_path / "val"))
    assert Data(train=train, val=val).part("val").targets.tolist() == [1, 2]
    with pytest.raises(
        ConfigError, match=r"the class blue, which is not in the training split; expected .* green, red"
    ):
        Data(train=val, val=train)


def save(mode, size=(8, 6)):
    return lambda pets: Image.new(mode, size).save(pets / "red/9.png")


def parts(*names):
    def make(pets):
        classes = list(pets.iterdir())
        for name in names:
            for folder in classes:
                shutil.copytree(folder, pets / name / folder.name)
        for folder in classes:
            shutil.rmtree(folder)

    return make


def save_16_bits(kind, channels):
    """Write a 16-bit PNG file (section 5 of the standard), which pillow reads but cannot write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head, rows = struct.pack(">IIBBBBB", 8, 6, 16, kind, 0, 0, 0), zlib.compress(bytes(6 * (1 + 8 * 2 * channels)))
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return lambda pets: (pets / "red/9.png").write_bytes(content)


def write_list(rows):
    return lambda pets: (pets / "list.csv").write_text(f"path,target\n{rows}")


LIST = {"path": "list.csv"}


@pytest.mark.parametrize(
    ("spoil", "settings", "message"),
    [
        (
            lambda pets: (pets / "blue/1.png").write_bytes(b"no picture"),
            {},
            r"1.png, which cannot be read: the format is unknown",
        ),
        (
            lambda pets: (pets / "owl").mkdir(),
            {},
            r"pets/owl without a picture; expected at least one file that ends in .png",
        ),
        (save("RGB", (9, 9)), {}, r"dataset.resize: null, although the pictures differ"),
        (save("RGB", (9, 9)), {"resize": 4}, r"data.dataset.resize: 4, although"),
        (save("L"), {}, r"0.png is of mode RGB and .*9.png is of mode L"),
        (save("P"), {}, r"9.png is of mode P.*data.dataset.mode=RGB"),
        (save("I;16"), {"mode": "L"}, r"9.png of .* 8 bits"),
        (save_16_bits(2, 3), {}, r"9.png of pillow's mode RGB;16B, with more than 8 bits"),
        (save_16_bits(4, 2), {"mode": "L"}, r"mode LA;16B, with more than 8 bits"),
        (lambda pets: (pets / "red/9.ppm").write_bytes(b"P6 8 6 1023\n" + bytes(288)), {}, r"mode RGB;16, with more"),
        (lambda pets: (pets / "red/9.ppm").write_bytes(b"P1 8 6 " + b"1 " * 48), {}, r"9.ppm is of mode 1"),
        (
            parts("train", "val", "dev"),
            {},
            r"pets with dev, a folder of classes, next to train and val; .*Rename or move .*dev",
        ),
        (
            parts("train", "val", "more"),
            {},
            r"pets with more, a folder of classes, next to train and val; .*move .*more",
        ),
        (lambda pets: None, {"crop": 7}, r"data.dataset.crop: 7 x 7, although .*0.png has 6 x 8"),
        (lambda pets: None, {"path": "red"}, r"red with no folder; expected a folder of pictures for each"),
        (
            lambda pets: None,
            {"mean": [0.5]},
            r"data.dataset.std: null, although data.dataset.mean is set; expected both",
        ),
        (write_list("red/0.png,a\nred/1.png,a\n"), LIST, r"one class, a, in"),
        (write_list("red/0.png,a\nred/7.png,b\n"), LIST, r"red/7.png, which does not exist, in line 3 of"),
    ],
)
def test_errors_of_pictures(pets, spoil, settings, message):
    spoil(pets)
    settings = {**settings, "path": str(pets / settings.get("path", ""))}
    with pytest.raises(ConfigError, match=message):
        Images(**settings)


@pytest.mark.parametrize("first", [True, False])
def test_truncated_pictures_are_found_before_training(pets, first):
    whole = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in COLOURS:
        for number in range(4):
            Image.fromarray(whole).save(pets / name / f"{number}.png")
    # The end of the files is missing, and their start is intact.
    for file in (pets / "blue").glob("*.png") if first else [pets / "red/2.png"]:
        file.write_bytes(file.read_bytes()[:4000])
    words = ["data=images", f"data.dataset.path={pets}", "data.parts={train: 0.5, val: 0.5, test: 0}", "test=false"]
    with pytest.raises(ConfigError, match=r"path: .*png, which cannot be read: .*; expected undamaged pictures"):
        refuse_other_data(plan(resolve(exp.compose([*words, "data.num_workers=0"]))))


def test_random_crops_do_not_depend_on_workers(pets):
    made = Images(path=str(pets))
    settings = {"train": made, "train_transforms": {"flip": RandomFlip(), "crop": RandomCrop(size=4, padding=1)}}
    batches = [
        [batch.data[0] for batch in Data(**settings, num_workers=workers, batch_size=5).loader("train")]
        for workers in (0, 2)
    ]
    assert batches[0][0].shape == (5, 3, 4, 4)
    assert all(torch.equal(mine, other) for mine, other in zip(*batches, strict=True))


# Orientations of section 4.6.5 of the EXIF standard.
UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientations_are_applied(tmp_path, orientation):
    pixels = np.random.RandomState(0).randint(0, 256, (4, 6, 3)).astype(np.uint8)
    wanted = np.ascontiguousarray(UPRIGHT[orientation](pixels))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for name in ("a", "b"):
        (tmp_path / "cameras" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "cameras" / name / "held.png", exif=exif)
        Image.fromarray(wanted).save(tmp_path / "cameras" / name / "upright.png")
    pictures = Images(path=str(tmp_path / "cameras"))
    for index in range(len(pictures)):
        found = (pictures[index][0] * 255).round().permute(1, 2, 0).numpy()
        assert np.array_equal(found, wanted)
