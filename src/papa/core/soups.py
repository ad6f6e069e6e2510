"""Soups: one network with the mean of the weights of several networks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from papa.core import layout, mixing
from papa.core.group import Group, LocalGroup
from papa.core.population import Population
from papa.core.product import accumulation_dtype, combine_block_
from papa.errors import PapaWarning, SoupError
from papa.evaluation.scores import Evaluation, mean_logits

Network = TypeVar("Network", nn.Module, dict[str, Any])
T = TypeVar("T")
Score: TypeAlias = Callable[[Any], Any]
"""Maps a network or state dict to its score, or to `(score, loss)`."""
Weights: TypeAlias = Sequence[float] | Tensor
After: TypeAlias = Callable[[Any, Tensor], object]
"""Called with every new mean and its weights, for instance to repair it."""


def is_far_worse(soup: float, members: Sequence[float], *, higher_is_better: bool = True) -> bool:
    """Whether a soup's score is far worse than those of its members: by more than their spread, and by a fifth.

    Example:
        >>> is_far_worse(33.0, [99.0, 98.5]), is_far_worse(98.2, [99.0, 98.5])
        (True, False)
    """
    mean, margin = sum(members) / len(members), max(members) - min(members)
    margin = max(margin, 0.2 * abs(mean))
    return bool(soup < min(members) - margin if higher_is_better else soup > max(members) + margin)


def warn_if_far_worse(
    soup: float, members: Sequence[float], *, higher_is_better: bool = True, stacklevel: int = 3
) -> None:
    """Warn if a soup's score is far worse than those of its members."""
    if is_far_worse(soup, members, higher_is_better=higher_is_better):
        mean = sum(members) / len(members)
        warnings.warn(
            f"the average soup scores {soup:.4g}, far worse than its members ({mean:.4g} on average): they are too far "
            "apart to be averaged. Push more strongly or merge more often while training (papa.Push(half_life=0.003) "
            "keeps them together), or use the greedy soup or the ensemble",
            PapaWarning,
            stacklevel=stacklevel,
        )


def average_soup(
    members: Iterable[Network],
    weights: Weights | None = None,
    *,
    after: After | None = None,
    score: Score | None = None,
    higher_is_better: bool = True,
) -> Network:
    """The (weighted) mean of all members.

        soup = sum_j w_j member_j,   w_j = 1/p by default

    Floating-point tensors are averaged in float32 or better and keep their dtype. Everything else (integer buffers,
    masks, non-persistent buffers) is copied from the first member.

    Example:
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> soup = average_soup(nets)
        >>> state = average_soup([net.state_dict() for net in nets], weights=[0.5, 0.3, 0.2])

    Args:
        members: a population, modules of one architecture, or their state dicts.
        weights: one per member, non-negative and summing to 1.
        after: called with the average and its weights before it is returned, for instance to repair it.
        score: a function of a network, on validation data; warns if the soup is far worse than its members.
        higher_is_better: whether a higher score is better, as an accuracy is, or a lower one, as a loss.

    Returns:
        A new module, or a new state dict if the members are state dicts.
    """
    if isinstance(members, Population) and (check := members.before_soup()) is not None:
        check()
    mean = mean_network(members, after)
    row = mixing.soup_row(mean.size, mean.active) if weights is None else _checked_weights(weights, mean.size)
    mean.fill_(row)
    if _has_nan(mean.network):
        found = [member for member, net in mean.local_members.items() if row[member] > 0 and _has_nan(net)]
        source = f"from member {', '.join(map(str, found))}" if found else "perhaps from a member on another process"
        warnings.warn(
            f"the average soup has NaN, {source}: give it weight 0, or call averager.check_health() first",
            PapaWarning,
            stacklevel=2,
        )
    if score is not None:
        scores, order = mean.ranked(score)
        own_score = mean.agreed(score_and_loss(score(mean.network))[0])
        warn_if_far_worse(own_score, [scores[member][0] for member in order], higher_is_better=higher_is_better)
    network: Network = mean.network
    return network


def _has_nan(network: Any) -> bool:
    """Whether a tensor has NaN; one read from each device if none has."""
    found = _averageable_tensors(network.state_dict() if isinstance(network, nn.Module) else network).values()
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in found:
        number = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sum
        by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        # A sum without NaN is cheap proof that no number is NaN; all are read at once.
        are_nan = torch.stack([torch.isnan(one.sum()) for one in numbers]).tolist()
        if any(bool(torch.isnan(one).any()) for one, is_nan in zip(numbers, are_nan, strict=True) if is_nan):
            return True
    return False


def _checked_weights(weights: Weights, size: int) -> Tensor:
    row = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if row.shape != (size,):
        raise SoupError(f"weights have shape {tuple(row.shape)}, expected ({size},): one for each network")
    mixing.check_row(row, subject="the row of the soup's weights")
    return row / row.sum()


@dataclass(frozen=True)
class Trial:
    """One candidate that a greedy soup tried."""

    members: tuple[int, ...]
    score: float
    """The score of the mean of these members."""
    kept: bool
    """Whether this mean became the soup."""


