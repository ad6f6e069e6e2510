import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import papa.lab.launch
from helpers import AskToStop, assert_same_run, execute, killed_after, small_config
from papa.errors import ConfigError, DataError, PapaError, RunError, StoppedError
from papa.lab.config import Config, TrajectoryConfig
from papa.lab.launch import useful_workers
from papa.lab.recipes import find
from papa.lab.runs import RunDirectory
from papa.lab.signals import new_flag, watching_signals
from papa.training import Callback, CheckpointOptions, Training
from papa.training.checkpoints import checkpoints


def test_a_run_writes_its_files_and_its_result_says_what_a_reader_needs(tmp_path: Path) -> None:
    config = small_config()
    result = execute(config, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    missing = [file for file in run.files if not file.exists()]
    assert missing == [run.picture, run.tokenizer, run.best_soup]  # of segmentation, of text, and only if asked for
    assert json.loads(run.result.read_text()) == json.loads(json.dumps(result))
    assert Config.from_json(json.loads(run.config.read_text())) == config
    for part in ("test", "validation"):
        scores = result[part]
        assert len(scores["members"]) == 3
        assert scores["min"] <= scores["mean"] <= scores["max"]
        assert {"ensemble", "average_soup", "greedy_soup"} <= scores.keys()
    assert result["validation"]["greedy_soup"] >= result["validation"]["max"]
    assert set(result["greedy_members"]) <= {0, 1, 2}
    assert len(result["policies"]) == 3
    assert result["seconds"].keys() == {"train", "average", "evaluate"}
    events = list(run.read_metrics())
    steps = result["config"]["train"]["epochs"] * (270 // 64)
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1, 2, 3]
    assert not any(event["event"].startswith("merge") for event in events)  # pushes are not probed
    assert [event["step"] for event in events if event["event"] == "average"] == list(range(5, steps + 1, 5))


@pytest.fixture(scope="module")
def of_two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "run"
    execute(small_config(), path, workers=2)
    return path


@pytest.fixture(scope="module")
def with_all_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint of every epoch was written, but that did not end."""
    path = tmp_path_factory.mktemp("patient") / "run"
    execute(small_config(), path, make_callback=Patient)
    RunDirectory(path).result.unlink()
    return path


def assert_two_workers_have_the_bits_of_one(one: Path, two: Path) -> None:
    assert_same_run(one, two)
    alone, together = (RunDirectory(path).read_result() for path in (one, two))
    assert alone["test"] == together["test"]
    assert together["environment"]["workers"] == 2


@pytest.mark.parametrize("method", ["papa-2", "papa-all"])
def test_two_workers_end_with_the_bits_of_one(tmp_path: Path, method: str) -> None:
    for workers in (1, 2):
        execute(small_config(method=method), tmp_path / str(workers), workers=workers)
    assert_two_workers_have_the_bits_of_one(tmp_path / "1", tmp_path / "2")


def test_two_workers_that_push_end_with_the_bits_of_one(whole: Path, of_two_workers: Path) -> None:
    assert_two_workers_have_the_bits_of_one(whole, of_two_workers)


def test_two_workers_see_what_one_sees_in_independent_members(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = small_config(method="independent", analysis=True)
    average = replace(config.average, align_soups=True, align_batches=2)
    config = replace(config, average=average, train=replace(config.train, epochs=1))
    alone, together = (execute(config, tmp_path / str(workers), workers=workers) for workers in (1, 2))
    for part in ("repaired", "aligned", "similarity", "interpolation", "repair"):
        assert alone[part] == together[part] is not None, part
    events = {event["event"]: event for event in RunDirectory(tmp_path / "2").read_metrics()}
    for part in ("similarity", "interpolation"):
        assert {**alone[part], "event": part, "step": events["epoch"]["step"]} == events[part]


class Patient(Callback):
    """Lets every checkpoint be finished, and records events."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self._others = set(threading.enumerate())

    def __enter__(self) -> "Patient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_step_begin(self, training: Training) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint") and thread not in self._others:
                thread.join()

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        self.events.append(event)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kill_at", [1, 5, 9])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, whole: Path, kill_at: int) -> None:
    config = small_config()
    with killed_after(kill_at):
        execute(config, tmp_path / "broken")
    assert not RunDirectory(tmp_path / "broken").is_finished
    execute(config, tmp_path / "broken", resume=True)
    assert_same_run(whole, tmp_path / "broken")


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_along_trajectories_survive_a_kill_after_an_epoch(tmp_path: Path, kind: str) -> None:
    config = small_config(trajectory=TrajectoryConfig(kind=kind, start=0.3, decay=0.9, batch_norm_batches=2))
    whole = execute(config, tmp_path / "whole", workers=1)
    epoch = next(event for event in RunDirectory(tmp_path / "whole").read_metrics() if event["event"] == "epoch")
    with killed_after(2 * epoch["step"], settled=True):
        execute(config, tmp_path / "broken", workers=1)
    assert RunDirectory(tmp_path / "broken").latest_checkpoint() is not None
    resumed = execute(config, tmp_path / "broken", workers=1, resume=True)
    assert resumed["trajectory"] == whole["trajectory"] is not None


