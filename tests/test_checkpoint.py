import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from papa.checkpoint import (
    json_text,
    latest_checkpoint,
    load_checkpoint,
    load_member_state_,
    member_state,
    read_json,
    save_checkpoint,
    save_network,
    write_atomically,
    write_json,
)
from papa.errors import RunError
from papa.group import Local


def trained_member(optimizer_type: type[torch.optim.Optimizer], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}
    optimizer = optimizer_type(net.parameters(), lr=0.1, **options)  # type: ignore[call-arg, arg-type]
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_member_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path, optimizer_type: type) -> None:
    net, optimizer = trained_member(optimizer_type, seed=0)
    save_checkpoint(tmp_path, 3, {0: member_state(net, optimizer)}, {"note": 1}, group=Local())
    path = latest_checkpoint(tmp_path)
    assert path is not None
    manifest, members = load_checkpoint(path, [0])
    assert manifest["step"] == 3
    assert manifest["state"] == {"note": 1}
    other, other_optimizer = trained_member(optimizer_type, seed=1)
    load_member_state_(other, other_optimizer, *members[0])
    for each, its_optimizer in ((net, optimizer), (other, other_optimizer)):
        each.train()
        its_optimizer.zero_grad()
        each(torch.ones(8, 4) * torch.arange(8)[:, None]).sin().sum().backward()
        its_optimizer.step()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())


def test_only_the_newest_checkpoints_stay_and_only_asked_members_are_read(tmp_path: Path) -> None:
    state = member_state(*trained_member(torch.optim.SGD, seed=0))
    for step in (1, 2, 30, 4):
        save_checkpoint(tmp_path, step, {0: state, 1: state}, {}, group=Local(), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000030"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000030"
    (newest / "member-000.safetensors").write_bytes(b"damaged")
    assert list(load_checkpoint(newest, [1])[1]) == [1]


def test_an_altered_missing_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {0: member_state(*trained_member(torch.optim.SGD, seed=0))}, {}, group=Local())
    file, manifest = path / "member-000.safetensors", path / "manifest.json"
    content, text = file.read_bytes(), manifest.read_text()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=r"member-000\.safetensors does not match the digest"):
        load_checkpoint(path, [0])
    file.unlink()
    with pytest.raises(RunError, match=r"names the file member-000\.safetensors, which is not there"):
        load_checkpoint(path, [0])
    manifest.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(RunError, match="has checkpoint format 99"):
        load_checkpoint(path, [0])
    manifest.write_text(text[:-5])
    with pytest.raises(RunError, match="is not valid JSON"):
        load_checkpoint(path, [0])


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / ".step-00000001.partial").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"old": True})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_json(path, {"new": True})
    assert read_json(path) == {"old": True}
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_numbers_that_json_does_not_have_become_null() -> None:
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


def test_reading_what_is_not_there_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read .*gone\.json"):
        read_json(tmp_path / "gone.json")
    with pytest.raises(RunError, match="cannot write"):
        write_atomically(tmp_path / "no" / "such" / "file", "x")
