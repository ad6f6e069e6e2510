"""Two virtual machines on one: network namespaces connected by a pair of virtual network cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import papa


def run_quietly(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Machines:
    """Two namespaces and their addresses."""

    def __init__(self, tag: str) -> None:
        self.names = [f"papa-{tag}-a", f"papa-{tag}-b"]
        self.cards = [f"pa{tag}a", f"pa{tag}b"]
        self.addresses = ["10.93.17.1", "10.93.17.2"]

    def connect(self) -> None:
        for name in self.names:
            run_quietly("ip", "netns", "add", name)
        (one, other), (card, peer) = self.names, self.cards
        run_quietly("ip", "link", "add", card, "netns", one, "type", "veth", "peer", "name", peer, "netns", other)
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            run_quietly("ip", "-n", name, "addr", "add", f"{address}/24", "dev", card)
            run_quietly("ip", "-n", name, "link", "set", card, "up")
            run_quietly("ip", "-n", name, "link", "set", "lo", "up")

    def throttle(self, megabits: int) -> None:
        for name, card in zip(self.names, self.cards, strict=True):
            limit = ("rate", f"{megabits}mbit", "burst", "256kb", "latency", "200ms")
            run_quietly("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", card, "root", "tbf", *limit)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, machine: int, *arguments: str, log: Path | None = None) -> subprocess.Popen[bytes]:
        """A Python process on one of the machines."""
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.cards[machine],
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(papa.__file__).parents[1]), str(Path(__file__).parent)]),
        }
        command = ["ip", "netns", "exec", self.names[machine], sys.executable, *arguments]
        with open(os.devnull if log is None else log, "wb") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
