"""Applying networks to whole images and window by window."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from papa.errors import ConfigError
from papa.lab.models import UNet
from papa.lab.tasks.apply import apply_in_windows, apply_whole, reflected, window_starts
from papa.lab.tasks.segmentation import segmentation


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet(num_classes=3, width=2).eval()


@pytest.mark.parametrize("size", [(32, 48), (33, 20), (17, 16), (5, 3), (1, 40)])
@torch.no_grad()
def test_any_size_keeps_its_size(unet: nn.Module, size: tuple[int, int]) -> None:
    assert apply_whole(unet, torch.randn(2, 3, *size)).shape == (2, 3, *size)


@torch.no_grad()
def test_sizes_that_fit_are_passed_on_as_they_are(unet: nn.Module) -> None:
    images = torch.randn(1, 3, 32, 48)
    assert torch.equal(apply_whole(unet, images), unet(images))


@torch.no_grad()
def test_what_is_added_is_the_reflection(unet: nn.Module) -> None:
    images = torch.randn(1, 3, 28, 41)
    padded = nn.functional.pad(images, (0, 7, 0, 4), mode="reflect")
    assert torch.equal(apply_whole(unet, images), unet(padded)[..., :28, :41])


@given(side=st.integers(1, 9), length=st.integers(1, 40))
def test_reflection_goes_back_and_forth(side: int, length: int) -> None:
    place, step, expected = 0, 1, []
    for _ in range(length):
        expected.append(place)
        if side > 1 and not 0 <= place + step < side:
            step = -step
        place += step if side > 1 else 0
    assert reflected(side, length).tolist() == expected


@given(side=st.integers(1, 60), window=st.integers(1, 30), data=st.data())
def test_windows_cover_everything_and_share_their_overlap(side: int, window: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, window - 1))
    starts = window_starts(side, window, overlap)
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] + window >= side
    assert all(later - earlier <= window - overlap for earlier, later in pairwise(starts))
    assert all(start + window <= max(side, window) for start in starts)


@torch.no_grad()
def test_a_window_as_large_as_the_image_is_the_whole(unet: nn.Module) -> None:
    images = torch.randn(1, 3, 30, 45)
    for window in (45, 64):
        assert torch.equal(apply_in_windows(unet, images, window=window, overlap=8), apply_whole(unet, images))


@pytest.mark.parametrize(("window", "overlap"), [(8, 0), (8, 5), (13, 12), (40, 4)])
@torch.no_grad()
def test_windows_do_not_show_where_a_pixel_sees_only_itself(window: int, overlap: int) -> None:
    network, images = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 21, 34)
    found = apply_in_windows(network, images, window=window, overlap=overlap)
    assert torch.allclose(found, network(images), atol=1e-6)


@torch.no_grad()
def test_overlapping_windows_are_averaged(unet: nn.Module) -> None:
    images = torch.randn(1, 3, 16, 24)
    left, right = unet(images[..., :16]), unet(images[..., 8:])
    expected = torch.cat([left[..., :8], (left[..., 8:] + right[..., :8]) / 2, right[..., 8:]], dim=3)
    assert torch.allclose(apply_in_windows(unet, images, window=16, overlap=8), expected, atol=1e-6)


@torch.no_grad()
def test_the_task_applies_networks_as_asked(unet: nn.Module) -> None:
    images = torch.randn(1, 3, 30, 45)
    assert torch.equal(segmentation(["a", "b", "c"]).apply(unet, images), apply_whole(unet, images))
    windowed: Tensor = segmentation(["a", "b", "c"], window=16, overlap=4).apply(unet, images)
    assert torch.equal(windowed, apply_in_windows(unet, images, window=16, overlap=4))


def test_windows_smaller_than_their_overlap_raise() -> None:
    with pytest.raises(ConfigError, match="the overlap of windows is 64, expected 0 to below the window's side of 32"):
        segmentation(["a"], window=32)
