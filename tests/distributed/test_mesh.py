"""A mesh of two members by two data ranks against one process, step by step, for every rule."""

from __future__ import annotations

import copy
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import nn

import mesh_jobs
from papa import Population, average_soup
from papa.core.group import LocalGroup
from papa.distributed.start import start_workers
from papa.errors import ConfigError, MemberError


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return mesh_jobs.reference()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soups")


@pytest.fixture(scope="module")
def trained(directory: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: dict[str, Any] = start_workers(mesh_jobs.train_all, 4, 4, str(directory), port)
    return found


@pytest.mark.parametrize("kind", mesh_jobs.KINDS)
def test_momenta_are_permuted_with_the_weights_of_members_on_several_ranks(kind: str, trained: Any) -> None:
    assert trained[kind]["shuffled"]


@pytest.mark.parametrize("kind", mesh_jobs.KINDS)
def test_every_rule_acts_on_members_of_several_ranks(reference: list[Any], trained: dict[str, Any], kind: str) -> None:
    found = trained[kind]
    assert found["size"] == 2
    assert len(found["record"]) == len(reference)
    for (states, distances), (expected_states, expected_distances) in zip(found["record"], reference, strict=True):
        for state, expected in zip(states, expected_states, strict=True):
            assert state.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
        assert distances == (None if expected_distances is None else pytest.approx(expected_distances, rel=1e-4))


@pytest.mark.parametrize("kind", mesh_jobs.KINDS)
def test_members_can_be_merged_after_evaluation(trained: dict[str, Any], kind: str) -> None:
    one, other = trained[kind]["merged"]
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said by torch about reading in one process
@pytest.mark.parametrize("kind", mesh_jobs.KINDS)
def test_the_soup_of_members_of_several_ranks_is_written_whole(
    trained: dict[str, Any], directory: Path, kind: str
) -> None:
    members, _ = trained[kind]["record"][-1]
    expected = average_soup(members)
    found = load_file(directory / kind / "soup.safetensors")
    plain = mesh_jobs.make_net(0)
    plain.load_state_dict(found)  # plain names, and everything that a network needs
    distributed = {name: torch.empty_like(tensor) for name, tensor in plain.state_dict().items()}
    torch.distributed.checkpoint.load(distributed, checkpoint_id=directory / kind / "soup", no_dist=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
        assert torch.equal(distributed[name], found[name])
        assert torch.equal(trained[kind]["saved"]["only averaged"][name], found[name])
    assert "num_batches_tracked" not in "".join(trained[kind]["saved"]["only averaged"])
    assert trained[kind]["saved"]["leaders"] == 1
    assert trained[kind]["saved"]["error"].endswith(
        "soup exists already, expected a new directory for a distributed checkpoint"
    )


def test_a_nonfinite_number_in_one_shard_is_found_on_all_ranks(trained: dict[str, Any]) -> None:
    found = trained["fsdp"]
    assert found["nonfinite"] == [1]
    for one, other in zip(found["merged"], found["restarted"], strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-7)


def test_unsupported_uses_raise(trained: dict[str, Any]) -> None:
    assert "cannot be copied" in trained["fsdp"]["soup"]
    assert "write its soup to a file with papa.save_soup" in trained["fsdp"]["soup"]
    assert trained["ddp before"]["soup"] == "no error"
    assert (
        "the device mesh has the dimensions ranks, expected 'population' and at most one more" in trained["wrong mesh"]
    )
    with pytest.raises(MemberError, match="group is a int, expected a process group or device mesh"):
        Population([nn.Linear(2, 2)], group=3)


def test_no_process_group_under_torchrun_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"group is None in one of 2 processes(.*)init_process_group\(\) first"):
        Population([nn.Linear(2, 2)], group=dist.group.WORLD)
    alone = Population([nn.Linear(2, 2)], group=LocalGroup())
    assert alone.size == copy.deepcopy(alone).size == pickle.loads(pickle.dumps(alone)).size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Population([nn.Linear(2, 2)]).size == 1


def test_a_wrapper_that_spans_several_members_is_refused() -> None:
    replicas, shards = start_workers(mesh_jobs.wrap_several_members, 2, 2)
    end = "spans the processes of several members (ranks 0, 1 of the population): it would average their gradients"
    assert replicas.startswith(f"MemberError: DistributedDataParallel {end}")
    assert shards.startswith(f"MemberError: fully_shard {end}")
