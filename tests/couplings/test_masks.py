"""Column masks: every column with its probability, every permutation equally likely, at any number of members."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass

import pytest
import scipy.stats
import torch

from helpers import make_networks
from papa.core.averager import Averager
from papa.core.population import Population
from papa.core.product import Lines, chosen_columns, write_columns_
from papa.core.rules import AveragingContext
from papa.couplings.anchored import Elastic
from papa.couplings.coupling import Coupling
from papa.couplings.masks import Mask, _places, _rate, depths, draw_columns, draw_permutations, fragments
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import PushPull
from papa.errors import MixingError
from papa.streams import stream


def layout_of(kind: str) -> object:
    return Population(make_networks(kind, 1)).layout


@pytest.mark.parametrize("by_lines", [False, True])
@pytest.mark.parametrize("growth", [0.02, 0.0])
@pytest.mark.parametrize("kind", ["conv_batch_norm", "mixed_dtypes", "tied"])
def test_each_column_is_chosen_with_the_share_of_its_tensor(kind: str, growth: float, by_lines: bool) -> None:
    layout = layout_of(kind)
    shares = [0.3 * slot.is_parameter + growth * number for number, slot in enumerate(layout.slots)]
    counts = {dtype: torch.zeros(columns) for dtype, columns in layout.num_columns.items()}
    for step in range(300):
        drawn = draw_columns(layout, shares, stream(1, "test", position=step), by_lines=by_lines)
        for dtype, lines in drawn.items():
            assert lines.width == (64 // dtype.itemsize if by_lines else 1)
            assert bool((lines.numbers[1:] > lines.numbers[:-1]).all())
            counts[dtype][lines.indices] += 1
    for slot, share in zip(layout.slots, shares, strict=True):
        width = 64 // slot.dtype.itemsize if by_lines else 1
        stop = slot.offset + -(-slot.numel // width) * width
        hits = counts[slot.dtype][slot.offset : stop].view(-1, width)
        assert torch.equal(hits, hits[:, :1].expand_as(hits)), "the columns of a line are chosen together"
        assert scipy.stats.binomtest(int(hits[:, 0].sum()), 300 * len(hits), share).pvalue > 1e-3
        hits.zero_()
    assert all(int(left.sum()) == 0 for left in counts.values()), "nothing but tensors is chosen"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_column_and_every_column(share: float) -> None:
    layout = layout_of("conv_batch_norm")
    shares = [share] * len(layout.slots)
    (columns,) = draw_columns(layout, shares, stream(0, "test"), by_lines=False).values()
    assert len(columns) == share * sum(slot.numel for slot in layout.slots)
    (lines,) = draw_columns(layout, shares, stream(0, "test"), by_lines=True).values()
    last = layout.slots[-1]
    assert len(lines) == share * -(-(last.offset + last.numel) // 16) * 16


@pytest.mark.parametrize("width", [1, 8])
def test_lines_are_read_and_written_like_their_columns(width: int) -> None:
    rows, numbers = torch.randn(3, 48), torch.tensor([0, 2, 5])
    assert chosen_columns(rows[:0], Lines(numbers, width)).shape == (0, 3 * width), "no row of an anchor is here"
    lines = Lines(numbers, width)
    assert lines.indices.tolist() == [width * number + place for number in (0, 2, 5) for place in range(width)]
    assert len(lines) == len(lines.indices)
    found = chosen_columns(rows, lines)
    assert torch.equal(found, rows[:, lines.indices])
    assert torch.equal(lines.part(width, 3 * width).indices, lines.indices[width:])
    expected = rows.clone()
    expected[:, lines.indices] = -found
    write_columns_(rows, lines, -found)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("is_first_only", [True, False])
def test_columns_are_chosen_independently_of_each_other(is_first_only: bool) -> None:
    """One tensor or all of them with the same share: how often each pair of neighbours is chosen."""
    layout = layout_of("conv_batch_norm")
    shares = [0.4 * (number == 0 or not is_first_only) for number in range(len(layout.slots))]
    first = layout.slots[0]
    chosen = torch.zeros(500, layout.num_columns[first.dtype], dtype=torch.bool)
    for step, row in enumerate(chosen):
        drawn = draw_columns(layout, shares, stream(2, "test", position=step), by_lines=False)
        row[drawn[first.dtype].indices] = True
    own = chosen[:, first.offset : first.offset + first.numel]
    both = int((own[:, 1:] & own[:, :-1]).sum())
    assert scipy.stats.binomtest(both, own[:, 1:].numel(), 0.16).pvalue > 1e-3
    if is_first_only:
        assert int(chosen.sum()) == int(own.sum())


@pytest.mark.parametrize(("length", "share"), [(2**40, 1e-9), (2**34, 1e-7), (10_000_000, 1e-4)])
def test_places_are_spread_evenly_over_any_length(length: int, share: float) -> None:
    places = _places(length, _rate(share), stream(4, "test")).double()
    assert scipy.stats.poisson.cdf(len(places), share * length) == pytest.approx(0.5, abs=0.499)
    assert scipy.stats.kstest(places / length, "uniform").pvalue > 1e-3
    assert bool((places[1:] > places[:-1]).all())


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("table", [6, 0])
def test_every_permutation_is_equally_likely(size: int, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papa.couplings.masks.MAX_SIZE_OF_TABLE", table)
    drawn = draw_permutations(size, 4000, stream(3, "test"))
    counts = collections.Counter(map(tuple, drawn.T.tolist()))
    assert counts.keys() == set(itertools.permutations(range(size)))
    assert scipy.stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_layers_are_counted_from_the_first_to_the_last() -> None:
    layout = layout_of("conv_batch_norm")
    found = dict(zip((slot.name for slot in layout.slots), depths(layout), strict=True))
    assert (found["0.weight"], found["0.bias"], found["1.weight"], found["4.bias"]) == (0.0, 0.0, 0.5, 1.0)


@pytest.mark.parametrize("count", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", ["conv_batch_norm", "mixed_dtypes"])
def test_fragments_hold_every_tensor_once(kind: str, count: int) -> None:
    layout = layout_of(kind)
    parts = fragments(layout, count)
    assert len(parts) == count
    for slot in layout.slots:
        wholes = [part[slot.dtype] for part in parts if slot.dtype in part]
        inside = [w for w in wholes if w.start <= slot.offset and slot.offset + slot.numel <= w.stop]
        assert len(inside) == 1 or slot.numel == 0


def spread_of(rows: torch.Tensor) -> torch.Tensor:
    return (rows - rows.mean(dim=0)).square().sum()


NUM_PARAMETERS = (
    Population(make_networks("conv_batch_norm", 1)).to(torch.float64).layout.num_parameter_columns[torch.float64]
)


def one_step(rule: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows before and after a step."""
    population = Population([network.double() for network in make_networks("conv_batch_norm", 5)])
    averager = Averager(population, rule)
    before = population.matrix.clone()
    averager.step()
    return before, population.matrix


