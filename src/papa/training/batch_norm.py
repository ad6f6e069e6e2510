"""BatchNorm in training on a CPU by `papa.kernels`, two to seven times as fast as PyTorch's for narrow layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from papa import kernels

saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""What autograd calls for tensors that it saves. PyTorch 2.6 cannot tell."""
LEAST_NUMBERS = 2**15
"""PyTorch's BatchNorm takes no longer for fewer inputs."""


def helps(models: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether `CompiledBatchNorm` has anything to do in these networks."""
    return (
        saved_tensors_hooks is not None
        and kernels.supports(torch.float32, device)
        and any(isinstance(module, nn.BatchNorm2d) for model in models for module in model.modules())
    )


class CompiledBatchNorm(TorchFunctionMode):
    """Inside the block, BatchNorm is computed by `papa.kernels` where it can be.

    It can for images with channels last in float32 or bfloat16, on one thread, with weights and running statistics in
    float32. Layers under activation checkpointing are PyTorch's, since a backward pass computes them again outside.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or the compiled one in its place."""
        kwargs = kwargs or {}
        if func is F.batch_norm and _is_supported(*args, **kwargs):
            return _compiled(*args, **kwargs)
        return func(*args, **kwargs)


def _is_supported(
    inputs: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> bool:
    return (
        training
        and type(inputs) is Tensor
        and inputs.numel() >= LEAST_NUMBERS
        and torch.get_num_threads() == 1
        and all(
            each is not None and each.dtype == torch.float32 and each.device.type == "cpu" and each.is_contiguous()
            for each in (running_mean, running_var, weight, bias)
        )
        and not torch._C._are_functorch_transforms_active()  # `torch.vmap` and others
        and saved_tensors_hooks(True) is None  # as of activation checkpointing
        and not torch.compiler.is_compiling()
        and kernels.supports_norm(inputs)
    )


def _compiled(
    inputs: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    outputs: Tensor = _BatchNorm.apply(inputs, weight, bias, running_mean, running_var, momentum, eps)
    return outputs


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        outputs, statistics = kernels.batch_norm(
            inputs, weight, bias, running_mean=running_mean, running_var=running_var, momentum=momentum, eps=eps
        )
        ctx.save_for_backward(inputs, weight, statistics)
        ctx.eps = eps
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight, statistics = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():  # a derivative of this derivative may follow
            mean, inverse = statistics.float()
            found = torch.ops.aten.native_batch_norm_backward(
                gradient, inputs, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
            )
        else:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            found = kernels.batch_norm_gradients(gradient, inputs, weight, statistics)
        return (*found, None, None, None, None)
