"""Checkpoints on disk.

A checkpoint is a directory `step-00000123` with `manifest.json` and one safetensors file per member. It is written as
`.step-00000123.partial`: each process adds the files of its own members, each followed by a small part of the manifest;
when all parts are there, the leading process writes the manifest and gives the directory its name. So a directory with
the right name is always whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from papa._version import __version__
from papa.checkpoint.files import flush_directory, json_text, read_object, write_file
from papa.checkpoint.state import Expected, MemberState
from papa.checkpoint.tensors import DamagedError, parts_of, read_tensors
from papa.errors import RunError

FORMAT = 2
MANIFEST = "manifest.json"
MOST_MEMBERS = 1_000_000


def partial_path(directory: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return directory / f".step-{step:08d}.partial"


def member_file(member: int) -> str:
    """The name of a member's file."""
    return f"member-{member:03d}.safetensors"


def part_file(member: int) -> str:
    """The name of a member's part of the manifest, which goes into it in the end."""
    return f"member-{member:03d}.json"


def write_member(directory: Path, member: int, state: MemberState) -> None:
    """Write one member into a partial checkpoint, and then that it is there."""
    tensors, numbers = state
    size, sha = write_file(directory / member_file(member), parts_of(tensors))
    part = json_text({"bytes": size, "sha256": sha, "numbers": numbers})
    aside = directory / f".{part_file(member)}"
    write_file(aside, [part.encode()])
    os.replace(aside, directory / part_file(member))


def has_all_parts(directory: Path, num_members: int) -> bool:
    """Whether every member is there."""
    return all((directory / part_file(member)).exists() for member in range(num_members))


def complete(directory: Path, step: int, num_members: int, state: Mapping[str, Any], keep: int) -> Path:
    """Turn a partial checkpoint that has all parts into a whole one, then remove all but the newest `keep`."""
    partial, final = partial_path(directory, step), directory / f"step-{step:08d}"
    files = {member_file(member): read_object(partial / part_file(member)) for member in range(num_members)}
    manifest = {"format": FORMAT, "papa": __version__, "step": step, "members": num_members, "state": state}
    write_file(partial / MANIFEST, [json_text({**manifest, "files": files}, indent=1).encode()])
    for member in range(num_members):
        (partial / part_file(member)).unlink()
    flush_directory(partial)
    if final.exists():
        discard(final)
    os.replace(partial, final)
    flush_directory(directory)
    for _, old in checkpoints(directory)[:-keep]:
        discard(old)
    return final


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; its name goes first, so that it is never seen half removed."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clear_partial(directory: Path) -> None:
    """Remove what a run that was killed left half written."""
    for path in directory.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Every checkpoint with its step, oldest first."""
    found = []
    for path in directory.glob("step-*"):
        if not re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})", path.name) or path.is_symlink() or not path.is_dir():
            raise RunError(f"{path} is no checkpoint, expected directories such as step-00000123: move it elsewhere")
        found.append((int(path.name.removeprefix("step-")), path))
    return sorted(found)


class Members(Mapping[int, MemberState]):
    """The members of a checkpoint, each read when it is asked for: a process need not hold all of them at once."""

    def __init__(self, path: Path, files: Mapping[str, Any], expected: Mapping[int, Expected]) -> None:
        self._path, self._files, self._expected = path, files, expected

    def __getitem__(self, member: int) -> MemberState:
        """Read a member; raises what `load_checkpoint` may raise."""
        entry, file = self._files[member_file(member)], self._path / member_file(member)
        try:
            tensors = _checked_tensors(file, entry, self._expected[member])
        except DamagedError:
            raise
        except RunError as error:
            raise RunError(f"{file} does not fit: {error}") from error
        return tensors, entry["numbers"]

    def __iter__(self) -> Iterator[int]:
        """Those that were asked for."""
        return iter(self._expected)

    def __len__(self) -> int:
        """How many were asked for."""
        return len(self._expected)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds of the members that were asked for."""

    step: int
    state: dict[str, Any]
    members: Members


def load_checkpoint(path: Path, expected: Mapping[int, Expected], *, num_members: int) -> Checkpoint:
    """Open a checkpoint; nothing is believed that was not compared with what is expected and with its digest.

    Args:
        path: the checkpoint's directory.
        expected: what the members that are to be read must look like.
        num_members: the size of the population.

    Raises:
        DamagedError: when it was cut short or altered; another checkpoint may be whole. So may reading a member.
        RunError: when it is of another population, model or version of papa.
    """
    manifest = _read_manifest(path)
    if manifest["members"] != num_members:
        raise RunError(f"{path} has {manifest['members']} members, expected {num_members}: it is of another run")
    return Checkpoint(manifest["step"], manifest["state"], Members(path, manifest["files"], expected))


def _checked_tensors(file: Path, entry: dict[str, Any], expected: Expected) -> dict[str, Tensor]:
    numbers = entry["numbers"]
    _check_regular(file)
    expected.check_numbers(numbers.get("optimizer"))

    def check(specs: Any) -> None:
        expected.check_tensors(specs)
        expected.check_whole(specs, numbers["optimizer"])

    return read_tensors(file, size=entry["bytes"], sha256=entry["sha256"], check=check)


def _check_regular(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        raise DamagedError(f"{file.parent} names the file {file.name}, which is not there: it was removed")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    _check_regular(file)
    try:
        manifest = read_object(file)
    except RunError as error:
        raise DamagedError(str(error)) from error
    if manifest.get("format") != FORMAT:
        raise RunError(f"{path} has checkpoint format {manifest.get('format')!r}, this papa reads {FORMAT}")
    if manifest.get("papa") != __version__:
        raise RunError(
            f"{path} was written by papa {manifest.get('papa')!r}, this is {__version__}: "
            "continue with that version, or start anew with --overwrite"
        )
    problem = _problem(manifest, path)
    if problem:
        raise DamagedError(f"{file} makes no sense: {problem}")
    return manifest


def _problem(manifest: dict[str, Any], path: Path) -> str | None:
    """What is wrong with a manifest's form; None when nothing is."""
    step, num_members, files = manifest.get("step"), manifest.get("members"), manifest.get("files")
    if type(step) is not int or path.name != f"step-{step:08d}":
        return f"its step is {step!r}, expected that of its directory"
    if type(num_members) is not int or not 1 <= num_members <= MOST_MEMBERS:
        return f"its number of members is {num_members!r}"
    if not isinstance(manifest.get("state"), dict) or not isinstance(files, dict):
        return "its state and its files are to be objects"
    if len(files) != num_members:
        return f"it names {len(files)} files, expected {num_members}"
    names = {member_file(member) for member in range(num_members)}
    for name, entry in files.items():
        if name not in names:
            return f"it names the file {name!r}, which no checkpoint has"
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            return f"the size of {name} is missing"
        if not re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
            return f"the digest of {name} is missing"
        if not isinstance(entry.get("numbers"), dict):
            return f"the numbers of {name} are missing"
    return None