class TestLaws:
    @pytest.mark.parametrize("by_lines", [False, True])
    @pytest.mark.parametrize("depth", ["decreasing", "constant", "increasing"])
    def test_a_shuffle_keeps_the_mean_and_the_total_spread(self, depth: str, by_lines: bool) -> None:
        before, after = one_step(Shuffle(share=0.5, depth=depth, by_lines=by_lines))
        assert torch.allclose(after.mean(dim=0), before.mean(dim=0), rtol=0, atol=1e-14)
        assert float(spread_of(after)) == pytest.approx(float(spread_of(before)), rel=1e-13)
        assert torch.equal(after.sort(dim=0).values, before.sort(dim=0).values), "each column keeps its numbers"
        assert not torch.equal(after, before)

    @pytest.mark.parametrize("by_lines", [False, True])
    def test_a_sparse_average_keeps_the_mean_and_shrinks_the_spread_by_its_share(self, by_lines: bool) -> None:
        before, after = one_step(SparseAverage(share=0.5, by_lines=by_lines))
        assert torch.allclose(after.mean(dim=0), before.mean(dim=0), rtol=0, atol=1e-14)
        changed = (after != before).any(dim=0)
        assert torch.allclose(after[:, changed], after[:, changed].mean(dim=0).expand(5, -1))
        parameters = slice(0, NUM_PARAMETERS)
        ratio = float(spread_of(after[:, parameters])) / float(spread_of(before[:, parameters]))
        assert 0.3 < ratio < 0.7
        assert torch.equal(after[:, NUM_PARAMETERS:], before[:, NUM_PARAMETERS:]), "buffers stay"

    def test_elastic_keeps_the_mean_of_members_and_anchor(self) -> None:
        matrix = Elastic(every_steps=1).matrix(AveragingContext(step=1, size=5, lr_ratio=1.0))
        assert torch.allclose(matrix.sum(dim=0), torch.ones(6).double())
        assert torch.equal(matrix, matrix.T)

    @pytest.mark.parametrize("spread", [0.0, 3.0, 100.0])
    def test_push_pull_moves_distances_toward_the_spread(self, spread: float) -> None:
        population = Population([network.double() for network in make_networks("linear", 5)])
        rows, count = population.matrix.clone(), population.layout.num_parameter_columns[torch.float64]
        distances = population.distances()
        Averager(population, PushPull(spread=spread, pull=0.1, every_steps=1)).step()
        found = (population.matrix - rows.mean(dim=0))[:, :count].norm(dim=1)
        assert torch.allclose(found, distances + 0.1 * (spread - distances))


