import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same_bits
from papa import Averager, AveragingContext, MergeAll, MergePairs, Mix, Population, average_soup
from papa.errors import DataError, MixingError
from papa.lab.models import UNet, make_model
from papa.repair import (
    RepairMerges,
    ResetBatchNormAfterMerges,
    layer_statistics,
    repair_,
    repair_plan,
    repairable_layers,
    reset_batch_norm_,
)

NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)),
    "conv1d": lambda: nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 8, 3)
    ),
    "conv2d dilated": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, dilation=2, padding=2, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(512, 3)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 12, 3, groups=6), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 3)
    ),
    "conv3d": lambda: nn.Sequential(nn.Conv3d(1, 4, 2, bias=True), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 27, 3)),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2), nn.Flatten()
    ),
    "transposed 1d": lambda: nn.Sequential(
        nn.ConvTranspose1d(2, 6, 3, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 12, 3)
    ),
    "transposed 3d": lambda: nn.Sequential(
        nn.ConvTranspose3d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 27, 3)
    ),
    "tokens": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 7), nn.Flatten(), nn.Linear(35, 3)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, 3),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(80, 3),
    ),
}
NETWORKS["unet"] = lambda: UNet(num_classes=3, width=2)
SHAPES: dict[str, tuple[int, ...]] = {"mlp": (6,), "conv1d": (2, 8), "conv3d": (1, 4, 4, 4), "transposed": (4, 5, 5)}
SHAPES |= {"transposed 1d": (2, 8), "transposed 3d": (1, 4, 4, 4), "tokens": (5, 6), "unet": (3, 32, 32)}
SHAPES |= dict.fromkeys(["conv2d dilated", "depthwise", "batch norm"], (3, 8, 8))


