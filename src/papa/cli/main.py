"""Finding the command, and turning errors into one readable message."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from papa._version import __version__
from papa.errors import ConfigError, PapaError, StoppedError, did_you_mean

COMMANDS = {
    "ls": "list the recipes",
    "show": "show a recipe's configuration",
    "run": "train one population",
    "resume": "continue a run that was stopped",
    "compare": "train several methods and seeds, side by side",
    "reproduce": "run a table or figure of the paper",
    "watch": "follow a run from another terminal",
    "report": "write the page, table or figures of runs that are there",
    "soup": "average checkpoints that lie in files",
    "diff": "compare two checkpoints",
    "plan": "what averaging between machines will cost",
}

HELP = """papa trains a population of networks and hands back one that generalises nearly like the ensemble.

usage: papa COMMAND ...

{commands}

examples:
  papa compare digits
  papa run digits --method papa-all --members 3 --out runs/mine
  papa run digits --help
  papa soup a.safetensors b.safetensors -o soup.safetensors

exit codes: 0 all went well; 2 used wrongly, or could not go on; 75 stopped by SIGINT, SIGTERM or SIGHUP, and saved;
130, 143 and 129 ended at once by a second one, or by the first where there is nothing to save
"""

STOPPED = 75
"""What the system calls a temporary failure: try again, with `papa resume`."""


def _at_home(argument: str) -> str:
    """`--out=~/runs` as a shell would have it, which leaves `~` alone behind an equals sign."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("-") and equals and value.startswith("~/")
    return f"{name}={os.path.expanduser(value)}" if is_option else argument


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code, see `HELP`."""
    arguments = [_at_home(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except StoppedError as error:
        _say(str(error), style="yellow")
        return STOPPED
    except PapaError as error:
        _say(str(error), style="red")
        return 2
    except BrokenPipeError:  # whoever read our output, such as `head`, has seen enough
        _hush()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _hush()
        _say(f"cannot write what there is to say: {error.strerror}", style="red")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _say(words: str, *, style: str | None = None) -> None:
    """On standard error, where somebody may listen."""
    with contextlib.suppress(OSError):
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"papa: {words}", markup=False, style=style)


def _hush() -> None:
    """Let what is still to be written go nowhere, so that ending does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        listing = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
        print(HELP.format(commands=listing), end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"papa {__version__}")
        return 0
    name, *rest = arguments
    if "--out=" in rest or any(pair in (("--out", ""), ("-o", "")) for pair in itertools.pairwise(rest)):
        raise ConfigError("--out is empty: is a variable not set?")
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name}: {did_you_mean(name, COMMANDS)}")
    module = importlib.import_module(f"papa.cli.{name}")
    code: int = module.main(rest)
    return code
