"""`papa plan`: what averaging between machines will cost."""

from __future__ import annotations

from collections.abc import Sequence

from papa.cli.arguments import parse_options
from papa.cli.tables import print_table
from papa.lab.config import EXCHANGES
from papa.lab.costs import Plan, cost_of

DESCRIPTION = """What averaging between machines will cost, by the model of docs/machines.md.

examples:
  papa plan --params 11.7e6 --members 8 --ranks 8 --bandwidth 1e9 --step-time 0.2
  papa plan --params 1e9 --members 4 --bandwidth 25e9 --step-time 0.5 --every-steps 20
"""


def main(arguments: Sequence[str]) -> int:
    plan = parse_options(Plan, arguments, prog="papa plan", description=DESCRIPTION)
    costs = [cost_of(plan, exchange) for exchange in EXCHANGES]
    rows = {
        "bytes per push": [_bytes(cost.bytes_per_push) for cost in costs],
        "bytes per step": [_bytes(cost.bytes_per_step) for cost in costs],
        "seconds per push": [f"{cost.seconds_per_push:.3g}" for cost in costs],
        "time lost": [f"{cost.time_lost:.1%}" for cost in costs],
        "weights in memory": [_bytes(cost.memory_bytes) for cost in costs],
    }
    print_table(("per rank", *EXCHANGES), [(name, *cells) for name, cells in rows.items()])
    return 0


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
