"""What it costs to spread a population: over processes of one machine, over Gloo on loopback, over a throttled link.

Each contender runs in fresh processes of one thread. Ratios are within one run. The throttled link is a pair of network
namespaces with `tc`; where those are not permitted, its lines are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


from _bench import Result, finish, parser, positive
from machines import Machines
from papa import Averager, Population, Push
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.distributed.start import start_workers
from train import NUM_MEMBERS, train_papa

COLUMNS = 11_000_000
MEGABITS = 400
THROTTLED_COLUMNS = 6_000_000


class Vector(nn.Module):
    """A network with one parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(count))


def best_together(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each contender over rounds that all ranks run together; the first is not counted."""
    seconds = dict.fromkeys(contenders, float("inf"))
    for counted in [False, *[True] * rounds]:
        for name, run in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if counted:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def time_pushes(shared: SharedMemoryGroup, rounds: int) -> dict[str, float]:
    """Seconds of a push of one member per rank, and of the baselines, measured on rank 0."""
    size, rule = shared.num_ranks, Push(alpha=0.99, every_steps=1)
    mapped = Population([Vector(COLUMNS)], SharedMemoryGroup(size))
    copied = torch.empty_like(mapped.matrix) if shared.is_leader else None
    own, total, spare = torch.zeros(COLUMNS), torch.zeros(COLUMNS), torch.zeros(COLUMNS)

    def plain() -> None:
        dist.all_reduce(total)
        spare.copy_(own)

    contenders: dict[str, Callable[[], object]] = {
        "copy of the matrix": lambda: copied is not None and copied.copy_(mapped.matrix),
        "shared": Averager(mapped, rule, measure=False).step,
        "all-reduce and copy": plain,
    }
    for exchange in ("exact", "fast"):
        population = Population([Vector(COLUMNS)], DistributedGroup(exchange=exchange))
        contenders[exchange] = Averager(population, rule, measure=False).step
    return best_together(contenders, rounds)


def push_over_link(rounds: int) -> None:
    """The job of each of two machines: time pushes over the link; rank 0 prints them as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for exchange in ("exact", "fast"):
        population = Population([Vector(THROTTLED_COLUMNS)], DistributedGroup(exchange=exchange))
        averager = Averager(population, Push(alpha=0.99, every_steps=1), measure=False)
        averager.step()  # connects
        times, logs = [], []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            logs.append(averager.step())
            times.append(time.perf_counter() - start)
        found[exchange] = {"seconds": min(times), "bytes": logs[-1].bytes}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def over_throttled_link(rounds: int) -> dict[str, Any] | str:
    """The measurements of two machines on a throttled link; or the reason why there is no such link."""
    machines = Machines(str(os.getpid() % 100_000))
    try:
        machines.connect()
        machines.throttle(MEGABITS)
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for machine in range(2):
                rendezvous = ("--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", "1")
                rendezvous += ("--master-addr", machines.addresses[0], "--master-port", "29517")
                command = ("-m", "torch.distributed.run", *rendezvous, __file__, "--link", "--rounds", str(rounds))
                processes.append(machines.start(machine, *command, log=Path(folder) / str(machine)))
            for process in processes:
                process.wait(timeout=600)
            output = (Path(folder) / "0").read_text()
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"the two machines measured nothing:\n{output}")
        measured: dict[str, Any] = json.loads(lines[0])
        return measured
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces or tc are not permitted here: {error}"
    finally:
        machines.remove()


def throughput(steps: int, rounds: int) -> list[Result]:
    """Training four members with one and with two processes."""
    rule = Push(alpha=0.99, every_steps=10)
    seconds = {1: float("inf"), 2: float("inf")}
    for _ in range(rounds):
        for count in seconds:
            seconds[count] = min(seconds[count], start_workers(train_papa, count, NUM_MEMBERS, rule, steps)[0])
    results = [Result(name=f"training, {count} process(es)", seconds=value) for count, value in seconds.items()]
    return [*results, Result(name="training, 2 against 1", ratio=seconds[2] / seconds[1], target=1 / 1.85)]


def pushes(num_ranks: int, rounds: int) -> list[Result]:
    """One member per rank on one machine."""
    seconds: dict[str, float] = start_workers(time_pushes, num_ranks, num_ranks, rounds)
    copy, plain = seconds["copy of the matrix"], seconds["all-reduce and copy"]
    label = f"{num_ranks} processes"
    return [
        Result(name=f"{label}: copy of the matrix", seconds=copy),
        Result(
            name=f"{label}: push by the mapping / copy",
            seconds=seconds["shared"],
            ratio=seconds["shared"] / copy,
            target=1.5,
        ),
        Result(name=f"{label}: all-reduce and copy of rows", seconds=plain),
        Result(name=f"{label}: fast / that", seconds=seconds["fast"], ratio=seconds["fast"] / plain, target=1.5),
        Result(name=f"{label}: exact / that", seconds=seconds["exact"], ratio=seconds["exact"] / plain),
    ]


def link(rounds: int) -> list[Result]:
    """Two machines on a throttled link."""
    measured = over_throttled_link(rounds)
    if isinstance(measured, str):
        return [Result(name="link: not measured", note=measured)]
    num_bytes = 4 * THROTTLED_COLUMNS  # of two members on two machines, with both exchanges
    expected_seconds = num_bytes * 8 / (MEGABITS * 1e6) + 2e-3  # and two latencies
    results = []
    for exchange, found in measured.items():
        at_link_speed = found["bytes"] * 8 / (MEGABITS * 1e6)
        seconds = found["seconds"]
        results += [
            Result(
                name=f"link: {exchange} / its bytes at link speed",
                seconds=seconds,
                ratio=seconds / at_link_speed,
                target=1.3,
            ),
            Result(
                name=f"link: {exchange}, bytes / the model's",
                ratio=found["bytes"] / num_bytes,
                target=1.01,
            ),
            Result(name=f"link: {exchange}, the model's bytes / bytes", ratio=num_bytes / found["bytes"]),
            Result(name=f"link: {exchange}, time / the model's", ratio=seconds / expected_seconds, target=1.3),
        ]
    return results


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--steps", type=positive, default=20, help="number of steps to time in each round")
    options_parser.add_argument("--link", action="store_true", help="run the job of a machine on the throttled link")
    options_parser.add_argument("--only", choices=["training", "pushes", "link"], help="measure only this")
    options_parser.set_defaults(rounds=4)
    options = options_parser.parse_args()
    if options.link:
        push_over_link(options.rounds)
        return
    parts: dict[str, Callable[[], list[Result]]] = {
        "link": lambda: link(options.rounds),
        "pushes": lambda: [*pushes(2, 2 * options.rounds), *pushes(4, 2 * options.rounds)],  # these are short
        "training": lambda: throughput(options.steps, options.rounds),
    }
    results = [result for name, part in parts.items() if options.only in (None, name) for result in part()]
    finish(results, options, title=f"Spreading a population; pushes of {COLUMNS:,} numbers per member")


if __name__ == "__main__":
    main()
