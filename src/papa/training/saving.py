"""Checkpoints of a training: when they are written, and how to go on from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from papa.checkpoint import CheckpointWriter, DamagedError, Failure, checkpoints, discard, load_checkpoint
from papa.errors import RunError
from papa.lock import Lock
from papa.training.loop import Callback, Training
from papa.training.options import EpochRecord
from papa.training.state import expected_states, load_state_, member_states, state_of

SECONDS_BETWEEN_MEETINGS = 1.0
"""How often several processes ask each other whether to stop or to save, at the least."""


class Saver(Callback):
    """Saves a training at the end of each epoch, and after some minutes without that; all processes together.

    Args:
        writer: writes the checkpoints.
        minutes: how long the training may go without one.
        notices: what is to be told at the start.
        beside: what checkpoints hold besides the training; a JSON value.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        minutes: float,
        notices: Sequence[str] = (),
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        self.writer, self.notices, self.beside = writer, notices, beside or {}
        self.seconds_between = 60.0 * minutes
        self._failures_in_a_row = 0
        self._saved_step = -1
        self._saved_at = self._met_at = time.monotonic()
        self._met_step = 0
        self._next_meeting = 0

    def state_beside(self) -> dict[str, Any]:
        """What the next checkpoint holds besides the training; a JSON value."""
        return dict(self.beside)

    def flush(self) -> None:
        """Flush what checkpoints rely on; called in the background of the leading process, before each counts."""

    def is_asked_to_stop(self) -> bool:
        """Whether this process was asked to stop."""
        return False

    def stop(self, training: Training) -> None:
        """End the training, which was saved: raise what tells so."""

    def on_start(self, training: Training) -> None:
        """Say what a resume found."""
        self._met_step = self._saved_step = training.step
        self._next_meeting = training.step + 1
        for notice in self.notices:
            training.tell({"event": "notice", "step": training.step, "text": notice})

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """A checkpoint."""
        if not self.writer.is_busy:  # where epochs are shorter than writing is, training does not wait for the disk
            self._save(training)

    def after_step(self, training: Training) -> None:
        """Stop or save when it is time; all processes do so at the same step."""
        if training.step < self._next_meeting:
            return
        wants_stop, wants_save = self._meet(training)
        if (wants_stop or wants_save) and self._saved_step != training.step:
            self._save(training)
        if wants_stop:
            self.stop(training)

    def _meet(self, training: Training) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether the leading one says that it is time to save."""
        now = time.monotonic()
        seconds_per_step = (now - self._met_at) / max(1, training.step - self._met_step)
        num_steps = 1
        if training.group.num_ranks > 1:
            num_steps = int(SECONDS_BETWEEN_MEETINGS / max(seconds_per_step, 1e-6))
            num_steps = max(1, min(num_steps, 2 * (training.step - self._met_step)))
        note = (self.is_asked_to_stop(), now - self._saved_at >= self.seconds_between, num_steps)
        notes = training.group.all_gather([note] * len(training.members))
        self._met_at, self._met_step = now, training.step
        self._next_meeting = training.step + notes[0][2]
        return any(note[0] for note in notes), notes[0][1]

    def finish(self, training: Training) -> None:
        """After training: save its end, and wait for what is still being written."""
        if self._saved_step != training.step:
            self._save(training)
        self._note(training, self.writer.settle())

    def _save(self, training: Training) -> None:
        self._note(training, self.writer.settle())  # told before the next is begun, which may then go better
        state = {**self.state_beside(), "training": state_of(training)}
        self.writer.save(training.step, member_states(training), state, self.flush)
        self._saved_step, self._saved_at = training.step, time.monotonic()

    def _note(self, training: Training, failure: Failure | None) -> None:
        """Tell of a checkpoint that failed; the second in a row ends the run."""
        if failure is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        training.tell({"event": "checkpoint-failed", "step": failure.step, "error": failure.error})
        if self._failures_in_a_row > 1:
            good = checkpoints(self.writer.directory)
            there = f". That of step {good[-1][0]} is whole: go on from it when the cause is cured" if good else ""
            raise RunError(f"twice in a row a checkpoint failed; {told(failure)}{there}")


def told(failure: Failure) -> str:
    """A failure in words."""
    return f"the checkpoint of step {failure.step} could not be written: {failure.error}"


@dataclass
class Resumed:
    """What a resume found."""

    state: dict[str, Any] | None = None
    """What the checkpoint held besides the training; None where there is no checkpoint."""
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that cannot be read, and why."""


def resume_(training: Training, directory: Path, check: Callable[[Path, Mapping[str, Any]], None]) -> Resumed:
    """Go on from the newest checkpoint that is whole, where there is one; all processes take the same.

    Args:
        training: as it was made; after a `RunError` it is worth nothing.
        directory: where its checkpoints are.
        check: looks at a checkpoint's path and state; raises a `DamagedError` where another may be better, a `RunError`
            where none will be.
    """
    found = Resumed()
    for _, path in reversed(checkpoints(directory)):
        state, error = _load_(training, path, check)
        # One process's file may be damaged and another's not.
        errors = [other for other in training.group.all_gather([error] * len(training.members)) if other is not None]
        if not errors:
            found.state = state
            return found
        found.damaged[path] = errors[0]
    return found


def _load_(
    training: Training, path: Path, check: Callable[[Path, Mapping[str, Any]], None]
) -> tuple[dict[str, Any] | None, str | None]:
    """Go on from this process's part of a checkpoint; returns its state, or what is damaged."""
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


@contextlib.contextmanager
def kept(training: Training, directory: Path, *, minutes: float = 10.0, keep: int = 2) -> Iterator[Saver]:
    """Go on from what a directory holds of a training, and give the callback that saves it there.

    Args:
        training: as it was made.
        directory: made when missing; no other process may use it meanwhile.
        minutes: how long the training may go without a checkpoint, besides those at the end of epochs.
        keep: how many checkpoints stay.
    """
    facts = _facts(training)
    with Lock(directory / ".lock"):
        found = resume_(training, directory, partial(_check_facts, facts))
        if found.damaged and found.state is None:
            listing = "\n".join(f"  {error}" for error in found.damaged.values())
            raise RunError(f"no checkpoint in {directory} can be read; to begin anew, remove them:\n{listing}")
        for path in found.damaged:
            discard(path)
        size = training.population.size
        notices = [f"{error}; continuing from step {training.step}" for error in found.damaged.values()]
        with CheckpointWriter(directory, group=training.group, num_members=size, keep=keep) as writer:
            try:
                yield Saver(writer, minutes=minutes, notices=notices, beside={"facts": facts})
            finally:
                writer.settle()  # after Ctrl-C too: nothing is still being written when others may use the directory


def _facts(training: Training) -> dict[str, Any]:
    """What makes a training another one, as far as what is made of functions can be compared."""
    group = training.optimizers[0].param_groups[0]
    decay = group.get("weight_decay")
    return {
        "num_epochs": training.num_epochs,
        "batch_size": training.batch_size,
        "num_examples": len(training.data.train),
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
    there = state.get("facts")
    if not isinstance(there, dict):
        raise RunError(f"{path} was not written by papa.train: choose another directory")
    differences = [
        f"{name} is {there.get(name)!r}, asked for {value!r}"
        for name, value in asked.items()
        if name in there and there[name] != value
    ]
    if differences:
        raise RunError(
            f"{path} is of another training: {'; '.join(differences)}. Nothing was changed; ask for the same, or "
            "choose another directory"
        )
