"""Starts one process per member, each an ordinary single process to every framework, and watches over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

import torch
import torch.distributed as dist

from papa.distributed import guard
from papa.distributed.members import MEMBER, MEMBERS, START, STORE
from papa.errors import ConfigError

HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which frameworks take a process for one of several that train one network."""

SECONDS_TO_END = 30.0
"""How long members have to end after a signal, before they are killed."""
SECONDS_BETWEEN_LOOKS = 0.05

OnLine = Callable[[int, str], object]
"""Called with a member and a line of its output."""


class Members:
    """The processes of all members, from their start to their end; arguments are as for `run_each`."""

    def __init__(
        self, command: Sequence[str], num_members: int, *, variables: Mapping[str, str], on_line: OnLine
    ) -> None:
        self._command, self._num_members, self._variables, self._on_line = command, num_members, variables, on_line
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        for member in range(num_members):
            self.processes.append(self._start(member))

    def _start(self, member: int) -> subprocess.Popen[str]:
        words = [_filled(word, member, self._num_members) for word in self._command]
        environment = {**environment_of(member, self._num_members), **self._variables}
        try:
            process = subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that its workers can be ended with it
            )
        except OSError as error:
            self.end(signal.SIGTERM)
            raise ConfigError(f"'{words[0]}' cannot be started: {error.strerror}") from None
        self._report(f"+{process.pid}")
        assert process.stdout is not None
        reader = threading.Thread(target=_relay, args=(process.stdout, member, self._on_line), daemon=True)
        reader.start()
        self._readers.append(reader)
        return process

    def restart(self, member: int) -> None:
        """Start a member again that has ended."""
        self._report(f"-{self.processes[member].pid}")
        self.processes[member] = self._start(member)

    def _report(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            self._guard.stdin.write(f"{line}\n")
            self._guard.stdin.flush()

    def failed(self) -> tuple[int, int] | None:
        """The first member that ended with an error, and its exit code."""
        codes = enumerate(process.poll() for process in self.processes)
        return next(((member, code) for member, code in codes if code), None)

    def have_ended(self) -> bool:
        """Whether all members have ended without an error."""
        return all(process.poll() == 0 for process in self.processes)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all members and their workers; kill those that have not ended after a while."""
        self._send(number)
        deadline = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
            self._report(f"-{process.pid}")
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait()

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def finish_output(self) -> None:
        """Wait until all output was passed on."""
        for reader in self._readers:
            reader.join(timeout=5.0)


def run_each(
    command: Sequence[str],
    num_members: int,
    *,
    num_restarts: int = 0,
    variables: Mapping[str, str] | None = None,
    on_line: OnLine,
    on_event: Callable[[str], object],
) -> int:
    """Run a command once for each member, connected by papa alone, and return the exit code of all.

    If a member fails, the others cannot go on without it: all are ended, and started again, `num_restarts` times at
    most. So the command should continue from its last checkpoint. In it, `{member}` and `{members}` are filled in.

    `variables` are further environment variables for the members. `on_line` is called with each member's lines of
    output, `on_event` with sentences about what happens.
    """
    _check(command, num_members, num_restarts)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    given = {STORE: f"127.0.0.1:{store.port}", **(variables or {})}
    with _signals() as received:
        for start in range(num_restarts + 1):
            members = Members(command, num_members, variables={**given, START: str(start)}, on_line=on_line)
            while not received and members.failed() is None and not members.have_ended():
                time.sleep(SECONDS_BETWEEN_LOOKS)
            failure = members.failed()
            members.end(received[0] if received else signal.SIGTERM)
            members.finish_output()
            if received:
                on_event(f"ended by {received[0].name}")
                return 128 + received[0]
            if failure is None:
                return 0
            member, code = failure
            remedy = "starting all again" if start < num_restarts else "the others were ended"
            on_event(f"member {member} failed with {_how(code)}: {remedy}")
    return _exit_code(code)


def run_asynchronously(
    command: Sequence[str],
    num_members: int,
    *,
    num_restarts: int = 0,
    variables: Mapping[str, str],
    on_line: OnLine,
    on_event: Callable[[str], object],
) -> tuple[int, list[int]]:
    """Run a command once for each member, where no member needs the others.

    A member that fails is started again alone, `num_restarts` times at most, while the others go on. Other arguments
    are as for `run_each`.

    Returns:
        The exit code of all, which is that of the first member that failed for good, and all members that did.
    """
    _check(command, num_members, num_restarts)
    failed: dict[int, int] = {}
    left = dict.fromkeys(range(num_members), num_restarts)
    with _signals() as received:
        members = Members(command, num_members, variables=variables, on_line=on_line)
        while not received:
            codes = {member: members.processes[member].poll() for member in range(num_members) if member not in failed}
            for member, code in codes.items():
                if code and left[member]:
                    left[member] -= 1
                    on_event(f"member {member} failed with {_how(code)}: starting it again")
                    members.restart(member)
                elif code:
                    failed[member] = code
                    on_event(f"member {member} failed with {_how(code)}: the others go on without it")
            if not any(code is None or (code and member not in failed) for member, code in codes.items()):
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        members.end(received[0] if received else signal.SIGTERM)
        members.finish_output()
    if received:
        on_event(f"ended by {received[0].name}")
        return 128 + received[0], list(failed)
    return next((_exit_code(code) for code in failed.values()), 0), list(failed)


def _check(command: Sequence[str], num_members: int, num_restarts: int) -> None:
    if not command:
        raise ConfigError("there is no command, expected one after --, such as: -- python train.py --seed {member}")
    if num_members < 1 or num_restarts < 0:
        raise ConfigError(f"got {num_members} members and {num_restarts} restarts, expected at least 1 and 0")


def _how(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _exit_code(code: int) -> int:
    """The exit code of a shell for a process that ended with this code."""
    return code if code > 0 else 128 - code


def environment_of(member: int, num_members: int) -> dict[str, str]:
    """The environment of a member's process: no sign of other processes, and its share of cores and accelerators."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_members)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if devices and visible != "":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[member % len(devices) :: num_members])
    return {**environment, MEMBER: str(member), MEMBERS: str(num_members)}


def _filled(word: str, member: int, num_members: int) -> str:
    return word.replace("{member}", str(member)).replace("{members}", str(num_members))


def _relay(output: IO[str], member: int, on_line: OnLine) -> None:
    with output:
        for line in output:
            on_line(member, line.rstrip("\n"))


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals that ask this process to end, in the order in which they arrive, instead of their usual effect."""
    received: list[signal.Signals] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
