"""Real processes against the one-process twin, bit for bit."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import group_jobs
from papa.errors import ConfigError, MemberError, RunError, SoupError
from papa.group import balanced_ranges, start_workers
from papa.group.shared_memory import SharedMemoryGroup


@pytest.mark.parametrize(("job", "num_workers"), [("march_shared", 2), ("march_shared", 3), ("march_staged", 2)])
def test_every_rule_gives_the_same_bits_however_members_are_spread(job: str, num_workers: int) -> None:
    torch.set_num_threads(1)
    alone = group_jobs.march_alone()
    together = start_workers(getattr(group_jobs, job), num_workers, group_jobs.SIZE)
    assert alone.keys() == together.keys()
    for key in alone:
        assert group_jobs.same(alone[key], together[key]), key


@pytest.mark.parametrize(("size", "num_ranks"), [(5, 2), (4, 4), (10, 3), (1, 1), (3, 7)])
def test_shares_are_contiguous_balanced_and_complete(size: int, num_ranks: int) -> None:
    shares = balanced_ranges(size, num_ranks)
    assert [member for share in shares for member in share] == list(range(size))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_an_error_of_one_worker_ends_all_and_is_raised_here() -> None:
    with pytest.raises(SoupError, match="rank 1 has had enough"):
        start_workers(group_jobs.fail_on_rank_1, 2, 2)


def test_an_unexpected_error_comes_with_its_traceback() -> None:
    with pytest.raises(RunError, match=r"worker 1 failed:(.|\n)*ZeroDivisionError: not a papa error"):
        start_workers(group_jobs.stumble_on_rank_1, 2, 2)


def test_a_worker_that_dies_ends_all() -> None:
    with pytest.raises(RunError, match="a worker process died without a message"):
        start_workers(group_jobs.die_on_rank_1, 2, 2)


def test_ranks_that_disagree_on_the_architecture_are_named() -> None:
    expected = r"rank 1 has torch\.float32 of shape \(2, 4\) as 'weight', rank 0 has torch\.float32 of shape \(2, 3\)"
    with pytest.raises(MemberError, match=expected):
        start_workers(group_jobs.disagree, 2, 2)


def test_more_workers_than_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 2 workers for 1 members"):
        start_workers(group_jobs.march_shared, 2, 1)


def test_no_worker_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    starter = multiprocessing.get_context("spawn").Process(target=group_jobs.start_sleepers, args=(str(tmp_path),))
    starter.start()
    deadline = time.monotonic() + 120
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


def test_an_accelerator_for_each_rank() -> None:
    group = SharedMemoryGroup.__new__(SharedMemoryGroup)
    group.rank = 1
    assert group.local_device(torch.device("cuda")) == torch.device("cuda:1")
    assert group.local_device(torch.device("cuda:0")) == torch.device("cuda:0")
    assert group.local_device(torch.device("cpu")) == torch.device("cpu")


def test_ranks_whose_scores_differ_in_the_last_digits_choose_alike() -> None:
    found = start_workers(group_jobs.disagree_on_scores, 2, group_jobs.SIZE)
    assert all(chosen == found[0] for chosen in found)


def test_a_buffer_that_was_replaced_is_home_before_rows_are_mixed() -> None:
    first, second = start_workers(group_jobs.reassign_a_buffer, 2, 2)
    assert first == second == [15.0] * 4
