"""The command line where optional packages are not installed: one line that says what to install, and code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())

from papa.cli import main

sys.exit(main())
"""


def run_without(packages: set[str], *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "papa_without.py"
    script.write_text(SCRIPT.format(packages=packages))
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_help_needs_no_optional_package(tmp_path: Path) -> None:
    packages = {"rich", "tyro", "sklearn", "torchvision", "timm", "matplotlib", "jinja2"}
    done = run_without(packages, "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "papa compare digits" in done.stdout


@pytest.mark.parametrize(
    ("packages", "arguments", "error"),
    [
        ({"rich", "tyro"}, ["ls", "recipes"], "the package rich is not installed: pip install 'papa-torch[cli]'"),
        ({"tyro"}, ["run", "digits"], "the package tyro is not installed: pip install 'papa-torch[cli]'"),
        ({"sklearn"}, ["compare", "digits"], "the package sklearn is not installed: pip install 'papa-torch[lab]'"),
    ],
)
def test_a_missing_package_is_one_line_with_the_extra(
    packages: set[str], arguments: list[str], error: str, tmp_path: Path
) -> None:
    out = [] if arguments[0] == "ls" else ["--out", str(tmp_path / "run")]
    done = run_without(packages, *arguments, *out, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"papa: {error}"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
