"""What averaging costs between machines: a small model of bytes, time and memory.

With `n` numbers of `b` bytes per network, `p` members on `R` ranks, a push sends from each rank

    exact      2 n b (p/R) (R - 1)/R      the columns of its rows to others, and others' columns back; where ranks hold
                                          different numbers of members, n b (m (R - 2) + p)/R from one that holds m
    fast       2 n b (R - 1)/R            a sum over ranks, and the sum to all; half precision is summed as float32
    bfloat16   half of fast, for float32

and takes `bytes / bandwidth + 2 latency` seconds: rounds follow each other without waiting, so latency counts once
there and once back. A push every `k` steps then loses `push / (k step + push)` of all time; one that is delayed by `d`
steps loses only what does not fit into them. The time to copy and add numbers is left out: against any network it is
small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from papa.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What someone is about to do."""

    num_parameters: float
    """Numbers of one network."""
    num_members: int
    num_ranks: int
    bits_per_second: float
    """What each rank can send."""
    seconds_per_step: float
    """One optimizer step of all members that a rank holds."""
    every_steps: int = 10
    delay: int | None = None
    """Steps that a push may take in the background; None for as many as there can be."""
    latency: float = 1e-3
    bytes_per_number: int = 4

    def __post_init__(self) -> None:
        for what, value in (
            ("numbers of one network (params)", self.num_parameters),
            ("members", self.num_members),
            ("bandwidth", self.bits_per_second),
            ("step time", self.seconds_per_step),
            ("steps between pushes (every steps)", self.every_steps),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{what}: {value:g}, expected a number of more than 0")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"latency: {self.latency:g}, expected seconds, 0 or more")
        if self.bytes_per_number < 1:
            raise ConfigError(f"bytes per number: {self.bytes_per_number}, expected at least 1: 4 for float32")
        if not 1 <= self.num_ranks <= self.num_members:
            raise ConfigError(f"there are {self.num_ranks} ranks for {self.num_members} members, expected 1 to as many")
        if self.delay is not None and not (0 <= self.delay < self.every_steps and self.delay % 2 == 0):
            raise ConfigError(f"delay: {self.delay}, expected an even number below every steps, {self.every_steps}")

    @property
    def usable_delay(self) -> int:
        """The delay, or the largest even number below the cadence."""
        return (self.every_steps - 1) // 2 * 2 if self.delay is None else self.delay


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What each rank pays."""

    bytes_per_push: float
    bytes_per_step: float
    seconds_per_push: float
    share_lost: float
    """Of all time, when members wait for a push."""
    share_lost_delayed: float
    """Of all time, when they train on meanwhile."""
    memory_bytes: float
    """Weights that a rank holds while averaging."""
    delayed_memory_bytes: float
    """The same with a delay, which needs a copy of the rank's members and their mean."""


def cost_of(plan: Plan, exchange: str) -> Cost:
    """What averaging costs with one kind of exchange.

    Example:
        >>> plan = Plan(num_parameters=1e6, num_members=4, num_ranks=2, bits_per_second=8e6, seconds_per_step=1.0)
        >>> cost_of(plan, "fast").bytes_per_push, round(cost_of(plan, "exact").seconds_per_push)
        (4000000.0, 8)

    Args:
        plan: what someone is about to do.
        exchange: `exact`, `fast` or `bfloat16`.
    """
    network = plan.num_parameters * plan.bytes_per_number
    summed = plan.num_parameters * max(4, plan.bytes_per_number)
    members_here = -(-plan.num_members // plan.num_ranks)
    apart = (plan.num_ranks - 1) / plan.num_ranks
    sent = {
        "exact": network * (members_here * (plan.num_ranks - 2) + plan.num_members) / plan.num_ranks,
        "fast": 2 * summed * apart,
        "bfloat16": 2 * 2 * plan.num_parameters * apart,
    }
    if exchange not in sent:
        raise ConfigError(f"exchange is {exchange}: {did_you_mean(exchange, sent)}")
    seconds = sent[exchange] * 8 / plan.bits_per_second + 2 * plan.latency if plan.num_ranks > 1 else 0.0
    left = max(0.0, seconds - plan.usable_delay * plan.seconds_per_step)
    between = plan.every_steps * plan.seconds_per_step
    mean = summed if exchange == "bfloat16" else 0.0
    return Cost(
        bytes_per_push=sent[exchange],
        bytes_per_step=sent[exchange] / plan.every_steps,
        seconds_per_push=seconds,
        share_lost=seconds / (between + seconds),
        share_lost_delayed=left / (between + left),
        memory_bytes=members_here * network + mean,
        delayed_memory_bytes=(2 * members_here + 1) * network + mean,
    )
