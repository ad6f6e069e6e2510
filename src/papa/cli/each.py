"""`papa each`: train one member per process, with a script of your own."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.cli.arguments import parse_options
from papa.errors import ConfigError

DESCRIPTION = """Runs a training script once for each member, at the same time. In the script, add one line:

  papa.join(model, optimizer, papa.Push(half_life=0.003), num_steps=num_steps)

Each process looks like a single one to every framework. {member} in the command is the index of the member, {members}
their number. If a member fails, all are ended, and started again as often as --restarts says.

examples:
  papa each --members 3 -- python train.py --seed {member} --output-dir out/{member}
  papa each --members 5 --out out/soup.safetensors --restarts 2 -- python train.py --seed {member} --resume"""


@dataclass(frozen=True, kw_only=True)
class EachOptions:
    """Options of `papa each`."""

    members: int
    """The number of members, each in a process of its own."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("soup.safetensors")
    """Where the average soup is written when training ends."""
    restarts: int = 0
    """How often all members are started again after one of them failed."""


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    own, command = list(argv), list[str]()
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parse_options(EachOptions, own, prog="papa each", description=DESCRIPTION)
    if not command:
        raise ConfigError("there is no command: write it after --, as in -- python train.py --seed {member}")
    from papa.files import soup_files
    from papa.group import SOUP, WEIGHTS
    from papa.group.each import run_each

    lock = threading.Lock()
    width = len(str(options.members - 1))

    def show(member: int, line: str) -> None:
        with lock:
            print(f"[{member:{width}}] {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="papa-each-") as directory:
        code = run_each(
            command,
            options.members,
            num_restarts=options.restarts,
            variables={WEIGHTS: directory},
            on_line=show,
            on_event=lambda text: print(f"papa: {text}", file=sys.stderr, flush=True),
        )
        files = [Path(directory) / f"{member}.safetensors" for member in range(options.members)]
        if code == 0 and all(file.exists() for file in files):
            options.out.parent.mkdir(parents=True, exist_ok=True)
            soup_files(files, options.out, overwrite=True)
            print(f"one network: {options.out}")
        elif code == 0 and (Path(directory) / SOUP).exists():
            print(f"one network: {(Path(directory) / SOUP).read_text()}")
        elif code == 0:
            print("papa: members did not call papa.join, so there is no soup", file=sys.stderr)
    return code
