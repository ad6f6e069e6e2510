from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import TOLERANCES, assert_close, assert_same_bits, random_stochastic
from papa.core import kernels, mixing, product
from papa.core.group import LocalGroup
from papa.core.product import scratch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ring(size: int) -> Tensor:
    """Every member becomes half itself and half its neighbour."""
    return (mixing.identity(size) + mixing.identity(size).roll(1, dims=1)) / 2


MATRICES = {
    "identity": mixing.identity,
    "push": lambda size: mixing.push(size, 0.99),
    "strong push": lambda size: mixing.push(size, 0.1),
    "merge all": mixing.merge_all,
    "merge many": lambda size: mixing.merge_many(size, share=0.5),
    "merge many 75": lambda size: mixing.merge_many(size, share=0.75),
    "merge many, itself least": lambda size: mixing.merge_many(size, share=0.0),
    "merge pairs": lambda size: mixing.merge_pairs(size, generator()),
    "merge pairs 75": lambda size: mixing.merge_pairs(size, generator(), share=0.75),
    "ring": ring,
    "permutation": lambda size: mixing.identity(size)[torch.randperm(size, generator=generator(3))],
    "soup of some": lambda size: mixing.soup_row(size, range(0, size, 2)).repeat(size, 1),
    "soup of one": lambda size: mixing.soup_row(size, [size - 1]).repeat(size, 1),
    "dense": lambda size: random_stochastic(size, seed=1),
    "with holes": lambda size: (lambda holey: holey / holey.sum(dim=1, keepdim=True))(
        random_stochastic(size, seed=2) * (torch.arange(size * size).reshape(size, size) % 3 != 1)
        + mixing.identity(size) * 0.1
    ),
}

