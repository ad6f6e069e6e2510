"""RandAugment of timm, which works on one uint8 image at a time."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from papa.errors import DataError
from papa.packages import require

if TYPE_CHECKING:
    from PIL.Image import Image


def rand_augment(images: Tensor, spec: str, *, generator: torch.Generator) -> Tensor:
    """Apply timm's RandAugment to every image.

    timm draws from the global state of `random` and numpy, which is seeded from `generator` and restored afterwards.
    So this must not run in several threads at once.

    In timm's string, `m` is the magnitude, `n` the number of operations per image, `p` the probability of each, and
    `mstd` the standard deviation of the magnitude.
    """
    if images.dtype != torch.uint8 or images.shape[1] != 3:
        raise DataError(
            f"RandAugment got {images.dtype} images of {images.shape[1]} channels, expected torch.uint8 with 3 "
            "channels: it works on colour images before normalisation"
        )
    transform = _transform(spec)
    from PIL.Image import fromarray

    pixels = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    with _seeded(int(torch.randint(2**32, (), generator=generator))):
        changed = np.stack([np.asarray(transform(fromarray(image))) for image in pixels])
    return torch.from_numpy(changed).permute(0, 3, 1, 2).contiguous().to(images.device)


@functools.lru_cache(maxsize=8)
def _transform(spec: str) -> Callable[[Image], Image]:
    require("timm")
    from timm.data.auto_augment import rand_augment_transform

    # timm's default, given explicitly: without it, some versions carry options over from one string to the next.
    grey = {"img_mean": (128, 128, 128)}
    transform = rand_augment_transform(spec, hparams=grey)
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = functools.partial(_posterize, operation.aug_fn)
    return cast("Callable[[Image], Image]", transform)


def _posterize(posterize: Callable[..., Image], image: Image, bits: int, **options: Any) -> Image:
    # A weak draw asks for 0 bits, which means black; Pillow 13 raises an error for it.
    return posterize(image, bits, **options) if bits >= 1 else image.point(lambda _: 0)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global state of `random` and numpy inside the block and restore it afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
