"""A mesh of two members by two data ranks, against one process, step by step, for every rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mesh_jobs
from papa import Population
from papa.errors import MemberError
from papa.group import start_workers


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return mesh_jobs.reference()


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    found: dict[str, Any] = start_workers(mesh_jobs.train_all, 4, 4)
    return found


@pytest.mark.parametrize("kind", ["ddp before", "ddp after", "fsdp"])
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


@pytest.mark.parametrize("kind", ["ddp before", "ddp after", "fsdp"])
def test_members_that_were_evaluated_can_be_merged(trained: dict[str, Any], kind: str) -> None:
    one, other = trained[kind]["merged"]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_all_ranks_learn_of_a_number_that_is_not_finite_in_the_shard_of_one(trained: dict[str, Any]) -> None:
    found = trained["fsdp"]
    assert found["sick"] == [1]
    for one, other in zip(found["merged"], found["mended"], strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-6, atol=1e-7)


def test_what_cannot_be_is_said(trained: dict[str, Any]) -> None:
    assert "cannot be copied" in trained["fsdp"]["soup"]
    assert trained["ddp before"]["soup"] == "a soup"
    assert "the device mesh has the dimensions ranks, expected 'population' and at most one more" in trained["nameless"]
    with pytest.raises(MemberError, match="group is a int, expected a process group or device mesh"):
        Population([nn.Linear(2, 2)], group=3)
