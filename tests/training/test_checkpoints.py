import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint_cases import expected_of, load_whole, save, trained_member
from papa import __version__
from papa.core.group import LocalGroup
from papa.errors import RunError
from papa.storage import DamagedError
from papa.storage.tensors import TensorInfo
from papa.training.checkpoints import (
    CheckpointWriter,
    Expected,
    Failure,
    checkpoints,
    load_checkpoint,
    load_member_state_,
    member_state,
    with_digest,
)


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_member_resumes_from_a_checkpoint_as_if_never_stopped(tmp_path: Path, optimizer_type: type) -> None:
    net, optimizer = trained_member(optimizer_type, seed=0)
    path = save(tmp_path, 3, [(net, optimizer)], state={"note": 1})
    other, other_optimizer = trained_member(optimizer_type, seed=1)
    before = copy.deepcopy(other_optimizer.state_dict())
    found = load_checkpoint(path, {0: Expected(other, other_optimizer)}, num_members=1)
    assert torch.equal(before["state"][0].popitem()[1], other_optimizer.state_dict()["state"][0].popitem()[1])
    assert found.step == 3
    assert found.state == {"note": 1}
    load_member_state_(other, other_optimizer, *found.members[0])
    for each, its_optimizer in ((net, optimizer), (other, other_optimizer)):
        each.train()
        its_optimizer.zero_grad()
        each(torch.ones(8, 4) * torch.arange(8)[:, None]).sin().sum().backward()
        its_optimizer.step()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())


def test_optimizer_state_comes_back_in_the_memory_order_of_its_parameter(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, [(net, optimizer)])
    found = load_checkpoint(path, expected_of([(net, optimizer)]), num_members=1)
    momentum = optimizer.state[net.weight]["momentum_buffer"].clone()
    load_member_state_(net, optimizer, *found.members[0])
    assert torch.equal(optimizer.state[net.weight]["momentum_buffer"], momentum)
    assert optimizer.state[net.weight]["momentum_buffer"].stride() == net.weight.stride()


def test_only_the_newest_checkpoints_stay_and_only_asked_members_are_read(tmp_path: Path) -> None:
    members = [trained_member(torch.optim.SGD, seed=seed) for seed in (0, 1)]
    for step in (1, 2, 30, 123456789):
        save(tmp_path, step, members, keep=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [30, 123456789]
    assert len(list(tmp_path.iterdir())) == 2
    newest = checkpoints(tmp_path)[-1][1]
    (newest / "member-000.safetensors").write_bytes(b"damaged")
    expected = expected_of(members)
    assert list(load_whole(newest, {1: expected[1]}, num_members=2).members) == [1]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    member = trained_member(torch.optim.SGD, seed=0)
    save(tmp_path, 7, [member], state={"take": 1})
    path = save(tmp_path, 7, [member], state={"take": 2})
    assert load_checkpoint(path, expected_of([member]), num_members=1).state == {"take": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000007"]


def test_in_the_foreground_nothing_is_copied_and_members_are_written_when_saving_returns(tmp_path: Path) -> None:
    member = trained_member(torch.optim.SGD, seed=0)
    with CheckpointWriter(tmp_path, group=LocalGroup(), num_members=1, background=False) as writer:
        assert writer.save(1, {0: member_state(*member)}, {}, lambda: None) is None
        with torch.no_grad():
            for parameter in member[0].parameters():
                parameter.fill_(9.0)
        assert writer.settle() is None
        assert not writer._stage
    background = save(tmp_path / "other", 1, [trained_member(torch.optim.SGD, seed=0)])
    files = [path / "member-000.safetensors" for path in (tmp_path / "step-00000001", background)]
    assert files[0].read_bytes() == files[1].read_bytes()


class ReadsNumbers(torch.optim.SGD):
    """An optimizer that reads numbers, which meta tensors do not have."""

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"][0].sum().item() > 1e9:
            raise AssertionError
        super().step(closure)


class NeedsItsDevice(torch.optim.SGD):
    """An optimizer that checks the device, as those with `capturable=True` do."""

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"][0].device.type == "cpu"
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adafactor, {}),
        (ReadsNumbers, {"momentum": 0.9}),
        (NeedsItsDevice, {"momentum": 0.9}),
    ],
)
def test_the_state_of_an_optimizer_is_known_before_its_first_step(optimizer_type: Any, options: Any) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(4, 3)
        return net, optimizer_type(net.parameters(), lr=0.01, **options)

    net, optimizer = make()
    expected = Expected(*make())

    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    tensors, numbers = member_state(net, optimizer)
    expected.check({name: TensorInfo.of(tensor) for name, tensor in tensors.items()}, numbers["optimizer"])


def test_a_checkpoint_holds_the_state_at_the_time_of_saving(tmp_path: Path) -> None:
    net, optimizer = trained_member(torch.optim.SGD, seed=0)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with CheckpointWriter(tmp_path, group=LocalGroup(), num_members=1) as writer:
        writer.save(1, {0: member_state(net, optimizer)}, {}, lambda: None)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(9.0)
        assert writer.settle() is None
    saved = load_file(tmp_path / "step-00000001" / "member-000.safetensors")
    assert all(torch.equal(saved[f"model.{name}"], tensor) for name, tensor in before.items())


