"""Images that are decoded when they are needed: large ones in training, and those that a finished run is given."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from papa.errors import DataError
from papa.lab.data.files import (
    ImageFiles,
    Pixels,
    decode_files,
    in_threads,
    num_cores,
    pillow,
    read_image,
    read_size,
    scan_classes,
    some_of,
    to_pixels,
)
from papa.streams import stream

MAX_WORKERS = 8
_NUM_TRIES = 10
_NUM_CHECKED = 2000


class DecodedFolder:
    """Image files that are decoded batch by batch.

    `batch` is for evaluation: the shorter side resized to `image_size / 0.875` (bilinear), and the middle square.
    `stream` is for training: a random crop of each image, resized, and mirrored with probability 1/2, decoded in
    advance by threads.

    A sample of the files is opened at once, to report damaged files before training. By default one thread per core
    decodes in advance, at most 8.
    """

    def __init__(self, files: ImageFiles, *, image_size: int, num_workers: int | None = None) -> None:
        self.files, self.image_size = files, image_size
        self.num_workers = min(num_cores(), MAX_WORKERS) if num_workers is None else num_workers
        self.targets = torch.from_numpy(files.labels)
        checked = np.linspace(0, len(files) - 1, num=min(len(files), _NUM_CHECKED), dtype=np.int64)
        in_threads(read_size, [files.path(place) for place in checked.tolist()])

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The middle of each image, decoded by threads."""
        paths = [self.files.path(index) for index in indices.tolist()]
        return torch.from_numpy(decode_files(paths, self.image_size, is_large=True)), self.targets[indices]

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Random crops of images, batch by batch; a crop depends only on the seed and the number of its batch."""
        requests = enumerate(index_batches, start=start)

        def decoded(request: tuple[int, Tensor]) -> tuple[Tensor, Tensor]:
            number, indices = request
            pixels = self.random_batch(indices.numpy(), seed=seed, number=number)
            return torch.from_numpy(pixels), self.targets[indices]

        if not self.num_workers:
            yield from map(decoded, requests)
            return
        # Threads suffice, since decoding releases the GIL; unlike processes they end with the run and get no signals.
        # All streams share them.
        pool = _threads(self.num_workers)
        ahead = deque(pool.submit(decoded, request) for request in islice(requests, self.num_workers + 1))
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(pool.submit(decoded, request) for request in islice(requests, 1))
                yield batch
        finally:
            for future in ahead:
                future.cancel()

    def random_batch(self, places: npt.NDArray[np.int64], *, seed: int, number: int) -> Pixels:
        """A random crop of each image: batch `number` of the stream of this seed."""
        generator = stream(seed, "decode", position=number)
        draws = torch.rand(len(places), _NUM_TRIES, 4, dtype=torch.float64, generator=generator).numpy()
        flips = torch.randint(2, (len(places),), generator=generator).tolist()
        pixels = np.empty((len(places), 3, self.image_size, self.image_size), dtype=np.uint8)
        module = pillow()
        for row, place in enumerate(places.tolist()):
            image = read_image(self.files.path(place))
            part = image.crop(random_box(image.size, draws[row]))
            part = part.resize((self.image_size, self.image_size), module.BILINEAR)
            to_pixels(part.transpose(module.FLIP_LEFT_RIGHT) if flips[row] else part, pixels[row])
        return pixels


def random_box(size: tuple[int, int], draws: npt.NDArray[np.float64]) -> tuple[int, int, int, int]:
    """A box of 8% to 100% of an image, its sides in a ratio between 3:4 and 4:3, as `RandomResizedCrop` draws it.

    `draws` are (tries, 4) numbers in [0, 1): area, ratio, top, left. The first box that fits into the image is used; if
    none does, the largest box in the middle with an allowed ratio. Returns left, top, right, bottom.
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


@cache
def _threads(num_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_workers, thread_name_prefix="papa-decode")


class GivenImages:
    """A source of the images in class folders, decoded by `decode` and labelled by the classes of a run."""

    def __init__(self, folder: Path, classes: Sequence[str], decode: Callable[[Sequence[str]], Pixels]) -> None:
        files = scan_classes(folder)
        unknown = [name for name in files.classes if name not in classes]
        if unknown:
            raise DataError(
                f"the folder {folder} has the classes {some_of(unknown)}, which the run does not have: expected some "
                f"of {some_of(classes)}"
            )
        self.files, self.decode = files, decode
        labels = torch.tensor([list(classes).index(name) for name in files.classes])
        self.targets = labels[torch.from_numpy(files.labels)]

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        pixels = self.decode([self.files.path(index) for index in indices.tolist()])
        return torch.from_numpy(pixels), self.targets[indices]
