"""Images too large to keep decoded: read when they are needed, by worker processes that work ahead."""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from papa.data.decode import Pixels, in_threads, num_cores, pillow, read_image, read_size, resize_and_crop, to_pixels
from papa.data.files import ImageFiles
from papa.errors import ConfigError, DataError
from papa.streams import stream

if TYPE_CHECKING:
    pass

MAX_WORKERS = 8
CROP_SHARE = 0.875
"""How much of the shorter side is seen in evaluation: 224 of 256 pixels."""

_NUM_TRIES = 10
_NUM_CHECKED = 2000


class DecodedFolder:
    """Image files that are decoded batch by batch.

    `batch` gives what networks are evaluated on: the shorter side resized to `image_size / 0.875` (bilinear), and the
    middle square. `stream` gives what they are trained on: a random part of each image, resized, and mirrored half of
    the time, decoded ahead by worker processes.

    Args:
        files: the images and their classes. A sample of them is opened at once, to tell damaged files before training.
        image_size: the side of the squares handed out.
        num_workers: processes that decode for each stream, 0 for none; by default one per core, at most 8. Threads
            decode where no process may be started.
    """

    def __init__(self, files: ImageFiles, *, image_size: int, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 0:
            raise ConfigError(f"num_workers is {num_workers}, expected at least 0")
        self.files, self.image_size = files, image_size
        self.num_workers = min(num_cores(), MAX_WORKERS) if num_workers is None else num_workers
        self.targets = torch.from_numpy(files.labels)
        checked = np.linspace(0, len(files) - 1, num=min(len(files), _NUM_CHECKED), dtype=np.int64)
        in_threads(lambda place: _check(files.path(int(checked[place]))), len(checked))

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The middle of each image, decoded by threads."""
        places = indices.tolist()
        pixels = self._empty(len(places))
        bilinear = pillow().BILINEAR

        def decode(row: int) -> None:
            image = read_image(self.files.path(places[row]))
            shorter_side = int(self.image_size / CROP_SHARE)
            middle = resize_and_crop(image, shorter_side=shorter_side, size=self.image_size, resample=bilinear)
            to_pixels(middle, pixels[row])

        in_threads(decode, len(places))
        return torch.from_numpy(pixels), self.targets[indices]

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Random parts of images, batch by batch; what is drawn depends on the seed and the batch's number only.

        Args:
            index_batches: the indices of each batch; read lazily, a few batches ahead.
            seed: of the random parts and flips.
            start: the number of the first batch, for a stream that goes on where another was stopped.
        """
        requests = ((number, indices.numpy()) for number, indices in enumerate(index_batches, start=start))
        # A daemon, as papa's own workers are, may start threads but no processes.
        decode = _by_threads if multiprocessing.current_process().daemon else _by_processes
        for result in decode(_RandomParts(self, seed), requests, self.num_workers):
            if isinstance(result, DataError):
                raise result
            pixels, places = result
            yield torch.from_numpy(pixels), self.targets[torch.from_numpy(places)]

    def random_batch(self, places: npt.NDArray[np.int64], *, seed: int, number: int) -> Pixels:
        """A random part of each image, as batch `number` of the stream of this seed."""
        generator = stream(seed, "decode", position=number)
        draws = torch.rand(len(places), _NUM_TRIES, 4, dtype=torch.float64, generator=generator).numpy()
        flips = torch.randint(2, (len(places),), generator=generator).tolist()
        pixels = self._empty(len(places))
        module = pillow()
        for row, place in enumerate(places.tolist()):
            image = read_image(self.files.path(place))
            part = image.crop(random_box(image.size, draws[row]))
            part = part.resize((self.image_size, self.image_size), module.BILINEAR)
            to_pixels(part.transpose(module.FLIP_LEFT_RIGHT) if flips[row] else part, pixels[row])
        return pixels

    def _empty(self, count: int) -> Pixels:
        return np.empty((count, 3, self.image_size, self.image_size), dtype=np.uint8)


def random_box(size: tuple[int, int], draws: npt.NDArray[np.float64]) -> tuple[int, int, int, int]:
    """A box of 8% to 100% of an image, its sides in a ratio between 3:4 and 4:3, as `RandomResizedCrop` draws it.

    Args:
        size: the image's width and height.
        draws: (tries, 4) numbers in [0, 1): area, ratio, top, left. The first box that fits into the image is taken;
            if none does, the largest in the middle whose ratio is allowed.

    Returns:
        left, top, right, bottom.
    """
    width, height = size
    for area_draw, ratio_draw, top_draw, left_draw in draws.tolist():
        area = width * height * (0.08 + 0.92 * area_draw)
        ratio = math.exp((2.0 * ratio_draw - 1.0) * math.log(4 / 3))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(left_draw * (width - box_width + 1)), int(top_draw * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    box_width = min(width, max(1, round(height * 4 / 3)))
    box_height = min(height, max(1, round(width * 4 / 3)))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


_Request: TypeAlias = tuple[int, npt.NDArray[np.int64]]
_Result: TypeAlias = tuple[Pixels, npt.NDArray[np.int64]] | DataError


class _RandomParts(Dataset[_Result]):
    """What a worker process is asked for: a whole batch by its number and indices."""

    def __init__(self, source: DecodedFolder, seed: int) -> None:
        self.source, self.seed = source, seed

    def __getitem__(self, request: _Request) -> _Result:
        number, places = request
        try:
            return self.source.random_batch(places, seed=self.seed, number=number), places
        except DataError as error:
            return error  # as a value: the loader would bury the message in a worker's traceback


def _by_processes(parts: _RandomParts, requests: Iterator[_Request], num_workers: int) -> Iterator[_Result]:
    # Arrays go through a pipe, which costs little beside decoding; tensors would need room in /dev/shm.
    return iter(
        DataLoader(
            parts,
            batch_size=None,
            sampler=requests,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else the loader draws a seed of its own from the caller's generator
        )
    )


def _by_threads(parts: _RandomParts, requests: Iterator[_Request], num_workers: int) -> Iterator[_Result]:
    pool = ThreadPoolExecutor(max(1, num_workers))
    try:
        ahead = deque(pool.submit(parts.__getitem__, request) for request in islice(requests, 2 * num_workers + 1))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(parts.__getitem__, request) for request in islice(requests, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def _check(path: str) -> None:
    read_size(path)


def _as_it_is(value: object) -> object:
    return value
