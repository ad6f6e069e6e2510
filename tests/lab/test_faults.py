"""File systems that fail: at every call in turn, when full, read-only or gone."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import crashes
from checkpoint_cases import expected_of, trained_member
from helpers import assert_same_bits, assert_same_run, execute, permissions_count, small_config
from papa.core.group import LocalGroup
from papa.errors import RunError
from papa.lab.runs import RunDirectory
from papa.training import Callback, Training
from papa.training.checkpoints import CheckpointWriter, checkpoints, load_checkpoint, member_state

CALLS = ("open", "write", "fsync", "replace", "mkdir", "close", "unlink")


class Failing:
    """Lets one call to the system fail, the `position`th of all that are made."""

    def __init__(self, patch: pytest.MonkeyPatch, position: int) -> None:
        self.count, self.position = 0, position
        for name in CALLS:
            patch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.position:
                if name == "close":
                    real(*arguments)  # the system closes even when it tells of an error
                raise OSError(errno.EIO, "injected", str(arguments[0]))
            return real(*arguments, **options)

        return call


def test_an_error_at_any_call_is_reported_and_never_damages_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [trained_member(torch.optim.SGD, seed=seed) for seed in (0, 1)]
    states, expected = {j: member_state(*member) for j, member in enumerate(members)}, expected_of(members)
    num_failed = position = 0
    while True:
        position += 1
        directory = tmp_path / str(position)
        directory.mkdir()
        with CheckpointWriter(directory, group=LocalGroup(), num_members=2, keep=1) as writer:
            assert writer.save(1, states, {}, lambda: None) is None
            assert writer.settle() is None
            with monkeypatch.context() as patch:
                calls = Failing(patch, position)
                writer.save(2, states, {}, lambda: None)
                failure = writer.settle()
            found = checkpoints(directory)
            for _, path in found:
                dict(load_checkpoint(path, expected, num_members=2).members)
            assert found
            num_failed += failure is not None
            writer.save(3, states, {}, lambda: None)
            assert writer.settle() is None
            assert [step for step, _ in checkpoints(directory)][-1] == 3
        if calls.count < position:
            break
    assert failure is None
    assert num_failed > 15


class Disturbance(Callback):
    """Does something to the run's directory after the first epoch, and undoes it after the first failure."""

    def __init__(self, run: Path, do: Callable[[], None], undo: Callable[[], None] | None) -> None:
        self.run, self.do, self.undo = run, do, undo
        self.events: list[Mapping[str, Any]] = []

    def __enter__(self) -> Disturbance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def on_step_complete(self, training: Training) -> None:
        if training.step % training.length.steps_per_epoch:
            return
        partial = self.run / "checkpoint" / f".step-{training.step:08d}.partial"
        for _ in range(2000):
            if not partial.exists():
                break
            time.sleep(0.001)  # else an epoch this short would not be saved at all
        else:
            if self.undo is not None:
                self.undo()  # a save failed, and what it left could not even be removed
        if training.epoch == 1:
            self.do()

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "checkpoint-failed" and self.undo is not None:
            self.undo()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "papa", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_training_goes_on_over_a_disk_that_is_full_for_a_while(small_disk: Path, whole: Path, tmp_path: Path) -> None:
    config, run = small_config(), small_disk / "run"
    disturbance = Disturbance(run, lambda: fill(small_disk), (small_disk / "ballast").unlink)
    result = execute(config, run, make_callback=lambda: disturbance)
    reported = [event["event"] for event in disturbance.events]
    assert "checkpoint-failed" in reported
    assert result["failed_checkpoints"] == reported.count("checkpoint-failed") == 1
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if "failed" not in line]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert_same_run(whole, run)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_that_stays_full_or_read_only_ends_the_run_and_keeps_the_last_good_checkpoint(
    fault: str, small_disk: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = small_config(), small_disk / "run"

    def refuse(path: Any, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def do() -> None:
        if fault == "full":
            fill(small_disk)
        else:  # as the kernel does after an error; by hand, a disk with open files cannot be made read-only
            monkeypatch.setattr(os, "mkdir", refuse)

    with pytest.raises(RunError, match=r"two checkpoints in a row failed.*That of step 4 is complete"):
        execute(config, run, make_callback=lambda: Disturbance(run, do, None))
    monkeypatch.undo()
    assert [step for step, _ in checkpoints(run / "checkpoint")] == [4]
    if fault == "full":
        (small_disk / "ballast").unlink()
    else:
        remount(small_disk, "ro")
        with pytest.raises(RunError, match="Read-only file system"):
            execute(config, run, resume=True)
        remount(small_disk, "rw")
    execute(config, run, resume=True)
    assert_same_run(whole, run)


def test_too_few_file_descriptors_for_a_while_are_reported_and_training_goes_on(whole: Path, tmp_path: Path) -> None:
    run, (soft, hard) = tmp_path / "run", resource.getrlimit(resource.RLIMIT_NOFILE)

    def forbid() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))

    def permit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    disturbance = Disturbance(run, forbid, permit)
    try:
        result = execute(small_config(), run, make_callback=lambda: disturbance)
    finally:
        permit()
    assert result["failed_checkpoints"] == 1
    errors = [event["error"] for event in disturbance.events if event["event"] == "checkpoint-failed"]
    assert "Too many open files" in errors[0]
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if "failed" not in line]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert_same_run(whole, run)


