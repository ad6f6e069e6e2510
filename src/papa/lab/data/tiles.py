"""Tiles for segmentation: large images with a class per pixel, trained on random patches and evaluated whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from papa.errors import ConfigError, DataError, did_you_mean
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.files import Pixels, digest_of, opened_image, read_image, some_of
from papa.lab.data.images import ImageSet, Numbers
from papa.storage import read_object
from papa.streams import stream

BATCH_SEED = 0
"""The seed of the patches that `Patches.batch` returns."""
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
LABEL_ENDINGS = (".png", ".tif", ".tiff")
"""Lossless formats: a label changed by compression would be another class."""
PARTS = ("train", "validation", "test")
IGNORE = 255
"""The label of pixels that have no class, unless `classes.json` says otherwise."""

SPLIT_SEED = 1
"""Seeds the random split of areas; the same in every run."""

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class TileFile:
    """An image and its labels."""

    name: str
    image: Path
    labels: Path

    @property
    def area(self) -> str:
        """What it was cut from: the name before `_part`. Parts of one area touch, so they go into the same split."""
        return self.name.split("_part")[0]


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The meaning of labels."""

    names: tuple[str, ...]
    """The name of each label, from 0 on."""
    ignore: int = IGNORE
    """The label of pixels that have no class."""
    colours: Mapping[str, Colour] = field(default_factory=dict)
    """For label images in colour: the colour of each class, and under `ignore` that of pixels without one."""


ISPRS = Classes(
    names=("roads", "buildings", "vegetation", "trees", "cars", "clutter"),
    colours={
        "roads": (255, 255, 255),
        "buildings": (0, 0, 255),
        "vegetation": (0, 255, 255),
        "trees": (0, 255, 0),
        "cars": (255, 255, 0),
        "clutter": (255, 0, 0),
        "ignore": (0, 0, 0),
    },
)
"""The classes of the ISPRS benchmarks (Vaihingen, Potsdam) and the colours of their label images."""


