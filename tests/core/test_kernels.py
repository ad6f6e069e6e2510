"""The compiled functions do what three lines of PyTorch do, with the same bits on any number of threads."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from helpers import TOLERANCES, assert_close
from papa import PapaWarning
from papa.core import kernels, mixing, product
from papa.core.group import LocalGroup

CPU = torch.device("cpu")
DTYPES = sorted(kernels.DTYPES, key=str)

needs_compiler = pytest.mark.skipif(kernels.library() is None, reason="papa was installed without a C compiler")


def rows_of(size: int, columns: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, columns, generator=generator) + 1.0).to(dtype)


def pushed(rows: Tensor, own: float, weights: Tensor) -> Tensor:
    """The twin of `kernels.push_`, in float64."""
    return (own * rows.double() + weights.double() @ rows.double()).to(rows.dtype)


def distances(rows: Tensor) -> Tensor:
    """The twin of the squared distances, for one block."""
    wide = rows.double()
    return (wide - wide.mean(dim=0)).square().sum(dim=1)


sizes, columns, offsets = st.integers(1, 9), st.integers(0, 1_100), st.integers(0, 3)


@needs_compiler
@given(size=sizes, columns=columns, offset=offsets, keep=st.floats(0.01, 0.999), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_push_is_its_definition(
    dtype: torch.dtype, size: int, columns: int, offset: int, keep: float, seed: int
) -> None:
    whole = rows_of(size, offset + columns + 3, dtype, seed=seed)
    rows, others = whole[:, offset : offset + columns], [whole[:, :offset], whole[:, offset + columns :]]
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    weights *= (1.0 - keep) / weights.sum()
    expected, unchanged = pushed(rows, keep, weights), [other.clone() for other in others]
    kernels.push_(rows, keep, weights)
    assert_close(rows, expected)
    assert all(map(torch.equal, others, unchanged))


@needs_compiler
@given(size=sizes, columns=columns, offset=offsets, width=st.integers(1, 700), seed=st.integers(0, 99))
@example(size=6, columns=58, offset=3, width=1, seed=0)
@pytest.mark.parametrize("dtype", DTYPES)
def test_measures_are_their_definitions(
    dtype: torch.dtype, size: int, columns: int, offset: int, width: int, seed: int
) -> None:
    rows = rows_of(size, offset + columns + 3, dtype, seed=seed)[:, offset : offset + columns]
    blocks = torch.split(rows, width, dim=1) if columns else ()
    found = kernels.measured("squared_distances", rows, width)
    sums = kernels.measured("sums", rows, width)
    assert found.shape == sums.shape == (len(blocks), size)
    for block, of_block, sums_of_block in zip(blocks, found, sums, strict=True):
        # It is the distances that are rounded as the numbers are: squares of small ones have larger relative errors.
        torch.testing.assert_close(of_block.sqrt(), distances(block).sqrt(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums_of_block, block.double().sum(dim=1), rtol=1e-5, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(kernels, "LEAST_BYTES_PER_THREAD", 1)
    weights = torch.full((5,), 0.02)
    found: list[tuple[Tensor, ...]] = []
    for num_threads in (1, 2, 3, 7, 1_000):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        rows = rows_of(5, 10_007, dtype)
        measures = kernels.measured("squared_distances", rows, 1_024), kernels.measured("sums", rows, 1_024)
        kernels.push_(rows, 0.9, weights)
        found.append((*measures, rows))
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 511, 512, 1_000, 1_004])
def test_a_number_that_is_not_finite_shows_wherever_it_is(column: int, dtype: torch.dtype, value: float) -> None:
    rows = rows_of(3, 1_005, dtype)
    rows[1, column] = value
    assert not kernels.measured("squared_distances", rows, 1_024).isfinite().any()
    assert kernels.measured("sums", rows, 1_024).isfinite().tolist() == [[True, False, True]]
    kernels.push_(rows, 0.9, torch.tensor([0.05, 0.0, 0.05]))  # a member of weight 0 is not read
    assert rows[[0, 2]].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("value", [1e30, 3e38])
def test_large_numbers_stay_finite(value: float) -> None:
    rows = torch.full((4, 40), value)
    kernels.push_(rows, 0.9, torch.full((4,), 0.025))
    assert torch.equal(rows, torch.full((4, 40), value))
    for dtype in DTYPES:
        assert kernels.measured("sums", torch.full((4, 40), 1e30, dtype=dtype), 64).isfinite().all()


@needs_compiler
def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    rows = torch.stack([every, every.roll(1), every.roll(3)])
    expected = rows.float()
    shared = sum(row * 0.25 for row in expected)
    expected = (expected + (shared - expected * 0.75)).to(torch.bfloat16)
    kernels.push_(rows, 0.25, torch.full((3,), 0.25))
    assert torch.equal(rows.isnan(), expected.isnan())
    finite = ~rows.isnan()
    assert torch.equal(rows[finite], expected[finite])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_do_not_depend_on_the_compiled_functions(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    matrices = [mixing.push(5, 0.99), mixing.merge_all(5), mixing.push_to(torch.tensor([0.5, 0.5, 0, 0, 0]), 0.8)]
    found = []
    for is_compiled in (True, False):
        product._known_product.cache_clear()
        if not is_compiled:
            monkeypatch.setattr(kernels, "library", lambda: None)
        assert kernels.supports(dtype, CPU) == is_compiled
        every = [rows_of(5, 40_001, dtype) for _ in matrices]
        for rows, matrix in zip(every, matrices, strict=True):
            LocalGroup().mix_(rows, matrix)
        found.append([*every, LocalGroup().squared_distances(rows_of(5, 40_001, dtype))])
    product._known_product.cache_clear()
    for one, other in zip(*found, strict=True):
        assert_close(one, other, tolerance=TOLERANCES[dtype])


@needs_compiler
def test_the_bits_do_not_depend_on_how_the_code_is_optimised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    source = kernels.PATH.with_name("kernels.c")
    flags = ["-O0", "-ffp-contract=off", "-fPIC", "-pthread", "-shared"]
    plain = tmp_path / "libkernels.so"
    shutil.copyfile(source, tmp_path / source.name)
    version = f"-DPAPA_SOURCE={zlib.crc32(source.read_bytes())}u"
    subprocess.run([compiler, *flags, version, "-o", plain, source], check=True)
    found = []
    for path in (kernels.PATH, plain):
        monkeypatch.setattr(kernels, "PATH", path)
        library = kernels.library.__wrapped__()
        monkeypatch.setattr(kernels, "library", lambda library=library: library)
        for size, dtype in itertools.product((2, 5, 17), DTYPES):
            rows = rows_of(size, 5_003, dtype)
            measures = kernels.measured("squared_distances", rows, 1_024), kernels.measured("sums", rows, 1_024)
            kernels.push_(rows, 0.9)
            found += [*measures, rows]
        monkeypatch.undo()
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


def test_other_dtypes_and_devices_use_torch() -> None:
    assert not kernels.supports(torch.float64, CPU)
    assert not kernels.supports(torch.float16, CPU)
    assert not kernels.supports(torch.complex64, CPU)
    assert not kernels.supports(torch.float32, torch.device("meta"))


def test_a_missing_library_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "PATH", tmp_path / "libkernels.so")
    assert kernels.library.__wrapped__() is None


@needs_compiler
def test_a_library_of_another_version_or_machine_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = tmp_path / "kernels.c"
    newer.write_bytes(kernels.PATH.with_name("kernels.c").read_bytes() + b"\n")
    shutil.copyfile(kernels.PATH, tmp_path / "libkernels.so")
    monkeypatch.setattr(kernels, "PATH", tmp_path / "libkernels.so")
    with pytest.warns(PapaWarning, match="another version or another machine.*install papa again"):
        assert kernels.library.__wrapped__() is None
    newer.write_bytes(newer.read_bytes()[:-1])
    assert kernels.library.__wrapped__() is not None
    monkeypatch.setattr(kernels, "PATH", tmp_path / "of another machine.so")
    kernels.PATH.write_bytes(b"something else")
    with pytest.warns(PapaWarning, match="install papa again"):
        assert kernels.library.__wrapped__() is None


@needs_compiler
def test_tensors_that_are_no_rows_in_memory_use_torch() -> None:
    wide = rows_of(2, 20)
    with FakeTensorMode():
        fake = torch.zeros(2, 10)
    for other in (wide[:, ::2], wide[:1].expand(2, -1), rows_of(20, 2).t(), fake):
        assert not kernels.is_plain(other)
        with pytest.raises(ValueError, match="expected rows in memory"):
            product.OnePassPush(0.9, None)(other)
    assert torch.equal(product.row_sums(wide[:, ::2]), wide[:, ::2].sum(dim=1).double())


@needs_compiler
@pytest.mark.parametrize("weights", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)])
def test_other_weights_are_refused(weights: Tensor) -> None:
    with pytest.raises(ValueError, match="expected 2 in float32"):
        kernels.push_(rows_of(2, 5), 0.9, weights)


@needs_compiler
def test_autograd_sees_a_push() -> None:
    rows = rows_of(2, 5).requires_grad_()
    loss = rows.square().sum()
    with torch.no_grad():
        kernels.push_(rows, 0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
