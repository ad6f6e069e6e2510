"""Soups whose weights are chosen: their laws, and the same from files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import assert_close, make_networks
from papa import average_soup, learned_soup, model_stock, soup_files
from papa.core.population import Population
from papa.core.soups import mean_network
from papa.errors import ConfigError, SoupError
from papa.files import EvaluationContext
from papa.files.learned import slope_of, stock_ratio


def regression(num_batches: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_batches, 32, 3, generator=generator)
    return [(part, (part[:, :2] > 0).float()) for part in inputs]


def classes(num_batches: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(inputs, targets[:, 0].long()) for inputs, targets in regression(num_batches)]


class TestLearnedSoup:
    def test_it_finds_the_one_network_that_fits(self) -> None:
        networks = [nn.Linear(3, 2) for _ in range(4)]
        batches = [(inputs, networks[2](inputs).detach()) for inputs, _ in regression()]
        soup = learned_soup(networks, batches, loss=F.mse_loss, num_epochs=60)
        assert int(soup.weights.argmax()) == 2
        assert float(soup.weights[2]) > 0.9
        assert soup.loss < 0.05 * soup.losses[0]

    def test_weights_are_on_the_simplex_and_never_worse_than_equal_ones(self) -> None:
        networks = make_networks("linear", 3)
        soup = learned_soup(networks, classes(), num_epochs=2)
        assert float(soup.weights.sum()) == pytest.approx(1.0)
        assert bool((soup.weights >= 0).all())
        equal = average_soup(networks)
        expected = sum(float(F.cross_entropy(equal(inputs), targets).detach()) for inputs, targets in classes()) / 4
        assert soup.losses[0] == pytest.approx(expected, rel=1e-6)
        assert soup.loss <= soup.losses[0]
        mixed = average_soup(networks, weights=soup.weights.tolist())
        for name, tensor in soup.network.state_dict().items():
            assert_close(tensor, mixed.state_dict()[name])
        assert all(parameter.grad is None for parameter in soup.network.parameters())

    def test_its_derivative_is_that_of_the_loss(self) -> None:
        """One small step of gradient descent in the weights, against autograd through the soup."""
        networks, (batch, *_) = [network.double() for network in make_networks("linear", 3)], classes()
        inputs, targets = batch[0].double(), batch[1]
        row = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        stacked = {name: torch.stack([net.state_dict()[name] for net in networks]) for name in networks[0].state_dict()}
        mean = {name: torch.tensordot(row, tensors, 1) for name, tensors in stacked.items()}
        F.cross_entropy(torch.func.functional_call(networks[0], mean, (inputs,)), targets).backward()
        _, found = slope_of(mean_network(networks), [(inputs, targets)], F.cross_entropy)(row.detach(), 0)
        assert_close(found, row.grad)

    def test_dropped_members_have_no_weight(self) -> None:
        population = Population(make_networks("linear", 3))
        population.dropped = frozenset({1})
        assert float(learned_soup(population, classes(), num_epochs=1).weights[1]) == 0.0

    def test_what_it_cannot_use_is_refused(self) -> None:
        with pytest.raises(SoupError, match="a learned soup needs networks, got state dicts"):
            learned_soup([net.state_dict() for net in make_networks("linear", 2)], classes())
        with pytest.raises(SoupError, match="a learned soup needs held-out data, got no batch"):
            learned_soup(make_networks("linear", 2), [])
        with pytest.raises(SoupError, match="a batch holds only inputs"):
            learned_soup(make_networks("linear", 2), [torch.randn(4, 3)])


class TestModelStock:
    def test_it_is_the_mean_if_all_moved_alike_and_the_start_if_at_right_angles(self) -> None:
        start = {"weight": torch.zeros(3)}
        alike = [{"weight": torch.tensor([1.0, 0.0, 0.0])}, {"weight": torch.tensor([3.0, 0.0, 0.0])}]
        assert_close(model_stock(alike, start).network["weight"], torch.tensor([2.0, 0.0, 0.0]))
        apart = [{"weight": torch.tensor([1.0, 0.0, 0.0])}, {"weight": torch.tensor([0.0, 1.0, 0.0])}]
        assert_close(model_stock(apart, start).network["weight"], torch.zeros(3))

    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_its_ratio_is_the_published_one(self, count: int) -> None:
        rows = torch.randn(count, 50, dtype=torch.float64) + 1.0
        cosines = [
            float(F.cosine_similarity(rows[i], rows[j], dim=0)) for i in range(count) for j in range(count) if i != j
        ]
        cosine = sum(cosines) / len(cosines)
        assert stock_ratio(rows @ rows.T) == pytest.approx(count * cosine / (1 + (count - 1) * cosine))

    def test_every_tensor_has_its_own_ratio_and_tied_ones_count_once(self) -> None:
        start, *networks = make_networks("tied", 4)
        before = copy.deepcopy(start.state_dict())
        soup = model_stock(networks, start)
        mean = average_soup(networks).state_dict()
        for name, ratio in soup.ratios.items():
            expected = ratio * mean[name] + (1 - ratio) * before[name]
            assert_close(soup.network.state_dict()[name], expected)
        assert soup.network.head.weight is soup.network.embedding.weight

    def test_a_tensor_that_did_not_move_stays(self) -> None:
        assert stock_ratio(torch.zeros(2, 2, dtype=torch.float64)) == 1.0

    def test_one_network_is_refused(self) -> None:
        with pytest.raises(SoupError, match="Model Stock compares networks, got 1, expected at least two"):
            model_stock(make_networks("linear", 1), make_networks("linear", 1)[0])


class TestFiles:
    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        found = []
        for index, network in enumerate(make_networks("linear", 4)):
            found.append(tmp_path / f"{index}.safetensors")
            save_file(network.state_dict(), found[-1])
        return found

    def test_a_learned_soup_of_files_is_that_of_networks(self, paths: list[Path], tmp_path: Path) -> None:
        networks = make_networks("linear", 3)
        context = EvaluationContext(make_networks("linear", 1, seed=7)[0], classes(2))
        soup = soup_files(paths[:3], tmp_path / "soup.safetensors", learned=True, evaluation_context=context)
        expected = learned_soup(networks, classes(2))
        assert list(soup.weights) == pytest.approx(expected.weights.tolist(), abs=1e-5)
        for name, tensor in load_file(soup.path).items():
            assert_close(tensor, expected.network.state_dict()[name], 1e-5)
        assert any("the held-out loss is" in note for note in soup.notes)

    def test_a_model_stock_of_files_is_that_of_networks(self, paths: list[Path], tmp_path: Path) -> None:
        soup = soup_files(paths[:3], tmp_path / "soup.safetensors", stock=paths[3])
        expected = model_stock([load_file(path) for path in paths[:3]], load_file(paths[3])).network
        for name, tensor in load_file(soup.path).items():
            assert_close(tensor, expected[name])

    def test_one_way_to_choose_weights(self, paths: list[Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="one way to choose its weights, got learned and Model Stock"):
            soup_files(paths[:3], tmp_path / "soup.safetensors", learned=True, stock=paths[3])
        with pytest.raises(ConfigError, match="need a network and data"):
            soup_files(paths[:3], tmp_path / "soup.safetensors", learned=True)
