"""Transformers, PEFT and Accelerate with one member per process: equal to the plain loop, and resumed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerControl, TrainerState, TrainingArguments

import papa
from papa.core.group import LocalGroup
from papa.couplings.by_name import options_of, rule_of
from papa.errors import ConfigError
from papa.integrations.transformers import PopulationAveragingCallback

JOBS = Path(__file__).parent / "member_jobs.py"
CHECKPOINT = "checkpoint-5"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `member_jobs.py` wrote."""
    directory = tmp_path_factory.mktemp("members")
    environment = {**os.environ, "PYTHONPATH": str(Path(papa.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOBS), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def members_of(directory: Path, name: str) -> list[dict[str, Tensor]]:
    return [torch.load(directory / f"{name}{member}.pt", weights_only=True) for member in range(2)]


def are_equal(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    pairs = list(zip(first, second, strict=True))
    assert all(one.keys() == other.keys() for one, other in pairs)
    return all(torch.equal(one[name], other[name]) for one, other in pairs for name in one)


def test_members_of_trainers_have_the_bits_of_the_plain_loop(trained: Path) -> None:
    expected = members_of(trained, "plain-")
    assert not are_equal(expected[:1], expected[1:])
    assert are_equal(members_of(trained, "ordered/"), expected)


def test_the_soup_is_loaded_by_from_pretrained(trained: Path) -> None:
    found, expected = (load_file(trained / name / "model.safetensors") for name in ("ordered/soup", "plain-soup"))
    assert are_equal([found], [expected])
    net = AutoModelForCausalLM.from_pretrained(trained / "ordered" / "soup")
    mean = papa.average_soup(members_of(trained, "ordered/"))
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, mean[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("unbroken", "resumed"), [("unbroken", "resumed"), ("unbroken", "restored"), ("outer", "outer, resumed")]
)
def test_a_training_that_resumes_has_the_bits_of_an_unbroken_one(trained: Path, unbroken: str, resumed: str) -> None:
    """With dropout and shuffled data; and by a rule with rows of its own."""
    assert are_equal(members_of(trained, f"{resumed}/"), members_of(trained, f"{unbroken}/"))
    has_tensors = (trained / unbroken / "0" / CHECKPOINT / "papa.pt").exists()
    assert has_tensors == (unbroken == "outer")


def test_checkpoints_have_the_state_as_json(trained: Path) -> None:
    for member in range(2):
        state = json.loads((trained / "unbroken" / str(member) / CHECKPOINT / "trainer_state.json").read_text())
        found = state["stateful_callbacks"]["PopulationAveragingCallback"]
        assert found["attributes"]["progress"]["num_steps_taken"] == 5
        assert PopulationAveragingCallback.from_state(found).rule == papa.Push(half_life=0.1, every_steps=2)
        logged = json.loads((trained / "unbroken" / f"{member}.json").read_text())
        assert all(entry["papa/distance_after"] > 0 for entry in logged)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks transformers by an old name
def test_adapters_are_averaged_alone(trained: Path) -> None:
    first, second = members_of(trained, "adapters/")
    adapters = {name for name in first if "lora" in name}
    assert all(torch.equal(first[name], second[name]) != (name in adapters) for name in first)
    soup = trained / "adapters" / "soup"
    assert {file.name for file in soup.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    found = load_file(soup / "adapter_model.safetensors")
    mean = papa.average_soup([first, second])
    assert len(found) == len(adapters)
    for name, tensor in found.items():
        expected = mean[name.replace(".weight", ".default.weight")]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(trained / "ordered" / "soup"))
    net = PeftModel.from_pretrained(base, soup)
    assert sum("lora" in name for name in net.state_dict()) == len(adapters)


def test_one_member_per_process_with_accelerate(trained: Path) -> None:
    assert are_equal(members_of(trained, "accelerate-"), members_of(trained, "plain-"))
    for member in range(2):
        found = json.loads((trained / f"accelerate-{member}.json").read_text())
        assert (found["processes"], found["averagings"]) == (1, 6)
        assert found["rates"] == pytest.approx([0.01 * (1.0 - 0.9 * step / 12) for step in range(1, 13)])
        assert (trained / "weights accelerate" / f"{member}.safetensors").exists()


def test_the_examples_run(trained: Path) -> None:
    accelerate, trainer = (trained / f"{name}-0.txt" for name in ("with_accelerate.py", "with_trainer.py"))
    assert float(re.search(r"one network of 3: (\d+\.\d)%", accelerate.read_text())[1]) > 55  # type: ignore[index]
    assert "the soup predicts 100% of the numbers" in trainer.read_text()


def test_ranks_of_a_member_join_together(trained: Path) -> None:
    """One torchrun for each member: each rank averages its shards, and the first one leaves the whole member."""
    members = [load_file(trained / "weights fsdp" / f"{member}.safetensors") for member in range(2)]
    assert {name: tuple(tensor.shape) for name, tensor in members[0].items()} == {
        "0.weight": (32, 8),
        "0.bias": (32,),
        "2.weight": (2, 32),
        "2.bias": (2,),
    }
    distance, norm = (
        sum((one[name] - other.get(name, 0)).square().sum() for name in one).sqrt()
        for one, other in ((members[0], members[1]), (members[0], {}))
    )
    assert 0 < distance < 0.2 * norm  # from different initial weights
    assert all("member" in (trained / f"with_fsdp.py-{member}.txt").read_text() for member in range(2))


@dataclass(frozen=True)
class OwnRule(papa.MergeAll):
    """A rule that papa does not know."""


@pytest.mark.parametrize(
    "rule",
    [
        papa.Push(half_life=0.003),
        papa.Push(alpha=0.9, every_steps=4),
        papa.MergePairs(every_steps=3, seed=2),
        papa.Mix([[0.5, 0.5], [0.2, 0.8]], every_steps=2),
        papa.OuterStep(),
        papa.Shuffle(),
    ],
)
def test_rules_survive_json(rule: papa.Rule) -> None:
    assert rule_of(json.loads(json.dumps(options_of(rule)))) == rule


def test_wrong_uses() -> None:
    assert options_of(OwnRule(every_steps=3)) == {"name": "OwnRule"}
    assert options_of(papa.ScoreWeightedPush(lambda net: 0.0)) == {"name": "ScoreWeightedPush"}
    with pytest.raises(ConfigError, match="the name of the rule is 'OwnRule', expected one of AdaptivePush, "):
        PopulationAveragingCallback({"name": "OwnRule"})
    with pytest.raises(ConfigError, match=r"the options of Push are (.*): (.*)unexpected keyword argument 'halflife'"):
        PopulationAveragingCallback({"name": "Push", "halflife": 0.003})


@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"papa.integrations.{package}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    error = rf"the package {package} is not installed: pip install 'papa-torch\[{package}\]'"
    with pytest.raises(ConfigError, match=error):
        importlib.import_module(module)


def begin(tmp_path: Path, state: TrainerState, **options: Any) -> PopulationAveragingCallback:
    net = torch.nn.Linear(2, 2)
    callback = PopulationAveragingCallback(papa.MergeAll(every_steps=2), **options)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    callback.on_train_begin(
        args, state, TrainerControl(), model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
    )
    return callback


def test_a_callback_begins_where_the_checkpoint_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not one of several members: start it with torchrun"):
        begin(tmp_path, TrainerState(max_steps=10))
    with pytest.warns(papa.PapaWarning, match="the checkpoint has no state of PopulationAveragingCallback"):
        callback = begin(tmp_path, TrainerState(max_steps=10, global_step=4), group=LocalGroup())
    assert callback.joined is not None
    assert callback.joined.averager.num_steps_taken == 4
    saved = {"args": {}, "attributes": {"progress": {"file": "papa.pt"}}}
    state = TrainerState(
        max_steps=10,
        global_step=4,
        stateful_callbacks={"PopulationAveragingCallback": saved},  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match=r"there is no (.*)checkpoint-4/papa.pt, expected the tensors"):
        begin(tmp_path, state, group=LocalGroup())


def test_without_a_place_for_the_soup_it_is_left_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAPA_WEIGHTS", str(tmp_path / "weights"))
    callback = begin(tmp_path, TrainerState(max_steps=1), group=LocalGroup())
    assert callback.joined is not None
    callback.joined.averager.optimizers[0].step()
    assert (tmp_path / "weights" / "0.safetensors").exists()


def test_the_trainer_takes_the_callback(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    callback = PopulationAveragingCallback({"name": "MergeAll", "every_steps": 2})
    trainer = Trainer(torch.nn.Linear(2, 2), args, callbacks=[callback])
    saved = trainer.state.stateful_callbacks["PopulationAveragingCallback"]  # type: ignore[index,call-overload]
    assert saved["attributes"] == {"progress": None}
