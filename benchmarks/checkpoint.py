"""The cost of a checkpoint: the pause in training against a plain copy, and its bandwidth against plain writing.

Five ResNet-18 of torchvision with SGD and momentum, one thread, as in a CPU worker. The pause is the time of
`CheckpointWriter.save` while nothing is being written. It copies the weights and the momentum, so a plain copy of both
is the baseline; a copy of the weights alone is shown too. Bandwidth is measured from `save` to a complete and flushed
checkpoint, against writing the same bytes to one file per member and flushing them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchvision.models import resnet18

from _bench import Result, best_times, finish, parser
from papa.core.group import LocalGroup
from papa.training.checkpoints import CheckpointWriter, member_state

NUM_MEMBERS = 5
MOST_TIMES_A_COPY = 1.5
MOST_TIMES_WRITING_AND_DIGESTING = 1.4


def make_states() -> dict[int, Any]:
    """The state of each member after one step."""
    states = {}
    for member in range(NUM_MEMBERS):
        net = resnet18()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        states[member] = member_state(net, optimizer)
    return states


def measure(states: dict[int, Any], folder: Path, rounds: int) -> dict[str, float]:
    """The best time of each contender over some rounds."""
    contents = [content for content, _ in states.values()]
    tensors = [tensor for content in contents for tensor in content.values()]
    weights = [tensor for content in contents for name, tensor in content.items() if name.startswith("model.")]
    copies, weight_copies = ([torch.empty_like(tensor) for tensor in part] for part in (tensors, weights))
    writer = CheckpointWriter(folder, group=LocalGroup(), num_members=NUM_MEMBERS, keep=1)
    steps, pauses = itertools.count(), []

    def save() -> None:
        begin = time.perf_counter()
        writer.save(next(steps), states, {}, lambda: None)
        pauses.append(time.perf_counter() - begin)
        assert writer.settle() is None

    contenders = {
        "copy of the weights": lambda: _copy_(weight_copies, weights),
        "copy of the state": lambda: _copy_(copies, tensors),
        "checkpoint": save,
        "plain writing": lambda: [_write(folder / f"plain-{index}", part) for index, part in enumerate(contents)],
        "digest": lambda: [_digest(part) for part in contents],
    }
    best = best_times(contenders, rounds=rounds)
    return {**best, "pause": min(pauses[1:])}  # the first save allocates the buffers


def main() -> None:
    """Run the benchmark."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--folder", type=Path, help="folder to write to; a temporary one by default")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = make_states()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        best = measure(states, Path(folder), chosen.rounds)
    copy_seconds, write_seconds = best["copy of the state"], best["plain writing"]
    results = [
        Result(name="copy of the weights", seconds=best["copy of the weights"]),
        Result(name="copy of weights and momentum", seconds=copy_seconds, ratio=1.0),
        Result(
            name="pause of a checkpoint",
            seconds=best["pause"],
            ratio=best["pause"] / copy_seconds,
            target=MOST_TIMES_A_COPY,
        ),
        Result(name="writing the same bytes", seconds=write_seconds, ratio=1.0),
        Result(name="digesting the same bytes", seconds=best["digest"], ratio=best["digest"] / write_seconds),
        Result(
            name="a checkpoint, until it is whole",
            seconds=best["checkpoint"],
            ratio=best["checkpoint"] / write_seconds,
        ),
        Result(
            name="... against writing and digesting",
            ratio=best["checkpoint"] / (write_seconds + best["digest"]),
            target=MOST_TIMES_WRITING_AND_DIGESTING,
        ),
    ]
    num_bytes = sum(tensor.nbytes for content, _ in states.values() for tensor in content.values())
    finish(results, chosen, title=f"Checkpoints of {NUM_MEMBERS} members, {num_bytes / 1e6:.0f} MB")


def _copy_(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write(path: Path, content: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in content.values():
            file.write(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def _digest(content: Mapping[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in content.values():
        sha.update(_bytes_of(tensor))
    return sha.hexdigest()


if __name__ == "__main__":
    main()
