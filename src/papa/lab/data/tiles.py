"""Tiles for segmentation: large images with a class per pixel, trained on random patches and evaluated whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.lab.data.cache import Decoded, cached_images
from papa.lab.data.files import digest_of
from papa.lab.data.images import ImageSet, Numbers
from papa.lab.data.tile_files import (
    ISPRS,
    Classes,
    TileFile,
    decode_tile,
    raise_all,
    read_classes,
    scan_tiles,
    split_tiles,
)
from papa.streams import stream
from papa.training.data import Arrays

BATCH_SEED = 0
"""The seed of the patches that `Patches.batch` returns."""


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
    """The planes of all tiles by name; all errors are raised together."""
    planes: dict[str, Tensor] = {}
    problems = []
    for tile in tiles:
        try:
            planes[tile.name] = _cached(root, tile, classes, shrink).inputs
        except DataError as error:
            problems.append(str(error))
    raise_all(root, problems)
    return planes


def _cached(root: Path, tile: TileFile, classes: Classes, shrink: int) -> Arrays:
    digest = digest_of(
        root,
        (str(path.relative_to(root)) for path in (tile.image, tile.labels)),
        classes=(classes.names, classes.ignore, sorted(classes.colours.items())),
        shrink=shrink,
    )

    def decode() -> Decoded:
        planes = decode_tile(tile, classes, shrink)
        # The cache stores the four planes as four images of one channel.
        return Decoded(planes, np.zeros(len(planes), dtype=np.int64), classes.names)

    name = f"tile-{tile.name}" if shrink == 1 else f"tile-{tile.name}-by{shrink}"
    return cached_images(name, folder=root, digest=digest, decode=decode)[0]


def _spread(tiles: Sequence[TileFile], most: int) -> list[TileFile]:
    count = min(most, len(tiles))
    return [tiles[number * len(tiles) // count] for number in range(count)]
