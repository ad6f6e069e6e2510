"""Trains one member of a population in each process of torchrun, with a script that knows of no other process.

    torchrun --nproc-per-node 3 -m papa.member train.py --seed {member}

This module does not import torch: what a script sets before it imports torch has its effect.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MEMBER, MEMBERS, STORE, STORE_RUNS = "PAPA_MEMBER", "PAPA_MEMBERS", "PAPA_STORE", "PAPA_STORE_RUNS"
"""Environment variables of a member's process: its index, the number of members, host and port of the store at which
members meet, and whether another process runs that store."""
WEIGHTS, SOUP = "PAPA_WEIGHTS", "PAPA_SOUP"
"""The directory in which members leave their last weights, and the file for their soup."""
PUBLISHED = "PAPA_PUBLISHED"
"""The directory in which asynchronous members publish their weights."""

TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables by which frameworks take a process for one of several that train one network."""

PARENT_DEATH_SIGNAL = 1
"""Linux's `PR_SET_PDEATHSIG`."""

DESCRIPTION = """Runs a training script in each process of torchrun, with a member of its own. To the script and to
every framework each process is a single one, with one GPU where there are some. In the script, add one line:

  papa.join(model, optimizer, papa.Push(half_life=0.003), num_steps=num_steps)

{member} in the script's arguments is the index of the member, {members} their number. Restarts, output and several
machines are torchrun's: --max-restarts 3 starts all members again when one failed, --redirects 3 and --tee 3 keep the
output of each, --nnodes and --rdzv-endpoint connect machines."""

EXAMPLES = """examples:
  torchrun --nproc-per-node 3 -m papa.member train.py --seed {member} --output-dir out/{member}
  torchrun --nproc-per-node 3 --max-restarts 2 -m papa.member --soup soup.safetensors train.py --seed {member} --resume

several GPUs per member: one torchrun for each member, whose ranks train it together
  torchrun --nproc-per-node 4 -m papa.member --member 0 --members 2 --store HOST:29400 train.py
  torchrun --nproc-per-node 4 -m papa.member --member 1 --members 2 --store HOST:29400 train.py

members that never wait for each other, each started and restarted alone
  torchrun --nproc-per-node 1 --max-restarts 9 -m papa.member --member 0 --members 3 --asynchronous DIR train.py"""


def main(argv: Sequence[str] | None = None) -> None:
    """Make this process a member, and run its script."""
    options = parse(argv)
    if options.soup and options.soup.exists() and not (options.overwrite or options.asynchronous):
        raise SystemExit(f"papa.member: {options.soup} exists: choose another --soup, or add --overwrite to replace it")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    try:
        environment = environment_of(options, os.environ)
    except ValueError as error:
        raise SystemExit(f"papa.member: {error}") from None
    os.environ.clear()
    os.environ.update(environment)
    arguments = [
        argument.replace("{member}", environment[MEMBER]).replace("{members}", environment[MEMBERS])
        for argument in options.arguments
    ]
    run(options.script, arguments, is_module=options.module)
    if SOUP in os.environ:  # papa.join takes it
        raise SystemExit("papa.member: the script did not call papa.join, so there is no soup")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, before those of the script."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 3 -m papa.member",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument(
        "--soup", type=Path, metavar="FILE", help="where the last member to end writes the average of all members"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a soup that is there")
    parser.add_argument(
        "--asynchronous",
        type=Path,
        metavar="DIR",
        help="members go at their own speed, and publish their newest weights in this directory, which all share and "
        "from which they continue",
    )
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS; by default a share of the cores")
    parser.add_argument("--member", type=int, help="the member that all processes of this torchrun train together")
    parser.add_argument("--members", type=int, help="with --member, the number of members")
    parser.add_argument(
        "--store", metavar="HOST:PORT", help="with --member, where members meet: a free port on the machine of member 0"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if (options.member is None) != (options.members is None):
        parser.error("--member needs --members, and --members needs --member")
    if options.member is not None and not 0 <= options.member < options.members:
        parser.error(f"--member is {options.member} of {options.members}, expected 0 to {options.members - 1}")
    if options.member is not None and not (options.store or options.asynchronous):
        parser.error("--member needs --store, where members meet, or --asynchronous")
    if options.member is None and options.store:
        parser.error("--store is for --member: without it, members meet at the store of torchrun")
    return options


def environment_of(
    options: argparse.Namespace, environment: Mapping[str, str], num_gpus: int | None = None
) -> dict[str, str]:
    """The environment of a member's process.

    Args:
        options: those of the command line.
        environment: that of the process as it was started.
        num_gpus: the number of GPUs of this machine; None to look.
    """
    found = dict(environment)
    if options.member is None or options.asynchronous:  # this process alone trains a member
        found = {name: value for name, value in environment.items() if name not in TORCHRUN}
    if options.member is None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ValueError(
                f"{missing[0]} is not set: start it with torchrun --nproc-per-node 3 -m papa.member {options.script}, "
                "or say which member this process trains, with --member and --members"
            )
        found[MEMBER], found[MEMBERS] = environment["RANK"], environment["WORLD_SIZE"]
        num_local = environment.get("LOCAL_WORLD_SIZE", "1")
        host = "127.0.0.1" if num_local == environment["WORLD_SIZE"] else environment["MASTER_ADDR"]
        found[STORE] = f"{host}:{environment['MASTER_PORT']}"
        found[STORE_RUNS] = str(int(environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"))
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        num_gpus = count_gpus() if num_gpus is None else num_gpus
        visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
        if visible:
            devices = visible.split(",")
            found["CUDA_VISIBLE_DEVICES"] = devices[local_rank % len(devices)]
        if environment.get("OMP_NUM_THREADS", "1") == "1":  # what torchrun sets where it is not set
            found["OMP_NUM_THREADS"] = str(max(1, count_cores() // int(num_local)))
    else:
        if options.asynchronous and environment.get("WORLD_SIZE", "1") != "1":
            raise ValueError("an asynchronous member has one process: start it with torchrun --nproc-per-node 1")
        found[MEMBER], found[MEMBERS] = str(options.member), str(options.members)
        if options.store:
            found[STORE], found[STORE_RUNS] = options.store, "0"
    if options.threads is not None:
        found["OMP_NUM_THREADS"] = str(options.threads)
    if options.asynchronous:
        found[PUBLISHED] = str(options.asynchronous.absolute())
    if options.soup:
        soup = options.soup.absolute()
        found[SOUP], found[WEIGHTS] = str(soup), str(soup.with_name(f".{soup.name}.members"))
    return found


def count_gpus() -> int:
    """The number of NVIDIA's GPUs, without torch."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Ask Linux to end this process when torchrun is killed, which could not end it any more."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def run(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script or a module as Python does."""
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif not Path(script).exists():
            raise SystemExit(f"papa.member: there is no {script}")
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error  # as for other errors: what runs at exit leaves no soup of a failed training
            raise


if __name__ == "__main__":
    main()
