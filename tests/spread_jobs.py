"""What the ranks of the tests between machines do; in a module of its own, so that new processes can import it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import group_jobs
from helpers import small_training
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
    mixing,
    repair_,
    symmetries,
)
from papa.averager import chain
from papa.checkpoint import read_json, write_json
from papa.cli.main import main
from papa.errors import PapaError
from papa.group import DistributedGroup, Group, LocalGroup, SharedMemoryGroup, background
from papa.lab import launch
from papa.lab.config import AverageConfig
from papa.lab.recipes import find
from papa.product import ALIGNMENT_BYTES
from papa.repair import RepairMerges
from papa.training import finalize
from papa.training.merge_options import MergeOptions

SIZE = 5
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
WIDTHS = (1, 37, 9_001)
"""In cache lines: from fewer blocks than ranks to a block and a bit."""
MANY_ROUNDS = 50_003
SCALES = (0.0, 100.0)
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
    """Every operation of a group on matrices of many shapes and dtypes; the whole population's result comes back."""
    mine = group.local_range(SIZE)
    if uneven and isinstance(group, DistributedGroup):  # the first rank gives members away
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
        found[f"{dtype} {lines} begun"] = digest(
            group.begin_mean(rows, rows.clone(), mixing.soup_row(SIZE, range(SIZE)))()
        )
        if not dtype.is_complex:
            found[f"{dtype} {lines} distances"] = group.squared_distances(rows).tolist()
    return found


def digest(row: Tensor) -> str:
    return hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def spread_operations(group: SharedMemoryGroup) -> dict[str, Any]:
    found = operations(DistributedGroup())
    if group.num_ranks == 2:
        found.update({f"uneven {name}": value for name, value in operations(DistributedGroup(), uneven=True).items()})
    return found


def march_spread(group: SharedMemoryGroup) -> dict[str, Any]:
    return group_jobs.march(DistributedGroup())


def delayed_march(group: Group, *, save_at: int | None = None) -> dict[str, Any]:
    """A push that lands later, on members that move on their own in between; perhaps saved and loaded on the way."""
    population = Population([group_jobs.make_member(member) for member in group.local_range(SIZE)], group)
    averager = Averager(population, Push(alpha=0.7, every_steps=5, delay=2))
    logs = []
    for step in range(1, 19):
        for index, member in enumerate(population.members):
            generator = torch.Generator().manual_seed(100 * step + member)
            with torch.no_grad():
                for parameter in population[index].parameters():
                    parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        logs.append(averager.step())
        if step == save_at:
            state = averager.state_dict()
            averager = Averager(population, averager.rule)
            averager.load_state_dict(state)
    return {"states": group.all_gather([net.state_dict() for net in population]), "logs": logs}


def delayed_spread(group: SharedMemoryGroup) -> dict[str, Any]:
    return delayed_march(DistributedGroup())


def fast_pushes(group: Group, *, save_at: int | None = None) -> dict[str, Any]:
    """A few pushes of members that drift, then a merge; the means of every rank come back."""
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
        if step == save_at and isinstance(group, DistributedGroup):
            state, group = averager.state_dict(), DistributedGroup(exchange=group.exchange)
            population = Population(copy.deepcopy(list(population)), group)
            averager = Averager(population, averager.rule, measure=False)
            averager.load_state_dict(state)
    pushed = group.all_gather([net.weight.detach().clone() for net in population])
    Averager(population, MergeAll()).step()
    merged = group.all_gather([net.weight.detach().clone() for net in population])
    return {"pushed": pushed, "merged": merged, "bytes": log.bytes}


def spread_fast_pushes(group: SharedMemoryGroup) -> dict[str, dict[str, Any]]:
    found = {exchange: fast_pushes(DistributedGroup(exchange=exchange)) for exchange in ("exact", "fast", "bfloat16")}
    return found | {"bfloat16, resumed": fast_pushes(DistributedGroup(exchange="bfloat16"), save_at=1)}


