"""Checkpoints of a training: what they hold, how they are written and read, complete or not there at all.

A checkpoint is a directory `step-00000123` with `manifest.json` and one safetensors file per member. It is written as
`.step-00000123.partial`: each process adds the files of its own members, each followed by a small part of the manifest;
when all parts are there, the leading process writes the manifest and renames the directory. The manifest holds the
digest of every file and of itself: a checkpoint is used as a whole or not at all.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa._version import __version__
from papa.core.group import Group
from papa.errors import MixingError, RunError
from papa.storage import (
    DamagedError,
    file_errors,
    flush_directory,
    json_text,
    read_object,
    sha256_of,
    validated,
    write_file,
)
from papa.storage.tensors import TensorFile, TensorInfo, save_tensors
from papa.training.loop import NUM_BAD_LOSSES, Training

FORMAT = 3
MANIFEST = "manifest.json"
PATIENCE_SECONDS = 120.0
"""How long the leading process waits for files that other processes have written: network file systems are slow."""

MemberState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""All tensors of a member by name, and the rest of its state as a JSON value."""


class FileEntry(TypedDict):
    """What a manifest says about a member's file."""

    bytes: int
    sha256: str
    numbers: dict[str, Any]


class Manifest(TypedDict):
    """What `manifest.json` holds, besides its own digest."""

    format: int
    papa: str
    step: int
    members: int
    state: dict[str, Any]
    files: dict[str, FileEntry]


class MemberNumbers(TypedDict):
    """The state of a member that is no tensor."""

    optimizer: dict[str, Any]
    scaler: dict[str, float] | None
    loss_sum: float | None
    bad_losses: list[bool]


class Event(TypedDict):
    """A member that was found non-finite; further keys say why, and what was done."""

    member: int
    step: int


class SharedState(TypedDict):
    """The state that all members share."""

    num_averagings: int
    seconds: dict[str, float]
    nonfinite: list[Event]
    dropped: list[int]
    rule: dict[str, Any] | None


# --- What is saved, and how a training continues from it. ---


def member_state(model: nn.Module, optimizer: Optimizer) -> MemberState:
    """The state of a member and its optimizer, as named tensors and a JSON value."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    numbers: dict[str, Any] = {}
    for key, value in _optimizer_values(optimizer).items():
        if isinstance(value, Tensor):
            tensors[f"optimizer.{key}"] = value.detach()
        elif value is not None:
            numbers[key] = value
    return tensors, {"optimizer": numbers}


def load_member_state_(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Load a `member_state` into a member and its optimizer; learning rates do not change.

    Tensors that were loaded are removed from `tensors`, so that there is never more than one copy.
    """
    model.load_state_dict(_popped(tensors, "model."))
    parameters = _parameters(optimizer)
    entries: dict[int, dict[str, Any]] = {}
    for key, value in itertools.chain(_popped(tensors, "optimizer.").items(), numbers["optimizer"].items()):
        index, name = key.split(".", 1)
        parameter = parameters[int(index)]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            # Files do not keep the memory format, which fused optimizer kernels need.
            value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        entries.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def member_states(training: Training) -> dict[int, MemberState]:
    """The state of the local members of a training."""
    states = {}
    bad_losses = (~torch.stack(training.recent_losses, dim=1).isfinite()).tolist()
    loss_sums, memory = training.loss_sums.tolist(), training.averager.memory
    for index, member in enumerate(training.members):
        tensors, numbers = member_state(training.population[index], training.optimizers[index])
        scaler = training.scalers[index]
        numbers["scaler"] = None if scaler is None else scaler.state_dict()
        numbers["loss_sum"] = loss_sums[index]
        numbers["bad_losses"] = bad_losses[index]
        tensors.update({f"averager.{name}": tensor for name, tensor in memory.tensors_of(index).items()})
        tensors.update(_callback_tensors(training, index))
        states[member] = (tensors, numbers)
    return states


def _callback_tensors(training: Training, index: int) -> dict[str, Tensor]:
    return {
        f"callbacks.{number}.{name}": tensor
        for number, callback in enumerate(training.callbacks)
        for name, tensor in callback.member_state(index).items()
    }


def shared_state(training: Training) -> dict[str, Any]:
    """The state that all members of a training share; a JSON value."""
    return {
        "num_averagings": training.averager.num_averagings,
        "seconds": dict(training.seconds),
        "nonfinite": list(training.nonfinite),
        "dropped": sorted(training.population.dropped),
        "rule": dict(training.averager.rule_state) or None,
    }


