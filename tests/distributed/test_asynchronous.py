"""Asynchronous members: the push of each, what counts, what is published, and what survives."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

import papa
from papa import MergeAll, Push, average_soup, join
from papa.core.group import LocalGroup
from papa.distributed.asynchronous import AsyncAverager, PublishedFiles
from papa.errors import ConfigError, MemberError, MixingError

SCRIPT = Path(__file__).parents[1] / "async_script.py"
RULE = Push(alpha=0.8, every_steps=2)


def make_member(seed: int, width: int = 3) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_averagers(where: Path, size: int = 3, **options: Any) -> list[AsyncAverager]:
    files = PublishedFiles(where)
    return [
        AsyncAverager(*make_member(member), RULE, files, member=member, num_members=size, **options)
        for member in range(size)
    ]


def optimize_(averager: AsyncAverager) -> None:
    """One optimizer step on random data."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(averager.num_steps_taken))
    averager.optimizers[0].zero_grad()
    averager.population[0](inputs).square().mean().backward()
    averager.optimizers[0].step()


def train_(averager: AsyncAverager) -> Any:
    """One optimizer step, and the averager's."""
    optimize_(averager)
    return averager.step()


def counted_in(averager: AsyncAverager, num_steps: int) -> list[tuple[int, ...]]:
    """The members that counted in the pushes of some steps."""
    return [found.counted for found in (train_(averager) for _ in range(num_steps)) if found is not None]


def weights_of(net: nn.Module) -> Tensor:
    """All averaged numbers."""
    floating = [tensor.flatten() for tensor in net.state_dict().values() if tensor.is_floating_point()]
    return torch.cat(floating).clone()


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_push_is_that_of_the_twin_whatever_the_order(tmp_path: Path) -> None:
    averagers = make_averagers(tmp_path)
    newest = [weights_of(one.population[0]) for one in averagers]
    order = [0, 1, 2] * 4 + random.Random(0).choices([0, 1, 2], weights=[5, 2, 1], k=40)
    for member in order:
        averager = averagers[member]
        net = averager.population[0]
        optimize_(averager)
        before = weights_of(net)
        found = averager.step()
        if averager.num_steps_taken % 2:
            assert found is None
            continue
        assert found is not None
        newest[member] = before
        expected = 0.8 * before + 0.2 * torch.stack(newest).mean(dim=0)
        torch.testing.assert_close(weights_of(net), expected, rtol=1e-5, atol=1e-7)
        newest[member] = weights_of(net)
        assert (found.alpha, found.counted, found.nonfinite) == (0.8, (0, 1, 2), ())
    soup = average_soup([one.population[0] for one in averagers])
    for averager in averagers:
        averager.publish()
    torch.testing.assert_close(weights_of(averagers[1].soup()), weights_of(soup))


def test_equal_speeds_keep_members_together_as_a_synchronous_push_does(tmp_path: Path) -> None:
    """In turn and without training, members meet at one point, within the range of their starts."""
    averagers = make_averagers(tmp_path)
    starts = torch.stack([weights_of(one.population[0]) for one in averagers])
    for _ in range(200):
        for averager in averagers:
            averager.step()
    ends = torch.stack([weights_of(one.population[0]) for one in averagers])
    assert float((ends - ends.mean(dim=0)).abs().max()) < 1e-5
    assert bool((ends <= starts.max(dim=0).values + 1e-5).all())
    assert bool((ends >= starts.min(dim=0).values - 1e-5).all())


def test_weights_count_until_they_are_stale_and_again_when_they_are_new(tmp_path: Path) -> None:
    first, second, _ = make_averagers(tmp_path, max_staleness=6)
    # Seen at step 2, they count up to step 8.
    assert counted_in(first, 16) == [(0, 1, 2)] * 4 + [(0,)] * 4
    for _ in range(2):
        train_(second)
    assert counted_in(first, 10) == [(0, 1)] * 4 + [(0,)]
    assert make_averagers(tmp_path / "default")[0].max_staleness == 20


