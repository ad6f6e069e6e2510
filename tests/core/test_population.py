from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from helpers import (
    NETWORKS,
    Tied,
    assert_close,
    assert_same_bits,
    averaged_tensors,
    make_network,
    make_networks,
    random_stochastic,
    reference_mix,
    snapshot,
)
from papa import average_soup
from papa.core import mixing
from papa.core.population import Population
from papa.errors import MemberError, MixingError
from papa.streams import global_stream

HALVES = [[0.5, 0.5], [0.5, 0.5]]

kinds = st.sampled_from(sorted(NETWORKS))
sizes = st.integers(1, 6)
seeds = st.integers(0, 1000)


def pairwise_distances(population: Population) -> Tensor:
    vectors = [
        torch.cat([tensor.detach().flatten() for tensor in averaged_tensors(population)[index].values()])
        for index in range(len(population))
    ]
    return torch.cdist(torch.stack(vectors), torch.stack(vectors))


def matrix_for(choice: int, size: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return [
        mixing.push(size, 0.9),
        mixing.merge_all(size),
        mixing.merge_many(size, share=0.75),
        mixing.merge_pairs(size, source, share=0.75),
        random_stochastic(size, seed),
    ][choice]


class TestLaws:
    @given(kinds, sizes, seeds)
    def test_binding_changes_no_bit_of_any_member(self, kind: str, size: int, seed: int) -> None:
        networks = make_networks(kind, size, seed)
        before = [snapshot(network) for network in networks]
        strides = [{name: tensor.stride() for name, tensor in network.named_parameters()} for network in networks]
        population = Population(networks)
        for network, state, stride in zip(population, before, strides, strict=True):
            assert_same_bits(snapshot(network), state)
            assert {name: tensor.stride() for name, tensor in network.named_parameters()} == stride

    @given(kinds, sizes, seeds, st.integers(0, 4))
    def test_mixing_equals_a_loop_over_the_members(self, kind: str, size: int, seed: int, choice: int) -> None:
        population = Population(make_networks(kind, size, seed))
        before = [snapshot(network) for network in population]
        matrix = matrix_for(choice, size, seed)
        population.mix_(matrix)
        after = [snapshot(network) for network in population]
        for name in before[0]:
            if name in population.averaged:
                for found, expected in zip(after, reference_mix(before, matrix, name), strict=True):
                    assert_close(found[name], expected)
            else:
                for found, expected in zip(after, before, strict=True):
                    assert_same_bits(found, expected, [name])

    @given(kinds, sizes, seeds)
    def test_merging_all_makes_members_bitwise_equal(self, kind: str, size: int, seed: int) -> None:
        population = Population(make_networks(kind, size, seed))
        population.mix_(mixing.merge_all(size))
        for index in range(size):
            assert_same_bits(averaged_tensors(population)[index], averaged_tensors(population)[0])

    @given(st.sampled_from(["linear", "conv_batch_norm", "tied"]), sizes, seeds, st.floats(0.0, 1.0))
    def test_a_push_contracts_every_pairwise_distance(self, kind: str, size: int, seed: int, keep: float) -> None:
        population = Population([network.double() for network in make_networks(kind, size, seed)])
        before, distances = pairwise_distances(population), population.distances()
        population.mix_(mixing.push(size, keep))
        assert torch.allclose(pairwise_distances(population), keep * before, rtol=0, atol=1e-12)
        assert torch.allclose(population.distances(), keep * distances, rtol=0, atol=1e-12)

    @given(sizes, seeds, st.integers(0, 4))
    def test_the_mean_is_preserved_exactly_when_columns_sum_to_one(self, size: int, seed: int, choice: int) -> None:
        population = Population([network.double() for network in make_networks("linear", size, seed)])
        matrix = matrix_for(choice, size, seed)
        balanced = torch.allclose(matrix.sum(dim=0), torch.ones(size).double(), rtol=0, atol=1e-12)
        before = population.mean()
        population.mix_(matrix)
        assert torch.allclose(population.mean(), before, rtol=0, atol=1e-12) == balanced

    @given(kinds, sizes, seeds)
    def test_distances_equal_their_definition(self, kind: str, size: int, seed: int) -> None:
        population = Population(make_networks(kind, size, seed))
        wide = torch.complex128 if kind == "oddities" else torch.float64
        vectors = torch.stack(
            [torch.cat([p.detach().to(wide).flatten() for p in network.parameters()]) for network in population]
        )
        expected = torch.linalg.vector_norm(vectors - vectors.mean(dim=0), dim=1)
        # bfloat16 columns are averaged in float32, not in float64
        assert torch.allclose(population.distances(), expected, rtol=1e-5, atol=1e-6)

    def test_the_mean_row_is_the_mean_of_the_rows(self) -> None:
        population = Population(make_networks("conv_batch_norm", 3))
        assert_close(population.mean(), population.matrix.double().mean(dim=0))

    def test_batch_norm_statistics_are_averaged_and_their_counters_are_not(self) -> None:
        population = Population(make_networks("conv_batch_norm", 3))
        before = [snapshot(network) for network in population]
        population.mix_(mixing.merge_all(3))
        for network, own in zip(population, before, strict=True):
            for name in ("1.running_mean", "1.running_var"):
                assert_close(network.get_buffer(name), sum(state[name].double() for state in before) / 3)
            assert torch.equal(network.get_buffer("1.num_batches_tracked"), own["1.num_batches_tracked"])
        assert len({int(state["1.num_batches_tracked"]) for state in before}) == 3


class TestInterface:
    def test_it_is_a_sequence_of_the_modules_given(self) -> None:
        networks = make_networks("linear", 3)
        population = Population(network for network in networks)
        assert len(population) == population.size == 3
        assert list(population.members) == [0, 1, 2]
        assert all(one is other for one, other in zip(population, networks, strict=True))
        assert population[-1] is networks[-1]

    def test_repr_says_how_many_of_what(self) -> None:
        found = Population(make_networks("linear", 3))
        numel = sum(parameter.numel() for parameter in found[0].parameters())
        assert repr(found) == f"Population(3 x Sequential, {numel} averaged numbers each, float32 on cpu)"

    def test_one_matrix_per_dtype(self) -> None:
        population = Population(make_networks("mixed_dtypes", 2))
        assert set(population.matrices) == {torch.float32, torch.float64, torch.bfloat16}
        assert population.matrix is population.matrices[torch.bfloat16]

    def test_writing_to_the_matrix_writes_to_the_members(self) -> None:
        population = Population(make_networks("linear", 2))
        population.matrix[1].zero_()
        population.mark_changed_()
        assert all(not parameter.any() for parameter in population[1].parameters())
        assert all(parameter.any() for parameter in population[0].parameters())

    @pytest.mark.parametrize("kind", NETWORKS)
    def test_deepcopy_is_an_independent_population(self, kind: str) -> None:
        population = Population(make_networks(kind, 2))
        before = [snapshot(network) for network in population]
        twin = copy.deepcopy(population)
        twin.mix_(HALVES)
        for network, state in zip(population, before, strict=True):
            assert_same_bits(snapshot(network), state)
        population.mix_(HALVES)
        for network, other in zip(population, twin, strict=True):
            assert_same_bits(snapshot(network), snapshot(other))

    @pytest.mark.parametrize("kind", NETWORKS)
    def test_pickle_gives_back_the_same_population(self, kind: str) -> None:
        population = Population(make_networks(kind, 2))
        twin = pickle.loads(pickle.dumps(population))
        assert twin.averaged == population.averaged
        for network, other in zip(population, twin, strict=True):
            assert_same_bits(snapshot(other), snapshot(network))
        twin.mix_(HALVES)
        assert_same_bits(averaged_tensors(twin)[0], averaged_tensors(twin)[1])

    def test_copies_keep_the_averaging_patterns(self) -> None:
        population = Population(make_networks("linear", 2), average={"2.*": False})
        assert copy.deepcopy(population).averaged == ("0.weight", "0.bias")
        assert pickle.loads(pickle.dumps(population)).averaged == ("0.weight", "0.bias")

    def test_to_another_dtype_converts_matrix_and_members(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        before = [snapshot(network) for network in population]
        assert population.to(torch.float64) is population
        assert set(population.matrices) == {torch.float64}
        population.mix_(HALVES)
        for name in population.averaged:
            assert_close(averaged_tensors(population)[0][name], (before[0][name].double() + before[1][name]) / 2)

    def test_to_another_memory_format_keeps_it(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2)).to(memory_format=torch.channels_last)
        before = [snapshot(network) for network in population]
        population.mix_(HALVES)
        weight = population[1].get_parameter("0.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()
        assert_close(weight, (before[0]["0.weight"].double() + before[1]["0.weight"]) / 2)

    def test_members_of_different_memory_formats_are_mixed_by_position_not_by_memory(self) -> None:
        networks = [make_network("conv_batch_norm", 0), make_network("channels_last", 1)]
        before = [snapshot(network) for network in networks]
        Population(networks).mix_(HALVES)
        for network in networks:
            expected = (before[0]["0.weight"].double() + before[1]["0.weight"].double()) / 2
            assert_close(network.get_parameter("0.weight"), expected)

    def test_mixing_works_under_inference_mode_and_no_grad(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        with torch.inference_mode():
            population.mix_(HALVES)
        assert_same_bits(averaged_tensors(population)[0], averaged_tensors(population)[1])
        population[0](torch.randn(2, 2, 4, 4)).sum().backward()


def size_of_torch_save(network: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    return file.tell()


def size_of_deepcopy(network: nn.Module) -> int:
    tensors = [*copy.deepcopy(network).parameters(), *copy.deepcopy(network).buffers()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def unbind_by_memory_format(network: nn.Module) -> None:
    network.to(memory_format=torch.channels_last)


def unbind_by_data(network: nn.Module) -> None:
    network.get_parameter("0.weight").data = torch.randn(6, 2, 3, 3)


def unbind_by_new_buffer(network: nn.Module) -> None:
    network.get_submodule("1").running_mean = torch.randn(6)


def unbind_by_moving_there_and_back(network: nn.Module) -> None:
    network.double().float()


class TestBinding:
    @pytest.mark.parametrize("kind", ["linear", "conv_batch_norm", "tied", "mixed_dtypes"])
    @pytest.mark.parametrize(
        "measure",
        [size_of_torch_save, size_of_deepcopy, lambda network: len(pickle.dumps(network))],
        ids=["torch.save", "deepcopy", "pickle"],
    )
    def test_one_member_is_as_large_as_a_network_that_was_never_bound(
        self, kind: str, measure: Callable[[nn.Module], int]
    ) -> None:
        unbound = measure(make_network(kind, 0))
        for size in (1, 20):
            assert measure(Population(make_networks(kind, size))[0]) == unbound

    def test_torch_save_and_load_keep_the_values(self) -> None:
        population = Population(make_networks("conv_batch_norm", 3))
        file = io.BytesIO()
        torch.save(population[1].state_dict(), file)
        file.seek(0)
        assert_same_bits(torch.load(file), dict(population[1].state_dict()))

    def test_safetensors_saves_a_member(self, tmp_path: Path) -> None:
        population = Population(make_networks("conv_batch_norm", 3))
        safetensors.torch.save_file(population[1].state_dict(), tmp_path / "member.safetensors")
        loaded = safetensors.torch.load_file(tmp_path / "member.safetensors")
        assert_same_bits(loaded, dict(population[1].state_dict()))

    def test_a_deepcopied_member_is_free(self) -> None:
        population = Population(make_networks("linear", 2))
        free = copy.deepcopy(population[0])
        before = snapshot(free)
        population.mix_(HALVES)
        assert_same_bits(snapshot(free), before)

    @pytest.mark.parametrize("bind_first", [True, False])
    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        ],
        ids=["SGD", "AdamW"],
    )
    def test_optimizers_made_before_or_after_train_the_members_as_if_unbound(
        self, make_optimizer: Callable[..., torch.optim.Optimizer], bind_first: bool
    ) -> None:
        networks, twins = make_networks("conv_batch_norm", 2), make_networks("conv_batch_norm", 2)
        if bind_first:
            Population(networks)
        optimizers = [make_optimizer(network.parameters()) for network in networks]
        twin_optimizers = [make_optimizer(network.parameters()) for network in twins]
        population = Population(networks)
        for _ in range(5):
            inputs = torch.randn(4, 2, 4, 4)
            for network, optimizer in zip([*networks, *twins], [*optimizers, *twin_optimizers], strict=True):
                optimizer.zero_grad()
                network(inputs).square().sum().backward()
                optimizer.step()
            for network, twin in zip(population, twins, strict=True):
                assert_same_bits(snapshot(network), snapshot(twin))
        trained = networks[1].get_parameter("0.weight").detach().flatten()
        assert torch.equal(population.matrix[1][: trained.numel()], trained)

    def test_load_state_dict_writes_into_the_matrix(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        other = make_network("conv_batch_norm", 99)
        pointers = [tensor.data_ptr() for tensor in population[0].state_dict().values()]
        population[0].load_state_dict(other.state_dict())
        assert [tensor.data_ptr() for tensor in population[0].state_dict().values()] == pointers
        before = [snapshot(network) for network in population]
        population.mix_(HALVES)
        for name in population.averaged:
            assert_close(averaged_tensors(population)[1][name], (before[0][name].double() + before[1][name]) / 2)

    def test_load_state_dict_by_assignment_is_refused_at_the_next_mix(self) -> None:
        population = Population(make_networks("linear", 2))
        population[1].load_state_dict(make_network("linear", 9).state_dict(), assign=True)
        with pytest.raises(MemberError, match=r"member 1 has '0.weight' as a new Parameter, while its optimizer still"):
            population.mix_(HALVES)
        with pytest.raises(MemberError, match=r"load weights with load_state_dict\(assign=False\), or rebuild"):
            population.distances()

    @pytest.mark.parametrize(
        "unbind_", [unbind_by_memory_format, unbind_by_data, unbind_by_new_buffer, unbind_by_moving_there_and_back]
    )
    def test_tensors_that_left_the_matrix_are_brought_home(self, unbind_: Callable[[nn.Module], None]) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        unbind_(population[1])
        before = [snapshot(network) for network in population]
        population.refresh_()
        assert_same_bits(snapshot(population[1]), before[1])
        for _ in range(2):
            population.mix_(HALVES)
            for name in population.averaged:
                expected = (before[0][name].double() + before[1][name]) / 2
                for network in population:
                    assert_close(dict(network.named_parameters()).get(name, network.state_dict()[name]), expected)

    def test_a_brought_home_parameter_still_trains(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        optimizer = torch.optim.SGD(population[0].parameters(), lr=0.1)
        population[0].to(memory_format=torch.channels_last)
        population.refresh_()
        before = population.matrix[0].clone()
        population[0](torch.randn(4, 2, 4, 4)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(population.matrix[0], before)

    @pytest.mark.parametrize(
        ("change_", "message"),
        [
            (
                lambda net: net.half(),
                "member 0 has 'scale' of torch.float16 and shape (), expected torch.float32 and (): convert all "
                "members at once with population.to",
            ),
            (
                lambda net: setattr(net, "shift", torch.zeros(6)),
                "member 0 has 'shift' of torch.float32 and shape (6,), expected",
            ),
            (
                lambda net: setattr(net, "shift", torch.zeros(5, device="meta")),
                "member 0 has 'shift' on meta, expected cpu: move all members at once",
            ),
            (lambda net: delattr(net, "shift"), "member 0 no longer has 'shift': rebuild the population"),
            (lambda net: delattr(net, "scale"), "member 0 no longer has 'scale': rebuild the population"),
        ],
    )
    def test_a_tensor_that_changed_is_refused(self, change_: Callable[[nn.Module], object], message: str) -> None:
        population = Population(make_networks("oddities", 2))
        change_(population[0])
        with pytest.raises(MemberError, match=re.escape(message)):
            population.mix_(HALVES)

    def test_a_member_may_be_bound_anew(self) -> None:
        networks = make_networks("linear", 3)
        Population(networks[:2])
        before = [snapshot(network) for network in networks]
        population = Population(networks)
        population.mix_(mixing.merge_all(3))
        for name in population.averaged:
            assert_close(averaged_tensors(population)[0][name], sum(state[name].double() for state in before) / 3)


class TestAutograd:
    def test_mixing_between_forward_and_backward_makes_backward_raise(self) -> None:
        population = Population(make_networks("linear", 2))
        loss = population[0](torch.randn(4, 3)).sum()
        population.mix_(HALVES)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_mixing_clears_the_autocast_cache(self) -> None:
        population = Population(make_networks("linear", 2))
        inputs = torch.randn(4, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stale = population[0](inputs)
            population.mix_(HALVES)
            fresh = population[0](inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = population[0](inputs)
        assert torch.equal(fresh, expected)
        assert not torch.equal(fresh, stale)

    def test_gradients_are_left_alone(self) -> None:
        population = Population(make_networks("linear", 2))
        population[0](torch.randn(4, 3)).sum().backward()
        before = [parameter.grad.clone() for parameter in population[0].parameters()]
        population.mix_(HALVES)
        for parameter, gradient in zip(population[0].parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)

    def test_frozen_parameters_are_averaged_and_stay_frozen(self) -> None:
        networks = make_networks("linear", 2)
        for network in networks:
            network.get_submodule("0").requires_grad_(False)
        before = [snapshot(network) for network in networks]
        population = Population(networks)
        population.mix_(HALVES)
        assert_close(
            population[0].get_parameter("0.weight"), reference_mix(before, torch.tensor(HALVES), "0.weight")[0]
        )
        for network in population:
            flags = [parameter.requires_grad for parameter in network.parameters()]
            assert flags == [False, False, True, True]

    def test_hooks_stay_where_they_were_put(self) -> None:
        networks = make_networks("linear", 2)
        calls: list[str] = []
        networks[0].get_parameter("0.weight").register_hook(lambda _: calls.append("gradient"))
        networks[0].register_forward_hook(lambda *_: calls.append("forward"))
        population = Population(networks)
        population.mix_(HALVES)
        population[0](torch.randn(4, 3)).sum().backward()
        assert calls == ["forward", "gradient"]

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_mixing_changes_what_compiled_members_compute(self, backend: str) -> None:
        population = Population(make_networks("linear", 2))
        compiled = [torch.compile(network, backend=backend) for network in population]
        inputs = torch.randn(4, 3)
        stale = compiled[0](inputs)
        population.mix_(HALVES)
        assert torch.allclose(compiled[0](inputs), population[0](inputs), atol=1e-6)
        assert torch.equal(compiled[0](inputs), compiled[1](inputs))
        assert not torch.allclose(compiled[0](inputs), stale)

    def test_members_compiled_before_binding_are_members_too(self) -> None:
        networks = make_networks("linear", 2)
        compiled = [torch.compile(network, backend="eager") for network in networks]
        inputs = torch.randn(4, 3)
        stale = compiled[0](inputs)
        Population(compiled).mix_(HALVES)
        assert torch.equal(compiled[0](inputs), compiled[1](inputs))
        assert not torch.allclose(compiled[0](inputs), stale)


class TestWhatIsAveraged:
    def test_masks_tables_and_counters_stay_with_their_member(self) -> None:
        population = Population(make_networks("oddities", 2))
        before = [snapshot(network) for network in population]
        population.mix_(HALVES)
        assert set(population.averaged) == {"phase", "scale", "nothing", "transposed", "shift"}
        for network, state in zip(population, before, strict=True):
            assert_same_bits(snapshot(network), state, ["mask", "table", "count"])
        assert not torch.equal(before[0]["table"], before[1]["table"])

    def test_a_mask_stays_with_everyone_when_one_member_has_infinities_in_it(self) -> None:
        networks = make_networks("oddities", 2)
        networks[0].mask.zero_()
        population = Population(networks)
        population.mix_(HALVES)
        assert "mask" not in population.averaged
        assert not population[0].mask.any()
        assert population[1].mask.isinf().any()

    def test_running_statistics_of_a_diverged_member_are_still_averaged_for_the_others(self) -> None:
        networks = make_networks("conv_batch_norm", 3)
        networks[1].get_buffer("1.running_var").fill_(float("nan"))
        population = Population(networks)
        before = [snapshot(network) for network in networks]
        population.mix_([[0.5, 0.0, 0.5], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]])
        for network in population:
            expected = (before[0]["1.running_var"].double() + before[2]["1.running_var"]) / 2
            assert_close(network.get_buffer("1.running_var"), expected)

    def test_vectors_of_the_spectral_norm_parametrization_stay(self) -> None:
        networks = [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)) for _ in range(2)]
        self.check_that_buffers_stay(networks, ["parametrizations.weight.0._u", "parametrizations.weight.0._v"])

    def test_the_base_of_an_orthogonal_matrix_stays(self) -> None:
        first = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6, bias=False))
        networks = [copy.deepcopy(first) for _ in range(2)]
        with torch.no_grad():
            for seed, network in enumerate(networks):
                noise = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
                network.parametrizations.weight.original.add_(noise)
        population = Population(networks)
        assert "parametrizations.weight.0.base" in population.not_averaged
        population.mix_([[0.5, 0.5], [0.5, 0.5]])
        for network in population:
            torch.testing.assert_close(network.weight @ network.weight.T, torch.eye(6), rtol=0, atol=1e-5)
        others = [nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)) for _ in range(2)]
        with pytest.warns(UserWarning, match="orthogonal parametrizations with different bases"):
            Population(others)

    def test_vectors_of_the_spectral_norm_hook_stay(self) -> None:
        networks = [nn.utils.spectral_norm(nn.Linear(4, 3)) for _ in range(2)]
        self.check_that_buffers_stay(networks, ["weight_u", "weight_v"])

    def check_that_buffers_stay(self, networks: list[nn.Module], names: list[str]) -> None:
        population = Population(networks)
        before = [snapshot(network) for network in networks]
        population.mix_(HALVES)
        assert not set(names) & set(population.averaged)
        for network, state in zip(networks, before, strict=True):
            assert_same_bits(snapshot(network), state, names)
        network(torch.randn(2, 4))

    def test_tied_parameters_count_once_and_stay_tied(self) -> None:
        population = Population(make_networks("tied", 2))
        before = [snapshot(network) for network in population]
        assert population.averaged == ("embedding.weight", "norm.weight", "norm.bias")
        assert population.matrix.shape[1] == 48 + 16 + 16  # 35, 5 and 5 numbers in whole cache lines
        population.mix_(HALVES)
        for network in population:
            assert network.head.weight is network.embedding.weight
            expected = reference_mix(before, torch.tensor(HALVES), "embedding.weight")[0]
            assert_close(network.head.weight, expected)

    def test_shared_modules_count_once(self) -> None:
        def make() -> nn.Module:
            block = nn.Linear(3, 3)
            return nn.Sequential(block, nn.ReLU(), block)

        population = Population([make() for _ in range(2)])
        population.mix_(HALVES)
        assert population.averaged == ("0.weight", "0.bias")
        assert population[0][0].weight.data_ptr() == population[0][2].weight.data_ptr()

    def test_a_pattern_leaves_each_member_its_own_head(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2), average={"4.*": False})
        before = [snapshot(network) for network in population]
        population.mix_(HALVES)
        for network, state in zip(population, before, strict=True):
            assert_same_bits(snapshot(network), state, ["4.weight", "4.bias"])
        assert torch.equal(population[0].get_parameter("0.weight"), population[1].get_parameter("0.weight"))

    def test_a_pattern_takes_in_what_is_left_out_by_default(self) -> None:
        population = Population(make_networks("oddities", 2), average={"table": True})
        population.mix_(HALVES)
        assert torch.equal(population[0].table, population[1].table)

    def test_the_last_matching_pattern_wins(self) -> None:
        population = Population(make_networks("linear", 2), average={"*": False, "*.bias": True})
        assert population.averaged == ("0.bias", "2.bias")

    @pytest.mark.parametrize("name", ["head.weight", "embedding.*"])
    def test_a_pattern_finds_a_tied_parameter_by_any_of_its_names(self, name: str) -> None:
        assert Population([Tied()], average={name: False}).averaged == ("norm.weight", "norm.bias")


