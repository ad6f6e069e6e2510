"""A decoder-only transformer: GPT-2's layout by default, or the parts of newer ones (RMSNorm, SwiGLU, rotary)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.errors import ConfigError, did_you_mean

INIT_STD = 0.02
ROTARY_BASE = 10_000.0
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
MLPS = ("gelu", "swiglu")
POSITIONS = ("learned", "rotary")


class GPT(nn.Module):
    """Predicts the next token at every position: `(batch, time)` tokens to `(batch, time, vocab_size)` logits.

    Example:
        >>> net = GPT(vocab_size=65, context=32, num_layers=2, num_heads=4, width=64)
        >>> net(torch.zeros(2, 32, dtype=torch.long)).shape
        torch.Size([2, 32, 65])

    Options are those of `papa.lab.config.GPTConfig`. The width is a multiple of the number of heads. The hidden layer
    of `gelu` is four times as wide; that of `swiglu` 8/3 as wide, with a gate: as many parameters. Norms are before
    each part of a block and at the end. Rotary positions rotate queries and keys.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        num_layers: int,
        num_heads: int,
        width: int,
        dropout: float = 0.0,
        mlp: str = "gelu",
        norm: str = "layer",
        positions: str = "learned",
        bias: bool = True,
    ) -> None:
        super().__init__()
        for name, value, known in (("mlp", mlp, MLPS), ("norm", norm, NORMS), ("positions", positions, POSITIONS)):
            if value not in known:
                raise ConfigError(f"{name} is {value}: {did_you_mean(value, known)}")
        if width % num_heads or (positions == "rotary" and width // num_heads % 2):
            even = " of an even size" if positions == "rotary" else ""
            raise ConfigError(f"the width is {width}, expected a multiple of the {num_heads} heads{even}")
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        rotary = context if positions == "rotary" else None
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout=dropout, mlp=mlp, norm=norm, rotary=rotary, bias=bias)
            for _ in range(num_layers)
        )
        self.norm = NORMS[norm](width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The outputs of 2L parts add up: smaller weights keep the sum's variance.
                is_last = name.endswith("out.weight")
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * num_layers) if is_last else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a small network for each position, each added to what goes in."""

    def __init__(
        self, width: int, num_heads: int, *, dropout: float, mlp: str, norm: str, rotary: int | None, bias: bool
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = NORMS[norm](width), NORMS[norm](width)
        self.attention = Attention(width, num_heads, dropout=dropout, rotary=rotary, bias=bias)
        self.mlp = GELU(width, bias=bias) if mlp == "gelu" else SwiGLU(width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        added: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return added


class Attention(nn.Module):
    """Causal self-attention with several heads; `rotary` is the number of positions to rotate for, or None."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, num_heads: int, *, dropout: float, rotary: int | None, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.dropout = num_heads, width // num_heads, dropout
        self.is_rotary = rotary is not None
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        if rotary is not None:
            frequencies = ROTARY_BASE ** (-torch.arange(0, self.head_size, 2) / self.head_size)
            angles = torch.outer(torch.arange(rotary), frequencies).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).reshape(batch, time, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.is_rotary:
            q, k = self._rotated(q), self._rotated(k)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed

    def _rotated(self, x: Tensor) -> Tensor:
        """Pairs of coordinates, rotated by an angle that grows with the position."""
        first, second = x.chunk(2, dim=-1)
        time = x.shape[-2]
        return x * self.cos[:time] + torch.cat([-second, first], dim=-1) * self.sin[:time]


class GELU(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(F.gelu(self.up(x)))
        return y


class SwiGLU(nn.Module):
    """Two linear layers, the first multiplied by a gate: `out(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate, self.up = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return y
