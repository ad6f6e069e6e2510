"""Digests that identify weights: of whole files, or of a sample of every tensor where whole files take too long."""

from __future__ import annotations

import hashlib

from papa.errors import SoupError
from papa.files.weights import WeightsFile
from papa.storage import bytes_of, file_errors, sha256_of

MAX_FULL_BYTES = 1 << 26
"""Files up to this size are always hashed in full: it takes less than a tenth of a second."""
SAMPLE = 1024
"""The number of elements at the beginning, middle and end of a tensor that go into a sample."""


def digest_of(weights: WeightsFile, *, full: bool = False) -> str:
    """A digest, its kind before the colon.

    `sha256:` is the SHA-256 of the file, as `sha256sum` prints it. `sha256-of-shards:` is the SHA-256 of what
    `sha256sum` prints for the shards, sorted by name. `sample:` is the SHA-256 of every tensor's name, dtype and shape
    and of a few thousand elements of each: SHA-256 of everything would take longer than averaging it.
    """
    with file_errors(weights.path, error=SoupError):
        if not full and sum(file.stat().st_size for file in weights.files) > MAX_FULL_BYTES:
            return f"sample:{_sample(weights)}"
        digests = {file.name: sha256_of(file) for file in weights.files}
    if len(digests) == 1:
        return f"sha256:{next(iter(digests.values()))}"
    listing = "".join(f"{value}  {name}\n" for name, value in sorted(digests.items()))
    return f"sha256-of-shards:{hashlib.sha256(listing.encode()).hexdigest()}"


def _sample(weights: WeightsFile) -> str:
    digest = hashlib.sha256()
    for name, info in sorted(weights.tensors.items()):
        digest.update(f"{name} {info}\n".encode())
        count = min(SAMPLE, info.numel)
        for start in sorted({0, (info.numel - count) // 2, info.numel - count}):
            digest.update(bytes_of(weights.part(name, start, start + count)))
    return digest.hexdigest()