DTYPES = list(TOLERANCES)


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "torch"], autouse=True)
def _operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the compiled functions, and with PyTorch's operators."""
    if request.param and kernels.library() is None:
        pytest.skip("papa was installed without a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(kernels, "library", lambda: None)
        product._known_product.cache_clear()
        yield
    product._known_product.cache_clear()


def random_rows(size: int, columns: int, dtype: torch.dtype) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(size, columns, dtype=wide, generator=generator(columns)).to(dtype)


def reference(rows: Tensor, matrix: Tensor) -> Tensor:
    wide = torch.complex128 if rows.is_complex() else torch.float64
    return matrix.to(wide) @ rows.to(wide)


def columns_per_block(size: int, dtype: torch.dtype) -> int:
    return next(product.column_blocks(torch.empty(1, 1 << 22, dtype=dtype).expand(size, -1))).shape[1]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixing_equals_the_plain_product(name: str, size: int, dtype: torch.dtype) -> None:
    matrix = MATRICES[name](size)
    for columns in (1, 16, 77):
        rows = random_rows(size, columns, dtype)
        expected = reference(rows, matrix)
        LocalGroup().mix_(rows, matrix)
        assert_close(rows, expected)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixing_equals_the_plain_product_over_several_blocks_and_a_partial_last_one(
    name: str, dtype: torch.dtype
) -> None:
    matrix, width = MATRICES[name](5), columns_per_block(5, dtype)
    rows = random_rows(5, 2 * width + 37, dtype)
    expected = reference(rows, matrix)
    LocalGroup().mix_(rows, matrix)
    assert_close(rows, expected)


@given(size=st.integers(1, 7), columns=st.integers(0, 300), seed=st.integers(0, 2**31), zeros=st.floats(0.0, 0.9))
def test_mixing_equals_the_plain_product_for_any_matrix(size: int, columns: int, seed: int, zeros: float) -> None:
    holes = torch.rand(size, size, generator=generator(seed)) < zeros
    matrix = random_stochastic(size, seed).masked_fill(holes & ~torch.eye(size, dtype=torch.bool), 0.0)
    matrix /= matrix.sum(dim=1, keepdim=True)
    for dtype in (torch.float32, torch.float64):
        rows = random_rows(size, columns, dtype)
        expected = reference(rows, matrix)
        LocalGroup().mix_(rows, matrix)
        assert_close(rows, expected)


@given(data=st.data(), size=st.integers(1, 9))
def test_children_replace_their_parents_only_when_no_other_child_needs_them(data: st.DataObject, size: int) -> None:
    members = st.integers(0, size - 1)
    parents = data.draw(st.lists(st.tuples(members, members), min_size=size, max_size=size))
    matrix = torch.stack([mixing.soup_row(size, [a]) * 0.75 + mixing.soup_row(size, [b]) * 0.25 for a, b in parents])
    rows = random_rows(size, 7, torch.float32)
    expected = reference(rows, matrix)

    LocalGroup().mix_(rows, matrix)

    assert_close(rows, expected)


@pytest.mark.parametrize("name", MATRICES)
def test_a_weight_of_zero_excludes_a_non_finite_member(name: str) -> None:
    matrix = MATRICES[name](5)
    for broken, value in ((0, float("nan")), (2, float("inf")), (4, float("nan"))):
        rows = random_rows(5, 40, torch.float32)
        expected = reference(rows, matrix)
        healthy = matrix[:, broken] == 0
        rows[broken] = value
        LocalGroup().mix_(rows, matrix)
        assert_close(rows[healthy], expected[healthy])
        assert not bool(torch.isfinite(rows[~healthy]).any())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_keeps_every_bit(size: int, dtype: torch.dtype) -> None:
    rows = random_rows(size, 50, dtype)
    rows[0, 1], rows[0, 2], rows[0, 3] = -0.0, float("inf"), float("nan")
    before = rows.clone()
    LocalGroup().mix_(rows, mixing.push(size, 1.0))
    assert_same_bits({"rows": rows}, {"rows": before})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_merging_all_makes_rows_bitwise_equal(size: int, dtype: torch.dtype) -> None:
    rows = random_rows(size, 5000, dtype)
    LocalGroup().mix_(rows, mixing.merge_all(size))
    assert_same_bits({"rows": rows}, {"rows": rows[:1].expand(size, -1)})


@pytest.mark.parametrize("keep", [0.999, 0.99, 0.9])
@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_a_consensus_does_not_drift_in_float32(size: int, keep: float) -> None:
    consensus = torch.randn(100_000, generator=generator(size))
    rows = consensus.repeat(size, 1)
    for _ in range(3):  # what one push leaves in place, any number does
        LocalGroup().mix_(rows, mixing.push(size, keep))
        assert torch.equal(rows, consensus.expand(size, -1))


def test_a_consensus_stays_within_rounding_under_strong_pushes() -> None:
    consensus = torch.randn(3000, generator=generator())
    rows = consensus.repeat(7, 1)
    for _ in range(3000):
        LocalGroup().mix_(rows, mixing.push(7, 0.5))
    relative = (rows.double() / consensus.double() - 1).mean()
    assert abs(float(relative)) < 1e-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 77), (5, 1_000_003), (200_000, 40)])
