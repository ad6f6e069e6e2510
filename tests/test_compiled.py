"""Compiled averaging is the averaging of `papa.product` and `papa.row_measures`, but for rounding."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache

from papa import Averager, MergeAll, Population, Push, compiled
from papa.errors import MemberError, PapaError
from papa.product import column_blocks, push_blocks_
from papa.row_measures import squared_distances

SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def torch_compile() -> None:
    """These tests need what `torch.compile` needs, such as a C++ compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"torch.compile does not work here: {error}")


def rows(dtype: torch.dtype = torch.float32, *, columns: int = 70_001) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(SIZE, columns, generator=generator) + 1.0).to(dtype)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("keep", [0.9, 0.25, 1.0, 0.0])
def test_a_compiled_push_is_the_push(dtype: torch.dtype, rounding: float, keep: float) -> None:
    pushed, expected = rows(dtype), rows(dtype)
    compiled.push_(pushed, keep)
    push_blocks_(column_blocks(expected), keep)
    torch.testing.assert_close(pushed, expected, rtol=rounding, atol=rounding)
    if keep == 1.0:
        assert torch.equal(pushed, rows(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1_000, 70_001])
def test_compiled_distances_are_the_distances(dtype: torch.dtype, columns: int) -> None:
    matrix = rows(dtype, columns=columns)
    found = compiled.squared_distances(matrix)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, squared_distances(matrix), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_shows_in_every_distance(number: float) -> None:
    matrix = rows()
    matrix[1, 12_345] = number
    assert not compiled.squared_distances(matrix).isfinite().any()


def test_a_push_computes_in_float32_whatever_the_default_dtype() -> None:
    pushed, expected = rows(), rows()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(50):
            compiled.push_(pushed, 0.99)
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(pushed.mean(dim=0), expected.mean(dim=0), rtol=1e-5, atol=1e-5)


def test_large_numbers_stay_finite() -> None:
    pushed = torch.full((SIZE, 1_000), 2e38)
    compiled.push_(pushed, 0.9)
    torch.testing.assert_close(pushed, torch.full((SIZE, 1_000), 2e38))


def test_many_numbers_of_members_are_compiled() -> None:
    """PyTorch compiles few variants of one code, and then takes a slow way without an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for size in (2, 4, 5):
            matrix = torch.ones(size, 1_000)
            compiled.push_(matrix, 0.5)
            torch.testing.assert_close(matrix, torch.ones(size, 1_000))


def make_population(*, compiles: bool) -> Population:
    return Population.build(
        lambda: nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5)), SIZE, compile=compiles
    )


def averaged(*, compiles: bool, sick: int | None = None) -> tuple[Population, object]:
    population = make_population(compiles=compiles)
    if sick is not None:
        with torch.no_grad():
            population[sick][0].weight[3, 3] = float("nan")
    averager = Averager(population, Push(alpha=0.8, every_steps=1), on_nonfinite="drop", watch_batches=False)
    return population, averager.step()


@pytest.mark.filterwarnings("ignore::papa.PapaWarning")
def test_an_averager_of_a_compiled_population_reports_the_same() -> None:
    (fast, report), (plain, expected) = averaged(compiles=True), averaged(compiles=False)
    torch.testing.assert_close(fast.matrix, plain.matrix)
    assert report.distances_before == pytest.approx(expected.distances_before)
    assert report.distances_after == pytest.approx(expected.distances_after)


@pytest.mark.filterwarnings("ignore::papa.PapaWarning")
def test_a_sick_member_does_not_reach_the_others() -> None:
    (fast, report), (plain, expected) = averaged(compiles=True, sick=1), averaged(compiles=False, sick=1)
    assert report.nonfinite == expected.nonfinite
    assert [found.member for found in report.nonfinite] == [1]
    assert torch.equal(fast.matrix, plain.matrix)  # without all members, both take the same path


def test_copies_and_pickles_are_compiled_too() -> None:
    population = make_population(compiles=True)
    assert copy.deepcopy(population).group.compile
    assert pickle.loads(pickle.dumps(population)).group.compile
    assert not make_population(compiles=False).group.compile


def test_other_rules_and_matrices_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("compiled code was called")

    monkeypatch.setattr(compiled, "_call", fail)
    population = make_population(compiles=True)
    Averager(population, MergeAll(every_steps=1), measure=False, watch_batches=False).step()
    assert not compiled.supports(torch.zeros(SIZE, 4, dtype=torch.float64))
    assert not compiled.supports(torch.zeros(SIZE, 4, dtype=torch.complex64))
    assert not compiled.supports(torch.zeros(1, 4))
    assert not compiled.supports(torch.zeros(compiled.MAX_ROWS + 1, 4))


def test_without_a_compiler_nothing_is_averaged() -> None:
    torch._dynamo.reset()
    matrix = rows()
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)})
    with no_compiler, fresh_inductor_cache(), pytest.raises(PapaError, match=r"compiler(.|\n)*without compile=True"):
        compiled.push_(matrix, 0.9)
    assert torch.equal(matrix, rows())
    torch._dynamo.reset()


def test_workers_cannot_be_compiled() -> None:
    from papa.group import Group

    class Other(Group):
        is_local = False

    with pytest.raises(MemberError, match="one process that holds all members"):
        Population([nn.Linear(2, 2)], Other(), compile=True)  # type: ignore[abstract]
