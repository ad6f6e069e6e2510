"""The costs of averaging between machines: a small model of bytes, time and memory.

With `n` numbers of `b` bytes per network and `p` members on `R` ranks, a push sends from each rank

    exact      2 n b (p/R) (R - 1)/R      columns of its rows to the others, and columns of the others' rows back;
                                          n b (m (R - 2) + p)/R from the rank with the most members, m, if they differ
    fast       2 n b (R - 1)/R            an all-reduce in float32 or better

and takes `bytes / bandwidth + 2 latency` seconds, since the messages are pipelined. A push every `k` steps takes
`push / (k step + push)` of all time. The time to copy and add numbers is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from papa.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A population, its processes and their network."""

    params: float
    """Number of parameters of one network."""
    members: int
    """Number of members."""
    bandwidth: float
    """Bits per second that each rank can send."""
    step_time: float
    """Seconds of one optimizer step of all members on a rank."""
    ranks: int | None = None
    """Number of processes; None for one per member."""
    every_steps: int = 10
    """Steps between pushes."""
    latency: float = 1e-3
    """Seconds until a message begins to arrive."""
    bytes_per_number: int = 4
    """4 for float32 weights, 2 for half precision."""

    def check(self) -> None:
        """Raise a `ConfigError` for a value that is out of range."""
        for name in ("params", "members", "bandwidth", "step_time", "every_steps", "bytes_per_number"):
            if not 0 < getattr(self, name) < math.inf:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is {getattr(self, name):g}, expected a finite number above 0")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"--latency is {self.latency:g}, expected seconds, 0 or more")
        if not 1 <= self.num_ranks <= self.members:
            raise ConfigError(f"--ranks is {self.num_ranks} for {self.members} members, expected 1 to as many")

    @property
    def num_ranks(self) -> int:
        return self.members if self.ranks is None else self.ranks


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs for the rank with the highest; the share of time lost is between 0 and 1."""

    bytes_per_push: float
    bytes_per_step: float
    seconds_per_push: float
    time_lost: float
    memory_bytes: float  # of weights, without gradients and optimizer


def cost_of(plan: Plan, exchange: str) -> Cost:
    """The cost of averaging with one kind of exchange.

    Example:
        >>> plan = Plan(params=1e6, members=4, ranks=2, bandwidth=8e6, step_time=1.0)
        >>> cost_of(plan, "fast").bytes_per_push, round(cost_of(plan, "exact").seconds_per_push)
        (4000000.0, 8)
    """
    plan.check()
    ranks, local_members = plan.num_ranks, math.ceil(plan.members / plan.num_ranks)
    network = plan.params * plan.bytes_per_number
    wide_network = plan.params * max(4, plan.bytes_per_number)
    sent = {
        "exact": network * (local_members * (ranks - 2) + plan.members) / ranks,
        "fast": 2 * wide_network * (ranks - 1) / ranks,
    }
    if exchange not in sent:
        raise ConfigError(f"exchange is {exchange}: {did_you_mean(exchange, sent)}")
    seconds = sent[exchange] * 8 / plan.bandwidth + 2 * plan.latency if ranks > 1 else 0.0
    training = plan.every_steps * plan.step_time
    return Cost(
        bytes_per_push=sent[exchange],
        bytes_per_step=sent[exchange] / plan.every_steps,
        seconds_per_push=seconds,
        time_lost=seconds / (training + seconds),
        memory_bytes=local_members * network,
    )