def line(*args: int, **kwargs: Any) -> nn.Linear:
    return nn.Linear(*(args or (2, 2)), **kwargs)


TWIN = line()
ARCHITECTURE = "all members of a population must share one architecture"


class TestErrors:
    @pytest.mark.parametrize(
        ("models", "message"),
        [
            ([], "a population needs at least one member, got none: pass a list of modules"),
            (3, "a population is made of modules, got a int: pass a list of modules"),
            ([line(), {}], "member 1 is a dict, expected a torch.nn.Module"),
            ([TWIN, line(), TWIN], "member 2 is the same object as an earlier one: make a module for each"),
            (nn.Sequential(line(), line()), "is made of several modules, got one Sequential: pass a list"),
            ([line(), line(bias=False)], f"member 1 has no 'bias', compared with member 0: {ARCHITECTURE}"),
            ([line(bias=False), line()], f"member 1 has an extra 'bias', compared with member 0: {ARCHITECTURE}"),
            (
                [line(), line(), line(2, 3)],
                f"member 2 has 'weight' of shape (3, 2), member 0 has (2, 2): {ARCHITECTURE}",
            ),
            (
                [line(), line().double()],
                f"member 1 has 'weight' as torch.float64, member 0 as torch.float32: {ARCHITECTURE}",
            ),
        ],
    )
    def test_modules_that_are_no_population(self, models: Any, message: str) -> None:
        with pytest.raises(MemberError, match=re.escape(message)):
            Population(models)
        assert Population(nn.ModuleList([line(), line()])).size == 2

    @pytest.mark.parametrize(
        ("average", "message"),
        [
            (["head.*"], "`average` is ['head.*'], expected patterns and whether to average"),
            ({"haed.*": False}, "`average` has the pattern 'haed.*', which matches no parameter or buffer"),
            ({"count": True}, "'count' is torch.int64 and cannot be averaged: leave it out of `average`"),
        ],
    )
    def test_patterns_that_say_nothing(self, average: Any, message: str) -> None:
        with pytest.raises(MemberError, match=re.escape(message)):
            Population(make_networks("oddities", 1), average=average)

    def test_members_that_share_a_backbone(self) -> None:
        backbone = nn.Linear(2, 2)
        networks = [nn.Sequential(backbone, nn.Linear(2, 2)) for _ in range(2)]
        message = r"member 1 shares '0.weight' with member 0: give each its own \(copy.deepcopy\), or leave it out with"
        with pytest.raises(MemberError, match=message):
            Population(networks)
        population = Population(networks, average={"0.*": False})
        population.mix_(HALVES)
        assert population[0][0] is population[1][0]

    def test_a_matrix_that_does_not_fit_changes_nothing(self) -> None:
        population = Population(make_networks("linear", 2))
        before = [snapshot(network) for network in population]
        for matrix in (torch.eye(3), [[0.5, 0.4], [0.5, 0.5]], [[2.0, -1.0], [0.0, 1.0]], [[float("nan"), 1.0]] * 2):
            with pytest.raises(MixingError):
                population.mix_(matrix)
        for network, state in zip(population, before, strict=True):
            assert_same_bits(snapshot(network), state)


