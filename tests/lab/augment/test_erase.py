from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats
from timm.data.random_erasing import RandomErasing

from papa.lab.augment.erase import cutout, draw_cutout_boxes, draw_erasing_boxes, fill_boxes, random_erase
from papa.streams import stream


def slow_fill(inputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    filled = inputs.clone()
    for image, (top, bottom, left, right) in zip(filled, boxes.tolist(), strict=True):
        image[:, top:bottom, left:right] = 0
    return filled


def slow_erasing_box(uniform: list[float], height: int, width: int, probability: float) -> list[int]:
    is_erased, down, right, *attempts = uniform
    if is_erased >= probability:
        return [0, 0, 0, 0]
    for area_share, aspect_share in zip(attempts[:10], attempts[10:], strict=True):
        area = height * width * (0.02 + (1 / 3 - 0.02) * area_share)
        aspect = math.exp(math.log(0.3) * (1 - 2 * aspect_share))
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if tall < height and wide < width:
            top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
            return [top, top + tall, left, left + wide]
    return [0, 0, 0, 0]


def areas(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (12, 40), (2, 3)])
def test_erasing_boxes_equal_the_slow_loop(height, width):
    boxes = draw_erasing_boxes(300, height, width, probability=0.7, generator=stream(1, "augment"))
    uniform = torch.rand(300, 23, dtype=torch.float64, generator=stream(1, "augment")).tolist()
    assert boxes.tolist() == [slow_erasing_box(row, height, width, 0.7) for row in uniform]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fill_equals_the_slow_loop(dtype):
    inputs = torch.randn(64, 3, 12, 10, generator=stream(1, "pixels")).to(dtype)
    boxes = draw_erasing_boxes(64, 12, 10, probability=0.5, generator=stream(1, "augment"))
    before = inputs.clone()
    filled = fill_boxes(inputs, boxes)
    assert filled.dtype == dtype
    assert torch.equal(filled, slow_fill(inputs, boxes))
    assert torch.equal(inputs, before)


def test_random_erase_fills_what_it_draws():
    inputs = torch.randn(64, 3, 32, 32, generator=stream(1, "pixels"))
    boxes = draw_erasing_boxes(64, 32, 32, probability=0.35, generator=stream(1, "augment"))
    erased = random_erase(inputs, 0.35, generator=stream(1, "augment"))
    assert torch.equal(erased, slow_fill(inputs, boxes))
    assert not torch.equal(erased, random_erase(inputs, 0.35, generator=stream(2, "augment")))


@pytest.mark.parametrize("probability", [0.0, 0.15, 0.35, 1.0])
def test_erasing_has_its_probability(probability):
    boxes = draw_erasing_boxes(20_000, 32, 32, probability=probability, generator=stream(1, "augment"))
    num_erased = int((areas(boxes) > 0).sum())
    assert stats.binomtest(num_erased, 20_000, probability).pvalue > 0.01


def test_erased_areas_are_within_bounds():
    boxes = draw_erasing_boxes(20_000, 32, 32, probability=1.0, generator=stream(1, "augment"))
    share = areas(boxes) / 32**2
    # Sides are rounded to pixels, so the area may leave 2% .. 1/3 by a little.
    assert 0.012 < share.min() < 0.03
    assert 0.32 < share.max() < 0.36
    assert share.mean() == pytest.approx((0.02 + 1 / 3) / 2, rel=0.02)
    assert (boxes >= 0).all()
    assert (boxes <= 32).all()


def test_erased_boxes_are_distributed_as_timms():
    # An image of ones shows the box; timm draws from the global state of `random`, which is restored.
    timm_erasing = RandomErasing(probability=1.0, device="cpu")
    state = random.getstate()
    random.seed(1)
    erased = timm_erasing(torch.ones(4000, 1, 32, 32)) == 0
    random.setstate(state)
    boxes = draw_erasing_boxes(4000, 32, 32, probability=1.0, generator=stream(1, "augment"))
    theirs_tall, ours_tall = erased.any(3).sum((1, 2)), boxes[:, 1] - boxes[:, 0]
    theirs_area, ours_area = erased.sum((1, 2, 3)), areas(boxes)
    theirs_top, ours_top = erased.any(3).float().argmax(2)[:, 0], boxes[:, 0]
    for theirs, ours in ((theirs_tall, ours_tall), (theirs_area, ours_area), (theirs_top, ours_top)):
        assert stats.ks_2samp(theirs.numpy(), ours.numpy()).pvalue > 0.01


def test_cutout_boxes_equal_the_slow_loop():
    boxes = draw_cutout_boxes(200, 32, 20, length=8, generator=stream(1, "augment"))
    generator = stream(1, "augment")
    rows = torch.randint(32, (200,), generator=generator).tolist()
    columns = torch.randint(20, (200,), generator=generator).tolist()
    slow = [
        [max(row - 4, 0), min(row + 4, 32), max(column - 4, 0), min(column + 4, 20)]
        for row, column in zip(rows, columns, strict=True)
    ]
    assert boxes.tolist() == slow


def test_cutout_cuts_every_image_and_no_more_than_the_square():
    inputs = torch.ones(500, 3, 32, 32)
    holes = (cutout(inputs, 8, generator=stream(1, "augment")) == 0).sum((2, 3))
    assert (holes[:, 0] >= 16).all()
    assert holes.max() == 64
    assert (holes == holes[:, :1]).all()


def test_cutout_covers_the_inside_evenly():
    holes = cutout(torch.ones(20_000, 1, 16, 16), 4, generator=stream(1, "augment")) == 0
    # Away from the borders every pixel is hit by 16 of 256 centres.
    rate = holes[:, 0, 4:12, 4:12].double().mean(0)
    assert rate.mean() == pytest.approx(16 / 256, rel=0.03)
    assert rate.std() < 3 * math.sqrt(16 / 256 / 20_000)


def test_cutout_larger_than_the_image_takes_all_of_it():
    boxes = draw_cutout_boxes(50, 4, 4, length=20, generator=stream(1, "augment"))
    assert boxes.tolist() == [[0, 4, 0, 4]] * 50
