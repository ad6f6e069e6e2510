"""`papa soup` from the command line."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from papa.cli import main

SHORT = ["--train.epochs", "1", "--train.batch-size", "64", "--members", "2", "--workers", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for index in range(3):
        save_file({"w": torch.full((2,), float(index)), "n": torch.tensor(index)}, f"{index}.safetensors")
    return tmp_path


FILES = ["0.safetensors", "1.safetensors", "2.safetensors"]


def test_the_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["soup", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for part in (
        "usage: papa soup",
        "--weights",
        "--score",
        "--max-shard-size",
        "--recipe NAME",
        "papa soup a.pt b.pt",
    ):
        assert part in shown


def test_soup_prints_its_members_and_its_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soup", *FILES, "-o", "soup.safetensors", "--weights", "0.5,0.25,0.25"]) == 0
    shown = capsys.readouterr().out
    assert load_file("soup.safetensors")["w"].tolist() == [0.75, 0.75]
    for part in ("0.25    2.safetensors", "one network: soup.safetensors", "note: not averaged but copied from"):
        assert part in shown
    assert "score" not in shown


def test_soup_writes_shards_in_another_dtype(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["soup", *FILES, "--out", "merged", "--max-shard-size", "8", "--dtype", "float16"]
    assert main(arguments) == 0
    assert "one network: merged/model.safetensors.index.json (2 shards)" in capsys.readouterr().out
    assert load_file("merged/model-00002-of-00002.safetensors")["w"].dtype == torch.float16
    assert main([*arguments, "--overwrite"]) == 0


def test_a_greedy_soup_shows_order_scores_and_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("score.py").write_text(
        "import struct, sys\nprint(-abs(struct.unpack('<f', open(sys.argv[1], 'rb').read()[-4:])[0] - 1.2))"
    )
    score = shlex.join([sys.executable, "score.py", "{}"])
    assert main(["soup", *FILES, "-o", "soup.safetensors", "--greedy", "--score", score]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out -1.2 0.safetensors" in shown
    assert "left -0.3 2, 3 left -0.7 2, 1" in shown
    assert "score of the greedy soup: -0.2" in shown


def test_a_factory_is_found_in_the_current_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_factory.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Module()\n"
        "    net.w = torch.nn.Parameter(torch.zeros(2))\n"
        "    net.register_buffer('n', torch.tensor(0))\n"
        "    return net, [torch.zeros(1)], lambda net: (float(net.w[0]), 0.0)\n"
    )
    path = list(sys.path)
    assert main(["soup", *FILES, "-o", "soup.safetensors", "--greedy", "--factory", "my_factory:make"]) == 0
    assert "score of the greedy soup: 2" in capsys.readouterr().out
    assert sys.path == path


def test_runs_are_averaged_and_scored_with_their_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", *SHORT, "--out", "run"]) == 0
    assert main(["soup", "run", "-o", "soup.safetensors"]) == 0
    ours, runs = load_file("soup.safetensors"), load_file("run/soup.safetensors")
    assert all(torch.allclose(ours[name], runs[name], atol=1e-6) for name in runs)
    capsys.readouterr()
    arguments = ["soup", "run", "-o", "greedy.safetensors", "--greedy", "--reset-batch-norm", "--recipe", "digits"]
    assert main([*arguments, "--seed", "7", "--data.validation", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert "score of the greedy soup" in shown
    assert "run was trained with seed 1, and thus on some of the examples that seed 7 holds out" in shown
    (folder / "run" / "members" / "001.safetensors").rename("1.safetensors")
    assert main(["soup", "run", "-o", "other.safetensors"]) == 2
    assert "has 1 of the 2 members its config names" in capsys.readouterr().err
    (folder / "run" / "result.json").unlink()
    assert main(["soup", "run", "-o", "other.safetensors"]) == 2
    assert "holds an unfinished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "soup.safetensors"], "no file was named"),
        (["0.safetensors", "9.safetensors", "-o", "soup.safetensors"], "there is no file 9.safetensors"),
        ([*FILES, "-o", "0.safetensors"], "0.safetensors exists: choose another output"),
        ([*FILES, "-o", "soup.safetensors", "--weights", "a,b,c"], "expected numbers such as 0.5,0.3,0.2"),
        ([*FILES, "-o", "soup.safetensors", "--weights", "1,2,3"], "the weights sum to 6, expected 1"),
        ([*FILES, "-o", "soup.safetensors", "--recipe", "digit"], "there is no recipe digit: did you mean digits?"),
        ([*FILES, "-o", "soup.safetensors", "--recipe"], "--recipe needs a value"),
        (
            [*FILES, "-o", "soup.safetensors", "--recipe", "digits", "--factory", "a:b"],
            "--recipe and --factory both give a network and data",
        ),
        ([*FILES, "-o", "soup.safetensors", "--reset-batch-norm", "--recipe", "digits"], "does not fit the network"),
        ([*FILES, "-o", "soup.safetensors", "--learned"], "need a network and data: give --recipe NAME"),
        ([*FILES, "-o", "soup.safetensors", "--greedy"], "a greedy soup needs scores: give a --score command"),
    ],
)
def test_mistakes_get_one_readable_message_and_leave_nothing(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["soup", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_terminated_command_leaves_nothing_behind(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "score.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "papa", "soup", "a.safetensors", "b.safetensors", "-o", "soup.safetensors"]
    score = shlex.join([sys.executable, "score.py", "{}"])
    process = subprocess.Popen([*command, "--greedy", "--score", score], cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=120) == 143
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors", "score.py", "begun"}
