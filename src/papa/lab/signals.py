"""Hearing that a run is to stop: the first signal is noted where all its processes see it, the second ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def stop_flag(stop: Any) -> Iterator[Any]:
    """What notes signals: the given one, to which somebody else listens, or a new one."""
    if stop is not None:
        yield stop
        return
    stop = multiprocessing.get_context("spawn").RawValue("i", 0)  # one number that all processes see
    with watching_signals(stop):
        yield stop


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Leave on SIGTERM as on SIGINT, by an exception: what was begun and must not stay is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def watching_signals(stop: Any) -> Iterator[None]:
    """Note the first SIGINT, SIGTERM or SIGHUP in `stop.value`; leave at once on the second.

    Who ignores SIGHUP, as under `nohup`, goes on ignoring it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may listen
        return

    def note(number: int, _: FrameType | None) -> None:
        if stop.value:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        stop.value = number

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
