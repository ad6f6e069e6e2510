"""Deriving symmetries: exact for every architecture, frozen where an operator is unknown."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from helpers import Attention
from papa.align import Symmetries, TensorAxis, UnitGroup, align_, permute_all_, symmetries, verify
from papa.align.derive import verified_groups
from papa.align.unit_groups import permute_axis_
from papa.errors import PapaError
from papa.lab import models


class UNet(nn.Module):
    """Down, up, and a concatenation across."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.last = nn.Conv2d(14, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        across = self.first(images)
        return self.last(torch.cat([across, self.up(self.down(across))], dim=1))


class Shared(nn.Module):
    """A layer that runs twice: its inputs and outputs are the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.twice, self.after = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.after(self.twice(self.twice(self.before(inputs)).relu()).relu())


class Gated(nn.Module):
    """One number for all channels, one spatial map, and a normalised vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.map = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images).relu()
        hidden = hidden * self.map(hidden).sigmoid() * self.scale
        return self.head(nn.functional.normalize(hidden.mean((2, 3)), dim=1))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 8, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.PixelShuffle(2),
        nn.Conv2d(2, 2, 1),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 2))


def vgg_without_batch_norm() -> nn.Module:
    features = torchvision.models.vgg.make_layers([8, "M", 16, "M", 16, 16, "M"])
    return nn.Sequential(features, nn.Flatten(), nn.Linear(16 * 16, 12), nn.ReLU(), nn.Linear(12, 4))


IMAGE = (1, 3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (2, 4), 2),
    "vgg": (lambda: models.VGG(16, width=8), IMAGE, 13),
    "vgg without BatchNorm": (vgg_without_batch_norm, IMAGE, 5),
    "resnet18": (lambda: models.resnet18(width=8), IMAGE, 12),
    "resnet20, option A": (lambda: models.resnet20(width=4), IMAGE, 12),
    "resnet50": (torchvision.models.resnet50, IMAGE, 37),
    "unet": (UNet, (1, 3, 8, 8), 3),
    "unet of the recipes": (lambda: models.UNet(width=4), (1, 3, 16, 16), 22),
    "densenet121": (torchvision.models.densenet121, IMAGE, 120),
    "resnext50": (torchvision.models.resnext50_32x4d, IMAGE, 21),
    "efficientnet_v2_s": (torchvision.models.efficientnet_v2_s, IMAGE, 75),
    "convnext_tiny": (torchvision.models.convnext_tiny, IMAGE, 22),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32), IMAGE, 25),
    "eva02_tiny": (lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28, num_classes=5), (1, 3, 28, 28), 25),
    "convit_tiny": (lambda: timm.create_model("convit_tiny", img_size=32), IMAGE, 25),
    "multi-head attention": (Attention, (2, 5, 6), 3),
    "grouped": (grouped, (1, 3, 10, 10), 1),
    "shared": (Shared, (2, 4), 1),
    "gated": (Gated, (1, 3, 6, 6), 1),
}
"""The function that builds it, the shape of its inputs, and the number of groups that are not inside blocks."""


