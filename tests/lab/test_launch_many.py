import gc
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch import assert_same_run

from helpers import small_config
from papa.checkpoint import checkpoints
from papa.errors import ConfigError, RunError, StoppedError
from papa.lab.launch import execute
from papa.lab.launch_many import execute_all
from papa.training import Training


def files_in(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_one_run_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, num_parallel: int) -> None:
    jobs = [(replace(small_config(), seed=seed), tmp_path / f"seed{seed}") for seed in (1, 2, 3)]
    execute(replace(small_config(), seed=9), tmp_path / "seed2")  # a run of another configuration is in the way
    outcomes = execute_all(jobs, num_parallel=num_parallel, resume=True)
    assert list(outcomes.results) == [tmp_path / "seed1", tmp_path / "seed3"]
    with pytest.raises(RunError, match="1 of 3 runs failed; the others are done and kept") as caught:
        outcomes.check()
    assert f"{tmp_path / 'seed2'} holds a run of another configuration" in str(caught.value)
    kept = files_in(tmp_path / "seed1") | files_in(tmp_path / "seed3")
    shutil.rmtree(tmp_path / "seed2")
    again = execute_all(jobs, num_parallel=num_parallel, resume=True)
    again.check()
    assert [result["seed"] for result in again.results.values()] == [1, 2, 3]
    assert files_in(tmp_path / "seed1") | files_in(tmp_path / "seed3") == kept


def test_what_is_wrong_with_all_runs_is_told_once(tmp_path: Path) -> None:
    jobs = [(replace(small_config(), seed=seed), tmp_path / f"seed{seed}") for seed in (1, 2)]
    outcomes = execute_all(jobs, workers=7)
    with pytest.raises(ConfigError, match="--workers is 7, expected 1 to 3"):
        outcomes.check()
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_a_run_stays_in_memory(tmp_path: Path) -> None:
    jobs = [(replace(small_config(), seed=seed), tmp_path / f"seed{seed}") for seed in (1, 2)]
    before = {id(found) for found in gc.get_objects() if type(found) is Training}
    gc.disable()
    try:
        execute_all(jobs).check()
        left = [found for found in gc.get_objects() if type(found) is Training and id(found) not in before]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_jobs_of_one_directory_are_one_run(tmp_path: Path, num_parallel: int) -> None:
    jobs = [(small_config(), tmp_path / "same")] * 3
    outcomes = execute_all(jobs, num_parallel=num_parallel)  # without resume, a second would be refused
    outcomes.check()
    assert list(outcomes.results) == [tmp_path / "same"]


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_a_signal_stops_all_runs_and_the_same_call_goes_on(tmp_path: Path, num_parallel: int) -> None:
    config = small_config()
    long = replace(config, train=replace(config.train, epochs=12))
    jobs = [(replace(long, seed=seed), tmp_path / f"seed{seed}") for seed in (1, 2, 3)]

    def ask_once_one_trains() -> None:
        while not any(file.stat().st_size for file in tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    asker = threading.Thread(target=ask_once_one_trains, daemon=True)
    asker.start()
    with pytest.raises(StoppedError, match="of 3 runs done, and saved; the same command without --overwrite goes on"):
        execute_all(jobs, num_parallel=num_parallel)
    asker.join()
    begun = [path for _, path in jobs if path.exists()]
    assert 1 <= len(begun) < 3
    assert all(checkpoints(path / "checkpoint") for path in begun)
    execute_all(jobs, num_parallel=num_parallel, resume=True).check()
    execute(jobs[0][0], tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "seed1")
