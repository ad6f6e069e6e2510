from __future__ import annotations

import itertools

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import random_stochastic
from papa.core import mixing
from papa.errors import MixingError

sizes = st.integers(1, 10)
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0.0, 1.0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """A matrix that some rule could ask for, or that a user could write."""
    size, seed, share = draw(sizes), draw(seeds), draw(shares)
    return draw(
        st.sampled_from(
            [
                mixing.identity(size),
                mixing.push(size, share),
                mixing.merge_all(size),
                mixing.merge_pairs(size, generator(seed), share=share),
                mixing.merge_many(size, share=share),
                mixing.soup_row(size, [seed % size]).expand(size, size),
                mixing.identity(size)[torch.randperm(size, generator=generator(seed))],
                random_stochastic(size, seed),
            ]
        )
    )


@given(matrices())
def test_every_matrix_is_row_stochastic_and_double(matrix: Tensor) -> None:
    assert matrix.dtype == torch.float64
    assert bool((matrix >= 0).all())
    assert torch.allclose(matrix.sum(dim=1), torch.ones(len(matrix)).double(), rtol=0, atol=1e-14)
    assert torch.equal(mixing.check_rows(matrix, len(matrix)), matrix)


@given(sizes)
def test_push_is_the_identity_at_one_and_merge_all_at_zero(size: int) -> None:
    assert torch.equal(mixing.push(size, 1.0), mixing.identity(size))
    assert torch.equal(mixing.push(size, 0.0), mixing.merge_all(size))


@given(sizes, shares, shares)
def test_two_pushes_are_one_push_by_the_product_of_their_factors(size: int, one: float, other: float) -> None:
    twice = mixing.push(size, one) @ mixing.push(size, other)
    assert torch.allclose(twice, mixing.push(size, one * other), rtol=0, atol=1e-15)


@given(shares, seeds)
def test_a_population_of_one_stays_exactly_what_it_is(share: float, seed: int) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    assert torch.equal(mixing.push(1, share), one)
    assert torch.equal(mixing.merge_all(1), one)
    assert torch.equal(mixing.merge_pairs(1, generator(seed), share=share), one)
    assert torch.equal(mixing.merge_many(1, share=share), one)


@given(st.integers(2, 10), st.floats(0.01, 0.99), seeds)
def test_every_pair_has_two_distinct_parents_with_the_two_shares(size: int, share: float, seed: int) -> None:
    for row in mixing.merge_pairs(size, generator(seed), share=share):
        assert sorted(row[row != 0].tolist()) == sorted([share, 1.0 - share])


def test_pairs_are_drawn_afresh_for_each_child() -> None:
    source = generator(8)
    outcomes = list(itertools.combinations(range(4), 2))
    table = torch.zeros(6, 6)
    for _ in range(2000):
        first, second, *_ = (tuple(row.nonzero().flatten().tolist()) for row in mixing.merge_pairs(4, source))
        table[outcomes.index(first), outcomes.index(second)] += 1
    assert scipy.stats.chi2_contingency(table.numpy()).pvalue > 0.01


@given(st.integers(2, 10), shares)
def test_merge_many_keeps_its_share_and_spreads_the_rest_evenly(size: int, share: float) -> None:
    matrix = mixing.merge_many(size, share=share)
    others = matrix[~torch.eye(size, dtype=torch.bool)]
    assert float((matrix.diagonal() - share).abs().max()) < 1e-15
    assert float((others - (1.0 - share) / (size - 1)).abs().max()) < 1e-15


def test_a_soup_row_weighs_the_chosen_equally() -> None:
    assert mixing.soup_row(4, [3, 1]).tolist() == [0.0, 0.5, 0.0, 0.5]


@given(matrices())
def test_rows_rounded_to_float32_still_sum_to_exactly_one(matrix: Tensor) -> None:
    rounded = mixing.exact_in_float32(matrix)
    assert rounded.dtype == torch.float32
    assert bool((rounded >= 0).all())
    assert rounded.double().sum(dim=1).tolist() == [1.0] * len(matrix)
    assert float((rounded - matrix).abs().max()) <= len(matrix) * 2.0**-25


@given(matrices())
def test_rounding_to_float32_settles(matrix: Tensor) -> None:
    rounded = mixing.exact_in_float32(matrix)
    assert torch.equal(mixing.exact_in_float32(rounded.double()), rounded)


def test_check_rows_takes_lists_and_other_dtypes() -> None:
    assert mixing.check_rows([[1, 0], [0.5, 0.5]], 2).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert mixing.check_rows(torch.full((3, 3), 1 / 3), 3).dtype == torch.float64


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (
            [[1.0, 0.0]],
            r"mixing matrix has shape \(1, 2\), expected \(2, 2\): one row and one column for each",
        ),
        ([0.5, 0.5], r"mixing matrix has shape \(2,\), expected \(2, 2\)"),
        (torch.eye(3), r"mixing matrix has shape \(3, 3\), expected \(2, 2\)"),
        ([[1.0, 0.0], [0.5, 0.4]], r"row 1 of the mixing matrix sums to 0.9, expected 1: divide it by its sum"),
        ([[1.5, -0.5], [0.0, 1.0]], r"row 0 of the mixing matrix is \[1.5, -0.5\], expected no negative weight"),
        ([[1.0, 0.0], [float("nan"), 1.0]], r"row 1 of the mixing matrix is \[nan, 1.0\], expected finite weights"),
        ([[float("inf"), 0.0], [0.0, 1.0]], r"row 0 of the mixing matrix is \[inf, 0.0\], expected finite weights"),
    ],
)
def test_check_rows_raises_for_invalid_matrices(matrix: object, message: str) -> None:
    with pytest.raises(MixingError, match=message):
        mixing.check_rows(matrix, 2)
