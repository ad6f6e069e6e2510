"""Cross entropy and F1 over pixels, compared with slow loops; pixels without a class do not count."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from papa.errors import DataError
from papa.evaluation.scores import Counting, evaluate, evaluate_together
from papa.lab.augment.policy import Policy
from papa.lab.tasks.segmentation import F1, pixel_cross_entropy

NAMES = ("land", "water", "road")


def some_outputs(num_images: int = 2, height: int = 5, width: int = 4) -> Tensor:
    return torch.randn(num_images, len(NAMES), height, width)


def some_labels(num_images: int = 2, height: int = 5, width: int = 4) -> Tensor:
    labels = torch.randint(len(NAMES), (num_images, height, width), dtype=torch.uint8)
    return labels.where(torch.rand(labels.shape) > 0.3, 255)


def slow_loss(outputs: Tensor, shares: Tensor) -> float:
    """Pixel by pixel, class by class."""
    total, mass = 0.0, 0.0
    for image in range(outputs.shape[0]):
        for row in range(outputs.shape[2]):
            for column in range(outputs.shape[3]):
                scores = outputs[image, :, row, column].tolist()
                log_sum = math.log(sum(math.exp(score) for score in scores))
                for score, share in zip(scores, shares[image, :, row, column].tolist(), strict=True):
                    total -= share * (score - log_sum)
                    mass += share
    return total / mass


def as_shares(labels: Tensor) -> Tensor:
    return torch.stack([labels == label for label in range(len(NAMES))], dim=1).float()


def test_hard_loss_is_the_mean_over_pixels_that_have_a_class() -> None:
    outputs, labels = some_outputs(), some_labels()
    found = pixel_cross_entropy(outputs, labels)
    assert found.item() == pytest.approx(slow_loss(outputs, as_shares(labels)), rel=1e-5)
    assert pixel_cross_entropy(outputs, as_shares(labels)).item() == pytest.approx(found.item(), rel=1e-5)


def test_soft_loss_divides_by_the_mass_that_is_there() -> None:
    outputs = some_outputs()
    policy = Policy(mixup=0.4, smoothing=0.1)
    _, soft = policy.on_batch(
        torch.randn(2, 3, 5, 4), some_labels(), num_classes=3, generator=torch.Generator(), ignore=255
    )
    assert pixel_cross_entropy(outputs, soft).item() == pytest.approx(slow_loss(outputs, soft), rel=1e-5)


def test_what_is_said_of_pixels_without_a_class_changes_nothing() -> None:
    outputs, labels = some_outputs(), some_labels()
    other = outputs.where((labels != 255)[:, None], 100.0 * torch.randn_like(outputs))
    assert torch.equal(pixel_cross_entropy(outputs, labels), pixel_cross_entropy(other, labels))
    metric = F1(NAMES)
    assert torch.equal(metric.counts(outputs, labels), metric.counts(other, labels))
    outputs.requires_grad_()
    pixel_cross_entropy(outputs, labels).backward()
    assert outputs.grad is not None
    assert not outputs.grad.permute(0, 2, 3, 1)[labels == 255].any()


@pytest.mark.parametrize("targets", [torch.full((2, 5, 4), 255), torch.zeros(2, 3, 5, 4)])
def test_the_loss_of_no_pixel_is_0_and_has_a_gradient(targets: Tensor) -> None:
    outputs = some_outputs().requires_grad_()
    loss = pixel_cross_entropy(outputs, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_f1_is_scikit_learns_over_all_pixels_of_all_images() -> None:
    metric = F1(NAMES)
    batches = [(some_outputs(1, *size), some_labels(1, *size)) for size in ((5, 4), (9, 7), (1, 3))]
    counts = sum((metric.counts(outputs, labels) for outputs, labels in batches), torch.zeros(3, 3))
    predicted = torch.cat([outputs.argmax(1)[labels != 255] for outputs, labels in batches])
    labelled = torch.cat([labels[labels != 255] for _, labels in batches])
    expected = 100 * f1_score(labelled, predicted, average=None, labels=[0, 1, 2])
    details = metric.details(counts)
    assert [details[f"F1 {name}"] for name in NAMES] == pytest.approx(expected.tolist())
    assert details["accuracy"] == pytest.approx(100 * accuracy_score(labelled, predicted))
    assert details["average F1"] == metric.score(counts) == pytest.approx(expected.mean())


def test_a_class_that_is_nowhere_labelled_is_left_out_whatever_is_predicted() -> None:
    metric = F1(NAMES)
    labels = torch.tensor([[[0, 0, 1, 1]]])
    never = torch.tensor([[[[9.0, 9.0, 0.0, 0.0]], [[0.0, 0.0, 9.0, 9.0]], [[1.0, 1.0, 1.0, 1.0]]]])
    once = never.clone()
    once[0, 2, 0, 3] = 99.0
    perfect, missed = metric.details(metric.counts(never, labels)), metric.details(metric.counts(once, labels))
    assert perfect == {"accuracy": 100.0, "average F1": 100.0, "F1 land": 100.0, "F1 water": 100.0}
    assert missed.keys() == perfect.keys()
    assert missed["F1 water"] == pytest.approx(100 * 2 / 3)
    assert missed["average F1"] == pytest.approx((100 + 200 / 3) / 2)


def test_a_labelled_class_that_is_never_predicted_scores_0() -> None:
    metric = F1(NAMES)
    outputs = torch.tensor([[[[9.0, 9.0]], [[0.0, 0.0]], [[0.0, 0.0]]]])
    details = metric.details(metric.counts(outputs, torch.tensor([[[0, 2]]])))
    assert details["F1 road"] == 0.0
    assert details["average F1"] == pytest.approx(100 / 3)


def test_outputs_that_do_not_fit_raise() -> None:
    with pytest.raises(DataError, match=r"outputs of shape \(2, 3, 5, 4\) for targets of shape \(2, 4, 5\)"):
        F1(NAMES).counts(some_outputs(), torch.zeros(2, 4, 5))
    with pytest.raises(DataError, match="expected scores of 2 classes"):
        F1(NAMES[:2]).counts(some_outputs(), some_labels())
    with pytest.raises(DataError, match="no pixel has a class"):
        F1(NAMES).score(torch.zeros(3, 3))


class Scores(torch.nn.Module):
    """Scores of a pixel from its colours."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Conv2d(3, len(NAMES), 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images)


def test_evaluation_counts_over_all_batches_for_members_and_ensemble() -> None:
    metric = F1(NAMES)
    assert isinstance(metric, Counting)
    batches = [(torch.randn(1, 3, *size), some_labels(1, *size)) for size in ((5, 4), (9, 7))]
    networks = [Scores() for _ in range(3)]
    each, together = evaluate_together(networks, iter(batches), loss=pixel_cross_entropy, metric=metric)
    for network, found in zip(networks, each, strict=True):
        counts = sum(metric.counts(network(images), labels) for images, labels in batches)
        assert found.score == pytest.approx(metric.score(counts))
        assert found.details == pytest.approx(metric.details(counts))
        losses = [pixel_cross_entropy(network(images), labels).item() for images, labels in batches]
        assert found.loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    means = [torch.stack([network(images) for network in networks]).mean(0) for images, _ in batches]
    counts = sum(metric.counts(mean, labels) for mean, (_, labels) in zip(means, batches, strict=True))
    assert together.details == pytest.approx(metric.details(counts))
    assert evaluate(networks[0], batches, loss=pixel_cross_entropy, metric=metric) == each[0]