class Tiles:
    """A source of whole tiles, read one at a time if they differ in size.

    A tile is a uint8 tensor (4, height, width) of red, green, blue and label.
    """

    def __init__(self, planes: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        self.planes, self.names = list(planes), list(names) or [str(place) for place in range(len(planes))]

    def __len__(self) -> int:
        return len(self.planes)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, 3, height, width) and labels (N, height, width) of tiles of one size."""
        tiles = [self.planes[index] for index in indices.tolist()]
        sizes = {tuple(tile.shape) for tile in tiles}
        if len(sizes) > 1:
            raise DataError(
                f"{len(tiles)} tiles of {len(sizes)} sizes were asked for at once, expected one size: ask for one tile "
                "at a time"
            )
        return _images_and_labels(tiles)


class Patches:
    """A source of random patches of tiles, flipped in each direction with probability 1/2.

    `stream`, used in training, draws new patches for every batch; `batch` returns a fixed patch for each index. A tile
    is drawn with a probability proportional to its number of pixels, a patch within it uniformly.

    Example:
        >>> patches = Patches([torch.zeros(4, 40, 50, dtype=torch.uint8)], patch_size=32, num_patches=100)
        >>> images, labels = patches.batch(torch.arange(8))
        >>> images.shape, labels.shape
        (torch.Size([8, 3, 32, 32]), torch.Size([8, 32, 32]))
    """

    def __init__(
        self, planes: Sequence[Tensor], *, patch_size: int, num_patches: int, names: Sequence[str] = ()
    ) -> None:
        if patch_size < 1 or num_patches < 1:
            raise ConfigError(f"patch_size is {patch_size} and num_patches {num_patches}, expected at least 1 of each")
        tiles = Tiles(planes, names)
        too_small = [
            f"{name} is {tile.shape[2]} x {tile.shape[1]}, smaller than a patch"
            for name, tile in zip(tiles.names, tiles.planes, strict=True)
            if min(tile.shape[1:]) < patch_size
        ]
        if too_small or not planes:
            found = "; ".join(too_small[:10]) or "there is no tile"
            raise DataError(f"{found}: expected tiles of at least {patch_size} x {patch_size}, or a smaller patch_size")
        self.planes, self.patch_size, self.num_patches = tiles.planes, patch_size, num_patches
        self._ends = torch.tensor([tile.shape[1] * tile.shape[2] for tile in self.planes]).cumsum(0)

    def __len__(self) -> int:
        return self.num_patches

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return _images_and_labels([self._patch(self._draw(1, BATCH_SEED, index)[0]) for index in indices.tolist()])

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """New random patches, as many per batch as there are indices."""
        for number, indices in enumerate(index_batches, start=start):
            yield _images_and_labels([self._patch(draws) for draws in self._draw(len(indices), seed, number)])

    def _draw(self, count: int, seed: int, position: int) -> list[list[float]]:
        draws = torch.rand(count, 5, dtype=torch.float64, generator=stream(seed, "patches", position=position))
        return list(draws.tolist())

    def _patch(self, draws: Sequence[float]) -> Tensor:
        tile_draw, top_draw, left_draw, flip_draw, mirror_draw = draws
        pixel = int(tile_draw * int(self._ends[-1]))
        tile = self.planes[int(torch.searchsorted(self._ends, pixel, right=True))]
        side = self.patch_size
        top, left = int(top_draw * (tile.shape[1] - side + 1)), int(left_draw * (tile.shape[2] - side + 1))
        patch = tile[:, top : top + side, left : left + side]
        axes = [axis for axis, draw in ((1, flip_draw), (2, mirror_draw)) if draw < 0.5]
        return patch.flip(axes)


def _images_and_labels(planes: list[Tensor]) -> tuple[Tensor, Tensor]:
    stacked = torch.stack(planes)
    return stacked[:, :3], stacked[:, 3]


def load_tiles(
    root: str | Path,
    *,
    patch_size: int = 256,
    patches_per_epoch: int = 10_000,
    shrink: int = 1,
    max_test: int | None = None,
    default_classes: Classes | None = None,
    needs_splits: bool = False,
) -> ImageSet:
    """Load tiles from `root/images`, with label images of the same names in `root/labels`.

    Classes are read from `root/classes.json` (see `read_classes`), training, validation and test tiles from
    `root/splits.json` (see `split_tiles`). Decoded tiles are cached in files that all processes map
    (`papa.lab.data.cache`).

    Training uses patches; height and width of tiles are divided by `shrink`. At most `max_test` validation tiles and as
    many test tiles are used, spread evenly over all. Without a `classes.json`, classes are the default ones, if any.
    """
    if shrink < 1:
        raise ConfigError(f"shrink is {shrink}, expected at least 1")
    folder = Path(root)
    files = scan_tiles(folder)
    classes = read_classes(folder, files, default_classes)
    split = split_tiles(folder, files, is_needed=needs_splits)
    if max_test is not None:
        split = {part: tiles if part == "train" else _spread(tiles, max_test) for part, tiles in split.items()}
    planes = _decoded(folder, [tile for tiles in split.values() for tile in tiles], classes, shrink)
    train, validation, test = ([planes[tile.name] for tile in split[part]] for part in ("train", "validation", "test"))
    names = {part: [tile.name for tile in tiles] for part, tiles in split.items()}
    mean, std = measure_tiles(train)
    return ImageSet(
        train=Patches(train, patch_size=patch_size, num_patches=patches_per_epoch, names=names["train"]),
        validation=Tiles(validation, names["validation"]),
        test=Tiles(test, names["test"]),
        classes=classes.names,
        ignore=classes.ignore,
        image_size=patch_size,
        mean=mean,
        std=std,
    )


load_vaihingen = partial(load_tiles, default_classes=ISPRS, needs_splits=True)
"""ISPRS Vaihingen: `load_tiles` with its classes and colours; it needs a `splits.json`."""


def measure_tiles(planes: Sequence[Tensor]) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel, of pixels scaled to [0, 1].

    Example:
        >>> measure_tiles([torch.tensor([0, 255, 0, 255], dtype=torch.uint8).expand(4, 1, 4)])
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    """
    values = torch.arange(256, dtype=torch.float64) / 255.0
    mean, std = [], []
    for channel in range(3):
        counts = torch.zeros(256, dtype=torch.float64)
        for tile in planes:
            counts += torch.bincount(tile[channel].reshape(-1), minlength=256)
        shares = counts / counts.sum()
        mean.append(float((shares * values).sum()))
        std.append(float((shares * (values - mean[-1]).square()).sum().sqrt()) or 1.0)
    return tuple(mean), tuple(std)


