"""A training script of an asynchronous member, which kills or stops itself when told to, as in `1=killed 2=stopped`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import papa

NUM_STEPS = 40


def wait_for(path: Path) -> int:
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return int(path.read_text())


def main() -> None:
    directory, fates = Path(sys.argv[1]), dict(fate.split("=") for fate in sys.argv[2:])
    member = int(os.environ["PAPA_MEMBER"])
    is_first_start = not (directory / f"start-{member}").exists()
    (directory / f"start-{member}").touch()
    torch.manual_seed(member)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averagings: list[Any] = []
    joined = papa.join(
        net,
        optimizer,
        papa.Push(alpha=0.9, every_steps=2),
        num_steps=NUM_STEPS,
        asynchronous=True,
        max_staleness=8,
        on_averaging=averagings.append,
    )
    sys.stdout.write(f"begins at step {joined.num_steps_taken}\n")
    fate = fates.get(str(member)) if is_first_start else None
    for step in range(joined.num_steps_taken, NUM_STEPS):
        optimizer.zero_grad()
        net(inputs[torch.randint(64, (16,))]).square().mean().backward()
        optimizer.step()
        if step == 5 and fate is not None:
            (directory / f"{fate}-{member}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP if fate == "stopped" else signal.SIGKILL)
        if step == 5 and member == 0:
            for other, its_fate in fates.items():
                wait_for(directory / f"{its_fate}-{other}")
    torch.save(net.state_dict(), directory / f"{member}.pt")
    (directory / f"done-{member}").write_text("1")
    sys.stdout.write(f"counted {averagings[-1].counted}\n")
    for other, its_fate in fates.items() if member == 0 else ():
        if its_fate == "killed":
            wait_for(directory / f"done-{other}")
    for other, its_fate in fates.items() if member == 0 else ():
        if its_fate == "stopped":  # nobody waited for it, and it goes on now
            os.kill(wait_for(directory / f"stopped-{other}"), signal.SIGCONT)


if __name__ == "__main__":
    main()
