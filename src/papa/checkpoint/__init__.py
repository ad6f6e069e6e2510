"""Checkpoints of a training: tensors in safetensors, everything else in JSON, complete or not there at all."""

from papa.checkpoint.state import Expected, MemberState, load_member_state_, member_state
from papa.checkpoint.store import Checkpoint, checkpoints, discard, load_checkpoint
from papa.checkpoint.writer import CheckpointWriter, Failure

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Expected",
    "Failure",
    "MemberState",
    "checkpoints",
    "discard",
    "load_checkpoint",
    "load_member_state_",
    "member_state",
]
