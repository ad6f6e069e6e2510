"""Checkpoints: tensors in safetensors, everything else in a JSON manifest, complete or not there at all.

A checkpoint is a directory `step-00000123` with `manifest.json` and one safetensors file per member. It is written
under another name, flushed to disk and renamed, so a directory with the right name is always whole. Nothing that is
loaded can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from papa._version import __version__
from papa.errors import RunError
from papa.group import Group

FORMAT = 1


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file's content at once: a reader sees the old or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON; numbers that are not finite, which JSON does not have, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically."""
    write_atomically(path, json_text(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or raise a `RunError` that names it."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON: {error}") from error


def save_network(path: Path, network: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
    """Write a network's state dict as safetensors, atomically."""
    partial = path.with_name(f".{path.name}.partial")
    # Tied tensors share memory, which the format does not allow: each name gets a copy of its own.
    state = {name: tensor.detach().contiguous().clone() for name, tensor in network.state_dict().items()}
    try:
        save_file(state, partial, metadata={"format": "pt", "papa": __version__, **(metadata or {})})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error}") from error


def member_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All of a member's state, as named tensors and a JSON value."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    numbers: dict[str, Any] = {}
    state = optimizer.state_dict()
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value.detach()
            elif value is not None:
                numbers[f"{index}.{name}"] = value
    return tensors, {"optimizer": numbers}


def load_member_state_(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Put `member_state` back into a member and its optimizer; learning rates stay as they are."""
    entries: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *((f"optimizer.{key}", value) for key, value in numbers["optimizer"].items())]:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            index, _, name = rest.partition(".")
            entries.setdefault(int(index), {})[name] = value
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


MemberState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]


def save_checkpoint(
    directory: Path,
    step: int,
    members: Mapping[int, MemberState],
    state: Mapping[str, Any],
    *,
    group: Group,
    keep: int = 2,
) -> Path:
    """Write a checkpoint together, each process its own members, and remove all but the newest `keep`.

    Args:
        directory: where the run keeps its checkpoints.
        step: optimizer steps taken.
        members: the tensors and numbers of each member held here, as `member_state` gives them.
        state: what else must be known to go on; any JSON value.
        group: the processes that hold the population.
        keep: how many checkpoints stay.
    """
    final, partial = directory / f"step-{step:08d}", directory / f".step-{step:08d}.partial"
    try:
        if group.leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        group.wait()
        entries = group.gather([_write_member(partial, member, *content) for member, content in members.items()])
        if group.leads:
            manifest = {"format": FORMAT, "papa": __version__, "step": step, "state": state, "files": dict(entries)}
            write_json(partial / "manifest.json", manifest)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _flush(directory)
            for old in sorted(directory.glob("step-*"))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"cannot write the checkpoint {final}: {error}") from error
    return final


def _write_member(
    directory: Path, member: int, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    path = directory / f"member-{member:03d}.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    _flush(path)
    return path.name, {"member": member, "sha256": digest(path), "numbers": numbers}


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return max(directory.glob("step-*"), default=None)


def load_checkpoint(path: Path, members: Iterable[int]) -> tuple[dict[str, Any], dict[int, MemberState]]:
    """The manifest, and the tensors and numbers of some members; each file is compared with its digest first."""
    manifest = read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise RunError(f"{path} has checkpoint format {manifest.get('format')}, this papa reads {FORMAT}")
    wanted = set(members)
    states = {}
    for name, entry in manifest["files"].items():
        if int(entry["member"]) not in wanted:
            continue
        file = path / Path(name).name
        if not file.is_file():
            raise RunError(f"{path} names the file {name}, which is not there: use an older checkpoint")
        if digest(file) != entry["sha256"]:
            raise RunError(f"{file} does not match the digest in its manifest: it was altered or damaged")
        states[int(entry["member"])] = (load_file(file), entry["numbers"])
    return manifest, states


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
