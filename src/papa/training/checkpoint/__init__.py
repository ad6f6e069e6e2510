"""Checkpoints of a training: tensors in safetensors, everything else in JSON, complete or not there at all."""

from papa.training.checkpoint.state import Expected, MemberState, load_member_state_, member_state
from papa.training.checkpoint.store import Checkpoint, checkpoints, discard, load_checkpoint
from papa.training.checkpoint.writer import CheckpointWriter, Failure

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
