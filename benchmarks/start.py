"""The processor time until a command says something, against importing PyTorch, which none of them waits for.

Each command runs in a process of its own, as a user starts it. Processor time is that of the whole process until it
ends, except for `papa run digits`: there it is the time until its first line, after which the process is ended. Times
include starting Python. The targets are half a second for help and lists, and two seconds for a run; they are
shown as ratios to the import.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch

from _bench import Result, finish, parser

MOST_SECONDS = 0.5
MOST_SECONDS_OF_A_RUN = 2.0
START = "import sys; from papa.cli import main; sys.exit(main(sys.argv[1:]))"
FIRST_LINE = f"""
import resource, os, sys

class FirstLine:
    def write(self, text):
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
        os._exit(0)

sys.stderr = FirstLine()
{START}
"""
QUICK = (
    *("papa --help", "papa ls", "papa show digits", "papa run --help", "papa run digits --help", "papa soup --help"),
    "papa runs .",
)


def seconds_of(code: str, arguments: Sequence[str], folder: str) -> float:
    """The processor time of a new Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_to_the_first_line(arguments: Sequence[str], folder: str) -> float:
    """The processor time until a command writes to standard error."""
    command = [sys.executable, "-c", FIRST_LINE, *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout)


def main() -> None:
    """Run the benchmark."""
    options = parser((__doc__ or "").splitlines()[0])
    options.set_defaults(rounds=3)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    contenders: dict[str, Callable[[str], float]] = {"import torch": partial(seconds_of, "import torch", ())}
    contenders["import papa"] = partial(seconds_of, "import papa", ())
    for command in QUICK:
        contenders[command] = partial(seconds_of, START, command.split()[1:])
    contenders["papa run digits, first line"] = partial(seconds_to_the_first_line, ("run", "digits"))
    best = dict.fromkeys(contenders, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        for counted in [False, *[True] * chosen.rounds]:
            for name, measure in contenders.items():
                seconds = measure(folder)
                best[name] = min(best[name], seconds) if counted else best[name]
    torch_seconds = best["import torch"]
    limits = dict.fromkeys(("papa --help", "papa ls", "papa show digits"), MOST_SECONDS)
    limits["papa run digits, first line"] = MOST_SECONDS_OF_A_RUN
    results = [
        Result(
            name=name,
            seconds=seconds,
            ratio=seconds / torch_seconds,
            target=round(limits[name] / torch_seconds, 3) if name in limits else None,
        )
        for name, seconds in best.items()
    ]
    finish(results, chosen, title="Processor time of commands")


if __name__ == "__main__":
    main()
