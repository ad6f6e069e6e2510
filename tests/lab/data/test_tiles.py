"""Tiles and patches: their pixels and labels, how patches are drawn, and errors for invalid folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.lab.data import Patches, Tiles, load_tiles, load_vaihingen
from papa.lab.data.cache import cache_folder
from papa.lab.data.tiles import ISPRS, Classes, TileFile, decode_tile, measure_tiles, scan_tiles, split_tiles
from papa.training.data import Source, Streaming, stream_batches

AREAS = ("alder", "birch", "cedar", "elm", "fir")


def write_tile(
    root: Path, name: str, size: tuple[int, int] = (40, 34), *, num_classes: int = 3, mode: str = "RGB"
) -> tuple[np.ndarray, np.ndarray]:
    """An image and its labels, both random, a few pixels without a class."""
    random = np.random.default_rng(list(name.encode()))
    width, height = size
    image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    labels = random.integers(0, num_classes, (height, width)).astype(np.uint8)
    labels[0, :3] = 255
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).convert(mode).save(root / "images" / f"{name}.png")
    Image.fromarray(labels).save(root / "labels" / f"{name}.png")
    return image, labels


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, area in enumerate(AREAS):
        for part in (1, 2):
            write_tile(tmp_path, f"{area}_part{part}", (40 + number, 34 + 2 * number))
    write_json(tmp_path / "classes.json", {"classes": ["land", "water", "road"], "ignore": 255})
    return tmp_path


def numbered_planes(height: int, width: int, first: int = 0) -> Tensor:
    """Every pixel tells where it is: row, column, tile; and its label is its row."""
    rows = torch.arange(height, dtype=torch.uint8)[:, None].expand(height, width)
    columns = torch.arange(width, dtype=torch.uint8).expand(height, width)
    return torch.stack([rows, columns, torch.full_like(rows, first), rows])


def numbered_patches(num_patches: int = 50, patch_size: int = 8) -> Patches:
    planes = [numbered_planes(20, 30, 0), numbered_planes(8, 8, 1), numbered_planes(40, 9, 2)]
    return Patches(planes, patch_size=patch_size, num_patches=num_patches)


def test_patches_are_a_streaming_source_and_tiles_a_plain_one() -> None:
    assert isinstance(numbered_patches(), Streaming)
    tiles = Tiles([numbered_planes(3, 4)])
    assert isinstance(tiles, Source)
    assert not isinstance(tiles, Streaming)


def test_a_patch_is_a_square_of_one_tile_or_its_mirror_image_and_labels_follow() -> None:
    images, labels = next(stream_batches(numbered_patches(), [torch.arange(200)], seed=3))
    assert images.shape == (200, 3, 8, 8)
    rows, columns, tile = images.unbind(1)
    assert torch.equal(labels, rows)
    assert all(len(one.unique()) == 1 for one in tile)
    down, right = rows.int().diff(dim=1), columns.int().diff(dim=2)
    assert all(len(one.unique()) == 1 and abs(one.unique().item()) == 1 for one in (*down, *right))
    kinds = {
        (step_down[0, 0].item(), step_right[0, 0].item()) for step_down, step_right in zip(down, right, strict=True)
    }
    assert kinds == {(1, 1), (1, -1), (-1, 1), (-1, -1)}


def test_tiles_are_drawn_by_their_pixels_places_and_flips_evenly() -> None:
    images, _ = next(stream_batches(numbered_patches(), [torch.arange(8000)], seed=1))
    tiles = images[:, 2, 0, 0]
    counts = torch.bincount(tiles).double()
    pixels = torch.tensor([600.0, 64.0, 360.0], dtype=torch.float64)
    assert stats.chisquare(counts, pixels / pixels.sum() * 8000).pvalue > 0.01
    first = images[tiles == 0]
    tops, lefts = first[:, 0].flatten(1).min(1).values, first[:, 1].flatten(1).min(1).values
    for starts, sides in ((tops, 13), (lefts, 23)):
        assert stats.chisquare(torch.bincount(starts, minlength=sides)).pvalue > 0.01
    mirrored = (images[:, 1, 0, 0] > images[:, 1, 0, 1]).double()
    flipped = (images[:, 0, 0, 0] > images[:, 0, 1, 0]).double()
    for coin in (mirrored, flipped, (mirrored == flipped).double()):
        assert stats.binomtest(int(coin.sum()), len(coin)).pvalue > 0.01


def test_a_batch_is_a_function_of_seed_and_number_only() -> None:
    patches = numbered_patches()
    batches = [torch.tensor([0, 5, 3]), torch.tensor([1]), torch.tensor([7, 7])]
    whole = list(patches.stream(batches, seed=4))
    later = list(patches.stream(batches[1:], seed=4, start=1))
    for (images, labels), (again, labels_again) in zip(whole[1:], later, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, labels_again)
    other = next(patches.stream(batches, seed=5))
    assert not torch.equal(whole[0][0], other[0])
    assert not torch.equal(whole[0][0][0], whole[0][0][1])


def test_patches_by_index_are_always_the_same() -> None:
    patches = numbered_patches()
    images, labels = patches.batch(torch.tensor([4, 9]))
    again, _ = numbered_patches(num_patches=10).batch(torch.tensor([9]))
    assert torch.equal(images[1:], again)
    assert not torch.equal(images[0], images[1])
    assert torch.equal(labels, images[:, 0])


def test_tiles_come_whole_and_together_only_when_of_one_size() -> None:
    tiles = Tiles([numbered_planes(20, 30), numbered_planes(8, 8, 1), numbered_planes(8, 8, 2)])
    images, labels = tiles.batch(torch.tensor([0]))
    assert torch.equal(images[0], numbered_planes(20, 30)[:3])
    assert torch.equal(labels[0], numbered_planes(20, 30)[3])
    assert tiles.batch(torch.tensor([1, 2]))[0].shape == (2, 3, 8, 8)
    with pytest.raises(DataError, match="2 tiles of 2 sizes were asked for at once, expected one size"):
        tiles.batch(torch.tensor([0, 1]))


def test_patches_that_do_not_fit_raise() -> None:
    with pytest.raises(DataError, match=r"1 is 8 x 8, smaller than a patch; 2 is 9 x 40, .* at least 10 x 10"):
        numbered_patches(patch_size=10)
    with pytest.raises(ConfigError, match="patch_size is 8 and num_patches 0"):
        numbered_patches(num_patches=0)


def test_a_folder_gives_patches_of_some_areas_and_whole_tiles_of_others(root: Path) -> None:
    images = load_tiles(root, patch_size=16, patches_per_epoch=20)
    assert images.classes == ("land", "water", "road")
    assert (images.num_classes, images.ignore, images.image_size, len(images.train)) == (3, 255, 16, 20)
    assert isinstance(images.train, Patches)
    assert isinstance(images.validation, Tiles)
    assert isinstance(images.test, Tiles)
    areas = [{name.split("_")[0] for name in part.names} for part in (images.validation, images.test)]
    assert [len(part) for part in areas] == [1, 1]
    assert areas[0] != areas[1]
    assert len(images.train.planes) == 6
    place = images.test.names.index(f"{min(areas[1])}_part2")
    pixels, labels = images.test.batch(torch.tensor([place]))
    name = images.test.names[place]
    assert np.array_equal(pixels[0].permute(1, 2, 0), np.asarray(Image.open(root / "images" / f"{name}.png")))
    assert np.array_equal(labels[0], np.asarray(Image.open(root / "labels" / f"{name}.png")))
    data = images.split(0.02, seed=1)
    assert (data.train, data.validation, data.test) == (images.train, images.validation, images.test)


def test_the_drawn_split_keeps_areas_together_and_is_the_same_every_time(root: Path) -> None:
    tiles = scan_tiles(root)
    split = split_tiles(root, tiles)
    assert sorted(tile.name for part in split.values() for tile in part) == sorted(tile.name for tile in tiles)
    homes = {tile.area: part for part, members in split.items() for tile in members}
    assert all(homes[tile.area] == part for part, members in split.items() for tile in members)
    assert split == split_tiles(root, list(reversed(tiles))[::-1])


def test_decoded_tiles_are_kept_in_files_that_are_mapped(root: Path) -> None:
    first = load_tiles(root, patch_size=16)
    assert isinstance(first.test, Tiles)
    caches = sorted(cache_folder(root).glob("tile-*.safetensors"))
    assert len(caches) == 10
    times = [cache.stat().st_mtime_ns for cache in caches]
    again = load_tiles(root, patch_size=16)
    assert [cache.stat().st_mtime_ns for cache in caches] == times
    assert isinstance(again.test, Tiles)
    assert torch.equal(first.test.planes[0], again.test.planes[0])
    name = again.test.names[0]
    write_tile(root, name, (50, 41))
    changed = load_tiles(root, patch_size=16)
    assert isinstance(changed.test, Tiles)
    assert changed.test.planes[0].shape == (4, 41, 50)


def test_moments_are_those_of_the_training_pixels(root: Path) -> None:
    images = load_tiles(root, patch_size=16)
    assert isinstance(images.train, Patches)
    pixels = torch.cat([tile[:3].flatten(1) for tile in images.train.planes], dim=1).double() / 255
    assert images.mean == pytest.approx(pixels.mean(1).tolist())
    assert images.std == pytest.approx(pixels.std(1, correction=0).tolist())
    assert measure_tiles([torch.zeros(4, 2, 2, dtype=torch.uint8)]) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_shrinking_averages_colours_and_takes_the_label_in_the_middle(tmp_path: Path) -> None:
    image, labels = write_tile(tmp_path, "a", (10, 7))
    tile = TileFile("a", tmp_path / "images" / "a.png", tmp_path / "labels" / "a.png")
    planes = decode_tile(tile, Classes(names=("x", "y", "z")), shrink=3)
    assert planes.shape == (4, 2, 3)
    for row in range(2):
        for column in range(3):
            block = image[3 * row : 3 * row + 3, 3 * column : 3 * column + 3].astype(float)
            assert abs(planes[:3, row, column] - block.mean((0, 1))).max() < 1.0
            assert planes[3, row, column] == labels[3 * row + 1, 3 * column + 1]


def test_a_few_tiles_to_choose_by_and_test_on(root: Path) -> None:
    write_json(root / "splits.json", {"train": ["alder"], "validation": ["birch", "cedar"], "test": ["elm_part1"]})
    images = load_tiles(root, patch_size=16, max_test=2)
    assert isinstance(images.validation, Tiles)
    assert images.validation.names == ["birch_part1", "cedar_part1"]


def test_splits_are_read_by_names_of_images_and_areas(root: Path) -> None:
    write_json(root / "splits.json", {"train": ["alder", "elm_part1"], "validation": ["birch"], "test": ["elm_part2"]})
    images = load_tiles(root, patch_size=16)
    assert isinstance(images.train, Patches)
    assert isinstance(images.test, Tiles)
    assert len(images.train.planes) == 3
    assert images.test.names == ["elm_part2"]


def test_every_mistake_in_splits_is_reported_at_once(root: Path) -> None:
    write_json(root / "splits.json", {"train": ["alder", "bich"], "validation": ["alder_part2"], "test": []})
    with pytest.raises(DataError) as caught:
        load_tiles(root, patch_size=16)
    message = str(caught.value)
    assert "train has bich, no such image or area: did you mean birch?" in message
    assert "test has no image, expected at least one" in message
    assert "alder_part2 is in train and validation, expected it in one" in message
    write_json(root / "splits.json", {"train": ["alder"]})
    with pytest.raises(DataError, match=r"has no list 'validation'\n.*has no list 'test'"):
        load_tiles(root, patch_size=16)


def test_too_few_areas_to_split_raise(tmp_path: Path) -> None:
    for name in ("a_part1", "a_part2", "b_part1"):
        write_tile(tmp_path, name)
    with pytest.raises(DataError, match=r"has images of 2 areas \(a, b\), expected at least 3, .*splits.json"):
        load_tiles(tmp_path, patch_size=16)


def test_without_classes_json_the_labels_are_counted(root: Path) -> None:
    (root / "classes.json").unlink()
    images = load_tiles(root, patch_size=16)
    assert images.classes == ("class 0", "class 1", "class 2")
    assert images.ignore == 255


def test_all_files_that_cannot_be_used_are_reported_up_to_ten(root: Path) -> None:
    (root / "labels" / "alder_part1.png").unlink()
    write_tile(root, "birch_part1", mode="L")
    Image.new("L", (5, 5)).save(root / "labels" / "cedar_part1.png")
    (root / "images" / "elm_part1.png").write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        load_tiles(root, patch_size=16)
    message = str(caught.value)
    assert "alder_part1.png has no labels: expected" in message
    assert "birch_part1.png has the mode L, expected RGB" in message
    assert "cedar_part1.png and its labels differ in size (42 x 38 and 5 x 5)" in message
    assert "elm_part1.png cannot be decoded (UnidentifiedImageError" in message
    for number in range(12):
        Image.new("RGB", (20, 20)).save(root / "images" / f"lonely{number}.png")
    with pytest.raises(DataError, match=r"\n  and 6 more$"):
        load_tiles(root, patch_size=16)


def test_damaged_labels_are_named_among_all_that_is_wrong(root: Path) -> None:
    for name in ("alder_part1", "fir_part2"):
        path = root / "labels" / f"{name}.png"
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        load_tiles(root, patch_size=16)
    assert "alder_part1.png cannot be decoded" in str(caught.value)
    assert "fir_part2.png cannot be decoded" in str(caught.value)


def test_unknown_labels_of_all_tiles_are_reported(root: Path) -> None:
    write_json(root / "classes.json", {"classes": ["land", "water"]})
    with pytest.raises(DataError) as caught:
        load_tiles(root, patch_size=16)
    assert str(caught.value).count("has labels 2, expected 0 to 1 (land, water), or 255 for none") == 10


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"classes": []}, r"classes is \[\], expected a list of different names"),
        ({"classes": ["a", "a"]}, "expected a list of different names"),
        ({"classes": ["a", "b"], "ignore": 1}, "ignore is 1, expected a label from 2 to 255"),
        ({"classes": ["road"], "colours": {"raod": [1, 2, 3]}}, "no class raod for its colour: did you mean road"),
        ({"classes": ["a"], "colours": {"a": [1, 2]}}, r"colour of a is \[1, 2\], expected three numbers"),
        ({"classes": ["a", "b"], "colours": {"a": [1, 2, 3]}}, "the class b has no colour"),
        ([], "holds a list, expected an object"),
    ],
)
def test_bad_classes_raise(root: Path, value: Any, message: str) -> None:
    write_json(root / "classes.json", value)
    with pytest.raises(DataError, match=message):
        load_tiles(root, patch_size=16)


def colour_labels(root: Path, name: str, labels: np.ndarray) -> None:
    colours = np.array([ISPRS.colours[one] for one in (*ISPRS.names, "ignore")], dtype=np.uint8)
    Image.fromarray(colours[labels]).save(root / "labels" / f"{name}.png")


def vaihingen(root: Path) -> dict[str, np.ndarray]:
    """Three tiles with labels in the benchmark's colours."""
    labels = {}
    for number in (1, 2, 3):
        name = f"top_mosaic_09cm_area{number}"
        write_tile(root, name)
        labels[name] = np.random.default_rng(number).integers(0, 7, (34, 40))
        colour_labels(root, name, labels[name])
    return labels


