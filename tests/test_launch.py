import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from papa.config import Config
from papa.errors import ConfigError, RunError
from papa.launch import Recorder, execute, useful_workers
from papa.recipes import find
from papa.runs import RunDirectory
from papa.training import Training


def small_config(**changes: object) -> Config:
    config = replace(find("digits").config(), members=3, **changes)  # type: ignore[arg-type]
    return replace(
        config,
        train=replace(config.train, epochs=3, batch_size=64),
        average=replace(config.average, repair=2),
    )


def networks_of(path: Path) -> dict[str, torch.Tensor]:
    files = [path / "soup.safetensors", path / "greedy.safetensors", *sorted((path / "members").iterdir())]
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(first: Path, second: Path) -> None:
    ours, theirs = networks_of(first), networks_of(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert (first / "metrics.jsonl").read_text() == (second / "metrics.jsonl").read_text()


def test_a_run_writes_its_files_and_its_result_says_what_a_reader_needs(tmp_path: Path) -> None:
    config = small_config()
    result = execute(config, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert [file for file in run.files if not file.exists()] == [run.picture]  # which only segmentation makes
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
    assert [event["step"] for event in events if event["event"] == "average"] == list(range(5, steps + 1, 5))


@pytest.mark.parametrize("method", ["papa", "papa-2", "papa-all"])
def test_two_workers_end_with_the_bits_of_one(tmp_path: Path, method: str) -> None:
    config = small_config(method=method)
    torch.set_num_threads(1)
    alone = execute(config, tmp_path / "one", workers=1)
    together = execute(config, tmp_path / "two", workers=2)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert alone["test"] == together["test"]
    assert together["environment"]["workers"] == 2


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kill_at", [1, 5, 9])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, kill_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    execute(config, tmp_path / "whole")

    def kill(self: Recorder, training: Training) -> None:
        if training.step == kill_at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "after_step", kill)
        with pytest.raises(Killed):
            execute(config, tmp_path / "broken")
    assert not RunDirectory(tmp_path / "broken").is_finished
    execute(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("workers_after", [1, 2])
def test_a_run_of_several_workers_resumes_with_any_number(tmp_path: Path, workers_after: int) -> None:
    torch.set_num_threads(1)
    config = small_config()
    execute(config, tmp_path / "whole", workers=1)
    execute(config, tmp_path / "broken", workers=2)
    run = RunDirectory(tmp_path / "broken")
    run.result.unlink()
    newest = run.latest_checkpoint()
    assert newest is not None
    shutil.rmtree(newest)  # as if it had been stopped in the last epoch
    execute(config, tmp_path / "broken", workers=workers_after, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_overwriting_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.pt").write_text("precious")
    with pytest.raises(RunError, match="holds no run of papa"):
        execute(small_config(), tmp_path, overwrite=True)
    shutil.move(tmp_path / "checkpoint", tmp_path / "aside")
    execute(small_config(), tmp_path)
    shutil.move(tmp_path / "aside" / "mine.pt", tmp_path / "checkpoint" / "mine.pt")
    execute(small_config(), tmp_path, overwrite=True)
    assert (tmp_path / "checkpoint" / "mine.pt").read_text() == "precious"


def test_a_finished_run_is_neither_overwritten_nor_run_again(tmp_path: Path) -> None:
    config = small_config()
    execute(config, tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match="already holds a finished run: choose another --out"):
        execute(config, tmp_path)
    with pytest.raises(RunError, match="another configuration; nothing was changed:\n  seed is 1, asked for 2"):
        execute(replace(config, seed=2), tmp_path, resume=True)
    execute(config, tmp_path, resume=True)
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    (tmp_path / "my notes.txt").write_text("keep me")
    execute(replace(config, seed=2), tmp_path, overwrite=True)
    assert (tmp_path / "my notes.txt").read_text() == "keep me"
    assert json.loads((tmp_path / "result.json").read_text())["seed"] == 2


def test_a_bad_config_loses_nothing_even_when_told_to_overwrite(tmp_path: Path) -> None:
    config = small_config()
    execute(config, tmp_path)
    before = (tmp_path / "result.json").read_text()
    for bad in (replace(config, members=0), replace(config, data=replace(config.data, name="digit"))):
        with pytest.raises(ConfigError):
            execute(bad, tmp_path, overwrite=True)
    assert (tmp_path / "result.json").read_text() == before


def test_more_workers_than_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers is 4, expected 1 to 3"):
        execute(small_config(), tmp_path, workers=4)


def test_tiny_runs_stay_in_one_process() -> None:
    assert useful_workers(find("digits").config()) == 1


def test_an_error_in_a_worker_is_raised_here(tmp_path: Path) -> None:
    config = small_config()
    execute(config, tmp_path, workers=1)
    with pytest.raises(RunError, match="already holds a finished run"):
        execute(config, tmp_path, workers=2)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make the directory"):
        execute(small_config(), tmp_path / "file" / "run")
