"""From many networks to one: average soups and greedy soups."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn

from papa import layout, mixing
from papa.errors import SoupError
from papa.group import Group, LocalGroup
from papa.population import Population

StateDict: TypeAlias = Mapping[str, Any]
Network = TypeVar("Network", nn.Module, dict[str, Any])
T = TypeVar("T")
Score: TypeAlias = Callable[[Any], Any]
Weights: TypeAlias = Sequence[float] | Tensor
After: TypeAlias = Callable[[Any, Tensor], object]
"""What is done to an average, given it and its row of weights, before anyone sees it."""


@overload
def average_soup(
    members: Population | Sequence[nn.Module], weights: Weights | None = None, *, after: After | None = None
) -> nn.Module: ...
@overload
def average_soup(
    members: Sequence[StateDict], weights: Weights | None = None, *, after: After | None = None
) -> dict[str, Any]: ...
def average_soup(members: Any, weights: Weights | None = None, *, after: After | None = None) -> Any:
    """One network: the (weighted) mean of all.

        soup = sum_j w_j member_j,   w_j = 1/p unless given

    Floating-point tensors are averaged in float32 or better and keep their dtype. What cannot be averaged (integer
    buffers, masks, non-persistent tables) is taken from the first member.

    Example:
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> soup = average_soup(nets)
        >>> state = average_soup([net.state_dict() for net in nets], weights=[0.5, 0.3, 0.2])

    Args:
        members: a population, modules of one architecture, or their state dicts.
        weights: one per member, non-negative and summing to 1.
        after: called with the average and its weights before it is handed back, for instance to repair it.

    Returns:
        A module of its own, or a state dict when given state dicts.
    """
    pot = pot_for(members, after)
    row = mixing.soup_row(pot.size, pot.active) if weights is None else _checked_weights(weights, pot.size)
    pot.fill_(row)
    _warn_of_nan(pot, row)
    return pot.network


def _warn_of_nan(pot: Pot, row: Tensor) -> None:
    """Say whose numbers have spoilt an average; it is handed back all the same, for nothing may be lost here."""
    if not _has_nan(pot.network):
        return
    here = zip(pot.group.members(len(pot.members_here)), pot.members_here, strict=True)
    sick = [member for member, network in here if row[member] > 0 and _has_nan(network)]
    whose = f"as member {', '.join(map(str, sick))} has" if sick else "as a member that another process holds may have"
    warnings.warn(
        f"the average soup has NaN, {whose}: leave it out by a weight of 0, or call averager.check_health() first",
        stacklevel=3,
    )


def _has_nan(network: Any) -> bool:
    """Whether a network or state dict has a number that is none; a sum that is one spares a look at each."""
    state = network.state_dict() if isinstance(network, nn.Module) else network
    found = [tensor for tensor in state.values() if isinstance(tensor, Tensor) and _is_number(tensor)]
    numbers = [tensor.float() if tensor.element_size() == 1 else tensor for tensor in found]  # float8 has no sum
    return any(bool(torch.isnan(one.sum())) and bool(torch.isnan(one).any()) for one in numbers)


@dataclass(frozen=True)
class Trial:
    """One candidate of a greedy soup."""

    members: tuple[int, ...]
    """The members averaged."""
    score: float
    """What the average scored."""
    kept: bool
    """Whether it became the soup."""


@dataclass(frozen=True)
class GreedySoup(Generic[Network]):
    """A greedy soup and how it came about."""

    network: Network
    """The soup: a module of its own, or a state dict when given state dicts."""
    members: tuple[int, ...]
    """Who went in, in the order they were added."""
    score: float
    """The soup's score."""
    member_scores: tuple[float, ...]
    """Each member's own score."""
    trials: tuple[Trial, ...]
    """Every candidate tried, in order."""


