"""Folders of class folders: what is found in them, and what is wrong with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from papa.errors import ConfigError, DataError
from papa.lab.data import DecodedFolder, load_images
from papa.lab.data.cache import cache_folder
from papa.lab.data.digits import NUM_TRAIN
from papa.lab.data.files import decode_files, resize_and_crop, scan_classes
from papa.lab.data.splits import targets_of
from papa.training.data import Arrays, Subset

MakeImages = Callable[..., list[Path]]


@pytest.fixture
def split_folder(tmp_path: Path, make_images: MakeImages) -> Path:
    """Two classes of 8 x 8 images, with a test folder."""
    for part, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            make_images(tmp_path / part / name, count)
    return tmp_path


def planar(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1).copy())


def test_train_and_test_folders(split_folder: Path) -> None:
    images = load_images("images", root=split_folder)
    assert (len(images.train), len(images.test), images.num_classes) == (8, 4, 2)
    assert images.classes == ("cat", "dog")
    assert (images.channels, images.image_size, images.crop_padding, images.flip) == (3, 8, 1, True)
    assert isinstance(images.train, Arrays)
    inputs, targets = images.train.batch(torch.tensor([5, 0]))
    assert targets.tolist() == [1, 0]
    assert torch.equal(inputs[0], planar(split_folder / "train" / "dog" / "001.png"))
    assert torch.equal(inputs[1], planar(split_folder / "train" / "cat" / "000.png"))


def test_val_serves_as_test(split_folder: Path) -> None:
    (split_folder / "test").rename(split_folder / "val")
    assert len(load_images("images", root=split_folder).test) == 4


def test_mean_and_std_are_those_of_the_training_images(split_folder: Path) -> None:
    images = load_images("images", root=split_folder)
    pixels = images.train.batch(torch.arange(8))[0].double() / 255
    assert images.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert images.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_images_of_one_colour_have_a_usable_std(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "grey").mkdir(parents=True)
        Image.new("RGB", (8, 8), (128, 128, 128)).save(tmp_path / part / "grey" / "1.png")
    assert load_images("images", root=tmp_path).std == (1.0, 1.0, 1.0)


def test_images_are_decoded_in_order_bicubic_and_named_if_damaged(tmp_path: Path, make_images: MakeImages) -> None:
    paths = [str(path) for path in make_images(tmp_path / "cat", 25, (9, 9))]
    expected = [np.asarray(Image.open(path).resize((6, 6), Image.Resampling.BICUBIC)) for path in paths]
    assert np.array_equal(decode_files(paths, 6), np.stack(expected).transpose(0, 3, 1, 2))
    grey = np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])
    assert np.array_equal(decode_files(paths, 9, channels=1), grey[:, None])
    Path(paths[10]).write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"010\.png cannot be decoded"):
        decode_files(paths, 6)


def test_a_share_is_split_off_where_there_is_no_test_folder(tmp_path: Path, make_images: MakeImages) -> None:
    for name in ("cat", "dog", "test", "val"):  # names of parts are class names here
        make_images(tmp_path / name, 10)
    images = load_images("images", root=tmp_path, test_share=0.2)
    assert images.classes == ("cat", "dog", "test", "val")
    assert isinstance(images.train, Subset)
    assert isinstance(images.test, Subset)
    assert torch.bincount(targets_of(images.test)).tolist() == [2, 2, 2, 2]
    assert torch.bincount(targets_of(images.train)).tolist() == [8, 8, 8, 8]
    assert not set(images.train.indices.tolist()) & set(images.test.indices.tolist())
    again = load_images("images", root=tmp_path, test_share=0.2)
    assert isinstance(again.test, Subset)
    assert torch.equal(again.test.indices, images.test.indices)
    assert images.train.source is images.test.source


def test_limits(split_folder: Path) -> None:
    images = load_images("images", root=split_folder, max_train=4, max_test=2)
    assert torch.bincount(targets_of(images.train)).tolist() == [2, 2]
    assert torch.bincount(targets_of(images.test)).tolist() == [1, 1]


def test_resizing_keeps_proportions_and_the_middle() -> None:
    wide = Image.fromarray(np.repeat(np.arange(16, dtype=np.uint8)[None], 8, axis=0))
    middle = resize_and_crop(wide, shorter_side=8, size=8, resample=Image.Resampling.BICUBIC)
    assert np.asarray(middle)[0].tolist() == list(range(4, 12))
    assert resize_and_crop(wide, shorter_side=4, size=4, resample=Image.Resampling.BICUBIC).size == (4, 4)
    assert resize_and_crop(wide.rotate(90, expand=True), shorter_side=5, size=4, resample=2).size == (4, 4)


def test_a_cache_serves_the_folder_by_any_path(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_images("images", root=split_folder)
    made = {path: path.stat().st_mtime_ns for path in cache_folder(split_folder).iterdir()}
    assert made
    monkeypatch.chdir(split_folder.parent)
    load_images("images", root=split_folder.name)
    assert {path: path.stat().st_mtime_ns for path in cache_folder(split_folder).iterdir()} == made


def test_own_images_of_any_sizes_get_a_size_and_test_images(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path / "cat", 10, (20, 30))
    make_images(tmp_path / "dog", 5, (120, 100))
    images = load_images("images", root=tmp_path)
    assert (images.image_size, images.classes, len(images.train), len(images.test)) == (64, ("cat", "dog"), 12, 3)
    assert load_images("images", root=tmp_path, image_size=16, test_share=0.4).image_size == 16
    assert len(load_images("images", root=tmp_path, test_share=0.4).test) == 6


def test_changed_images_are_decoded_again(split_folder: Path) -> None:
    load_images("images", root=split_folder)
    path = split_folder / "train" / "cat" / "000.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(path)
    pixels = load_images("images", root=split_folder).train.batch(torch.tensor([0]))[0]
    assert pixels[0, :, 0, 0].tolist() == [1, 2, 3]
    os.remove(path)
    assert len(load_images("images", root=split_folder).train) == 7


def test_other_modes_nested_folders_and_other_files(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path / "train" / "cat" / "deep", 2)
    Image.new("L", (8, 8), 9).save(tmp_path / "train" / "cat" / "z-grey.PNG")
    Image.new("RGBA", (8, 8), (1, 2, 3, 4)).save(tmp_path / "train" / "cat" / "z-see-through.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / ".hidden.png").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    make_images(tmp_path / "test" / "cat", 1)
    images = load_images("images", root=tmp_path)
    assert images.classes == ("cat",)
    assert len(images.train) == 4
    assert images.train.batch(torch.tensor([2]))[0].unique().tolist() == [9]


def test_names_in_any_script(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path / "Kätzchen 猫", 2)
    files = scan_classes(tmp_path)
    assert files.classes == ("Kätzchen 猫",)
    assert all(os.path.isfile(path) for path in files.paths())


def test_large_images_are_decoded_when_needed(tmp_path: Path, make_images: MakeImages) -> None:
    for part in ("train", "test"):
        make_images(tmp_path / part / "cat", 2, (120, 100))
    images = load_images("images", root=tmp_path, image_size=224)
    assert isinstance(images.train, DecodedFolder)
    assert (images.image_size, images.crop_padding, images.flip) == (224, 0, False)
    assert images.mean == (0.485, 0.456, 0.406)
    assert images.test.batch(torch.tensor([0]))[0].shape == (1, 3, 224, 224)
    assert not cache_folder(tmp_path).exists()
    assert isinstance(load_images("images", root=tmp_path, image_size=64).train, Arrays)


def test_imagenet_is_in_train_and_val(tmp_path: Path, make_images: MakeImages) -> None:
    for part in ("train", "val"):
        make_images(tmp_path / "imagenet" / part / "n01440764", 2, suffix=".jpeg")
    (tmp_path / "imagenet" / "test").mkdir()  # ImageNet's own has no class folders
    for root in (tmp_path, tmp_path / "imagenet"):
        images = load_images("imagenet", root=root, image_size=112)
        assert isinstance(images.train, DecodedFolder)
        assert images.image_size == 112
    assert load_images("imagenet", root=tmp_path).image_size == 224
    small = load_images("imagenet", root=tmp_path, image_size=32)
    assert isinstance(small.train, Arrays)
    assert (small.mean, small.crop_padding) == ((0.485, 0.456, 0.406), 4)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data.root is .*none, and there is no such folder: expected one folder"):
        load_images("images", root=tmp_path / "none")
    with pytest.raises(DataError, match="there is no folder"):
        scan_classes(tmp_path / "none")


def test_no_class_folder(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path, 2)
    with pytest.raises(DataError, match="has no class folder, expected one folder of images per class, such as"):
        load_images("images", root=tmp_path, test_share=0.2)
    with pytest.raises(DataError, match="has no class folder"):
        load_images("images", root=tmp_path)


def test_an_empty_class_folder(split_folder: Path) -> None:
    (split_folder / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=r"the class folder .*train/emu has no image, expected .*\.png.*: add images"):
        load_images("images", root=split_folder)


@pytest.mark.parametrize("contents", [b"", b"not an image", None], ids=["empty", "text", "cut off"])
def test_an_image_that_cannot_be_decoded(split_folder: Path, contents: bytes | None) -> None:
    path = split_folder / "train" / "dog" / "002.png"
    path.write_bytes(path.read_bytes()[:100] if contents is None else contents)
    with pytest.raises(DataError, match=r"the image .*train/dog/002\.png cannot be decoded \(.*replace it, or remove"):
        load_images("images", root=split_folder)


def test_classes_that_differ(split_folder: Path, make_images: MakeImages) -> None:
    (split_folder / "test" / "dog").rename(split_folder / "test" / "fox")
    with pytest.raises(DataError, match=r"the class folders differ: .*test has no dog; .*train has no fox\. Expected"):
        load_images("images", root=split_folder)
    for number in range(8):
        make_images(split_folder / "train" / f"more{number}", 1)
    with pytest.raises(DataError, match=r"has no dog, more0, more1, more2, more3 and 4 more; "):
        load_images("images", root=split_folder)


def test_what_is_asked_of_the_wrong_data(split_folder: Path, make_images: MakeImages) -> None:
    with pytest.raises(ConfigError, match=r"test-share is 0\.2, but .* has its own test images in .*: leave it out"):
        load_images("images", root=split_folder, test_share=0.2)
    with pytest.raises(ConfigError, match=r"test-share is 0\.2, but digits has its own test images: leave it out"):
        load_images("digits", test_share=0.2)
    with pytest.raises(ConfigError, match="image_size is 16, but digits is decoded as it is"):
        load_images("digits", image_size=16)
    make_images(split_folder / "alone" / "cat", 1)
    with pytest.raises(DataError, match=r"a test share of 0\.1 splits no image off 1 images of 1 classes"):
        load_images("images", root=split_folder / "alone", test_share=0.1)
    with pytest.raises(DataError, match=r"has no test images, expected .*val/CLASS"):
        load_images("imagenet", root=split_folder)


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ConfigError, match="there is no data set cifar-10: did you mean cifar10"):
        load_images("cifar-10")


def test_without_pillow(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"the package PIL is not installed: pip install 'papa-torch\[lab"):
        load_images("images", root=split_folder)
    assert load_images("digits").image_size == 8


def test_digits() -> None:
    images = load_images("digits")
    assert (len(images.train), len(images.test), images.num_classes) == (NUM_TRAIN, 1797 - NUM_TRAIN, 10)
    assert (images.channels, images.image_size, images.crop_padding, images.flip) == (1, 8, 1, False)
    assert images.classes == tuple("0123456789")
