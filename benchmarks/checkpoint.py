"""The cost of a checkpoint: the pause in training against a plain copy, and its bandwidth against plain writing.

Five ResNet-18 of torchvision with SGD and momentum, one thread, as in a CPU worker. The pause is the time of
`CheckpointWriter.save` while nothing is being written. It copies the weights and the momentum, so a plain copy of both
is the baseline; a copy of the weights alone is shown too. Bandwidth is measured from `save` to a complete and flushed
checkpoint, against writing the same bytes to one file per member and flushing them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

import torch
from torchvision.models import resnet18

from _bench import Result, finish, parser
from papa.checkpoint import CheckpointWriter, member_state
from papa.group import LocalGroup

NUM_MEMBERS = 5
MOST_TIMES_A_COPY = 1.5
MOST_TIMES_WRITING_AND_DIGESTING = 1.4


def main() -> None:
    """Run the benchmark."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--folder", type=Path, help="folder to write to; a temporary one by default")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = {}
    for member in range(NUM_MEMBERS):
        net = resnet18()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        states[member] = member_state(net, optimizer)
    tensors = [tensor for content, _ in states.values() for tensor in content.values()]
    weights = [t for content, _ in states.values() for name, t in content.items() if name.startswith("model.")]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    weight_copies = [torch.empty_like(tensor) for tensor in weights]
    best = dict.fromkeys(
        ("copy of the weights", "copy of the state", "pause", "plain writing", "digest", "checkpoint"), float("inf")
    )

    def record(name: str, begin: float) -> None:
        best[name] = min(best[name], time.perf_counter() - begin)

    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        writer = CheckpointWriter(Path(folder), group=LocalGroup(), num_members=NUM_MEMBERS, keep=1)
        for number in range(chosen.rounds + 1):  # the first round allocates the buffers, and is not counted
            if number == 1:
                best = dict.fromkeys(best, float("inf"))
            begin = time.perf_counter()
            for copy, tensor in zip(weight_copies, weights, strict=True):
                copy.copy_(tensor)
            record("copy of the weights", begin)
            begin = time.perf_counter()
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            record("copy of the state", begin)
            begin = time.perf_counter()
            writer.save(number, states, {}, lambda: None)
            record("pause", begin)
            assert writer.settle() is None
            record("checkpoint", begin)
            begin = time.perf_counter()
            for member, (content, _) in states.items():
                _write(Path(folder) / f"plain-{member}", list(content.values()))
            record("plain writing", begin)
            begin = time.perf_counter()
            for content, _ in states.values():
                sha = hashlib.sha256()
                for tensor in content.values():
                    sha.update(_bytes_of(tensor))
            record("digest", begin)
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
    finish(results, chosen, title=f"Checkpoints of {NUM_MEMBERS} members, {num_bytes / 1e6:.0f} MB")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write(path: Path, tensors: list[torch.Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
