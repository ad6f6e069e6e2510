from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import (
    NETWORKS,
    assert_close,
    assert_same_bits,
    make_network,
    make_networks,
    random_stochastic,
    reference_mix,
    snapshot,
)
from papa.core.population import Population
from papa.core.soups import Trial, average_soup, greedy_soup
from papa.errors import MemberError, MixingError, PapaError, SoupError


def in_every_form(networks: list[nn.Module]) -> dict[str, Any]:
    return {
        "modules": networks,
        "state dicts": [network.state_dict() for network in networks],
        "population": Population(networks),
    }


def state_of(soup: Any) -> dict[str, Tensor]:
    return dict(soup.state_dict()) if isinstance(soup, nn.Module) else soup


class TestAverageSoup:
    @given(
        st.sampled_from([kind for kind in NETWORKS if kind != "oddities"]),
        st.integers(1, 5),
        st.integers(0, 1000),
        st.booleans(),
    )
    def test_it_is_the_weighted_mean_whatever_it_is_made_of(
        self, kind: str, size: int, seed: int, is_weighted: bool
    ) -> None:
        networks = make_networks(kind, size, seed)
        weights = (
            random_stochastic(size, seed)[0] if is_weighted else torch.full((size,), 1 / size, dtype=torch.float64)
        )
        states = [{name: tensor.clone() for name, tensor in network.state_dict().items()} for network in networks]
        for members in in_every_form(networks).values():
            soup = state_of(average_soup(members, weights if is_weighted else None))
            assert list(soup) == list(states[0])
            for name, tensor in soup.items():
                if tensor.is_floating_point():
                    assert tensor.dtype == states[0][name].dtype
                    assert_close(tensor, reference_mix(states, weights[None], name)[0])
                else:
                    assert torch.equal(tensor, states[0][name])

    @pytest.mark.parametrize("form", ["modules", "state dicts", "population"])
    def test_it_is_independent_of_the_members(self, form: str) -> None:
        networks = make_networks("conv_batch_norm", 3)
        before = [snapshot(network) for network in networks]
        soup = average_soup(in_every_form(networks)[form])
        for tensor in state_of(soup).values():
            tensor.zero_()
        for network, state in zip(networks, before, strict=True):
            assert_same_bits(snapshot(network), state)

    def test_what_cannot_be_averaged_comes_from_the_first(self) -> None:
        networks = make_networks("oddities", 3)
        for members in (networks, Population(networks)):
            soup = average_soup(members)
            assert_same_bits(snapshot(soup), snapshot(networks[0]), ["count", "mask", "table"])

    def test_masks_in_state_dicts_survive(self) -> None:
        states = [network.state_dict() for network in make_networks("oddities", 3)]
        assert torch.equal(average_soup(states)["mask"], states[0]["mask"])

    @pytest.mark.parametrize("form", ["modules", "state dicts", "population"])
    @pytest.mark.parametrize("broken", [0, 1])
    def test_a_weight_of_zero_excludes_a_non_finite_member(self, form: str, broken: int) -> None:
        networks = make_networks("conv_batch_norm", 3)
        for tensor in networks[broken].state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        weights = [0.5, 0.5, 0.5]
        weights[broken] = 0.0
        healthy = [network.state_dict() for index, network in enumerate(networks) if index != broken]
        expected = average_soup(healthy)
        soup = state_of(average_soup(in_every_form(networks)[form], weights))
        for name, tensor in expected.items():
            if tensor.is_floating_point():
                assert torch.equal(soup[name], tensor), name

    def test_tied_weights_stay_tied(self) -> None:
        soup = average_soup(make_networks("tied", 3))
        assert soup.head.weight is soup.embedding.weight

    def test_a_population_keeps_what_its_patterns_leave_out(self) -> None:
        networks = make_networks("linear", 3)
        soup = average_soup(Population(networks, average={"2.*": False}))
        assert_same_bits(snapshot(soup), snapshot(networks[0]), ["2.weight", "2.bias"])
        assert not torch.equal(soup.get_parameter("0.weight"), networks[0].get_parameter("0.weight"))

    def test_a_population_whose_tensors_left_the_matrix_is_refreshed_first(self) -> None:
        population = Population(make_networks("conv_batch_norm", 2))
        population[0].get_submodule("1").running_mean = torch.full((6,), 7.0)
        population[1].get_buffer("1.running_mean").fill_(1.0)
        assert average_soup(population).get_buffer("1.running_mean").tolist() == [4.0] * 6

    def test_half_precision_is_averaged_in_single(self) -> None:
        # 1/3 of each is 1365.33: added up in half precision this gives 4094 or 4096, not 4097.
        states = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (4096.0, 4096.0, 4104.0)]
        assert average_soup(states)["w"].item() == torch.tensor(12296 / 3).half().item()

    def test_values_that_are_no_tensors_come_from_the_first(self) -> None:
        states = [{"w": torch.ones(2), "version": index, "extra": {"a": [index]}} for index in range(2)]
        soup = average_soup(states)
        assert (soup["version"], soup["extra"]) == (0, {"a": [0]})
        soup["extra"]["a"].append(1)
        assert states[0]["extra"] == {"a": [0]}

    def test_a_soup_module_works_and_can_be_trained(self) -> None:
        soup = average_soup(Population(make_networks("conv_batch_norm", 2)))
        soup(torch.randn(2, 2, 4, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in soup.parameters())


def literal_algorithm_3(states: list[dict[str, Tensor]], score: Any) -> tuple[list[int], float]:
    """Greedy soup as the paper writes it, with a running mean of state dicts."""
    order = sorted(range(len(states)), key=lambda index: score(states[index]), reverse=True)
    chosen, soup = [order[0]], dict(states[order[0]])
    for index in order[1:]:
        count = len(chosen)
        candidate = {key: (count * soup[key] + states[index][key]) / (count + 1) for key in soup}
        if score(candidate) >= score(soup):
            chosen, soup = [*chosen, index], candidate
    return chosen, score(soup)


def table_of_scores(size: int, seed: int, num_levels: int) -> Any:
    """A score for every subset of members, out of few levels so that ties are frequent."""
    levels = random.Random(seed)
    scores: dict[frozenset[int], int] = {}

    def score(state: dict[str, Tensor]) -> int:
        members = frozenset((state["w"] > 1e-9).nonzero().flatten().tolist())
        return scores.setdefault(members, levels.randrange(num_levels))

    return score


def one_hot_states(size: int) -> list[dict[str, Tensor]]:
    """State dicts whose mean tells which of them went in."""
    return [{"w": row} for row in torch.eye(size, dtype=torch.float64)]


class TestGreedySoup:
    @given(st.integers(1, 7), st.integers(0, 10_000), st.sampled_from([2, 4, 100]))
    def test_it_is_algorithm_3(self, size: int, seed: int, num_levels: int) -> None:
        states, score = one_hot_states(size), table_of_scores(size, seed, num_levels)
        chosen, best = literal_algorithm_3(states, score)
        soup = greedy_soup(states, score)
        assert list(soup.members) == chosen
        assert soup.score == best
        assert torch.allclose(soup.network["w"], sum(states[index]["w"] for index in chosen) / len(chosen))
        assert score(soup.network) == best

    @given(st.integers(1, 7), st.integers(0, 10_000), st.sampled_from([2, 4, 100]))
    def test_a_lower_score_is_better_where_that_is_said(self, size: int, seed: int, num_levels: int) -> None:
        states, score = one_hot_states(size), table_of_scores(size, seed, num_levels)
        higher = greedy_soup(states, lambda state: -score(state))
        lower = greedy_soup(states, score, higher_is_better=False)
        assert (lower.members, lower.score) == (higher.members, -higher.score)
        assert [trial.kept for trial in lower.trials] == [trial.kept for trial in higher.trials]

    def test_what_comes_after_averaging_leaves_a_member_by_itself_alone(self) -> None:
        nets = [nn.Linear(2, 2) for _ in range(2)]

        def score(net: nn.Module) -> float:
            return 1.0 if torch.equal(net.weight, nets[1].weight) else 0.0

        def spoil(net: nn.Module, row: Tensor) -> None:
            nn.init.zeros_(net.weight)

        soup = greedy_soup(nets, score, after=spoil)
        assert soup.members == (1,)
        assert score(soup.network) == soup.score == 1.0

    @given(st.integers(1, 7), st.integers(0, 10_000))
    def test_it_never_scores_below_the_best_member_and_records_every_trial(self, size: int, seed: int) -> None:
        states, score = one_hot_states(size), table_of_scores(size, seed, num_levels=10)
        soup = greedy_soup(states, score)
        assert list(soup.member_scores) == [score(state) for state in states]
        assert soup.score >= max(soup.member_scores)
        assert len(soup.trials) == size - 1
        current, best = soup.trials[0].members[:1] if soup.trials else soup.members, max(soup.member_scores)
        for trial in soup.trials:
            assert trial.members[:-1] == current
            assert trial.kept == (trial.score >= best)
            if trial.kept:
                current, best = trial.members, trial.score
        assert (soup.members, soup.score) == (current, best)

    def test_an_equal_score_adds_the_member(self) -> None:
        soup = greedy_soup(one_hot_states(3), lambda state: 1.0)
        assert soup.members == (0, 1, 2)
        assert soup.trials == (Trial((0, 1), 1.0, True), Trial((0, 1, 2), 1.0, True))

    def test_ties_go_by_loss_then_by_index(self) -> None:
        losses = {0: 0.3, 1: 0.1, 2: math.nan, 3: 0.1}

        def score(state: dict[str, Tensor]) -> tuple[float, float]:
            inside = state["w"].nonzero().flatten().tolist()
            return 1.0, losses[inside[0]]

        assert greedy_soup(one_hot_states(4), score).members == (1, 3, 0, 2)

    def test_the_score_goes_before_the_loss(self) -> None:
        def score(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return torch.tensor(float(state["w"].argmax())), torch.tensor(float(state["w"].argmax()))

        assert greedy_soup(one_hot_states(3), score).members[0] == 2

    @pytest.mark.parametrize("form", ["modules", "state dicts", "population"])
    def test_it_takes_every_form_and_leaves_the_members_alone(self, form: str) -> None:
        networks = make_networks("linear", 3)
        before = [snapshot(network) for network in networks]
        soup = greedy_soup(in_every_form(networks)[form], lambda network: 1.0)
        expected = average_soup([network.state_dict() for network in networks])
        for name, tensor in state_of(soup.network).items():
            assert_close(tensor, expected[name])
            tensor.zero_()
        for network, state in zip(networks, before, strict=True):
            assert_same_bits(snapshot(network), state)

    def test_members_are_scored_themselves(self) -> None:
        networks = make_networks("linear", 2)
        scored = []
        greedy_soup(networks, lambda network: scored.append(network) or 0.0)
        assert scored[0] is networks[0]
        assert scored[1] is networks[1]

    def test_a_soup_of_one_is_a_copy_of_it(self) -> None:
        network = make_network("conv_batch_norm", 0)
        soup = greedy_soup([network], lambda _: 3.0)
        assert (soup.members, soup.score, soup.trials) == ((0,), 3.0, ())
        assert soup.network is not network
        assert_same_bits(snapshot(soup.network), snapshot(network))

    def test_scores_of_minus_infinity_are_scores(self) -> None:
        assert greedy_soup(one_hot_states(2), lambda state: -math.inf).members == (0, 1)

    def test_a_member_that_scores_nan_is_left_out(self) -> None:
        soup = greedy_soup(one_hot_states(3), lambda state: math.nan if state["w"][1] else 1.0)
        assert soup.members == (0, 2)
        assert math.isnan(soup.member_scores[1])
        assert [trial.members for trial in soup.trials] == [(0, 2)]

    def test_a_soup_that_scores_nan_is_left_out(self) -> None:
        soup = greedy_soup(one_hot_states(2), lambda state: math.nan if state["w"].all() else 1.0)
        assert (soup.members, soup.score, soup.trials[0].kept) == ((0,), 1.0, False)

    def test_members_that_all_score_nan_raise(self) -> None:
        with pytest.raises(SoupError, match="every member scored NaN, expected numbers: check"):
            greedy_soup(one_hot_states(2), lambda state: math.nan)

    def test_networks_that_share_a_part_have_a_soup(self) -> None:
        backbone = nn.Linear(4, 4)
        heads = [nn.Linear(4, 2) for _ in range(2)]
        networks = [nn.Sequential(backbone, head) for head in heads]
        soup = average_soup(networks)
        assert_close(soup.state_dict()["0.weight"], backbone.state_dict()["weight"])
        assert_close(soup.state_dict()["1.weight"], ((heads[0].weight + heads[1].weight) / 2).detach())
        assert next(soup.children()) is not backbone


def any_soup(members: Any) -> list[Any]:
    return [lambda: average_soup(members), lambda: greedy_soup(members, lambda _: 0.0)]


class TestErrors:
    @pytest.mark.parametrize(
        ("members", "error", "message"),
        [
            ([], SoupError, "a soup needs at least one network, got none"),
            ([1, "two"], SoupError, "a soup is made of a population, of modules or of state dicts, got int, str"),
            (
                [nn.Linear(2, 2), {"weight": torch.ones(2, 2)}],
                SoupError,
                "a soup is made of a population, of modules or of state dicts, got Linear, dict",
            ),
            (
                [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)}],
                SoupError,
                "state dict 1 has no 'b', an extra 'c', compared with state dict 0: a soup needs networks of one",
            ),
            (
                [{"a": torch.ones(2)}, {"a": torch.ones(2)}, {"a": torch.ones(3)}],
                SoupError,
                r"state dict 2 has 'a' of shape \(3,\), state dict 0 has \(2,\): a soup needs networks of one",
            ),
            (
                [nn.Linear(2, 2), nn.Linear(2, 3)],
                MemberError,
                r"member 1 has 'weight' of shape \(3, 2\), member 0 has \(2, 2\): all members",
            ),
        ],
    )
    def test_networks_that_cannot_be_averaged(self, members: Any, error: type[PapaError], message: str) -> None:
        for make in any_soup(members):
            with pytest.raises(error, match=message):
                make()

    @pytest.mark.parametrize(
        ("weights", "error", "message"),
        [
            ([1.0], SoupError, r"weights have shape \(1,\), expected \(2,\): one for each network"),
            ([0.5, 0.6], MixingError, r"the soup's weights sums to 1.1, expected 1: divide it by its sum"),
            ([1.5, -0.5], MixingError, r"the soup's weights is \[1.5, -0.5\], expected no negative weight"),
            ([math.nan, 1.0], MixingError, r"the soup's weights is \[nan, 1.0\], expected finite weights"),
        ],
    )
    def test_invalid_weights_raise(self, weights: list[float], error: type[PapaError], message: str) -> None:
        with pytest.raises(error, match=message):
            average_soup(one_hot_states(2), weights)


