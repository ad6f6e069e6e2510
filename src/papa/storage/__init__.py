"""Files on disk: atomic writes, JSON, tensors in safetensors, and one translation of their errors."""

from papa.storage.atomic import flush_directory, read_file, replace_file, sha256_of, write_atomically, write_file
from papa.storage.errors import DamagedError, file_errors
from papa.storage.json_files import json_text, parse_json, read_json, read_object, write_json
from papa.storage.run_files import is_run
from papa.storage.schema import matches, validated
from papa.storage.tensors import (
    DTYPE_NAMES,
    TensorFile,
    TensorInfo,
    bytes_of,
    save_network,
    save_tensors,
    write_tensors,
)

__all__ = [
    "DTYPE_NAMES",
    "DamagedError",
    "TensorFile",
    "TensorInfo",
    "bytes_of",
    "file_errors",
    "flush_directory",
    "is_run",
    "json_text",
    "matches",
    "parse_json",
    "read_file",
    "read_json",
    "read_object",
    "replace_file",
    "save_network",
    "save_tensors",
    "sha256_of",
    "validated",
    "write_atomically",
    "write_file",
    "write_json",
    "write_tensors",
]