@overload
def greedy_soup(
    members: Population | Sequence[nn.Module], score: Score, *, after: After | None = None
) -> GreedySoup[nn.Module]: ...
@overload
def greedy_soup(
    members: Sequence[StateDict], score: Score, *, after: After | None = None
) -> GreedySoup[dict[str, Any]]: ...
def greedy_soup(members: Any, score: Score, *, after: After | None = None) -> Any:
    """One network: the mean of members that were added, best first, as long as the score did not fall.

    Algorithm 3 of the paper: sort by score; start from the best; add the next whenever the mean of the chosen and it
    scores at least as high. So the soup never scores below the best member. Whatever scores NaN is left out.

    Example:
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> soup = greedy_soup(nets, score=lambda net: net.bias.sum().item())
        >>> len(soup.member_scores), len(soup.trials)
        (3, 2)

    Args:
        members: a population, modules of one architecture, or their state dicts.
        score: takes a network (or state dict) and returns a number, higher is better; or `(score, loss)`, where the
            lower loss goes first among members of equal score.
        after: called with each average of several members and its weights before it is scored, for instance to repair
            it.

    Returns:
        The soup, who went in, and every score tried. One extra network is held in memory.
    """
    pot = pot_for(members, after)
    readings, order = pot.ranked(score)
    chosen, best = order[:1], readings[order[0]][0]
    trials = []
    for index in order[1:]:
        candidate = [*chosen, index]
        pot.fill_(mixing.soup_row(pot.size, candidate))
        result = pot.agreed(reading(score(pot.network))[0])
        kept = result >= best  # never where it is NaN
        trials.append(Trial(tuple(candidate), result, kept))
        if kept:
            chosen, best = candidate, result
    if len(chosen) == 1:
        pot.after = None  # a member by itself is no average, and is handed back as it was scored
    pot.fill_(mixing.soup_row(pot.size, chosen))
    return GreedySoup(pot.network, tuple(chosen), best, tuple(value for value, _ in readings), tuple(trials))


class Pot:
    """The network a soup is cooked in, and who may go into it.

    Args:
        network: the network.
        fill: makes it the mean that a row of weights says.
        members_here: those held by this process.
        size: of the whole population.
        group: the processes that hold it; None for this one alone.
        active: who was not dropped; None for all.
    """

    def __init__(
        self,
        network: Any,
        fill: Callable[[Tensor], None],
        members_here: Sequence[Any],
        *,
        size: int,
        group: Group | None = None,
        active: Sequence[int] | None = None,
    ) -> None:
        self.network = network
        self.size = size
        self.active = range(size) if active is None else active
        self.members_here = members_here
        self.group: Group = group if group is not None else LocalGroup()
        self.after: After | None = None
        self._fill = fill

    def fill_(self, row: Tensor) -> None:
        """Every tensor of the network becomes the mean that `row` says; a weight of 0 leaves a member out."""
        self._fill(row)
        if self.after is not None:
            self.after(self.network, row)

    def agreed(self, score: float) -> float:
        """One score for all processes, which may differ in the last digit and must choose alike."""
        return self.group.all_max(score)[0]

    def ranked(self, score: Score) -> tuple[list[tuple[float, float]], list[int]]:
        """Every member's score and loss, and the members that are active and did not score NaN, best first."""
        here = zip(self.group.members(len(self.members_here)), self.members_here, strict=True)
        values = self.group.all_gather([score(network) if member in self.active else None for member, network in here])
        readings = [
            reading(value) if index in self.active else (math.nan, math.nan) for index, value in enumerate(values)
        ]
        healthy = [index for index in self.active if not math.isnan(readings[index][0])]
        if not healthy:
            raise SoupError("every member scored NaN, expected numbers, higher is better: check the networks' outputs")
        return readings, sorted(healthy, key=lambda index: (-readings[index][0], readings[index][1], index))


def pot_for(members: Any, after: After | None = None) -> Pot:
    """The pot that a soup of a population, of modules or of state dicts is cooked in.

    Args:
        members: as for `average_soup`.
        after: as for `average_soup`.
    """
    pot = _pot_of(members)
    pot.after = after
    return pot


