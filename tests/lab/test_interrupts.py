"""A signal in the first moments of a run: its directory can be resumed, or does not exist."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import papa.lab.runs
import papa.storage.lock
from papa.lab.config import Config
from papa.lab.runs import RunDirectory

FILES = {papa.lab.runs.__file__, papa.storage.lock.__file__}


class InterruptedAt:
    """Raises a `KeyboardInterrupt` before a line of the traced files, the `number`th that runs."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def begin(path: Path) -> None:
    """What happens before training."""
    run, config = RunDirectory(path), Config().to_json()
    with run.lock(), run.reserved(config):
        run.create(config, overwrite=True)


def test_at_any_line_before_training(tmp_path: Path) -> None:
    before, number, outcomes = sys.gettrace(), 0, set()
    while True:
        number += 1
        run = RunDirectory(tmp_path / str(number))
        tracer = InterruptedAt(number)
        sys.settrace(tracer)
        try:
            begin(run.path)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if tracer.left > 0:
            break
        assert run.holds_run or not run.path.exists(), (number, list(run.path.iterdir()))
        outcomes.add(run.holds_run)
    assert outcomes == {True, False}
    assert number > 40