@pytest.mark.parametrize("workers_after", [1, 2])
def test_a_run_of_several_workers_resumes_with_any_number(
    tmp_path: Path, whole: Path, of_two_workers: Path, workers_after: int
) -> None:
    run = RunDirectory(shutil.copytree(of_two_workers, tmp_path / "broken"))
    run.result.unlink()
    newest = run.latest_checkpoint()
    assert newest is not None
    shutil.rmtree(newest)  # as if it had been stopped in an earlier epoch
    execute(small_config(), run.path, workers=workers_after, resume=True)
    assert_same_run(whole, run.path)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_taken(
    tmp_path: Path, whole: Path, with_all_checkpoints: Path
) -> None:
    run = RunDirectory(shutil.copytree(with_all_checkpoints, tmp_path / "broken"))
    newest = run.latest_checkpoint()
    assert newest is not None
    (newest / "member-001.safetensors").write_bytes(b"damaged")
    listener = Patient()
    execute(small_config(), run.path, resume=True, make_callback=lambda: listener)
    assert [event["text"] for event in listener.events] == [
        f"{newest}/member-001.safetensors has 7 bytes, its manifest says "
        f"{(newest / 'member-001.safetensors').stat().st_size:,}: it was altered or damaged; continuing from step 8"
    ]
    assert_same_run(whole, run.path)


def test_when_no_checkpoint_can_be_read_nothing_is_changed(tmp_path: Path, with_all_checkpoints: Path) -> None:
    run = RunDirectory(shutil.copytree(with_all_checkpoints, tmp_path / "run"))
    for _, path in checkpoints(run.checkpoints):
        (path / "manifest.json").write_text("{")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read; start again with papa run"):
        execute(small_config(), run.path, resume=True)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_checkpoint_of_another_run_names_the_fields_that_differ(tmp_path: Path, finished: Path) -> None:
    config = small_config()
    with killed_after(5, settled=True):
        execute(replace(config, seed=2), tmp_path / "two")
    run = RunDirectory(finished)
    run.result.unlink()
    shutil.rmtree(run.checkpoints)
    shutil.copytree(tmp_path / "two" / "checkpoint", run.checkpoints)
    assert run.latest_checkpoint() is not None
    with pytest.raises(RunError, match="holds a run of another configuration; nothing was changed:\n  --seed is 2"):
        execute(config, finished, resume=True)


def test_altered_metrics_are_refused_and_missing_ones_are_begun_anew(finished: Path) -> None:
    config = small_config()
    run = RunDirectory(finished)
    run.result.unlink()
    text = run.metrics.read_text()
    run.metrics.write_text(text.replace("0", "1", 1))
    with pytest.raises(RunError, match="does not begin with the lines that the checkpoint recorded: restore it, or"):
        execute(config, finished, resume=True)
    run.metrics.write_text(text + '{"event": "average", "st')  # a line that was cut short
    execute(config, finished, resume=True)
    assert run.metrics.read_text() == text
    run.result.unlink()
    run.metrics.unlink()
    execute(config, finished, resume=True)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 5), (signal.SIGTERM, 7), (signal.SIGTERM, 11)])
