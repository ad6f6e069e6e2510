"""Checkpoints of a training: tensors in safetensors, everything else in JSON, complete or not there at all."""

from papa.checkpoint.state import Expected, MemberState, load_member_state_, member_state
from papa.checkpoint.store import Checkpoint, checkpoints, discard, load_checkpoint
from papa.checkpoint.writer import CheckpointWriter, Failure
from papa.storage import (
    DamagedError,
    json_text,
    parse_json,
    read_file,
    read_json,
    read_object,
    replace_file,
    save_network,
    write_atomically,
    write_json,
)

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "DamagedError",
    "Expected",
    "Failure",
    "MemberState",
    "checkpoints",
    "discard",
    "json_text",
    "load_checkpoint",
    "load_member_state_",
    "member_state",
    "parse_json",
    "read_file",
    "read_json",
    "read_object",
    "replace_file",
    "save_network",
    "write_atomically",
    "write_json",
]
