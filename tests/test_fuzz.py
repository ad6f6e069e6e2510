"""Thousands of altered files: every one gives a `PapaError` or is as good as the original."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from alterations import alter, kinds, mutate_bytes, mutate_value, refused
from checkpoint_cases import Member, expected_of, load_whole, save, trained_member
from papa.cli.run import print_run
from papa.errors import PapaError
from papa.lab.config import Config
from papa.lab.launch import _check_state
from papa.lab.models.weights import read_state_dict
from papa.lab.recipes import find
from papa.lab.recipes.build import build
from papa.lab.report.page import compare_page, run_page
from papa.lab.runs import RunDirectory
from papa.storage.tensors import save_network
from papa.training.checkpoints import member_states, shared_state, with_digest
from papa.training.saving import _load_

MOST_EXTRA_MEGABYTES = 300.0


@pytest.fixture(autouse=True)
def _memory_stays_small() -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MOST_EXTRA_MEGABYTES


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[Member]]:
    member = trained_member(torch.optim.AdamW, seed=0)
    return save(tmp_path, 1, [member], state={"note": [1, {"deep": 2.5}]}), [member]


def test_manifests(saved: tuple[Path, list[Member]]) -> None:
    path, members = saved
    expected, manifest, generator = expected_of(members), path / "manifest.json", random.Random(1)
    text = manifest.read_bytes()
    value, num_refused = json.loads(text), 0
    for number in range(1000):
        if number % 2:
            manifest.write_bytes(mutate_bytes(text, generator))
        else:
            altered = mutate_value(value, generator)
            manifest.write_text(json.dumps(with_digest(altered) if isinstance(altered, dict) else altered))
        num_refused += refused(lambda: load_whole(path, expected, num_members=1))
    assert num_refused > 600


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    outcomes = alter(kinds()[kind](tmp_path / "files"), random.Random(9))
    assert sum(itertools.islice(outcomes, 40)) > 0


def test_an_altered_manifest_is_refused_unless_it_says_the_same(saved: tuple[Path, list[Member]]) -> None:
    path, members = saved
    expected, manifest, generator = expected_of(members), path / "manifest.json", random.Random(8)
    text = manifest.read_bytes()
    value, num_refused = json.loads(text), 0
    for number in range(500):
        altered = mutate_bytes(text, generator) if number % 2 else json.dumps(mutate_value(value, generator)).encode()
        manifest.write_bytes(altered)
        is_refused = refused(lambda: load_whole(path, expected, num_members=1))
        assert is_refused or json.loads(altered) == value
        num_refused += is_refused
    assert num_refused > 450


def test_headers_and_tensors_with_a_matching_digest(saved: tuple[Path, list[Member]]) -> None:
    path, members = saved
    expected, generator = expected_of(members), random.Random(2)
    file, manifest = path / "member-000.safetensors", json.loads((path / "manifest.json").read_text())
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, num_refused = json.loads(content[8 : 8 + length]), 0
    for number in range(2000):
        if number % 2:
            altered = mutate_bytes(content[: 8 + length], generator) + content[8 + length :]
        else:
            new = json.dumps(mutate_value(header, generator)).encode()
            claimed = generator.choice([len(new), len(new), len(new), 0, 2**63, len(new) + 1])
            altered = claimed.to_bytes(8, "little") + new + content[8 + length :]
        file.write_bytes(altered)
        entry = manifest["files"]["member-000.safetensors"]
        entry.update(bytes=len(altered), sha256=hashlib.sha256(altered).hexdigest())
        (path / "manifest.json").write_text(json.dumps(with_digest(manifest)))
        num_refused += refused(lambda: load_whole(path, expected, num_members=1))
    assert num_refused > 1800


def test_the_state_of_a_training(tmp_path: Path) -> None:
    config = find("digits").config()
    config = replace(config, members=2, train=replace(config.train, batch_size=64))
    training, generator = build(config), random.Random(3)
    run = RunDirectory(tmp_path / "run")
    run.create(config.to_json())
    state = {"config": config.to_json(), "training": shared_state(training), "metrics": run.metrics_state()}
    members = list(zip(training.population, training.optimizers, strict=True))
    path = save(run.checkpoints, 0, members, state=state)
    value = json.loads((path / "manifest.json").read_text())
    for member, (_, numbers) in member_states(training).items():
        value["files"][f"member-{member:03d}.safetensors"]["numbers"] = numbers
    num_refused = 0
    for _ in range(150):
        altered = {**value, "state": mutate_value(value["state"], generator)}
        if generator.random() < 0.4:
            altered = {**value, "files": mutate_value(value["files"], generator)}
        (path / "manifest.json").write_text(json.dumps(with_digest(altered)))

        def load() -> None:
            _, error = _load_(training, path, partial(_check_state, config))
            if error is not None:
                raise PapaError(error)

        num_refused += refused(load)
    assert num_refused > 100


def test_configs(tmp_path: Path) -> None:
    run, generator = RunDirectory(tmp_path), random.Random(4)
    run.create(find("digits").config().to_json())
    text, num_refused = run.config.read_bytes(), 0
    for number in range(1500):
        if number % 2:
            run.config.write_bytes(mutate_bytes(text, generator))
        else:
            run.config.write_text(json.dumps(mutate_value(json.loads(text), generator)))
        num_refused += refused(lambda: Config.from_json(run.read_config()))
    assert num_refused > 800


def result() -> dict[str, Any]:
    scores = {"members": [97.1, None], "mean": 97.1, "min": 97.1, "max": 97.1}
    scores |= {"ensemble": 97.4, "average_soup": 97.3, "greedy_soup": None}
    event = {"event": "nonfinite", "step": 3, "member": 1, "reason": "<b>", "action": "dropped"}
    return {
        **{"recipe": "digits", "method": "papa", "seed": 1, "config": {"a": 1}, "environment": {"b": [2]}},
        **{"test": scores, "validation": scores, "greedy_members": [0], "num_averagings": 3, "seconds": {"train": 1.0}},
        **{
            "repaired": {"test": {"average_soup": 1.0}, "greedy_members": [1]},
            "paper": {"mean": 1.5},
            "nonfinite": [event],
        },
        **{"policies": [{"mixup": 0.5}, {"mixup": 0.0}]},
    }


def test_results_and_their_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, generator, num_refused = RunDirectory(tmp_path), random.Random(5), 0
    run.result.write_text(json.dumps(result()))
    assert not refused(lambda: print_run(run.read_result(), run))
    for number in range(600):
        text = json.dumps(result()).encode()
        altered = (
            mutate_bytes(text, generator) if number % 2 else json.dumps(mutate_value(result(), generator)).encode()
        )
        run.result.write_bytes(altered)

        def show() -> None:
            found = run.read_result()
            print_run(found, run)
            page = run_page(found, []) + compare_page([found])
            assert "<script" not in page

        num_refused += refused(show)
    assert num_refused > 300
    capsys.readouterr()


def test_metrics(tmp_path: Path) -> None:
    run, generator = RunDirectory(tmp_path), random.Random(6)
    run.create({})
    for step in range(5):
        run.log({"event": "average", "step": step, "rule": "Push", "distance_before": 0.5})
    text, num_refused = run.metrics.read_bytes(), 0
    for _ in range(1000):
        run.metrics.write_bytes(mutate_bytes(text, generator))
        num_refused += refused(lambda: list(run.read_metrics()))
    assert num_refused > 300


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights(tmp_path: Path, suffix: str) -> None:
    net, _ = trained_member(torch.optim.SGD, seed=0)
    file, generator, num_refused = tmp_path / f"net{suffix}", random.Random(7), 0
    if suffix == ".pt":
        torch.save(net.state_dict(), file)
    else:
        save_network(file, net)
    content = file.read_bytes()
    for _ in range(500):
        file.write_bytes(mutate_bytes(content, generator))
        num_refused += refused(lambda: read_state_dict(file))
    assert num_refused > 200


def test_a_file_by_torch_that_unpacks_to_more_than_itself_is_refused(tmp_path: Path) -> None:
    import zipfile

    torch.save({"weight": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    assert not refused(lambda: read_state_dict(tmp_path / "plain.pt"))
    assert refused(lambda: read_state_dict(tmp_path / "bomb.pt"))


def test_a_file_by_torch_that_claims_several_disks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.pt"
    torch.save({"weight": torch.zeros(3)}, file)
    content = file.read_bytes()
    at = content.rindex(b"PK\x06\x07") + 4  # the disk number in the locator of the end
    file.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    with pytest.raises(PapaError, match="not a valid PyTorch file: zipfiles that span multiple disks"):
        read_state_dict(file)