class TestCombined:
    @given(kinds, sizes, seeds)
    def test_weighted_sums_are_those_of_the_obvious_loop(self, kind: str, size: int, seed: int) -> None:
        population = Population(make_networks(kind, size, seed))
        weights = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
        weights /= weights.sum()
        members = averaged_tensors(population)
        for name, tensor in population.combined(weights).items():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            expected = sum(weight * member[name].to(wide) for weight, member in zip(weights, members, strict=True))
            assert_close(tensor, expected)

    @given(kinds, sizes, seeds)
    def test_one_hot_weights_copy_a_member_to_memory_of_its_own(self, kind: str, size: int, seed: int) -> None:
        population = Population(make_networks(kind, size, seed))
        member = seed % size
        copied = population.combined(torch.eye(size)[member])
        assert_same_bits(copied, averaged_tensors(population)[member])
        for tensor in copied.values():
            tensor.zero_()
        assert any(bool(tensor.abs().sum() > 0) for tensor in averaged_tensors(population)[member].values())

    def test_a_member_of_weight_zero_is_not_read(self) -> None:
        population = Population(make_networks("linear", 3))
        population.matrix[1] = torch.nan
        for tensor in population.combined([0.5, 0.0, 0.5]).values():
            assert torch.isfinite(tensor).all()

    @pytest.mark.parametrize("weights", [[0.5, 0.5], [0.5, 0.5, 0.5], [1.5, -0.5, 0.0], [float("nan"), 0.5, 0.5]])
    def test_bad_weights_are_refused(self, weights: list[float]) -> None:
        with pytest.raises(MixingError):
            Population(make_networks("linear", 3)).combined(weights)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda population: pickle.loads(pickle.dumps(population))])
