"""Checkpoints of a training: when they are written, and how to resume from them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from papa.errors import ConfigError, RunError
from papa.storage import DamagedError
from papa.storage.lock import Lock
from papa.training.callbacks import Callback
from papa.training.checkpoints import (
    CheckpointWriter,
    Failure,
    checkpoints,
    discard,
    expected_states,
    load_checkpoint,
    load_state_,
    member_states,
    shared_state,
)
from papa.training.loop import Training

SECONDS_BETWEEN_SYNCS = 1.0
"""How often several processes ask each other whether to stop or to save."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and how often checkpoints are written; results do not depend on it."""

    directory: str | os.PathLike[str] | None = None
    """For this training alone; made if missing. A run of the lab has its own."""
    minutes: float = 10.0
    """Save after this many minutes without a checkpoint, besides after each epoch."""
    keep: int = 2
    """The number of checkpoints to keep."""
    background: bool = True
    """Write a copy of the state while training goes on; otherwise training waits, and no copy is made."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is invalid."""
        if not self.minutes > 0:
            raise ConfigError(f"the minutes between checkpoints are {self.minutes}, expected more than 0")
        if self.keep < 1:
            raise ConfigError(f"the number of checkpoints to keep is {self.keep}, expected at least 1")


class Saver(Callback):
    """Saves a training after each epoch, and after some minutes without a checkpoint; all processes together.

    `should_stop` says whether this process was asked to stop. `notices` are reported at the start. `extra_state` is
    what checkpoints hold besides the training; a JSON value.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        minutes: float,
        should_stop: Callable[[], bool],
        notices: Sequence[str] = (),
        extra_state: Mapping[str, Any] | None = None,
    ) -> None:
        self.writer, self.notices, self._extra_state = writer, notices, extra_state or {}
        self.should_stop, self.seconds_between = should_stop, 60.0 * minutes
        self._failures_in_a_row = 0
        self._saved_step = -1
        self._saved_at = self._synced_at = time.monotonic()
        self._synced_step = 0
        self._next_sync = 0

    def extra_state(self) -> dict[str, Any]:
        """What the next checkpoint holds besides the training; a JSON value."""
        return dict(self._extra_state)

    def flush(self) -> None:
        """Flush files that checkpoints refer to; called in the background of the leading process."""

    def stop(self, training: Training) -> None:
        """Called when the training was saved and is to stop: wait for the checkpoint, and raise an error."""
        self.finish(training)
        raise KeyboardInterrupt(
            f"training was saved in {self.writer.directory} after step {training.step}: the same call continues"
        )

    def on_train_begin(self, training: Training) -> None:
        """Report what a resume found."""
        self._synced_step = self._saved_step = training.step
        self._next_sync = training.step + 1
        for notice in self.notices:
            training.report({"event": "notice", "step": training.step, "text": notice})

    def on_step_complete(self, training: Training) -> None:
        """Save after an epoch, and stop or save when it is time; all processes do so at the same step."""
        is_epoch_end = training.step % training.length.steps_per_epoch == 0
        if is_epoch_end and not self.writer.is_busy:  # if epochs are shorter than writing, training does not wait
            self._save(training)
        if training.step < self._next_sync:
            return
        wants_stop, wants_save = self._synchronise(training)
        if (wants_stop or wants_save) and self._saved_step != training.step:
            self._save(training)
        if wants_stop:
            self.stop(training)

    def _synchronise(self, training: Training) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether it is time to save by the leading process's clock."""
        now = time.monotonic()
        seconds_per_step = (now - self._synced_at) / max(1, training.step - self._synced_step)
        num_steps = 1
        if training.group.num_ranks > 1:
            num_steps = int(SECONDS_BETWEEN_SYNCS / max(seconds_per_step, 1e-6))
            num_steps = max(1, min(num_steps, 2 * (training.step - self._synced_step)))
        local = (self.should_stop(), now - self._saved_at >= self.seconds_between, num_steps)
        everyone = training.group.all_gather([local] * len(training.members))
        self._synced_at, self._synced_step = now, training.step
        self._next_sync = training.step + everyone[0][2]
        return any(stop for stop, _, _ in everyone), everyone[0][1]

    def finish(self, training: Training) -> None:
        """After training: save its end, and wait until it is written."""
        if self._saved_step != training.step:
            self._save(training)
        self._handle_failure(training, self.writer.settle())

    def _save(self, training: Training) -> None:
        self._handle_failure(training, self.writer.settle())  # before the next is started, which may succeed
        state = {**self.extra_state(), "training": shared_state(training)}
        self.writer.save(training.step, member_states(training), state, self.flush)
        self._saved_step, self._saved_at = training.step, time.monotonic()

    def _handle_failure(self, training: Training, failure: Failure | None) -> None:
        """Report a failed checkpoint; the second failure in a row ends the run."""
        if failure is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        training.report({"event": "checkpoint-failed", "step": failure.step, "error": failure.error})
        if self._failures_in_a_row > 1:
            good = checkpoints(self.writer.directory)
            remedy = f". That of step {good[-1][0]} is complete: resume from it when the cause is fixed" if good else ""
            raise RunError(f"two checkpoints in a row failed; {failure}{remedy}")


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed inside of the block; pressed a second time, it has its usual effect."""
    pressed = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    if before is not signal.default_int_handler:  # somebody else handles it
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def resume_(
    training: Training, directory: Path, check: Callable[[Path, Mapping[str, Any]], None], remedy: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """Continue from the newest complete checkpoint, if there is one; all processes use the same.

    The training is as it was made; it must not be used after a `RunError`, as is raised if all checkpoints are damaged.
    `check` is given a checkpoint's path and state; it raises a `DamagedError` if an older one may be better, a
    `RunError` if none will be. Newer checkpoints that cannot be read are removed.

    Returns:
        What the checkpoint held besides the training, or None if there is no checkpoint; and notices for the user.
    """
    damaged: dict[Path, str] = {}
    for _, path in reversed(checkpoints(directory)):
        state, error = _load_(training, path, check)
        # One process's file may be damaged and another's not.
        errors = [other for other in training.group.all_gather([error] * len(training.members)) if other is not None]
        if not errors:
            for one in damaged if training.group.is_leader else ():
                discard(one)
            training.group.barrier()
            return state, [f"{error}; continuing from step {training.step}" for error in damaged.values()]
        damaged[path] = errors[0]
    if damaged:
        listing = "\n".join(f"  {error}" for error in damaged.values())
        raise RunError(f"no checkpoint in {directory} can be read; {remedy}:\n{listing}")
    return None, []


def _load_(
    training: Training, path: Path, check: Callable[[Path, Mapping[str, Any]], None]
) -> tuple[dict[str, Any] | None, str | None]:
    """Restore this process's part of a checkpoint; returns its state, or what is damaged."""
    try:
        checkpoint = load_checkpoint(path, expected_states(training), num_members=training.population.size)
        state = checkpoint.state.get("training")
        if not isinstance(state, dict):
            raise DamagedError(f"{path} has a manifest without the training's state: it was altered or damaged")
        check(path, checkpoint.state)
        load_state_(training, checkpoint.step, state, checkpoint.members)
    except DamagedError as error:
        return None, str(error)
    return checkpoint.state, None


