from __future__ import annotations

import json

import pytest
import torch

from papa.lab.augment.blend import blend_images, blend_targets, draw_blend, soft_targets
from papa.lab.augment.erase import cutout, random_erase
from papa.lab.augment.policy import DART_POLICIES, Policy
from papa.lab.augment.randaugment import rand_augment
from papa.streams import stream

EVERYTHING = Policy(mixup=0.5, smoothing=0.1, cutmix=1.0, erasing=0.35, cutout=8, randaugment="rand-m4-n1-p1.0-mstd1.0")


def some_batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 3, 32, 32, generator=stream(1, "pixels"))
    return inputs, torch.randint(10, (16,), generator=stream(1, "classes"))


def test_a_plain_policy_touches_nothing_and_draws_nothing():
    inputs, targets = some_batch()
    images, generator = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), stream(1, "augment")
    outputs, same = Policy().on_batch(inputs, targets, num_classes=10, generator=generator)
    assert outputs is inputs
    assert same is targets
    assert Policy().on_images(images, generator) is images
    assert torch.equal(generator.get_state(), stream(1, "augment").get_state())
    assert Policy().description == "plain"


@pytest.mark.parametrize(
    "policy", [Policy(erasing=0.35), Policy(cutout=8), Policy(randaugment="rand-m4"), Policy(erasing=1.0, cutout=4)]
)
def test_targets_stay_classes_unless_blended_or_smoothed(policy):
    inputs, targets = some_batch()
    _, same = policy.on_batch(inputs, targets, num_classes=10, generator=stream(1, "augment"))
    assert same is targets
    assert not policy.makes_soft_targets


@pytest.mark.parametrize("policy", [Policy(mixup=0.5), Policy(cutmix=0.5), Policy(smoothing=0.1)])
def test_targets_become_shares(policy):
    inputs, targets = some_batch()
    _, soft = policy.on_batch(inputs, targets, num_classes=10, generator=stream(1, "augment"))
    assert policy.makes_soft_targets
    assert soft.shape == (16, 10)
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft.sum(1), torch.ones(16))


def test_smoothing_alone_leaves_the_inputs():
    inputs, targets = some_batch()
    same, _ = Policy(smoothing=0.1).on_batch(inputs, targets, num_classes=10, generator=stream(1, "augment"))
    assert same is inputs


def test_the_parts_run_one_after_the_other():
    inputs, targets = some_batch()
    outputs, soft = EVERYTHING.on_batch(inputs, targets, num_classes=10, generator=stream(3, "augment"))
    generator = stream(3, "augment")
    expected = random_erase(inputs, 0.35, generator=generator)
    expected = cutout(expected, 8, generator=generator)
    blend = draw_blend(mixup=0.5, cutmix=1.0, height=32, width=32, generator=generator)
    assert torch.equal(outputs, blend_images(expected, blend))
    assert torch.equal(soft, blend_targets(soft_targets(targets, 10, smoothing=0.1), blend))


def test_on_images_is_randaugment():
    images = torch.randint(256, (4, 3, 16, 16), generator=stream(1, "pixels")).to(torch.uint8)
    expected = rand_augment(images, EVERYTHING.randaugment, generator=stream(1, "augment"))
    assert torch.equal(EVERYTHING.on_images(images, stream(1, "augment")), expected)


@pytest.mark.parametrize("policy", [EVERYTHING, Policy(mixup=1.0), Policy(cutmix=1.0), *DART_POLICIES[1:]])
def test_seeds_determine_everything_and_inputs_stay(policy):
    inputs, targets = some_batch()
    inputs_before, targets_before = inputs.clone(), targets.clone()
    runs = [policy.on_batch(inputs, targets, num_classes=10, generator=stream(seed, "augment")) for seed in (1, 1, 2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert torch.equal(inputs, inputs_before)
    assert torch.equal(targets, targets_before)


def test_the_global_generator_is_left_alone():
    inputs, targets = some_batch()
    before = torch.random.get_rng_state()
    EVERYTHING.on_batch(inputs, targets, num_classes=10, generator=stream(1, "augment"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mixup_on_vectors_and_on_pixel_targets():
    vectors, targets = torch.randn(4, 64), torch.arange(4)
    outputs, soft = Policy(mixup=0.2).on_batch(vectors, targets, num_classes=4, generator=stream(1, "augment"))
    assert outputs.shape == (4, 64)
    assert soft.shape == (4, 4)
    maps = torch.randint(6, (4, 8, 8), generator=stream(1, "classes"))
    policy = Policy(mixup=0.2, smoothing=0.05)
    _, soft = policy.on_batch(torch.randn(4, 3, 8, 8), maps, num_classes=6, generator=stream(1, "augment"))
    assert soft.shape == (4, 6, 8, 8)


def test_descriptions():
    assert Policy(mixup=0.5, smoothing=0.1).description == "mixup 0.5, smoothing 0.1"
    assert Policy(cutmix=1.0, erasing=0.35).description == "cutmix 1, erasing 0.35"
    assert [policy.description for policy in DART_POLICIES] == ["rand-m4-n1-p1.0-mstd1.0", "cutmix 0.5", "cutout 8"]


def test_policies_survive_json():
    for policy in (EVERYTHING, Policy(), *DART_POLICIES):
        assert Policy(**json.loads(json.dumps(policy.to_dict()))) == policy