def half_precision_bytes() -> dict[str, int]:
    """What a push of float16 sends; the first with bfloat16 travels in full."""
    found = {}
    for exchange in ("fast", "bfloat16"):
        population = Population([nn.Linear(300, 200, dtype=torch.float16)], DistributedGroup(exchange=exchange))
        averager = Averager(population, Push(alpha=0.8, every_steps=1), measure=False)
        found[exchange] = [averager.step().bytes for _ in range(2)][1]
    return found


def after_a_number_that_is_not_finite() -> list[float]:
    """Members that were poisoned and given new weights, merged again: the same member number on every rank."""
    net = nn.Linear(3, 2)
    population = Population([net], DistributedGroup(exchange="bfloat16"))
    averager = Averager(population, MergeAll(every_steps=1), measure=False, on_nonfinite=None)
    found = []
    for value in (1.0, float("inf"), float(dist.get_rank())):
        nn.init.constant_(net.weight, value)
        averager.step()
        found.append(float(net.weight[0, 0]))
    return found


def make_matchable(member: int) -> nn.Module:
    torch.manual_seed(member)
    return nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def matched_and_repaired(group: Group) -> dict[str, Any]:
    """What looks at several members at once, in a script of one's own: REPAIR, alignment, soups, the ensemble."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 5) for _ in range(2)]
    population = Population([make_matchable(member) for member in group.local_range(SIZE)], group)
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
        around = chain(AlignMerges(batches, groups=groups), RepairMerges(lambda member: batches))
        Averager(population, rule, merge_hooks=around).step()
        found[type(rule).__name__] = group.all_gather([copy.deepcopy(net.state_dict()) for net in population])
        for index, member in enumerate(population.members):
            population[index].load_state_dict(make_matchable(member).state_dict())
    alignments = align_all_(population, batches, groups=groups)
    found["aligned"] = group.all_gather([net.state_dict() for net in population])
    found["alignments"] = group.all_gather([(one.before, one.after, one.permutations) for one in alignments])
    return found


def harvested(group: Group) -> dict[str, Any]:
    """Two whole trainings and all that is made of them: members that never met, and members that merged."""
    found: dict[str, Any] = {}
    for name, rule, merging in (
        ("apart", Independent(), MergeOptions()),
        ("merged", MergeAll(every_steps=5), MergeOptions(align="activations", num_align_batches=2)),
    ):
        training = small_training(rule=rule, merging=merging, num_members=4, group=group_jobs.fresh(group))
        training.run()
        before = [copy.deepcopy(net.state_dict()) for net in training.population]
        outcome = finalize(training, align_soups=True, analysis=True, num_align_batches=2)
        found[name] = {
            **{key: value for key, value in outcome.to_json().items() if key != "seconds"},
            "soup": outcome.average_soup.state_dict(),
            "greedy": outcome.greedy.network.state_dict(),
            "states": group.all_gather([net.state_dict() for net in training.population]),
            "unchanged": group.all_gather(
                [
                    group_jobs.same(state, net.state_dict())
                    for state, net in zip(before, training.population, strict=True)
                ]
            ),
        }
    return found


def one_sick(group: Group) -> dict[str, str]:
    """A member that cannot be looked at is everyone's error, wherever it lives; nobody waits for its process."""
    batches = [torch.randn(16, 5, generator=torch.Generator().manual_seed(0))]
    population = Population([make_matchable(member) for member in group.local_range(SIZE)], group)
    groups = symmetries(population[0], batches[0])
    for index, member in enumerate(population.members):
        if member == SIZE - 1:
            with torch.no_grad():
                population[index][0].weight[0] = float("nan")
    merge = Averager(
        population, MergeAll(), merge_hooks=RepairMerges(lambda member: batches), measure=False, on_nonfinite=None
    )
    soups = partial(aligned_soups, population, lambda net: 1.0, batches, groups=groups)
    return {
        "align": message_of(lambda: align_all_(population, batches, groups=groups)),
        "soups": message_of(soups),
        "merge": message_of(merge.step),
        "repair": message_of(lambda: repair_(population[0], population, batches)),
    }