def test_vaihingen_has_coloured_labels_and_asks_for_its_split(tmp_path: Path) -> None:
    labels = vaihingen(tmp_path)
    with pytest.raises(DataError, match=r"there is no .*splits.json, .* the paper has 11, 5 and 17 of them"):
        load_vaihingen(tmp_path, patch_size=16)
    names = sorted(labels)
    write_json(tmp_path / "splits.json", {"train": [names[0]], "validation": [names[1]], "test": [names[2]]})
    images = load_vaihingen(tmp_path, patch_size=16)
    assert images.classes == ("roads", "buildings", "vegetation", "trees", "cars", "clutter")
    assert isinstance(images.test, Tiles)
    assert np.array_equal(images.test.planes[0][3], np.where(labels[names[2]] == 6, 255, labels[names[2]]))


def test_unknown_colours_are_reported(tmp_path: Path) -> None:
    names = sorted(vaihingen(tmp_path))
    write_json(tmp_path / "splits.json", {"train": [names[0]], "validation": [names[1]], "test": [names[2]]})
    with pytest.raises(DataError, match="are in colour, and nothing says which colour is which class"):
        load_tiles(tmp_path, patch_size=16)
    Image.new("RGB", (40, 34), (1, 2, 3)).save(tmp_path / "labels" / f"{names[1]}.png")
    with pytest.raises(
        DataError, match=r"area2\.png has the colours \(1, 2, 3\), which classes.json gives to no class"
    ):
        load_vaihingen(tmp_path, patch_size=16)
    write_json(tmp_path / "classes.json", {"classes": ["roads"]})
    with pytest.raises(DataError, match=r"is in colour, but classes\.json names no colours"):
        load_vaihingen(tmp_path, patch_size=16)


def test_folders_that_are_not_there_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no image in .*images: expected images in .* and label images of the same"):
        load_tiles(tmp_path)
    write_tile(tmp_path, "a")
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.jpg")
    with pytest.raises(DataError, match=r"a.png has the same name as .*a.jpg, expected one file for each"):
        load_tiles(tmp_path)
    with pytest.raises(ConfigError, match="shrink is 0"):
        load_tiles(tmp_path, shrink=0)
