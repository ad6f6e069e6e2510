"""Files that papa reads, altered at random: what comes out is a `PapaError` or a clean success.

Shared by the tests of altered files, which alter hundreds, and the soak test, which alters a hundred thousand.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from checkpoint_cases import expected_of, load_whole, save, trained_member
from files.test_weights import save_sharded
from lab.recipes.test_smoke import smoke_data_config, write_data
from papa.errors import PapaError
from papa.files import open_all, open_weights, soup_files
from papa.lab.config import Config
from papa.lab.data.cache import cache_folder
from papa.lab.data.table import SKLEARN
from papa.lab.domains import load_domain
from papa.lab.models.weights import read_state_dict
from papa.lab.recipes import RECIPES, find
from papa.lab.report.page import compare_page, run_page
from papa.lab.runs import RunDirectory
from papa.storage.tensors import save_network
from papa.training.checkpoints import with_digest
from report_samples import make_full_result

JUNK: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 0.5, -1e300, "", "x", "../x", "/etc/passwd", "NaN", "\x00"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, "F32", "member-001.safetensors", [0, 2**62], [2**40, 2**40]),
    *("<script>alert(1)</script>", "\x1b[31mred\x1b[0m"),
]


def mutate_value(value: Any, generator: random.Random) -> Any:
    """One place of a JSON value replaced, removed, doubled or added to."""
    value = copy.deepcopy(value)
    spots: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else []
        for key in keys:
            spots.append((part, key))
            walk(part[key])

    walk(value)
    if not spots:
        return generator.choice(JUNK)
    holder, key = generator.choice(spots)
    action = generator.random()
    if action < 0.2:
        del holder[key]
    elif action < 0.3 and isinstance(holder, dict):
        holder[generator.choice(["../x", "x", "step", "", "0.step", "optimizer"])] = generator.choice(JUNK)
    else:
        holder[key] = generator.choice(JUNK)
    return value


def mutate_bytes(content: bytes, generator: random.Random) -> bytes:
    """Some bytes flipped, removed, repeated or put in."""
    data = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(data) + 1)
        action = generator.randrange(5)
        if action == 0 and at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        elif action == 1:
            del data[at : at + generator.randint(1, 40)]
        elif action == 2:
            data[at:at] = data[at : at + generator.randint(1, 40)]
        elif action == 3:
            data[at:at] = generator.randbytes(generator.randint(1, 9))
        else:
            data[at:] = b""
        if not data:
            data = bytearray(b" ")
    return bytes(data)


def refused(action: Callable[[], object]) -> bool:
    """Whether it raised a `PapaError`; any other error fails the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except PapaError:
        return True
    return False


@dataclass(frozen=True)
class Readable:
    """Files, and what papa does with them."""

    files: list[Path]
    read: Callable[[], object]
    seal: Callable[[], None] = lambda: None
    """Makes the digests of other files match the altered one."""


def alter(readable: Readable, generator: random.Random) -> Iterator[bool]:
    """Alter one file after the other, without end, and put it back; yields whether it was refused."""
    contents = {file: file.read_bytes() for file in readable.files}
    assert not refused(readable.read)  # as it was
    while True:
        file = generator.choice(readable.files)
        content = contents[file]
        altered = mutate_bytes(content, generator)
        if file.suffix == ".json" and generator.random() < 0.5:
            altered = json.dumps(mutate_value(json.loads(content), generator)).encode()
        file.write_bytes(altered)
        readable.seal()
        yield refused(readable.read)
        file.write_bytes(content)


def checkpoint(folder: Path, *, sealed: bool = False) -> Readable:
    """A checkpoint; `sealed`: altered by somebody who knows how its digests are made."""
    members = [trained_member(torch.optim.AdamW, seed=0)]
    path = save(folder, 1, members, state={"note": [1, {"deep": 2.5}]})
    expected, manifest, tensors = expected_of(members), path / "manifest.json", path / "member-000.safetensors"

    def seal() -> None:
        content = tensors.read_bytes()
        try:
            value = json.loads(manifest.read_bytes())
            value["files"][tensors.name].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            manifest.write_text(json.dumps(with_digest(value)))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass

    original = manifest.read_bytes()

    def read() -> None:
        try:
            load_whole(path, expected, num_members=1)
        finally:
            manifest.write_bytes(original)

    files = [manifest, tensors]
    return Readable(files, read, seal) if sealed else Readable(files, read)


