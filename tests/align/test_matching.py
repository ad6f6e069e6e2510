"""Matching two networks: what every criterion must do, and what each refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from align_networks import NETWORKS, mlp, noisy_, random_permutations, same
from helpers import Attention
from papa import Population
from papa.align import Symmetries, TensorAxis, UnitGroup, align_, inverse, permute_all_, symmetries
from papa.align.matching import CRITERIA, checked_inputs, sinkhorn
from papa.errors import DataError, MemberError, PapaError

Case = tuple[nn.Module, Symmetries, list[Tensor]]


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    build, shape = NETWORKS[request.param]
    batches = [torch.randn(shape) for _ in range(3)]
    model = noisy_(build(), 0.05).eval()
    return model, symmetries(model, batches[0]), batches


@pytest.mark.parametrize("by", CRITERIA)
def test_a_network_is_aligned_with_itself_without_permutations(case: Case, by: str) -> None:
    model, found, batches = case
    twin = copy.deepcopy(model)
    alignment = align_(twin, model, batches, by=by, symmetries=found)
    assert same(twin, model)
    assert alignment.before == alignment.after
    assert by == "activations" or alignment.after == pytest.approx(1.0)
    assert all(torch.equal(order, torch.arange(len(order))) for order in alignment.permutations.values())


@pytest.mark.parametrize("by", CRITERIA)
def test_random_permutations_are_recovered(case: Case, by: str) -> None:
    torch.manual_seed(1)
    model, found, batches = case
    twin = copy.deepcopy(model)
    permute_all_(twin, found, random_permutations(found))
    noisy_(twin, 1e-3)
    assert not same(twin, model, tolerance=0.01)
    alignment = align_(twin, model, [(batch, None) for batch in batches], by=by, symmetries=found)
    assert same(twin, model, tolerance=0.01)
    assert alignment.before < alignment.after


@pytest.mark.parametrize("by", CRITERIA)
@torch.no_grad()
def test_similarity_never_decreases_the_function_is_kept_and_it_can_be_undone(case: Case, by: str) -> None:
    torch.manual_seed(2)
    model, found, batches = case
    other = copy.deepcopy(model).double()
    for tensor in other.parameters():
        tensor.copy_(torch.randn_like(tensor) * (tensor.std() if tensor.numel() > 1 else 1.0))
    inputs, kept = batches[0].double(), copy.deepcopy(other)
    double = [batch.double() for batch in batches]
    alignment = align_(other, copy.deepcopy(model).double(), double, by=by, symmetries=found)
    assert alignment.after >= alignment.before
    expected = kept(inputs)
    assert (other(inputs) - expected).abs().max() < 1e-9 * expected.abs().max()
    undo = {name: inverse(order) for name, order in reversed(alignment.permutations.items())}
    permute_all_(other, found, undo)
    assert same(other, kept)


@pytest.mark.parametrize("by", CRITERIA)
def test_the_default_device_does_not_matter(by: str) -> None:
    """Numbers on the device `meta` cannot be read: none of those that are computed with may lie there."""
    torch.manual_seed(3)
    model, reference, inputs = Attention(), Attention(), torch.randn(NETWORKS["attention"][1])
    twin = copy.deepcopy(model)
    expected = align_(twin, reference, [inputs], by=by)
    with torch.device("meta"):
        found = align_(model, reference, [inputs], by=by)
    assert found.after == expected.after
    assert same(model, twin)


def weight_similarity(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs]
    return sum(cosines[:3]) / 3  # the last bias has no hidden unit


def activation_similarity(model: nn.Sequential, reference: nn.Sequential, inputs: Tensor) -> float:
    total = 0.0
    for depth in (1, 2):
        theirs, mine = (net[:depth](inputs).T for net in (reference, model))
        total += torch.corrcoef(torch.cat([theirs, mine]))[:5, 5:].diagonal().sum().item()
    return total / 10


@pytest.mark.parametrize("by", CRITERIA)
@torch.no_grad()
def test_one_hidden_layer_gets_the_best_of_all_permutations(by: str) -> None:
    torch.manual_seed(1)
    model, reference = mlp(4, 5, 2).double(), mlp(4, 5, 2).double()
    batches = [torch.randn(9, 4, dtype=torch.float64) for _ in range(3)]
    (group,) = symmetries(model, batches[0])

    def similarity(order: tuple[int, ...]) -> float:
        twin = copy.deepcopy(model)
        permute_all_(twin, Symmetries((group,)), {group.name: order})
        if by == "activations":
            return activation_similarity(twin, reference, torch.cat(batches))
        return weight_similarity(twin, reference)

    best = max(similarity(order) for order in itertools.permutations(range(5)))
    assert align_(model, reference, batches, by=by).after == pytest.approx(best, abs=1e-9)
    assert similarity((0, 1, 2, 3, 4)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_soft_permutations_are_doubly_stochastic_and_harden_as_they_cool(temperature: float) -> None:
    torch.manual_seed(0)
    gain = torch.randn(2, 6, 6, dtype=torch.float64)
    matrices = sinkhorn(gain / temperature)
    assert torch.allclose(matrices.sum(-1), torch.ones(2, 6, dtype=torch.float64), atol=0.02)
    assert torch.allclose(matrices.sum(-2), torch.ones(2, 6, dtype=torch.float64))
    colder = sinkhorn(gain / (temperature / 2))
    assert (colder * gain).sum() > (matrices * gain).sum()


def test_activations_are_the_default_for_batches_and_weights_for_an_example() -> None:
    torch.manual_seed(0)
    model, reference, batch = mlp(), mlp(), torch.randn(16, 5)
    results = [
        align_(copy.deepcopy(model), reference, batches, by=by).after
        for batches, by in (([batch], None), ([batch], "activations"), (batch, None), (batch, "weights"))
    ]
    assert results[0] == results[1] != results[2] == results[3]


def test_members_of_a_population_stay_in_its_matrix() -> None:
    population = Population([mlp(4, 8, 2) for _ in range(2)])
    pointers = [tensor.data_ptr() for tensor in population[1].parameters()]
    align_(population[1], population[0], torch.randn(2, 4))
    assert [tensor.data_ptr() for tensor in population[1].parameters()] == pointers


def test_empty_symmetries_change_nothing() -> None:
    model, reference = mlp(), mlp()
    before = copy.deepcopy(model)
    assert align_(model, reference, symmetries=Symmetries(())).permutations == {}
    assert same(model, before)


class Refusals:
    """Networks that must be unchanged after an error."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.reference = mlp(4, 8, 2), mlp(4, 8, 2)
        self.before = copy.deepcopy(self.model)


