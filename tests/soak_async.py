"""Asynchronous members that are slowed, stopped and killed at random: nothing is lost, and nobody waits for them.

    python tests/soak_async.py --minutes 10

Member 0 is left alone. The time that it spends neither computing nor waiting for a free core is what others cost it.
Everything that members publish is read again and again: it must be whole, finite and never of an earlier step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import papa
from papa.distributed.asynchronous import PublishedFiles

NUM_MEMBERS = 4
NUM_STEPS = 10**9
SECONDS_OF_A_PHASE = 15.0
"""Calm and disturbed phases alternate."""
MOST_WAITED = 0.05
"""The share of its time that member 0 may spend waiting for anything but a free core."""
LEAST_THROUGHPUT = 0.9
"""Steps of member 0 per second of its own computing in disturbed phases, against calm ones."""


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 10))


def data(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, labelled by a fixed linear map."""
    inputs = torch.randn(size, 64, generator=torch.Generator().manual_seed(seed))
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs @ teacher).argmax(dim=1)


def times() -> tuple[float, float, float]:
    """Wall time, time of computing and time of waiting for a free core, of this process."""
    numbers = Path("/proc/self/schedstat").read_text().split()
    return time.monotonic(), int(numbers[0]) / 1e9, int(numbers[1]) / 1e9


def train(directory: Path, member: int) -> None:
    """One member, until it is told to end."""
    torch.set_num_threads(1)
    torch.manual_seed(member)
    net = make_network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    rule = papa.Push(half_life_steps=100, every_steps=10)
    joined = papa.join(net, optimizer, rule, num_steps=NUM_STEPS, asynchronous=True)
    last = 0.0
    for step in range(joined.num_steps_taken, NUM_STEPS):
        inputs, targets = data(64, NUM_MEMBERS * (step + 1) + member)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        if random.random() < 1e-4:
            loss = loss * float("nan")  # members may diverge, too
        loss.backward()
        optimizer.step()
        if time.monotonic() > last + 0.1:
            last = time.monotonic()
            (directory / f".state-{member}").write_text(json.dumps([os.getpid(), step, *times()]))
            os.replace(directory / f".state-{member}", directory / f"state-{member}")
            if (directory / "end").exists():
                break


def state_of(directory: Path, member: int) -> list[float] | None:
    """Process, step and times that a member reported last."""
    with contextlib.suppress(FileNotFoundError):
        found: list[float] = json.loads((directory / f"state-{member}").read_text())
        return found
    return None