def randomised(model: nn.Module) -> nn.Module:
    """A float64 copy with random weights, in which no structure hides an error."""
    twin = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_var"):
                tensor.mul_(1 + 0.5 * noise.tanh())
            elif isinstance(tensor, nn.Parameter) or name.endswith("running_mean"):
                tensor.add_(noise * (0.02 + 0.2 * tensor.square().mean().sqrt()))
    return twin


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_permuting_every_group_keeps_outputs_and_omitting_one_tensor_does_not(name: str) -> None:
    build, shape, num_groups = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    found = symmetries(model, torch.randn(shape))
    assert sum(not group.is_inner for group in found) == num_groups

    twin, inputs = randomised(model), torch.randn(shape, dtype=torch.float64)
    expected = twin(inputs)
    permute_all_(twin, found, {group.name: torch.randperm(group.size) for group in found})
    assert relative_error(twin(inputs), expected) < 1e-9

    several = [group for group in found if len(group.axes) > 1]
    tensors = dict((*twin.named_parameters(), *twin.named_buffers()))
    for group in (several[0], several[len(several) // 2]):
        kept = tensors[group.axes[-1].tensor].clone()
        permute_axis_(tensors[group.axes[-1].tensor], group.axes[-1], torch.arange(group.size).roll(1))
        assert relative_error(twin(inputs), expected) > 1e-9
        tensors[group.axes[-1].tensor].copy_(kept)


def test_running_statistics_are_permuted_with_their_channel() -> None:
    (first, _) = symmetries(mlp(), torch.randn(2, 4))
    assert {(axis.tensor, axis.dim) for axis in first.axes} == {
        ("0.weight", 0),
        ("0.bias", 0),
        ("1.weight", 0),
        ("1.bias", 0),
        ("1.running_mean", 0),
        ("1.running_var", 0),
        ("3.weight", 1),
    }


def test_attention_heads_are_blocks_with_groups_inside() -> None:
    found = symmetries(Attention(), torch.randn(2, 5, 6))
    assert sorted(group.size for group in found if not group.is_inner) == [4, 16, 16]
    inner = [group.size for group in found if group.is_inner]
    assert inner == [4] * 8  # query-key pairs and values of four heads


def test_units_with_different_constants_are_not_exchangeable() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(3, 6), nn.Linear(6, 2)
            self.register_buffer("table", torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 3.0]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.after(self.before(inputs).relu() * self.table)

    assert sorted(group.size for group in symmetries(Positions(), torch.randn(2, 3))) == [2, 3]


def test_an_unsupported_operator_freezes_what_it_touches_and_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.three(self.two(self.one(inputs).cumsum(1)).relu())

    with pytest.warns(UserWarning, match="operator cumsum is not supported"):
        (group,) = symmetries(Odd(), torch.randn(2, 3))
    assert group.name == "two.weight"


def test_units_with_different_nonlinearities_are_not_exchangeable() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            first, second = self.before(inputs).split([3, 5], dim=1)
            return self.after(torch.cat([first.relu(), second.tanh()], dim=1))

    assert sorted(group.size for group in symmetries(Halves(), torch.randn(2, 3))) == [3, 5]


def test_inputs_and_outputs_stay_in_place() -> None:
    assert len(symmetries(nn.Linear(4, 4), torch.randn(2, 4))) == 0


def test_a_wrong_group_is_dropped_and_named() -> None:
    model = mlp().eval()
    right = symmetries(model, torch.randn(2, 4))
    wrong = UnitGroup("wrong", 2, (TensorAxis("0.weight", 1, torch.tensor([[0], [1]])),))
    with pytest.warns(UserWarning, match="2 units at 'wrong' changes the network's outputs"):
        kept = verified_groups(model, torch.randn(2, 4), (wrong, *right))
    assert kept == right.groups


def test_a_diverged_network_has_the_same_symmetries() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    assert [group.size for group in symmetries(model, torch.randn(2, 4))] == [8, 6]


def test_the_network_is_unchanged() -> None:
    model = mlp().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    symmetries(model, torch.zeros(2, 4))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_network_that_cannot_be_exported_says_why() -> None:
    class Branching(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    line = r"because of test_symmetries.py:\d+, `return inputs if inputs.sum\(\) > 0 else -inputs`"
    with pytest.raises(PapaError, match=rf"Branching cannot be exported {line} .* Write its groups by hand"):
        symmetries(Branching(), torch.randn(2, 3))


class Unexportable(nn.Module):
    """Two layers, and a branch on the data that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.before(inputs).relu()
        return self.after(hidden if hidden.sum() > 0 else hidden + 0.0)


def group_of(*axes: tuple[str, int], name: str = "hidden", size: int = 6) -> UnitGroup:
    return UnitGroup(name, size, tuple(TensorAxis(tensor, dim, torch.arange(size)[:, None]) for tensor, dim in axes))


RIGHT = group_of(("before.weight", 0), ("before.bias", 0), ("after.weight", 1))


def test_groups_written_by_hand_are_verified_and_align_a_network_that_cannot_be_exported() -> None:
    torch.manual_seed(0)
    reference, model, inputs = Unexportable(), Unexportable(), torch.randn(3, 4)
    wrong = group_of(("before.weight", 0), ("after.weight", 1), name="no bias")
    with pytest.warns(UserWarning, match="6 units at 'no bias' changes the network's outputs"):
        found = verify(model, Symmetries((RIGHT, wrong)), inputs)
    assert [group.name for group in found] == ["hidden"]
    expected = model(inputs)
    alignment = align_(model, reference, symmetries=found)
    assert alignment.after > alignment.before
    assert torch.allclose(model(inputs), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((group_of(("first.weight", 0)),), "the network has no 'first.weight'"),
        ((group_of(("before.weight", 0), size=7),), r"'before.weight' of shape \(6, 4\), expected more than 6"),
        ((RIGHT, RIGHT), "two groups named 'hidden'"),
        ((UnitGroup("odd", 5, RIGHT.axes),), r"group 'odd' has indices of shape \(6, 1\) at 'before.weight'"),
        ((UnitGroup("odd", 2, (TensorAxis("before.bias", 0, torch.zeros(2, 1).long()),)),), "none of them twice"),
    ],
)
def test_invalid_groups_written_by_hand_are_refused(groups: tuple[UnitGroup, ...], message: str) -> None:
    with pytest.raises(PapaError, match=message):
        verify(Unexportable(), Symmetries(groups), torch.randn(3, 4))


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(PapaError, match="no group 'heat'"):
        Symmetries(())["heat"]


def test_symmetries_print_one_line_per_group() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    assert str(symmetries(net, torch.randn(3, 4))).splitlines() == [
        "0.weight: 8 units in 0.weight (dim 0), 0.bias (dim 0), 2.weight (dim 1)",
        "2.weight: 6 units in 2.weight (dim 0), 2.bias (dim 0), 4.weight (dim 1)",
    ]


class Positions(nn.Module):
    """A table of positions with more rows than there are words."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start
        self.words, self.head = nn.Linear(5, 16), nn.Linear(16, 3)
        self.positions = nn.Parameter(torch.randn(1, 12, 16))

    def forward(self, inputs: Tensor) -> Tensor:
        end = self.start + inputs.shape[1]
        outputs: Tensor = self.head((self.words(inputs) + self.positions[:, self.start : end]).relu().mean(dim=1))
        return outputs


@pytest.mark.parametrize("start", [0, 2, 5])
def test_rows_that_are_not_used_are_permuted_with_the_others(start: int) -> None:
    (group,) = symmetries(Positions(start), torch.randn(2, 7, 5))
    assert {(axis.tensor, axis.dim) for axis in group.axes} == {
        ("words.weight", 0),
        ("words.bias", 0),
        ("head.weight", 1),
        ("positions", 2),
    }