def load_state_(training: Training, step: int, state: Mapping[str, Any], members: Mapping[int, MemberState]) -> None:
    """Restore a training from a checkpoint, one member after the other.

    After a `RunError` the training must not be used until another checkpoint was loaded.
    """
    averager, size = training.averager, training.population.size
    try:
        shared = validated(state, SharedState)
        if not 0 <= step <= training.length.num_steps:
            raise ValueError(f"step is {step}, expected at most {training.length.num_steps}")
        if shared["seconds"].keys() != training.seconds.keys():
            raise ValueError(f"seconds are {shared['seconds']}, expected {', '.join(training.seconds)}")
        if shared["num_averagings"] < 0 or not all(0 <= member < size for member in shared["dropped"]):
            raise ValueError(f"num_averagings is {shared['num_averagings']}, dropped {shared['dropped']} of {size}")
        rule_state = averager.checked_rule_state(shared["rule"])
    except (ValueError, MixingError) as error:
        kind = "rule" if isinstance(error, MixingError) else "training"
        raise RunError(f"the checkpoint is of another {kind}: {error}") from None
    of_averager = [_load_member_(training, index, *members[member]) for index, member in enumerate(training.members)]
    training.nonfinite, training.population.dropped = list(state["nonfinite"]), frozenset(shared["dropped"])
    training.seconds.update(shared["seconds"])
    averager.num_averagings, averager.rule_state = shared["num_averagings"], rule_state
    averager.memory.load_(of_averager)
    training.go_to_(step)


def _load_member_(training: Training, index: int, tensors: dict[str, Tensor], numbers: Any) -> dict[str, Tensor]:
    """Restore a member, whose tensors were checked before; returns what the averager saved with it."""
    member, scaler = training.members[index], training.scalers[index]
    try:
        checked = validated(numbers, MemberNumbers)
        of_scaler = {} if scaler is None else scaler.state_dict()
        if (checked["scaler"] or {}).keys() != of_scaler.keys():
            raise ValueError(f"scaler is {checked['scaler']}, expected {', '.join(of_scaler) or 'nothing'}")
        if len(checked["bad_losses"]) != NUM_BAD_LOSSES:
            raise ValueError(f"bad_losses are {checked['bad_losses']}, expected {NUM_BAD_LOSSES}")
        for name in training.averager.memory.names_of(member):
            if f"averager.{name}" not in tensors:
                raise ValueError(f"{name} is missing, which the rule needs")
    except ValueError as error:
        raise RunError(f"the state of member {member} in the checkpoint does not fit: {error}") from None
    load_member_state_(training.population[index], training.optimizers[index], tensors, numbers)
    if scaler is not None:
        scaler.load_state_dict(numbers["scaler"])
    training.loss_sums[index] = math.nan if checked["loss_sum"] is None else checked["loss_sum"]
    for losses, is_bad in zip(training.recent_losses, checked["bad_losses"], strict=True):
        losses[index] = math.nan if is_bad else 0.0
    for number, callback in enumerate(training.callbacks):
        if own := _popped(tensors, f"callbacks.{number}."):
            callback.load_member_state_(index, own)
    return _popped(tensors, "averager.")


def _popped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors with a prefix; returns them under their names without it."""
    return {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}


class Expected:
    """The tensors and numbers that a checkpoint of a member must have.

    What an optimizer keeps is known only after a step, so a copy of it takes one, on the meta device where possible. A
    parameter that was not trained yet, such as a frozen one, may have no optimizer state. `others` are further tensors
    that must be there, by their names in the checkpoint, and `optional` those that may.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        others: Mapping[str, Tensor] | None = None,
        optional: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.optimizer = {
            key: TensorInfo.of(value) if isinstance(value, Tensor) else "a number"
            for key, value in _values_after_a_step(optimizer).items()
            if value is not None
        }
        needed = {**{f"model.{name}": tensor for name, tensor in model.state_dict().items()}, **(others or {})}
        self.required = {name: TensorInfo.of(tensor) for name, tensor in needed.items()}
        kept = {f"optimizer.{key}": info for key, info in self.optimizer.items() if isinstance(info, TensorInfo)}
        self.known = self.required | kept | {name: TensorInfo.of(one) for name, one in (optional or {}).items()}

    def check(self, tensors: Mapping[str, TensorInfo], numbers: Any) -> None:
        """Raise a `RunError` that names the first difference to a checkpoint's tensors and its optimizer's numbers."""
        for name in self.required.keys() | tensors.keys():
            if tensors.get(name) != self.known.get(name):
                found, wanted = (infos.get(name, "missing") for infos in (tensors, self.known))
                raise RunError(f"its tensor '{name}' is {found}, expected {wanted}: it is of another model")
        if not isinstance(numbers, dict):
            raise RunError(f"its optimizer's numbers are {numbers!r}, expected an object")
        for key, value in numbers.items():
            is_number = type(value) in (int, float, bool) and math.isfinite(value)
            if not is_number or self.optimizer.get(key) != "a number":
                raise RunError(f"its optimizer has {value!r} as '{key}': it is of another optimizer")
        kept = {name.removeprefix("optimizer.") for name in tensors if name.startswith("optimizer.")} | numbers.keys()
        begun = {key.partition(".")[0] for key in kept}  # a parameter has all of its optimizer's values or none
        for key, expected in self.optimizer.items():
            if key not in kept and key.partition(".")[0] in begun:
                raise RunError(f"its optimizer has no '{key}', expected {expected}")


