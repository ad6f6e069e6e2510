"""Worker processes against one process, bit for bit."""

import multiprocessing
import multiprocessing.resource_tracker
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import group_jobs
from papa.core.group import LocalGroup, balanced_ranges
from papa.core.product import chosen_columns
from papa.distributed import start
from papa.distributed.shared_memory import SharedMemoryGroup, _part_of, reserve_file
from papa.distributed.start import start_workers
from papa.errors import ConfigError, MemberError, RunError, SoupError


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return group_jobs.apply_every_rule(LocalGroup())


@pytest.mark.parametrize(("job", "num_workers"), [("apply_every_rule", 3), ("apply_every_rule_staged", 2)])
def test_every_rule_gives_the_bits_of_one_process(expected: dict[str, Any], job: str, num_workers: int) -> None:
    found = start_workers(getattr(group_jobs, job), num_workers, group_jobs.SIZE)
    assert expected.keys() == found.keys()
    for key in expected:
        assert group_jobs.identical(expected[key], found[key]), key


def test_new_processes_give_the_bits_of_one_process(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers as users get them: those of the other tests are forked."""
    monkeypatch.setattr(start, "worker_context", lambda: multiprocessing.get_context("spawn"))
    assert group_jobs.identical(expected, start_workers(group_jobs.apply_every_rule, 2, group_jobs.SIZE))


@pytest.mark.parametrize(("size", "num_ranks"), [(5, 2), (4, 4), (10, 3), (1, 1), (3, 7)])
def test_ranges_are_contiguous_balanced_and_complete(size: int, num_ranks: int) -> None:
    ranges = balanced_ranges(size, num_ranks)
    assert [member for members in ranges for member in members] == list(range(size))
    lengths = [len(members) for members in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_an_error_of_one_worker_ends_all_and_is_raised() -> None:
    with pytest.raises(SoupError, match="an error of rank 1"):
        start_workers(group_jobs.raise_papa_error_on_rank_1, 2, 2)


def test_another_exception_is_raised_with_its_traceback() -> None:
    with pytest.raises(RunError, match=r"worker 1 failed:(.|\n)*ZeroDivisionError: not a papa error"):
        start_workers(group_jobs.raise_other_error_on_rank_1, 2, 2)


def test_a_worker_that_dies_ends_all() -> None:
    with pytest.raises(RunError, match="a worker process died without a message"):
        start_workers(group_jobs.exit_on_rank_1, 2, 2)


def test_different_architectures_raise() -> None:
    expected = r"rank 1 has torch\.float32 of shape \(2, 4\) as 'weight', rank 0 has torch\.float32 of shape \(2, 3\)"
    with pytest.raises(MemberError, match=expected):
        start_workers(group_jobs.build_different_networks, 2, 2)


def test_more_workers_than_members_raise() -> None:
    with pytest.raises(ConfigError, match="there are 2 workers for 1 members"):
        start_workers(group_jobs.apply_every_rule, 2, 1)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    starter = multiprocessing.get_context("spawn").Process(
        target=group_jobs.start_sleeping_workers, args=(str(tmp_path),)
    )
    starter.start()
    deadline = time.monotonic() + 600
    while len(list(tmp_path.iterdir())) < 2 or not all(file.read_text() for file in tmp_path.iterdir()):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.1)
    workers = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert starter.pid is not None
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_too_little_shared_memory_is_an_error_before_it_is_used(tmp_path: Path) -> None:
    much = 1 << 60
    path = Path(reserve_file(1 << 16, (str(tmp_path / "missing"), str(tmp_path))))
    assert (path.parent, path.stat().st_size) == (tmp_path, 1 << 16)
    assert path.stat().st_blocks * 512 >= 1 << 16  # reserved, not only promised
    path.unlink()
    with pytest.raises(RunError, match=r"need [\d,]+ bytes of shared memory \(.*missing: No such .*: .*\): free some"):
        reserve_file(much, (str(tmp_path / "missing"), str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_workers_that_cannot_be_started_are_an_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    multiprocessing.resource_tracker.ensure_running()
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(soft) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[8], hard))
    try:
        with pytest.raises(RunError, match=r"cannot start worker \d of 8: Too many open files; free what is short"):
            start_workers(group_jobs.apply_every_rule, 8, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_each_rank_has_its_own_accelerator() -> None:
    group = SharedMemoryGroup.__new__(SharedMemoryGroup)
    group.rank = 1
    assert group.local_device(torch.device("cuda")) == torch.device("cuda:1")
    assert group.local_device(torch.device("cuda:0")) == torch.device("cuda:0")
    assert group.local_device(torch.device("cpu")) == torch.device("cpu")


def test_ranks_with_slightly_different_scores_choose_the_same_members() -> None:
    found = start_workers(group_jobs.choose_by_different_scores, 2, group_jobs.SIZE)
    assert all(chosen == found[0] for chosen in found)


def test_a_replaced_buffer_is_copied_back_before_mixing() -> None:
    first, second = start_workers(group_jobs.replace_a_buffer, 2, 2)
    assert first == second == [15.0] * 4


@pytest.mark.parametrize("columns", [None, slice(None), slice(3, 12), slice(-7, None), slice(2, -1), slice(5, 99)])
def test_parts_of_columns_are_those_that_one_process_would_change(columns: slice | None) -> None:
    matrix = torch.arange(20.0).unsqueeze(0)
    chosen = chosen_columns(matrix, columns)
    parts = [_part_of(columns, start, min(start + 4, chosen.shape[1]), 20) for start in range(0, chosen.shape[1], 4)]
    assert torch.equal(torch.cat([chosen_columns(matrix, part) for part in parts], dim=1), chosen)