def soup(folder: Path) -> Readable:
    """Files that are averaged into another."""
    folder.mkdir()
    files = [folder / f"{seed}.safetensors" for seed in range(2)]
    for seed, file in enumerate(files):
        save_network(file, trained_member(torch.optim.SGD, seed=seed)[0])
    return Readable(files, lambda: soup_files(files, folder / "soup.safetensors", overwrite=True))


def torch_file(folder: Path) -> Readable:
    """A file that `torch.save` wrote."""
    folder.mkdir()
    file = folder / "net.pt"
    torch.save(trained_member(torch.optim.SGD, seed=0)[0].state_dict(), file)
    return Readable([file], lambda: read_state_dict(file))


def distributed_checkpoint(folder: Path) -> Readable:
    """A directory that `torch.distributed.checkpoint` wrote."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is saved by one process
        dcp.save({"model": trained_member(torch.optim.SGD, seed=0)[0].state_dict()}, checkpoint_id=folder, no_dist=True)

    def read() -> None:
        weights = open_weights(folder)
        for name in weights.tensors:
            weights.read(name)

    return Readable([folder / ".metadata", folder / "__0_0.distcp"], read)


def sharded(folder: Path) -> Readable:
    """Weights in several files, and the index that names them."""
    index = save_sharded({f"layer{number}.weight": torch.randn(3, 4) for number in range(4)}, folder)

    def read() -> None:
        for weights in open_all([index]):
            for name in weights.tensors:
                weights.read(name)

    return Readable([index, *sorted(folder.glob("*.safetensors"))], read)


def configuration(folder: Path) -> Readable:
    """The configuration of a run."""
    run = RunDirectory(folder)
    run.create(find("digits").config().to_json())
    return Readable([run.config], lambda: Config.from_json(run.read_config()))


def run_directory(folder: Path) -> Readable:
    """The files of a run, of which a report is made."""
    run = RunDirectory(folder)
    config = find("digits").config()
    run.create(config.to_json())
    for step in range(5):
        run.log({"event": "average", "step": step, "rule": "Push", "distance_before": 0.5})
    run.result.write_text(json.dumps({**make_full_result(), "nonfinite": None}))

    def read() -> None:
        Config.from_json(run.read_config())
        result = run.read_result_so_far()
        page = run_page(result, list(run.read_metrics())) + compare_page([result])
        assert "<script" not in page

    return Readable([run.config, run.metrics, run.result], read)


def data_set(name: str, folder: Path) -> Readable:
    """The data of a recipe: images, label images, arrays or texts."""
    folder.mkdir()
    write_data(folder)
    config = smoke_data_config(RECIPES[name], folder)
    native = {"fashion-mnist": "FashionMNIST"}.get(config.data.name)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.relative_to(folder).parts[0].partition(".")[0] in (config.data.name, native)
    )

    root = Path(config.data.root)

    def read() -> None:
        for cached in (root, root / config.data.name):
            shutil.rmtree(cache_folder(cached), ignore_errors=True)
        data = load_domain(config).split()
        for part in (data.train, data.test):
            assert part is not None
            part.batch(torch.zeros(1, dtype=torch.int64, device="cpu"))

    return Readable(files, read)


def kinds() -> dict[str, Callable[[Path], Readable]]:
    """Every kind of file that papa reads; data sets come from the recipes."""
    found: dict[str, Callable[[Path], Readable]] = {
        "checkpoint": checkpoint,
        "checkpoint with matching digests": lambda folder: checkpoint(folder, sealed=True),
        "soup": soup,
        "PyTorch file": torch_file,
        "distributed checkpoint": distributed_checkpoint,
        "sharded index": sharded,
        "configuration": configuration,
        "run directory": run_directory,
    }
    recipes = {recipe.config("smoke").data.name: name for name, recipe in RECIPES.items()}
    for name in (recipes[data] for data in recipes if data not in ("digits", *SKLEARN)):  # which come with scikit-learn
        found[f"data of {name}"] = lambda folder, name=name: data_set(name, folder)  # type: ignore[misc]
    return found
