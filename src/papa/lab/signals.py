"""Signals that stop a run: the first sets a flag that all its processes see, the second ends the run at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def stop_flag(stop: Any) -> Iterator[Any]:
    """The flag that a signal sets: `stop`, or, if that is None, a new one that is set while the block runs."""
    if stop is not None:
        yield stop
        return
    stop = multiprocessing.get_context("spawn").RawValue("i", 0)  # an integer in shared memory
    with watching_signals(stop):
        yield stop


@contextlib.contextmanager
def watching_signals(stop: Any) -> Iterator[None]:
    """Store the number of the first SIGINT, SIGTERM or SIGHUP in `stop.value`, and exit on the second.

    A SIGHUP that is ignored, as under `nohup`, stays ignored.
    """

    def handle(number: int, _: FrameType | None) -> None:
        if stop.value:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        stop.value = number

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with _handler(handle, numbers):
        yield


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Exit on SIGTERM by an exception, as on SIGINT, so that `finally` blocks run."""

    def handle(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handler(handle, [signal.SIGTERM]):
        yield


@contextlib.contextmanager
def _handler(handle: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Handle signals in this block; nothing happens outside the main thread, where Python permits no handlers."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if is_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