class Soak:
    """Disturbs members and reads what they publish.

    Args:
        directory: for everything.
        seed: of the disturbances.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.generator = directory, random.Random(seed)
        self.files = PublishedFiles(directory / "published")
        self.counts = collections.Counter[str]()
        self.steps = dict.fromkeys(range(NUM_MEMBERS), 0)
        self.failures: list[str] = []
        self.rates: dict[str, list[float]] = {"calm": [], "disturbed": []}

    def check(self) -> None:
        """Read all that is published."""
        for member in range(NUM_MEMBERS):
            found = self.files.read(member)
            if found is None:
                self.failures.append(f"the weights of member {member} are gone")
                continue
            tensors, metadata = found
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                self.failures.append(f"member {member} published weights that are not finite")
            if int(metadata["step"]) < self.steps[member]:
                self.failures.append(f"member {member} went back to step {metadata['step']} of {self.steps[member]}")
            self.steps[member] = int(metadata["step"])
            self.counts["publications read"] += 1

    def send(self, member: int, number: int) -> bool:
        """Send a signal to a member, unless it has ended."""
        state = state_of(self.directory, member)
        with contextlib.suppress(OSError):
            assert state is not None
            # Another program may have the number of a process that has ended.
            if str(self.directory) in Path(f"/proc/{int(state[0])}/cmdline").read_text():
                os.kill(int(state[0]), number)
                return True
        return False

    def disturb(self) -> None:
        """Slow, stop or kill one or two members."""
        victims = self.generator.sample(range(1, NUM_MEMBERS), self.generator.choice([1, 1, 2]))
        kind = self.generator.choice(["slowed", "stopped", "killed"])
        if kind == "killed":
            self.counts[kind] += sum([self.send(member, signal.SIGKILL) for member in victims])
            time.sleep(self.generator.uniform(0.0, 3.0))
            return
        self.counts[kind] += len(victims)
        seconds = self.generator.uniform(0.5, 8.0)
        for _ in range(1 if kind == "stopped" else int(seconds / 0.15)):
            for member in victims:
                self.send(member, signal.SIGSTOP)
            time.sleep(seconds if kind == "stopped" else 0.1)
            for member in victims:
                self.send(member, signal.SIGCONT)
            time.sleep(0.05)

    def phase(self, kind: str) -> None:
        """A calm or a disturbed phase; notes the steps of member 0 per second of its computing."""
        before, end = state_of(self.directory, 0), time.monotonic() + SECONDS_OF_A_PHASE
        while time.monotonic() < end:
            if kind == "disturbed":
                self.disturb()
            else:
                time.sleep(0.5)
            self.check()
        after = state_of(self.directory, 0)
        assert before is not None
        assert after is not None
        self.rates[kind].append((after[1] - before[1]) / max(1e-9, after[3] - before[3]))


def loss_of(state: dict[str, torch.Tensor]) -> float:
    """The loss of a network on all data."""
    net = make_network()
    net.load_state_dict(state)
    inputs, targets = data(2000, 0)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net.eval()(inputs), targets))


def run(minutes: float, seed: int) -> tuple[dict[str, str], list[str]]:
    """The whole soak; returns figures and failures."""
    with tempfile.TemporaryDirectory(prefix="papa-soak-", dir="/dev/shm") as temporary:
        directory = Path(temporary)
        soup, log = directory / "soup.safetensors", (directory / "log").open("w")
        launchers = []
        for member in range(NUM_MEMBERS):  # one torchrun for each: it restarts its own member only
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1000000"]
            options = ["--member", str(member), "--members", str(NUM_MEMBERS), "--soup", str(soup)]
            options += ["--asynchronous", str(directory / "published")]
            script = [str(Path(__file__).resolve()), "--train", str(directory), "{member}"]
            command = [sys.executable, "-m", *torchrun, "--monitor-interval", "0.1", "-m", "papa.member"]
            launchers.append(subprocess.Popen([*command, *options, *script], stdout=log, stderr=log))
        soak = Soak(directory, seed)
        while any(state_of(directory, member) is None for member in range(NUM_MEMBERS)):
            time.sleep(0.1)
        first, end = state_of(directory, 0), time.monotonic() + 60 * minutes
        assert first is not None
        while time.monotonic() < end and all(one.poll() is None for one in launchers) and len(soak.failures) < 10:
            soak.phase("calm")
            soak.phase("disturbed")
        last = state_of(directory, 0)
        assert last is not None
        (directory / "end").touch()
        code = max(launcher.wait() for launcher in launchers)
        soak.check()
        return report(soak, first, last, code, (directory / "log").read_text(), soup)


def report(
    soak: Soak, first: list[float], last: list[float], code: int, log: str, soup: Path
) -> tuple[dict[str, str], list[str]]:
    """The figures and the failures."""
    failures = soak.failures
    if code != 0 or "Error" in log:
        failures.append(f"exit code {code}\n{log[-3000:]}")
    if int(first[0]) != int(last[0]):
        failures.append("member 0 was started again, though nobody disturbed it")
    wall, computing, queueing = (after - before for before, after in zip(first[2:], last[2:], strict=True))
    waited = 1.0 - (computing + queueing) / wall
    if waited > MOST_WAITED:
        failures.append(f"member 0 waited {waited:.1%} of the time")
    rates = {kind: statistics.median(found) for kind, found in soak.rates.items()}
    if rates["disturbed"] < LEAST_THROUGHPUT * rates["calm"]:
        failures.append("member 0 took fewer steps per second of computing while others were disturbed")
    states = [load_file(soak.files.path(member)) for member in range(NUM_MEMBERS)]
    expected, found = papa.average_soup(states), load_file(soup)
    if any(not torch.allclose(found[name], expected[name].to(found[name].dtype)) for name in expected):
        failures.append("the soup is not the mean of the newest weights of all members")
    counts = soak.counts
    restarts = log.count("exitcode: -9")
    if restarts != counts["killed"]:
        failures.append(f"{counts['killed']} members were killed, and {restarts} started again")
    return {
        "minutes": f"{wall / 60:.1f}",
        "members": str(NUM_MEMBERS),
        "disturbances": ", ".join(f"{name}: {number}" for name, number in sorted(counts.items())),
        "members started again": str(restarts),
        "steps of each member": ", ".join(str(step) for step in soak.steps.values()),
        "time that member 0 waited": f"{waited:.2%}",
        "steps of member 0 per second of computing": f"{rates['calm']:.0f} calm, {rates['disturbed']:.0f} disturbed "
        f"({rates['disturbed'] / rates['calm']:.2f})",
        "loss of a random network, the soup and members": f"{loss_of(dict(make_network().state_dict())):.3f}, "
        f"{loss_of(found):.3f}, " + " ".join(f"{loss_of(state):.3f}" for state in states),
    }, failures


def main() -> None:
    """Run the soak, or one member of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        train(Path(chosen.train[0]), int(chosen.train[1]))
        return
    figures, failures = run(chosen.minutes, chosen.seed)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    figures = {
        "date": f"{today}, {os.cpu_count()} processors, {platform.system()}, torch {torch.__version__}",
        **figures,
    }
    for name, value in figures.items():
        sys.stdout.write(f"{name:45} {value}\n")
    sys.stdout.write("".join(f"FAILED: {failure}\n" for failure in failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
