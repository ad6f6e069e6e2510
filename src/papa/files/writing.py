"""Writing a soup with its record, and what is known about it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from papa._version import __version__
from papa.core.soups import Trial
from papa.files.hub import CARD, card
from papa.files.output import Output, write_output
from papa.files.record import SoupMember
from papa.storage import json_text
from papa.storage.tensors import Blocks, TensorInfo

OnProgress = Callable[[int, int], object]
"""Called with the number of bytes written and the total."""


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


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How a soup is written."""

    max_bytes: int
    overwrite: bool
    full_digests: bool
    on_progress: OnProgress | None

    def __call__(
        self,
        output: Output,
        tensors: Mapping[str, TensorInfo],
        blocks: Blocks,
        members: Sequence[SoupMember],
        record: dict[str, Any],
        notes: Sequence[str],
        *,
        library: str,
    ) -> list[Path]:
        """Write a soup with its record, and its card if there are files beside it."""
        if output.extras:
            output.add({CARD: card(members, record, library).encode()})
        return write_output(
            output,
            tensors,
            _with_progress(blocks, tensors, self.on_progress),
            metadata={"format": "pt", "papa": __version__, "soup": json_text(record)},
            sidecar=json_text({**record, "notes": notes}, indent=2) + "\n",
            max_bytes=self.max_bytes,
        )


def _with_progress(blocks: Blocks, tensors: Mapping[str, TensorInfo], on_progress: OnProgress | None) -> Blocks:
    if on_progress is None:
        return blocks
    total, done = sum(info.num_bytes for info in tensors.values()), 0

    def counted(name: str) -> Iterator[Tensor]:
        nonlocal done
        for block in blocks(name):
            yield block
            done += block.numel() * block.dtype.itemsize
            on_progress(done, total)

    return counted