def test_copies_know_who_was_dropped(copied: Callable[[Population], Population]) -> None:
    population = Population(make_networks("linear", 3))
    population.dropped = frozenset({1})
    assert copied(population).active == (0, 2)


def test_pruning_masks_stay_with_their_member() -> None:
    networks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    for network in networks:
        prune.l1_unstructured(network[0], "weight", 0.5)
    masks = [network[0].weight_mask.clone() for network in networks]
    population = Population(networks)
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
    assert population.averaged == ("0.bias", "0.weight_orig")
    assert all(torch.equal(network[0].weight_mask, mask) for network, mask in zip(population, masks, strict=True))


class TestLikeAModuleList:
    def make(self) -> Population:
        return Population.build(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3, seed=2)

    def test_build_makes_the_members_of_papa_train(self) -> None:
        population, twin = self.make(), self.make()
        assert torch.equal(population.matrix, twin.matrix)
        assert bool((population.distances() > 0).all())
        for member, net in enumerate(population):
            with global_stream(2, "init", member):
                expected = nn.Linear(3, 4)
            assert torch.equal(net[0].weight, expected.weight)
        with pytest.raises(MemberError, match="make_model is a Linear, expected a function that makes a new member"):
            Population.build(nn.Linear(3, 4), 3)

    def test_modes(self) -> None:
        population = self.make()
        assert population.eval() is population
        assert not any(module.training for net in population for module in net.modules())
        assert population.train() is population
        assert all(module.training for net in population for module in net.modules())

    def test_its_state_is_that_of_a_module_list_and_is_loaded_in_place(self) -> None:
        population, other = self.make(), self.make()
        state = {name: value.clone() for name, value in population.state_dict().items()}
        assert state.keys() == nn.ModuleList(list(population)).state_dict().keys()
        other.mix_(torch.full((3, 3), 1 / 3))
        other.load_state_dict(state)
        assert torch.equal(other.matrix, population.matrix)
        with pytest.raises(MemberError, match=r"state has no member 2, expected that of a population of 3"):
            other.load_state_dict({name: value for name, value in state.items() if not name.startswith("2")})
        with pytest.raises(MemberError, match=r"state has 'weight', which is no member"):
            other.load_state_dict({**state, "weight": torch.zeros(1)})
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict({name: value for name, value in state.items() if name != "1.0.bias"})

    def test_its_name_says_what_it_is(self) -> None:
        population = self.make()
        population.dropped = frozenset({1})
        numbers = f"{4 * 3 + 4 + 4 * 4} averaged numbers each"
        assert repr(population) == f"Population(3 x Sequential, {numbers}, float32 on cpu, without 1)"


