"""Large images: the standard crops, and streams that do not depend on who decodes them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from papa.errors import DataError
from papa.lab.data import DecodedFolder
from papa.lab.data.files import scan_classes
from papa.lab.data.large import random_box
from papa.training.data import Source, Streaming, Subset, hold_out, stream_batches

MakeImages = Callable[..., list[Path]]
BATCHES = (torch.tensor([0, 5, 3]), torch.tensor([1, 2]), torch.tensor([4, 4, 4]), torch.tensor([0, 5, 3]))


@pytest.fixture
def folder(tmp_path: Path, make_images: MakeImages) -> Path:
    make_images(tmp_path / "cat", 3, (50, 40))
    make_images(tmp_path / "dog", 3, (37, 61))
    return tmp_path


def source(folder: Path, *, num_workers: int = 0, image_size: int = 28) -> DecodedFolder:
    return DecodedFolder(scan_classes(folder), image_size=image_size, num_workers=num_workers)


def streamed(source: Source, *, seed: int = 1, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    return list(stream_batches(source, BATCHES[start:], seed=seed, start=start))


def same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return all(
        torch.equal(one, other) for pair in zip(first, second, strict=True) for one, other in zip(*pair, strict=True)
    )


def test_evaluation_is_torchvisions(folder: Path) -> None:
    files = source(folder)
    reference = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28), transforms.PILToTensor()])
    expected = [reference(Image.open(files.files.path(index)).convert("RGB")) for index in range(6)]
    inputs, targets = files.batch(torch.arange(6))
    assert torch.equal(inputs, torch.stack(expected))
    assert inputs.dtype == torch.uint8
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(files.batch(torch.tensor([3]))[0][0], expected[3])


def test_the_same_stream_with_any_number_of_workers(folder: Path) -> None:
    alone = streamed(source(folder, num_workers=0))
    assert [tuple(inputs.shape) for inputs, _ in alone] == [(n, 3, 28, 28) for n in (3, 2, 3, 3)]
    assert [targets.tolist() for _, targets in alone] == [[0, 1, 1], [0, 0], [1, 1, 1], [0, 1, 1]]
    assert same(alone, streamed(source(folder, num_workers=2)))


def test_streams_share_threads_and_start_no_processes(folder: Path) -> None:
    """A process would outlive a run that is killed, keep its lock, and take its signals for itself."""
    expected, files = streamed(source(folder)), source(folder, num_workers=2)
    before = set(threading.enumerate())
    streams = [stream_batches(files, BATCHES, seed=1) for _ in range(5)]
    firsts = [next(stream) for stream in streams]
    assert all(same(expected[:1], [first]) for first in firsts)
    assert not multiprocessing.active_children()
    assert len(set(threading.enumerate()) - before) <= 2
    streams[0].close()
    assert all(same(expected[1:], list(stream)) for stream in streams[1:])


def test_what_is_drawn_depends_on_seed_and_number(folder: Path) -> None:
    files = source(folder)
    first = streamed(files)
    assert same(first, streamed(files))
    assert not same(first, streamed(files, seed=2))
    assert not torch.equal(first[0][0], first[3][0])  # the same images again
    assert len({inputs.numpy().tobytes() for inputs in first[2][0]}) == 3  # one image three times
    assert same(first[2:], streamed(files, start=2))


def test_a_subset_streams_the_images_behind_it(folder: Path) -> None:
    files = source(folder)
    assert isinstance(files, Streaming)
    backwards = Subset(files, torch.arange(5, -1, -1))
    mirrored = [5 - indices for indices in BATCHES]
    assert same(streamed(files), list(stream_batches(backwards, mirrored, seed=1)))


def test_what_is_held_out_is_not_augmented(folder: Path) -> None:
    files = source(folder)
    train, held_out = hold_out(files, 0.5, seed=1)
    assert isinstance(train, Streaming)
    assert isinstance(held_out, Subset)
    assert torch.equal(held_out.batch(torch.arange(3))[0], files.batch(held_out.indices)[0])


def test_streams_leave_the_random_state_and_the_workers_as_found(folder: Path) -> None:
    before = torch.get_rng_state()
    stream = stream_batches(source(folder, num_workers=1), BATCHES, seed=1)
    next(stream)
    del stream
    assert torch.equal(torch.get_rng_state(), before)
    assert not multiprocessing.active_children()


def test_images_are_cropped_resized_and_mirrored(tmp_path: Path) -> None:
    # Brightness rises to the right: a mirrored part falls.
    (tmp_path / "ramp").mkdir()
    ramp = np.repeat(np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    Image.fromarray(ramp).save(tmp_path / "ramp" / "1.png")
    files = source(tmp_path, image_size=16)
    parts, _ = next(stream_batches(files, [torch.zeros(400, dtype=torch.long)], seed=1))
    slope = parts[:, 0, 0, -1].int() - parts[:, 0, 0, 0].int()
    assert 0.4 < float((slope < 0).float().mean()) < 0.6
    widths = slope.abs().double() / 255 * 16 / 15  # a part's share of the image's width
    assert float(widths.min()) < 0.4
    assert float(widths.max()) > 0.85


def test_boxes_are_drawn_as_torchvision_draws_them() -> None:
    random = np.random.default_rng(0)
    for size in ((100, 80), (300, 40)):
        boxes = np.array([random_box(size, random.random((10, 4))) for _ in range(3000)], dtype=np.float64)
        torch.manual_seed(0)
        image = torch.zeros(1, size[1], size[0])
        get = transforms.RandomResizedCrop.get_params
        reference = np.array([get(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)], dtype=np.float64)
        left, top, right, bottom = boxes.T
        assert left.min() >= 0
        assert top.min() >= 0
        assert right.max() <= size[0]
        assert bottom.max() <= size[1]
        ours = np.stack([top, left, bottom - top, right - left])
        assert np.allclose(ours.mean(1), reference.mean(0), rtol=0.05, atol=0.5)
        assert np.allclose(ours.std(1), reference.std(0), rtol=0.08, atol=0.5)


@pytest.mark.parametrize(
    ("size", "expected"), [((300, 30), (130, 0, 170, 30)), ((30, 300), (0, 130, 30, 170)), ((40, 40), (0, 0, 40, 40))]
)
def test_where_no_box_fits_the_middle_is_taken(size: tuple[int, int], expected: tuple[int, ...]) -> None:
    whole = np.array([[0.999999, 0.999999 if size[0] < 300 else 0.0, 0.0, 0.0]])
    assert random_box(size, whole) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_image_is_named_by_the_stream(folder: Path, num_workers: int) -> None:
    files = source(folder, num_workers=num_workers)
    path = folder / "dog" / "001.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"^the image .*dog/001\.png cannot be decoded"):
        streamed(files)
    with pytest.raises(DataError, match=r"^the image .*dog/001\.png cannot be decoded"):
        files.batch(torch.arange(6))


def test_a_file_that_is_no_image_is_named_before_training(folder: Path) -> None:
    (folder / "dog" / "001.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"dog/001\.png cannot be decoded"):
        source(folder)