@dataclass(frozen=True)
class GreedySoup(Generic[Network]):
    """A greedy soup, its members and all scores."""

    network: Network
    """The soup: a new module, or a new state dict if the members are state dicts."""
    members: tuple[int, ...]
    """The chosen members, in the order they were added."""
    score: float
    """The soup's score."""
    member_scores: tuple[float, ...]
    """The score of each single member."""
    trials: tuple[Trial, ...]
    """All candidates, in the order they were tried."""


def greedy_soup(
    members: Iterable[Network], score: Score, *, higher_is_better: bool = True, after: After | None = None
) -> GreedySoup[Network]:
    """The mean of those members that, added best first, do not make the score worse.

    Algorithm 3 of the paper: sort members by score; start from the best; add the next member whenever the mean with it
    scores at least as well as the mean without it. So the soup never scores worse than the best member. Members and
    means with a score of NaN are left out.

    Example:
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> soup = greedy_soup(nets, score=lambda net: net.bias.sum().item())
        >>> len(soup.member_scores), len(soup.trials)
        (3, 2)

    Args:
        members: a population, modules of one architecture, or their state dicts.
        score: takes a network (or state dict) and returns a number; or `(score, loss)`, where the lower loss comes
            first among members with equal scores.
        higher_is_better: whether a higher score is better, as an accuracy is, or a lower one, as a loss.
        after: called with each mean of several members and its weights before it is scored, for instance to repair it.

    Returns:
        The soup, its members, and all scores. One extra network is held in memory.
    """
    mean = mean_network(members, after)
    readings, order = mean.ranked(score, higher_is_better=higher_is_better)

    def score_of(candidate: Sequence[int]) -> float:
        mean.fill_(mixing.soup_row(mean.size, candidate))
        return mean.agreed(score(mean.network))

    chosen, best, trials = add_greedily(order, readings[order[0]][0], score_of, higher_is_better=higher_is_better)
    if len(chosen) == 1:
        mean.after = None  # a single member is returned as it was scored
    mean.fill_(mixing.soup_row(mean.size, chosen))
    return GreedySoup(mean.network, tuple(chosen), best, tuple(value for value, _ in readings), trials)


def add_greedily(
    order: Sequence[int], best: float, score_of: Callable[[Sequence[int]], float], *, higher_is_better: bool
) -> tuple[Sequence[int], float, tuple[Trial, ...]]:
    """Add members in turn to the first, whose score is `best`; returns those kept, their score and all trials."""
    chosen, trials = order[:1], []
    for member in order[1:]:
        candidate = [*chosen, member]
        result = score_of(candidate)
        is_as_good = result >= best if higher_is_better else result <= best  # NaN never is
        trials.append(Trial(tuple(candidate), result, is_as_good))
        if trials[-1].kept:
            chosen, best = candidate, result
    return chosen, best, tuple(trials)


def score_and_loss(value: Any) -> tuple[float, float]:
    """The result of a `Score` as a pair; the loss, which only breaks ties, is 0 when missing and infinite when NaN."""
    if isinstance(value, Evaluation):
        value = value.score, value.loss
    score, loss = map(float, value[:2] if isinstance(value, tuple) else (value, 0.0))
    return score, math.inf if math.isnan(loss) else loss


class MeanNetwork:
    """A network that can be set to any weighted mean of the members; `fill` sets its tensors."""

    def __init__(
        self,
        network: Any,
        fill: Callable[[Tensor], None],
        members: Sequence[Any],
        *,
        population: Population | None = None,
        after: After | None = None,
    ) -> None:
        self.network, self.after, self._fill = network, after, fill
        self.size = len(members) if population is None else population.size
        """The number of members on all processes."""
        self.active: Sequence[int] = range(self.size) if population is None else population.active
        """The members that were not dropped."""
        self.group: Group = LocalGroup() if population is None else population.group
        local = range(self.size) if population is None else population.members
        self.local_members: dict[int, Any] = dict(zip(local, members, strict=True))
        """The members on this process, by their index."""

    def fill_(self, row: Tensor) -> None:
        """Set the network to the mean with these weights; members with weight 0 are not read."""
        self._fill(row)
        if self.after is not None:
            self.after(self.network, row)

    def agreed(self, value: Any) -> float:
        """The score in the result of a `Score`, one for all processes, which must choose alike."""
        return self.group.all_max(score_and_loss(value)[0])[0]

    def ranked(self, score: Score, *, higher_is_better: bool = True) -> tuple[list[tuple[float, float]], list[int]]:
        """The `(score, loss)` of all members, and the active members with a score other than NaN, best first.

        Members with equal scores are in the order of their losses, then of their indices.
        """
        active, local = self.active, self.local_members
        values = self.group.all_gather(
            [score(network) if member in active else None for member, network in local.items()]
        )
        nothing = (math.nan, math.nan)
        scores = [score_and_loss(value) if member in active else nothing for member, value in enumerate(values)]
        valid = (member for member in active if not math.isnan(scores[member][0]))
        sign = -1.0 if higher_is_better else 1.0
        order = sorted(valid, key=lambda member: (sign * scores[member][0], scores[member][1], member))
        if not order:
            raise SoupError("every member scored NaN, expected numbers: check the networks' outputs")
        return scores, order


