"""Collectives on Python values, and the errors of lost connections."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from papa.distributed import collectives
from papa.errors import ConfigError, LostError


class FakeCudaTensor(Tensor):
    """A tensor that reports the second accelerator as its device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)

    def detach(self) -> Tensor:  # type: ignore[override]
        return torch.Tensor.detach(self.as_subclass(Tensor))


@dataclass
class Sums:
    total: Tensor
    parts: list[Tensor]


def test_tensors_on_accelerators_are_sent_through_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def to_device_type(tensor: Tensor, device_type: str) -> Tensor:
        seen.append((type(tensor), tensor.device, device_type))
        return tensor

    tensor = torch.arange(3.0).as_subclass(FakeCudaTensor)
    sent = collectives.dumps({"sums": Sums(tensor, [tensor, torch.ones(2)]), "names": ["a"]})
    monkeypatch.setattr(collectives, "to_device_type", to_device_type)
    found = pickle.loads(sent)
    assert seen == [(Tensor, torch.device("cpu"), "cuda")]  # once, since both are the same tensor
    assert found["sums"].total is found["sums"].parts[0]
    assert torch.equal(found["sums"].total, torch.arange(3.0))
    assert torch.equal(found["sums"].parts[1], torch.ones(2))
    assert found["names"] == ["a"]


def test_lost_connections_are_reported_without_the_words_of_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="papa")
    reason = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:43201"
    with pytest.raises(LostError) as caught, collectives.connection_errors("exchanging weights"):
        raise RuntimeError(reason)
    assert str(caught.value) == (
        "this process lost the connection to the other processes while exchanging weights: one of them failed, was "
        "killed or cannot be reached; the cause is in the output of the other processes"
    )
    assert str(caught.value.__cause__) == reason
    assert caplog.messages == [f"while exchanging weights, the backend reported: {reason}"]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"), True),
        (RuntimeError("writev [127.0.0.1]:4321: Broken pipe"), True),
        (dist.DistNetworkError("the client socket has failed to reach the server"), True),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("NCCL error: invalid usage. Last error: Duplicate GPU detected"), False),
        (RuntimeError("No backend type associated with device type cuda"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    ],
)
def test_only_errors_of_connections_are_reported_as_lost_ones(error: RuntimeError, is_lost: bool) -> None:
    with pytest.raises(LostError if is_lost else type(error)), collectives.connection_errors("exchanging weights"):
        raise error


def test_gpus_of_their_own_are_connected_by_nccl() -> None:
    assert collectives.place_of(torch.device("cpu")) == ""
    assert collectives.backend_for(["one GPU-1", "two GPU-1"]) == "nccl"
    assert collectives.backend_for(["one GPU-1", "one GPU-1"]) == "gloo", "NCCL refuses two processes on a GPU"
    assert collectives.backend_for(["one GPU-1", ""]) == "gloo"
    collectives.check_current_device(torch.device("cpu"), 0)
    collectives.check_current_device(torch.device("cuda:1"), 1)
    with pytest.raises(
        ConfigError, match=r"has its member on cuda:2, .* is cuda:0: call torch.cuda.set_device\(2\) first"
    ):
        collectives.check_current_device(torch.device("cuda:2"), 0)