def _pot_of(members: Any) -> Pot:
    if isinstance(members, Population):
        return _population_pot(members)
    members = list(members)
    if not members:
        raise SoupError("a soup needs at least one network, got none")
    if all(isinstance(member, nn.Module) for member in members):
        names = [slot.name for slot in layout.plan(members, {}, apart=False).slots]
        network = _copied(lambda: copy.deepcopy(members[0]), members[0])
        sources = [layout.named_tensors(member, names) for member in members]
        return _list_pot(network, layout.named_tensors(network, names), sources, members)
    if all(isinstance(member, Mapping) for member in members):
        return _state_dict_pot(members)
    kinds = ", ".join(sorted({type(member).__name__ for member in members}))
    raise SoupError(f"a soup is made of a population, of modules or of state dicts, got {kinds}")


def _copied(make: Callable[[], T], model: nn.Module) -> T:
    try:
        return make()
    except (RuntimeError, AssertionError) as error:  # modules under fully_shard assert that nobody copies them
        raise SoupError(
            f"{type(model).__name__} cannot be copied ({error}): make a soup of the members' state dicts instead"
        ) from error


def _population_pot(population: Population) -> Pot:
    active = population.active
    index = next((index for index, member in enumerate(population.members) if member in active), 0)
    soup_buffer = _copied(lambda: population.soup_buffer(index), population[index])
    return Pot(
        soup_buffer.network,
        soup_buffer.fill_,
        list(population),
        size=population.size,
        group=population.group,
        active=active,
    )


def _list_pot(
    network: Any, target: dict[str, Tensor], sources: Sequence[Mapping[str, Tensor]], members: Sequence[Any]
) -> Pot:
    @torch.no_grad()
    def fill(row: Tensor) -> None:
        used = [(source, weight) for source, weight in zip(sources, row.tolist(), strict=True) if weight]
        for name, tensor in target.items():
            tensor.copy_(_weighted_sum(tensor, [(source[name], weight) for source, weight in used]))

    return Pot(network, fill, members, size=len(members))


def _weighted_sum(like: Tensor, parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    total = torch.zeros_like(like, dtype=like.dtype if like.element_size() >= 4 else torch.float32)
    for tensor, weight in parts:
        total.add_(tensor.to(device=like.device, dtype=total.dtype), alpha=weight)
    return total


def _state_dict_pot(states: list[StateDict]) -> Pot:
    _check_states(states)
    network = {key: copy.deepcopy(value) for key, value in states[0].items()}
    names = [key for key, value in network.items() if isinstance(value, Tensor) and _is_number(value)]
    sources = [{name: state[name] for name in names} for state in states]
    return _list_pot(network, {name: network[name] for name in names}, sources, states)


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_states(states: list[StateDict]) -> None:
    first = states[0]
    for index, state in enumerate(states[1:], start=1):
        missing, extra = first.keys() - state.keys(), state.keys() - first.keys()
        if missing or extra:
            listed = [f"no '{key}'" for key in sorted(missing)] + [f"an extra '{key}'" for key in sorted(extra)]
            raise SoupError(
                f"state dict {index} has {', '.join(listed[:10])}, compared with state dict 0: "
                "a soup needs networks of one architecture"
            )
        for key, value in first.items():
            kinds = [_is_number(one) for one in (state[key], value) if isinstance(one, Tensor)]
            if len(set(kinds)) > 1:
                raise SoupError(
                    f"state dict {index} has '{key}' as {state[key].dtype}, state dict 0 as {value.dtype}: only one of "
                    "them can be averaged"
                )
            found, expected = _shape_of(state[key]), _shape_of(value)
            if found != expected:
                raise SoupError(
                    f"state dict {index} has '{key}' of shape {found}, state dict 0 has {expected}: "
                    "a soup needs networks of one architecture"
                )


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """None for what is not a tensor."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _checked_weights(weights: Weights, size: int) -> Tensor:
    row = torch.as_tensor(weights, dtype=torch.float64)
    if row.shape != (size,):
        raise SoupError(f"weights have shape {tuple(row.shape)}, expected ({size},): one for each network")
    mixing.check_row(row, subject="the row of the soup's weights")
    return row / row.sum()


def reading(value: Any) -> tuple[float, float]:
    """A score and, for ties, a loss; whatever `score` returned."""
    score, loss = (value[0], value[1]) if isinstance(value, tuple) else (value, 0.0)
    score, loss = float(score), float(loss)
    return score, math.inf if math.isnan(loss) else loss