def expected_states(training: Training) -> dict[int, Expected]:
    """What a checkpoint of the local members of a training must contain."""
    rows = {f"averager.{name}": row for name, row in training.averager.memory.templates().items()}
    return {
        member: Expected(
            training.population[index], training.optimizers[index], _callback_tensors(training, index), rows
        )
        for index, member in enumerate(training.members)
    }


def _optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entries in state.items() for name, value in entries.items()}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values_after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps after a step; on the meta device, where tensors take no memory, if it can step there."""
    memo: dict[int, Any] = {id(one): nn.Parameter(one.detach().to("meta")) for one in _parameters(optimizer)}
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(optimizer, memo)
    for group in twin.param_groups:
        if group.get("fused"):
            group["fused"] = False  # it keeps the same values, and has no kernel for the meta device
    try:
        return _stepped(twin)
    except (RuntimeError, AssertionError):  # it reads numbers, or checks the device; any other error occurs again
        return _stepped(copy.deepcopy(optimizer))


def _stepped(optimizer: Optimizer) -> dict[str, Any]:
    for parameter in _parameters(optimizer):
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return _optimizer_values(optimizer)


# --- Reading. ---


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Every checkpoint with its step, oldest first."""
    found = []
    for path in directory.glob("step-*"):
        if not re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})", path.name) or path.is_symlink() or not path.is_dir():
            raise RunError(f"{path} is no checkpoint, expected directories such as step-00000123: move it elsewhere")
        found.append((int(path.name.removeprefix("step-")), path))
    return sorted(found)


class Members(Mapping[int, MemberState]):
    """The members of a checkpoint, each read when it is accessed, so that memory holds one at a time."""

    def __init__(self, path: Path, files: Mapping[str, FileEntry], expected: Mapping[int, Expected]) -> None:
        self._path, self._files, self._expected = path, files, expected

    def __getitem__(self, member: int) -> MemberState:
        """Read a member; raises what `load_checkpoint` may raise."""
        entry, file = self._files[_member_file(member)], self._path / _member_file(member)
        _check_regular(file)
        with file_errors(file, error=DamagedError):
            if (size := file.stat().st_size) != entry["bytes"]:
                raise DamagedError(
                    f"{file} has {size:,} bytes, its manifest says {entry['bytes']:,}: it was altered or damaged"
                )
            if sha256_of(file) != entry["sha256"]:
                raise DamagedError(f"{file} does not match the digest in its manifest: it was altered or damaged")
        opened = TensorFile(file, error=DamagedError)
        try:
            self._expected[member].check(opened.tensors, entry["numbers"].get("optimizer"))
        except RunError as error:
            raise RunError(f"{file} does not fit: {error}") from error
        return {name: opened.read(name) for name in opened.tensors}, entry["numbers"]

    def __iter__(self) -> Iterator[int]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)


@dataclass(frozen=True)
class Checkpoint:
    """A training at some step, as far as it was requested."""

    step: int
    state: dict[str, Any]
    members: Members


