"""What a newcomer would write, on networks that papa did not make."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import papa


def test_a_torchvision_network() -> None:
    models = pytest.importorskip("torchvision.models")
    inputs, targets = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    population = papa.Population([models.resnet18(num_classes=10) for _ in range(2)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    averager = papa.Averager(population, papa.Push(alpha=0.9, every_steps=2), optimizers)
    for _ in range(2):
        for net, optimizer in zip(population, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        averaging = averager.step()
    soup = papa.reset_batch_norm_(papa.average_soup(population), [inputs])

    assert averaging.alpha == pytest.approx(0.9)
    assert averaging.distances_after == pytest.approx(population.distances().tolist(), rel=1e-4)
    assert all(
        torch.isfinite(papa.evaluate(net, [(inputs, targets)]).loss + torch.zeros(1)) for net in (*population, soup)
    )


class Tagger(nn.Module):
    """A small transformer that tags the tokens of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens))).transpose(1, 2)


def test_a_transformer() -> None:
    tokens, tags = torch.randint(20, (4, 7)), torch.randint(5, (4, 7))

    population = papa.Population([Tagger() for _ in range(3)])
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in population]
    averager = papa.Averager(population, papa.MergePairs(every_steps=1, seed=1), optimizers, num_steps=3)
    for _ in range(3):
        for net, optimizer in zip(population, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens), tags).backward()
            optimizer.step()
        averager.step()
    soup = papa.greedy_soup(population, score=lambda net: -papa.evaluate(net, [(tokens, tags)]).loss)
    ensemble = papa.Ensemble(population)

    assert soup.score >= max(soup.member_scores)
    assert papa.evaluate(soup.network, [(tokens, tags)]).loss == pytest.approx(-soup.score)
    assert torch.isfinite(torch.tensor(papa.evaluate(ensemble, [(tokens, tags)]).loss))
