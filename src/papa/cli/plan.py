"""`papa plan`: what averaging costs before you start it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from papa.cli.tables import print_table
from papa.lab.costs import Cost, Plan, cost_of

DESCRIPTION = """What averaging will cost between machines, by the model of docs/machines.md.

examples:
  papa plan --params 11.7e6 --members 8 --ranks 8 --bandwidth 1e9 --step-time 0.2
  papa plan --params 1e9 --members 4 --bandwidth 25e9 --step-time 0.5 --every-steps 20
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `papa plan`."""

    params: float
    """Numbers of one network."""
    members: int
    """The size of the population."""
    bandwidth: float
    """What each rank can send, in bits per second."""
    step_time: float
    """Seconds of one optimizer step of all members on a rank."""
    ranks: int | None = None
    """Processes; None for one per member."""
    every_steps: int = 10
    """Steps between pushes."""
    delay: int | None = None
    """Steps that a push may take in the background; None for as many as there can be."""
    latency: float = 1e-3
    """Seconds until a message begins to arrive."""
    bytes_per_number: int = 4
    """4 for float32 weights, 2 for half precision."""


def main(arguments: Sequence[str]) -> int:
    """Print the costs of each kind of exchange."""
    options = tyro.cli(PlanOptions, prog="papa plan", description=DESCRIPTION, args=list(arguments))
    plan = Plan(
        num_parameters=options.params,
        num_members=options.members,
        num_ranks=options.members if options.ranks is None else options.ranks,
        bits_per_second=options.bandwidth,
        seconds_per_step=options.step_time,
        every_steps=options.every_steps,
        delay=options.delay,
        latency=options.latency,
        bytes_per_number=options.bytes_per_number,
    )
    header = ("exchange", "bytes per push", "bytes per step", "seconds per push", "time lost", "time lost, delayed")
    print_table(header, [_row(name, cost_of(plan, name)) for name in ("exact", "fast", "bfloat16")])
    memory = [(name, _bytes(cost_of(plan, name).memory_bytes)) for name in ("exact", "fast", "bfloat16")]
    print("bytes: of the rank that sends most; time lost: share of all time, of a push that waits and of a delayed one")
    print(f"weights held by each rank, without gradients and optimizer: {', '.join(f'{n} {m}' for n, m in memory)}")
    print(f"... and with a delay of {plan.usable_delay} steps: {_bytes(cost_of(plan, 'exact').delayed_memory_bytes)}")
    return 0


def _row(name: str, cost: Cost) -> tuple[str, ...]:
    return (
        name,
        _bytes(cost.bytes_per_push),
        _bytes(cost.bytes_per_step),
        f"{cost.seconds_per_push:.3g}",
        f"{100 * cost.share_lost:.1f}%",
        f"{100 * cost.share_lost_delayed:.1f}%",
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