def _decoded(root: Path, tiles: Sequence[TileFile], classes: Classes, shrink: int) -> dict[str, Tensor]:
    """The planes of all tiles by name, from their caches; all errors are raised together."""
    planes: dict[str, Tensor] = {}
    problems = []
    meaning = (classes.names, classes.ignore, sorted(classes.colours.items()))

    def decode(tile: TileFile) -> Decoded:
        # The cache stores the four planes as four images of one channel.
        return Decoded(decode_tile(tile, classes, shrink), np.zeros(4, dtype=np.int64), classes.names)

    for tile in tiles:
        files = [str(path.relative_to(root)) for path in (tile.image, tile.labels)]
        digest = digest_of(root, files, classes=meaning, shrink=shrink)
        name = f"tile-{tile.name}" if shrink == 1 else f"tile-{tile.name}-by{shrink}"
        try:
            found, _ = cached_images(name, folder=root, digest=digest, decode=partial(decode, tile))
            planes[tile.name] = found.inputs
        except DataError as error:
            problems.append(str(error))
    _raise_all(root, problems)
    return planes


def _spread(tiles: Sequence[TileFile], most: int) -> list[TileFile]:
    count = min(most, len(tiles))
    return [tiles[number * len(tiles) // count] for number in range(count)]


def scan_tiles(root: Path) -> list[TileFile]:
    """The images in `root/images` with their labels in `root/labels`, sorted by name.

    All problems of the files (no labels, another size, not RGB) are reported at once.
    """
    images = _files_by_name(root / "images", IMAGE_ENDINGS)
    labels = _files_by_name(root / "labels", LABEL_ENDINGS)
    problems = [
        f"{path} has no labels: expected {root / 'labels' / name}.png"
        for name, path in images.items()
        if name not in labels
    ]
    tiles = [TileFile(name, path, labels[name]) for name, path in images.items() if name in labels]
    for tile in tiles:
        try:
            (mode, size), (_, label_size) = _mode_and_size(tile.image), _mode_and_size(tile.labels)
        except DataError as error:
            problems.append(str(error))
            continue
        if mode != "RGB":
            problems.append(f"{tile.image} has the mode {mode}, expected RGB: convert it")
        if size != label_size:
            sizes = " and ".join(f"{width} x {height}" for width, height in (size, label_size))
            problems.append(f"{tile.image} and its labels differ in size ({sizes}), expected one label for each pixel")
    _raise_all(root, problems)
    return tiles


def read_classes(root: Path, tiles: Sequence[TileFile], default: Classes | None = None) -> Classes:
    """The classes that `root/classes.json` names, else `default`, else one for each label up to the highest.

    The file: `{"classes": ["road", "tree"], "ignore": 255, "colours": {"road": [255, 255, 255], ...}}`; colours only
    where the label images are in colour. Unknown colours and labels are reported when the labels are read.
    """
    path = root / "classes.json"
    if path.exists():
        return _classes_of(path, read_object(path, error=DataError))
    if default is not None:
        return default
    highest = 0
    for tile in tiles:
        if _mode_and_size(tile.labels)[0] not in _WHOLE_NUMBERS:
            raise DataError(
                f"the labels {tile.labels} are in colour, and nothing says which colour is which class: write {path} "
                'such as {"classes": ["road", "tree"], "colours": {"road": [255, 255, 255], "tree": [0, 255, 0]}}'
            )
        labels = _label_array(tile.labels)
        highest = max(highest, int(labels[labels != IGNORE].max(initial=0)))
    return Classes(names=tuple(f"class {number}" for number in range(highest + 1)))


def split_tiles(root: Path, tiles: Sequence[TileFile], *, is_needed: bool = False) -> dict[str, list[TileFile]]:
    """Split tiles into training, validation and test data.

    As `root/splits.json` says, `{"train": [...], "validation": [...], "test": [...]}`, each a list of names of images
    or of areas (the name before `_part`); tiles that are in none are left out. Without the file, areas are drawn: a
    fifth for validation, a fifth for testing, the rest for training, the same on every run.
    """
    path = root / "splits.json"
    if path.exists():
        return _named_split(path, read_object(path, error=DataError), tiles)
    if is_needed:
        raise DataError(
            f"there is no {path}, expected which images to train, choose and test on, such as "
            '{"train": ["top_mosaic_09cm_area1"], "validation": ["top_mosaic_09cm_area11"], "test": '
            '["top_mosaic_09cm_area2"]}; the paper has 11, 5 and 17 of them'
        )
    areas = sorted({tile.area for tile in tiles})
    if len(areas) < len(PARTS):
        raise DataError(
            f"{root} has images of {len(areas)} areas ({', '.join(areas)}), expected at least {len(PARTS)}, one each "
            f"to train, choose and test on: add images, or say which is which in {path}"
        )
    order = torch.randperm(len(areas), generator=stream(SPLIT_SEED, "tile-split"))
    shuffled = [areas[place] for place in order.tolist()]
    fifth = max(1, round(len(areas) / 5))
    chosen = {"validation": shuffled[:fifth], "test": shuffled[fifth : 2 * fifth], "train": shuffled[2 * fifth :]}
    return {part: [tile for tile in tiles if tile.area in chosen[part]] for part in PARTS}


def decode_tile(tile: TileFile, classes: Classes, shrink: int = 1) -> Pixels:
    """Red, green, blue and the label of every pixel, of shape (4, height, width).

    With `shrink`, this number of pixels across and down become one: the mean of their colours, and the label in their
    middle.
    """
    image, labels = read_image(tile.image), _labels_of(tile, classes)
    width, height = (side // shrink for side in image.size)
    if shrink > 1:
        image = image.crop((0, 0, width * shrink, height * shrink)).reduce(shrink)
        labels = labels[shrink // 2 :: shrink, shrink // 2 :: shrink][:height, :width]
    planes = np.empty((4, height, width), dtype=np.uint8)
    planes[:3] = np.asarray(image).transpose(2, 0, 1)
    planes[3] = labels
    return planes


def _raise_all(root: Path, problems: Sequence[str]) -> None:
    """Raise a `DataError` with up to ten of the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        lines = "\n".join(f"  {line}" for line in [*problems[:10], *more])
        raise DataError(f"the images in {root} cannot be used:\n{lines}")


_WHOLE_NUMBERS = ("L", "P", "1", "I", "I;16")
"""Pillow's modes of images with one integer per pixel."""


def _files_by_name(folder: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    found = sorted(
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix.lower() in endings and not path.name.startswith(".")
    )
    if not found:
        raise DataError(
            f"there is no image in {folder}: expected images in {folder.parent / 'images'} and label images of the "
            f"same names in {folder.parent / 'labels'}, files that end in {', '.join(endings)}"
        )
    _raise_all(
        folder.parent,
        [
            f"{path} has the same name as {other}, expected one file for each"
            for other, path in pairwise(found)
            if other.stem == path.stem
        ],
    )
    return {path.stem: path for path in found}


def _mode_and_size(path: Path) -> tuple[str, tuple[int, int]]:
    with opened_image(path) as image:
        return image.mode, image.size


def _label_array(path: Path) -> npt.NDArray[np.int64]:
    with opened_image(path) as image:
        return np.asarray(image).astype(np.int64)


def _labels_of(tile: TileFile, classes: Classes) -> Pixels:
    if _mode_and_size(tile.labels)[0] in _WHOLE_NUMBERS:
        found = _label_array(tile.labels)
        known = {*range(len(classes.names)), classes.ignore}
        unknown = sorted(set(np.unique(found).tolist()) - known)
        if unknown:
            raise DataError(
                f"{tile.labels} has labels {some_of(unknown)}, expected 0 to {len(classes.names) - 1} "
                f"({', '.join(classes.names)}), or {classes.ignore} for none"
            )
        return found.astype(np.uint8)
    if not classes.colours:
        raise DataError(
            f"{tile.labels} is in colour, but classes.json names no colours: add "
            f'"colours": {{"{classes.names[0]}": [255, 255, 255], ...}}'
        )
    rgb = np.asarray(read_image(tile.labels)).astype(np.int64)
    codes = (rgb[..., 0] << 16) + (rgb[..., 1] << 8) + rgb[..., 2]
    labels = np.zeros(codes.shape, dtype=np.uint8)
    is_known = np.zeros(codes.shape, dtype=bool)
    for name, (red, green, blue) in classes.colours.items():
        here = codes == (red << 16) + (green << 8) + blue
        labels[here] = classes.ignore if name == "ignore" else classes.names.index(name)
        is_known |= here
    if not is_known.all():
        unknown = [(code >> 16, code >> 8 & 255, code & 255) for code in np.unique(codes[~is_known]).tolist()]
        raise DataError(f"{tile.labels} has the colours {some_of(unknown)}, which classes.json gives to no class")
    return labels


def _classes_of(path: Path, value: dict[str, Any]) -> Classes:
    names, ignore, colours = value.get("classes"), value.get("ignore", IGNORE), value.get("colours", {})
    problems = []
    if not isinstance(names, list) or not names or len({str(name) for name in names}) != len(names):
        problems.append(f"{path}: classes is {names!r}, expected a list of different names")
        names = []
    elif not isinstance(ignore, int) or not len(names) <= ignore <= 255:
        problems.append(f"{path}: ignore is {ignore!r}, expected a label from {len(names)} to 255")
    if not isinstance(colours, dict):
        problems.append(f"{path}: colours is {colours!r}, expected a colour by the name of its class")
        colours = {}
    for name, colour in colours.items():
        if name != "ignore" and names and name not in names:
            problems.append(f"{path}: there is no class {name} for its colour: {did_you_mean(name, names)}")
        if not (isinstance(colour, list) and len(colour) == 3 and all(value in range(256) for value in colour)):
            problems.append(f"{path}: the colour of {name} is {colour!r}, expected three numbers from 0 to 255")
    problems += [f"{path}: the class {name} has no colour" for name in names if colours and name not in colours]
    _raise_all(path.parent, problems)
    return Classes(
        names=tuple(str(name) for name in names),
        ignore=ignore,
        colours={name: (colour[0], colour[1], colour[2]) for name, colour in colours.items()},
    )


def _named_split(path: Path, value: dict[str, Any], tiles: Sequence[TileFile]) -> dict[str, list[TileFile]]:
    problems = [f"{path} has no list {part!r}" for part in PARTS if not isinstance(value.get(part), list)]
    _raise_all(path.parent, problems)
    known = [name for tile in tiles for name in dict.fromkeys((tile.name, tile.area))]
    for part in PARTS:
        for name in (str(name) for name in value[part] if name not in known):
            close = did_you_mean(name, known).split(" Known: ")[0].removeprefix("known: ")
            problems.append(f"{path}: {part} has {name}, no such image or area: {close}")
    split = {part: [tile for tile in tiles if {tile.name, tile.area} & set(map(str, value[part]))] for part in PARTS}
    problems += [f"{path}: {part} has no image, expected at least one" for part in PARTS if not split[part]]
    for tile in tiles:
        homes = [part for part in PARTS if tile in split[part]]
        if len(homes) > 1:
            problems.append(f"{path}: {tile.name} is in {' and '.join(homes)}, expected it in one")
    _raise_all(path.parent, problems)
    return split
