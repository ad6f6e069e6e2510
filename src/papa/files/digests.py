"""Which checkpoint was it: digests of whole files, or of a sample of every tensor where whole files take too long."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from papa.errors import SoupError
from papa.files.sources import Checkpoint, bytes_of

MOST_BYTES_IN_FULL = 1 << 26
"""Up to here a whole file is digested without being asked: it takes less than a tenth of a second."""
SAMPLE = 1024
"""How many numbers of a tensor's beginning, middle and end go into a sample."""


def digest_of(checkpoint: Checkpoint, *, full: bool = False) -> str:
    """A checkpoint's digest, its kind before the colon.

    `sha256:` is the SHA-256 of the file, as `sha256sum` prints it. `sha256-of-shards:` is the SHA-256 of what
    `sha256sum` prints for the shards, sorted by name. `sample:` is the SHA-256 of every tensor's name, dtype and shape
    and of a few thousand numbers of each: SHA-256 of everything would take longer than averaging it.
    """
    try:
        if not full and sum(file.stat().st_size for file in checkpoint.files) > MOST_BYTES_IN_FULL:
            return f"sample:{_sample(checkpoint)}"
        digests = {file.name: digest(file) for file in checkpoint.files}
    except OSError as error:
        raise SoupError(f"cannot read {checkpoint.path}: {error.strerror or error}") from error
    if len(digests) == 1:
        return f"sha256:{next(iter(digests.values()))}"
    listing = "".join(f"{value}  {name}\n" for name, value in sorted(digests.items()))
    return f"sha256-of-shards:{hashlib.sha256(listing.encode()).hexdigest()}"


def _sample(checkpoint: Checkpoint) -> str:
    sha = hashlib.sha256()
    for name, info in sorted(checkpoint.tensors.items()):
        sha.update(f"{name} {info}\n".encode())
        count = min(SAMPLE, info.numel)
        part = torch.empty(count, dtype=info.dtype)
        for start in sorted({0, (info.numel - count) // 2, info.numel - count}):
            checkpoint.read_into(name, start, part)
            sha.update(bytes_of(part))
    return sha.hexdigest()


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()
