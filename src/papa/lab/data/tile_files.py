"""Folders of images and label images for segmentation: listing them, their classes, and the split of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from papa.errors import DataError, did_you_mean
from papa.lab.data.files import Pixels, opened_image, read_image, some_of
from papa.storage import read_object
from papa.streams import stream

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
    problems += [problem for tile in tiles for problem in _file_problems(tile)]
    raise_all(root, problems)
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


def raise_all(root: Path, problems: Sequence[str]) -> None:
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
    raise_all(
        folder.parent,
        [
            f"{path} has the same name as {other}, expected one file for each"
            for other, path in pairwise(found)
            if other.stem == path.stem
        ],
    )
    return {path.stem: path for path in found}


def _file_problems(tile: TileFile) -> Iterable[str]:
    try:
        (mode, size), (_, label_size) = _mode_and_size(tile.image), _mode_and_size(tile.labels)
    except DataError as error:
        yield str(error)
        return
    if mode != "RGB":
        yield f"{tile.image} has the mode {mode}, expected RGB: convert it"
    if size != label_size:
        sizes = " and ".join(f"{width} x {height}" for width, height in (size, label_size))
        yield f"{tile.image} and its labels differ in size ({sizes}), expected one label for each pixel"


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
    raise_all(path.parent, problems)
    return Classes(
        names=tuple(str(name) for name in names),
        ignore=ignore,
        colours={name: (colour[0], colour[1], colour[2]) for name, colour in colours.items()},
    )


def _named_split(path: Path, value: dict[str, Any], tiles: Sequence[TileFile]) -> dict[str, list[TileFile]]:
    problems = [f"{path} has no list {part!r}" for part in PARTS if not isinstance(value.get(part), list)]
    raise_all(path.parent, problems)
    known = [name for tile in tiles for name in dict.fromkeys((tile.name, tile.area))]
    for part in PARTS:
        unknown = [str(name) for name in value[part] if name not in known]
        problems += [f"{path}: {part} has {name}, no such image or area: {_closest(name, known)}" for name in unknown]
    split = {part: [tile for tile in tiles if {tile.name, tile.area} & set(map(str, value[part]))] for part in PARTS}
    problems += [f"{path}: {part} has no image, expected at least one" for part in PARTS if not split[part]]
    for tile in tiles:
        homes = [part for part in PARTS if tile in split[part]]
        if len(homes) > 1:
            problems.append(f"{path}: {tile.name} is in {' and '.join(homes)}, expected it in one")
    raise_all(path.parent, problems)
    return split


def _closest(name: str, known: Sequence[str]) -> str:
    return did_you_mean(name, known).split(" Known: ")[0].removeprefix("known: ")
