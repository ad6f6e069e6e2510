"""Soups whose weights are computed: learned on held-out data, or from the angles between networks (Model Stock)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.core import mixing
from papa.core.soups import MeanNetwork, mean_network
from papa.errors import SoupError
from papa.evaluation.inputs import outputs_of
from papa.evaluation.scores import evaluating

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets to the mean loss of a batch."""
Slope: TypeAlias = Callable[[Tensor, int], tuple[float, Tensor]]
"""Maps weights and the index of a batch to the loss of their soup, and to its derivative by each weight."""


@dataclass(frozen=True)
class LearnedWeights:
    """Weights that were learned, and the losses on the way."""

    weights: Tensor
    """One for each member, non-negative and summing to 1."""
    loss: float
    """The held-out loss of the soup with these weights."""
    losses: tuple[float, ...]
    """The held-out loss after each epoch; the first is that of equal weights."""


@dataclass(frozen=True)
class LearnedSoup(LearnedWeights):
    """A learned soup."""

    network: nn.Module
    """The soup: a new module."""


def learned_soup(
    members: Iterable[nn.Module],
    batches: Iterable[Any],
    *,
    loss: LossFunction = F.cross_entropy,
    num_epochs: int = 5,
    lr: float = 0.1,
) -> LearnedSoup:
    """The mean of members whose weights minimise a loss on held-out data.

        soup = sum_j v_j member_j,   v = softmax(a),   a by Adam on the loss of the soup

    The derivative by `v_j` is the product of the soup's gradient and the weights of member `j`, so that besides the
    members one network and its gradient are in memory. The weights with the lowest loss of all epochs win, equal
    weights included: the soup is never worse than the average soup on this data.

    Reference: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without
    increasing inference time (arXiv 2203.05482), its learned soup.

    Example:
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(4)]
        >>> soup = learned_soup(nets, batches)
        >>> soup.loss <= soup.losses[0]
        True

    Args:
        members: a population, or modules of one architecture.
        batches: held-out pairs of inputs and targets. With several processes, the same on all.
        loss: from outputs and targets to the mean loss of a batch.
        num_epochs: passes over the batches.
        lr: of Adam.
    """
    mean, data = mean_network(members), list(batches)
    if not isinstance(mean.network, nn.Module):
        raise SoupError("a learned soup needs networks, got state dicts: load them into modules first")
    slope = slope_of(mean, data, loss)
    found = learned_weights(slope, mean.size, len(data), active=mean.active, num_epochs=num_epochs, lr=lr)
    mean.fill_(found.weights)
    mean.network.zero_grad(set_to_none=True)
    return LearnedSoup(found.weights, found.loss, found.losses, mean.network)


def slope_of(mean: MeanNetwork, data: Sequence[Any], loss: LossFunction) -> Slope:
    """The loss of the soup, and its derivative by the weight of each member. All processes must call it."""

    def slope(weights: Tensor, batch: int) -> tuple[float, Tensor]:
        mean.fill_(weights)
        value, gradients = loss_and_gradients(mean.network, data[batch], loss)
        own = [
            product(gradients, dict(network.named_parameters())) if member in mean.active else 0.0
            for member, network in mean.local_members.items()
        ]
        everyone = mean.group.all_gather(own)
        return mean.group.all_gather([value])[0], torch.tensor(everyone, dtype=torch.float64, device="cpu")

    return slope


