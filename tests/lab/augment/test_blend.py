from __future__ import annotations

import pytest
import torch
from scipy import stats
from timm.data.mixup import mixup_target

from papa.lab.augment.blend import Blend, Box, blend_images, blend_targets, draw_blend, soft_targets
from papa.streams import stream

SIZE = {"height": 32, "width": 32}


def draw_many(num_draws: int = 3000, seed: int = 1, **options) -> list[Blend]:
    generator = stream(seed, "augment")
    return [draw_blend(**SIZE, **options, generator=generator) for _ in range(num_draws)]


def some_batch(num_images: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(num_images, 3, 32, 32, generator=stream(1, "pixels"))
    return inputs, torch.randint(10, (num_images,), generator=stream(1, "classes"))


def test_targets_without_a_class_have_no_mass():
    targets = torch.tensor([[[0, 255], [2, 1]]], dtype=torch.uint8)
    soft = soft_targets(targets, 3, smoothing=0.3, ignore=255)
    assert not soft[0, :, 0, 1].any()
    known = soft_targets(targets.where(targets != 255, 0), 3, smoothing=0.3)
    is_class = (targets != 255)[:, None].expand_as(soft)
    assert torch.equal(soft[is_class], known[is_class])


def test_a_pixel_blended_with_one_without_a_class_keeps_its_own_share():
    targets = torch.tensor([[[0, 255]], [[255, 255]]])
    soft = soft_targets(targets, 2, ignore=255)
    blended = blend_targets(soft, Blend(share=0.7))
    assert blended[:, :, 0, 0].tolist() == [pytest.approx([0.7, 0.0]), pytest.approx([0.3, 0.0])]
    assert not blended[:, :, 0, 1].any()


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 4.0])
def test_mixup_shares_are_beta(alpha):
    shares = [blend.share for blend in draw_many(mixup=alpha)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_cutmix_sides_come_from_a_beta_share():
    # Only boxes that touch no border show their full side, floor(32 sqrt(1 - lambda)). With alpha = 1, lambda is
    # uniform, so a side of t has probability ((t + 1)^2 - t^2) / 32^2, times that of touching no border.
    sides = [blend.box.bottom - blend.box.top for blend in draw_many(20_000, cutmix=1.0) if _is_inside(blend.box)]
    weights = [((t + 1) ** 2 - t**2) / 32**2 * _share_of_centres_inside(t) ** 2 for t in range(32)]
    # Pairs of sides are pooled and the ends left out, so that no bin is nearly empty.
    expected = [sum(weights[t : t + 2]) / sum(weights[2:30]) for t in range(2, 30, 2)]
    counts = [sum(t <= side < t + 2 for side in sides) for t in range(2, 30, 2)]
    total = sum(counts)
    assert stats.chisquare(counts, [share * total for share in expected]).pvalue > 0.01


def _is_inside(box: Box) -> bool:
    return box.top > 0 and box.left > 0 and box.bottom < 32 and box.right < 32


def _share_of_centres_inside(side: int) -> float:
    tops = [centre - side // 2 for centre in range(32)]
    return sum(top > 0 and top + side < 32 for top in tops) / 32


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_cutmix_share_is_the_share_of_pixels_kept(alpha):
    own, partner = torch.zeros(1, 1, 32, 32), torch.ones(1, 1, 32, 32)
    pair = torch.cat((own, partner))
    for blend in draw_many(200, cutmix=alpha):
        blended = blend_images(pair, blend)
        assert blended[0].mean().item() == pytest.approx(1 - blend.share, abs=1e-6)
        assert blended[1].mean().item() == pytest.approx(blend.share, abs=1e-6)
        soft = blend_targets(soft_targets(torch.tensor([0, 1]), 2), blend)
        assert soft[0, 1].item() == pytest.approx(blended[0].mean().item(), abs=1e-6)


def test_cutmix_boxes_stay_inside_and_centre_anywhere():
    boxes = [blend.box for blend in draw_many(3000, cutmix=1.0)]
    assert all(0 <= box.top <= box.bottom <= 32 and 0 <= box.left <= box.right <= 32 for box in boxes)
    assert any(box.top == 0 for box in boxes)
    assert any(box.right == 32 for box in boxes)
    middles = [(box.top + box.bottom) / 2 for box in boxes]
    assert sum(middles) / len(middles) == pytest.approx(16, abs=0.6)


def test_a_fair_coin_decides_between_the_two():
    num_cutmix = sum(blend.box is not None for blend in draw_many(4000, mixup=0.5, cutmix=1.0))
    assert stats.binomtest(num_cutmix, 4000, 0.5).pvalue > 0.01
    assert all(blend.box is None for blend in draw_many(50, mixup=0.5))
    assert all(blend.box is not None for blend in draw_many(50, cutmix=0.5))


def test_each_side_of_the_coin_has_its_own_alpha():
    shares = [blend.share for blend in draw_many(4000, mixup=0.2, cutmix=4.0) if blend.box is None]
    assert stats.kstest(shares, stats.beta(0.2, 0.2).cdf).pvalue > 0.01


def test_nothing_is_drawn_when_both_are_off():
    generator = stream(1, "augment")
    assert draw_blend(**SIZE, generator=generator) is None
    assert torch.equal(generator.get_state(), stream(1, "augment").get_state())


def test_seeds_determine_blends():
    options = {"mixup": 0.5, "cutmix": 0.5}
    assert draw_many(20, **options) == draw_many(20, **options)
    assert draw_many(20, **options) != draw_many(20, seed=2, **options)


@pytest.mark.parametrize("num_images", [1, 8, 9])
def test_mixup_equals_the_slow_loop(num_images):
    inputs, targets = some_batch(num_images)
    soft = soft_targets(targets, 10, smoothing=0.1)
    blend = Blend(share=0.3)
    for batch, blended in ((inputs, blend_images(inputs, blend)), (soft, blend_targets(soft, blend))):
        slow = [0.3 * batch[i] + 0.7 * batch[num_images - 1 - i] for i in range(num_images)]
        torch.testing.assert_close(blended, torch.stack(slow))


@pytest.mark.parametrize("box", [Box(0, 5, 3, 30), Box(10, 32, 0, 32), Box(4, 4, 2, 9), Box(0, 32, 0, 32)])
def test_cutmix_equals_the_slow_loop(box):
    inputs, _ = some_batch()
    before = inputs.clone()
    blended = blend_images(inputs, Blend(share=0.5, box=box))
    for index, image in enumerate(blended):
        slow = inputs[index].clone()
        slow[:, box.top : box.bottom, box.left : box.right] = inputs[
            8 - index, :, box.top : box.bottom, box.left : box.right
        ]
        assert torch.equal(image, slow)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_targets_are_timms(smoothing, share):
    _, targets = some_batch()
    ours = blend_targets(soft_targets(targets, 10, smoothing=smoothing), Blend(share=share))
    torch.testing.assert_close(ours, mixup_target(targets, 10, lam=share, smoothing=smoothing))


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.5])
def test_label_mass_sums_to_one(smoothing):
    soft = soft_targets(torch.arange(100), 100, smoothing=smoothing)
    assert soft.dtype == torch.float32
    for blend in draw_many(20, mixup=0.5, cutmix=0.5):
        mass = blend_targets(soft, blend).double().sum(1)
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


def test_pixel_targets_follow_their_pixels():
    classes = torch.randint(3, (4, 6, 5), generator=stream(1, "classes"))
    soft = soft_targets(classes, 3)
    assert soft.shape == (4, 3, 6, 5)
    assert torch.equal(soft.argmax(1), classes)
    assert torch.equal(soft.sum(1), torch.ones(4, 6, 5))
    blend = Blend(share=1 - 6 / 30, box=Box(1, 3, 0, 3))
    pasted = blend_targets(soft, blend)
    assert torch.equal(pasted.argmax(1)[:, 1:3, :3], classes.flip(0)[:, 1:3, :3])
    assert torch.equal(pasted.argmax(1)[:, 3:], classes[:, 3:])
    mixed = blend_targets(soft, Blend(share=0.25))
    torch.testing.assert_close(mixed, 0.25 * soft + 0.75 * soft.flip(0))
