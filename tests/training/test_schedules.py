import math

import pytest
import torch

from papa.errors import ConfigError
from papa.training import schedules


def test_cosine_is_torchs_cosine_at_every_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-4)
    ours = schedules.cosine(minimum=1e-3)
    for step in range(51):
        assert math.isclose(0.1 * ours(step, 50), reference.get_last_lr()[0], rel_tol=1e-9)
        optimizer.step()
        reference.step()


def test_multistep_is_torchs_multistep_at_every_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[81, 122])
    ours = schedules.multistep([81 / 160, 122 / 160])
    for step in range(160):
        assert math.isclose(ours(step, 160), reference.get_last_lr()[0], rel_tol=1e-9)
        optimizer.step()
        reference.step()


def test_restarts_repeat_one_cosine_and_end_at_the_minimum() -> None:
    ours, once = schedules.cosine_restarts(4, minimum=0.01), schedules.cosine(minimum=0.01)
    for step in range(100):
        assert math.isclose(ours(step, 100), once(step % 25, 25))
    assert ours(100, 100) == 0.01


@pytest.mark.parametrize("strategy", ["linear", "cos"])
def test_going_over_to_a_level_is_torchs_swa_schedule_at_every_step(strategy: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    before = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[20])
    swa = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=10, anneal_strategy=strategy)
    ours = schedules.then_level(
        schedules.multistep([1 / 3]), start=0.5, level=0.5, anneal=1 / 6, linear=strategy == "linear"
    )
    for step in range(60):
        assert math.isclose(0.1 * ours(step, 60), optimizer.param_groups[0]["lr"], rel_tol=1e-9)
        optimizer.step()
        before.step() if step < 29 else swa.step()


def test_warm_up_rises_to_the_schedule_and_then_leaves_it_alone() -> None:
    plain, ours = schedules.cosine(), schedules.warm_up(schedules.cosine(), 0.1)
    shares = [ours(step, 100) for step in range(100)]
    assert shares[:9] == sorted(shares[:9])
    assert shares[0] < 0.11
    assert all(shares[step] == plain(step, 100) for step in range(10, 100))
    assert schedules.warm_up(plain, 0.0)(3, 100) == plain(3, 100)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.cosine(minimum=-0.1),
        lambda: schedules.multistep([1.5]),
        lambda: schedules.cosine_restarts(0),
        lambda: schedules.warm_up(schedules.constant(), 2.0),
    ],
)
def test_invalid_options_raise(make: object) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make()  # type: ignore[operator]