def test_a_member_alone_keeps_every_bit(tmp_path: Path) -> None:
    (averager,) = make_averagers(tmp_path, 1)
    before = weights_of(averager.population[0])
    for _ in range(4):
        averager.step()
    assert torch.equal(weights_of(averager.population[0]), before)
    assert averager.num_averagings == 2


def test_a_member_that_is_started_again_goes_on_from_its_newest_weights(tmp_path: Path) -> None:
    averagers = make_averagers(tmp_path)
    for _ in range(5):
        train_(averagers[1])
    pushed_at_4 = load_file(PublishedFiles(tmp_path).path(1))
    again = AsyncAverager(*make_member(7), RULE, PublishedFiles(tmp_path), member=1, num_members=3)
    assert again.num_steps_taken == 4
    assert is_same(dict(again.population[0].state_dict()), pushed_at_4)
    again.load_state_dict({"num_steps_taken": 3, "num_averagings": 1, "highest_lrs": [0.1]})
    assert again.num_steps_taken == again.state_dict()["num_steps_taken"] == 3
    with pytest.raises(MixingError, match="the state has no highest_lrs, num_averagings"):
        again.load_state_dict({"num_steps_taken": 3})
    with pytest.raises(
        MemberError,
        match=r"what member 2 published has '0.weight' of shape \(3, 4\), member 2 has \(5, 4\): all members",
    ):
        AsyncAverager(*make_member(0, 5), RULE, PublishedFiles(tmp_path), member=2, num_members=3)
    assert "member 1 of 3, step 3, 1 averagings" in repr(again)


def test_weights_that_are_not_finite_are_never_published(tmp_path: Path) -> None:
    averagers = make_averagers(tmp_path)
    net, optimizer = averagers[1].population[0], averagers[1].optimizers[0]
    train_(averagers[1])
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    before = averagers[1].published.version(1)
    assert averagers[1].publish() == 0
    assert averagers[1].published.version(1) == before
    found = averagers[1].step()
    others = torch.stack([weights_of(averagers[member].population[0]) for member in (0, 2)])
    restarted = others.mean(dim=0)
    expected = 0.8 * restarted + 0.2 * (others.sum(dim=0) + restarted) / 3
    torch.testing.assert_close(weights_of(net), expected)
    assert [one.action for one in found.nonfinite] == ["restarted from the mean of the others"]
    assert not optimizer.state


def test_a_member_that_is_not_finite_and_alone_takes_its_published_weights_or_stops(tmp_path: Path) -> None:
    (averager,) = make_averagers(tmp_path, 1)
    start = weights_of(averager.population[0])
    with torch.no_grad():
        averager.population[0][0].weight.fill_(float("inf"))
    averager.step()
    assert averager.step().nonfinite[0].action == "restarted from its last published weights"
    assert torch.equal(weights_of(averager.population[0]), start)
    (strict,) = make_averagers(tmp_path / "strict", 1, on_nonfinite="stop")
    with torch.no_grad():
        strict.population[0][0].weight.fill_(float("inf"))
    strict.step()
    with pytest.raises(MemberError, match="member 0 is non-finite at step 2: look for what made it diverge"):
        strict.step()


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MixingError, match="need a Push, got MergeAll: every other rule acts on all"):
        AsyncAverager(*make_member(0), MergeAll(every_steps=2), PublishedFiles(tmp_path), member=0, num_members=1)
    with pytest.raises(MixingError, match="on_nonfinite is 'drop', expected 'restart' or 'stop'"):
        make_averagers(tmp_path, on_nonfinite="drop")
    with pytest.raises(MixingError, match="max_staleness is -1, expected a number of steps"):
        make_averagers(tmp_path, max_staleness=-1)
    with pytest.raises(ConfigError, match="not one of several asynchronous members: start it with torchrun"):
        join(*make_member(0), RULE, asynchronous=True)
    with pytest.raises(MixingError, match="asynchronous members have no merge_hooks: remove it"):
        join(*make_member(0), RULE, asynchronous=True, merge_hooks=())
    with pytest.raises(MixingError, match="asynchronous members have no group"):
        join(*make_member(0), RULE, asynchronous=True, group=LocalGroup())


