"""Jobs that ranks run in the tests of `DistributedGroup` and torchrun."""

from __future__ import annotations

import contextlib
import copy
import datetime
import hashlib
import io
import itertools
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import group_jobs
from group_jobs import make_mlp, message_of, states_of
from helpers import execute, small_training
from papa import (
    AlignMerges,
    Averager,
    Ensemble,
    Independent,
    MergeAll,
    MergePairs,
    Population,
    Push,
    align_all_,
    aligned_soups,
    average_soup,
    greedy_soup,
    repair_,
    symmetries,
)
from papa.cli.main import main
from papa.core import mixing
from papa.core.group import Group, LocalGroup
from papa.core.product import ALIGNMENT_BYTES
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.errors import LostError
from papa.lab import launch
from papa.lab.config import AverageConfig, Config
from papa.lab.outcome import finalize_run
from papa.lab.recipes import find
from papa.repair import RepairMerges
from papa.storage import read_json, write_json
from papa.training import Align

SIZE = 5
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
WIDTHS = (1, 37, 9_001)
"""In cache lines: from fewer blocks than ranks to more than one block."""
MANY_ROUNDS = 50_003
SOUPS = {"mean": [0.2] * 5, "one": [0.0, 0.0, 0.0, 1.0, 0.0], "two": [0.25, 0.0, 0.75, 0.0, 0.0]}


