"""Soups from files: the laws of averaging, what is refused, and that an output is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import papa
from helpers import NETWORKS, assert_close, make_network
from papa.errors import ConfigError, PapaError, SoupError
from papa.files import average, digest_of, open_weights
from papa.files.soup import parse_size

State = dict[str, Tensor]


def save(state: Mapping[str, Tensor], path: Path) -> Path:
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, path)
    return path


def states(kind: str = "conv_batch_norm", size: int = 3) -> list[State]:
    return [make_network(kind, seed).state_dict() for seed in range(size)]


def save_all(some: list[State], folder: Path) -> list[Path]:
    return [save(state, folder / f"{index}.safetensors") for index, state in enumerate(some)]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind != "oddities"])
def test_files_average_as_networks_do(kind: str, weights: list[float] | None, tmp_path: Path) -> None:
    some = states(kind)
    soup = papa.soup_files(save_all(some, tmp_path), tmp_path / "soup.safetensors", weights)
    found, expected = load_file(soup.path), papa.average_soup(some, weights)
    assert found.keys() == expected.keys()
    first = some[1] if weights == [0.0, 1.0, 0.0] else some[0]
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        if tensor.is_floating_point():
            assert_close(tensor, expected[name].double())
        else:
            assert torch.equal(tensor, first[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, average.BLOCK, 2 * average.BLOCK + 3])
def test_blocks_do_not_show(tmp_path: Path, numel: int, dtype: torch.dtype) -> None:
    weights = [0.5, 0.3, 0.2]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    tensors = [torch.randn(numel, dtype=wide).to(dtype) for _ in weights]
    soup = papa.soup_files(
        save_all([{"w": tensor} for tensor in tensors], tmp_path), tmp_path / "soup.safetensors", weights
    )
    expected = sum(weight * tensor.to(wide) for weight, tensor in zip(weights, tensors, strict=True))
    assert_close(load_file(soup.path)["w"], expected)


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    # In bfloat16 the sum of 1 and 2^-8 a hundred times over is 1; in float32 it is not.
    some = [{"w": torch.ones(1).bfloat16()}, *[{"w": torch.full((1,), 1.0 + 2.0**-7).bfloat16()}] * 3]
    soup = papa.soup_files(save_all(some, tmp_path), tmp_path / "soup.safetensors", dtype="float32")
    assert load_file(soup.path)["w"].item() == 1.0 + 0.75 * 2.0**-7


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_averaged_too(dtype: torch.dtype, tmp_path: Path) -> None:
    some = [{"w": torch.tensor([1.0, 2.0]).to(dtype)}, {"w": torch.tensor([2.0, 4.0]).to(dtype)}]
    soup = papa.soup_files(save_all(some, tmp_path), tmp_path / "soup.safetensors")
    found = load_file(soup.path)["w"]
    assert found.dtype == dtype
    assert found.float().tolist() == [1.5, 3.0]


def test_files_may_differ_in_dtype(tmp_path: Path) -> None:
    some = [{"w": torch.ones(2).bfloat16()}, {"w": torch.full((2,), 2.0)}, {"w": torch.full((2,), 4.5).double()}]
    files = save_all(some, tmp_path)
    soup = papa.soup_files(files, tmp_path / "soup.safetensors")
    assert load_file(soup.path)["w"].dtype == torch.bfloat16
    assert "the files differ in dtype: written in that of the first, bfloat16" in soup.notes
    other = papa.soup_files(files, tmp_path / "other.safetensors", dtype="float64")
    assert load_file(other.path)["w"].tolist() == [2.5, 2.5]


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    files = save_all([{"w": torch.full((2,), 1e6)}], tmp_path)
    with pytest.raises(SoupError, match=r"'w' has numbers that torch\.float16 cannot hold"):
        papa.soup_files(files, tmp_path / "soup.safetensors", dtype="float16")
    assert names_in(tmp_path) == {"0.safetensors"}


def test_a_weight_of_zero_leaves_a_file_out_whatever_is_in_it(tmp_path: Path) -> None:
    files = save_all([{"w": torch.ones(2)}, {"w": torch.full((2,), float("nan"))}], tmp_path)
    soup = papa.soup_files(files, tmp_path / "soup.safetensors", [1.0, 0.0])
    assert load_file(soup.path)["w"].tolist() == [1.0, 1.0]


def test_kinds_of_files_mix(tmp_path: Path) -> None:
    some = states("tied")
    torch.save({"ema": {f"module.{name}": value for name, value in some[0].items()}}, tmp_path / "a.pt")
    files = [tmp_path / "a.pt", *save_all(some[1:], tmp_path)]
    found = load_file(papa.soup_files(files, tmp_path / "soup.safetensors").path)
    for name, tensor in papa.average_soup(some).items():
        assert_close(found[name], tensor.double())
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def test_a_soup_records_its_members_in_its_metadata_and_sidecar(tmp_path: Path) -> None:
    files = save_all(states(size=2), tmp_path)
    soup = papa.soup_files(files, tmp_path / "soup.safetensors", [0.25, 0.75])
    beside = json.loads((tmp_path / "soup.safetensors.json").read_text())
    with safe_open(soup.path, "pt") as opened:
        inside = json.loads(opened.metadata()["soup"])
    digests = [f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    assert inside["files"] == [
        {"path": str(file), "digest": digest, "weight": weight}
        for file, digest, weight in zip(files, digests, [0.25, 0.75], strict=True)
    ]
    assert (inside["papa"], inside["torch"]) == (papa.__version__, torch.__version__)
    assert inside["not_averaged"] == ["1.num_batches_tracked"]
    assert {**inside, "notes": list(soup.notes)} == beside
    assert soup.notes == (
        "not averaged but copied from the first file with a weight: 1 integer tensor, such as '1.num_batches_tracked'",
    )


def test_a_large_soup_is_sharded_and_can_be_averaged_again(tmp_path: Path) -> None:
    some = [{f"layer.{n}": torch.randn(10, 10) for n in range(7)} for _ in range(2)]
    files = save_all(some, tmp_path)
    soup = papa.soup_files(files, tmp_path / "out", max_shard_size="1KB")
    assert [file.name for file in soup.files] == [
        *(f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)),
        "model.safetensors.index.json",
    ]
    assert names_in(tmp_path / "out") == {file.name for file in soup.files} | {"model.safetensors.json"}
    index = json.loads(soup.path.read_text())
    assert index["metadata"]["total_size"] == 2800
    found: State = {}
    for file in soup.files[:-1]:
        part = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in part)
        found |= part
    for name, tensor in papa.average_soup(some).items():
        assert_close(found[name], tensor.double())
    again = papa.soup_files([tmp_path / "out", files[0]], tmp_path / "again.safetensors")
    assert_close(load_file(again.path)["layer.3"], (found["layer.3"].double() + some[0]["layer.3"].double()) / 2)


def test_overwriting_leaves_nothing_of_the_old_output(tmp_path: Path) -> None:
    files = save_all([{"a": torch.randn(300), "b": torch.randn(300)}], tmp_path / "..")
    out = tmp_path / "soup.safetensors"
    papa.soup_files(files, out, max_shard_size="1KB")
    with pytest.raises(SoupError, match="exists: choose another output, or pass overwrite=True to replace it"):
        papa.soup_files(files, out)
    papa.soup_files(files, out, overwrite=True)
    assert names_in(tmp_path) == {"soup.safetensors", "soup.safetensors.json"}
    papa.soup_files(files, out, overwrite=True, max_shard_size="1KB")
    shards = {f"soup-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert names_in(tmp_path) == {*shards, "soup.safetensors.index.json", "soup.safetensors.json"}


def test_an_input_may_be_overwritten(tmp_path: Path) -> None:
    files = save_all([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], tmp_path)
    papa.soup_files(files, files[0], overwrite=True)
    assert load_file(files[0])["w"].tolist() == [0.5, 0.5]


def broken(folder: Path) -> list[Path]:
    file = save({"w": torch.zeros(100)}, folder / "0.safetensors")
    (folder / "1.safetensors").write_bytes(file.read_bytes()[:-8])
    return [file, folder / "1.safetensors"]


def unlike(folder: Path) -> list[Path]:
    return save_all(
        [
            {**{f"only.{n:02d}": torch.zeros(1) for n in range(12)}, "w": torch.zeros(2, 3), "n": torch.tensor(1)},
            {"w": torch.zeros(3, 2), "n": torch.tensor(1.0), "x": torch.zeros(1)},
        ],
        folder,
    )


def good(folder: Path) -> list[Path]:
    return save_all([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], folder)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (broken, {}, r"1.safetensors is not a valid safetensors file"),
        (unlike, {}, r"it has\n  no 'only.00' float32 \[1\]\n(.*\n){9}  and 5 more"),
        (lambda folder: [], {}, "a soup needs at least one file of weights, got none"),
        (good, {"weights": [0.5, 0.6]}, r"the weights sum to 1.1, expected 1: divide them by their sum"),
        (good, {"weights": [1.0]}, "there are 1 weights for 2 files"),
        (good, {"weights": [1.5, -0.5]}, "none below 0"),
        (good, {"weights": [0.0, 0.0]}, "the weights sum to 0, expected 1"),
        (good, {"weights": [float("nan"), 1.0]}, "expected finite numbers"),
        (good, {"dtype": "float31"}, "the dtype is float31: did you mean float32"),
        (good, {"max_shard_size": "5 bananas"}, "expected a size such as 5GB"),
        (good, {"greedy": True}, "a greedy soup needs scores"),
        (good, {"greedy": True, "weights": [0.5, 0.5]}, "one way to choose its weights, got given weights and greedy"),
        (good, {"score": "cat {}"}, "only used by a greedy soup"),
        (good, {"learned": True}, "need a network and data: give an evaluation context"),
        (good, {"out": "soup.pt"}, "expected a name that ends in .safetensors, or a directory"),
    ],
)
def test_mistakes_leave_nothing_behind(
    make: Callable[[Path], list[Path]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = make(tmp_path)
    before = names_in(tmp_path)
    out = tmp_path / options.pop("out", "soup.safetensors")
    with pytest.raises(PapaError, match=message):
        papa.soup_files(files, out, **options)
    assert names_in(tmp_path) == before


def test_a_directory_that_stays_empty_is_removed(tmp_path: Path) -> None:
    files = save_all([{"w": torch.full((2,), 1e6)}], tmp_path)
    with pytest.raises(SoupError, match="cannot hold"):
        papa.soup_files(files, tmp_path / "new" / "soup.safetensors", dtype="float16")
    assert names_in(tmp_path) == {"0.safetensors"}


def test_differences_are_all_kinds(tmp_path: Path) -> None:
    one, other = (open_weights(file).tensors for file in unlike(tmp_path))
    found = average.differences(one, other)
    assert found[12] == "an extra 'x' float32 [1]"
    assert set(found[13:]) == {"'w' float32 [3, 2] instead of float32 [2, 3]", "'n' float32 [] instead of int64 []"}


def test_an_output_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    files = good(tmp_path)
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(SoupError, match="cannot make the directory"):
        papa.soup_files(files, tmp_path / "blocked" / "soup.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(SoupError, match="is a directory"):
        papa.soup_files(files, tmp_path / "dir.safetensors")


@pytest.mark.parametrize("context", range(4))
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_the_old_output_and_nothing_else(
    context: int, error: type[BaseException], tmp_path: Path
) -> None:
    files = save_all([{f"w{n}": torch.full((50,), 1.0) for n in range(4)}], tmp_path / "..")
    out = tmp_path / "soup.safetensors"
    papa.soup_files(files, out)
    before = out.read_bytes()
    calls = iter(range(10))

    def interrupt(done: int, total: int) -> None:
        if next(calls) == context:
            raise error(28, "No space left on device")

    with pytest.raises((KeyboardInterrupt, SoupError)):
        papa.soup_files(files, out, overwrite=True, on_progress=interrupt, max_shard_size=300)
    assert names_in(tmp_path) == {"soup.safetensors", "soup.safetensors.json"}
    assert out.read_bytes() == before


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import papa
from papa.files import open_weights

torch.set_num_threads(1)
folder = Path(sys.argv[1])
files, out = sorted(folder.glob("*.safetensors")), folder / "out"
draw = random.Random(0)

def make(shard):
    papa.soup_files(files, out / "soup.safetensors", overwrite=True, max_shard_size=shard)

def visible():
    return [path for path in out.iterdir() if not path.name.startswith(".")]

for shard in ("1GB", "1MB"):
    begin = time.perf_counter()
    make(shard)
    length = time.perf_counter() - begin
    for trial in range(8):
        for path in visible():
            path.unlink()
        child = os.fork()
        if not child:
            make(shard)
            os._exit(0)
        time.sleep(draw.uniform(0.0, 1.2 * length))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for name in ("soup.safetensors", "soup.safetensors.index.json"):
            if (out / name).exists():
                whole = open_weights(out / name)
                assert len(whole.tensors) == 5
                assert all(torch.equal(whole.read(key), torch.full((200_000,), 0.5)) for key in whole.tensors)
        if shard == "1GB":
            assert {path.name for path in visible()} <= {"soup.safetensors", "soup.safetensors.json"}
    make(shard)
    assert len(visible()) == len(list(out.iterdir())), "the next run clears up"
"""