def test_blocks_cover_every_column_once_and_in_order(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = torch.empty(1, shape[1], dtype=dtype).expand(shape)
    blocks = list(product.column_blocks(rows))
    assert [block.shape[0] for block in blocks] == [shape[0]] * len(blocks)
    assert sum(block.shape[1] for block in blocks) == shape[1]
    offset = 0
    for block in blocks:
        assert block.storage_offset() == offset
        assert block.data_ptr() % product.ALIGNMENT_BYTES == rows.data_ptr() % product.ALIGNMENT_BYTES
        offset += block.shape[1]


@pytest.mark.parametrize("keep", [0.0, 1e-9, 0.1, 0.9, 0.999, 1.0 - 1e-9, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_push_has_the_bits_of_the_product_with_its_matrix(dtype: torch.dtype, keep: float) -> None:
    for size in (1, 2, 3, 5):
        rows = random_rows(size, 333, dtype)
        expected = rows.clone()
        LocalGroup().mix_(expected, mixing.push(size, keep))
        LocalGroup().push_(rows, keep)
        assert_same_bits({"rows": rows}, {"rows": expected})


def test_memory_for_blocks_may_first_be_needed_in_inference_mode() -> None:
    rows = random_rows(3, 50, torch.bfloat16)

    def distances_inside_and_outside() -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            inside = LocalGroup().squared_distances(rows)
        return inside, LocalGroup().squared_distances(rows)

    with ThreadPoolExecutor(1) as new_thread:  # which has no such memory yet
        inside, outside = new_thread.submit(distances_inside_and_outside).result()
    assert torch.equal(inside, outside)


def test_memory_for_blocks_is_not_shared_with_results_or_threads() -> None:
    first, second = random_rows(3, 50, torch.float32), random_rows(3, 60, torch.float32)
    found = LocalGroup().squared_distances(first)
    before = found.clone()
    LocalGroup().squared_distances(second)
    assert torch.equal(found, before)
    here = scratch.matrix(first, torch.float32).data_ptr()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: scratch.matrix(first, torch.float32).data_ptr()).result() != here


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_distances_equal_their_definition(dtype: torch.dtype, size: int) -> None:
    rows = random_rows(size, columns_per_block(size, dtype) + 11, dtype)
    wide = rows.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = (wide - wide.mean(dim=0)).abs().square().sum(dim=1)
    found = LocalGroup().squared_distances(rows)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_number_makes_all_distances_non_finite(size: int, value: float) -> None:
    for row in range(size):
        rows = random_rows(size, 50, torch.float32)
        rows[row, 7] = value
        assert not bool(torch.isfinite(LocalGroup().squared_distances(rows)).any())


def test_squared_distances_of_no_columns_are_zero() -> None:
    assert LocalGroup().squared_distances(torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]


def test_autocast_does_not_change_the_precision() -> None:
    rows, matrix = random_rows(5, 1000, torch.float32), random_stochastic(5, seed=3)
    expected = reference(rows, matrix)
    with torch.autocast("cpu", torch.bfloat16):
        LocalGroup().mix_(rows, matrix)
    assert (rows - expected).abs().max() < 1e-6


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
def test_a_lower_precision_of_one_backend_is_restored_and_does_not_count() -> None:
    code = """
import torch
from papa.core import mixing, product
from papa.core.group import LocalGroup
torch.backends.cuda.matmul.fp32_precision = "tf32"  # after this the setting for all backends cannot be read
torch.backends.fp32_precision = "bf16"
backend = torch.backends.mkldnn.matmul
seen = []
with product.full_precision(torch.device("cpu")):
    seen.append(backend.fp32_precision)
with product.full_precision(torch.device("cuda")):
    seen.append(torch.backends.cuda.matmul.fp32_precision)
LocalGroup().mix_(torch.randn(3, 100), mixing.merge_many(3))
seen += [backend.fp32_precision, torch.backends.cuda.matmul.fp32_precision]
torch.backends.fp32_precision = "ieee"
print(*seen, backend.fp32_precision)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ieee", "ieee", "bf16", "tf32", "ieee"], "none of them was set for good"


@pytest.mark.usefixtures("_torch_operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_no_product_reads_from_its_device(dtype: torch.dtype) -> None:
    """A meta tensor has no numbers: to read one is an error."""
    rows = torch.empty(4, 1000, dtype=dtype, device="meta")
    generator = torch.Generator().manual_seed(0)
    matrices = [mixing.push(4, 0.9), mixing.merge_all(4), mixing.merge_many(4), mixing.merge_pairs(4, generator)]
    matrices += [mixing.push_to(mixing.soup_row(4, [0, 2]), 0.5), mixing.identity(4)[[1, 0, 2, 3]]]
    matrices += [random_stochastic(4, seed=1), torch.block_diag(random_stochastic(3, seed=2), mixing.identity(1))]
    for matrix in matrices:
        LocalGroup().mix_(rows, matrix)
    LocalGroup().push_(rows, 0.99)
    LocalGroup().squared_distances(rows)
    product.row_sums(rows)


def test_a_lower_matmul_precision_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        LocalGroup().mix_(random_rows(3, 100, torch.float32), mixing.push(3, 0.5))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