def loss_and_gradients(network: nn.Module, batch: Any, loss: LossFunction) -> tuple[float, dict[str, Tensor]]:
    """The loss of a network in evaluation mode on a pair of inputs and targets, and its gradients by name."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise SoupError("a batch holds only inputs, expected pairs of inputs and targets to compute a loss")
    network.zero_grad(set_to_none=True)
    with evaluating(network), torch.enable_grad():
        value = loss(outputs_of(network, batch[0]), batch[1])
        value.backward()  # type: ignore[no-untyped-call]
    return float(value.detach()), {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


def product(gradients: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> float:
    """The sum of the products of gradients and weights."""
    return sum(float((grad.double() * tensors[name].detach().double()).sum()) for name, grad in gradients.items())


def learned_weights(
    slope: Slope, size: int, num_batches: int, *, active: Sequence[int] | None = None, num_epochs: int, lr: float
) -> LearnedWeights:
    """Minimise a loss over weights that are non-negative and sum to 1, by Adam.

    `slope` gives the loss and its derivatives. Only `active` members may have a weight; None for all.
    """
    if num_batches < 1:
        raise SoupError("a learned soup needs held-out data, got no batch")
    members = list(range(size) if active is None else active)
    logits = torch.zeros(len(members), dtype=torch.float64, device="cpu", requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=lr)
    candidates: list[tuple[float, Tensor]] = []
    for epoch in range(num_epochs + 1):
        row = mixing.soup_row(size, members)
        row[members] = torch.softmax(logits.detach(), dim=0)
        candidates.append((sum(slope(row, batch)[0] for batch in range(num_batches)) / num_batches, row))
        for batch in range(num_batches) if epoch < num_epochs else ():
            shares = torch.softmax(logits, dim=0)
            places = torch.tensor(members, device="cpu")
            whole = torch.zeros(size, dtype=torch.float64, device="cpu").index_copy(0, places, shares)
            _, derivative = slope(whole.detach(), batch)
            optimizer.zero_grad()
            whole.backward(derivative)  # type: ignore[no-untyped-call]
            optimizer.step()
    best, weights = min(candidates, key=lambda candidate: candidate[0])
    return LearnedWeights(weights / weights.sum(), best, tuple(loss for loss, _ in candidates))


@dataclass(frozen=True)
class ModelStock:
    """A Model Stock soup."""

    network: Any
    """The soup: a new module, or a new state dict if the members are state dicts."""
    ratios: Mapping[str, float]
    """For each tensor, the share of the mean; the rest is the pretrained start."""


def model_stock(members: Iterable[Any], start: Any) -> ModelStock:
    """The mean of networks that were fine-tuned from the same start, moved back toward it, tensor by tensor.

        soup = t mean + (1 - t) start,   t = n c/(1 + (n - 1) c)

    where `c` is the mean cosine between the `n` networks' differences from the start, within a tensor. If they all
    moved in the same direction the soup is their mean; if in orthogonal directions, the start.

    Reference: Jang, Yun, Han, Model Stock: all we need is just a few fine-tuned models (arXiv 2403.19522).

    Example:
        >>> start = nn.Linear(4, 2)
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> soup = model_stock(nets, start)
        >>> sorted(soup.ratios)
        ['bias', 'weight']

    Args:
        members: at least two modules of one architecture, or their state dicts.
        start: the network or state dict that all were fine-tuned from.
    """
    members = list(members)
    if len(members) < 2:
        raise SoupError(f"Model Stock compares networks, got {len(members)}, expected at least two")
    mean = mean_network([*members, start])
    count, states = len(members), [_tensors(one) for one in [*members, start]]
    mean.fill_(mixing.soup_row(count + 1, range(count)))
    ratios, done = {}, set()
    with torch.no_grad():
        for name, target in _tensors(mean.network).items():
            if not target.is_floating_point() or target.data_ptr() in done:
                continue
            done.add(target.data_ptr())  # tied tensors have several names
            origin = states[-1][name].to(torch.float64)
            differences = [(state[name].to(torch.float64) - origin).flatten() for state in states[:-1]]
            products = torch.stack([torch.stack([one @ other for other in differences]) for one in differences])
            ratios[name] = stock_ratio(products)
            target.copy_(torch.lerp(origin, target.to(torch.float64), ratios[name]))
    return ModelStock(mean.network, ratios)


def stock_ratio(products: Tensor) -> float:
    """The share of the mean, from the products of all pairs of differences; 1 where a network did not move."""
    count, lengths = len(products), products.diagonal().sqrt()
    if not bool((lengths > 0).all()):
        return 1.0
    cosines = products / lengths[:, None] / lengths
    cosine = min(max(float((cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1))), 0.0), 1.0)
    return count * cosine / (1.0 + (count - 1) * cosine)


def _tensors(network: Any) -> dict[str, Tensor]:
    state = network.state_dict() if isinstance(network, nn.Module) else network
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
