"""The walk of one plain push: the modules and functions of papa that `Averager.step` passes on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import papa

PACKAGE = str(Path(papa.__file__).parent)


def walk(averager: papa.Averager) -> list[tuple[str, str]]:
    """The functions that a step passes, each once, as module and name; a comprehension is part of its function."""
    passed: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(PACKAGE)
            and not code.co_qualname.endswith(("comp>", "<genexpr>"))
        ):
            passed[code.co_filename.removeprefix(PACKAGE), code.co_qualname] = None

    sys.setprofile(note)
    try:
        averager.step()
    finally:
        sys.setprofile(None)
    return list(passed)


def plain_push() -> papa.Averager:
    """An averager whose next step is a push, after its first steps, which look for mistakes."""
    population = papa.Population([nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in range(3)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
    averager = papa.Averager(population, papa.Push(alpha=0.99, every_steps=1), optimizers)
    for _ in range(5):
        averager.step()
    return averager


if __name__ == "__main__":
    found = walk(plain_push())
    for module, function in found:
        print(f"{module:30} {function}")
    print(f"{len({module for module, _ in found})} modules, {len(found)} functions")
