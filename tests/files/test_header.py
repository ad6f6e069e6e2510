"""A header is believed only when every number in it fits the file."""

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
from papa.files.header import DTYPES, TensorInfo, header_bytes, read_header


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_says_what_the_library_says(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {f"t.{name}": torch.zeros(3, 2, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file({**tensors, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}, file, metadata={"format": "pt"})
    places = read_header(file)
    with safe_open(file, "pt") as opened:
        assert set(places) == set(opened.keys())
        for name, (info, _) in places.items():
            assert opened.get_tensor(name).dtype == info.dtype
            assert tuple(opened.get_slice(name).get_shape()) == info.shape


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    infos = {name: TensorInfo(dtype, (2, 3)) for name, dtype in DTYPES.items()}
    size = sum(info.num_bytes for info in infos.values())
    file = tmp_path / "a.safetensors"
    file.write_bytes(header_bytes(infos, {"made": 'öf "quotes"'}) + bytes(size))
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"made": 'öf "quotes"'}
        assert {name: opened.get_tensor(name).dtype for name in opened.keys()} == DTYPES  # noqa: SIM118
    assert {name: info for name, (info, _) in read_header(file).items()} == infos


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "its header cannot be read"),
        (b"[]", b"", "its header is not an object"),
        (b"{" * 5000, b"", "its header cannot be read"),
        (b"\xff\xfe", b"", "its header cannot be read"),
        (b'{"a": 1' + b"0" * 5000 + b"}", b"", "its header cannot be read"),
        (b'{"a": {}, "a": {}}', b"", "a name stands twice"),
        ({"a": 3}, b"", "is not a dtype, a shape and offsets"),
        ({"a": entry(dtype="F4")}, bytes(8), "of dtype F4, which papa does not read"),
        ({"a": entry(dtype=["F32"])}, bytes(8), "which papa does not read"),
        ({"a": entry(shape=[-2])}, bytes(8), "the shape of 'a' is"),
        ({"a": entry(shape=[True, 2])}, bytes(8), "the shape of 'a' is"),
        ({"a": entry(shape=[1] * 65 + [2])}, bytes(8), "the shape of 'a' is"),
        ({"a": entry(shape=[2**62, 2**62])}, bytes(8), "its shape and dtype need"),
        ({"a": entry(offsets=[0])}, bytes(8), "the offsets of 'a' are"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "'a' has -8 bytes"),
        ({"a": entry(offsets=[0, 7])}, bytes(8), "'a' has 7 bytes, its shape and dtype need 8"),
        ({"a": entry(offsets=[8, 16])}, bytes(16), "begins at byte 8 of the data, expected 0"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "'b' begins at byte 4 of the data, expected 8"),
        ({"a": entry()}, bytes(7), "its tensors end at byte"),
        ({"a": entry()}, bytes(9), "its tensors end at byte"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(SoupError, match=message):
        read_header(write(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 3])
def test_a_header_longer_than_its_file_takes_no_memory(tmp_path: Path, length: int) -> None:
    with pytest.raises(SoupError, match="its header"):
        read_header(write(tmp_path / "a.safetensors", {"a": entry()}, bytes(8), length=length))


def test_an_empty_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(SoupError, match="is not a whole safetensors file"):
        read_header(tmp_path / "a.safetensors")


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
        places = read_header(file)
    except PapaError:
        return
    for info, start in places.values():
        assert start + info.num_bytes <= len(content)