def mean_network(members: Any, after: After | None = None) -> MeanNetwork:
    """A `MeanNetwork` for a population, for modules of one architecture or for their state dicts."""
    if isinstance(members, Population):
        return _mean_of_population(members, after)
    members = list(members)
    if not members:
        raise SoupError("a soup needs at least one network, got none")
    if all(isinstance(member, nn.Module) for member in members):
        names = [slot.name for slot in layout.plan(members, {}, apart=False).slots]
        network = _copied(lambda: copy.deepcopy(members[0]), members[0])
        targets, *sources = (layout.named_tensors(model, names) for model in [network, *members])
    elif all(isinstance(member, Mapping) for member in members):
        states = [{key: value for key, value in state.items() if isinstance(value, Tensor)} for state in members]
        for index, state in enumerate(states[1:], start=1):
            layout.check_same_tensors(
                state,
                states[0],
                subject=f"state dict {index}",
                reference="state dict 0",
                remedy="a soup needs networks of one architecture",
                error=SoupError,
                same_dtypes=False,
            )
        network = {key: copy.deepcopy(value) for key, value in members[0].items()}
        targets, sources = _averageable_tensors(network), members
    else:
        kinds = ", ".join(sorted({type(member).__name__ for member in members}))
        raise SoupError(f"a soup is made of a population, of modules or of state dicts, got {kinds}")
    return MeanNetwork(network, lambda row: _fill_(targets, sources, row), members, after=after)


def _mean_of_population(population: Population, after: After | None) -> MeanNetwork:
    """Means are written into a row in memory of its own, which is that of the network."""
    population.refresh_()
    active, strides = population.active, population.layout.strides
    first = next((index for index, member in enumerate(population.members) if member in active), 0)
    rows = {dtype: torch.zeros_like(matrix[0]) for dtype, matrix in population.matrices.items()}
    network = _copied(lambda: layout.copy_onto(population[first], population.layout, rows), population[first])
    tensors = layout.named_tensors(network, population.averaged)

    @torch.no_grad()
    def fill(row: Tensor) -> None:
        population.refresh_()
        if population.layout.strides == strides:
            population.combined(row, rows)
            torch.autograd.graph.increment_version(list(tensors.values()))
        else:  # members were converted to another memory order meanwhile
            for name, tensor in population.combined(row).items():
                tensors[name].copy_(tensor)
        torch.clear_autocast_cache()

    return MeanNetwork(network, fill, list(population), population=population, after=after)


@torch.no_grad()
def _fill_(targets: Mapping[str, Tensor], sources: Sequence[Mapping[str, Tensor]], row: Tensor) -> None:
    used = [(source, weight) for source, weight in zip(sources, row.tolist(), strict=True) if weight]
    for name, target in targets.items():
        dtype = accumulation_dtype(target.dtype)
        combine_block_(target, ((source[name].to(target.device, dtype), weight) for source, weight in used))


def _copied(make: Callable[[], T], model: nn.Module) -> T:
    try:
        return make()
    except (RuntimeError, AssertionError) as error:  # modules under fully_shard assert that nobody copies them
        raise SoupError(
            f"{type(model).__name__} cannot be copied ({error}): write its soup to a file with papa.save_soup"
        ) from error


def _averageable_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and layout.is_averageable(value)}


class Ensemble(nn.Module):
    """A module that runs all members and averages their outputs, at `p` times the cost of one network.

    Example:
        >>> ensemble = Ensemble([nn.Linear(4, 2) for _ in range(3)])
        >>> ensemble(torch.zeros(5, 4)).shape
        torch.Size([5, 2])

    Args:
        members: a population or modules; they are shared, not copied. Dropped members are left out. If several
            processes hold the population, all must call the ensemble with the same inputs, and its outputs carry no
            gradient.
        combine: maps the members' stacked outputs to one: `mean_logits` or `mean_probabilities`.
    """

    def __init__(self, members: Iterable[nn.Module], *, combine: Callable[[Tensor], Tensor] = mean_logits) -> None:
        super().__init__()
        self._gather: Callable[[list[Tensor]], list[Tensor]] | None = None
        if isinstance(members, Population):
            if members.size != len(members):
                self._gather = members.group.all_gather
            members = [net for member, net in zip(members.members, members, strict=True) if member in members.active]
        self.members = nn.ModuleList(members)
        self.combine = combine
        if not len(self.members) and self._gather is None:
            raise SoupError("an ensemble needs at least one network, got none")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The combined output of all members for the same inputs."""
        outputs = [member(*args, **kwargs) for member in self.members]
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise SoupError(f"an ensemble averages tensors, member {index} returned {type(output).__name__}")
        if self._gather is not None:
            outputs = self._gather([output.detach() for output in outputs])
        return self.combine(torch.stack(outputs))
