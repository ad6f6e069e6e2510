"""The methods by which fine-tuned networks are merged, as functions of one tensor's numbers.

`deltas` are task vectors: a row for each network, its weights minus those of the base that all were fine-tuned from.
Each function may be given a whole tensor or any part of it, except for those that say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SLERP_LIMIT = 0.9995
"""From this cosine on, networks are interpolated on the straight line instead of the arc, as merging tools do."""
RADIX_BITS = 16
"""The number of bits of a number that are counted in one pass."""


def slerp_weights(products: Tensor, t: float) -> tuple[float, float]:
    """The weights of two networks on the arc between them, from the inner products of their whole tensors.

        a sin((1 - t) theta) / sin(theta) + b sin(t theta) / sin(theta),   theta = angle of a and b

    If both have the same norm, so has every point of the arc. Networks with a cosine above 0.9995, or below -0.9995,
    are interpolated linearly, and so is a tensor of zeros.

    Reference: Shoemake, Animating rotation with quaternion curves (1985).
    """
    lengths = products.diagonal().sqrt().tolist()
    cosine = float(products[0, 1]) / (lengths[0] * lengths[1]) if all(lengths) else 1.0
    if abs(cosine) > SLERP_LIMIT:
        return 1.0 - t, t
    theta = math.acos(cosine)
    return math.sin((1.0 - t) * theta) / math.sin(theta), math.sin(t * theta) / math.sin(theta)


def task_weights(weights: list[float], scale: float) -> list[float]:
    """Task arithmetic: the weights of the networks, and of the base as the last.

        base + scale * sum_j w_j (network_j - base)

    One network of weight 1 gives that network, and no weight at all the base.

    Reference: Ilharco et al., Editing models with task arithmetic (arXiv 2212.04089).
    """
    scaled = [scale * weight for weight in weights]
    return [*scaled, 1.0 - sum(scaled)]


def merged_by_sign(deltas: Tensor, weights: Tensor, *, normalize: bool) -> Tensor:
    """TIES, its last two steps: elect a sign for each parameter, then merge the deltas that agree with it.

        s = sign(sum_j w_j d_j),   A = {j : sign(w_j d_j) = s},   sum_{j in A} w_j d_j / sum_{j in A} w_j

    Equal networks give that network. Without `normalize` nothing is divided.

    Reference: Yadav et al., TIES-Merging: resolving interference when merging models (arXiv 2306.01708).
    """
    weights = weights.to(deltas.dtype).reshape(-1, *[1] * (deltas.dim() - 1))
    weighted = deltas * weights
    elected = torch.where(weighted.sum(dim=0) >= 0, 1.0, -1.0)
    agrees = weighted.sign() == elected
    merged = torch.where(agrees, weighted, 0.0).sum(dim=0)
    if not normalize:
        return merged
    total = torch.where(agrees, weights, 0.0).sum(dim=0)
    return merged / torch.where(total == 0, 1.0, total)


def trimmed(delta: Tensor, limit: float, num_equal: int) -> tuple[Tensor, int]:
    """TIES, its first step: keep the numbers of the largest magnitude, and set the others to 0.

    `limit` is the smallest magnitude that is kept, from `kth_largest` of the whole tensor. Of the elements with exactly
    this magnitude the first `num_equal` are kept. Returns how many of these are left for the parts after this, too.
    """
    magnitude = delta.abs()
    is_kept = magnitude > limit
    equal = (magnitude == limit).flatten().nonzero().flatten()[:num_equal]
    is_kept.view(-1)[equal] = True
    return torch.where(is_kept, delta, 0.0), num_equal - len(equal)


def kth_largest(blocks: Callable[[], Iterable[Tensor]], count: int) -> tuple[float, int]:
    """The `count`-th largest of many numbers, none below 0, and how many of the `count` largest are equal to it.

    The bits of such numbers have the same order as the numbers. Each pass counts 16 bits, from the highest on, so that
    memory holds one block and 65,536 counts. `blocks` is called for each pass, and gives all numbers of a tensor.
    """
    prefix, bits_left, dtype = 0, 64, torch.float64
    size = 1 << RADIX_BITS
    while bits_left:
        counts = torch.zeros(size, dtype=torch.int64)
        for block in blocks():
            if dtype != block.dtype:  # the first block says which it is
                bits_left, dtype = 8 * block.itemsize, block.dtype
            bits = block.view(torch.int32 if block.itemsize == 4 else torch.int64)
            if bits_left < 8 * block.itemsize:
                bits = bits[(bits >> bits_left) == prefix]
            counts += torch.bincount((bits >> (bits_left - RADIX_BITS)) & (size - 1), minlength=size)
        bits_left -= RADIX_BITS
        from_top = counts.flip(0).cumsum(0)
        position = int(torch.searchsorted(from_top, count))
        digit = size - 1 - position
        count -= int(from_top[position] - counts[digit])
        prefix = prefix << RADIX_BITS | digit
    number = torch.tensor(prefix, dtype=torch.int32 if dtype == torch.float32 else torch.int64)
    return float(number.view(dtype)), count


def dropped(delta: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """DARE: drop each number with probability 1 - density, and divide the others by the density.

        E[dropped(d)] = d

    Reference: Yu et al., Language models are super Mario: absorbing abilities from homologous models as a free lunch
    (arXiv 2311.03099).
    """
    if density == 1.0:
        return delta
    is_kept = torch.rand(delta.shape, generator=generator) < density
    return torch.where(is_kept, delta / density, 0.0)
