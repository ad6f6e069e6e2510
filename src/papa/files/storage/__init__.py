"""Files on disk: atomic writes, JSON, tensors in safetensors, and one translation of their errors."""

from typing import TYPE_CHECKING

import lazy_loader

from papa.files.storage.inert_pickle import Stub, load_inert
from papa.files.storage.schema import matches, validated
from papa.files.storage.whole_files import (
    DamagedError,
    file_errors,
    flush_directory,
    is_run,
    json_text,
    parse_json,
    read_file,
    read_json,
    read_object,
    replace_file,
    sha256_of,
    write_atomically,
    write_file,
    write_json,
)

if TYPE_CHECKING:
    from papa.files.storage.tensors import (
        DTYPE_NAMES,
        TensorFile,
        TensorInfo,
        bytes_of,
        network_parts,
        parse_tensors,
        save_network,
        save_tensors,
        write_tensors,
    )
    from papa.files.storage.torch_archive import StoredTensor, TorchArchive

TENSORS = (
    *("DTYPE_NAMES", "TensorFile", "TensorInfo", "bytes_of", "network_parts", "parse_tensors"),
    *("save_network", "save_tensors", "write_tensors"),
)
ARCHIVES = ("StoredTensor", "TorchArchive")
# They import torch, which listings do without.
__getattr__, __dir__, _ = lazy_loader.attach(__name__, submod_attrs={"tensors": TENSORS, "torch_archive": ARCHIVES})

__all__ = [
    "DTYPE_NAMES",
    "DamagedError",
    "StoredTensor",
    "Stub",
    "TensorFile",
    "TensorInfo",
    "TorchArchive",
    "bytes_of",
    "file_errors",
    "flush_directory",
    "is_run",
    "json_text",
    "load_inert",
    "matches",
    "network_parts",
    "parse_json",
    "parse_tensors",
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
