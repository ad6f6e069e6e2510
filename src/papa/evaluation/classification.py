"""How good class probabilities are: accuracy, negative log-likelihood, Brier score, calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from papa.errors import DataError

TEMPERATURES = 2.0 ** torch.arange(-2.0, 2.2, 0.2, dtype=torch.float64, device="cpu")
"""Those among which `temperature` is searched."""


@dataclass(frozen=True)
class Classification:
    """A metric of class probabilities. The score is the accuracy in percent; the details are, over all examples,

    - `nll`: the mean negative log-likelihood of the target class,
    - `brier`: the mean squared distance between the probabilities and the target, from 0 to 2,
    - `ece`: the calibration error, the mean difference between confidence and accuracy, by bins of confidence,
    - `temperature`: the number that outputs must be divided by for the smallest `nll`. Above 1 the network is too sure.

    Example:
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> metric = Classification()
        >>> counts = metric.counts(outputs, targets)
        >>> round(metric.score(counts), 1), {name: round(value, 2) for name, value in metric.details(counts).items()}
        (66.7, {'nll': 0.58, 'brier': 0.41, 'ece': 0.19, 'temperature': 1.33})
    """

    num_bins: int = 15
    """Bins of confidence, of equal width."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The percentage of examples for which the target class has the highest output."""
        _check(outputs, targets)
        return (outputs.argmax(dim=1) == targets).double().mean() * 100.0

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sums over the examples of a batch: their number, Brier scores, bins, and losses at each temperature."""
        _check(outputs, targets)
        logits, targets = outputs.movedim(1, -1).flatten(0, -2).float(), targets.flatten()
        probabilities = logits.softmax(dim=1)
        confidences, classes = probabilities.max(dim=1)
        brier = (probabilities - F.one_hot(targets, logits.shape[1])).square().sum()
        bins = (confidences * self.num_bins).long().clamp(0, self.num_bins - 1)  # NaN too
        per_bin = torch.zeros(3, self.num_bins, dtype=torch.float64, device=outputs.device)
        for row, values in zip(per_bin, (torch.ones_like(confidences), confidences, classes == targets), strict=True):
            row.index_add_(0, bins, values.double())
        losses = self.losses(logits, targets).sum(dim=0, dtype=torch.float64)
        return torch.cat([brier.double()[None], per_bin.flatten(), losses])

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood of each target at each temperature, `(targets, temperatures)`."""
        logits, targets = outputs.movedim(1, -1).flatten(0, -2).float(), targets.flatten()
        return torch.stack(
            [F.cross_entropy(logits / float(one), targets, reduction="none") for one in TEMPERATURES], dim=1
        )

    def score(self, counts: Tensor) -> float:
        """The accuracy in percent."""
        (total, _, correct), _ = self._parts(counts)
        return float(correct.sum() / total.sum() * 100.0)

    def details(self, counts: Tensor) -> dict[str, float]:
        """The other scores by name."""
        (total, confidence, correct), losses = self._parts(counts)
        num = total.sum()
        best = int(losses.argmin())
        logarithm = TEMPERATURES[best].log2()
        if 0 < best < len(losses) - 1:  # the minimum of the parabola through three points
            before, middle, after = (losses[best + step] for step in (-1, 0, 1))
            logarithm = logarithm + 0.2 * 0.5 * (before - after) / (before - 2.0 * middle + after).clamp(min=1e-12)
        return {
            "nll": float(losses[TEMPERATURES == 1.0] / num),
            "brier": float(counts[0] / num),
            "ece": float((confidence - correct).abs().sum() / num),
            "temperature": float(2.0**logarithm),
        }

    def _parts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        counts = counts.cpu()
        return counts[1 : 1 + 3 * self.num_bins].view(3, -1), counts[1 + 3 * self.num_bins :]


def _check(outputs: Tensor, targets: Tensor) -> None:
    is_integer = not (targets.is_floating_point() or targets.is_complex())
    if outputs.dim() < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape or not is_integer:
        raise DataError(
            f"accuracy got outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}, "
            f"{targets.dtype}; expected a score for each class and a class for each example: pass your own metric for "
            "other tasks"
        )


accuracy = Classification()
"""The default metric."""
