"""Did averaging help? The soup against its members and their ensemble, example by example, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from papa.core.population import Population
from papa.core.rules import Rule
from papa.core.soups import average_soup
from papa.couplings.observation import Probe
from papa.errors import DataError
from papa.evaluation.classification import accuracy
from papa.evaluation.inputs import outputs_of
from papa.evaluation.scores import Evaluation, Loss, Metric, evaluate_together, evaluating, rereadable

Kind: TypeAlias = Literal["helps", "too far", "too close", "nothing to gain"]

NEARLY_ONE = 0.001
"""Members whose distance to the mean is below this share of its norm are nearly one network."""
ADVICE_FROM = 0.25
"""The share of training from which on scores lead to advice: members that start apart need time to come together."""
TOO_FAR = "the average is worse than its members: push more strongly"
TOO_CLOSE = "members are nearly one network: push less"
NUM_ERRORS = 2.0
"""A difference of more standard errors than this is not noise: a paired test at about 5%."""
NEGLIGIBLE = 0.01
"""A difference below this share of a member's loss is too small to matter, even where it is no noise."""


@dataclass(frozen=True)
class Difference:
    """A mean difference between losses of the same examples."""

    mean: float
    error: float
    """Its standard error."""
    sign: Literal[-1, 0, 1]
    """0 if the difference is within the noise of the examples, or negligible."""

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ({self.error:.1g})"


@dataclass(frozen=True)
class Verdict:
    """Whether the average soup is better than its members, and what to change."""

    kind: Kind
    advice: str
    """What to do, in a sentence."""
    num_examples: int
    member_loss: float
    """The mean loss of members. Losses of class probabilities are taken at the temperature that suits each network."""
    best_member_loss: float
    average_loss: float
    ensemble_loss: float
    gain: Difference
    """How much lower the soup's loss is than that of a member, on average."""
    ensemble_gain: Difference
    """The same of the ensemble."""
    spread: float
    """The members' root mean square distance to the mean, as a share of its norm."""

    def __str__(self) -> str:
        return (
            f"{self.advice}\n"
            f"The soup's loss is {self.average_loss:.4g}, below a member's by {self.gain}; the ensemble's is below it "
            f"by {self.ensemble_gain} ({self.num_examples:,} examples; standard errors). Members are {self.spread:.2%} "
            "of the weights' norm away from their mean."
        )

    def to_json(self) -> dict[str, Any]:
        """As in `result.json`."""
        return asdict(self)


def verdict(
    members: Sequence[Evaluation],
    average: Evaluation,
    ensemble: Evaluation,
    *,
    spread: float,
    rule: Rule | None = None,
    num_steps: int | None = None,
) -> Verdict:
    """Compare a soup with its members and their ensemble, all evaluated on the same examples with `keep_losses`.

    - The soup is better than a member: averaging helps.
    - It is not, and the ensemble is: members are too far apart for their average, so push more strongly.
    - Neither is: if the push is strong, members are nearly one network, so push less; otherwise their ensemble would
      gain nothing either.

    Better means that the mean difference of losses, paired by example, is above two standard errors and above 1% of
    a member's loss.
    """
    losses = [_losses(member) for member in members]
    mean = torch.stack(losses).mean(dim=0)
    gain, ensemble_gain = _difference(mean, _losses(average)), _difference(mean, _losses(ensemble))
    rule = None if rule is None else rule.for_length(num_steps)
    kind: Kind
    if gain.sign > 0:
        kind, advice = "helps", "It helps: the soup is better than its members. Keep the strength."
    elif gain.sign < 0 or ensemble_gain.sign > 0:
        kind, advice = "too far", "Members are too far apart for their average"
        if rule is None:
            advice += ": push more strongly."
        elif not rule.averages:
            advice += ": they were trained independently. Average them while they train."
        elif (stronger := rule.other_strength(1 / 3, num_steps)) is not None:
            advice += f": a stronger averaging, such as {stronger}, brings them together."
        else:
            advice += ", though they are averaged as often as can be: take one of them, or their ensemble."
    elif rule is None:
        kind, advice = "too close", "Members are nearly one network, or an ensemble gains nothing here: push less."
    elif (weaker := rule.other_strength(3.0, num_steps)) is not None:
        kind, advice = "too close", f"Members are nearly one network: a weaker averaging, such as {weaker}, keeps more."
    else:
        kind = "nothing to gain"
        advice = "An ensemble of these networks gains nothing either: more members will not help."
    return Verdict(
        kind=kind,
        advice=advice,
        num_examples=len(mean),
        member_loss=float(mean.mean()),
        best_member_loss=min(float(one.mean()) for one in losses),
        average_loss=float(_losses(average).mean()),
        ensemble_loss=float(_losses(ensemble).mean()),
        gain=gain,
        ensemble_gain=ensemble_gain,
        spread=spread,
    )


