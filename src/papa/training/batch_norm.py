"""BatchNorm in training on a CPU by `papa.core.kernels`, two to seven times as fast as PyTorch's for narrow layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from papa.core import kernels

LEAST_NUMBERS = 2**16
"""PyTorch's BatchNorm takes no longer for fewer inputs."""
_hooks_of_saved_tensors: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Its argument says whether to leave hooks out while PyTorch records a graph. Before PyTorch 2.8 there is none."""


def helps(models: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether `CompiledBatchNorm` has anything to do in these networks."""
    return (
        _hooks_of_saved_tensors is not None
        and kernels.supports(torch.float32, device)
        and any(isinstance(module, nn.BatchNorm2d) for model in models for module in model.modules())
    )


class CompiledBatchNorm(TorchFunctionMode):
    """Inside the block, BatchNorm is computed by `papa.core.kernels` where it can be.

    It can for images with channels last in float32 or bfloat16, on one thread, with weights and running statistics in
    float32. It is not under `torch.vmap`, `torch.compile` and their like, and not where tensors that autograd saves
    have hooks: activation checkpointing computes layers again, when the block is over.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or the compiled one in its place."""
        kwargs = kwargs or {}
        outputs = _compiled(*args, **kwargs) if func is F.batch_norm else None
        return func(*args, **kwargs) if outputs is None else outputs


def _compiled(
    inputs: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """What `F.batch_norm` returns, or None where it is not computed here."""
    is_supported = (
        not torch.compiler.is_compiling()
        and training
        and type(inputs) is Tensor
        and inputs.numel() >= LEAST_NUMBERS
        and kernels.supports_norm(inputs)
        and all(_is_vector(each, inputs.shape[1]) for each in (running_mean, running_var, weight, bias))
        and isinstance(momentum, float)
        and eps > 0.0
        and torch.get_num_threads() == 1
        and not _is_transformed()
        and _hooks_of_saved_tensors(True) is None
    )
    if not is_supported:
        return None
    outputs: Tensor = _BatchNorm.apply(inputs, running_mean, running_var, weight, bias, momentum, eps)
    return outputs


def _is_vector(tensor: Tensor | None, size: int) -> bool:
    return (
        tensor is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.shape == (size,)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


def _is_transformed() -> bool:
    """Whether operators do more than compute: under `torch.func`, forward-mode derivatives, or a dispatch mode."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        outputs, statistics = kernels.batch_norm(
            inputs, running_mean, running_var, weight, bias, momentum=momentum, eps=eps
        )
        ctx.save_for_backward(inputs, weight, statistics)
        ctx.eps = eps
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        inputs, weight, statistics = ctx.saved_tensors
        (gradient,) = grad_outputs
        # A derivative of this derivative may follow, or many gradients may be computed side by side.
        is_plain = type(gradient) is Tensor and not torch._C._functorch.is_legacy_batchedtensor(gradient)
        if torch.is_grad_enabled() or _is_transformed() or not is_plain:
            mean, inverse = statistics.float()
            found = torch.ops.aten.native_batch_norm_backward(
                gradient, inputs, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
            )
        else:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            found = kernels.batch_norm_gradients(gradient, inputs, weight, statistics)
        grad_inputs, grad_weight, grad_bias = found
        return grad_inputs, None, None, grad_weight, grad_bias, None, None
