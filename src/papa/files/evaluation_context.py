"""A network to load weights into, data to run it on, and a score: what greedy and learned soups need."""

from __future__ import annotations

import math
import pkgutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from papa.errors import ConfigError, DataError, PapaError, SoupError
from papa.evaluation.scores import Evaluation, evaluate, evaluating
from papa.files.average import differences, raise_differences, ranges
from papa.files.weights import WeightsFile
from papa.storage.tensors import Blocks, TensorInfo


@dataclass(frozen=True)
class EvaluationContext:
    """A network, data, and a score.

    Example:
        >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(4)]
        >>> context = EvaluationContext(nn.Linear(4, 2), batches)
        >>> context.evaluate(context.network).loss > 0
        True
    """

    network: nn.Module
    """Of the architecture of the files; its weights are overwritten."""
    batches: Sequence[Any]
    """Inputs, or tuples whose first entry is the inputs, for BatchNorm and learned weights."""
    score: Callable[[nn.Module], Any] | None = None
    """Maps the network, in evaluation mode and without gradients, to its score, or to (score, loss); None for accuracy
    and cross-entropy on the batches."""
    name: str = ""
    """What the record of a greedy soup says about its scores."""
    higher_is_better: bool = True
    """Whether a higher score is better, as an accuracy is, or a lower one, as a loss."""

    def evaluate(self, network: nn.Module) -> Evaluation:
        """The network's score, and its loss, NaN if it is not known."""
        if self.score is None:
            if not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in self.batches):
                raise DataError("the batches hold only inputs, expected pairs of inputs and targets to compute a score")
            return evaluate(network, self.batches)
        with evaluating(network), torch.no_grad():
            value = self.score(network)
        if isinstance(value, Evaluation):
            value = value.score, value.loss
        score, loss = value[:2] if isinstance(value, tuple) else (value, math.nan)
        if math.isnan(float(score)):
            raise SoupError("the score is NaN, expected a number: check the network's outputs")
        return Evaluation(float(score), float(loss))


def evaluation_context_of(source: Any) -> EvaluationContext:
    """An evaluation context, given as such or as a factory: a function, or its name `package.module:function`.

    The factory takes no arguments and returns `(network, batches)` or `(network, batches, score)`.
    """
    if isinstance(source, EvaluationContext):
        return source
    factory = source
    if isinstance(source, str):
        if not all(source.partition(":")):
            raise ConfigError(f"the factory is '{source}', expected package.module:function")
        try:
            factory = pkgutil.resolve_name(source)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"the factory {source} cannot be found: {error}") from error
    function = factory
    while isinstance(function, partial):
        function = function.func
    name = source if isinstance(source, str) else getattr(function, "__qualname__", type(source).__name__)
    if not callable(factory):
        raise ConfigError(f"the factory {name} is a {type(factory).__name__}, expected a function")
    try:
        made = factory()
        if isinstance(made, tuple) and len(made) > 1:
            made = (made[0], list(made[1]), *made[2:])  # batches may come from a generator
    except PapaError:
        raise
    except Exception as error:
        code = getattr(function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise ConfigError(f"the factory {name} failed with {type(error).__name__}: {error}{place}") from error
    if isinstance(made, EvaluationContext):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(
            f"the factory {name} returned {type(made).__name__}, expected (network, batches) or "
            "(network, batches, score)"
        )
    if not made[1]:
        raise DataError(f"the factory {name} gave no batch, expected at least one")
    return EvaluationContext(made[0], made[1], made[2] if len(made) == 3 else None, name)


@torch.no_grad()
def load_(network: nn.Module, blocks: Blocks, file: WeightsFile) -> None:
    """Load weights that come in blocks; `file` has the same names and shapes."""
    tensors = {name: one for name, one in network.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    expected = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    subject = f"{file.path} does not fit the network {type(network).__name__}"
    raise_differences(subject, differences(expected, file.tensors))
    for name, target in tensors.items():
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
        for (start, stop), block in zip(ranges(target.numel()), blocks(name), strict=True):
            flat[start:stop].copy_(block)
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))
