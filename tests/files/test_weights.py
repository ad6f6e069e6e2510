"""Files of every kind give the same tensors, and nothing in them runs code."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import papa
from checkpoint_jobs import save_sharded as save_distributed
from checkpoint_jobs import whole_state
from fork_server import context
from helpers import make_network
from papa.errors import SoupError
from papa.files import diff_files, open_all, open_weights, soup_files

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which warn about their own future
State = dict[str, Tensor]


def a_state() -> State:
    return {name: value.clone() for name, value in make_network("conv_batch_norm", 0).state_dict().items()}


def assert_holds(path: Path, expected: State, key: str | None = None) -> None:
    weights = open_weights(path, key=key)
    assert weights.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights.read(name).dtype == tensor.dtype
        assert torch.equal(weights.read(name), tensor)


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


def by_torch(wrap: Callable[[State], Any], name: str = "a.pt", **options: Any) -> Callable[[State, Path], Path]:
    def save(state: State, folder: Path) -> Path:
        torch.save(wrap(state), folder / name, **options)
        return folder / name

    return save


def save_single(state: State, folder: Path, name: str = "a.safetensors") -> Path:
    save_file(state, folder / name)
    return folder / name


def save_torch_shards(state: State, folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model-00001-of-00001.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}))
    return folder


def averaged_model(state: State) -> dict[str, Any]:
    return {"model": {"n_averaged": torch.tensor(3), **{f"module.{name}": value for name, value in state.items()}}}


def script(state: State) -> dict[str, Any]:
    options = argparse.Namespace(lr=0.1, out=Path("runs"))
    return {"model": state, "args": options, "best": np.float64(91.5), "curve": np.arange(3.0)}


LAYOUTS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors": save_single,
    "a directory with one safetensors file": lambda state, folder: (
        save_single(state, folder, "model.safetensors").parent
    ),
    "an index": lambda state, folder: save_sharded(state, folder / "sharded"),
    "the directory of an index": lambda state, folder: save_sharded(state, folder / "sharded").parent,
    "PyTorch shards": save_torch_shards,
    "a bare state dict": by_torch(lambda state: state),
    "a file without a suffix": by_torch(lambda state: state, "checkpoint"),
    "the old format": by_torch(lambda state: state, _use_new_zipfile_serialization=False),
    "state_dict": by_torch(lambda state: {"epoch": 3, "state_dict": state}),
    "model": by_torch(lambda state: {"model": state, "args": {"lr": 0.1}}),
    "model_state_dict": by_torch(lambda state: {"model_state_dict": state, "optimizer": {"state": {}}}),
    "ema": by_torch(lambda state: {"ema": state}),
    "module prefix": by_torch(lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}}),
    "a compiled model in parallel": by_torch(lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()}),
    "an averaged model": by_torch(averaged_model),
    "a training script's file": by_torch(script),
    "a compiled model in safetensors": lambda state, folder: save_single(
        {f"_orig_mod.{name}": value for name, value in state.items()}, folder
    ),
    "values that are no tensors": by_torch(lambda state: {**state, "version": 3, "name": "net"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(layout: str, tmp_path: Path) -> None:
    state = a_state()
    assert_holds(LAYOUTS[layout](state, tmp_path), state)


@pytest.mark.parametrize("layout", ["safetensors", "an index", "a bare state dict", "the old format"])
def test_any_part_of_a_tensor_can_be_read(layout: str, tmp_path: Path) -> None:
    state = a_state()
    state["4.weight"] = state["4.weight"].t().contiguous().t() if "state" in layout else state["4.weight"]
    weights = open_weights(LAYOUTS[layout](state, tmp_path))
    for name in ("4.weight", "0.weight", "4.weight"):
        assert torch.equal(weights.part(name, 5, 12), state[name].reshape(-1)[5:12])


def test_tied_tensors_are_read_under_each_of_their_names(tmp_path: Path) -> None:
    torch.save(make_network("tied", 0).state_dict(), tmp_path / "a.pt")
    weights = open_weights(tmp_path / "a.pt")
    assert torch.equal(weights.read("head.weight"), weights.read("embedding.weight"))


def test_of_several_state_dicts_the_key_chooses(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    one, two, three = ({"w": torch.full((2,), float(n))} for n in range(3))
    torch.save({"ema": one, "model": two, "deep": {"er": three}}, file)
    assert_holds(file, two)
    assert open_weights(file).notes == ("used 'model', the file also has ema: set the key to choose",)
    assert_holds(file, one, key="ema")
    assert_holds(file, three, key="deep.er")
    with pytest.raises(SoupError, match="has no tensors under 'emma'; there is ema, model, deep"):
        open_weights(file, key="emma")
    with pytest.raises(SoupError, match="has no tensors under 'deep'; there is er"):
        open_weights(file, key="deep")


# Several networks in one folder or file


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class Wrapper(nn.Module):
    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(nets)


@pytest.mark.parametrize("safe", [True, False])
def test_the_state_of_accelerate_stands_for_all_its_models(tmp_path: Path, safe: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    nets = accelerator.prepare(*(make_net(seed) for seed in range(12)))
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    accelerator.free_memory()
    found = open_all([tmp_path / "state"])
    assert len(found) == 12
    for weights, net in zip(found, nets, strict=True):
        assert all(torch.equal(weights.read(name), value) for name, value in net.state_dict().items())
    with pytest.raises(SoupError, match=r"holds 12 networks \(.*model.*\), expected one: name the one you mean"):
        open_weights(tmp_path / "state")


def test_a_wrapper_stands_for_its_networks(tmp_path: Path) -> None:
    nets = [make_net(seed) for seed in range(3)]
    states = [net.state_dict() for net in nets]
    torch.save({"state_dict": Wrapper(nets).state_dict()}, tmp_path / "wrapper.pt")
    save_file(Wrapper(nets).state_dict(), tmp_path / "wrapper.safetensors")
    torch.save(papa.Population([make_net(seed) for seed in range(3)]).state_dict(), tmp_path / "population.pt")
    torch.save({"nets": states}, tmp_path / "list.pt")
    torch.save({"scale": torch.ones(1), **Wrapper(nets).state_dict()}, tmp_path / "more.pt")
    keys = {"wrapper.pt": None, "wrapper.safetensors": None, "population.pt": "*", "list.pt": "nets.*"}
    for name, key in {**keys, "more.pt": "members.*"}.items():
        soup = soup_files([tmp_path / name], tmp_path / f"{name}.safetensors", key=key)
        assert len(soup.members) == 3, name
        for part, tensor in papa.average_soup(states).items():
            torch.testing.assert_close(load_file(soup.path)[part], tensor)
        assert not any("given more than once" in note for note in soup.notes)
    note = "holds 3 networks, members.0 to members.2: each counts as a member"
    assert open_all([tmp_path / "wrapper.pt"])[0].notes == (note,)
    places = {"wrapper.safetensors": "members.1", "wrapper.pt": "state_dict.members.1", "population.pt": "1"}
    for name, place in {**places, "list.pt": "nets.1"}.items():
        assert_holds(tmp_path / name, states[1], key=place)
    assert len(open_weights(tmp_path / "wrapper.safetensors", key=".").tensors) == 12
    assert len(open_weights(tmp_path / "more.pt").tensors) == 13
    with pytest.raises(SoupError, match=r"holds 3 networks .* expected one: set the key, such as 'members.0'"):
        open_weights(tmp_path / "wrapper.pt")
    with pytest.raises(SoupError, match=r"has no networks of one architecture under '0', '1' and so on"):
        open_all([tmp_path / "more.pt"], key="*")


def test_what_may_be_several_networks_is_one_unless_the_key_says_so(tmp_path: Path) -> None:
    torch.save({"model": nn.ModuleList([make_net(0), make_net(1)]).state_dict()}, tmp_path / "a.pt")
    assert len(open_all([tmp_path / "a.pt"])) == 1
    assert len(open_all([tmp_path / "a.pt"], key="model.*")) == 2


# Distributed checkpoints


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    processes = [context().Process(target=save_distributed, args=(rank, str(folder))) for rank in range(2)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return folder


def test_a_distributed_checkpoint_of_two_ranks_is_read(of_two_ranks: Path, tmp_path: Path) -> None:
    assert_holds(of_two_ranks / "sharded-0", whole_state(0))
    soup = soup_files([of_two_ranks / "sharded-0", of_two_ranks / "sharded-1"], tmp_path / "soup.safetensors")
    for name, tensor in papa.average_soup([whole_state(0), whole_state(1)]).items():
        torch.testing.assert_close(load_file(soup.path)[name], tensor)


def test_of_a_distributed_checkpoint_the_model_is_taken(tmp_path: Path) -> None:
    net = make_net(0)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert_holds(tmp_path / "checkpoint", net.state_dict())
    assert_holds(tmp_path / "checkpoint" / ".metadata", net.state_dict(), key="model")


class Runs:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, *args: Any) -> None:
        self.call = (os.mkdir, args)

    def __reduce__(self) -> Any:
        return self.call


def alter_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return alter


def write_metadata(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / ".metadata").write_bytes(content) and None


def rename_outside(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def displace(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.offset += 10**12


def enlarge(metadata: Any) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.size = entry.chunks[0].sizes = torch.Size([10**12])


def lengthen(metadata: Any) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([7])


CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dX\x01\x00\x00\x00aK\x01stb."


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (write_metadata(pickle.dumps(Runs("ran"))), "not valid metadata of a distributed checkpoint"),
        (write_metadata(b"\x80\x05\x96" + b"\xff" * 7 + b"\0"), "not valid metadata of a distributed checkpoint"),
        (write_metadata(b""), "not valid metadata of a distributed checkpoint"),
        (write_metadata(CHANGES_A_CLASS), "it changes a class"),
        (alter_metadata(rename_outside), "it names a file outside of its directory"),
        (alter_metadata(displace), "'w' in .* cannot be read: .*; it may be truncated or altered"),
        (alter_metadata(enlarge), "'w', which is larger than the files"),
        (alter_metadata(lengthen), "the parts of 'w' are not the whole tensor"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "which does not exist: copy the whole directory"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK" * 2000), "'w' in .* cannot be read"),
    ],
)
def test_an_altered_distributed_checkpoint_is_refused(
    tmp_path: Path, alter: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    dcp.save({"w": torch.randn(6)}, checkpoint_id=folder, no_dist=True)
    alter(folder)
    with pytest.raises(SoupError, match=message):
        open_weights(folder).read("w")
    assert not (tmp_path / "ran").exists()


# What is refused


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Runs("ran"), "mkdir"),
        ({"state_dict": {"w": torch.zeros(2)}, "args": argparse.Namespace(lr=Runs("ran"))}, "mkdir"),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
    ],
    ids=["code", "code in a namespace", "a module"],
)
def test_nothing_that_could_run_code_is_loaded(
    value: Any, named: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(SoupError, match=f"holds an object of .*{named}, and nothing that could run code") as caught:
        open_weights(tmp_path / "a.pt")
    assert "save the state dict alone" in str(caught.value)
    assert "trust" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_lightning_checkpoint_is_read(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = make_net(0)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    module = Module(3)
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [torch.randn(2, 4)[None]])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert_holds(tmp_path / "last.ckpt", module.state_dict())
    assert diff_files(tmp_path / "last.ckpt", tmp_path / "last.ckpt").num_equal == 4


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


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, old: bool, share: float) -> None:
    file = tmp_path / "a.pt"
    torch.save(a_state(), file, _use_new_zipfile_serialization=not old)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(SoupError, match=r"is not a valid|holds an object of"):
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
        ({"w": torch.zeros(2).to_sparse()}, "'w' as a sparse_coo tensor, expected a dense tensor"),
        ({"w": torch.zeros(2, device="meta")}, "'w' as a meta tensor, expected a dense tensor"),
        ({"w": torch.zeros(1).expand(10**9)}, "'w', which repeats its numbers and is larger than the file"),
        ({"rng": torch.get_rng_state()}, "has no weights in rng, expected tensors of floating-point numbers"),
    ],
)
def test_a_file_without_weights_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(SoupError, match=message):
        open_weights(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pt", None, "there is no file"),
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0{}", "holds no tensor"),
        ("model.gguf", b"GGUF\x03\x00\x00\x00", r"is a GGUF file, made for llama\.cpp and mostly quantized: name the"),
        ("a.ckpt", b"nothing", "is not a valid PyTorch file: it does not begin as torch.save begins one"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SoupError, match=message):
        open_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, name: str) -> None:
    for number in range(2):
        state = {"w": torch.full((3,), float(number))}
        save_file(state, tmp_path / str(number)) if name == "a.safetensors" else torch.save(
            state, tmp_path / str(number)
        )
    (tmp_path / "0").replace(tmp_path / name)
    weights = open_weights(tmp_path / name)
    (tmp_path / "1").replace(tmp_path / name)
    with pytest.raises(SoupError, match="changed while it was read"):
        weights.read("w")