def everything(group: SharedMemoryGroup) -> dict[str, Any]:
    """All of the above in one start of the processes."""
    return {
        "operations": spread_operations(group),
        "march": march_spread(group),
        "delayed": delayed_spread(group),
        "delayed, shared": delayed_march(group),
        "delayed, resumed": delayed_march(DistributedGroup(), save_at=11),
        "delayed, bfloat16": delayed_march(DistributedGroup(exchange="bfloat16")),
        "delayed, bfloat16, resumed": delayed_march(DistributedGroup(exchange="bfloat16"), save_at=10),
        "half precision": half_precision_bytes(),
        "not finite": after_a_number_that_is_not_finite(),
        "fast": spread_fast_pushes(group),
        "matched": matched_and_repaired(DistributedGroup()),
        "harvested": harvested(DistributedGroup()),
        "one sick": one_sick(DistributedGroup()),
        "bfloat16": {scale: bfloat16_pushes(DistributedGroup(exchange="bfloat16"), scale, 40) for scale in SCALES},
        "names": named_errors(),
    }


def named_errors() -> dict[str, str]:
    """What is said to those who ask for what cannot be."""
    rank, world = dist.get_rank(), dist.group.WORLD
    names = ("one", "two") if rank == 0 else ("two", "one")
    order = torch.channels_last if rank else torch.contiguous_format

    def disagree_on(rule: Push, **options: Any) -> str:
        return message_of(lambda: Averager(Population([nn.Linear(3, 2)], world), rule, **options))

    def push_at(lr_ratio: float, sick: str | None, delay: int) -> str:
        averager = Averager(Population([nn.Linear(3, 2)], world), Push(every_steps=3, delay=delay), on_nonfinite=sick)
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
        "cadence": disagree_on(Push(every_steps=10 + rank)),
        "steps": disagree_on(Push(), num_steps=100 + rank),
        **{
            f"learning rate, {sick}, {delay}": push_at(1.0 - 0.25 * min(rank, 1), sick, delay)
            for sick, delay in (("restart", 0), ("restart", 2), (None, 0))
        },
        "too many": message_of(lambda: DistributedGroup().local_range(1)),
        "exchange": message_of(lambda: DistributedGroup(exchange="quick")),
    }


def look_like_torchrun(group: SharedMemoryGroup) -> None:
    """Set the variables that torchrun sets; the processes are connected already."""
    rank = str(group.rank)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def when_begun(run: Path) -> int | None:
    """When a run was begun, which writes its config; one that goes on keeps it."""
    config = run / "config.json"
    return config.stat().st_mtime_ns if config.exists() else None


def commands(group: SharedMemoryGroup, path: str) -> dict[str, list[tuple[int, str, bool]]]:
    """Commands under torchrun: what each rank returned and said, and whether the run that was there is the same still.

    The second run stands for the first one's second attempt: its result is gone, its checkpoints are there.
    """
    look_like_torchrun(group)
    out = Path(path) / "run"
    small = ("--members", "2", "--train.epochs", "2")
    found = {}

    def tell(name: str, *arguments: str) -> None:
        begun = when_begun(out)
        group.barrier()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = main(arguments)
        group.barrier()
        found[name] = group.all_gather([(code, said.getvalue(), when_begun(out) == begun)])

    def break_off() -> None:
        group.barrier()
        if group.is_leader:
            (out / "result.json").unlink()
            shutil.rmtree(max((out / "checkpoint").glob("step-*")))

    run = ("run", "digits", *small, "--out", str(out))
    tell("run", *run)
    break_off()
    tell("resume", "resume", str(out))
    break_off()
    mark = out / ".torchrun"
    if group.is_leader:  # as if other processes of the same torchrun had begun it
        write_json(mark, {**read_json(mark), "processes": ["elsewhere 1"]})
    tell("overwrite, restarted", *run, "--overwrite")
    tell("overwrite", *run, "--overwrite")
    compare = ("compare", "digits", *small, "--methods", "independent,papa", "--out", str(Path(path) / "compare"))
    tell("compare", *compare)
    tell("compare, parallel", *compare, "--parallel", "2")
    return found


