"""Natural selection, for the paper's ablations of ESGD's parts: rules that use members' scores, and mutations.

The paper finds that each of them does harm: members that are not chosen drift away from the others, until they can no
longer be averaged with them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn

from papa.core import layout, mixing
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.core.soups import After
from papa.errors import MixingError
from papa.repair import repair_toward_members
from papa.streams import stream
from papa.training import Training
from papa.training.outcome import greedy_soup_of


@dataclass(frozen=True, eq=False)
class MergeGreedy(Rule):
    """Replace every member by the mean of some chosen members, such as those of the greedy soup.

    Example:
        >>> from papa import greedy_soup
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> def choose():
        ...     return greedy_soup(population, score=lambda net: net.bias.sum().item()).members
        >>> rule = MergeGreedy(choose, every_steps=100)
    """

    choose: Callable[[], Sequence[int]]

    def matrix(self, context: AveragingContext) -> Tensor:
        chosen = list(self.choose())
        if not chosen or not all(0 <= member < context.size for member in chosen):
            raise MixingError(f"MergeGreedy got members {chosen}, expected at least one of 0 to {context.size - 1}")
        return mixing.soup_row(context.size, chosen).expand(context.size, context.size).clone()


@dataclass(frozen=True, eq=False)
class MergeTournament(Rule):
    """PAPA-2 with tournament selection: parents are drawn with probability proportional to `1/loss`."""

    losses: Callable[[], Sequence[float]]
    _: KW_ONLY
    seed: int = 0

    def matrix(self, context: AveragingContext) -> Tensor:
        chances = mixing.fitness(self.losses())
        generator = stream(self.seed, "merge", position=context.step)
        return mixing.merge_pairs(context.size, generator, chances=chances)


@dataclass(frozen=True, eq=False)
class MergeElite(Rule):
    """PAPA-2 with elitist selection: many children are made, and a few of them and their parents survive.

    With `p` members and `c` children for each, the candidates are the `cp` children and their `p` parents. The best
    `elite * p` of them by validation loss survive; the others are drawn at random from the rest. A parent that survives
    keeps its place. In a tournament, parents of children are drawn with probability proportional to `1/loss`.

    `losses` maps rows of weights (one for each candidate) and the candidates' numbers to their validation losses.
    Numbers below `cp` are children; number `cp + i` is parent `i`. `survivors` is called before the members are mixed,
    with the number of the child that each member becomes; None for a parent that survives.
    """

    losses: Callable[[Tensor, Sequence[int]], Sequence[float]]
    survivors: Callable[[Sequence[int | None]], object] | None = None
    _: KW_ONLY
    tournament: bool = True
    children_per_member: int = 6
    elite: float = 0.6
    seed: int = 0

    def matrix(self, context: AveragingContext) -> Tensor:
        size, num_children = context.size, context.size * self.children_per_member
        generator = stream(self.seed, "merge", position=context.step)
        parents = mixing.identity(size)
        parent_losses = list(self.losses(parents, range(num_children, num_children + size)))
        chances = mixing.fitness(parent_losses) if self.tournament else None
        children = mixing.merge_pairs(size, generator, num_children=num_children, chances=chances)
        losses = [*self.losses(children, range(num_children)), *parent_losses]
        chosen = _in_place(_survivors(losses, size, round(self.elite * size), generator), num_children)
        if self.survivors is not None:
            self.survivors([candidate if candidate < num_children else None for candidate in chosen])
        return torch.cat([children, parents])[chosen]


def _survivors(losses: Sequence[float], size: int, num_elite: int, generator: torch.Generator) -> list[int]:
    """The best candidates, and others drawn from the rest; NaN is the worst loss."""
    values = torch.tensor(losses, dtype=torch.float64).nan_to_num(nan=torch.inf)
    order = torch.argsort(values, stable=True)
    rest = order[num_elite:]
    lucky = rest[torch.randperm(len(rest), generator=generator)[: size - num_elite]]
    return [*order[:num_elite].tolist(), *lucky.tolist()]


def _in_place(survivors: Sequence[int], num_children: int) -> list[int]:
    """The survivors in an order that leaves parents where they were."""
    stay = {candidate - num_children: candidate for candidate in survivors if candidate >= num_children}
    children = iter([candidate for candidate in survivors if candidate < num_children])
    return [stay[member] if member in stay else next(children) for member in range(len(survivors))]


@dataclass(eq=False)
class Mutation:
    """A merge hook that adds noise to the members' parameters; passed to an `Averager` as `merge_hooks`.

        w <- w + N(0, (scale/g)^2),   g = 1, 2, ... the generation

    Example:
        >>> from papa import Averager, MergeAll
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> averager = Averager(population, MergeAll(every_steps=1), merge_hooks=Mutation(seed=1))
        >>> _ = averager.step()
        >>> bool(population.distances().min() > 0)
        True

    Pushes are frequent: with `every_steps`, only the first averaging in this number of steps is followed by noise. The
    paper's scale is 0.01.
    """

    scale: float = 0.01
    seed: int = 0
    every_steps: int | None = None
    keys: dict[int, int | None] = field(default_factory=dict, init=False)
    """The noise that each member gets next: the number of a stream, None for no noise; by default the member's own."""

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Mutate members after they were averaged."""
        yield
        keys, self.keys = self.keys, {}
        if self.every_steps is not None and not context.is_first_since(self.every_steps):
            return
        generation = context.generation if self.every_steps is None else context.step // self.every_steps
        for member, model in zip(population.members, population, strict=True):
            key = keys.get(member, member)
            if key is not None:
                self.mutate_(model, key, step=context.step, generation=generation)

    @torch.no_grad()
    def mutate_(self, model: nn.Module, key: int, *, step: int, generation: int) -> None:
        """Add the noise of a key at a step."""
        generator = stream(self.seed, "mutate", key, step)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.add_(noise.to(parameter), alpha=self.scale / generation)


class CandidateScorer:
    """Scores members and candidates on a training's validation data, for the rules of `papa.lab.selection`.

    With REPAIR, children are scored after REPAIR on data without augmentation; with mutation, with the noise they
    would get.
    """

    def __init__(self, training: Training, mutation: Mutation | None = None) -> None:
        self.training, self.mutation = training, mutation
        self.repairs = training.batches.num_repair_batches > 0
        self._buffer: nn.Module | None = None
        self._repair: tuple[int, After | None] = (-1, None)

    def losses(self) -> list[float]:
        members, _ = self.training.evaluate_population(self.training.data.validation)
        return [member.loss for member in members]

    def greedy_members(self) -> tuple[int, ...]:
        """The members of the greedy soup now."""
        return greedy_soup_of(self.training).members

    def candidate_losses(self, rows: Tensor, candidates: Sequence[int]) -> list[float]:
        """The losses of the networks that rows of weights would make; each process scores its share."""
        population, group = self.training.population, self.training.group
        mine, losses = group.local_range(len(rows)), []
        repair = self._repair_now() if self.repairs else None
        for number, (row, candidate) in enumerate(zip(rows, candidates, strict=True)):
            tensors = population.combined(row)
            if number in mine:
                network = self._make_child(tensors, row, candidate, repair)
                losses.append(self.training.score(network).loss)
        return group.all_gather(losses)

    def survivors(self, children: Sequence[int | None]) -> None:
        """Give each member the noise of the child it becomes; parents that survive get none."""
        if self.mutation is not None:
            self.mutation.keys = dict(enumerate(children))

    def _repair_now(self) -> After | None:
        """Repairs a child toward its parents; every member's statistics are computed once per averaging."""
        now, training = self.training.averager.num_steps_taken, self.training
        if self._repair[0] != now:
            members, scope = range(training.population.size), training.settings.averaging.repaired_layers
            batches = training.batches.plain_repair()
            self._repair = now, repair_toward_members(training.population, members, batches, scope=scope)
        return self._repair[1]

    @torch.no_grad()
    def _make_child(self, tensors: dict[str, Tensor], row: Tensor, candidate: int, repair: After | None) -> nn.Module:
        if self._buffer is None:
            self._buffer = copy.deepcopy(self.training.population[0])
        for name, tensor in layout.named_tensors(self._buffer, tensors).items():
            tensor.copy_(tensors[name])
        is_child = int((row != 0).sum()) > 1
        if is_child and repair is not None:
            repair(self._buffer, row)
        if is_child and self.mutation is not None:
            averager = self.training.averager
            self.mutation.mutate_(
                self._buffer, candidate, step=averager.num_steps_taken, generation=averager.num_averagings + 1
            )
        return self._buffer