class Twice(nn.Module):
    """A layer that is used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(torch.relu(self.body(inputs)))))


NETWORKS["used twice"], SHAPES["used twice"] = Twice, (5,)


def make_parents(kind: str, size: int = 3) -> list[nn.Module]:
    parents = []
    for seed in range(size):
        torch.manual_seed(seed)
        net = NETWORKS[kind]().double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1 + seed).add_(0.1 * torch.randn_like(parameter))
        parents.append(net)
    return parents


def make_batches(kind: str, num_batches: int = 1, batch_size: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (batch_size, *SHAPES[kind])
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(num_batches)]


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(net.state_dict())


def assert_same_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name


# The second output of a layer that runs twice depends on how the layer was repaired.
@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind != "used twice"])
@pytest.mark.parametrize("weights", [None, [0.7, 0.0, 0.3]])
def test_statistics_equal_their_goals_on_one_batch(kind: str, weights: list[float] | None) -> None:
    parents, batches = make_parents(kind), make_batches(kind)
    row = weights or [1 / 3] * 3
    statistics = [layer_statistics(parent, batches) for parent in parents]
    child = average_soup(parents, weights)
    keys = list(child.state_dict())
    report = repair_(child, parents, batches, weights)
    found = layer_statistics(child, batches)
    assert list(child.state_dict()) == keys
    assert report.repaired
    for name in report.repaired:
        mean = sum(weight * its[name].mean for weight, its in zip(row, statistics, strict=True))
        std = sum(weight * its[name].std for weight, its in zip(row, statistics, strict=True))
        torch.testing.assert_close(found[name].mean, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[name].std, std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_output_layer_is_left_alone_and_an_unmixed_network_too(kind: str) -> None:
    parents, batches = make_parents(kind), make_batches(kind)
    child, unmixed = average_soup(parents), copy.deepcopy(parents[1])
    last = list(layer_statistics(child, batches))[-1]
    before = copy.deepcopy(child.get_submodule(last).state_dict())
    report = repair_(child, parents, batches)
    assert last in report.left_alone
    assert_same_state(child.get_submodule(last), before)
    reset_batch_norm_(unmixed, batches)
    before = state_of(unmixed)
    repair_(unmixed, parents, batches, [0.0, 1.0, 0.0])
    for name, value in unmixed.state_dict().items():  # changed by rounding only
        torch.testing.assert_close(value, before[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "kind", ["mlp", "tokens", "conv1d", "conv2d dilated", "depthwise", "transposed", "transposed 1d", "transposed 3d"]
)
def test_the_fused_network_computes_what_the_rescaled_one_did(kind: str) -> None:
    """A slow reference: rescale the outputs of layers instead of changing their weights."""
    parents, batches = make_parents(kind), make_batches(kind)
    child = average_soup(parents)
    slow = copy.deepcopy(child)
    report = repair_(child, parents, batches)
    signal = batches[0]
    signals = [batches[0] for _ in parents]
    for index, layer in enumerate(slow):
        signal = layer(signal)
        signals = [parent[index](its) for parent, its in zip(parents, signals, strict=True)]
        if str(index) in report.repaired:
            axis = signal.dim() - 1 if isinstance(layer, nn.Linear) else 1
            axes = [other for other in range(signal.dim()) if other != axis]
            mean = sum(its.mean(dim=axes, keepdim=True) for its in signals) / 3
            std = sum(its.std(dim=axes, keepdim=True, correction=0) for its in signals) / 3
            centred = signal - signal.mean(dim=axes, keepdim=True)
            signal = centred / signal.std(dim=axes, keepdim=True, correction=0) * std + mean
    torch.testing.assert_close(child(batches[0]), signal)


@pytest.mark.parametrize(("epsilon", "tolerance"), [(1e-5, 1e-3), (1e-14, 1e-9)])
def test_with_batch_norm_behind_every_convolution_it_is_a_batch_norm_reset_in_function(
    epsilon: float, tolerance: float
) -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm", num_batches=3)
    for parent in parents:
        parent[1].eps = parent[4].eps = epsilon  # the only difference: it weighs more or less after the rescaling
    child = average_soup(parents)
    reset = copy.deepcopy(child)
    repair_(child, parents, batches)
    reset_batch_norm_(reset, batches)
    for layer in (0, 3):  # averaging makes weights shorter, REPAIR as long as they were; hence smaller steps afterwards
        assert child[layer].weight.norm() > 1.3 * reset[layer].weight.norm()
    child.eval(), reset.eval()
    probe = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(child(probe), reset(probe), rtol=tolerance, atol=tolerance)


def test_a_constant_channel_keeps_its_scale_and_gets_its_mean() -> None:
    parents, batches = make_parents("mlp"), make_batches("mlp")
    for parent in parents:
        parent[0].weight.data[2] = 0.0
    child = average_soup(parents)
    repair_(child, parents, batches)
    assert torch.isfinite(child[0].weight).all()
    goal = sum(layer_statistics(parent, batches)["0"].mean[2] for parent in parents) / 3
    torch.testing.assert_close(layer_statistics(child, batches)["0"].mean[2], goal)


def without_biases() -> nn.Module:
    """One layer without a bias before BatchNorm, one before nothing of the kind, one with a bias after both."""
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 8, bias=False),
        nn.ReLU(),
        nn.Linear(8, 5),
        nn.ReLU(),
        nn.Linear(5, 2),
    ).double()


def test_layers_without_a_bias_are_scaled_and_reported() -> None:
    parents, batches = [without_biases() for _ in range(3)], make_batches("mlp")
    child = average_soup(parents)
    report = repair_(child, parents, batches)
    assert report == repair_plan(child, batches)
    assert report.to_json() == {
        "repaired": ["5"],
        "before_batch_norm": ["0"],
        "scaled_only": ["3"],
        "left_alone": ["7"],
    }
    goals, found = [layer_statistics(parent, batches) for parent in parents], layer_statistics(child, batches)
    for name in ("0", "3", "5"):
        torch.testing.assert_close(found[name].std, sum(goal[name].std for goal in goals) / 3)
    torch.testing.assert_close(found["5"].mean, sum(goal["5"].mean for goal in goals) / 3)
    assert not torch.allclose(found["3"].mean, sum(goal["3"].mean for goal in goals) / 3)


def test_a_layer_feeds_batch_norm_only_if_it_does_so_every_time() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(self.norm(self.body(inputs))))

    plan = repair_plan(Both(), [torch.randn(8, 6)])
    assert (plan.before_batch_norm, plan.scaled_only) == ((), ("body",))


def test_a_layer_used_twice_comes_closer_to_its_goal() -> None:
    parents, batches = make_parents("used twice"), make_batches("used twice")
    goal = sum(layer_statistics(parent, batches)["body"].std for parent in parents) / 3
    child = average_soup(parents)
    before = (layer_statistics(child, batches)["body"].std / goal - 1).abs().max()
    repair_(child, parents, batches)
    assert (layer_statistics(child, batches)["body"].std / goal - 1).abs().max() < before


def test_parents_may_have_their_own_batches() -> None:
    parents, batches = make_parents("mlp"), make_batches("mlp")
    theirs = [[batch * (1 + index) for batch in batches] for index in range(3)]
    child = average_soup(parents)
    repair_(child, parents, batches, parent_batches=theirs)
    goal = sum(layer_statistics(parent, own)["0"].std for parent, own in zip(parents, theirs, strict=True)) / 3
    torch.testing.assert_close(layer_statistics(child, batches)["0"].std, goal)
    with pytest.raises(DataError, match="parent_batches has 2 entries, expected one for each of 3 parents"):
        repair_(child, parents, batches, parent_batches=theirs[:2])


def test_empty_batches_are_skipped() -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm")
    first, second = average_soup(parents), average_soup(parents)
    repair_(first, parents, batches)
    repair_(second, parents, [batches[0][:0], *batches, batches[0][:0]])
    assert_same_state(first, second.state_dict())
    with pytest.raises(DataError, match="there was no batch to take activation statistics from"):
        repair_(first, parents, [batches[0][:0]])


def test_everything_is_left_as_found() -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm", num_batches=2)
    child = average_soup(parents)
    child.train()
    child[1].momentum = 0.3
    parents[0].eval()
    before = [state_of(parent) for parent in parents]
    state = torch.random.get_rng_state()
    repair_(child, parents, batches)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(module.training for module in child.modules())
    assert not any(module.training for module in parents[0].modules())
    assert child[1].momentum == 0.3
    assert child[1].track_running_stats
    for parent, found in zip(parents, before, strict=True):
        assert_same_state(parent, found)
    assert not any(module._forward_hooks for module in child.modules())


def test_an_error_leaves_the_child_unchanged() -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm")
    child = average_soup(parents)
    before = state_of(child)
    with pytest.raises(DataError, match="there was no batch"):
        repair_(child, parents, [])
    parents[1][0].weight.data[0] = float("nan")
    with pytest.raises(DataError, match="parent 1 has activations that are not finite at '0'"):
        repair_(child, parents, batches)
    with pytest.raises(RuntimeError):
        repair_(child, make_parents("batch norm"), [torch.randn(4, 7, dtype=torch.float64)])
    assert_same_state(child, before)
    with pytest.raises(DataError, match=r"weights have shape \(2,\), expected \(3,\)"):
        repair_(child, parents, batches, [0.5, 0.5])
    with pytest.raises(MixingError, match=r"sums to 0\.9"):
        repair_(child, parents, batches, [0.3, 0.3, 0.3])


def test_networks_of_another_architecture_are_refused() -> None:
    def make(width: int, depth: int = 1) -> nn.Module:
        hidden = [nn.Linear(width, width) for _ in range(depth)]
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), *hidden, nn.Linear(width, 2)).double()

    batches = make_batches("mlp")
    child = make(8)
    before = state_of(child)
    with pytest.raises(DataError, match="layer '0' has 7 channels in one parent and 8 in another"):
        repair_(child, [make(8), make(7)], batches)
    with pytest.raises(DataError, match="layer '4' runs in some parents only"):
        repair_(child, [make(8), make(8, depth=2)], batches)
    with pytest.raises(DataError, match="layer '0' has 8 channels in the child, 7 in its parents"):
        repair_(child, [make(7), make(7)], batches)
    with pytest.raises(DataError, match="layer '3' runs in the child, but not in its parents"):
        repair_(make(8, depth=2), [nn.Sequential(*list(make(8))[:3])] * 2, batches)
    assert_same_state(child, before)


def test_a_head_that_shares_its_weights_is_still_the_last_layer() -> None:
    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
    net[4].weight = net[0].weight
    report = repair_plan(net, [torch.arange(6)])
    assert (report.repaired, report.left_alone) == (("1", "3"), ("4",))


def test_tied_layers_are_not_touched() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight = net[0].weight
    assert list(repairable_layers(net)) == ["2"]
    assert repair_plan(net, [torch.randn(8, 4)]).left_alone == ("0", "1", "2")


class Block(nn.Module):
    """A transformer block with a gated MLP, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.qkv, self.proj, self.position = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(1, 1)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs)
        query, key, value = self.qkv(self.norms[0](tokens)).chunk(3, dim=-1)
        positions = torch.arange(5, dtype=inputs.dtype)[:, None]
        scores = query @ key.mT + self.position(positions - positions.mT[..., None])[..., 0].mean(dim=0)
        tokens = tokens + self.proj(scores.softmax(dim=-1) @ value)
        hidden = self.norms[1](tokens)
        tokens = tokens + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        outputs: Tensor = self.head(self.norms[2](tokens).mean(dim=1))
        return outputs


