"""Inputs of networks: one tensor, or several by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from papa.evaluation.inputs import outputs_of

NAMED = {"words": torch.tensor([1.0, 2.0]), "mask": torch.tensor([1.0, 0.0])}


class Keywords(nn.Module):
    """Takes tensors by keyword."""

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        return words if mask is None else words * mask


class One(nn.Module):
    """Takes all of them at once."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["words"] * batch["mask"]


class Passing(nn.Module):
    """Passes on all arguments, as wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        outputs: Tensor = self.module(*args, **kwargs)
        return outputs


def test_names_go_by_keyword_where_a_network_has_them_and_as_one_argument_else() -> None:
    expected = NAMED["words"] * NAMED["mask"]
    for network in (Keywords(), One(), Passing(Keywords()), Passing(One()), Passing(Passing(Keywords()))):
        assert torch.equal(outputs_of(network, NAMED), expected), network
    assert torch.equal(outputs_of(Keywords(), {"words": NAMED["words"]}), NAMED["words"])
    assert torch.equal(outputs_of(lambda batch: batch["words"], NAMED), NAMED["words"])
    assert torch.equal(outputs_of(Keywords(), NAMED["words"]), NAMED["words"])