def run_saved(training: Training, options: CheckpointOptions) -> None:
    """Resume a training from a directory, and run it to its end while it is saved there."""
    options.check()
    if options.directory is None:
        raise ConfigError("checkpoints have no directory: pass CheckpointOptions(directory=...)")
    directory, facts = Path(options.directory), _facts(training)
    with Lock(directory / ".lock"):
        _, notices = resume_(training, directory, partial(_check_facts, facts), "remove them to start again")
        with CheckpointWriter(
            directory,
            group=training.group,
            num_members=training.population.size,
            keep=options.keep,
            background=options.background,
        ) as writer:
            try:
                with interrupts() as is_interrupted:
                    saver = Saver(
                        writer,
                        minutes=options.minutes,
                        should_stop=is_interrupted,
                        notices=notices,
                        extra_state={"facts": facts},
                    )
                    training.run([saver])
                    saver.finish(training)
            finally:
                writer.settle()  # also after Ctrl-C: nothing is being written when others may use the directory


def _facts(training: Training) -> dict[str, Any]:
    """What identifies a training, as far as it can be compared."""
    group, settings = training.optimizers[0].param_groups[0], training.settings
    decay = group.get("weight_decay")
    return {
        "num_epochs": settings.num_epochs,
        "batch_size": settings.batch_size,
        "accumulate": settings.accumulate,
        "num_examples": training.data.num_train,
        "seed": training.seed,
        "rule": type(training.averager.rule).__name__,
        "optimizer": type(training.optimizers[0]).__name__,
        **{
            f"optimizer's {name}": value
            for name, value in (("learning rate", group.get("initial_lr", group["lr"])), ("weight decay", decay))
            if isinstance(value, int | float)
        },
    }


def _check_facts(asked: Mapping[str, Any], path: Path, state: Mapping[str, Any]) -> None:
    found = state.get("facts")
    if not isinstance(found, dict):
        raise RunError(f"{path} was not written by papa.train: choose another directory")
    before = found.get("num_epochs")
    goes_on = isinstance(before, int) and asked["num_epochs"] > before  # for more epochs
    differences = [
        f"{name} is {found[name]!r}, expected {value!r}"
        for name, value in asked.items()
        if name in found and found[name] != value and not (name == "num_epochs" and goes_on)
    ]
    if differences:
        raise RunError(
            f"{path} is of another training: {'; '.join(differences)}. Nothing was changed; use the same settings, or "
            "choose another directory"
        )
