"""Safetensors files: read through the library in parts, written block by block, and every damage is a PapaError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from papa.errors import PapaError, SoupError
from papa.storage.tensors import DTYPES, TensorFile, TensorInfo, write_tensors


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_all(path: Path) -> dict[str, torch.Tensor]:
    file = TensorFile(path, error=SoupError)
    return {name: file.read(name) for name in file.tensors}


def test_tensors_are_what_the_library_reads(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    state = {f"t.{name}": torch.arange(6).reshape(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    save_file({**state, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}, file, metadata={"format": "pt"})
    found = read_all(file)
    with safe_open(file, "pt") as opened:
        assert found.keys() == set(opened.keys())
        for name, tensor in found.items():
            expected = opened.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)) if tensor.ndim else True


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    infos = {name: TensorInfo(dtype, (2, 3)) for name, dtype in DTYPES.items()}
    file = tmp_path / "a.safetensors"
    write_tensors(
        file,
        infos,
        lambda name: [torch.ones(4).to(DTYPES[name]), torch.zeros(2).to(DTYPES[name])],
        metadata={"made": 'öf "quotes"'},
    )
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"made": 'öf "quotes"'}
        assert {name: opened.get_tensor(name).dtype for name in opened.keys()} == DTYPES  # noqa: SIM118
        assert opened.get_tensor("BF16").flatten().tolist() == [1.0] * 4 + [0.0] * 2
    assert TensorFile(file).tensors == infos


def test_a_file_that_changes_while_it_is_read_is_an_error_and_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    state = {"a": torch.randn(500, 500), "b": torch.randn(3)}
    save_file(state, path)
    file, content = TensorFile(path, error=SoupError), path.read_bytes()
    assert torch.equal(file.part("a", 7, 11), state["a"].reshape(-1)[7:11])
    path.write_bytes(content[:5000])
    with pytest.raises(SoupError, match="changed while it was read: start again when nothing writes to it"):
        file.read("a")
    path.unlink()
    with pytest.raises(SoupError, match=r"cannot read .*: No such file or directory"):
        file.read("a")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "is not a valid safetensors file"),
        (b"[]", b"", "is not a valid safetensors file"),
        (b"{" * 5000, b"", "is not a valid safetensors file"),
        (b"\xff\xfe", b"", "UTF-8"),
        (b'{"a": 1' + b"0" * 5000 + b"}", b"", "is not a valid safetensors file"),
        (b'{"a": {}, "a": {}}', b"", "missing field"),
        ({"a": 3}, b"", "is not a valid safetensors file"),
        ({"a": entry(dtype="F4", shape=[16])}, bytes(8), "of dtype F4, which papa does not read"),
        ({"a": entry(dtype="F3")}, bytes(8), "F3"),
        ({"a": entry(dtype=["F32"])}, bytes(8), "is not a valid safetensors file"),
        ({"a": entry(shape=[-2])}, bytes(8), "is not a valid safetensors file"),
        ({"a": entry(shape=[True, 2])}, bytes(8), "is not a valid safetensors file"),
        ({"a": entry(shape=[2**62, 2**62])}, bytes(8), "overflow"),
        ({"a": entry(shape=[2**64 - 1, 0], offsets=[0, 0])}, b"", "has the shape"),
        ({"a": entry(offsets=[0])}, bytes(8), "is not a valid safetensors file"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "offset"),
        ({"a": entry(offsets=[0, 7])}, bytes(8), "invalid shape, data type, or offset"),
        ({"a": entry(offsets=[8, 16])}, bytes(16), "invalid offset for tensor `a`"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": entry()}, bytes(7), "not fully covered"),
        ({"a": entry()}, bytes(9), "not fully covered"),
    ],
)
def test_an_invalid_header_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(SoupError, match=message):
        read_all(write(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 3])
def test_a_header_longer_than_its_file_takes_no_memory(tmp_path: Path, length: int) -> None:
    with pytest.raises(SoupError, match="is not a valid safetensors file"):
        read_all(write(tmp_path / "a.safetensors", {"a": entry()}, bytes(8), length=length))


def test_an_empty_file_a_directory_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(SoupError, match="is not a valid safetensors file"):
        read_all(tmp_path / "a.safetensors")
    for path in (tmp_path, tmp_path / "missing.safetensors"):
        with pytest.raises(SoupError, match="cannot read"):
            read_all(path)


@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_a_damaged_byte_is_either_harmless_or_a_papa_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    file = tmp_path_factory.mktemp("damage") / "a.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.int64)}, file)
    content = bytearray(file.read_bytes())
    content[position % len(content)] = value
    file.write_bytes(content)
    try:
        found = read_all(file)
    except PapaError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(content)
