"""The network of the text variants, against papa's own, and what pushes and permutations preserve."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import small_training
from papa import Averaging
from papa.errors import RunError
from papa.lab.models.gpt import GPT
from results import text_pushes
from results.text_pushes import CONTEXT, NUM_HEADS, NUM_LAYERS, NUM_POPULATIONS, VARIANTS, WIDTH, Variant

VOCAB = 11
PLAIN = Variant(words="independent", size=2, steps=3, dropout=0.1)


@pytest.fixture
def weights() -> text_pushes.State:
    torch.manual_seed(0)
    return text_pushes.initial_weights(PLAIN, VOCAB)


def test_every_member_says_what_the_network_with_its_weights_says(weights: text_pushes.State) -> None:
    tokens = torch.randint(VOCAB, (NUM_POPULATIONS * PLAIN.size, 3, CONTEXT))
    found = text_pushes.logits_of(weights, tokens)
    for member, of_member in enumerate(tokens):
        net = GPT(vocab_size=VOCAB, context=CONTEXT, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, width=WIDTH).eval()
        own = {name: tensor[member].detach() for name, tensor in weights.items()}
        net.load_state_dict({**own, "head.weight": own["embedding.weight"]})
        torch.testing.assert_close(found[member], net(of_member))


def test_members_of_a_population_share_their_start_only_if_asked() -> None:
    torch.manual_seed(0)
    embedding = text_pushes.initial_weights(replace(PLAIN, same_start=True), VOCAB)["embedding.weight"]
    assert torch.equal(embedding[0], embedding[1])
    assert not torch.equal(embedding[1], embedding[2])


def test_a_push_keeps_the_mean_and_shrinks_differences(weights: text_pushes.State) -> None:
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    text_pushes.push_([weights], 0.75, replace(PLAIN, left_alone="norm"))
    for name, tensor in weights.items():
        old = before[name]
        if "norm" in name:
            assert torch.equal(tensor, old)
            continue
        torch.testing.assert_close(tensor[0] + tensor[1], old[0] + old[1])
        torch.testing.assert_close(tensor[0] - tensor[1], 0.75 * (old[0] - old[1]))


def test_a_shuffle_permutes_members_in_each_column(weights: text_pushes.State) -> None:
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    text_pushes.shuffle_(weights, replace(PLAIN, shuffled=0.5), torch.Generator().manual_seed(1))
    moved = 0
    for name, tensor in weights.items():
        rows, old = (one.detach().view(NUM_POPULATIONS, PLAIN.size, -1) for one in (tensor, before[name]))
        assert torch.equal(rows.sort(dim=1).values, old.sort(dim=1).values)
        moved += int((rows != old).sum())
    assert moved


def test_clipped_gradients_have_at_most_a_norm_of_one_each(weights: text_pushes.State) -> None:
    for index, tensor in enumerate(weights.values()):
        tensor.grad = torch.randn_like(tensor) * torch.tensor([1e-4] + [1.0] * (len(tensor) - 1)).view(
            -1, *[1] * (tensor.dim() - 1)
        )
        if not index:
            small = tensor.grad[0].clone()
    text_pushes.clip_(list(weights.values()))
    squares = sum(tensor.grad.flatten(1).square().sum(dim=1) for tensor in weights.values() if tensor.grad is not None)
    assert isinstance(squares, torch.Tensor)
    assert bool((squares.sqrt() <= 1.0 + 1e-5).all())
    first = next(iter(weights.values())).grad
    assert first is not None
    assert torch.equal(first[0], small)


@pytest.mark.parametrize("name", ["apart", "moments", "no-norms", "parts", "shuffled", "sgd"])
def test_a_few_steps_of_a_variant_give_finite_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pushes, "TRAIN", 400)
    monkeypatch.setattr(text_pushes, "HELD_OUT", 100)
    codes = torch.randint(VOCAB, (600,), generator=torch.Generator().manual_seed(0))
    found = text_pushes.trained(replace(VARIANTS[name], steps=5, size=2), codes, VOCAB)
    for part in ("validation", "test"):
        assert all(math.isfinite(value) for values in found[part].values() for value in values)
        assert len(found[part]["average_soup"]) == NUM_POPULATIONS


def test_members_are_pushed_within_their_share_of_training_only() -> None:
    variant = Variant(words="a part", half_life=0.1, ends=0.5, steps=100)
    pushed = [step for step in range(5, 101, 5) if text_pushes.keep(variant, step, 1.0) < 1.0]
    assert pushed == list(range(5, 51, 5))


def test_the_table_on_the_page_agrees_with_the_records() -> None:
    block = text_pushes.BLOCK.search(text_pushes.PAGE.read_text())
    assert block is not None
    assert block[0] == f"{block[1]}\n{text_pushes.table()}\n\n{block[2]}", "run `python -m results.text_pushes write`"


def test_moments_are_pushed_as_far_as_weights() -> None:
    training = small_training(make_optimizer=lambda network: torch.optim.AdamW(network.parameters(), lr=0.01))
    training.run()
    before = copy.deepcopy([optimizer.state_dict()["state"] for optimizer in training.optimizers])
    text_pushes.PushMoments().on_averaging(training, Averaging(15, "Push", 0.75, None))
    for index in before[0]:
        for key in ("exp_avg", "exp_avg_sq"):
            old = torch.stack([state[index][key] for state in before])
            new = torch.stack([optimizer.state_dict()["state"][index][key] for optimizer in training.optimizers])
            assert old.std(dim=0).max() > 0.0
            torch.testing.assert_close(new, 0.75 * old + 0.25 * old.mean(dim=0))


def test_a_text_that_is_missing_or_too_short_and_an_unknown_variant_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file"):
        text_pushes.run(tmp_path / "none.txt", [])
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(RunError, match="too short: 55,000 characters"):
        text_pushes.run(tmp_path / "short.txt", [])
    with pytest.raises(RunError, match="there is no variant momets: did you mean moments"):
        text_pushes.run(tmp_path / "short.txt", ["momets"])
