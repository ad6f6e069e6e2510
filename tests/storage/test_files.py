"""Files are written whole or not at all, and read with care."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from papa.errors import RunError
from papa.storage import json_text, read_json, write_atomically, write_json
from papa.storage.tensors import save_network


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"old": True})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_json(path, {"new": True})
    assert read_json(path) == {"old": True}
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json.loads(json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": "NaN"})) == {
        "a": None,
        "b": [None, 1.5],
        "c": "NaN",
    }


def test_networks_are_saved_with_tied_weights_under_every_name(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    save_network(tmp_path / "net.safetensors", net)
    loaded = load_file(tmp_path / "net.safetensors")
    assert loaded.keys() == net.state_dict().keys()
    assert torch.equal(loaded["1.weight"], net[0].weight)


def test_every_dtype_comes_back_from_the_files_as_other_readers_see_them(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.int64, torch.float64, torch.complex64)
            for kind in kinds:
                self.register_buffer(f"of_{str(kind)[6:]}", (torch.randn(3, 5) * 9).to(kind).t())
            self.register_buffer("scalar", torch.tensor(2.5))
            self.register_buffer("nothing", torch.empty(0, 4))

    net = Odd()
    save_network(tmp_path / "odd.safetensors", net, {"role": "odd"})
    loaded = load_file(tmp_path / "odd.safetensors")
    for name, tensor in net.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_an_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read .*gone\.json"):
        read_json(tmp_path / "gone.json")
    with pytest.raises(RunError, match="cannot write"):
        write_atomically(tmp_path / "no" / "such" / "file", "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "has a key twice"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"", "is not valid JSON"),
    ],
)
def test_invalid_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "strange.json").write_bytes(content)
    with pytest.raises(RunError, match=message):
        read_json(tmp_path / "strange.json")


def test_huge_json_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunError, match="expected at most"):
        read_json(tmp_path / "huge.json")
