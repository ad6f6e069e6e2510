from pathlib import Path

import pytest

from papa.cli import main

SHORT = ["--train.batch-size", "64", "--members", "2"]


def test_a_run_without_a_terminal_prints_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "digits", *SHORT, "--train.epochs", "25", "--out", out]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "epoch " in line]
    assert 5 <= len(lines) <= 10
    assert lines[-1].startswith("digits papa seed 1: epoch 25 of 25, validation accuracy: mean ")
    for word in ("ensemble", "average soup", "distance"):
        assert word in lines[0]
    assert " left" in lines[1]
