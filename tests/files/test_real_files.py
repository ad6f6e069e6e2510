"""Files as accelerate, Lightning, transformers and torch.distributed.checkpoint write them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import papa
from checkpoint_jobs import save_sharded, whole_state
from fork_server import context
from papa.errors import SoupError
from papa.files import diff_files, open_all, open_weights, soup_files

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which warn about their own future


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


# Several networks in one folder or file


@pytest.mark.parametrize("safe", [True, False])
def test_the_state_of_accelerate_stands_for_all_its_models(tmp_path: Path, safe: bool) -> None:
    from accelerate import Accelerator

    nets = [make_net(seed) for seed in range(3)]
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*nets)
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    accelerator.free_memory()
    soup = soup_files([tmp_path / "state"], tmp_path / "soup.safetensors")
    assert len(soup.members) == 3
    assert_equal(load_file(soup.path), mean_of([net.state_dict() for net in prepared]))
    with pytest.raises(SoupError, match=r"holds 3 networks \(.*model.*\), expected one: name the one you mean"):
        open_weights(tmp_path / "state")


class Wrapper(nn.Module):
    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(nets)


def test_a_wrapper_stands_for_its_networks(tmp_path: Path) -> None:
    nets = [make_net(seed) for seed in range(3)]
    expected = mean_of([net.state_dict() for net in nets])
    torch.save({"state_dict": Wrapper(nets).state_dict()}, tmp_path / "wrapper.pt")
    save_file(Wrapper(nets).state_dict(), tmp_path / "wrapper.safetensors")
    torch.save(papa.Population([make_net(seed) for seed in range(3)]).state_dict(), tmp_path / "population.pt")
    torch.save({"nets": [net.state_dict() for net in nets]}, tmp_path / "list.pt")
    keys = {"wrapper.pt": None, "wrapper.safetensors": None, "population.pt": "*", "list.pt": "nets.*"}
    for name, key in keys.items():
        soup = soup_files([tmp_path / name], tmp_path / f"{name}.safetensors", key=key)
        assert len(soup.members) == 3, name
        assert_equal(load_file(soup.path), expected)
        assert not any("given more than once" in note for note in soup.notes)
    found = open_all([tmp_path / "wrapper.pt"])
    assert found[0].notes == ("holds 3 networks, members.0 to members.2: each counts as a member",)
    places = {"wrapper.safetensors": "members.1", "wrapper.pt": "state_dict.members.1", "population.pt": "1"}
    for name, place in places.items():
        one = open_weights(tmp_path / name, key=place)
        assert torch.equal(one.read("2.bias"), nets[1].state_dict()["2.bias"])


def test_what_may_be_several_networks_is_not_guessed(tmp_path: Path) -> None:
    torch.save(nn.ModuleList([make_net(0), make_net(1)]).state_dict(), tmp_path / "a.pt")
    message = r"has 2 equal parts, 0 to 1, which may be networks or the layers of one: set the key to '\*' for each"
    with pytest.raises(SoupError, match=message):
        open_weights(tmp_path / "a.pt")
    assert len(open_weights(tmp_path / "a.pt", key=".").tensors) == 8
    with pytest.raises(SoupError, match=r"holds 2 networks .* expected one: set the key, such as '0'"):
        open_weights(tmp_path / "a.pt", key="*")
    with pytest.raises(SoupError, match="has nothing under '7'"):
        open_weights(tmp_path / "a.pt", key="7")
    wrapper = Wrapper([make_net(0), make_net(1)])
    torch.save({"scale": torch.ones(1), **wrapper.state_dict()}, tmp_path / "more.pt")
    with pytest.raises(SoupError, match=r"has 2 equal parts besides 1 other tensors, members\.0 to members\.1, which"):
        open_weights(tmp_path / "more.pt")
    assert len(open_all([tmp_path / "more.pt"], key="members.*")) == 2
    torch.save({"state_dict": {"scale": torch.ones(1), **wrapper.state_dict()}}, tmp_path / "nested.pt")
    with pytest.raises(SoupError, match=r"set the key to 'state_dict\.members\.\*' .* or to 'state_dict\.' for all"):
        open_weights(tmp_path / "nested.pt")
    assert len(open_all([tmp_path / "nested.pt"], key="state_dict.members.*")) == 2
    assert len(open_weights(tmp_path / "nested.pt", key="state_dict.").tensors) == 9
    torch.save({"parts": [wrapper.state_dict()], "rng": torch.get_rng_state()}, tmp_path / "own.pt")
    with pytest.raises(SoupError, match=r"has no weights in rng, expected tensors of floating-point numbers"):
        open_weights(tmp_path / "own.pt")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    torch.save(encoder.state_dict(), tmp_path / "layers.pt")
    assert len(open_weights(tmp_path / "layers.pt").tensors) == len(encoder.state_dict())


# Files that hold more than tensors


class Foreign:
    """What a script passes to its network; the class is not known where its checkpoint is read."""

    def __deepcopy__(self, _: Any) -> Foreign:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code ran",)


class ForeignDict(dict[str, Any]):
    """A mapping of another package, as configs are."""


def test_a_lightning_checkpoint_with_foreign_objects_is_read(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, options: Any, tree: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = make_net(0)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    module = Module(Foreign(), ForeignDict(depth=[1, 2]))
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [torch.randn(2, 4)[None]])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    weights = open_weights(tmp_path / "last.ckpt")
    assert_equal({name: weights.read(name) for name in weights.tensors}, dict(module.state_dict()))
    assert any("were not loaded: only tensors and plain values are read" in note for note in weights.notes)
    assert diff_files(tmp_path / "last.ckpt", tmp_path / "last.ckpt").num_equal == 4


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
    with pytest.raises(SoupError, match=r"is a GGUF file, made for llama\.cpp and mostly quantized: name the"):
        open_weights(tmp_path / "model.gguf")


# Distributed checkpoints


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    processes = [context().Process(target=save_sharded, args=(rank, str(folder))) for rank in range(2)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return folder


def test_a_distributed_checkpoint_of_two_ranks_is_read(sharded: Path, tmp_path: Path) -> None:
    weights = open_weights(sharded / "sharded-0")
    expected = whole_state(0)
    assert_equal({name: weights.read(name) for name in weights.tensors}, expected)
    for name in ("rows", "columns"):
        assert torch.equal(weights.part(name, 3, 23), expected[name].reshape(-1)[3:23])
    soup = soup_files([sharded / "sharded-0", sharded / "sharded-1"], tmp_path / "soup.safetensors")
    mean = mean_of([{name: value.float() for name, value in whole_state(seed).items()} for seed in range(2)])
    assert_equal(load_file(soup.path), {**mean, "count": torch.tensor(0)})


def test_of_a_distributed_checkpoint_the_model_is_taken(tmp_path: Path) -> None:
    net = make_net(0)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    weights = open_weights(tmp_path / "checkpoint")
    assert_equal({name: weights.read(name) for name in weights.tensors}, net.state_dict())
    assert open_weights(tmp_path / "checkpoint" / ".metadata", key="model").tensors == weights.tensors


def alter_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return alter


def rename_outside(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def lengthen(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.length += 10**12


def enlarge(metadata: Any) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([10**12])


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Foreign())), "no metadata.Metadata where one"),
        (
            lambda folder: (folder / ".metadata").write_bytes(b"\x80\x05\x96" + b"\xff" * 7 + b"\0"),
            "pickle cannot be",
        ),
        (lambda folder: (folder / ".metadata").write_bytes(b""), "pickle cannot be read"),
        (alter_metadata(rename_outside), "it names a file outside of its directory"),
        (alter_metadata(lengthen), "bytes from .* on are needed, it has"),
        (alter_metadata(enlarge), r"a part of 'w' is outside of the tensor|are not the whole tensor"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "which does not exist: copy the whole directory"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK" * 2000), "is not a valid PyTorch file"),
    ],
)
def test_an_altered_distributed_checkpoint_is_refused(tmp_path: Path, alter: Any, message: str) -> None:
    folder = tmp_path / "checkpoint"
    dcp.save({"w": torch.randn(6)}, checkpoint_id=folder, no_dist=True)
    alter(folder)
    with pytest.raises(SoupError, match=message):
        open_weights(folder).read("w")


# Folders of model hubs


def tiny_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "soup", "of", "models"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)


def test_a_soup_of_model_folders_can_be_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [tiny_llama(seed) for seed in range(2)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / f"model-{number}", max_shard_size="8KB")
        save_tokenizer(tmp_path / f"model-{number}")
    (tmp_path / "model-0" / "modeling_own.py").write_text("raise SystemExit")
    tokens = tmp_path / "model-1" / "tokenizer_config.json"
    tokens.write_text(json.dumps({**json.loads(tokens.read_text()), "model_max_length": 7}))
    paths = [tmp_path / f"model-{number}" for number in range(2)]
    soup = soup_files(paths, tmp_path / "soup", [0.25, 0.75], dtype="bfloat16", max_shard_size="8KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "soup")
    assert loaded.dtype == torch.bfloat16
    for name, found in loaded.state_dict().items():
        expected = 0.25 * models[0].state_dict()[name] + 0.75 * models[1].state_dict()[name]
        assert torch.equal(found, expected.to(torch.bfloat16))
    assert AutoTokenizer.from_pretrained(tmp_path / "soup")("a soup of models")["input_ids"] == [3, 4, 5, 6]
    assert (tmp_path / "soup" / "generation_config.json").is_file()
    assert not (tmp_path / "soup" / "modeling_own.py").exists()
    assert "tokenizer_config.json differ between the folders: those of the first were copied" in soup.notes
    assert "code is not copied, such as modeling_own.py: copy it yourself if the model needs it" in soup.notes
    text = (tmp_path / "soup" / "README.md").read_text()
    for member in soup.members:
        assert f"| {member.weight:.6g} | {member.path.parent.name}/" in text
        assert member.digest in text
    assert str(tmp_path) not in text
    with pytest.raises(SoupError, match="exists: choose another output"):
        soup_files(paths, tmp_path / "soup")


def test_files_beside_a_soup_are_not_overwritten_nor_left_behind(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        save_file({"w": torch.full((2,), [1.0, torch.nan][number])}, tmp_path / f"{number}" / "model.safetensors")
        (tmp_path / f"{number}" / "config.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own")
    with pytest.raises(SoupError, match=r"README\.md exists: choose another output"):
        soup_files([tmp_path / "0"], tmp_path / "mine")
    with pytest.raises(SoupError, match="has NaN"):
        soup_files([tmp_path / "0", tmp_path / "1"], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "0" / "config.json").write_text("{")
    with pytest.raises(SoupError, match=r"config\.json is not valid JSON"):
        soup_files([tmp_path / "0"], tmp_path / "new")
    assert (tmp_path / "mine" / "README.md").read_text() == "my own"


def test_the_mean_of_lora_factors_is_noted(tmp_path: Path) -> None:
    save_file({f"layer.lora_{name}.weight": torch.ones(2, 2) for name in "AB"}, tmp_path / "a.safetensors")
    soup = soup_files([tmp_path / "a.safetensors"] * 2, tmp_path / "soup.safetensors")
    assert any("average them with peft's add_weighted_adapter" in note for note in soup.notes)
