"""One thread, fixed seeds, the same examples on every run."""

from __future__ import annotations

import sys
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


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the small config that nothing disturbed."""
    from helpers import execute, small_config

    path = tmp_path_factory.mktemp("whole") / "run"
    execute(small_config(), path, workers=1)
    return path
