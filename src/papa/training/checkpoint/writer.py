"""Writing checkpoints: in the background from a copy of the state, or in the foreground without a copy."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from papa.core.group import Group
from papa.training.checkpoint import store
from papa.training.checkpoint.state import MemberState

PATIENCE_SECONDS = 120.0
"""How long the leading process waits for files that other processes have written: network file systems are slow."""


@dataclass
class _Job:
    """One checkpoint that is being written."""

    step: int
    members: dict[int, MemberState]
    state: Mapping[str, Any]
    flush: Callable[[], None]
    error: str | None = None
    wrote: threading.Event = field(default_factory=threading.Event)
    """Set when this process has written its files, or failed to."""
    give_up: threading.Event = field(default_factory=threading.Event)
    """Set when the leading process should stop waiting for the others."""
    deadline: float = float("inf")
    thread: threading.Thread = field(init=False)


@dataclass(frozen=True)
class Failure:
    """A checkpoint that could not be written."""

    step: int
    error: str


class CheckpointWriter:
    """Writes one checkpoint at a time, each process its own members. All processes call all methods together.

    In the background, a copy of the state is written while training continues; else training waits and nothing is
    copied. The newest `keep` checkpoints are kept.
    """

    def __init__(
        self, directory: Path, *, group: Group, num_members: int, keep: int = 2, background: bool = True
    ) -> None:
        self.directory, self.group, self.num_members, self.keep = directory, group, num_members, keep
        self.background = background
        self._job: _Job | None = None
        self._stage: dict[tuple[int, str], Tensor] = {}
        if group.is_leader:
            store.clear_partial(directory)
        group.barrier()

    def save(
        self, step: int, members: Mapping[int, MemberState], state: Mapping[str, Any], flush: Callable[[], None]
    ) -> Failure | None:
        """Begin a checkpoint, and return the failure of the one before, if any.

        In the foreground this returns when this process has written its members. `state` is everything else that a
        resume needs, as a JSON value. The leading process calls `flush` before the checkpoint is complete, to flush the
        files it depends on.
        """
        failure = self.settle()
        error = self._make_partial(step) if self.group.is_leader else None
        self.group.barrier()  # the directory must be empty before any process writes to it
        copies = {member: self._copy(member, content) for member, content in members.items()} if self.background else {}
        job = _Job(step, copies or dict(members), state, flush, error)
        # A daemon, so that a process that has to exit at once can.
        job.thread = threading.Thread(target=self._write, args=(job,), name=f"checkpoint {step}", daemon=True)
        self._job = job
        job.thread.start()
        if not self.background:
            job.wrote.wait()
        return failure

    @property
    def is_busy(self) -> bool:
        """Whether any process is still writing; all processes agree."""
        job = self._job
        return job is not None and any(self.group.all_gather([job.thread.is_alive()] * len(job.members)))

    def _make_partial(self, step: int) -> str | None:
        """Make an empty directory for the new checkpoint; returns the error, if any."""
        partial = store.partial_path(self.directory, step)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            self.directory.mkdir(exist_ok=True)  # it may have been removed
            partial.mkdir()
        except OSError as error:
            return _message(error)
        return None

    @torch.no_grad()
    def _copy(self, member: int, content: MemberState) -> MemberState:
        """A copy in CPU memory that is reused for the next checkpoint, in the memory format of the original."""
        tensors, numbers = content
        copies = {}
        for name, tensor in tensors.items():
            stage = self._stage.get((member, name))
            if stage is None or _layout(stage) != _layout(tensor):
                stage = self._stage[member, name] = torch.empty_like(tensor, device="cpu")
            copies[name] = stage.copy_(tensor)
        return copies, numbers

    def _write(self, job: _Job) -> None:
        partial = store.partial_path(self.directory, job.step)
        try:
            for member, content in job.members.items() if job.error is None else ():
                store.write_member(partial, member, content)
        except Exception as error:  # no caller sees it in a thread: `settle` returns it
            job.error = _message(error)
        job.wrote.set()
        if not self.group.is_leader:
            return
        try:
            if job.error is None and self._has_all_parts(job, partial):
                job.flush()
                store.complete(self.directory, job.step, self.num_members, job.state, self.keep)
        except Exception as error:
            job.error = _message(error)
        if job.error is not None:
            shutil.rmtree(partial, ignore_errors=True)

    def _has_all_parts(self, job: _Job, partial: Path) -> bool:
        """Wait for the files of other processes."""
        while not store.has_all_parts(partial, self.num_members):
            if job.give_up.wait(0.02):
                job.error = "another process could not write its members"
                return False
            if time.monotonic() > job.deadline:
                job.error = (
                    f"the members of other processes did not appear in {partial}: the run directory must be on a file "
                    "system that all processes see"
                )
                return False
        return True

    def settle(self) -> Failure | None:
        """Wait for the last checkpoint, and return its failure, if any; all processes agree."""
        job, self._job = self._job, None
        if job is None:
            return None
        job.wrote.wait()
        if self._first_error(job) is not None:
            job.give_up.set()
        job.deadline = time.monotonic() + PATIENCE_SECONDS
        job.thread.join()
        error = self._first_error(job)
        return None if error is None else Failure(job.step, error)

    def _first_error(self, job: _Job) -> str | None:
        errors = self.group.all_gather([job.error] * len(job.members))
        return next((error for error in errors if error is not None), None)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error finish this process's files, without waiting for others, which may be gone."""
        if self._job is not None and isinstance(error, Exception):
            if self.group.num_ranks > 1:
                self._job.give_up.set()
            self._job.thread.join()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
