"""How two checkpoints differ."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from papa.analysis import Curve
from papa.errors import SoupError
from papa.files import EvaluationContext, diff_files


def save(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def test_every_tensor_is_compared_in_blocks(tmp_path: Path) -> None:
    a = {"w": torch.randn(900, 500), "v": torch.randn(20).bfloat16(), "same": torch.randn(4), "n": torch.tensor([1, 2])}
    b = {"w": torch.randn(900, 500), "v": torch.randn(20).bfloat16(), "same": a["same"], "n": torch.tensor([1, 5])}
    diff = diff_files(save(tmp_path, "a", **a), save(tmp_path, "b", **b))
    assert diff.num_equal == 1
    for found in diff.tensors:
        one, other = a[found.name].double().flatten(), b[found.name].double().flatten()
        assert found.numel == one.numel()
        assert found.distance == pytest.approx(float((one - other).norm()))
        assert found.relative == pytest.approx(float((one - other).norm() / one.norm()))
        assert found.cosine == pytest.approx(float(torch.cosine_similarity(one, other, dim=0)))
    assert [found.relative for found in diff.tensors] == sorted(
        (found.relative for found in diff.tensors), reverse=True
    )
    flat = [torch.cat([state[name].double().flatten() for name in ("w", "v", "same")]) for state in (a, b)]
    assert diff.total.distance == pytest.approx(float((flat[0] - flat[1]).norm()))
    assert diff.total.numel == 450_024
    assert diff.curve is None


def test_zeros_and_numbers_that_are_none_are_told(tmp_path: Path) -> None:
    a = save(tmp_path, "a", zero=torch.zeros(2), both=torch.zeros(2), bad=torch.ones(2), empty=torch.empty(0))
    b = save(
        tmp_path, "b", zero=torch.ones(2), both=torch.zeros(2), bad=torch.full((2,), math.nan), empty=torch.empty(0)
    )
    found = {tensor.name: tensor for tensor in diff_files(a, b).tensors}
    assert found["zero"].relative == math.inf
    assert math.isnan(found["zero"].cosine)
    assert (found["both"].relative, found["empty"].distance) == (0.0, 0.0)
    assert math.isnan(found["bad"].distance)
    assert {tensor.name for tensor in diff_files(a, b).tensors[:2]} == {"zero", "bad"}


def test_what_cannot_be_compared_is_listed(tmp_path: Path) -> None:
    a = save(tmp_path, "a", w=torch.zeros(2), gone=torch.zeros(1), shape=torch.zeros(2, 3))
    b = save(tmp_path, "b", w=torch.zeros(2), new=torch.zeros(1), shape=torch.zeros(3, 2))
    diff = diff_files(a, b)
    assert [tensor.name for tensor in diff.tensors] == ["w"]
    assert diff.unlike == (
        "no 'gone' float32 [1]",
        "an extra 'new' float32 [1]",
        "'shape' float32 [3, 2] instead of float32 [2, 3]",
    )
    with pytest.raises(SoupError, match="cannot be averaged with"):
        diff_files(a, b, evaluation_context=EvaluationContext(nn.Linear(2, 2), [torch.zeros(1, 2)]))


def test_the_curve_is_that_of_the_networks_between(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
    files = [save(tmp_path, str(index), **net.state_dict()) for index, net in enumerate(nets)]
    batches = [(torch.randn(30, 4), torch.arange(30) % 3)]
    evaluation_context = EvaluationContext(copy.deepcopy(nets[0]), batches)
    curve = diff_files(*files, evaluation_context=evaluation_context).curve
    assert curve is not None
    assert len(curve.losses) == 11
    for t, loss in zip(curve.coefficients, curve.losses, strict=True):
        between = copy.deepcopy(nets[0])
        with torch.no_grad():
            for target, one, other in zip(*(net.parameters() for net in (between, *nets)), strict=True):
                target.copy_((1 - t) * one + t * other)
        assert loss == pytest.approx(evaluation_context.evaluate(between).loss, rel=1e-4)
    assert diff_files(files[0], files[0], evaluation_context=evaluation_context).curve.in_one_basin  # type: ignore[union-attr]


def a_curve(*losses: float) -> Curve:
    return Curve(tuple(index / (len(losses) - 1) for index in range(len(losses))), (0.0,) * len(losses), losses)


@pytest.mark.parametrize(
    ("curve", "barrier", "in_one_basin"),
    [
        (a_curve(1.0, 1.5, 2.0), 0.0, True),
        (a_curve(1.0, 1.69, 2.0), 0.19, True),
        (a_curve(1.0, 1.75, 2.0), 0.25, False),
        (a_curve(1.0, 0.2, 2.0), 0.0, True),
        (a_curve(0.0, 0.009, 0.0), 0.009, True),
        (a_curve(0.0, 0.02, 0.0), 0.02, False),
        (a_curve(1.0, math.nan, 1.0), math.inf, False),
    ],
)
def test_one_basin_is_a_barrier_of_at_most_a_tenth(curve: Curve, barrier: float, in_one_basin: bool) -> None:
    assert curve.barrier == pytest.approx(barrier)
    assert curve.in_one_basin == in_one_basin


def test_a_curve_needs_losses(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    file = save(tmp_path, "a", **net.state_dict())
    with pytest.raises(SoupError, match="a curve needs a score that returns"):
        diff_files(file, file, evaluation_context=EvaluationContext(net, [torch.zeros(1, 2)], lambda _: 1.0))
