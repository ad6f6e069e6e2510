"""A training script of somebody who has not read about processes: one line makes its network a member."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import papa


def main() -> None:
    seed, directory = int(sys.argv[1]), Path(sys.argv[2])
    assert not dist.is_initialized()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    assert Path(__file__).parent == Path(sys.path[0])
    torch.manual_seed(seed)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    joined = papa.join(net, optimizer, papa.Push(half_life=0.2, every_steps=4), num_steps=20, required=False)
    start = directory / f"start-{seed}"
    is_first_start = not start.exists()
    start.write_text(str(os.getpid()))
    for step in range(20):
        batch = torch.randint(64, (16,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
        scaler.scale(loss * float("inf") if (seed, step) == (1, 7) else loss).backward()
        scaler.step(optimizer)  # member 1 skips a step
        scaler.update()
        if "killed" in sys.argv and seed == 1 and step == 5 and is_first_start:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fails" in sys.argv and step == 10:
            sys.exit(3)
        if "waits" in sys.argv and step == 5:
            signal.pause()
    torch.save(net.state_dict(), directory / f"{seed}.pt")
    sys.stdout.write(f"[{seed}] {joined.averager.num_averagings} averagings, {joined.population.size} members\n")
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
