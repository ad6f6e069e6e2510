"""The README and the documentation: their blocks run, their commands are real, the site builds without a warning."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import papa
from papa.cli import main
from papa.cli.compare import jobs_of, parse_compare
from papa.cli.main import COMMANDS
from papa.cli.options import parse_options, take_recipe
from papa.cli.report import ReportOptions
from papa.cli.run import parse_run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(kind: str) -> list[tuple[Path, str]]:
    return [
        (page, block) for page in PAGES for block in re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)
    ]


PYTHON = [pytest.param(block, id=f"{page.stem}-{number}") for number, (page, block) in enumerate(blocks_of("python"))]
COMMAND_LINES = [
    pytest.param(line, id=f"{page.stem}: {line}")
    for page, block in blocks_of("console")
    for line in block.splitlines()
    if line.startswith("papa ")
]


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")  # these two are of Lightning
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("block", PYTHON)
def test_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<block>", "exec", dont_inherit=True), {"__name__": "block"})


def test_blocks_are_of_kinds_that_are_tested() -> None:
    """A block that runs nowhere must say that it is no code, or be a sketch beside a whole one."""
    for page in PAGES:
        kinds = re.findall(r"^```(\S*)$", page.read_text(), re.MULTILINE)
        assert set(kinds) <= {"", "python", "console", "diff", "text"}, page
        assert len(kinds) % 2 == 0, page
        assert all(kinds[::2]), f"{page} has a block without a kind"
    assert len(PYTHON) >= 8
    assert len(COMMAND_LINES) >= 15


def test_the_tests_that_pages_name_exist() -> None:
    named = {found for page in PAGES for found in re.findall(r"([\w/]+\.py)::(test_\w+)", page.read_text())}
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing
    assert len(named) > 25


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_of_the_docs_is_understood(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its recipe, every option and every value; nothing is trained."""
    _, command, *arguments = shlex.split(line, comments=True)
    if "--" in arguments:  # what follows belongs to another program
        arguments = arguments[: arguments.index("--")]
    assert command in COMMANDS
    if command == "run":
        parse_run(arguments)
    elif command == "compare":
        assert jobs_of(*parse_compare(*take_recipe(arguments, "")))
    elif command == "report":
        assert parse_options(ReportOptions, arguments, prog="papa report", description="").directories
    elif command in ("ls", "show"):
        assert main([command, *arguments]) == 0
    else:
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
        explained = capsys.readouterr().out
        assert all(word in explained for word in arguments if word.startswith("-"))


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: papa\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    public = {name for name in papa.__all__ if not isinstance(getattr(papa, name), ModuleType)}
    assert sorted(listed) == sorted(public - {"__version__"}), "docs/reference/api.md lists public names"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    assert "usage: papa report" in (tmp_path / "reference/cli/index.html").read_text()
    reference = (tmp_path / "reference/api/index.html").read_text()
    assert "Networks of one architecture, whose weights are the rows of one matrix." in reference
    assert not re.search(r'(?:src|href)="https?://(?:fonts|cdn|unpkg)', reference)