def _losses(evaluation: Evaluation) -> Tensor:
    if evaluation.losses is None:
        raise DataError("a verdict compares losses of single examples: evaluate with keep_losses=True")
    return evaluation.losses.double()


def _difference(first: Tensor, second: Tensor) -> Difference:
    differences = first - second
    mean = float(differences.mean())
    error = float(differences.std()) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    least = max(NUM_ERRORS * error, NEGLIGIBLE * abs(float(first.mean())))
    if not math.isfinite(mean):
        return Difference(mean, error, -1)
    return Difference(mean, error, 0 if abs(mean) <= least else 1 if mean > 0.0 else -1)


def advice_from_scores(
    members: Sequence[float], average: float, *, spread: float | None = None, higher_is_better: bool = True
) -> str | None:
    """What to do about the strength, from scores on the same data; None if nothing is wrong.

    Scores of few examples are noisy, so the average counts as worse only if it is worse than every member. The scores
    of dropped members are NaN; `spread` is that of `Diagnosis`, if it is known.

    Example:
        >>> advice_from_scores([91.0, 90.5], 72.0)
        'the average is worse than its members: push more strongly'
    """
    sign = 1.0 if higher_is_better else -1.0
    scores = [sign * score for score in members if not math.isnan(score)]
    if len(scores) < 2:
        return None
    if not sign * average >= min(scores):
        return TOO_FAR
    return TOO_CLOSE if spread is not None and spread < NEARLY_ONE else None


def loss_probe(batches: Sequence[Any] | Callable[[], Iterable[Any]], loss: Loss) -> Probe:
    """A function from a network to its mean loss on some batches, in evaluation mode and without gradients.

    Example:
        >>> batch = torch.randn(8, 4), torch.randint(2, (8,))
        >>> probe = loss_probe([batch], nn.functional.cross_entropy)
        >>> probe(nn.Linear(4, 2)) > 0
        True

    Args:
        batches: pairs of inputs and targets, or a function that gives them: the same ones for all networks of a step.
        loss: from outputs and targets to the mean loss.
    """

    def probe(network: nn.Module) -> float:
        found = batches() if callable(batches) else batches
        with evaluating(network), torch.no_grad():
            losses = [float(loss(outputs_of(network, inputs), targets)) for inputs, targets in found]
        if not losses:
            raise DataError("a loss needs at least one batch, got none")
        return fmean(losses)

    return probe


def diagnose(
    population: Population,
    batches: Iterable[Any],
    loss: Loss = nn.functional.cross_entropy,
    *,
    metric: Metric | None = None,
    rule: Rule | None = None,
    num_steps: int | None = None,
) -> Verdict:
    """Compare the average of a population with its members and their ensemble, and say what to do about the strength.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> batch = torch.randn(8, 4), torch.randint(2, (8,))
        >>> print(diagnose(population, [batch]))
        Members are ...

    If several processes hold the population, all must call it.

    Args:
        population: the members.
        batches: pairs of inputs and targets that members were not trained on. Differences are told from noise by their
            number: some hundred examples, better thousands.
        loss: from outputs and targets to the mean loss.
        metric: for the cross-entropy that of classification by default: losses are compared at the temperature
            that suits each network. For other losses the loss itself.
        rule: how members are averaged, for advice in terms of its options.
        num_steps: the number of optimizer steps of the whole training, likewise.
    """
    if isinstance(batches, tuple) and len(batches) == 2 and isinstance(batches[0], Tensor):
        batches = [batches]  # one batch
    batches, active = rereadable(batches), population.active
    if metric is None:
        metric = accuracy if loss is nn.functional.cross_entropy else loss
    options: dict[str, Any] = {"loss": loss, "metric": metric, "keep_losses": True}
    members, ensemble = evaluate_together(
        list(population), batches, gather=population.group.all_gather, ensemble_of=active, **options
    )
    average = average_soup(population)
    (found,), _ = evaluate_together([average], batches, **options)
    return verdict(
        [members[member] for member in active],
        found,
        ensemble,
        spread=spread_of(population.distances()[list(active)], average),
        rule=rule,
        num_steps=num_steps,
    )


def spread_of(distances: Tensor, mean: nn.Module) -> float:
    """The root mean square of the members' distances to the mean, as a share of the norm of the mean's parameters."""
    norm = math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in mean.parameters()))
    return float(distances.double().square().mean().sqrt()) / norm if norm else 0.0
