"""One thread, fixed seeds, the same examples on every run."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tests say `from helpers import ...`, whatever pytest's import mode.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)

# Derandomised, so that a red test is red for everyone.
settings.register_profile("papa", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("papa")


LONGEST_FILES = (
    *("core/test_every_rule.py", "distributed/test_members.py", "lab/test_text.py"),
    *(
        "distributed/test_torchrun.py",
        "cli/test_reproduce.py",
        "lab/recipes/test_smoke.py",
        "distributed/test_distributed.py",
    ),
    *("lab/test_launch.py", "lab/test_faults.py", "align/test_symmetries.py", "cli/test_commands.py"),
    *(
        "lab/test_launch_many.py",
        "align/test_matching.py",
        "test_docs.py",
        "test_fuzz.py",
        "distributed/test_mesh.py",
        "integrations/test_transformers.py",
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: one that is left to the end would keep a single process busy."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what was imported and collected: it stays, and searching it takes long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAPA_CACHE", str(tmp_path_factory.mktemp("papa-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Fork the workers that tests start; commands that tests run in a process of their own start theirs as usual."""
    import fork_server
    from papa.distributed import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "worker_context", fork_server.context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _plots_drawn_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Draw plots of the same form once, except in `tests/lab/report`."""
    import plot_forms

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plot_forms.FOLDER, str(tmp_path_factory.mktemp("drawings")))
        yield


@pytest.fixture
def _torch_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Average with PyTorch's operators, as on accelerators and where there is no C compiler."""
    from papa.core import kernels, product

    product._known_product.cache_clear()
    product._known_push.cache_clear()
    monkeypatch.setattr(kernels, "library", lambda: None)
    yield
    product._known_product.cache_clear()
    product._known_push.cache_clear()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the small config that nothing disturbed."""
    from helpers import execute, small_config

    path = tmp_path_factory.mktemp("whole") / "run"
    execute(small_config(), path, workers=1)
    return path


@pytest.fixture
def finished(tmp_path: Path, whole: Path) -> Path:
    """A copy of that run, for tests that change it."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))