def load_checkpoint(path: Path, expected: Mapping[int, Expected], *, num_members: int) -> Checkpoint:
    """Open a checkpoint to read the expected members; digests, shapes and dtypes are checked before anything is used.

    Raises:
        DamagedError: it was truncated or altered; another checkpoint may be complete. So may reading a member.
        RunError: it is of another population, model or version of papa.
    """
    file = path / MANIFEST
    _check_regular(file)
    found = read_object(file, error=DamagedError)
    if found.get("format") != FORMAT:
        raise RunError(
            f"{path} has checkpoint format {found.get('format')!r}, this version of papa reads format {FORMAT}: "
            "continue with the version that wrote it, or start the run again"
        )
    if found != with_digest(found):
        raise DamagedError(f"{file} does not match its own digest: it was altered or damaged")
    if found.get("papa") != __version__:
        raise RunError(
            f"{path} was written by papa {found.get('papa')!r}, this is {__version__}: continue with that version, or "
            "start the run again"
        )
    with file_errors(file, error=DamagedError, kind="a valid manifest"):
        manifest = validated(found, Manifest)
        if path.name != f"step-{manifest['step']:08d}":
            raise ValueError(f"its step is {manifest['step']}, expected that of its directory")
        if manifest["files"].keys() != set(map(_member_file, range(len(manifest["files"])))):
            raise ValueError(f"its files are {', '.join(sorted(manifest['files']))[:60]}")
        if len(manifest["files"]) != manifest["members"]:
            raise ValueError(f"it names {len(manifest['files'])} files, expected {manifest['members']}")
    if manifest["members"] != num_members:
        raise RunError(f"{path} has {manifest['members']} members, expected {num_members}: it is of another run")
    return Checkpoint(manifest["step"], manifest["state"], Members(path, manifest["files"], expected))


def _check_regular(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        raise DamagedError(f"{file.parent} has no file {file.name}: it was removed")


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the digest of everything else in it."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(json_text(content).encode()).hexdigest()}


# --- Writing. ---


def _partial_path(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.partial"


def _member_file(member: int) -> str:
    return f"member-{member:03d}.safetensors"


def _part_file(member: int) -> str:
    """The name of a member's part of the manifest; its content ends up in the manifest."""
    return f"member-{member:03d}.json"


def _write_member(directory: Path, member: int, state: MemberState) -> None:
    """Write one member into a partial checkpoint, and then its part of the manifest."""
    tensors, numbers = state
    digest = hashlib.sha256()
    size = save_tensors(directory / _member_file(member), tensors, digest)
    part = json_text({"bytes": size, "sha256": digest.hexdigest(), "numbers": numbers})
    hidden = directory / f".{_part_file(member)}"
    write_file(hidden, [part.encode()])
    os.replace(hidden, directory / _part_file(member))


def _complete(directory: Path, step: int, num_members: int, state: Mapping[str, Any], keep: int) -> None:
    """Turn a partial checkpoint that has all parts into a complete one, then remove all but the newest `keep`."""
    partial, final = _partial_path(directory, step), directory / f"step-{step:08d}"
    files = {_member_file(member): read_object(partial / _part_file(member)) for member in range(num_members)}
    manifest = {"format": FORMAT, "papa": __version__, "step": step, "members": num_members, "state": state}
    write_file(partial / MANIFEST, [json_text(with_digest({**manifest, "files": files}), indent=1).encode()])
    for member in range(num_members):
        (partial / _part_file(member)).unlink()
    flush_directory(partial)
    if final.exists():
        discard(final)
    os.replace(partial, final)
    flush_directory(directory)
    for _, old in checkpoints(directory)[:-keep]:
        discard(old)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that it is never seen half removed."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


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
    """A checkpoint that could not be written; as text, a sentence that says so."""

    step: int
    error: str

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} could not be written: {self.error}"


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
            for path in directory.glob(".step-*.partial"):  # a killed run leaves them behind
                shutil.rmtree(path, ignore_errors=True)
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
        partial = _partial_path(self.directory, step)
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
        partial = _partial_path(self.directory, job.step)
        try:
            for member, content in job.members.items() if job.error is None else ():
                _write_member(partial, member, content)
        except Exception as error:  # no caller sees it in a thread: `settle` returns it
            job.error = _message(error)
        job.wrote.set()
        if not self.group.is_leader:
            return
        try:
            if job.error is None and self._has_all_parts(job, partial):
                job.flush()
                _complete(self.directory, job.step, self.num_members, job.state, self.keep)
        except Exception as error:
            job.error = _message(error)
        if job.error is not None:
            shutil.rmtree(partial, ignore_errors=True)

    def _has_all_parts(self, job: _Job, partial: Path) -> bool:
        """Wait for the files of other processes."""
        while not all((partial / _part_file(member)).exists() for member in range(self.num_members)):
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
