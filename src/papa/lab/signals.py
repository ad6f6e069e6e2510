"""Signals that stop a run: the first lets it save, the second ends it at once.

Where no member trains there is nothing to save, and the first signal ends the run at once too: on a busy machine it can
take minutes until workers are started and data is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from papa.distributed.torchrun import rank_of_torchrun
from papa.errors import StoppedError


class StopFlag(ctypes.Structure):
    """What the processes of a run know of signals."""

    _fields_ = (("value", ctypes.c_int), ("is_training", ctypes.c_int), ("is_parallel", ctypes.c_int))
    value: int
    """The number of the first signal, or 0."""
    is_training: int
    """Whether members train, so that there is something to save."""
    is_parallel: int
    """Whether several runs share the flag: some of them may always train."""


class _Stop(BaseException):
    """Raised by a signal while nothing trains; no `except Exception` on its way can take it for another error."""


def new_flag(*, is_parallel: bool = False) -> StopFlag:
    """A flag in memory that processes started later share."""
    flag: StopFlag = multiprocessing.get_context("spawn").RawValue(StopFlag, 0, 0, int(is_parallel))
    return flag


@contextlib.contextmanager
def stop_flag(stop: StopFlag | None, remedy: str) -> Iterator[StopFlag]:
    """The flag that a signal sets: `stop`, or, if that is None, a new one that is set while the block runs."""
    if stop is not None:
        stop.is_training = 0
        with _stopped_error(stop, remedy):
            yield stop
        return
    stop = new_flag()
    with watching_signals(stop, remedy):
        yield stop


@contextlib.contextmanager
def watching_signals(stop: StopFlag, remedy: str) -> Iterator[None]:
    """Store the number of the first SIGINT, SIGTERM or SIGHUP in `stop.value`, and exit on the second.

    While nothing trains, the first raises a `StoppedError` that names the remedy. A SIGHUP that is ignored, as under
    `nohup`, stays ignored. torchrun sends its processes again what a terminal or a scheduler has sent to all, and kills
    those that do not end within 30 seconds: there, only the first signal counts.
    """

    def handle(number: int, _: FrameType | None) -> None:
        if stop.value and rank_of_torchrun() is not None:
            return
        if stop.value:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        stop.value = number
        if _ends_at_once(stop):
            raise _Stop

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with _stopped_error(stop, remedy), _handler(handle, numbers):  # a signal may come as soon as there is a handler
        yield


@contextlib.contextmanager
def _stopped_error(stop: StopFlag, remedy: str) -> Iterator[None]:
    """Turn what a signal raises into a `StoppedError`.

    Extension modules may turn it into an error of theirs, as matplotlib's does while it converts its arguments: after
    such a signal, every other error counts as that.
    """
    try:
        yield
    except (_Stop, Exception) as error:
        if isinstance(error, StoppedError) or not (isinstance(error, _Stop) or (stop.value and _ends_at_once(stop))):
            raise
        text = f"stopped while no member trained, so nothing is lost; continue with: {remedy}"
        raise StoppedError(text) from None


def _ends_at_once(stop: StopFlag) -> bool:
    """Whether the first signal ends the run, since there is nothing to save."""
    return not stop.is_training and not stop.is_parallel


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
    before: dict[signal.Signals, Any] = {}
    try:
        for number in numbers if is_main_thread else ():
            before[number] = signal.getsignal(number)
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