@pytest.fixture
def nets() -> Refusals:
    return Refusals()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "given no batches"),
        ([torch.ones(4, 4), torch.ones(5, 4)], r"batch 1 has inputs of \(5, 4\), expected \(4, 4\) as batch 0"),
        ([*torch.ones(8, 4).split([4, 3, 1])], r"batch 1 has inputs of \(3, 4\), expected \(4, 4\) as batch 0"),
        ([torch.ones(0, 4)], r"batch 0 has inputs of \(0, 4\)"),
        (["text"], "batch 0 has a str as inputs, expected a tensor"),
        ([torch.full((4, 4), float("nan"))], "batch 0 has inputs that are not finite"),
    ],
)
def test_bad_batches_are_refused(nets: Refusals, batches: list[Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        align_(nets.model, nets.reference, batches)
    assert same(nets.model, nets.before)


def test_batches_of_another_shape_than_the_symmetries_are_refused(nets: Refusals) -> None:
    found = symmetries(nets.model, torch.randn(2, 4))
    with pytest.raises(DataError, match=r"shape \(3, 4\), but the symmetries were derived .* shape \(2, 4\)"):
        align_(nets.model, nets.reference, [torch.randn(3, 4)], symmetries=found)
    assert same(nets.model, nets.before)


@pytest.mark.parametrize("by", CRITERIA)
def test_weights_that_are_not_finite_are_refused(nets: Refusals, by: str) -> None:
    with torch.no_grad():
        nets.reference[0].weight[0, 0] = float("nan")
    with pytest.raises(MemberError, match=r"the reference has '0.weight' with values that are not finite"):
        align_(nets.model, nets.reference, [torch.randn(2, 4)], by=by)
    assert same(nets.model, nets.before)


def test_activations_that_are_not_finite_are_refused(nets: Refusals) -> None:
    with torch.no_grad():
        nets.reference[0].weight.fill_(1e30)
    with pytest.raises(MemberError, match=r"the reference has activations that are not finite at 'linear'"):
        align_(nets.model, nets.reference, [torch.full((2, 4), 1e30)])
    assert same(nets.model, nets.before)


def test_networks_that_differ_are_refused(nets: Refusals) -> None:
    with pytest.raises(MemberError, match=r"the model has '0.weight' of shape \(8, 4\), the reference has \(6, 4\)"):
        align_(nets.model, mlp(4, 6, 2), torch.randn(2, 4))
    with pytest.raises(MemberError, match=r"the model has no '4.bias', no '4.weight', compared with the ref"):
        align_(nets.model, mlp(4, 8, 3, 2), torch.randn(2, 4))
    relu = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(MemberError, match="the reference runs relu as operator 1, the model runs tanh"):
        align_(nets.model, relu, torch.randn(2, 4))
    assert same(nets.model, nets.before)


def test_missing_or_unknown_arguments_are_named(nets: Refusals) -> None:
    with pytest.raises(PapaError, match="aligning by weights needs `batches`: one batch, from which"):
        align_(nets.model, nets.reference)
    by_hand = Symmetries(symmetries(nets.model, torch.randn(2, 4)).groups)
    with pytest.raises(PapaError, match="aligning by activations needs `batches`"):
        align_(nets.model, nets.reference, by="activations", symmetries=by_hand)
    with pytest.raises(PapaError, match=r'have no graph: match by weights, with by="weights"'):
        align_(nets.model, nets.reference, [torch.randn(2, 4)], symmetries=by_hand)
    with pytest.raises(PapaError, match=r"cannot be matched by 'weight': did you mean weights\?"):
        align_(nets.model, nets.reference, torch.randn(2, 4), by="weight")
    foreign = Symmetries((UnitGroup("hidden", 8, (TensorAxis("first.weight", 0, torch.arange(8)[:, None]),)),))
    with pytest.raises(MemberError, match=r"the network has no 'first.weight'"):
        align_(nets.model, nets.reference, symmetries=foreign)
    assert same(nets.model, nets.before)


def test_a_last_batch_of_fewer_examples_is_left_out() -> None:
    whole = [torch.randn(8, 4), torch.randn(8, 4)]
    found = checked_inputs([*whole, torch.randn(3, 4)])
    assert [id(part) for part in found] == [id(part) for part in whole]
    assert len(checked_inputs([torch.randn(3, 4)])) == 1
