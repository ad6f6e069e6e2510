"""Language models: text, tokenizers, the network, the scores, and runs of the recipes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
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
from papa.lab.data.text import Windows, load_text, read_text
from papa.lab.data.tokens import BytePairs, Bytes, Characters, Tokenizer, make_tokenizer, read_tokenizer
from papa.lab.models.from_transformers import make_causal_model
from papa.lab.models.gpt import GPT
from papa.lab.recipes import find, load, load_ensemble, load_language_model
from papa.lab.recipes.build import build, decayed_matrices, make_optimizer
from papa.lab.runs import RunDirectory
from papa.lab.sampling import sample
from papa.lab.tasks.language import TokenLoss, language_modelling
from papa.training.data import Data, as_data, split_parts
from texts import sample_text

ROOT = Path(__file__).parents[2]
TEXT = sample_text(400)
SIZES = {"vocab_size": 11, "context": 12, "num_layers": 2, "num_heads": 2, "width": 16}
STYLES = [
    {},
    {"mlp": "swiglu", "norm": "rms", "positions": "rotary", "bias": False},
    {"tied": False, "positions": "rotary"},
]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(sample_text(1200))
    return path


def config_for(text_file: Path, recipe: str = "text-gpt-mini", **changes: object) -> Config:
    config = find(recipe).config("smoke")
    data = replace(config.data, root=str(text_file), context=16, max_train=16 * 8 * 6 + 1, max_test=300)
    return replace(config, data=data, train=replace(config.train, batch_size=8, precision="float32"), **changes)


def tokenizers() -> list[Tokenizer]:
    return [Characters(TEXT), Bytes(), BytePairs.learned(TEXT, vocab_size=300)]


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda one: type(one).__name__)
def test_a_tokenizer_gives_back_the_text_and_counts_its_bytes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    assert tokens.dtype == torch.int32
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert sum(tokenizer.num_bytes()[token] for token in tokens.tolist()) == len(TEXT.encode())
    again = read_tokenizer(tokenizer.to_json())
    assert (type(again), again.vocab_size) == (type(tokenizer), tokenizer.vocab_size)
    assert torch.equal(again.encode(TEXT), tokens)


def test_byte_pairs_take_any_text_and_characters_only_their_own() -> None:
    for tokenizer in (Bytes(), BytePairs.learned(TEXT, vocab_size=300)):
        assert tokenizer.decode(tokenizer.encode("größe 漢").tolist()) == "größe 漢"
    with pytest.raises(DataError, match="the text has the character 'ß', expected only the 25 of"):
        Characters(TEXT).encode("The caß")


def test_byte_pairs_are_the_same_in_every_process() -> None:
    expected = BytePairs.learned(TEXT, vocab_size=320).to_json()
    code = "from texts import sample_text; from papa.lab.data.tokens import BytePairs; print(end=BytePairs.learned("
    code += "sample_text(400), vocab_size=320).to_json())"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == expected


def test_a_tokenizer_that_is_unknown_too_small_or_damaged_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer is words, expected characters, bytes, bpe, or the path"):
        make_tokenizer("words", TEXT, TEXT, vocab_size=300)
    with pytest.raises(ConfigError, match="the vocabulary has 100 tokens, expected more than the 256 bytes"):
        make_tokenizer("bpe", TEXT, TEXT, vocab_size=100)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer"):
        make_tokenizer(str(tmp_path / "tokenizer.json"), TEXT, TEXT, vocab_size=300)


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
    text = load_text(text_file, context=16, validation=0.2, test_share=0.1)
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


def test_accumulated_gradients_are_those_of_the_whole_batch(text_file: Path) -> None:
    config = config_for(text_file)
    config = replace(config, gpt=replace(config.gpt, dropout=0.0), members=1)
    size = config.train.batch_size
    trainings = [
        build(replace(config, train=replace(config.train, accumulate=count, batch_size=size // count)))
        for count in (1, 2)
    ]
    for training in trainings:
        training._step_members()
    whole, parts = ([one.grad for one in training.population[0].parameters()] for training in trainings)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(trainings[0].loss_sums, trainings[1].loss_sums)


def test_members_see_the_parts_and_orders_they_are_given(text_file: Path) -> None:
    config = config_for(text_file, members=3)
    seen = {}
    for name, changes in {
        "own": {},
        "same": {"same_order": True},
        "disjoint": {"parts": "disjoint"},
        "folds": {"parts": "folds"},
    }.items():
        training = build(replace(config, diversity=replace(config.diversity, **changes)))
        steps = training.length.steps_per_epoch
        batches = [[training.batches.training_batch(member, step)[0] for step in range(steps)] for member in range(3)]
        seen[name] = [torch.cat(found) for found in batches]
    assert not torch.equal(*seen["own"][:2])
    assert torch.equal(*seen["same"][:2])
    assert [len(found) for found in seen["disjoint"]] == [16] * 3
    assert [len(found) for found in seen["folds"]] == [32] * 3


def test_parts_are_disjoint_and_folds_are_everything_else() -> None:
    windows = Windows(torch.arange(101), context=10)
    parts, folds = split_parts(windows, 3), split_parts(windows, 3, leave_one_out=True)
    first = [part.batch(torch.arange(len(part)))[0][:, 0].tolist() for part in parts]
    others = [fold.batch(torch.arange(len(fold)))[0][:, 0].tolist() for fold in folds]
    assert first == [[0, 10, 20], [30, 40, 50], [60, 70, 80]]
    assert others == [first[1] + first[2], first[0] + first[2], first[0] + first[1]]
    with pytest.raises(DataError, match="the data has 10 examples, expected at least one for each of 11 parts"):
        split_parts(windows, 11)
    uneven = Data(train=windows, validation=windows, parts=(parts[0], windows))
    with pytest.raises(DataError, match="parts have 3, 10 examples, expected equally many"):
        as_data(uneven, 0.1, seed=1)


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
    taught = replace(config, train=replace(config.train, teacher=str(whole), teacher_weight=1.0))
    for name, one in (("plain", config), ("taught", taught)):
        execute(one, tmp_path / name, workers=1)
    plain, student = (load_language_model(tmp_path / name).network for name in ("plain", "taught"))
    assert not torch.equal(plain.head.weight, student.head.weight)  # type: ignore[union-attr]
    missing = replace(config, train=replace(config.train, teacher=str(tmp_path / "nothing")))
    with pytest.raises(RunError, match="nothing"):
        execute(missing, tmp_path / "untaught", workers=1)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_models_of_transformers_train_and_average(tmp_path: Path, text_file: Path, kind: str) -> None:
    config = config_for(text_file)
    config = replace(config, model=replace(config.model, name=f"transformers:{kind}"))
    execute(config, tmp_path / "run", workers=1)
    found = load_language_model(tmp_path / "run")
    tokens = torch.randint(found.tokenizer.vocab_size, (2, 16))
    assert found.network(tokens).shape == (2, 16, found.tokenizer.vocab_size)
    members = [load_language_model(tmp_path / "run", member).network.state_dict() for member in range(2)]
    for name, value in found.network.state_dict().items():
        torch.testing.assert_close(value, (members[0][name] + members[1][name]) / 2)


def test_a_local_folder_of_transformers_gives_the_config_and_with_pretrained_the_weights(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 7, "context": 8, "num_layers": 1, "num_heads": 2, "width": 8}
    saved = make_causal_model("transformers:gpt2", **sizes)
    saved.model.save_pretrained(tmp_path)  # type: ignore[operator]
    other = {**sizes, "vocab_size": 5, "width": 99}
    loaded = make_causal_model(f"transformers:{tmp_path}", **other, pretrained=True)
    assert_same_bits(loaded.state_dict(), saved.state_dict())
    assert loaded.eval()(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 5)
    fresh = make_causal_model(f"transformers:{tmp_path}", **other)
    assert not torch.equal(fresh.state_dict()["model.lm_head.weight"], saved.state_dict()["model.lm_head.weight"])
    with pytest.raises(ConfigError, match="has 7 tokens, expected at least the 9 of the tokenizer"):
        make_causal_model(f"transformers:{tmp_path}", **{**sizes, "vocab_size": 9})
    with pytest.raises(ConfigError, match="transformers:gpt3 is neither a local folder nor a causal model"):
        make_causal_model("transformers:gpt3", **sizes)
    with pytest.raises(ConfigError, match=r"is not a local folder with a config.json"):
        make_causal_model("transformers:gpt2", **sizes, pretrained=True)