def test_in_a_transformer_only_the_gate_stands_before_an_activation_function() -> None:
    net, batches = Block().double(), make_batches("tokens")
    assert repair_plan(net, batches, scope="activations").repaired == ("gate",)
    assert set(repair_plan(net, batches).repaired) == {"embed", "qkv", "position", "proj", "gate", "up", "down"}


@pytest.mark.parametrize(
    ("after", "stands_before_one"),
    [
        ([nn.ReLU()], True),
        ([nn.ReLU(inplace=True)], True),
        ([nn.ReLU6()], True),
        ([nn.PReLU()], True),
        ([nn.SELU()], True),
        ([nn.CELU()], True),
        ([nn.GLU(dim=1), nn.Conv2d(2, 4, 1)], True),
        ([nn.LogSigmoid()], True),
        ([nn.GroupNorm(2, 4), nn.Mish()], True),
        ([nn.InstanceNorm2d(4), nn.Hardswish()], True),
        ([nn.Dropout(), nn.MaxPool2d(2), nn.Tanh()], True),
        ([nn.AvgPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 1), nn.ReLU()], False),
        ([nn.Softmax(dim=1)], False),
        ([nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.ReLU()], True),  # BatchNorm counts as one
        ([nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.ReLU()], False),
    ],
    ids=str,
)
def test_activation_functions_are_found(after: list[nn.Module], stands_before_one: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), *after, nn.Flatten(), nn.LazyLinear(2))
    plan = repair_plan(net, make_images(2), scope="activations")
    assert ("0" in plan.repaired) == stands_before_one


