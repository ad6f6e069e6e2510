"""Compiled BatchNorm is PyTorch's, up to rounding, wherever it is used, and is not used where it does not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import papa
from helpers import TOLERANCES, assert_close
from papa.core import kernels
from papa.lab.models import make_model
from papa.training import Numerics, batch_norm
from papa.training.batch_norm import CompiledBatchNorm, helps

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    kernels.library() is None or batch_norm._hooks_of_saved_tensors is None,
    reason="papa was installed without a C compiler, or PyTorch is older than 2.8",
)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and no input too small."""
    monkeypatch.setattr(batch_norm, "LEAST_NUMBERS", 0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def images_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, mean: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    images = mean + 2.0 * torch.randn(shape, generator=generator)
    return images.to(dtype).contiguous(memory_format=torch.channels_last)


def norm_of(channels: int, **options: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **options)
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(images_of(1, channels, 1, 1, seed=index).flatten())
    return norm


def is_compiled(outputs: Tensor) -> bool:
    return type(outputs.grad_fn).__name__ == "_BatchNormBackward"


def derived(norm: nn.BatchNorm2d, images: Tensor, upstream: Tensor, *, compiled: bool) -> list[Tensor]:
    """Outputs, gradients and running statistics."""
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    with CompiledBatchNorm() if compiled else contextlib.nullcontext():
        outputs = norm(images)
        assert is_compiled(outputs) == compiled
        outputs.backward(upstream)
    gradients = [images.grad, *(parameter.grad for parameter in norm.parameters())]
    return [each.detach() for each in (outputs, *gradients, norm.running_mean, norm.running_var)]


@needs_compiler
@given(
    images=st.integers(1, 9),
    channels=st.sampled_from([8, 16, 24, 32, 40, 64, 100, 128]),
    side=st.sampled_from([4, 8]),
    momentum=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_batch_norm(
    dtype: torch.dtype, images: int, channels: int, side: int, momentum: float, seed: int
) -> None:
    inputs, upstream = (images_of(images, channels, side, 4, dtype=dtype, seed=seed + k) for k in (0, 1))
    found = derived(norm_of(channels, momentum=momentum), inputs, upstream, compiled=True)
    twin = norm_of(channels, momentum=momentum).double()
    expected = derived(twin, inputs.double(), upstream.double(), compiled=False)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance=1e-5 if one.dtype == torch.float32 else TOLERANCES[dtype])


@needs_compiler
def test_means_far_from_zero_are_taken_off_before_squares_are_added() -> None:
    inputs, upstream = images_of(32, 16, 8, 8, mean=1e4), images_of(32, 16, 8, 8, seed=1)
    found, usual = (derived(norm_of(16), inputs, upstream, compiled=compiled) for compiled in (True, False))
    expected = derived(norm_of(16).double(), inputs.double(), upstream.double(), compiled=False)
    for one, other, right in zip(found, usual, expected, strict=True):
        assert (one - right).abs().max() <= 1.5 * (other - right).abs().max() + 1e-6


@needs_compiler
def test_channels_do_not_disturb_each_other() -> None:
    inputs, upstream = images_of(8, 16, 8, 8), images_of(8, 16, 8, 8, seed=1)
    healthy = derived(norm_of(16), inputs, upstream, compiled=True)
    inputs[3, 5, 2, 2], inputs[:, 6] = float("nan"), 7.0
    sick = derived(norm_of(16), inputs, upstream, compiled=True)
    others = [channel for channel in range(16) if channel not in (5, 6)]
    for index, (one, other) in enumerate(zip(sick, healthy, strict=True)):
        where = (slice(None), others) if one.dim() == 4 else others
        assert torch.equal(one[where], other[where])
        constant, wrong = (one[:, 6], one[:, 5]) if one.dim() == 4 else (one[6], one[5])
        assert constant.isfinite().all()
        assert wrong.isnan().all() or index == 3  # the gradient of the bias does not depend on inputs


@needs_compiler
@pytest.mark.parametrize(
    "case",
    ["evaluation", "no weights", "no statistics", "channels first", "float64", "two threads", "few", "rows", "mode"],
)
def test_other_cases_are_pytorchs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, images, mode = norm_of(16), images_of(8, 16, 4, 4), contextlib.nullcontext()
    if case == "evaluation":
        norm.eval()
    if case == "no weights":
        norm = nn.BatchNorm2d(16, affine=False)
    if case == "no statistics":
        norm = norm_of(16, track_running_stats=False)
    if case == "channels first":
        images = images.contiguous()
    if case == "float64":
        norm, images = norm.double(), images.double()
    if case == "two threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if case == "few":
        monkeypatch.setattr(batch_norm, "LEAST_NUMBERS", images.numel() + 1)
    if case == "rows":
        images = images_of(3, 16, 3, 3)
    if case == "mode":
        mode = FlopCounterMode(display=False)
    with CompiledBatchNorm(), mode:
        outputs = norm(images.requires_grad_())
    assert not is_compiled(outputs)
    assert torch.equal(outputs, norm(images))


@needs_compiler
@pytest.mark.parametrize("channels", [8, 32])
def test_a_wrong_number_of_channels_is_pytorchs_error(channels: int) -> None:
    with CompiledBatchNorm(), pytest.raises(RuntimeError, match=f"should contain 16 elements not {channels}"):
        norm_of(channels)(images_of(8, 16, 4, 4))


@needs_compiler
def test_no_variance_epsilon_is_pytorchs() -> None:
    with contextlib.suppress(ValueError), CompiledBatchNorm():  # newer versions refuse it
        assert not is_compiled(norm_of(16, eps=0.0)(images_of(8, 16, 4, 4)))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_defaults_of_new_tensors_do_not_matter(dtype: torch.dtype) -> None:
    norm, images, upstream = norm_of(16), images_of(8, 16, 4, 4), images_of(8, 16, 4, 4, seed=1)
    expected = derived(norm, images, upstream, compiled=True)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = derived(norm.requires_grad_(), images, upstream, compiled=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found[:2], expected[:2]))


