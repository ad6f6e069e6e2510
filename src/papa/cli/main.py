"""The entry point: loads the module of a command, and turns errors into one readable message."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import sys
import warnings
from collections.abc import Sequence

from papa._version import __version__
from papa.cli.tables import printable, wrapped
from papa.errors import ConfigError, PapaError, PapaWarning, StoppedError, did_you_mean
from papa.packages import missing_package

COMMANDS = {
    "ls": "list the recipes and methods",
    "show": "show the configuration of a recipe",
    "run": "train one population",
    "resume": "continue a stopped run",
    "compare": "train several methods and seeds and compare them",
    "reproduce": "run a table or figure of the paper",
    "runs": "list runs, their state and scores",
    "eval": "score the networks of a finished run",
    "predict": "label images with the network of a finished run",
    "report": "write the page, table or figures of existing runs",
    "soup": "average checkpoint files into one network",
    "diff": "compare two checkpoints",
    "sample": "print what the language models of a run say",
}

HELP = """papa trains a population of networks and averages them into one that is nearly
as good as their ensemble.

usage: papa COMMAND ...

{commands}

`papa COMMAND --help` explains a command.

examples:
  papa compare digits
  papa run digits --method papa-all --members 3 --out runs/mine
  papa run digits --help
  papa soup a.safetensors b.safetensors -o soup.safetensors

exit codes: 0 success; 2 wrong usage or failure; 75 stopped by a signal, with
the run saved; 130, 143 or 129 ended by a second signal, or nothing to save
"""

STOPPED = 75
"""EX_TEMPFAIL, a temporary failure: `papa resume` continues the run."""
RED, YELLOW = 31, 33


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, see `HELP`."""
    if argv is None:  # as a program
        warnings.formatwarning = _format_warning
    arguments = [_expand_home(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
        return code
    except StoppedError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun all processes stop together
            _print_error(error, color=YELLOW)
        return STOPPED
    except (PapaError, ModuleNotFoundError) as error:
        message = str(error) if isinstance(error, PapaError) else missing_package(error)
        if message is None:
            raise
        _print_error(message)
        return 2
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _discard_output()
        _print_error(f"cannot write the output: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        _print_error("interrupted", color=None)
        return 130


def _expand_home(argument: str) -> str:
    """Expand `~` in `--out=~/runs`, which a shell leaves alone after an equals sign."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("-") and equals and value.startswith("~/")
    return f"{name}={os.path.expanduser(value)}" if is_option else argument


def _print_error(message: object, *, color: int | None = RED) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed or full
        is_colored = color is not None and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        text = printable(f"papa: {message}")
        print(f"\033[{color}m{text}\033[0m" if is_colored else text, file=sys.stderr, flush=True)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of papa as one line, and any other as Python shows it."""
    if issubclass(category, PapaWarning):
        return printable(f"papa: {message}") + "\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _discard_output() -> None:
    """Send buffered output nowhere, so that the interpreter can flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        listing = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
        print(HELP.format(commands=listing), end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"papa {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name}: {did_you_mean(name, COMMANDS)}")
    if "--out=" in rest or any(pair in (("--out", ""), ("-o", "")) for pair in itertools.pairwise(rest)):
        raise ConfigError("--out is empty: is a variable not set?")
    module = importlib.import_module(f"papa.cli.{name}")
    if rest == ["--help-all"]:
        rest = ["digits", *rest]
    if hasattr(module, "USAGE") and {"-h", "--help"} & set(rest):
        print(wrapped(module.USAGE), end="")
        return 0
    code: int = module.main(rest)
    return code
