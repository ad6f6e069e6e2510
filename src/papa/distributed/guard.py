"""Ends the processes of members if the process that started them is killed.

Run as a script of its own, without papa and torch, and with a pipe from the process that it watches, which writes
`+ID` for each process that it starts and `-ID` when that has ended. The system closes the pipe when that process ends,
however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.05


def watch(lines: Iterable[str]) -> None:
    """Read lines until the pipe is closed; then end all processes that are left, with their workers."""
    processes: set[int] = set()
    for line in lines:
        sign, process = line[0], int(line[1:])
        (processes.add if sign == "+" else processes.discard)(process)
    processes = _send(processes, signal.SIGTERM)
    _send(processes, signal.SIGCONT)  # a stopped process ends only when it goes on
    deadline = time.monotonic() + SECONDS_TO_END
    while processes and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        processes = _send(processes, 0)
    _send(processes, signal.SIGKILL)


def _send(processes: set[int], number: int) -> set[int]:
    """Send a signal to the sessions of processes; returns those that are still there."""
    left = set()
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, number)
            left.add(process)
    return left


if __name__ == "__main__":
    watch(sys.stdin)
