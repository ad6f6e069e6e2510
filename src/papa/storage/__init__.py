"""Files on disk: whole writes, JSON checked against type hints, and one translation of errors.

Tensors in safetensors files are in `papa.storage.tensors`, which imports torch; listings do without.
"""

from papa.storage.schema import matches, validated
from papa.storage.whole_files import (
    DamagedError,
    file_errors,
    flush_directory,
    json_text,
    parse_json,
    partial_path,
    read_file,
    read_json,
    read_object,
    sha256_of,
    write_atomically,
    write_file,
    write_json,
)

__all__ = [
    "DamagedError",
    "file_errors",
    "flush_directory",
    "json_text",
    "matches",
    "parse_json",
    "partial_path",
    "read_file",
    "read_json",
    "read_object",
    "sha256_of",
    "validated",
    "write_atomically",
    "write_file",
    "write_json",
]
