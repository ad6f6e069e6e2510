import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from papa.cli import main
from papa.cli.status import RunStatus, status_line, status_view
from papa.cli.watch import Follower
from papa.lab.runs import RunDirectory
from papa.storage import write_atomically, write_json
from report_samples import make_averaging, make_epoch, make_result

CONFIG = {"recipe": "digits", "method": "papa", "seed": 7, "train": {"epochs": 4}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run in training."""
    directory = RunDirectory(tmp_path / "run")
    with directory.lock():
        directory.create(CONFIG)
        yield directory


def append(run: RunDirectory, *events: dict[str, Any], end: str = "\n") -> None:
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(event) + end for event in events))


def test_a_follower_reads_the_status_of_a_run(run: RunDirectory) -> None:
    follower = Follower(run)
    follower.read()
    assert follower.status == RunStatus("digits papa seed 7", num_epochs=4)
    append(run, make_averaging(5), make_epoch(1), make_averaging(15))
    follower.read()
    status = follower.status
    assert (status.epoch, status.step, status.num_steps) == (1, 15, 40)
    assert (status.losses, status.scores, status.ensemble) == ([1.0, 2.0], [51.0, 52.0], 65.0)
    assert status.seconds_left is None or status.seconds_left >= 0
    append(run, {**make_epoch(2), "validation_average_soup": 66.0})
    follower.read()
    assert follower.status.epoch == 2
    assert follower.status.seconds_left is not None
    assert "ensemble 65.00, average soup 66.00, mean distance" in status_line(follower.status)


def test_incomplete_lines_are_read_when_they_are_complete(run: RunDirectory) -> None:
    follower = Follower(run)
    whole = json.dumps(make_epoch(1)) + "\n"
    for end in range(0, len(whole), 7):
        with run.metrics.open("a") as file:
            file.write(whole[end : end + 7])
        follower.read()
    assert follower.status.epoch == 1


def test_a_rewound_file_is_read_again(run: RunDirectory) -> None:
    follower = Follower(run)
    append(run, make_epoch(1))
    kept = run.metrics.read_bytes()
    append(run, make_epoch(2), {"event": "nonfinite", "step": 20, "member": 1})
    follower.read()
    assert (follower.status.epoch, follower.status.warnings) == (2, ["step 20: member 1 was unhealthy"])
    write_atomically(run.metrics, kept)
    follower.read()
    assert (follower.status.epoch, follower.status.step, follower.status.warnings) == (1, 10, [])
    append(run, make_epoch(2))
    follower.read()
    assert follower.status.epoch == 2


def test_invalid_lines_are_skipped(run: RunDirectory) -> None:
    follower = Follower(run)
    run.metrics.write_bytes(b'\xff\n[]\n{"event": "epoch", "epoch": "x", "losses": 3}\n{"step": null}\n')
    append(run, {**make_epoch(3), "losses": [None, 0.5]}, {"event": "checkpoint-failed", "step": 30, "error": "full"})
    follower.read()
    assert (follower.status.epoch, follower.status.losses) == (3, [None, 0.5])
    assert follower.status.warnings == ["step 30: the checkpoint could not be written"]


def test_once_prints_the_status_of_an_unfinished_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    append(run, make_epoch(2))
    assert main(["watch", str(run.path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "digits papa seed 7: epoch 2/4, losses 0.5000 1.5000, mean score 52.50, ensemble 65.00" in shown


def test_a_stopped_run_says_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(CONFIG)
    append(run, make_epoch(2))
    text = f"not running: continue it with papa resume {run.path}"
    follower = Follower(run)
    follower.read()
    assert (follower.status.interruption, follower.status.seconds_left) == (text, None)
    assert main(["watch", str(run.path), "--once"]) == 0
    assert text in capsys.readouterr().out
    with run.lock():
        follower.read()
        assert follower.status.interruption is None
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    holders = {"dead": (socket.gethostname(), int(process.stdout)), "elsewhere": ("another-host", 1)}
    for name, (host, pid) in holders.items():
        (run.path / ".lock").write_text(json.dumps({"host": host, "pid": pid}))
        follower.read()
        assert (follower.status.interruption is not None) == (name == "dead")
    (run.path / ".lock").unlink()
    write_json(run.result, make_result())
    follower.read()
    assert follower.status.interruption is None


def test_a_finished_run_ends_with_its_table(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.result, make_result())
    assert main(["watch", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "91.00 [90.00, 92.00]" in shown
    assert f"report: {run.report}" in shown


def test_a_missing_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "later"), "--once"]) == 0
    assert "there is no run in" in capsys.readouterr().out


def test_watch_waits_for_a_run_and_follows_it_to_its_end(tmp_path: Path) -> None:
    """A real `papa watch` process, and a run that starts, grows and ends."""
    run = RunDirectory(tmp_path / "run")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "papa", "watch", str(run.path), "--every", "0.02"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert watcher.stdout is not None
    assert "waiting for it" in watcher.stdout.readline()
    run.create(CONFIG)
    append(run, make_epoch(1))
    while "epoch 1/4" not in watcher.stdout.readline():
        assert watcher.poll() is None
    append(run, make_epoch(2))
    while "epoch 2/4" not in watcher.stdout.readline():
        assert watcher.poll() is None
    write_json(run.result, make_result())
    rest, _ = watcher.communicate(timeout=120)
    assert "91.00 [90.00, 92.00]" in rest
    assert watcher.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--every", "0"], "--every is 0.0, expected more than 0 seconds"),
    ],
)
def test_a_wrong_option_gets_one_readable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_directory_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["watch"])
    assert "RUN" in capsys.readouterr().err


def test_a_directory_of_runs_is_no_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.path.parent)]) == 2
    assert "contains 1 runs: watch one of them, such as" in capsys.readouterr().err


def test_displays_accept_missing_values() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    many = RunStatus(
        "a run [red]",
        step=3,
        epoch=1,
        losses=[0.5, None] * 10,
        scores=[50.0],
        distances=[],
        average_soup=71.25,
        seconds_left=61.0,
        warnings=["[bold]bad"],
    )
    for status in (RunStatus("x"), many):
        assert status_line(status)
        console.print(status_view(status))
    shown = console.export_text()
    for words in ("a run [red]", "0:01:01 left", "not finite", "[bold]bad", "...", "average soup", "71.25"):
        assert words in shown
    console.file.close()
