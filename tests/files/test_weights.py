"""Files of every kind give the same tensors."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers import make_network
from papa.errors import SoupError
from papa.files.opening import open_weights

State = dict[str, Tensor]


def a_state() -> State:
    return {name: value.clone() for name, value in make_network("conv_batch_norm", 0).state_dict().items()}


def save_sharded(state: State, folder: Path, num_shards: int = 3) -> Path:
    """As hubs publish large models."""
    folder.mkdir()
    weight_map = {}
    for number in range(num_shards):
        part = dict(list(state.items())[number::num_shards])
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def torch_layout(wrap: Callable[[State], Any], **options: Any) -> Callable[[State, Path], Path]:
    def save(state: State, folder: Path) -> Path:
        torch.save(wrap(state), folder / "a.pt", **options)
        return folder / "a.pt"

    return save


def save_single(state: State, folder: Path) -> Path:
    save_file(state, folder / "a.safetensors")
    return folder / "a.safetensors"


def save_single_in_a_directory(state: State, folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def save_torch_shards(state: State, folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model-00001-of-00001.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}))
    return folder


def without_a_suffix(state: State, folder: Path) -> Path:
    torch.save(state, folder / "checkpoint")
    return folder / "checkpoint"


def averaged_model(state: State) -> dict[str, Any]:
    return {"model": {"n_averaged": torch.tensor(3), **{f"module.{name}": value for name, value in state.items()}}}


LAYOUTS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors": save_single,
    "a directory with one safetensors file": save_single_in_a_directory,
    "an index": lambda state, folder: save_sharded(state, folder / "sharded"),
    "the directory of an index": lambda state, folder: save_sharded(state, folder / "sharded").parent,
    "PyTorch shards": save_torch_shards,
    "a bare state dict": torch_layout(lambda state: state),
    "a file without a suffix": without_a_suffix,
    "the old format": torch_layout(lambda state: state, _use_new_zipfile_serialization=False),
    "state_dict": torch_layout(lambda state: {"epoch": 3, "state_dict": state}),
    "model": torch_layout(lambda state: {"model": state, "args": {"lr": 0.1}}),
    "model_state_dict": torch_layout(lambda state: {"model_state_dict": state, "optimizer": {"state": {}}}),
    "ema": torch_layout(lambda state: {"ema": state}),
    "module prefix": torch_layout(lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}}),
    "a compiled model": torch_layout(lambda state: {"model": {f"_orig_mod.{k}": v for k, v in state.items()}}),
    "a compiled model in parallel": torch_layout(lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()}),
    "an averaged model": torch_layout(averaged_model),
    "a training script's file": torch_layout(
        lambda state: {
            "model": state,
            "args": argparse.Namespace(lr=0.1, out=Path("runs")),
            "best": np.float64(91.5),
            "curve": np.arange(3.0),
        }
    ),
    "a compiled model in safetensors": lambda state, folder: save_single(
        {f"_orig_mod.{name}": value for name, value in state.items()}, folder
    ),
    "values that are no tensors": torch_layout(lambda state: {**state, "version": 3, "name": "net"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(layout: str, tmp_path: Path) -> None:
    state = a_state()
    weights = open_weights(LAYOUTS[layout](state, tmp_path))
    assert weights.tensors.keys() == state.keys()
    for name, expected in state.items():
        found = weights.read(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["safetensors", "an index", "a bare state dict", "the old format"])
def test_any_part_of_a_tensor_can_be_read(layout: str, tmp_path: Path) -> None:
    state = a_state()
    state["4.weight"] = state["4.weight"].t().contiguous().t() if "state" in layout else state["4.weight"]
    weights = open_weights(LAYOUTS[layout](state, tmp_path))
    for name in ("4.weight", "0.weight", "4.weight"):
        assert torch.equal(weights.part(name, 5, 12), state[name].reshape(-1)[5:12])


def test_tied_tensors_are_read_under_each_of_their_names(tmp_path: Path) -> None:
    state = make_network("tied", 0).state_dict()
    torch.save(state, tmp_path / "a.pt")
    weights = open_weights(tmp_path / "a.pt")
    assert torch.equal(weights.read("head.weight"), weights.read("embedding.weight"))


def test_of_several_state_dicts_the_key_chooses(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    one, two, three = ({"w": torch.full((2,), float(n))} for n in range(3))
    torch.save({"ema": one, "model": two, "deep": {"er": three}}, file)
    taken = open_weights(file)
    assert taken.read("w").tolist() == [1.0, 1.0]
    assert taken.notes == ("used 'model', the file also has ema: set the key to choose",)
    assert open_weights(file, key="ema").read("w").tolist() == [0.0, 0.0]
    assert open_weights(file, key="deep.er").read("w").tolist() == [2.0, 2.0]
    with pytest.raises(SoupError, match="has nothing under 'emma'; it has ema, model, deep"):
        open_weights(file, key="emma")
    with pytest.raises(SoupError, match="has no state dict under 'deep'"):
        open_weights(file, key="deep")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../a.safetensors", "expected a file in the directory of the index"),
        ("/etc/passwd", "expected a file in the directory of the index"),
        ("sub/../../a.safetensors", "expected a file in the directory of the index"),
        ("model.safetensors.index.json", "expected a file in the directory of the index"),
        ("missing.safetensors", "which does not exist: download the missing shard"),
        ("other.safetensors", "says that 'w' is in other.safetensors, but it is not"),
    ],
)
def test_an_index_names_only_shards_beside_it(tmp_path: Path, name: str, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"v": torch.zeros(2)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(SoupError, match=message):
        open_weights(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 9999])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.safetensors.index.json").write_text(text)
    with pytest.raises(SoupError, match=r"is not a valid index of shards|is not valid JSON|names no tensor"):
        open_weights(tmp_path)


def test_a_directory_with_two_indices_or_none_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(SoupError, match="holds no weights: expected an index"):
        open_weights(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(SoupError, match=r"has several indices \(a.safetensors.index.json, b"):
        open_weights(tmp_path)


class Runs:
    """What a hostile pickle would do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


