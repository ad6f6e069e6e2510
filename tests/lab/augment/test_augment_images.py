from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from papa.lab.augment.images import crop, flip, normalize, random_crop, random_flip
from papa.streams import stream


def some_images(num_images: int = 16, channels: int = 3, height: int = 12, width: int = 10) -> torch.Tensor:
    return torch.randint(1, 256, (num_images, channels, height, width), generator=stream(1, "pixels")).to(torch.uint8)


def slow_crop(images: torch.Tensor, offsets: torch.Tensor, padding: int) -> torch.Tensor:
    _, _, height, width = images.shape
    crops = []
    for image, (down, right) in zip(images, offsets.tolist(), strict=True):
        padded = torch.nn.functional.pad(image, (padding,) * 4)
        crops.append(padded[:, down : down + height, right : right + width])
    return torch.stack(crops)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    padding=st.integers(0, 8),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_crop_equals_the_slow_loop(shape, padding, dtype, seed):
    images = torch.randint(1, 256, shape, generator=stream(seed, "pixels")).to(dtype)
    offsets = torch.randint(2 * padding + 1, (shape[0], 2), generator=stream(seed, "offsets"))
    assert torch.equal(crop(images, offsets, padding=padding), slow_crop(images, offsets, padding))


def test_crop_in_the_middle_changes_nothing():
    images = some_images()
    assert torch.equal(crop(images, torch.full((16, 2), 4), padding=4), images)


def test_crop_takes_channels_last_images():
    images, offsets = some_images(), torch.randint(9, (16, 2), generator=stream(1, "offsets"))
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(crop(last, offsets, padding=4), crop(images, offsets, padding=4))


def test_crop_offsets_are_uniform():
    # One lit pixel in the middle tells where each window was.
    images = torch.zeros(20_000, 1, 9, 9, dtype=torch.uint8)
    images[:, :, 4, 4] = 1
    cropped = random_crop(images, padding=4, generator=stream(1, "augment"))
    counts = cropped.sum(0).flatten().tolist()
    assert sum(counts) == 20_000
    assert stats.chisquare(counts).pvalue > 0.01


def test_crop_with_padding_one_shifts_digits():
    images = some_images(200, 1, 8, 8)
    shifted = random_crop(images, padding=1, generator=stream(1, "augment"))
    padded = torch.nn.functional.pad(images, (1,) * 4)
    matches = [
        (padded[:, :, down : down + 8, right : right + 8] == shifted).all((1, 2, 3))
        for down in range(3)
        for right in range(3)
    ]
    assert all(match.any() for match in matches)
    assert torch.stack(matches).any(0).all()


def test_crop_without_padding_returns_the_images():
    images, generator = some_images(), stream(1, "augment")
    assert random_crop(images, padding=0, generator=generator) is images
    assert torch.equal(generator.get_state(), stream(1, "augment").get_state())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_flip_equals_the_slow_loop(dtype):
    images = some_images().to(dtype)
    flips = torch.randint(2, (16,), generator=stream(1, "flips"))
    slow = [image.flip(2) if flipped else image for image, flipped in zip(images, flips.tolist(), strict=True)]
    assert torch.equal(flip(images, flips), torch.stack(slow))
    assert torch.equal(flip(images, flips.bool()), torch.stack(slow))


def test_half_of_all_images_are_flipped():
    images = torch.zeros(10_000, 1, 1, 2, dtype=torch.uint8)
    images[..., 0] = 1
    num_flipped = int(random_flip(images, generator=stream(1, "augment"))[..., 1].sum())
    assert stats.binomtest(num_flipped, 10_000, 0.5).pvalue > 0.01


@pytest.mark.parametrize(
    "augment", [lambda x, g: random_crop(x, padding=4, generator=g), lambda x, g: random_flip(x, generator=g)]
)
def test_seeds_determine_crops_and_flips_and_inputs_stay(augment):
    images = some_images(64)
    before = images.clone()
    first, again, other = (augment(images, stream(seed, "augment")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)


def test_normalize_is_the_formula():
    images = some_images()
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)
    columns = [torch.tensor(numbers).view(3, 1, 1) for numbers in (mean, std)]
    expected = (images.float() / 255 - columns[0]) / columns[1]
    result = normalize(images, mean, std)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(normalize(images, list(mean), list(std)), result, rtol=0, atol=0)
