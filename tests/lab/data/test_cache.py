"""The image cache: made once, mapped by every process, made again when it is invalid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import permissions_count
from papa.errors import DataError
from papa.lab.data.cache import Decoded, cache_folder, cached_images
from papa.training.data import Arrays


def pixels(count: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 5, 5), dtype=np.uint8)


class Maker:
    """Makes the same images each time, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Decoded:
        self.calls += 1
        return Decoded(pixels(), np.arange(7, dtype=np.int64) % 2, ("a", "b"))


def load(folder: Path, maker: Callable[[], Decoded], digest: str = "one") -> Arrays:
    source, classes = cached_images("set", folder=folder, digest=digest, decode=maker)
    assert classes == ("a", "b")
    assert torch.equal(source.inputs, torch.from_numpy(pixels()))
    assert source.targets.tolist() == [0, 1, 0, 1, 0, 1, 0]
    return source


def cache_file(folder: Path) -> Path:
    return cache_folder(folder) / "set.safetensors"


def test_images_are_made_once_and_then_mapped(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(3):
        load(tmp_path, maker)
    assert maker.calls == 1
    assert sorted(path.name for path in cache_folder(tmp_path).iterdir()) == ["set.safetensors"]
    assert list(tmp_path.iterdir()) == [], "nothing is written next to the data"


def test_batches_are_gathered(tmp_path: Path) -> None:
    inputs, targets = load(tmp_path, Maker()).batch(torch.tensor([6, 0, 6]))
    assert torch.equal(inputs, torch.from_numpy(pixels()[[6, 0, 6]]))
    assert targets.tolist() == [0, 0, 0]
    inputs.zero_()
    assert torch.equal(load(tmp_path, Maker()).inputs, torch.from_numpy(pixels()))


def test_writing_to_a_mapped_image_changes_no_file(tmp_path: Path) -> None:
    load(tmp_path, Maker()).inputs.zero_()
    again = Maker()
    assert torch.equal(load(tmp_path, again).inputs, torch.from_numpy(pixels()))
    assert again.calls == 0


def test_a_cache_of_other_files_is_made_again(tmp_path: Path) -> None:
    maker = Maker()
    load(tmp_path, maker, digest="one")
    load(tmp_path, maker, digest="two")
    load(tmp_path, maker, digest="two")
    assert maker.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
    ],
    ids=["empty", "cut", "longer", "header", "gone"],
)
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    maker = Maker()
    load(tmp_path, maker)
    damage(cache_file(tmp_path))
    load(tmp_path, maker)
    load(tmp_path, maker)
    assert maker.calls == 2


def test_a_folder_without_write_permission_is_cached_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    maker = Maker()
    with permissions_count():
        for _ in range(2):
            load(tmp_path, maker)
    assert maker.calls == 1


def test_folders_of_the_same_name_do_not_share_a_cache(tmp_path: Path) -> None:
    assert len({cache_folder(tmp_path / parent / "data") for parent in ("one", "two")}) == 2


def test_with_no_place_to_write_images_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where the cache's folder should be: not even root can write below it.
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAPA_CACHE", str(tmp_path / "file"))
    source = load(tmp_path, Maker())
    assert torch.equal(source.inputs, torch.from_numpy(pixels()))
    assert not cache_file(tmp_path).exists()


def test_the_cache_is_the_users_unless_another_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(tmp_path).is_relative_to(os.environ["PAPA_CACHE"])
    monkeypatch.delenv("PAPA_CACHE")
    assert cache_folder(tmp_path).is_relative_to(tmp_path / "xdg" / "papa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(tmp_path).is_relative_to(tmp_path / "home" / ".cache" / "papa")


def test_an_error_while_decoding_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Decoded:
        raise DataError("the image x.png cannot be decoded")

    with pytest.raises(DataError, match=r"x\.png"):
        load(tmp_path, broken)
    assert list(cache_folder(tmp_path).iterdir()) == []


BUILD = """
import fcntl, sys, time
from pathlib import Path
import numpy as np
from papa.lab.data.cache import Decoded, cached_images

def build(folder):
    def decode():
        with open(folder / "calls", "a") as file:
            file.write("x")
        time.sleep(0.4)
        return Decoded(np.arange(20, dtype=np.uint8).repeat(8).reshape(-1, 1, 1, 1), np.arange(160), ("a",))

    (folder / f"ready-{sys.argv[1]}").touch()
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.001)
    source, _ = cached_images("set", folder=folder, digest="one", decode=decode)
    assert source.inputs[:, 0, 0, 0].tolist() == [value for value in range(20) for _ in range(8)]

def no_locks(*_):
    raise OSError("no locks here")

build(Path(sys.argv[2]))
fcntl.flock = no_locks
build(Path(sys.argv[3]))
"""


def test_two_processes_that_build_at_once(tmp_path: Path) -> None:
    folders = [tmp_path / "with locks", tmp_path / "without locks"]
    for folder in folders:
        folder.mkdir()
    builders = [
        subprocess.Popen([sys.executable, "-c", BUILD, number, *map(str, folders)], stderr=subprocess.PIPE, text=True)
        for number in ("0", "1")
    ]
    errors = [builder.communicate(timeout=120)[1] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], errors
    for folder in folders:
        assert sorted(path.name for path in cache_folder(folder).iterdir()) == ["set.safetensors"]
    assert [(folder / "calls").read_text() for folder in folders] == ["x", "xx"]
