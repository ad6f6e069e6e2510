"""Language models: text, tokenizers, the network, the scores, and runs of the recipes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distributed_jobs
from helpers import assert_same_bits, assert_same_run, execute, killed_after, networks_of
from papa.cli import main
from papa.distributed.start import start_workers
from papa.errors import ConfigError, DataError, RunError
from papa.lab.config import Config
from papa.lab.data.text import Characters, Windows, load_text, read_text, read_tokenizer
from papa.lab.loading import load, load_ensemble, load_language_model
from papa.lab.models.gpt import GPT
from papa.lab.recipes import find
from papa.lab.recipes.build import build, decayed_matrices, make_optimizer
from papa.lab.runs import RunDirectory
from papa.lab.sampling import sample
from papa.lab.tasks.language import TokenLoss, language_modelling
from texts import sample_text

ROOT = Path(__file__).parents[2]
TEXT = sample_text(400)
SIZES = {"vocab_size": 11, "context": 12, "num_layers": 2, "num_heads": 2, "width": 16}
STYLES = [{}, {"mlp": "swiglu", "norm": "rms", "positions": "rotary", "bias": False}]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(sample_text(1200))
    return path


def config_for(text_file: Path, recipe: str = "text-gpt-mini", **changes: object) -> Config:
    config = find(recipe).config("smoke")
    data = replace(config.data, root=str(text_file), context=16, max_train=16 * 8 * 6 + 1, max_test=300)
    return replace(config, data=data, train=replace(config.train, batch_size=8, precision="float32"), **changes)


def test_a_tokenizer_gives_back_the_text_and_counts_its_bytes() -> None:
    tokenizer = Characters(TEXT)
    tokens = tokenizer.encode(TEXT)
    assert tokens.dtype == torch.int32
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert sum(tokenizer.num_bytes()[token] for token in tokens.tolist()) == len(TEXT.encode())
    again = read_tokenizer(tokenizer.to_json())
    assert again.vocab_size == tokenizer.vocab_size
    assert torch.equal(again.encode(TEXT), tokens)
    with pytest.raises(DataError, match="the text has the character 'ß', expected only the 25 of"):
        tokenizer.encode("The caß")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        read_tokenizer('{"model": 3}')


def test_an_epoch_reads_the_text_once_and_depends_on_its_seed_alone() -> None:
    windows = Windows(torch.arange(1000), context=10)
    order = torch.randperm(len(windows)).split(9)
    first, again, other = (list(windows.stream(order, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    for batches in (first, other):
        starts = torch.cat([inputs[:, 0] for inputs, _ in batches]).sort().values
        assert set(starts.diff()[:-1].tolist()) == {10}
        assert all(torch.equal(inputs + 1, targets) for inputs, targets in batches)
    late = list(windows.stream(order[4:], seed=1, start=4))
    assert torch.equal(late[0][0], first[4][0])


def test_a_text_is_split_by_position(text_file: Path) -> None:
    text = load_text(text_file, context=16, test_share=0.1)
    data = text.split(0.2, seed=3)
    assert isinstance(data.test, Windows)
    whole = torch.cat([data.train.tokens, data.validation.tokens, data.test.tokens])  # type: ignore[attr-defined]
    assert text.tokenizer.decode(whole.tolist()) == read_text(text_file)
    assert len(data.test.tokens) == round(0.1 * len(whole))
    short = load_text(text_file, context=16, max_train=100, max_test=50).split(0.1)
    assert (len(short.train), len(short.validation)) == (6, 3)
    assert load_text(text_file, context=16, test_share=0.0).split(0.1).test is None


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name, words in (("b.txt", "second"), ("a.txt", "first "), ("c.md", "not read")):
        (tmp_path / name).write_text(words)
    assert read_text(tmp_path) == "first second"


def test_texts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no text, expected a UTF-8 file, or a folder with files that end in"):
        read_text(tmp_path)
    with pytest.raises(DataError, match=r"--data.root is .*missing.txt, and there is none"):
        read_text(tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 \(.* at byte 2\)"):
        read_text(tmp_path)
    with pytest.raises(DataError, match="a part of the text has 5 tokens, expected more than the context of 8"):
        Windows(torch.arange(5), context=8)


@pytest.mark.parametrize("style", STYLES)
def test_the_network_sees_only_what_came_before(style: dict[str, object]) -> None:
    torch.manual_seed(0)
    network = GPT(**SIZES, **style).eval()  # type: ignore[arg-type]
    tokens = torch.randint(11, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    before, after = network(tokens), network(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    torch.testing.assert_close(network(tokens[:, :5]), before[:, :5])


def test_attention_is_the_sum_that_the_equation_says() -> None:
    torch.manual_seed(0)
    layer = GPT(**SIZES).blocks[0].attention  # type: ignore[arg-type]
    x = torch.randn(3, 5, 16)
    heads = []
    for part in layer.qkv(x).split(16, dim=-1):
        heads.append([part[..., :8], part[..., 8:]])
    later = torch.full((5, 5), -math.inf).triu(1)
    mixed = [torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8) + later, dim=-1) @ v for q, k, v in zip(*heads)]  # noqa: B905
    torch.testing.assert_close(layer(x), layer.out(torch.cat(mixed, dim=-1)))


def test_rotary_attention_depends_on_distances_only() -> None:
    torch.manual_seed(0)
    layer = GPT(**SIZES, positions="rotary").blocks[0].attention  # type: ignore[arg-type]
    one, other = torch.randn(2, 8)
    q, k = (layer._rotated(vector.expand(12, 8)) for vector in (one, other))
    products = q @ k.T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "the width is 16, expected a multiple of the 3 heads"),
        ({"num_heads": 16, "positions": "rotary"}, "expected a multiple of the 16 heads of an even size"),
        ({"mlp": "relu"}, "mlp is relu"),
    ],
)
def test_a_network_that_cannot_be_made_says_why(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT(**{**SIZES, **options})  # type: ignore[arg-type]


def test_scores_are_the_loss_per_token_perplexity_and_bits_per_byte() -> None:
    torch.manual_seed(0)
    metric, task = TokenLoss([1, 2, 3]), language_modelling([1, 2, 3])
    batches = [(torch.randn(2, 4, 3), torch.randint(3, (2, 4))) for _ in range(3)]
    counts = sum((metric.counts(*batch) for batch in batches), torch.zeros(3))
    losses = torch.cat(
        [F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none") for outputs, targets in batches]
    )
    num_bytes = sum(int((targets + 1).sum()) for _, targets in batches)
    details = metric.details(counts)
    assert metric.score(counts) == details["loss per token"] == pytest.approx(float(losses.mean()))
    assert details["perplexity"] == pytest.approx(math.exp(float(losses.mean())))
    assert details["bits per byte"] == pytest.approx(float(losses.sum()) / math.log(2) / num_bytes)
    assert float(task.loss(*batches[0])) == pytest.approx(float(losses[:8].mean()))
    assert not task.higher_is_better
    with pytest.raises(DataError, match=r"got outputs of shape \(2, 4, 5\) for targets of shape \(2, 4\)"):
        metric.counts(torch.zeros(2, 4, 5), batches[0][1])


@pytest.mark.parametrize("ensemble", ["probabilities", "logits"])
def test_the_ensemble_averages_probabilities_or_logits(ensemble: str) -> None:
    torch.manual_seed(0)
    task, outputs = language_modelling([1] * 5, ensemble=ensemble), torch.randn(3, 2, 4, 5)
    found = torch.softmax(task.combine(outputs), dim=-1)
    mean = torch.softmax(outputs, dim=-1).mean(0)
    expected = mean if ensemble == "probabilities" else torch.softmax(outputs.mean(0), dim=-1)
    torch.testing.assert_close(found, expected)


def test_only_matrices_decay(text_file: Path) -> None:
    config = config_for(text_file)
    network = GPT(**SIZES)  # type: ignore[arg-type]
    decayed, others = make_optimizer(config, network).param_groups
    assert decayed["weight_decay"] == config.train.weight_decay > 0 == others["weight_decay"]
    assert decayed["betas"] == (0.9, 0.99)
    assert {one.dim() for one in decayed["params"]} == {2}
    assert {one.dim() for one in others["params"]} == {1}
    both = [one for group in decayed_matrices(network, 0.1) for one in group["params"]]
    assert {id(one) for one in both} == {id(one) for one in network.parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whole") / "run"
    execute(config_for(text_file), path, workers=1)
    return path


def test_a_run_resumes_on_two_processes_to_the_same_bits(tmp_path: Path, text_file: Path, whole: Path) -> None:
    with killed_after(5):
        execute(config_for(text_file), tmp_path / "run", workers=1)
    result = execute(config_for(text_file), tmp_path / "run", workers=2, resume=True)
    assert_same_run(tmp_path / "run", whole)
    assert RunDirectory(tmp_path / "run").read_result()["test"]["mean"] == result["test"]["mean"]
    assert result["test"]["details"]["ensemble"].keys() == {"loss per token", "perplexity", "bits per byte"}
    assert result["validation"]["greedy_soup"] <= result["validation"]["min"]


def test_two_ranks_of_torchrun_end_with_the_same_bits(tmp_path: Path, text_file: Path, whole: Path) -> None:
    config = config_for(text_file)
    start_workers(distributed_jobs.execute_under_torchrun, 2, config.members, config, tmp_path / "run")
    assert_same_bits(networks_of(tmp_path / "run"), networks_of(whole))


def test_another_network_than_a_language_model_is_refused(text_file: Path) -> None:
    config = config_for(text_file)
    with pytest.raises(ConfigError, match=r"--model.name is vgg11 with --data.name text, expected gpt"):
        build(replace(config, model=replace(config.model, name="vgg11")))


def test_networks_of_a_run_are_loaded_and_sampled(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soup, ensemble = load_language_model(whole), load_ensemble(whole)
    assert not any(module.training for module in [*soup.network.modules(), *ensemble.modules()])
    assert isinstance(soup.network, GPT)
    assert soup.network.head.weight is soup.network.embedding.weight
    prompt = soup.tokenizer.encode("The cat")
    options: dict[str, Any] = {"num_tokens": 20, "context": soup.context}
    first, again, other = (sample(soup.network, prompt, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == 20
    assert main(["sample", str(whole), "--prompt", "The cat", "--tokens", "5", "--member", "1"]) == 0
    output = capsys.readouterr().out
    assert [word in output for word in ("average soup", "member 1", "ensemble", "The cat")] == [True] * 4
    assert main(["sample", str(whole), "--prompt", "ß"]) == 2
    assert "the text has the character 'ß'" in capsys.readouterr().err
    with pytest.raises(RunError, match="holds language models: load them with load_language_model"):
        load(whole)


def test_the_ensemble_that_is_loaded_scores_as_in_the_run(text_file: Path, whole: Path) -> None:
    training, result = build(config_for(text_file)), RunDirectory(whole).read_result()
    assert training.data.test is not None
    (found,), _ = training.evaluate([load_ensemble(whole)], training.data.test)
    assert found.score == pytest.approx(result["test"]["ensemble"], rel=1e-6)


def test_samples_are_the_most_probable_tokens_at_temperature_0_and_among_k() -> None:
    torch.manual_seed(0)
    network, prompt = GPT(**SIZES).eval(), torch.tensor([3])  # type: ignore[arg-type]
    expected = prompt
    for _ in range(15):
        expected = torch.cat([expected, network(expected[None, -12:])[0, -1].argmax()[None]])
    options: dict[str, Any] = {"num_tokens": 15, "context": 12}
    assert torch.equal(sample(network, prompt, **options, temperature=0.0), expected[1:])
    assert torch.equal(sample(network, prompt, **options, top_k=1, seed=4), expected[1:])
    with pytest.raises(ConfigError, match="the prompt is empty, expected at least one token"):
        sample(network, prompt[:0], **options)
    with pytest.raises(ConfigError, match=r"the temperature is -1.0 and top_k None, expected at least 0"):
        sample(network, prompt, **options, temperature=-1.0)


def test_a_run_is_distilled_from_the_ensemble_of_another(tmp_path: Path, text_file: Path, whole: Path) -> None:
    config = config_for(text_file, method="independent", members=1)
    taught = replace(config, train=replace(config.train, teacher=str(whole)))
    for name, one in (("plain", config), ("taught", taught)):
        execute(one, tmp_path / name, workers=1)
    plain, student = (load_language_model(tmp_path / name).network for name in ("plain", "taught"))
    assert not torch.equal(plain.head.weight, student.head.weight)  # type: ignore[union-attr]
    missing = replace(config, train=replace(config.train, teacher=str(tmp_path / "nothing")))
    with pytest.raises(RunError, match="nothing"):
        execute(missing, tmp_path / "untaught", workers=1)