@pytest.mark.parametrize(
    "value",
    [Runs(), {"state_dict": {"w": torch.zeros(2)}, "args": argparse.Namespace(lr=Runs())}, nn.Linear(2, 2)],
    ids=["code", "code in a namespace", "a module"],
)
def test_nothing_that_could_run_code_is_loaded(value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(value, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SoupError, match="holds more than tensors and plain values, such as ") as caught:
        open_weights(tmp_path / "old.pt")
    assert "trust" not in str(caught.value)
    torch.save(value, tmp_path / "new.pt")
    if isinstance(value, dict):  # its tensors are read
        weights = open_weights(tmp_path / "new.pt")
        assert torch.equal(weights.read("w"), torch.zeros(2))
        assert "were not loaded: only tensors and plain values are read" in weights.notes[0]
    else:
        with pytest.raises(SoupError, match=r"holds a \S+, expected a state dict: save its state dict alone"):
            open_weights(tmp_path / "new.pt")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, old: bool, share: float) -> None:
    file = tmp_path / "a.pt"
    torch.save(a_state(), file, _use_new_zipfile_serialization=not old)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(SoupError, match=r"is not a valid|or is damaged"):
        open_weights(file)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "a.pt", "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(SoupError, match=r"a\.pt is compressed, expected a file by torch\.save"):
        open_weights(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(2)], "holds a list, expected a state dict"),
        ({"epoch": 3}, "has no state dict: expected tensors, or one under state_dict, model_state_dict, model, ema"),
        ({"w": torch.zeros(2).to_sparse()}, "'w' as a torch._utils._rebuild_sparse_tensor, expected a dense tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_a_file_without_a_state_dict_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(SoupError, match=message):
        open_weights(tmp_path / "a.pt")


def test_a_file_that_is_not_there_and_one_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(SoupError, match="there is no file"):
        open_weights(tmp_path / "a.pt")
    save_file({}, tmp_path / "a.safetensors")
    with pytest.raises(SoupError, match="holds no tensor"):
        open_weights(tmp_path / "a.safetensors")


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = save_single(a_state(), tmp_path)
    weights = open_weights(file)
    save_file({"0.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").replace(file)
    with pytest.raises(SoupError, match="changed while it was read"):
        weights.read("0.weight")
