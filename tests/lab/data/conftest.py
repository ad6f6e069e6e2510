"""Tiny image folders, made afresh for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeImages = Callable[..., list[Path]]


@pytest.fixture(autouse=True)
def _user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache of its own."""
    monkeypatch.setenv("PAPA_CACHE", str(tmp_path_factory.mktemp("user-cache")))


@pytest.fixture
def make_images() -> MakeImages:
    """A function that writes a class folder of random images, and returns their paths in order."""

    def make(folder: Path, count: int = 3, size: tuple[int, int] = (8, 8), suffix: str = ".png") -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng([count, *size, *folder.name.encode()])
        paths = [folder / f"{number:03d}{suffix}" for number in range(count)]
        for path in paths:
            Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
        return paths

    return make