def train_with_hooks(net: nn.Module, optimizer: optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def test_three_variables_make_a_process_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAPA_MEMBER": "1", "PAPA_MEMBERS": "2", "PAPA_PUBLISHED": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    net, optimizer = make_member(0)
    joined = join(net, optimizer, RULE, num_steps=7)
    assert (joined.num_steps_taken, joined.averager.member) == (0, 1)  # type: ignore[union-attr]
    train_with_hooks(net, optimizer, 7)
    joined.close()
    found = joined.averager.published.read(1)  # type: ignore[union-attr]
    assert found is not None
    tensors, metadata = found
    assert metadata["step"] == "7"  # the last step published, though no push was due
    assert is_same(tensors, dict(net.state_dict()))
    assert torch.equal(weights_of(joined.soup()), weights_of(net))
    again = join(*make_member(3), RULE, num_steps=7)
    assert again.num_steps_taken == 7
    assert torch.equal(weights_of(again.population[0]), weights_of(net))


NUM_NUMBERS = 100_000


def write_files(directory: str) -> None:
    files, number = PublishedFiles(directory), 0
    while True:
        number += 1
        files.publish(0, {"numbers": torch.full((NUM_NUMBERS,), number)}, {})


def test_no_reader_sees_a_part_of_a_file(tmp_path: Path) -> None:
    """Two processes write as one member; one of them is killed again and again. Every content read must be whole."""
    files = PublishedFiles(tmp_path)
    context = multiprocessing.get_context("fork")  # they import nothing and use no autograd

    def start() -> BaseProcess:
        process = context.Process(target=write_files, args=(str(tmp_path),), daemon=True)
        process.start()
        return process

    writers = [start(), start()]
    seen = set()
    try:
        for number in range(4000):
            found = files.read(0)
            if found is not None:
                numbers = found[0]["numbers"]
                assert torch.equal(numbers, numbers[:1].expand(NUM_NUMBERS))
                seen.add(int(numbers[0]))
            if number >= 400 and len(seen) > 10:
                break
            if number % 40 == 39:
                writers[0].kill()
                writers[0].join()
                writers[0] = start()
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    assert len(seen) > 10
    files.remove_unfinished(0)
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]


def start_member(directory: Path, member: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(papa.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = ["--member", str(member), "--members", "3", "--asynchronous", str(directory / "published")]
    options += ["--soup", str(directory / "soup.safetensors")]
    command = ["-m", "papa.member", *options, str(SCRIPT), str(directory), "1=killed", "2=stopped"]
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_killed_member_is_started_again_alone_and_nobody_waits_for_a_stopped_one(tmp_path: Path) -> None:
    """Members 0 and 1 take all of their steps while member 2 is stopped, and only then does member 0 let it go on."""
    members = [start_member(tmp_path, member) for member in range(3)]
    assert members[1].communicate()[0] == "begins at step 0\n"
    assert members[1].returncode == -signal.SIGKILL
    members[1] = start_member(tmp_path, 1)
    said = [member.communicate()[0] for member in members]
    assert [member.returncode for member in members] == [0, 0, 0]
    assert said[1].startswith("begins at step 6\n")  # its last push before it was killed
    assert said[2].endswith("counted (2,)\n")  # the others had long ended
    states = [torch.load(tmp_path / f"{member}.pt", weights_only=True) for member in range(3)]
    expected, found = average_soup(states), load_file(tmp_path / "soup.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    names = sorted(path.name for path in (tmp_path / "published").glob("[!.]*"))
    assert names == ["0.safetensors", "1.safetensors", "2.safetensors"]