class Quantised(Tensor):
    """A subclass, as the bases under adapters are; it can be copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> Quantised:
        return self.detach().clone().as_subclass(Quantised)


def test_tensors_that_are_left_out_may_be_of_any_kind() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        net[0].weight = nn.Parameter(torch.randn(4, 3).as_subclass(Quantised), requires_grad=False)
        net.register_buffer("codes", torch.zeros(2, dtype=torch.uint8).as_subclass(Quantised))
        return net

    with pytest.raises(MemberError, match=r"'0.weight' as Quantised, expected a plain dense tensor: leave it out with"):
        Population([make(), make()])
    population = Population([make(), make()], average={"0.weight": False})
    before = [net[0].weight.detach().clone() for net in population]
    population.mix_(torch.full((2, 2), 0.5))
    assert all(torch.equal(net[0].weight, weight) for net, weight in zip(population, before, strict=True))
    assert torch.equal(population[0][1].weight, population[1][1].weight)
    assert isinstance(average_soup(population)[0].weight, Quantised)


def test_a_matrix_in_huge_pages_is_like_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        nets = [nn.Linear(40, 30).to(dtype) for _ in range(3)]
        usual = Population(copy.deepcopy(nets))
        with monkeypatch.context() as patch:
            patch.setattr("papa.core.group.LEAST_HUGE_BYTES", 1)
            huge = Population(nets)
        assert huge.matrix.data_ptr() % 4096 == 0
        for population in (usual, huge):
            population.mix_(torch.full((3, 3), 1 / 3))
        assert torch.equal(huge.matrix, usual.matrix)
        assert torch.equal(copy.deepcopy(huge).matrix, usual.matrix)
        torch.save(huge[1].state_dict(), tmp_path / "net.pt")
        assert (tmp_path / "net.pt").stat().st_size < 20_000  # one member, not the matrix
        assert torch.equal(torch.load(tmp_path / "net.pt", weights_only=True)["weight"], usual[1].weight)
