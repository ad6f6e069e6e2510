from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from papa.group import collectives


class OnAnAccelerator(Tensor):
    """A tensor that says it lives on the second accelerator."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)

    def detach(self) -> Tensor:  # type: ignore[override]
        return torch.Tensor.detach(self.as_subclass(Tensor))


@dataclass
class Sums:
    total: Tensor
    parts: list[Tensor]


def test_tensors_on_accelerators_travel_through_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def to_device_type(tensor: Tensor, device_type: str) -> Tensor:
        seen.append((type(tensor), tensor.device, device_type))
        return tensor

    far = torch.arange(3.0).as_subclass(OnAnAccelerator)
    sent = collectives.dumps({"sums": Sums(far, [far, torch.ones(2)]), "names": ["a"]})
    monkeypatch.setattr(collectives, "to_device_type", to_device_type)
    found = pickle.loads(sent)
    assert seen == [(Tensor, torch.device("cpu"), "cuda")]  # once: it is one tensor
    assert found["sums"].total is found["sums"].parts[0]
    assert torch.equal(found["sums"].total, torch.arange(3.0))
    assert torch.equal(found["sums"].parts[1], torch.ones(2))
    assert found["names"] == ["a"]
