"""Language modelling: cross entropy over all tokens, scored by the loss per token, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from papa.errors import DataError
from papa.evaluation.scores import Combine, mean_logits, mean_probabilities
from papa.training.task import Task

EVAL_BATCH_SIZE = 64
TOKEN_COMBINE: dict[str, Combine] = {"logits": mean_logits, "probabilities": partial(mean_probabilities, dim=-1)}
"""How ensembles combine outputs whose last dimension is that of the tokens."""


def language_modelling(num_bytes: Sequence[int], *, ensemble: str = "probabilities") -> Task:
    """The task of predicting the next token; lower scores are better."""
    return Task(
        loss=token_cross_entropy,
        metric=TokenLoss(num_bytes),
        higher_is_better=False,
        combine=TOKEN_COMBINE[ensemble],
        eval_batch_size=EVAL_BATCH_SIZE,
    )


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over all tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class TokenLoss:
    """The mean cross entropy per token in nats, over all tokens of a data set.

        perplexity = exp(loss per token)
        bits per byte = total loss / (log 2 * number of bytes)

    Bits per byte do not depend on the tokenizer.

    Example:
        >>> metric = TokenLoss([1, 2])
        >>> counts = metric.counts(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))
        >>> {name: round(value, 2) for name, value in metric.details(counts).items()}
        {'loss per token': 0.69, 'perplexity': 2.0, 'bits per byte': 0.6}

    `num_bytes` is the number of bytes that each token stands for.
    """

    def __init__(self, num_bytes: Sequence[int]) -> None:
        self.num_bytes = torch.tensor(num_bytes, dtype=torch.float64, device="cpu")

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The summed loss, the number of tokens and the number of bytes."""
        if outputs.shape[:-1] != targets.shape or outputs.shape[-1] != len(self.num_bytes):
            raise DataError(
                f"the loss per token got outputs of shape {tuple(outputs.shape)} for targets of shape "
                f"{tuple(targets.shape)}, expected logits of {len(self.num_bytes)} tokens for each target"
            )
        loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum").double()
        num_bytes = self.num_bytes.to(targets.device)[targets].sum()
        return torch.stack([loss, torch.full_like(loss, targets.numel()), num_bytes])

    def score(self, counts: Tensor) -> float:
        return float(counts[0] / counts[1])

    def details(self, counts: Tensor) -> dict[str, float]:
        total, num_tokens, num_bytes = counts.tolist()
        loss = total / num_tokens
        perplexity = math.exp(loss) if loss < 700.0 else math.inf
        return {"loss per token": loss, "perplexity": perplexity, "bits per byte": total / math.log(2.0) / num_bytes}