def damage(path: Path, how: str) -> None:
    file, manifest = path / "member-000.safetensors", path / "manifest.json"
    content, value = file.read_bytes(), json.loads(manifest.read_text())
    if how == "bit":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut":
        file.write_bytes(content[:-8])
    elif how == "gone":
        file.unlink()
    elif how == "link":
        shutil.move(file, path / "elsewhere")
        file.symlink_to(path / "elsewhere")
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "manifest cut":
        manifest.write_text(manifest.read_text()[:-5])
    elif how == "manifest altered":
        manifest.write_text(json.dumps({**value, "state": {"note": 2}}))
    elif how == "manifest without digest":
        del value["sha256"]
        manifest.write_text(json.dumps(value))
    elif how == "manifest gone":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps(with_digest({**value, **json.loads(how)})))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bit", r"member-000\.safetensors does not match the digest"),
        ("cut", r"member-000\.safetensors has [0-9,]+ bytes, its manifest says"),
        ("gone", r"has no file member-000\.safetensors: it was removed"),
        ("link", r"has no file member-000\.safetensors"),
        ("pipe", r"has no file member-000\.safetensors"),
        ("manifest cut", "is not valid JSON"),
        ("manifest altered", r"manifest\.json does not match its own digest"),
        ("manifest without digest", r"manifest\.json does not match its own digest"),
        ("manifest gone", r"has no file manifest\.json"),
        ('{"step": 2}', "its step is 2"),
        ('{"members": -1}', "names 1 files, expected -1"),
        ('{"files": {"../../x": {"bytes": 1, "sha256": "x", "numbers": {}}}}', r"its files are \.\./\.\./x"),
        ('{"files": {"/etc/passwd": {"bytes": 1, "sha256": "x", "numbers": {}}}}', "its files are /etc/passwd"),
        ('{"files": {}}', "names 0 files, expected 1"),
        ('{"files": []}', r"files is \[\], expected an object"),
        ('{"files": {"member-000.safetensors": {"bytes": "5"}}}', "bytes is '5', expected an integer"),
        ('{"files": {"member-000.safetensors": {"bytes": 5}}}', "sha256 is missing"),
        (
            '{"files": {"member-000.safetensors": {"bytes": 5, "sha256": "x", "numbers": {}}}}',
            "bytes, its manifest says 5",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, how: str, message: str) -> None:
    member = trained_member(torch.optim.SGD, seed=0)
    path = save(tmp_path, 1, [member])
    damage(path, how)
    with pytest.raises(DamagedError, match=message):
        load_whole(path, expected_of([member]), num_members=1)


def test_a_checkpoint_of_another_model_population_or_version_says_what_differs(tmp_path: Path) -> None:
    member = trained_member(torch.optim.SGD, seed=0)
    path = save(tmp_path, 1, [member])
    wide = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    wide_expected = {0: Expected(wide, torch.optim.SGD(wide.parameters(), lr=0.1))}
    with pytest.raises(RunError, match=r"does not fit: its tensor .* it is of another model"):
        load_whole(path, wide_expected, num_members=1)
    adam = torch.optim.AdamW(member[0].parameters())
    with pytest.raises(RunError, match=r"its tensor 'optimizer\.[0-9]\.momentum_buffer' is float32"):
        load_whole(path, {0: Expected(member[0], adam)}, num_members=1)
    with pytest.raises(RunError, match="has 1 members, expected 2"):
        load_whole(path, expected_of([member]), num_members=2)
    for how, message in (
        ('{"format": 2}', "has checkpoint format 2, this version of papa reads format 3: continue with the version"),
        ('{"papa": "9.9"}', "was written by papa '9.9'"),
    ):
        save(tmp_path, 1, [member])
        damage(path, how)
        with pytest.raises(RunError, match=message) as caught:
            load_whole(path, expected_of([member]), num_members=1)
        assert not isinstance(caught.value, DamagedError)
    assert __version__ in str(caught.value)


@pytest.mark.parametrize("name", ["step-1", "step-0000000x", "step-..", "step-000000001"])
def test_other_names_among_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match="is no checkpoint, expected directories such as step-00000123"):
        checkpoints(tmp_path)


def test_partial_checkpoints_are_not_listed_and_are_removed(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nowhere") == []
    (tmp_path / ".step-00000001.partial").mkdir()
    assert checkpoints(tmp_path) == []
    CheckpointWriter(tmp_path, group=LocalGroup(), num_members=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_returned_by_the_next_save_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    member = trained_member(torch.optim.SGD, seed=0)
    states = {0: member_state(*member)}
    good = save(tmp_path, 1, [member])

    def fail() -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    writer = CheckpointWriter(tmp_path, group=LocalGroup(), num_members=1)
    assert writer.save(2, states, {}, fail) is None
    assert writer.save(3, states, {}, lambda: None) == Failure(2, "No space left on device: metrics.jsonl")
    assert writer.settle() is None
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 3]
    assert load_whole(good, expected_of([member]), num_members=1).step == 1
    assert not list(tmp_path.glob(".*"))
