"""What is known about a soup: its members with their digests, its scores, and notes for the user."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from papa.core.soups import Trial
from papa.errors import SoupError
from papa.files.average import is_averaged
from papa.files.weights import WeightsFile
from papa.storage import file_errors, sha256_of
from papa.storage.tensors import bytes_of

MAX_FULL_BYTES = 1 << 26
"""Files up to this size are always hashed in full: it takes less than a tenth of a second."""
SAMPLE = 1024
"""The number of elements at the beginning, middle and end of a tensor that go into a sample."""


@dataclass(frozen=True)
class SoupMember:
    """One file of a soup."""

    path: Path
    digest: str
    """Identifies the file; see `papa.files.digest_of`."""
    weight: float
    """Its share of the soup; 0 if a greedy soup left it out."""
    score: float | None = None
    """Its own score, for a greedy soup."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        entry: dict[str, Any] = {"path": str(self.path), "digest": self.digest, "weight": self.weight}
        if self.score is not None:
            entry["score"] = self.score
        return entry


@dataclass(frozen=True)
class FileSoup:
    """A soup that was written, and how it was made."""

    path: Path
    """What to load: the file, or the index if there are several."""
    files: tuple[Path, ...]
    """All files of the soup."""
    members: tuple[SoupMember, ...]
    """The files it was made of, in the order given."""
    score: float | None
    """A greedy soup's score."""
    trials: tuple[Trial, ...]
    """Every candidate of a greedy soup, in the order tried."""
    notes: tuple[str, ...]
    """What a user should know: what was not averaged, which dtype was chosen."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each file."""
        return tuple(member.weight for member in self.members)


def soup_notes(files: Sequence[WeightsFile], dtype: torch.dtype | None) -> list[str]:
    """What a user should know: how files were read, what was not averaged, which dtype was chosen."""
    paths_of: dict[str, list[Path]] = {}
    for file in files:
        for note in file.notes:
            paths_of.setdefault(note, []).append(file.path)
    notes = [
        f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {note}" for note, paths in paths_of.items()
    ]
    integers = [name for name, info in files[0].tensors.items() if not is_averaged(info.dtype)]
    if integers:
        count = "1 integer tensor" if len(integers) == 1 else f"{len(integers)} integer tensors"
        notes.append(f"not averaged but copied from the first file with a weight: {count}, such as '{integers[0]}'")
    kinds = [{dtype_name(info.dtype) for info in file.tensors.values() if is_averaged(info.dtype)} for file in files]
    if dtype is None and any(kind != kinds[0] for kind in kinds):
        notes.append(f"the files differ in dtype: written in that of the first, {', '.join(sorted(kinds[0]))}")
    if any(".lora_" in name for name in files[0].tensors):
        notes.append(
            "the mean of LoRA's factors is not the mean of their products: unless the adapters were trained together, "
            "average them with peft's add_weighted_adapter"
        )
    seen: set[tuple[Path, ...]] = set()
    for file in files:
        real = (*(part.resolve() for part in file.files), Path(file.label))
        if real in seen:
            notes.append(f"{file.path} was given more than once, and counts each time")
        seen.add(real)
    return notes


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def digest_of(weights: WeightsFile) -> str:
    """A digest, its kind before the colon.

    `sha256:` is the SHA-256 of the file, as `sha256sum` prints it. `sha256-of-shards:` is the SHA-256 of what
    `sha256sum` prints for the shards, sorted by name. `sample:` is the SHA-256 of every tensor's name, dtype and shape
    and of a few thousand elements of each: SHA-256 of everything would take longer than averaging it.
    """
    with file_errors(weights.path, error=SoupError):
        if sum(file.stat().st_size for file in weights.files) <= MAX_FULL_BYTES:
            digests = {file.name: sha256_of(file) for file in weights.files}
            if len(digests) == 1:
                return f"sha256:{next(iter(digests.values()))}"
            listing = "".join(f"{value}  {name}\n" for name, value in sorted(digests.items()))
            return f"sha256-of-shards:{hashlib.sha256(listing.encode()).hexdigest()}"
    digest = hashlib.sha256()
    for name, info in sorted(weights.tensors.items()):
        digest.update(f"{name} {info}\n".encode())
        count = min(SAMPLE, info.numel)
        for start in sorted({0, (info.numel - count) // 2, info.numel - count}):
            digest.update(bytes_of(weights.part(name, start, start + count)))
    return f"sample:{digest.hexdigest()}"