def test_a_signal_finishes_the_step_saves_and_says_so(tmp_path: Path, whole: Path, number: int, step: int) -> None:
    config = small_config()
    with pytest.raises(StoppedError, match=f"stopped at step {step + 1} of 12, and saved; continue with: papa resume"):
        execute(config, tmp_path / "stopped", make_callback=partial(AskToStop, number, step))
    assert checkpoints(tmp_path / "stopped" / "checkpoint")[-1][0] == step + 1
    execute(config, tmp_path / "stopped", resume=True)
    assert_same_run(whole, tmp_path / "stopped")


def test_the_second_signal_is_not_waited_for() -> None:
    stop = new_flag()
    stop.is_training = 1
    before = signal.getsignal(signal.SIGTERM)
    with watching_signals(stop, ""):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.value == signal.SIGTERM
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_not_taken_for_an_error_of_the_code_that_it_interrupts() -> None:
    """As a network that is tried, or a file that is read, may raise any error."""

    def read() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise ConfigError("the network does not take these images") from error

    with pytest.raises(StoppedError, match="continue with: this"), watching_signals(new_flag(), "this"):
        read()


@pytest.mark.parametrize("is_training", [False, True])
def test_a_signal_that_an_extension_module_turns_into_its_own_error_stops_the_run(is_training: bool) -> None:
    """As one did while matplotlib converted arguments: it takes any exception for an argument of the wrong type."""

    def draw() -> None:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        raise TypeError("incompatible function arguments")

    stop = new_flag()
    stop.is_training = int(is_training)  # then the signal raises nothing, and the error is one of training
    expected = pytest.raises(TypeError) if is_training else pytest.raises(StoppedError, match="continue with: this")
    with expected, watching_signals(stop, "this"):
        draw()
    with pytest.raises(TypeError), watching_signals(new_flag(), "this"):
        raise TypeError("without a signal")


def test_a_signal_in_the_instant_in_which_handlers_are_set_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before, set_handler = signal.getsignal(signal.SIGTERM), signal.signal

    def set_and_ask(number: int, handler: Any) -> Any:
        set_handler(number, handler)
        if number == signal.SIGTERM and handler is not before:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signal, "signal", set_and_ask)
    with pytest.raises(StoppedError, match="continue with: this"), watching_signals(new_flag(), "this"):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("when", ["load_domain", "_finish"])
