"""The cost of averaging four files, against moving the same bytes, and against common scripts.

The baseline reads every byte of the four files through one small buffer and writes as many bytes as one file has; no
averaging can do less. All contenders flush the result to disk. Besides `papa.soup_files`:

- all at once: load every file with safetensors, average in a dict, save. The usual script.
- one after the other: add up one state dict after the other in a dict of float64 sums, divide and save, like the script
  `avg_checkpoints.py` of timm, which is not part of the installed package.

Memory is the peak resident memory of the process above that before the contender ran.

If mergekit is installed (its command `mergekit-yaml`, or what `--mergekit` names), both merge the same four sharded
networks by the same configs, each as a command in a process of its own: time and peak memory are those of the process.
Numbers are compared on small networks. On tensors of millions of numbers two methods were seen to differ by more than
1e-6: Model Stock by 1.5e-6, probably for mergekit's sums in float32, and TIES in single numbers, probably where several
have exactly the magnitude at which it begins to drop.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
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


LARGE, SMALL = (768, 4000), (48, 100)
"""The width and vocabulary of networks that are timed, and of those whose numbers are compared."""
NUM_LAYERS, NUM_SHARDS = 4, 4
MOST_DIFFERENCE = 1e-6
WEIGHTS = {"parameters": {"weight": 0.4, "density": 0.3}}
MERGES = {
    "linear": {"parameters": {"weight": 1.0}},
    "slerp": {"parameters": {"t": [{"filter": "mlp", "value": [0.2, 0.8]}, {"value": 0.5}]}},
    "task_arithmetic": WEIGHTS,
    "ties": WEIGHTS,
    "dare_ties": {"parameters": {"weight": 0.4, "density": 1.0}},
    "model_stock": {},
}
"""DARE drops at random, by other numbers in each tool: at density 1 it drops nothing."""


def write_network(folder: Path, tensors: dict[str, Tensor]) -> None:
    """A network of the Llama family as hubs publish it: shards, an index and a config."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(NUM_SHARDS):
        file = f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        shard = dict(list(tensors.items())[number::NUM_SHARDS])
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    vocabulary, width = tensors["lm_head.weight"].shape
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width},
        **{"intermediate_size": 2 * width, "num_hidden_layers": NUM_LAYERS, "vocab_size": vocabulary},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "torch_dtype": "float32"},
    }
    (folder / "config.json").write_text(json.dumps(config))


def llama_shapes(width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the network."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(NUM_LAYERS):
        start = f"model.layers.{layer}."
        shapes |= {f"{start}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{start}mlp.{name}_proj.weight": (2 * width, width) for name in ("gate", "up")}
        shapes |= {f"{start}mlp.down_proj.weight": (width, 2 * width)}
        shapes |= {f"{start}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return {**shapes, "model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def write_networks(folder: Path, size: tuple[int, int]) -> list[Path]:
    """A base, and three networks that moved from it, in part in the same direction."""
    generator = torch.Generator().manual_seed(0)
    base = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in llama_shapes(*size).items()}
    common = {name: 0.005 * torch.randn(value.shape, generator=generator) for name, value in base.items()}
    write_network(folder / "base", base)
    for number in range(3):
        own = {
            name: value + common[name] + 0.01 * torch.randn(value.shape, generator=generator)
            for name, value in base.items()
        }
        write_network(folder / f"model-{number}", own)
    return [folder / "base", *(folder / f"model-{number}" for number in range(3))]


def peak_of(pid: int) -> float:
    """The peak memory of a running process, in megabytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def run_command(command: list[str]) -> tuple[float, float]:
    """The seconds that a command takes, and its peak memory in megabytes."""
    start, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.02)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode()}")
    return time.perf_counter() - start, peak


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of any number in two networks."""
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def merge_by_both(mergekit: str, folder: Path, method: str, networks: list[Path]) -> dict[str, tuple[float, float]]:
    """Seconds and megabytes of each tool; the results are in folders of their names."""
    base, *others = networks
    models = [{"model": str(path)} for path in (others[:1] if method == "slerp" else others)]
    source = {"merge_method": method, "models": models, **MERGES[method]}
    source |= {} if method == "linear" else {"base_model": str(base)}
    config = folder / f"{method}.yml"
    config.write_text(json.dumps(source))  # JSON is YAML
    commands = {
        "papa soup": [sys.executable, "-m", "papa", "soup", "--config", str(config), "-o"],
        "mergekit": [mergekit, "--no-copy-tokenizer", str(config)],
    }
    for tool in commands:
        shutil.rmtree(folder / tool, ignore_errors=True)
    return {tool: run_command([*command, str(folder / tool)]) for tool, command in commands.items()}


def beside_mergekit(mergekit: str, folder: Path, rounds: int) -> list[Result]:
    """Time, memory and differences of merges by both."""
    small, large = write_networks(folder / "small", SMALL), write_networks(folder / "large", LARGE)
    results = []
    for method in MERGES:
        merge_by_both(mergekit, folder, method, small)
        difference = largest_difference(folder / "papa soup", folder / "mergekit")
        runs = [merge_by_both(mergekit, folder, method, large) for _ in range(rounds)]
        seconds = {tool: min(run[tool][0] for run in runs) for tool in runs[0]}
        for tool in seconds:
            name = f"{method} by {tool}"
            results.append(Result(name=name, seconds=seconds[tool], ratio=seconds[tool] / seconds["mergekit"]))
            results.append(Result(name=f"{name}: peak memory", megabytes=max(run[tool][1] for run in runs)))
        name = f"{method}: largest difference, as a share of {MOST_DIFFERENCE:g}"
        results.append(Result(name=name, ratio=difference / MOST_DIFFERENCE, target=1.0, note=f"{difference:.1e}"))
    return results


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--mergekit", default=shutil.which("mergekit-yaml"), help="the command mergekit-yaml")
    options = arguments.parse_args()
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
            "papa.soup_files, full digests": lambda: papa.soup_files(files, out, overwrite=True, full_digests=True),
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
    if options.mergekit:
        with tempfile.TemporaryDirectory() as folder:
            results += beside_mergekit(options.mergekit, Path(folder), options.rounds)
    finish(results, options, title=f"Averaging {NUM_FILES} files of {FILE_BYTES // 10**6} MB")


if __name__ == "__main__":
    main()
