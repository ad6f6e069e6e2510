"""Sampling: the text that a language model continues a prompt with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from papa.errors import ConfigError
from papa.evaluation.scores import evaluating


@torch.no_grad()
def sample(
    network: nn.Module,
    tokens: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw tokens one after the other, and return them without the prompt.

    The network, from `(batch, time)` tokens to `(batch, time, vocabulary)` logits, sees the last `context` tokens; its
    modes are restored afterwards. The temperature divides the logits; with 0, the most probable token is taken each
    time. With `top_k`, tokens are drawn among the most probable only. The draws depend on the seed alone.
    """
    if not len(tokens):
        raise ConfigError("the prompt is empty, expected at least one token")
    if temperature < 0.0 or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"the temperature is {temperature} and top_k {top_k}, expected at least 0, and at least 1 or None"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    found = tokens.long()
    with evaluating(network):
        for _ in range(num_tokens):
            logits = network(found[-context:].unsqueeze(0))[0, -1].float()
            found = torch.cat([found, _drawn(logits, temperature, top_k, generator)])
    return found[len(tokens) :]


def _drawn(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits.argmax().unsqueeze(0)
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
