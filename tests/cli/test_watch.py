import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from papa.checkpoint import write_atomically, write_json
from papa.cli import main
from papa.cli.status import RunStatus, status_line, status_view
from papa.cli.watch import Follower
from papa.lab.runs import RunDirectory
from report_samples import make_averaging, make_epoch, make_result

CONFIG = {"recipe": "digits", "method": "papa", "seed": 7, "train": {"epochs": 4}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that is being trained."""
    directory = RunDirectory(tmp_path / "run")
    with directory.lock():
        directory.create(CONFIG)
        yield directory


def append(run: RunDirectory, *events: dict[str, Any], end: str = "\n") -> None:
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(event) + end for event in events))


def test_a_follower_knows_where_a_run_stands(run: RunDirectory) -> None:
    follower = Follower(run)
    follower.look()
    assert follower.standing == RunStatus("digits papa seed 7", num_epochs=4)
    append(run, make_averaging(5), make_epoch(1), make_averaging(15))
    follower.look()
    standing = follower.standing
    assert (standing.epoch, standing.step, standing.num_steps) == (1, 15, 40)
    assert (standing.losses, standing.scores, standing.ensemble) == ([1.0, 2.0], [51.0, 52.0], 65.0)
    assert standing.seconds_left is None or standing.seconds_left >= 0
    append(run, make_epoch(2))
    follower.look()
    assert follower.standing.epoch == 2
    assert follower.standing.seconds_left is not None


def test_half_written_lines_are_read_when_they_are_whole(run: RunDirectory) -> None:
    follower = Follower(run)
    whole = json.dumps(make_epoch(1)) + "\n"
    for end in range(0, len(whole), 7):
        with run.metrics.open("a") as file:
            file.write(whole[end : end + 7])
        follower.look()
    assert follower.standing.epoch == 1


def test_a_rewound_file_is_read_anew(run: RunDirectory) -> None:
    follower = Follower(run)
    append(run, make_epoch(1))
    kept = run.metrics.read_bytes()
    append(run, make_epoch(2), {"event": "nonfinite", "step": 20, "member": 1})
    follower.look()
    assert (follower.standing.epoch, follower.standing.notes) == (2, ["step 20: member 1 fell sick"])
    write_atomically(run.metrics, kept)
    follower.look()
    assert (follower.standing.epoch, follower.standing.step, follower.standing.notes) == (1, 10, [])
    append(run, make_epoch(2))
    follower.look()
    assert follower.standing.epoch == 2


def test_lines_that_make_no_sense_are_passed_over(run: RunDirectory) -> None:
    follower = Follower(run)
    run.metrics.write_bytes(b'\xff\n[]\n{"event": "epoch", "epoch": "x", "losses": 3}\n{"step": null}\n')
    append(run, {**make_epoch(3), "losses": [None, "a"]}, {"event": "checkpoint-failed", "step": 30, "error": "full"})
    follower.look()
    assert (follower.standing.epoch, follower.standing.losses) == (3, [None, None])
    assert follower.standing.notes == ["step 30: no checkpoint could be written"]


def test_once_shows_where_an_unfinished_run_stands(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    append(run, make_epoch(2))
    assert main(["watch", str(run.path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "digits papa seed 7: epoch 2/4, losses 0.5000 1.5000, mean score 52.50, ensemble 65.00" in shown


def test_a_run_that_was_broken_off_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(CONFIG)
    append(run, make_epoch(2))
    words = f"nobody is training it: papa resume {run.path} goes on"
    follower = Follower(run)
    follower.look()
    assert (follower.standing.halt, follower.standing.seconds_left) == (words, None)
    assert main(["watch", str(run.path), "--once"]) == 0
    assert words in capsys.readouterr().out
    with run.lock():
        follower.look()
        assert follower.standing.halt is None
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    holders = {"dead": (socket.gethostname(), int(process.stdout)), "elsewhere": ("another-host", 1)}
    for name, (host, pid) in holders.items():
        (run.path / ".lock").write_text(json.dumps({"host": host, "pid": pid}))
        follower.look()
        assert (follower.standing.halt is not None) == (name == "dead")
    (run.path / ".lock").unlink()
    write_json(run.result, make_result())
    follower.look()
    assert follower.standing.halt is None


def test_a_finished_run_ends_with_its_table(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.result, make_result())
    assert main(["watch", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "91.00 [90.00, 92.00]" in shown
    assert f"report: {run.report}" in shown


def test_a_run_that_is_not_there_yet_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "later"), "--once"]) == 0
    assert "there is no run in" in capsys.readouterr().out


def test_a_run_is_waited_for_and_followed_to_its_end(tmp_path: Path) -> None:
    """A real watcher beside a run that begins, grows and ends."""
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
        ([], "a directory is missing"),
        (["x", "--every", "0"], "--every is 0.0, expected seconds, more than 0"),
    ],
)
def test_mistakes_get_one_readable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_of_runs_is_no_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.path.parent)]) == 2
    assert "holds 1 runs: watch one of them, such as" in capsys.readouterr().err


def test_displays_survive_what_is_not_known() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    many = RunStatus(
        "a run [red]",
        step=3,
        epoch=1,
        losses=[0.5, None] * 10,
        scores=[50.0],
        distances=[],
        seconds_left=61.0,
        notes=["[bold]sick"],
    )
    for standing in (RunStatus("x"), many):
        assert status_line(standing)
        console.print(status_view(standing))
    shown = console.export_text()
    for words in ("a run [red]", "0:01:01 left", "not finite", "[bold]sick", "..."):
        assert words in shown
    console.file.close()
