"""Checkpoints on disk.

A checkpoint is a directory `step-00000123` with `manifest.json` and one safetensors file per member. It is written as
`.step-00000123.partial`: each process adds the files of its own members, each followed by a small part of the manifest;
when all parts are there, the leading process writes the manifest and renames the directory. The manifest holds the
digest of every file and of itself: a checkpoint is used as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from papa._version import __version__
from papa.errors import RunError
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
from papa.storage.tensors import TensorFile, save_tensors
from papa.training.checkpoint.state import Expected, MemberState

FORMAT = 3
MANIFEST = "manifest.json"


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


def partial_path(directory: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return directory / f".step-{step:08d}.partial"


def member_file(member: int) -> str:
    """The name of a member's file."""
    return f"member-{member:03d}.safetensors"


def part_file(member: int) -> str:
    """The name of a member's part of the manifest; its content ends up in the manifest."""
    return f"member-{member:03d}.json"


def write_member(directory: Path, member: int, state: MemberState) -> None:
    """Write one member into a partial checkpoint, and then its part of the manifest."""
    tensors, numbers = state
    digest = hashlib.sha256()
    size = save_tensors(directory / member_file(member), tensors, digest)
    part = json_text({"bytes": size, "sha256": digest.hexdigest(), "numbers": numbers})
    hidden = directory / f".{part_file(member)}"
    write_file(hidden, [part.encode()])
    os.replace(hidden, directory / part_file(member))


def has_all_parts(directory: Path, num_members: int) -> bool:
    """Whether every member is there."""
    return all((directory / part_file(member)).exists() for member in range(num_members))


def complete(directory: Path, step: int, num_members: int, state: Mapping[str, Any], keep: int) -> Path:
    """Turn a partial checkpoint that has all parts into a complete one, then remove all but the newest `keep`."""
    partial, final = partial_path(directory, step), directory / f"step-{step:08d}"
    files = {member_file(member): read_object(partial / part_file(member)) for member in range(num_members)}
    manifest = {"format": FORMAT, "papa": __version__, "step": step, "members": num_members, "state": state}
    write_file(partial / MANIFEST, [json_text(with_digest({**manifest, "files": files}), indent=1).encode()])
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


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the digest of everything else in it."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(json_text(content).encode()).hexdigest()}


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that it is never seen half removed."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear_partial(directory: Path) -> None:
    """Remove partial checkpoints, which a killed run leaves behind."""
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
    """The members of a checkpoint, each read when it is accessed, so that memory holds one at a time."""

    def __init__(self, path: Path, files: Mapping[str, FileEntry], expected: Mapping[int, Expected]) -> None:
        self._path, self._files, self._expected = path, files, expected

    def __getitem__(self, member: int) -> MemberState:
        """Read a member; raises what `load_checkpoint` may raise."""
        entry, file = self._files[member_file(member)], self._path / member_file(member)
        _check_file(file, entry)
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
    manifest = _read_manifest(path)
    if manifest["members"] != num_members:
        raise RunError(f"{path} has {manifest['members']} members, expected {num_members}: it is of another run")
    return Checkpoint(manifest["step"], manifest["state"], Members(path, manifest["files"], expected))


def _check_file(file: Path, entry: FileEntry) -> None:
    _check_regular(file)
    with file_errors(file, error=DamagedError):
        if (size := file.stat().st_size) != entry["bytes"]:
            raise DamagedError(
                f"{file} has {size:,} bytes, its manifest says {entry['bytes']:,}: it was altered or damaged"
            )
        if sha256_of(file) != entry["sha256"]:
            raise DamagedError(f"{file} does not match the digest in its manifest: it was altered or damaged")


def _check_regular(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        raise DamagedError(f"{file.parent} has no file {file.name}: it was removed")


def _read_manifest(path: Path) -> Manifest:
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
        if manifest["files"].keys() != {member_file(member) for member in range(len(manifest["files"]))}:
            raise ValueError(f"its files are {', '.join(sorted(manifest['files']))[:60]}")
        if len(manifest["files"]) != manifest["members"]:
            raise ValueError(f"it names {len(manifest['files'])} files, expected {manifest['members']}")
    return manifest