class TestBadMasks:
    """What is wrong is said before anything is changed."""

    @staticmethod
    def refused(columns: object, sources: object = None, dtype: torch.dtype = torch.float32) -> str:
        population = Population(make_networks("linear", 3))
        before = population.matrix.clone()

        @dataclass(frozen=True)
        class Masked(Coupling):
            def mask(self, context: AveragingContext, layout: object) -> Mask:
                return Mask({dtype: columns}, None if sources is None else {dtype: sources})

        with pytest.raises(MixingError) as error:
            Averager(population, Masked(every_steps=1)).step()
        assert torch.equal(population.matrix, before)
        return str(error.value)

    def test_columns(self) -> None:
        assert "papa.core.product.Lines(indices)" in self.refused(torch.arange(3))
        assert "papa.core.product.Lines(indices)" in self.refused([1, 2])
        assert "a slice without a step" in self.refused(slice(0, 8, 2))
        assert "float64, which the networks do not have" in self.refused(slice(0, 8), dtype=torch.float64)
        assert "expected a vector in int64" in self.refused(Lines(torch.arange(3, dtype=torch.int32)))
        assert "the width of lines is 3, expected a divisor of 16" in self.refused(Lines(torch.arange(1), 3))
        assert "the width of lines is 32" in self.refused(Lines(torch.arange(1), 32))

    def test_sources(self) -> None:
        two = torch.zeros(3, 2, dtype=torch.int32)
        assert "one column for each of its lines" in self.refused(slice(0, 2), two)
        assert "shape (3, 2)" in self.refused(Lines(torch.arange(1), 16), two)
        assert "shape (2, 2)" in self.refused(Lines(torch.arange(2)), two[:2])

    def test_a_matrix_is_checked_as_without_a_mask(self) -> None:
        @dataclass(frozen=True)
        class Negative(SparseAverage):
            def matrix(self, context: AveragingContext) -> torch.Tensor:
                return torch.tensor([[2.0, -1.0], [0.0, 1.0]])

        with pytest.raises(MixingError, match="negative"):
            Averager(Population(make_networks("linear", 2)), Negative(share=0.5)).step()

    def test_shares(self) -> None:
        for share in (2.0, -0.1, "0.1", None):
            with pytest.raises(MixingError, match=r"share is .*, expected a number from 0 to 1"):
                SparseAverage(share=share)


def test_a_member_that_is_dropped_now_takes_no_part_in_the_permutation() -> None:
    population = Population(make_networks("linear", 3))
    for member, net in enumerate(population):
        for parameter in net.parameters():
            torch.nn.init.constant_(parameter, float(member) if member < 2 else float("nan"))
    Averager(population, Shuffle(share=1.0, depth="constant"), on_nonfinite="drop").step()
    kept = torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in list(population)[:2]])
    assert torch.equal(kept.sort(dim=0).values, torch.tensor([[0.0], [1.0]]).expand_as(kept))


def test_a_share_that_averages_in_a_large_part_of_training_is_too_weak() -> None:
    assert "half-life of 1.39e+03 steps, 87% of the training" in str(SparseAverage(share=0.001).too_weak_for(1600))
    assert SparseAverage(share=0.02).too_weak_for(1600) is None
