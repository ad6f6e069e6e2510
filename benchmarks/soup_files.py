"""The cost of averaging four files, against moving the same bytes, and against common scripts.

The baseline reads every byte of the four files through one small buffer and writes as many bytes as one file has; no
averaging can do less. All contenders flush the result to disk. Besides `papa.soup_files`:

- all at once: load every file with safetensors, average in a dict, save. The usual script.
- one after the other: add up one state dict after the other in a dict of float64 sums, divide and save, like the script
  `avg_checkpoints.py` of timm, which is not part of the installed package.

Memory is the peak resident memory of the process above that before the contender ran.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import papa
from _bench import Result, best_times, finish, parser, peak_extra_megabytes

NUM_FILES = 4
FILE_BYTES = 500_000_000
LAYER = (4096, 4096)
BUFFER_BYTES = 1 << 20
MOST_TIMES_MOVING_THE_BYTES = 1.6
MOST_MEGABYTES = 2 * LAYER[0] * LAYER[1] * 4 / 1e6
"""Twice the largest tensor."""


def state(seed: int) -> dict[str, Tensor]:
    """A network of about 500 MB: large square layers, each with a bias and a counter."""
    generator = torch.Generator().manual_seed(seed)
    num_layers = FILE_BYTES // (4 * LAYER[0] * LAYER[1])
    tensors: dict[str, Tensor] = {}
    for layer in range(num_layers):
        tensors[f"layers.{layer}.weight"] = torch.randn(LAYER, generator=generator)
        tensors[f"layers.{layer}.bias"] = torch.randn(LAYER[0], generator=generator)
        tensors[f"layers.{layer}.count"] = torch.tensor(seed)
    rest = FILE_BYTES // 4 - sum(tensor.numel() for tensor in tensors.values())
    return {**tensors, "head": torch.randn(rest, generator=generator)}


def flush(path: Path) -> None:
    """Wait until a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def move_the_bytes(files: list[Path], out: Path) -> None:
    """Read all files, and write as many bytes as one of them has."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as reader:
            while reader.readinto(buffer):
                pass
    with out.open("wb", buffering=0) as writer:
        for start in range(0, FILE_BYTES, BUFFER_BYTES):
            writer.write(buffer[: min(BUFFER_BYTES, FILE_BYTES - start)])
        os.fsync(writer.fileno())


def average_all_at_once(files: list[Path], out: Path) -> None:
    """Load everything, average in a dict, save."""
    states = [load_file(file) for file in files]
    mean = {
        name: sum(one[name] for one in states) / len(states) if first.is_floating_point() else first
        for name, first in states[0].items()
    }
    save_file(mean, out)
    flush(out)


def average_one_after_the_other(files: list[Path], out: Path) -> None:
    """Add up state dicts in float64, divide, save."""
    sums: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            if name in sums:
                sums[name] += tensor.to(torch.float64)
            else:
                sums[name] = tensor.to(torch.float64)
    save_file({name: (total / len(files)).to(torch.float32) for name, total in sums.items()}, out)
    flush(out)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.safetensors" for number in range(NUM_FILES)]
        for number, file in enumerate(files):
            save_file(state(number), file)
        out = Path(folder) / "soup.safetensors"
        baseline = "moving the bytes"
        contenders = {
            baseline: lambda: move_the_bytes(files, Path(folder) / "moved"),
            "papa.soup_files": lambda: papa.soup_files(files, out, overwrite=True),
            "all at once, in a dict": lambda: average_all_at_once(files, Path(folder) / "dict.safetensors"),
            "one after the other, in float64": lambda: average_one_after_the_other(
                files, Path(folder) / "sums.safetensors"
            ),
        }
        seconds = best_times(contenders, rounds=options.rounds)
        results = [
            Result(
                name=name,
                seconds=best,
                ratio=best / seconds[baseline],
                target=MOST_TIMES_MOVING_THE_BYTES if name == "papa.soup_files" else None,
            )
            for name, best in seconds.items()
        ]
        results += [
            Result(
                name=f"{name}: peak extra memory",
                megabytes=peak_extra_megabytes(run, maps_files=True),
                target=MOST_MEGABYTES if name == "papa.soup_files" else None,
            )
            for name, run in contenders.items()
        ]
    finish(results, options, title=f"Averaging {NUM_FILES} files of {FILE_BYTES // 10**6} MB")


if __name__ == "__main__":
    main()