def make_images(num_images: int) -> list[Tensor]:
    return [torch.randn(num_images, 3, 32, 32)]


def test_functions_and_tensor_methods_count_as_activation_functions() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = nn.functional.gelu(self.layers[0](inputs), approximate="tanh")
            hidden = self.layers[1](hidden).mul(1.702).sigmoid() * hidden
            hidden = inputs + self.layers[2](hidden)
            outputs: Tensor = self.head(self.layers[3](torch.relu_(hidden)))
            return outputs

    plan = repair_plan(Functions(), [torch.randn(8, 4)], scope="activations")
    assert plan.repaired == ("layers.0", "layers.1", "layers.2")
    assert plan.left_alone == ("layers.3", "head")


@pytest.mark.parametrize("name", ["vgg11", "vgg16", "resnet18", "resnet20", "timm:resnet10t", "timm:resnet50"])
def test_scopes_are_the_same_in_convolutional_networks_with_batch_norm(name: str) -> None:
    net = make_model(name, num_classes=5, image_size=32, width=None if name.startswith("timm") else 4)
    assert repair_plan(net, make_images(2)) == repair_plan(net, make_images(2), scope="activations")


def test_layers_outside_the_scope_keep_their_weights() -> None:
    torch.manual_seed(0)
    parents, batches = [Block().double() for _ in range(3)], make_batches("tokens")
    child = average_soup(parents)
    before = state_of(child)
    report = repair_(child, parents, batches, scope="activations")
    assert report == repair_plan(child, batches, scope="activations")
    changed = {name for name, value in child.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"gate.weight", "gate.bias"}
    goal = sum(layer_statistics(parent, batches)["gate"].std for parent in parents) / 3
    torch.testing.assert_close(layer_statistics(child, batches)["gate"].std, goal)


