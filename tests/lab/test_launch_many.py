import gc
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from crashes import differences
from helpers import AskToStop, small_config
from papa.errors import ConfigError, RunError, StoppedError
from papa.lab import launch_many
from papa.lab.config import Config
from papa.lab.launch import RunSpec
from papa.lab.launch_many import execute_all
from papa.training import Training
from papa.training.checkpoints import checkpoints


def spec(folder: Path, seed: int, config: Config | None = None, **more: object) -> RunSpec:
    return RunSpec(config=replace(config or small_config(), seed=seed), path=folder / f"seed{seed}", **more)  # type: ignore[arg-type]


def files_in(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_a_failed_run_is_named_and_the_others_are_kept(tmp_path: Path, whole: Path, num_parallel: int) -> None:
    specs = [spec(tmp_path, seed, resume=True) for seed in (1, 2, 3)]
    shutil.copytree(whole, tmp_path / "seed2")  # a run of another configuration is in the way
    outcomes = execute_all(specs, num_parallel=num_parallel)
    assert list(outcomes.results) == [tmp_path / "seed1", tmp_path / "seed3"]
    with pytest.raises(RunError, match="1 of 3 runs failed; the others are complete") as caught:
        outcomes.check()
    assert f"{tmp_path / 'seed2'} holds a run of another configuration" in str(caught.value)
    kept = files_in(tmp_path / "seed1") | files_in(tmp_path / "seed3")
    shutil.rmtree(tmp_path / "seed2")
    again = execute_all(specs, num_parallel=num_parallel)
    again.check()
    assert [result["seed"] for result in again.results.values()] == [1, 2, 3]
    assert files_in(tmp_path / "seed1") | files_in(tmp_path / "seed3") == kept


def test_an_error_of_all_runs_is_raised_once(tmp_path: Path) -> None:
    outcomes = execute_all([spec(tmp_path, seed, workers=7) for seed in (1, 2)])
    with pytest.raises(ConfigError, match="--workers is 7, expected 1 to 3"):
        outcomes.check()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setattr(launch_many, "execute", fail)
    with pytest.raises(ConfigError, match=r"the package timm is not installed: pip install 'papa-torch\[lab\]'"):
        execute_all([spec(tmp_path, seed) for seed in (1, 2)]).check()


def test_no_training_stays_in_memory(tmp_path: Path) -> None:
    before = {id(found) for found in gc.get_objects() if type(found) is Training}
    gc.disable()
    try:
        execute_all([spec(tmp_path, seed) for seed in (1, 2)]).check()
        left = [found for found in gc.get_objects() if type(found) is Training and id(found) not in before]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_specs_of_one_directory_are_one_run(tmp_path: Path, num_parallel: int) -> None:
    outcomes = execute_all([spec(tmp_path, 1)] * 3, num_parallel=num_parallel)  # without resume, a second would fail
    outcomes.check()
    assert list(outcomes.results) == [tmp_path / "seed1"]


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_a_signal_stops_all_runs_and_the_same_call_continues(tmp_path: Path, whole: Path, num_parallel: int) -> None:
    config = small_config()
    long = replace(config, train=replace(config.train, epochs=12))  # it must not end before the first one
    specs = [spec(tmp_path, seed, long if seed == 2 else config) for seed in (1, 2, 3)]
    ask = partial(AskToStop, signal.SIGINT, 2)
    with pytest.raises(StoppedError, match="of 3 runs done; continue with the same command, without --overwrite"):
        execute_all([replace(specs[0], make_callback=ask), *specs[1:]], num_parallel=num_parallel)
    started = [one.path for one in specs if one.path.exists()]
    assert 1 <= len(started) < 3
    assert all(checkpoints(path / "checkpoint") for path in started)
    execute_all([replace(one, resume=True) for one in specs], num_parallel=num_parallel).check()
    assert list(differences(whole, tmp_path / "seed1")) == []