def test_a_removed_checkpoint_directory_is_made_again(whole: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    disturbance = Disturbance(run.path, lambda: shutil.rmtree(run.checkpoints), None)
    assert execute(small_config(), run.path, make_callback=lambda: disturbance)["failed_checkpoints"] == 0
    assert run.latest_checkpoint() is not None
    assert_same_run(whole, run.path)


def test_a_removed_directory_is_reported_and_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    disturbance = Disturbance(run, lambda: shutil.rmtree(run), None)
    with pytest.raises(RunError, match="No such file or directory"):
        execute(small_config(), run, make_callback=lambda: disturbance)
    assert [event["event"] for event in disturbance.events].count("checkpoint-failed") == 2
    assert not run.exists()


def test_lost_permission_ends_the_run_in_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def forbid() -> None:
        for path in (run, run / "checkpoint"):
            path.chmod(0o500)

    with permissions_count(), pytest.raises(RunError, match="Permission denied"):
        execute(small_config(), run, make_callback=lambda: Disturbance(run, forbid, None))
    for path in (run, run / "checkpoint"):
        path.chmod(0o700)
    assert checkpoints(run / "checkpoint")


def test_metrics_that_cannot_be_written_are_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.create({})
    assert run.log({"event": "a", "step": 1}) is None

    def half(handle: int, content: bytes, offset: int) -> int:
        return real(handle, content[:5], offset)

    def none(*_: object) -> int:
        raise OSError(errno.EIO, "injected")

    real = os.pwrite
    for broken in (half, none):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", broken)
            error = run.log({"event": "b", "step": 2})
        assert error is not None
        assert "cannot write" in error
        assert [event["event"] for event in run.read_metrics()] == ["a"]
    state = run.metrics_state()
    assert run.log({"event": "c", "step": 3}) is None
    assert [event["event"] for event in run.read_metrics()] == ["a", "b", "b", "c"]
    run.rewind_metrics(state)
    assert [event["event"] for event in run.read_metrics()] == ["a", "b", "b"]


def test_nothing_depends_on_what_the_clock_says(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    ticks = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    execute(config, tmp_path / "back")
    run = RunDirectory(tmp_path / "back")
    run.result.unlink()
    newest = run.latest_checkpoint()
    assert newest is not None
    os.utime(newest, (0, 0))
    assert run.latest_checkpoint() == newest
    execute(config, tmp_path / "back", resume=True)
    assert_same_run(whole, tmp_path / "back")


def in_a_session(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """The command line as a terminal or a scheduler starts it: it and all it starts get each signal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    here = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}  # what is ignored would be inherited
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "papa", *arguments], start_new_session=True, text=True, env=environment, **streams
        )
    finally:
        for number, handler in here.items():
            signal.signal(number, handler)


UNTIL_STOPPED = ("run", "digits", "--members", "2", "--workers", "2", "--train.epochs", "500", "--out")


def signal_all(process: int, number: signal.Signals, path: Path, is_alive: Callable[[], bool]) -> None:
    """Send a signal to all processes of a session, once the run in `path` has begun to train."""
    metrics = path / "metrics.jsonl"
    while is_alive() and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.killpg(process, number)


def test_a_signal_to_all_processes_of_a_run_saves_it(tmp_path: Path) -> None:
    process = in_a_session(*UNTIL_STOPPED, str(tmp_path / "run"), stderr=subprocess.PIPE)
    signal_all(process.pid, signal.SIGINT, tmp_path / "run", lambda: process.poll() is None)
    _, said = process.communicate()
    check_saved(process.returncode, said, tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_to_all_processes_of_a_run_save_it(number: signal.Signals, tmp_path: Path) -> None:
    process = crashes.start([*UNTIL_STOPPED, str(tmp_path / "run")], tmp_path / "log", forks_workers=True)
    assert process.pid is not None
    signal_all(process.pid, number, tmp_path / "run", process.is_alive)
    process.join()
    check_saved(process.exitcode, (tmp_path / "log").read_text(), tmp_path / "run")


def check_saved(code: int | None, said: str, path: Path) -> None:
    assert code == 75, said
    assert "and saved; continue with: papa resume" in said
    assert RunDirectory(path).latest_checkpoint() is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_progress_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    options = ("--members", "2", "--workers", "1", "--train.epochs", "2", "--out", str(tmp_path / "run"))
    with open("/dev/full", "w") as full:
        assert in_a_session("run", "digits", *options, stderr=full, stdout=subprocess.DEVNULL).wait() == 0
        assert RunDirectory(tmp_path / "run").is_finished
        said = in_a_session("ls", stdout=full, stderr=subprocess.PIPE)
        assert "cannot write the output: No space left on device" in said.communicate()[1]
        assert said.returncode == 2


def test_files_of_others_are_no_run_and_are_not_removed(tmp_path: Path) -> None:
    theirs = {"config.json": '{"model_type": "bert"}', "report.html": "mine"}
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    for overwrite in (False, True):
        with pytest.raises(RunError, match=r"holds config\.json, report\.html, but no run of papa: choose another"):
            execute(small_config(), tmp_path, workers=1, overwrite=overwrite)
    assert {name: (tmp_path / name).read_text() for name in theirs} == theirs


def test_a_run_without_checkpoints_says_so_and_starts_again(finished: Path) -> None:
    run = RunDirectory(finished)
    before = load_file(run.average_soup)
    run.result.unlink()
    shutil.rmtree(run.checkpoints)
    reported: list[str] = []

    class Listening(Callback):
        def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
            reported.append(event["text"])

    listening = contextlib.nullcontext(Listening())
    execute(small_config(), finished, workers=1, resume=True, make_callback=lambda: listening)
    assert reported == [f"there is no checkpoint in {run.checkpoints}: starting with the first step"]
    assert_same_bits(load_file(run.average_soup), before)
    assert run.latest_checkpoint() is not None