@pytest.mark.parametrize("rule", [MergeAll(every_steps=1), MergePairs(every_steps=1)])
@pytest.mark.parametrize("one_list", [True, False])
@pytest.mark.parametrize("kind", [RepairMerges, ResetBatchNormAfterMerges])
def test_members_are_repaired_or_reset_around_a_merge(
    kind: type[RepairMerges | ResetBatchNormAfterMerges], rule: MergeAll, one_list: bool
) -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm", num_batches=2)
    before = copy.deepcopy(parents)
    population = Population(parents)
    hook = kind(lambda member: batches if one_list else list(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Averager(population, rule, merge_hooks=hook).step()
    matrix = rule.matrix(AveragingContext(step=1, size=3, lr_ratio=1.0))
    for member, net in enumerate(population):
        expected = average_soup(before, matrix[member])
        if kind is RepairMerges:
            repair_(expected, before, batches, matrix[member])
        else:
            reset_batch_norm_(expected, batches)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [RepairMerges, ResetBatchNormAfterMerges])
def test_a_copy_of_one_member_is_not_repaired(kind: type[RepairMerges]) -> None:
    parents, batches = make_parents("batch norm"), make_batches("batch norm")
    before = copy.deepcopy(parents)
    population = Population(parents)
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
    Averager(population, Mix(rows, every_steps=1), merge_hooks=kind(lambda member: list(batches))).step()
    for member in (0, 1):
        assert_same_bits(population[member].state_dict(), before[1].state_dict())
    soup = average_soup(before, rows[2])
    assert any(not torch.equal(soup.state_dict()[name], value) for name, value in population[2].state_dict().items())


def count_passes(one_list: bool, rule: MergeAll) -> int:
    """The number of passes over the batches that REPAIR of five members takes, without BatchNorm's."""
    parents, batches = make_parents("mlp", size=5), make_batches("mlp", num_batches=5)
    num_examples = 0

    def count(module: nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal num_examples
        num_examples += len(inputs[0]) if len(inputs[0]) > 2 else 0  # two examples tell where BatchNorm is

    for parent in parents:
        parent.register_forward_pre_hook(count)
    repair = RepairMerges(lambda member: batches if one_list else list(batches))
    Averager(Population(parents), rule, merge_hooks=repair).step()
    return num_examples // sum(len(batch) for batch in batches)


def test_a_shared_policy_needs_one_pass_for_each_parent_and_distinct_child() -> None:
    assert count_passes(True, MergeAll(every_steps=1)) == 5 + 1
    assert count_passes(False, MergeAll(every_steps=1)) == 2 * 5
    rows = {
        tuple(row) for row in MergePairs(every_steps=1).matrix(AveragingContext(step=1, size=5, lr_ratio=1.0)).tolist()
    }
    assert count_passes(True, MergePairs(every_steps=1)) == 5 + len(rows)


def test_repair_undoes_the_collapse_of_variance() -> None:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 2))

    torch.manual_seed(0)
    parents, batches = [make() for _ in range(4)], [torch.randn(256, 64)]
    goal = sum(layer_statistics(parent, batches)["6"].std.mean() for parent in parents) / 4
    child = average_soup(parents)
    collapsed = layer_statistics(child, batches)["6"].std.mean()
    repair_(child, parents, batches)
    repaired = layer_statistics(child, batches)["6"].std.mean()
    assert collapsed < 0.3 * goal
    torch.testing.assert_close(repaired, goal, rtol=1e-3, atol=0.0)
