"""Every Python block of the README and the docs runs as it stands."""

import re
from pathlib import Path

import pytest

from papa.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    exec(compile(block, "<block>", "exec"), {"__name__": "block"})


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 2


def test_every_command_of_the_readme_exists() -> None:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = re.findall(r"^papa (\w+)", "\n".join(blocks), re.MULTILINE)
    assert set(commands) <= COMMANDS.keys()
    assert commands