def test_a_signal_while_nothing_trains_ends_the_run_at_once(
    when: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on = []

    def ask(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        went_on.append(when)

    with monkeypatch.context() as patch:
        patch.setattr(papa.lab.launch, when, ask)
        with pytest.raises(StoppedError, match="nothing is lost; continue with: papa resume"):
            execute(small_config(), tmp_path / "run", workers=1)
    assert not went_on, "the signal was only stored"
    execute(small_config(), tmp_path / "run", workers=1, resume=True)
    assert_same_run(whole, tmp_path / "run")


def test_several_workers_stop_together_and_one_goes_on(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "stopped"
    with pytest.raises(StoppedError, match="stopped at step"):
        execute(small_config(), path, workers=2, make_callback=partial(AskToStop, signal.SIGTERM, 2))
    execute(small_config(), path, workers=1, resume=True)
    assert_same_run(whole, path)


def test_a_long_epoch_is_saved_every_so_many_minutes(tmp_path: Path, whole: Path) -> None:
    config = small_config()
    often = CheckpointOptions(minutes=1e-9, keep=100, background=False)
    execute(config, tmp_path / "often", checkpoints=often)
    assert len(checkpoints(tmp_path / "often" / "checkpoint")) == 12
    run = RunDirectory(tmp_path / "often")
    for _, path in checkpoints(run.checkpoints)[6:]:
        shutil.rmtree(path)
    run.result.unlink()
    execute(config, tmp_path / "often", resume=True)  # from the middle of an epoch
    assert_same_run(whole, tmp_path / "often")
    for wrong in (CheckpointOptions(minutes=0), CheckpointOptions(keep=0)):
        with pytest.raises(ConfigError, match=r"(minutes between checkpoints are|checkpoints to keep is) 0"):
            execute(config, tmp_path / "no", checkpoints=wrong)


def test_a_directory_in_use_is_refused_and_left_as_it_was(finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()}
    with RunDirectory(finished).lock():
        for options in ({"overwrite": True}, {}):
            with pytest.raises(RunError, match="is in use by another process: wait until it ends"):
                execute(small_config(), finished, **options)  # type: ignore[arg-type]
    assert before == {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()}


def test_overwriting_removes_a_run_and_nothing_else(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.pt").write_text("precious")
    with pytest.raises(RunError, match="holds checkpoint, but no run of papa"):
        execute(small_config(), tmp_path, overwrite=True)
    shutil.move(tmp_path / "checkpoint", tmp_path / "aside")
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.move(tmp_path / "aside" / "mine.pt", tmp_path / "checkpoint" / "mine.pt")
    execute(small_config(), tmp_path, overwrite=True)
    assert (tmp_path / "checkpoint" / "mine.pt").read_text() == "precious"


def test_a_run_that_is_killed_while_it_reads_its_data_can_be_resumed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"

    def read(config: Config) -> Any:
        shutil.copytree(tmp_path / "run", killed, dirs_exist_ok=True)  # what a kill leaves behind
        raise DataError("there is no data")

    with monkeypatch.context() as patch:
        patch.setattr(papa.lab.launch, "load_domain", read)
        with pytest.raises(DataError):
            execute(small_config(), tmp_path / "run", workers=1)
    assert not (tmp_path / "run").exists()
    assert sorted(path.name for path in killed.iterdir() if ".lock" not in path.name) == ["config.json"]
    assert RunDirectory(killed).is_interrupted
    execute(Config.from_json(RunDirectory(killed).read_config()), killed, workers=1, resume=True)
    assert_same_run(whole, killed)


def test_a_run_that_is_killed_while_it_is_overwritten_can_be_resumed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(whole, run.path)
    monkeypatch.setattr(RunDirectory, "make_directories", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        execute(small_config(), run.path, workers=1, overwrite=True)
    assert [run.holds_run, run.is_finished, run.metrics.read_text()] == [True, False, ""]


def test_a_signal_while_data_is_read_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the signal was only noted")

    monkeypatch.setattr(papa.lab.launch, "useful_workers", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(small_config(), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_finished_run_is_neither_overwritten_nor_run_again(finished: Path) -> None:
    config = small_config()
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match="already holds a finished run: choose another directory"):
        execute(config, finished)
    with pytest.raises(RunError, match="another configuration; nothing was changed:\n  --seed is 1 in the run, and 2"):
        execute(replace(config, seed=2), finished, resume=True)
    execute(config, finished, resume=True)
    assert before == {file: file.stat().st_mtime_ns for file in finished.rglob("*") if file.is_file()}
    (finished / "my notes.txt").write_text("keep me")
    execute(replace(config, seed=2), finished, overwrite=True)
    assert (finished / "my notes.txt").read_text() == "keep me"
    assert json.loads((finished / "result.json").read_text())["seed"] == 2


def test_a_bad_config_loses_nothing_even_when_told_to_overwrite(finished: Path) -> None:
    config = small_config()
    before = (finished / "result.json").read_text()
    with pytest.raises(ConfigError):
        execute(replace(config, data=replace(config.data, name="digit")), finished, overwrite=True)
    assert (finished / "result.json").read_text() == before


def test_more_workers_than_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers is 4, expected 1 to 3"):
        execute(small_config(), tmp_path, workers=4)


def test_tiny_runs_stay_in_one_process() -> None:
    assert useful_workers(find("digits").config()) == 1


def test_an_error_in_a_worker_is_raised_here(tmp_path: Path) -> None:
    config = small_config()
    missing = replace(config, model=replace(config.model, weights=str(tmp_path / "nothing.safetensors")))
    with pytest.raises(PapaError, match=r"nothing\.safetensors"):
        execute(missing, tmp_path / "run", workers=2)


def test_a_directory_in_use_is_refused_before_data_is_read(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    monkeypatch.setattr("papa.lab.launch.load_domain", lambda config: pytest.fail("data was read"))
    with pytest.raises(RunError, match="already holds a finished run"):
        execute(config, finished)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make the directory"):
        execute(small_config(), tmp_path / "file" / "run")