def matrices(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dense = torch.softmax(torch.randn(size, size, generator=generator, dtype=torch.float64), dim=1)
    few = dense * (dense > 0.15) + 1e-3 * torch.eye(size)
    return {
        "identity": mixing.identity(size),
        "push": mixing.push(size, 0.9),
        "merge": mixing.merge_all(size),
        "pairs": mixing.merge_pairs(size, generator),
        "many": mixing.merge_many(size, share=0.75),
        "dense": dense,
        "few": few / few.sum(dim=1, keepdim=True),
    }


def rows_of(members: range, num_columns: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(
        [torch.randn(num_columns, generator=torch.Generator().manual_seed(m), dtype=dtype) for m in members]
    )


def operations(group: Group, uneven: bool = False) -> dict[str, Any]:
    """Every operation of a group on matrices of many shapes and dtypes, with the results of the whole population."""
    mine = group.local_range(SIZE)
    if uneven and isinstance(group, DistributedGroup):
        mine = range(0, 1) if group.rank == 0 else range(1, SIZE)
    found: dict[str, Any] = {}
    for dtype, lines in [*itertools.product(DTYPES, WIDTHS), (torch.float32, MANY_ROUNDS)]:
        num_columns = lines * ALIGNMENT_BYTES // dtype.itemsize
        rows = group.allocate(len(mine), num_columns, dtype=dtype, device=torch.device("cpu"))
        start = rows_of(mine, num_columns, dtype)
        for name, matrix in matrices(SIZE).items():
            if lines == MANY_ROUNDS and name not in ("push", "dense"):
                continue
            rows.copy_(start)
            group.mix_(rows, matrix)
            found[f"{dtype} {lines} {name}"] = group.all_gather([digest(row) for row in rows])
        rows.copy_(start)
        for name, weights in SOUPS.items():
            found[f"{dtype} {lines} {name}"] = digest(group.combine(rows, torch.tensor(weights, dtype=torch.float64)))
        if not dtype.is_complex:
            found[f"{dtype} {lines} distances"] = group.squared_distances(rows).tolist()
    return found


def digest(row: Tensor) -> str:
    return hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def distributed_operations(group: SharedMemoryGroup) -> dict[str, Any]:
    found = operations(DistributedGroup())
    if group.num_ranks == 2:
        found.update({f"uneven {name}": value for name, value in operations(DistributedGroup(), uneven=True).items()})
    return found


def fast_pushes(group: Group) -> dict[str, Any]:
    """A few pushes of members that move in between, then a merge."""
    population = Population([nn.Linear(300, 200) for _ in group.local_range(SIZE)], group)
    for index, member in enumerate(population.members):
        generator = torch.Generator().manual_seed(member)
        with torch.no_grad():
            for parameter in population[index].parameters():
                parameter.copy_(100 + torch.randn(parameter.shape, generator=generator))
    averager = Averager(population, Push(alpha=0.8, every_steps=1), measure=False)
    for step in range(4):
        for index, member in enumerate(population.members):
            generator = torch.Generator().manual_seed(100 * step + member)
            with torch.no_grad():
                population[index].weight += 0.01 * torch.randn(200, 300, generator=generator)
        log = averager.step()
    pushed = group.all_gather([net.weight.detach().clone() for net in population])
    Averager(population, MergeAll(every_steps=1)).step()
    merged = group.all_gather([net.weight.detach().clone() for net in population])
    return {"pushed": pushed, "merged": merged, "bytes": log.bytes}


def pushes_by_exchange() -> dict[str, dict[str, Any]]:
    return {exchange: fast_pushes(DistributedGroup(exchange=exchange)) for exchange in ("exact", "fast")}


def half_precision_bytes() -> int:
    """The bytes that a fast push of float16 weights sends."""
    population = Population([nn.Linear(300, 200, dtype=torch.float16)], DistributedGroup(exchange="fast"))
    return Averager(population, Push(alpha=0.8, every_steps=1), measure=False).step().bytes


def repair_and_align(group: Group) -> dict[str, Any]:
    """Everything that reads several members at once: REPAIR, alignment, soups and the ensemble."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 5) for _ in range(2)]
    population = Population([make_mlp(member) for member in group.local_range(SIZE)], group)
    groups, found = symmetries(population[0], batches[0]), group_jobs.align(group)
    found["ensemble"] = Ensemble(population)(batches[0]).detach()
    soup = average_soup(population)
    found["report"] = repair_(soup, population, batches)
    found["repaired"] = soup.state_dict()
    found["greedy"] = greedy_soup(
        population,
        lambda net: float(net(batches[0])[:, 0].sum().detach()),
        after=lambda net, row: repair_(net, population, batches, row),
    ).network.state_dict()
    for rule in (MergePairs(every_steps=1), MergeAll(every_steps=1)):
        hooks = [AlignMerges(batches, symmetries=groups), RepairMerges(lambda member: batches)]
        Averager(population, rule, merge_hooks=hooks).step()
        found[type(rule).__name__] = group.all_gather([copy.deepcopy(net.state_dict()) for net in population])
        for index, member in enumerate(population.members):
            population[index].load_state_dict(make_mlp(member).state_dict())
    alignments = align_all_(population, batches, symmetries=groups)
    found["aligned"] = states_of(population)
    found["alignments"] = group.all_gather([(one.before, one.after, one.permutations) for one in alignments])
    return found


def train_and_finalize(group: Group) -> dict[str, Any]:
    """A training of independent members and one with merges, and all results of both."""
    found: dict[str, Any] = {}
    for name, rule, align in (
        ("independent", Independent(), None),
        ("merged", MergeAll(every_steps=5), Align(num_batches=2)),
    ):
        training = small_training(rule=rule, align=align, num_members=4, group=group_jobs.new_group(group))
        training.run()
        before = [copy.deepcopy(net.state_dict()) for net in training.population]
        average = AverageConfig(align_soups=True, align_batches=2)
        outcome = finalize_run(training, Config(analysis=True, average=average))
        found[name] = {
            **{key: value for key, value in outcome.to_json().items() if key != "seconds"},
            "soup": outcome.training.average_soup.state_dict(),
            "greedy": outcome.training.greedy.network.state_dict(),
            "states": states_of(training.population),
            "unchanged": group.all_gather(
                [
                    group_jobs.identical(state, net.state_dict())
                    for state, net in zip(before, training.population, strict=True)
                ]
            ),
        }
    return found


def nonfinite_member_errors(group: Group) -> dict[str, str]:
    """The errors about a non-finite member, which all ranks must raise, so that none waits for the others."""
    batches = [torch.randn(16, 5, generator=torch.Generator().manual_seed(0))]
    population = Population([make_mlp(member) for member in group.local_range(SIZE)], group)
    groups = symmetries(population[0], batches[0])
    for index, member in enumerate(population.members):
        if member == SIZE - 1:
            with torch.no_grad():
                population[index][0].weight[0] = float("nan")
    merge = Averager(
        population,
        MergeAll(every_steps=1),
        merge_hooks=RepairMerges(lambda member: batches),
        measure=False,
        on_nonfinite=None,
    )
    soups = partial(aligned_soups, population, lambda net: 1.0, batches, symmetries=groups)
    return {
        "align": message_of(lambda: align_all_(population, batches, symmetries=groups)),
        "soups": message_of(soups),
        "merge": message_of(merge.step),
        "repair": message_of(lambda: repair_(population[0], population, batches)),
    }


def run_distributed(group: SharedMemoryGroup) -> dict[str, Any]:
    """All of the above, in processes that are started once."""
    return {
        "operations": distributed_operations(group),
        "rules": group_jobs.apply_every_rule(DistributedGroup()),
        "half precision": half_precision_bytes(),
        "pushes": pushes_by_exchange(),
        "aligned": repair_and_align(DistributedGroup()),
        "training": train_and_finalize(DistributedGroup()),
        "nonfinite errors": nonfinite_member_errors(DistributedGroup()),
        "mismatch errors": mismatch_errors(),
    }


def mismatch_errors() -> dict[str, str]:
    """The errors where ranks disagree, or a group is impossible."""
    rank, world = dist.get_rank(), dist.group.WORLD
    names = ("one", "two") if rank == 0 else ("two", "one")
    order = torch.channels_last if rank else torch.contiguous_format

    def disagree_on(rule: Push, **options: Any) -> str:
        return message_of(lambda: Averager(Population([nn.Linear(3, 2)], world), rule, **options))

    def push_at(lr_ratio: float, on_nonfinite: str | None) -> str:
        averager = Averager(
            Population([nn.Linear(3, 2)], world),
            Push(alpha=0.99, every_steps=3),
            on_nonfinite=on_nonfinite,
        )
        averager.step(lr_ratio), averager.step(lr_ratio)
        return message_of(lambda: averager.step(lr_ratio))

    return {
        "architecture": message_of(lambda: Population([nn.Linear(3 + rank, 2)], world)),
        "order": message_of(lambda: Population([nn.ModuleDict({name: nn.Linear(3, 2) for name in names})], world)),
        "memory": message_of(lambda: Population([nn.Conv2d(2, 3, 2).to(memory_format=order)], world)),
        "exchanges": message_of(
            lambda: Population([nn.Linear(3, 2)], DistributedGroup(exchange="fast" if rank else "exact"))
        ),
        "alpha": disagree_on(Push(alpha=0.9 - 0.1 * rank)),
        "cadence": disagree_on(Push(alpha=0.99, every_steps=10 + rank)),
        "steps": disagree_on(Push(alpha=0.99), num_steps=100 + rank),
        **{f"learning rate, {policy}": push_at(1.0 - 0.25 * min(rank, 1), policy) for policy in ("restart", None)},
        "too many": message_of(lambda: DistributedGroup().local_range(1)),
        "exchange": message_of(lambda: DistributedGroup(exchange="quick")),
    }


def set_torchrun_variables(group: SharedMemoryGroup) -> None:
    """Set the variables that torchrun sets; the processes are connected already."""
    rank = str(group.rank)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def execute_under_torchrun(group: SharedMemoryGroup, config: Config, path: Path) -> None:
    set_torchrun_variables(group)
    execute(config, path)


def config_time(run: Path) -> int | None:
    """The time of the config file, which a new run writes and a resumed run keeps."""
    config = run / "config.json"
    return config.stat().st_mtime_ns if config.exists() else None


def commands(group: SharedMemoryGroup, path: str) -> dict[str, list[tuple[int, str, bool]]]:
    """Commands under torchrun: the exit code and output of each rank, and whether the run directory was continued.

    `remove_result` makes a finished run an interrupted one, with its checkpoints.
    """
    set_torchrun_variables(group)
    out = Path(path) / "run"
    small = ("--members", "2", "--train.epochs", "2")
    found = {}

    def run_command(name: str, *arguments: str) -> None:
        before = config_time(out)
        group.barrier()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = main(arguments)
        group.barrier()
        found[name] = group.all_gather([(code, output.getvalue(), config_time(out) == before)])

    def remove_result() -> None:
        group.barrier()
        if group.is_leader:
            (out / "result.json").unlink()
            shutil.rmtree(max((out / "checkpoint").glob("step-*")))

    run = ("run", "digits", *small, "--out", str(out))
    run_command("run", *run)
    remove_result()
    run_command("resume", "resume", str(out))
    remove_result()
    mark = out / ".torchrun"
    if group.is_leader:  # as if earlier processes of the same torchrun had started it
        write_json(mark, {**read_json(mark), "processes": ["elsewhere 1"]})
    run_command("overwrite, restarted", *run, "--overwrite")
    run_command("overwrite", *run, "--overwrite")
    compare = ("compare", "digits", *small, "--methods", "independent,papa", "--out", str(Path(path) / "compare"))
    run_command("compare", *compare)
    run_command("compare, parallel", *compare, "--parallel", "2")
    return found


def start_errors(group: SharedMemoryGroup, path: str) -> dict[str, str]:
    """The errors at the start of a run under torchrun."""
    set_torchrun_variables(group)
    config = replace(find("digits").config(), members=2)
    version = launch.__version__

    def with_version() -> None:
        launch.__version__ = "0.0.0" if group.rank else version
        execute(config, Path(path) / "run")

    (Path(path) / "rank-0").mkdir(exist_ok=True)
    calls = {
        "in use": lambda: execute(config, Path(path) / "held"),
        "seed": lambda: execute(replace(config, seed=1 + group.rank), Path(path) / "run"),
        "resume": lambda: execute(config, Path(path) / "run", resume=bool(group.rank)),
        "version": with_version,
        "too many": lambda: execute(replace(config, members=1), Path(path) / "run"),
        "workers": lambda: execute(config, Path(path) / "run", workers=2),
        "not shared": lambda: launch._check_shared(Path(path) / f"rank-{group.rank}" / "run", group),
    }
    return {name: message_of(call) for name, call in calls.items()}


def lose_rank_1(how: str, rank: int, rendezvous: str, said: Path) -> None:
    """Two ranks push; rank 1 exits or hangs, and rank 0 writes the error it gets and the class of its cause."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = datetime.timedelta(seconds=3 if how == "hangs" else 300)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timeout)
    population = Population([nn.Linear(300, 300)], dist.group.WORLD)
    averager = Averager(population, Push(alpha=0.9, every_steps=1))
    for _ in range(3):
        averager.step()
    if dist.get_rank() == 1:
        time.sleep(600 if how == "hangs" else 0)
        os._exit(3)
    try:
        averager.step()
    except LostError as error:
        said.write_text(f"LostError: {error} (cause: {type(error.__cause__).__name__})")
    os._exit(0)


def run_local() -> dict[str, Any]:
    """The same in one process."""
    torch.set_num_threads(1)
    return {
        "operations": operations(LocalGroup()),
        "rules": group_jobs.apply_every_rule(LocalGroup()),
        "pushes": fast_pushes(LocalGroup()),
        "aligned": repair_and_align(LocalGroup()),
        "training": train_and_finalize(LocalGroup()),
        "nonfinite errors": nonfinite_member_errors(LocalGroup()),
    }
