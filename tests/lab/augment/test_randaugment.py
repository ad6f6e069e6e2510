from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from papa.errors import ConfigError, DataError
from papa.lab.augment import randaugment
from papa.lab.augment.randaugment import rand_augment
from papa.streams import stream

DART = "rand-m4-n1-p1.0-mstd1.0"


def some_images(num_images: int = 16) -> torch.Tensor:
    return torch.randint(256, (num_images, 3, 16, 12), generator=stream(1, "pixels")).to(torch.uint8)


def test_it_is_timms_transform_image_by_image():
    images = some_images()
    changed = rand_augment(images, DART, generator=stream(1, "augment"))
    seed = int(torch.randint(2**32, (), generator=stream(1, "augment")))
    transform = rand_augment_transform(DART, {"img_mean": (128, 128, 128)})
    with randaugment._seeded(seed):
        slow = [np.array(transform(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    assert torch.equal(changed, torch.from_numpy(np.stack(slow)).permute(0, 3, 1, 2))


def test_seeds_determine_it_and_inputs_stay():
    images = some_images()
    before = images.clone()
    first, again, other = (rand_augment(images, DART, generator=stream(seed, "augment")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)
    assert first.dtype == torch.uint8
    assert first.is_contiguous()


def test_global_random_state_neither_matters_nor_changes():
    images = some_images()
    results = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        python_state, numpy_state = random.getstate(), np.random.get_state()
        results.append(rand_augment(images, DART, generator=stream(1, "augment")))
        assert random.getstate() == python_state
        assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), numpy_state, strict=True))
    assert torch.equal(*results)


def test_random_state_is_put_back_after_an_error():
    state = random.getstate()
    with pytest.raises(RuntimeError, match="inside"), randaugment._seeded(1):
        raise RuntimeError("inside")
    assert random.getstate() == state


def test_one_string_leaves_nothing_behind_for_the_next():
    images = some_images()
    plain = rand_augment(images, "rand-m9-n2", generator=stream(1, "augment"))
    rand_augment(images, DART, generator=stream(1, "augment"))
    randaugment._transform.cache_clear()
    assert torch.equal(rand_augment(images, "rand-m9-n2", generator=stream(1, "augment")), plain)


@pytest.mark.parametrize("spec", ["rand-m0-n1-p1.0", "rand-m10-n1-p1.0-inc1", "rand-m30-mmax30-n1-p1.0-inc1"])
def test_posterizing_to_no_bits_is_black(spec):
    changed = rand_augment(some_images(100), spec, generator=stream(1, "augment"))
    assert any(not image.any() for image in changed)


@pytest.mark.parametrize("spec", [DART, "rand-m9-n2-mstd5-inc1", "rand-m5-n3-mstd5-tweights", "rand-m5-mstd5-t3aw"])
def test_no_draw_fails(spec):
    images = some_images(1000)
    changed = rand_augment(images, spec, generator=stream(1, "augment"))
    assert changed.shape == images.shape


def test_only_colour_bytes_are_taken():
    with pytest.raises(
        DataError, match=r"got torch.float32 images of 3 channels, expected torch.uint8 with 3 channels"
    ):
        rand_augment(some_images().float(), DART, generator=stream(1, "augment"))
    with pytest.raises(DataError, match=r"got torch.uint8 images of 1 channels"):
        rand_augment(some_images()[:, :1], DART, generator=stream(1, "augment"))


def test_without_timm_it_says_what_to_install(monkeypatch):
    randaugment._transform.cache_clear()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'papa-torch\[lab\]'"):
        rand_augment(some_images(), DART, generator=stream(1, "augment"))
