"""Help, lists and wrong options do not load PyTorch, and a run says what it does before it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from papa.cli.main import COMMANDS

HEAVY = ("torch", "numpy", "torchvision", "timm", "sklearn", "matplotlib", "jinja2", "scipy")

QUICK = [
    *([], ["ls"], ["show", "digits"], ["show", "cifar100-resnet18", "--budget", "smoke"], ["reproduce"]),
    *([command, "--help"] for command in COMMANDS),
    *(["run", "digits", "--help"], ["compare", "digits", "--help"], ["reproduce", "table:ablation1", "--help"]),
    *(["rnu"], ["run", "digit"], ["run", "digits", "--members", "0"], ["run", "digits", "--epoch", "3"]),
    *(["run", "--config", "none.json"], ["runs", "none"], ["runs", "."], ["resume", "none"]),
]
"""Commands that need no tensors."""

SCRIPT = f"""
import contextlib, io, json, sys
from papa.cli import main

for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    print(json.dumps([arguments, code, [name for name in {HEAVY!r} if name in sys.modules], "tyro" in sys.modules]))
"""


WITHOUT_TORCH = """
import sys
from papa.cli import main

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch is not here")

sys.meta_path.insert(0, Blocked())
main(sys.argv[1:])
"""


def run_python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_what_needs_no_tensors_does_not_load_torch(tmp_path: Path) -> None:
    done = run_python(SCRIPT, json.dumps(QUICK), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [arguments for arguments, *_ in lines] == QUICK
    for arguments, code, loaded, _ in lines:
        assert code in (0, 2), arguments
        assert loaded == [], arguments
    assert not lines[1][-1], "lists need no tyro"


def test_import_papa_loads_no_torch_and_has_every_name(tmp_path: Path) -> None:
    code = "import sys, papa; print('torch' in sys.modules); print(papa.Push, 'torch' in sys.modules, papa.training)"
    first, second = run_python(code, folder=tmp_path).stdout.splitlines()
    assert first == "False"
    assert "papa.core.rules.Push" in second
    assert "True <module 'papa.training'" in second


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "digits", "--members", "3", "--out", "mine"],
            "training (papa) of 3 digits-cnn networks on digits, 20 epochs, to mine",
        ),
        (
            ["compare", "digits", "--methods", "independent,papa", "--out", "both"],
            "2 runs (independent, papa), each of 5 digits-cnn networks on digits, 20 epochs, to both",
        ),
    ],
)
def test_a_training_says_what_it_does_before_torch_is_loaded(arguments: list[str], said: str, tmp_path: Path) -> None:
    error = run_python(WITHOUT_TORCH, *arguments, folder=tmp_path).stderr
    assert error.splitlines()[0] == f"papa: {said}"
    assert "torch is not here" in error
