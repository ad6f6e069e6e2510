"""What processes tell each other: any values, and tensors among them, which arrive where the receiver computes."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def notes_of_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every process of a group has to tell, in the order of ranks.

    A tensor on an accelerator would arrive on the sender's one: it travels through the CPU to the receiver's own.

    Args:
        value: what this process tells.
        group: the processes; None for all.
    """
    everyone = [b""] * dist.get_world_size(group)
    dist.all_gather_object(everyone, packed(value), group=group)
    return [pickle.loads(note) for note in everyone]


def packed(value: Any) -> bytes:
    """A value as bytes; tensors on accelerators go to the reader's current one of that kind."""
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return arrived, (value.detach().cpu(), value.device.type)
        return NotImplemented


def arrived(tensor: Tensor, kind: str) -> Tensor:
    """A tensor that was sent from an accelerator, on the current one of that kind here."""
    return tensor.to(torch.device(kind))