def test_whole_numbers_and_others_under_one_name_raise() -> None:
    with pytest.raises(SoupError, match=r"state dict 1 has 'a' as torch\.float32, state dict 0 as torch\.int64"):
        average_soup([{"a": torch.ones(2, dtype=torch.int64)}, {"a": torch.ones(2)}])


@pytest.mark.parametrize("kind", ["modules", "states", "population"])
def test_a_warning_names_the_members_with_nan(kind: str) -> None:
    nets = [nn.Linear(3, 2) for _ in range(3)]
    with torch.no_grad():
        nets[1].weight[0, 0] = math.nan
    members: Any = nets if kind == "modules" else [net.state_dict() for net in nets]
    members = Population(nets) if kind == "population" else members
    with pytest.warns(UserWarning, match="the average soup has NaN, from member 1: give it weight 0"):
        average_soup(members)
    average_soup(members, weights=[0.5, 0.0, 0.5])  # without a warning


def test_infinite_masks_are_no_nan() -> None:
    nets = [nn.Linear(3, 2) for _ in range(2)]
    for net in nets:
        net.register_buffer("bias_table", torch.tensor([-math.inf, 0.0, math.inf]))
    average_soup(nets)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_averages_of_narrow_numbers_are_looked_at_too(dtype: torch.dtype) -> None:
    states = [{"weight": torch.ones(4).to(dtype)} for _ in range(2)]
    assert average_soup(states)["weight"].dtype == dtype
    states[0]["weight"] = torch.tensor([1.0, math.nan]).to(dtype).repeat(2)
    with pytest.warns(UserWarning, match="the average soup has NaN, from member 0: give"):
        average_soup(states)