@needs_compiler
def test_one_number_per_channel_is_pytorchs_error() -> None:
    with CompiledBatchNorm(), pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_of(64)(images_of(1, 64, 1, 1))


@needs_compiler
def test_networks_in_one_call_are_pytorchs() -> None:
    norms = [norm_of(16), norm_of(16)]
    parameters, buffers = stack_module_state(norms)
    images = images_of(8, 16, 4, 4)

    def apply(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
        return functional_call(norms[0], (parameters, buffers), (images,))

    with CompiledBatchNorm():
        outputs = torch.vmap(apply)(parameters, buffers)
    assert_close(outputs[0], norms[0](images).detach())


@needs_compiler
def test_second_derivatives_are_pytorchs() -> None:
    found = []
    for context in (CompiledBatchNorm(), contextlib.nullcontext()):
        norm, images = norm_of(16), images_of(8, 16, 4, 4).requires_grad_()
        with context:
            outputs = norm(images)
            (gradient,) = torch.autograd.grad(outputs.square().mean(), images, create_graph=True)
            gradient.square().sum().backward()
        found.append((gradient.detach(), images.grad, norm.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_can_be_computed_again(reentrant: bool) -> None:
    found = []
    for recompute in (True, False):
        norm, images = norm_of(16), images_of(8, 16, 4, 4).requires_grad_()
        with CompiledBatchNorm():
            outputs = checkpoint(norm, images, use_reentrant=reentrant) if recompute else norm(images)
        outputs.square().sum().backward()
        found.append((outputs.detach(), images.grad, norm.weight.grad, norm.bias.grad))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, tolerance=1e-4)


@needs_compiler
def test_derivatives_can_be_computed_side_by_side() -> None:
    images, upstream = images_of(8, 16, 4, 4).requires_grad_(), torch.randn(3, 8, 16, 4, 4)
    with CompiledBatchNorm():
        outputs = norm_of(16)(images)
    (together,) = torch.autograd.grad(outputs, images, upstream, is_grads_batched=True, retain_graph=True)
    for one, each in zip(together, upstream, strict=True):
        assert_close(one, torch.autograd.grad(outputs, images, each, retain_graph=True)[0], tolerance=1e-5)


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_derivatives_are_pytorchs() -> None:
    images, direction = images_of(8, 16, 4, 4), images_of(8, 16, 4, 4, seed=1)
    found = []
    for context in (CompiledBatchNorm(), contextlib.nullcontext()):
        with forward_ad.dual_level(), context:
            found.append(forward_ad.unpack_dual(norm_of(16)(forward_ad.make_dual(images, direction))).tangent)
    assert torch.equal(*found)


@needs_compiler
def test_a_layer_may_be_used_twice() -> None:
    norm, images = norm_of(16), images_of(8, 16, 4, 4)
    with CompiledBatchNorm():
        small = norm(images[:3, :, :3, :3].contiguous(memory_format=torch.channels_last))
        large = norm(images)
    assert (is_compiled(small), is_compiled(large)) == (False, True)
    (small.sum() + large.sum()).backward()


@needs_compiler
def test_inputs_may_not_be_written_before_the_backward_pass() -> None:
    images = images_of(8, 16, 4, 4).requires_grad_()
    with CompiledBatchNorm():
        outputs = norm_of(16)(images)
    with torch.no_grad():
        images.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@needs_compiler
def test_graphs_are_pytorchs() -> None:
    norm, images = norm_of(16), images_of(8, 16, 4, 4)
    with CompiledBatchNorm():
        compiled = torch.compile(norm_of(16), backend="eager", fullgraph=True)
        assert_close(compiled(images).detach(), norm(images).detach(), tolerance=1e-5)
        recorded = make_fx(norm_of(16))(images)
        traced = fx.symbolic_trace(nn.Sequential(norm))
        assert is_compiled(traced(images))
    assert torch.ops.aten.native_batch_norm.default in {node.target for node in recorded.graph.nodes}
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


def test_only_networks_that_have_it_on_a_cpu_are_helped() -> None:
    vgg, linear = make_model("vgg11", num_classes=10, width=8), nn.Linear(3, 2)
    is_possible = kernels.library() is not None and batch_norm._hooks_of_saved_tensors is not None
    assert helps([linear, vgg], CPU) == is_possible
    assert not helps([linear], CPU)
    assert not helps([vgg], torch.device("meta"))


@needs_compiler
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_trainings_use_it_and_stay_close(monkeypatch: pytest.MonkeyPatch, autocast: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator))
    calls, found = [], []
    original = kernels.batch_norm
    monkeypatch.setattr(kernels, "batch_norm", lambda *args, **options: calls.append(1) or original(*args, **options))
    for is_used in (True, False):
        if not is_used:
            monkeypatch.setattr(kernels, "library", lambda: None)
        outcome = papa.train(
            lambda: make_model("resnet20", num_classes=10, width=8),
            data,
            num_members=2,
            num_epochs=1,
            batch_size=16,
            device="cpu",
            validation=0.25,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            numerics=Numerics(channels_last=True, autocast=autocast),
        )
        found.append(outcome.population.matrix)
        assert len(calls) == (2 * 3 * 19 if is_used else 0)  # members, steps, layers
        calls.clear()
    assert_close(*found, tolerance=1e-4 if autocast is None else 0.02)
