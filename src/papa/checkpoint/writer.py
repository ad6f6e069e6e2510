"""Writing checkpoints in the background: training waits for one copy of its state, never for the disk.

Or in the foreground, where memory is shorter than time: training waits for the disk, and nothing is copied.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from papa.checkpoint import store
from papa.checkpoint.state import MemberState
from papa.group import Group

PATIENCE_SECONDS = 120.0
"""How long the leading process looks for files of other processes that say they wrote them: networks are slow."""


@dataclass
class _Job:
    """One checkpoint on its way to the disk."""

    step: int
    members: dict[int, MemberState]
    state: Mapping[str, Any]
    flush: Callable[[], None]
    error: str | None = None
    wrote: threading.Event = field(default_factory=threading.Event)
    """Set when this process's files are written, or failed to be."""
    give_up: threading.Event = field(default_factory=threading.Event)
    """Set when the leading process need not wait for the others any more."""
    deadline: float = float("inf")
    thread: threading.Thread = field(init=False)


@dataclass(frozen=True)
class Failure:
    """A checkpoint that could not be written."""

    step: int
    error: str


class CheckpointWriter:
    """Writes one checkpoint at a time, each process its own members. All methods are called by all processes together.

    Args:
        directory: where the run keeps its checkpoints.
        group: the processes that hold the population.
        num_members: its size.
        keep: how many checkpoints stay.
        background: whether training goes on while a copy of its state is written.
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
        """Copy the state, hand it to the background, and return how the checkpoint before it failed, if it did.

        In the foreground nothing is copied, and this returns when the members held here are written.

        Args:
            step: optimizer steps taken.
            members: the state of each member held here.
            state: what else must be known to go on; any JSON value.
            flush: called in the leading process's background before the checkpoint counts, to flush what it relies on.
        """
        failure = self.settle()
        error = self._make_partial(step) if self.group.is_leader else None
        self.group.barrier()  # nobody writes into a directory that is still to be emptied
        copies = {member: self._copy(member, content) for member, content in members.items()} if self.background else {}
        job = _Job(step, copies or dict(members), state, flush, error)
        # A daemon, so that a process that is told to leave at once does.
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
        """Make an empty place for the new checkpoint; returns what is wrong with it, which is told like all else."""
        partial = store.partial_path(self.directory, step)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
        except OSError as error:
            return _described(error)
        return None

    @torch.no_grad()
    def _copy(self, member: int, content: MemberState) -> MemberState:
        """A copy in memory that is used again for the next checkpoint, in the memory order of the original."""
        tensors, numbers = content
        copies = {}
        for name, tensor in tensors.items():
            stage = self._stage.get((member, name))
            if stage is None or (stage.shape, stage.dtype, stage.stride()) != (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
            ):
                stage = self._stage[member, name] = torch.empty_like(tensor, device="cpu")
            copies[name] = stage.copy_(tensor)
        return copies, numbers

    def _write(self, job: _Job) -> None:
        partial = store.partial_path(self.directory, job.step)
        try:
            for member, content in job.members.items() if job.error is None else ():
                store.write_member(partial, member, content)
        except Exception as error:  # nobody would see it: it is told by `settle`
            job.error = _described(error)
        job.wrote.set()
        if not self.group.is_leader:
            return
        try:
            if job.error is None and self._has_all_parts(job, partial):
                job.flush()
                store.complete(self.directory, job.step, self.num_members, job.state, self.keep)
        except Exception as error:
            job.error = _described(error)
        if job.error is not None:
            shutil.rmtree(partial, ignore_errors=True)

    def _has_all_parts(self, job: _Job, partial: Path) -> bool:
        """Wait for the other processes' files, which come through the file system."""
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
        """Wait until the last checkpoint is whole, and return how it failed, if it did; all processes agree."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error let this process's files be finished, without the others, who may be gone."""
        if self._job is not None and isinstance(error, Exception):
            if self.group.num_ranks > 1:
                self._job.give_up.set()
            self._job.thread.join()


def _described(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
