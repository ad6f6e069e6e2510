"""No operation makes a process hold more than its own members and two networks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import memory_jobs
from papa.distributed.start import start_workers

LAYERS, INPUTS = 16, 15_000

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux reports the peak memory of a process"
)


def test_operations_take_at_most_two_networks(tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    found: dict[str, Any] = start_workers(memory_jobs.peaks, 2, memory_jobs.SIZE, LAYERS, INPUTS, tmp_path)
    network, largest = found["network"], found["largest"]
    # Plus some copies of a single tensor and the activations of a forward pass.
    most = 2 * network + 8 * largest
    assert most < 2.51 * network
    peaks = {name: peak / network for name, peak in found["peaks"].items()}
    assert peaks.pop("three networks too many") * network > most, "the measure does not see networks"
    assert {name: peak for name, peak in peaks.items() if peak * network > most} == {}
    assert peaks["average soup"] > 0.9
