"""`papa each`: train one member per process, with a script of your own."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from papa.cli.arguments import parse_options
from papa.errors import ConfigError

DESCRIPTION = """Runs a training script once for each member, at the same time. In the script, add one line:

  papa.join(model, optimizer, papa.Push(half_life=0.003), num_steps=num_steps)

Each process looks like a single one to every framework. {member} in the command is the index of the member, {members}
their number. If a member fails, all are ended, and started again as often as --restarts says. The exit code is that of
the member that failed, or 2 if there is no soup.

With --asynchronous members go at their own speed and never wait. One that fails is started again alone, and goes on
from the weights that it published last.

examples:
  papa each --members 3 -- python train.py --seed {member} --output-dir out/{member}
  papa each --members 5 --out out/soup.safetensors --restarts 2 -- python train.py --seed {member} --resume
  papa each --members 3 --asynchronous --restarts 5 -- python train.py --seed {member}"""


@dataclass(frozen=True, kw_only=True)
class EachOptions:
    """Options of `papa each`."""

    members: int
    """The number of members, each in a process of its own."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("soup.safetensors")
    """Where the average soup is written when training ends."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a file that is there; --resume does so too."""
    restarts: int = 0
    """How often all members are started again after one of them failed; with --asynchronous, how often each is."""
    asynchronous: bool = False
    """Members go at their own speed: each is pushed toward the newest weights of the others, and never waits."""
    published: Path | None = None
    """With --asynchronous, the directory of each member's newest weights; by default in memory, until the end."""
    resume: bool = False
    """Continue from the weights in --published."""


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    own, command = list(argv), list[str]()
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parse_options(EachOptions, own, prog="papa each", description=DESCRIPTION)
    if not command:
        raise ConfigError("there is no command: write it after --, as in -- python train.py --seed {member}")
    if (options.published or options.resume) and not options.asynchronous:
        raise ConfigError("--published and --resume are for --asynchronous: add it, or let the script resume")
    if options.resume and options.published is None:
        raise ConfigError("--resume needs --published, the directory of the weights to continue from")
    if options.out.exists() and not (options.overwrite or options.resume):
        raise ConfigError(f"{options.out} exists: choose another --out, or add --overwrite to replace it")
    return _run_asynchronously(options, command) if options.asynchronous else _run(options, command)


def _run(options: EachOptions, command: Sequence[str]) -> int:
    from papa.distributed.each import run_each
    from papa.distributed.members import SOUP, WEIGHTS

    with tempfile.TemporaryDirectory(prefix="papa-each-") as directory:
        code = run_each(
            command,
            options.members,
            num_restarts=options.restarts,
            variables={WEIGHTS: directory},
            on_line=_printer(options.members),
            on_event=_report,
        )
        files = {member: Path(directory) / f"{member}.safetensors" for member in range(options.members)}
        if code == 0 and all(file.exists() for file in files.values()):
            _write_soup(files, options.out)
        elif code == 0 and (Path(directory) / SOUP).exists():
            print(f"one network: {(Path(directory) / SOUP).read_text()}")
        elif code == 0:
            return _report_no_soup()
    return code


def _run_asynchronously(options: EachOptions, command: Sequence[str]) -> int:
    from papa.distributed.asynchronous import PublishedFiles
    from papa.distributed.each import run_asynchronously
    from papa.distributed.members import PUBLISHED

    with _directory(options) as directory:
        published = PublishedFiles(directory)
        if not options.resume and any(directory.glob("*.safetensors")):
            raise ConfigError(f"{directory} has weights of an earlier training: remove them, or add --resume")
        code, failed = run_asynchronously(
            command,
            options.members,
            num_restarts=options.restarts,
            variables={PUBLISHED: str(directory.resolve())},
            on_line=_printer(options.members),
            on_event=_report,
        )
        files = {member: published.path(member) for member in range(options.members)}
        files = {member: file for member, file in files.items() if file.exists()}
        whole = {member: file for member, file in files.items() if member not in failed} or files
        if whole:
            missing = sorted(set(range(options.members)) - whole.keys())
            if missing:
                _report(f"the soup is without member {', '.join(map(str, missing))}")
            _write_soup(whole, options.out)
        else:
            return code or _report_no_soup()
    return code


@contextlib.contextmanager
def _directory(options: EachOptions) -> Iterator[Path]:
    """Where members publish: as asked for, or a new directory in memory."""
    from papa.distributed.shared_memory import MEMORY

    if options.published is not None:
        yield options.published
        return
    with tempfile.TemporaryDirectory(prefix="papa-each-", dir=MEMORY if Path(MEMORY).is_dir() else None) as directory:
        yield Path(directory)


def _write_soup(files: Mapping[int, Path], soup: Path) -> None:
    """Write the soup of files by member, which may be temporary: so its record names members only."""
    from papa.files import soup_files

    soup.parent.mkdir(parents=True, exist_ok=True)
    soup_files(list(files.values()), soup, overwrite=True, names=[f"member {member}" for member in files])
    print(f"one network: {soup}")


def _report_no_soup() -> int:
    """Say so; the exit code is that of an error."""
    _report("members did not call papa.join, so there is no soup")
    return 2


def _printer(num_members: int) -> Callable[[int, str], None]:
    lock, width = threading.Lock(), len(str(num_members - 1))

    def show(member: int, line: str) -> None:
        with lock:
            print(f"[{member:{width}}] {line}", flush=True)

    return show


def _report(text: str) -> None:
    print(f"papa: {text}", file=sys.stderr, flush=True)