def test_killed_at_any_moment_what_is_there_is_whole(tmp_path: Path) -> None:
    save_all([{f"w{n}": torch.full((200_000,), float(value)) for n in range(5)} for value in range(2)], tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


MEASURED = """
import sys
from pathlib import Path
import torch
import papa
from safetensors.torch import load_file

def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

def extra_megabytes(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = status("VmRSS")
    action()
    return status("VmHWM") - before

torch.set_num_threads(1)
folder = Path(sys.argv[1])
files = [folder / f"{n}.safetensors" for n in range(3)]
papa.soup_files([folder / "small.safetensors"], folder / "warm.safetensors")
assert extra_megabytes(lambda: load_file(files[0])["w"].sum()) > 60, "the measure does not see a file that is loaded"
for action in (
    lambda: papa.soup_files(files, folder / "soup.safetensors"),
    lambda: papa.soup_files(files, folder / "half.safetensors", dtype="bfloat16"),
    lambda: papa.soup_files(files[1:], folder / "stock.safetensors", stock=files[0]),
    lambda: papa.files.diff_files(files[0], files[1]),
):
    found = extra_megabytes(action)
    assert found < 40, f"{found} MB"
before, seen = status("RssAnon"), []  # what is mapped into memory is not counted: the system drops it at need
see = lambda *_: seen.append(status("RssAnon"))
papa.soup_files([folder / "big.pt"] * 2, folder / "torch.safetensors", on_progress=see)
assert max(seen) - before < 40, f"{max(seen) - before} MB"
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux measures the peak of memory")
def test_files_are_averaged_in_little_memory(tmp_path: Path) -> None:
    for value in range(3):
        save({"w": torch.full((4096, 4096), float(value)), "n": torch.tensor(value)}, tmp_path / f"{value}.safetensors")
    save({"w": torch.ones(3)}, tmp_path / "small.safetensors")
    torch.save({"model": {"w": torch.ones(4096, 4096)}}, tmp_path / "big.pt")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "soup.safetensors", "pt") as opened:
        assert torch.equal(opened.get_slice("w")[4000:], torch.ones(96, 4096))


def test_large_files_are_identified_by_a_sample(tmp_path: Path) -> None:
    state = {"body": torch.randn(1 << 24), "head": torch.zeros(10)}
    files = [open_weights(file) for file in save_all([state, state, {**state, "head": torch.ones(10)}], tmp_path)]
    sampled = [digest_of(file) for file in files]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0].startswith("sample:")


def test_a_plain_soup_passes_six_modules(tmp_path: Path) -> None:
    """Opening, averaging and writing is all there is to it."""
    seen = set()
    files = good(tmp_path)
    papa.soup_files(files, tmp_path / "warm.safetensors")
    sys.setprofile(lambda frame, event, _: event == "call" and seen.add(Path(frame.f_code.co_filename)))
    try:
        papa.soup_files(files, tmp_path / "soup.safetensors")
    finally:
        sys.setprofile(None)
    own = Path(papa.files.__file__).parent
    assert {path.stem for path in seen if path.parent == own} <= {
        *("weights", "networks", "average", "record", "soup", "output")
    }


def test_a_file_given_twice_counts_twice_and_is_noted(tmp_path: Path) -> None:
    one, other = good(tmp_path)
    soup = papa.soup_files([one, one, other, other, other], tmp_path / "soup.safetensors")
    assert load_file(soup.path)["w"].tolist() == pytest.approx([0.6, 0.6])
    assert f"{one} was given more than once, and counts each time" in soup.notes


def test_progress_ends_at_the_size_of_the_soup(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    papa.soup_files(good(tmp_path), tmp_path / "soup.safetensors", on_progress=lambda *sizes: seen.append(sizes))
    assert seen == [(8, 8)]


@pytest.mark.parametrize("size", ["", "0", "5XB", "-1GB", 0])
def test_invalid_sizes(size: Any) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 5GB"):
        parse_size(size)


def test_a_file_with_nan_is_named(tmp_path: Path) -> None:
    one, other = good(tmp_path)
    bad = save({"w": torch.tensor([1.0, torch.nan])}, tmp_path / "bad.safetensors")
    with pytest.raises(SoupError, match=r"'w' of the average has NaN: leave out .*bad\.safetensors"):
        papa.soup_files([one, other, bad], tmp_path / "soup.safetensors")
    assert not (tmp_path / "soup.safetensors").exists()
    papa.soup_files([one, other, bad], tmp_path / "soup.safetensors", weights=[0.5, 0.5, 0])  # left out


def test_a_record_may_name_networks_instead_of_temporary_files(tmp_path: Path) -> None:
    """Then equal networks give equal files, to the last byte."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        paths = [folder / "0.safetensors", folder / "1.safetensors"]
        for member, path in enumerate(paths):
            save_file({"w": torch.full((3,), float(member)), "b": torch.ones(2)}, path)
        papa.soup_files(paths, f"{folder}.safetensors", names=["member 0", "member 1"])
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    sidecar = (tmp_path / "a.safetensors.json").read_text()
    assert '"path": "member 1"' in sidecar
    assert str(tmp_path) not in sidecar
    with pytest.raises(ConfigError, match="there are 1 names, expected one for each of 2 networks"):
        papa.soup_files(paths, tmp_path / "c.safetensors", names=["x"])


def test_the_mean_of_lora_factors_is_noted(tmp_path: Path) -> None:
    save_file({f"layer.lora_{name}.weight": torch.ones(2, 2) for name in "AB"}, tmp_path / "a.safetensors")
    soup = papa.soup_files([tmp_path / "a.safetensors"] * 2, tmp_path / "soup.safetensors")
    assert any("average them with peft's add_weighted_adapter" in note for note in soup.notes)