def bad_starts(group: SharedMemoryGroup, path: str) -> dict[str, str]:
    """What `papa run` says under torchrun to those who cannot go on."""
    look_like_torchrun(group)
    config, fast = replace(find("digits").config(), members=2), AverageConfig(exchange="fast")
    version = launch.__version__

    def with_version() -> None:
        launch.__version__ = "0.0.0" if group.rank else version
        launch.execute(config, Path(path) / "run")

    (Path(path) / "rank-0").mkdir(exist_ok=True)
    calls = {
        "seed": lambda: launch.execute(replace(config, seed=1 + group.rank), Path(path) / "run"),
        "resume": lambda: launch.execute(config, Path(path) / "run", resume=bool(group.rank)),
        "version": with_version,
        "too many": lambda: launch.execute(replace(config, members=1), Path(path) / "run"),
        "too many, spread": lambda: launch.execute(replace(config, members=1, average=fast), Path(path) / "run"),
        "workers": lambda: launch.execute(config, Path(path) / "run", workers=2),
        "not shared": lambda: launch._check_shared(Path(path) / f"rank-{group.rank}" / "run", group),
    }
    return {name: message_of(call) for name, call in calls.items()}


def left_alone() -> None:
    """Two ranks push; rank 1 leaves without a word, rank 0 tells what it was told."""
    dist.init_process_group("gloo")
    population = Population([nn.Linear(300, 300)], dist.group.WORLD)
    averager = Averager(population, Push(alpha=0.9, every_steps=1))
    for _ in range(3):
        averager.step()
    if dist.get_rank() == 1:
        os._exit(3)
    sys.stdout.write(message_of(averager.step))
    sys.stdout.flush()
    os._exit(0)


def leave_with_a_push_under_way(how: str) -> None:
    """A script that ends before its last push lands; in one way, rank 1 never begins it."""
    dist.init_process_group("gloo")
    population = Population([nn.Linear(600, 600)], dist.group.WORLD)
    averager = Averager(population, Push(alpha=0.9, every_steps=4, delay=2), measure=False, on_nonfinite=None)
    for _ in range(4):
        averager.step()
    if how == "the connections are closed":
        dist.destroy_process_group()
    if how == "another never comes":
        background.SHUTDOWN_TIMEOUT = 2.0
        rank = dist.get_rank()
        for _ in range(2 if rank else 4):
            averager.step()
        if rank:
            time.sleep(600)
    sys.stdout.write("done")


def bfloat16_pushes(group: Group, scale: float, num_pushes: int) -> dict[str, Any]:
    """Members far from zero that move a little between pushes: how far the mean is off the exact one each time, in
    units of how far members moved."""
    population = Population([nn.Linear(200, 100, bias=False) for _ in group.local_range(SIZE)], group)
    exact = Population([nn.Linear(200, 100, bias=False) for _ in group.local_range(SIZE)], group_jobs.fresh(group, "exact"))
    for net in (*population, *exact):
        nn.init.constant_(net.weight, scale)
    off, last = [], exact.mean()
    for push in range(num_pushes):
        for index, member in enumerate(population.members):
            generator = torch.Generator().manual_seed(100 * push + member)
            with torch.no_grad():
                population[index].weight += torch.randn(100, 200, generator=generator)
                exact[index].weight.copy_(population[index].weight)
        mean = exact.mean().double()
        moved = max(group.all_gather([float((row - last).abs().max()) for row in exact.matrix]))
        group.mix_(population.matrix, mixing.merge_all(SIZE))
        off.append(float((population.matrix[0].double() - mean).abs().max()) / moved)
        last = population.matrix[0].clone()
    return {"off": off}


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except PapaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "operations": operations(LocalGroup()),
        "march": group_jobs.march(LocalGroup()),
        "delayed": delayed_march(LocalGroup()),
        "fast": fast_pushes(LocalGroup()),
        "matched": matched_and_repaired(LocalGroup()),
        "harvested": harvested(LocalGroup()),
        "one sick": one_sick(LocalGroup()),
    }
