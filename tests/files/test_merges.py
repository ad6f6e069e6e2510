"""Merges of files: laws, and slow and obvious twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from papa.cli.main import main
from papa.errors import ConfigError, SoupError
from papa.files import (
    DareLinear,
    DareTies,
    MergeMethod,
    ModelStock,
    Slerp,
    TaskArithmetic,
    Ties,
    average,
    merge_config,
    methods,
    soup_files,
)
from papa.files.merge_functions import dropped, kth_largest, merged_by_sign, slerp_weights, trimmed

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each tensor."""
    monkeypatch.setattr(average, "BLOCK", 7)
    monkeypatch.setattr(methods, "BLOCK", 7)


def states(count: int, *, dtype: torch.dtype = torch.float32) -> list[State]:
    """A base and networks that were fine-tuned from it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed": (5, 6), "model.layers.0.mlp": (4, 5), "model.layers.1.mlp": (4, 5), "empty": (0,)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found = [base]
    for _ in range(count):
        found.append({name: value + torch.randn(value.shape, generator=generator) for name, value in base.items()})
    return [{**{n: v.to(dtype) for n, v in one.items()}, "step": torch.tensor(i)} for i, one in enumerate(found)]


def save_all(some: list[State], folder: Path) -> list[Path]:
    files = [folder / f"{number}.safetensors" for number in range(len(some))]
    for state, file in zip(some, files, strict=True):
        save_file(state, file)
    return files


def merge(some: list[State], folder: Path, make: Callable[[Path], MergeMethod], weights: Any = None) -> State:
    """The first state is the base; slerp takes it as one of the two."""
    files = save_all(some, folder)
    method = make(files[0])
    inputs = files if isinstance(method, Slerp) else files[1:]
    return load_file(soup_files(inputs, folder / "soup.safetensors", weights, method=method, overwrite=True).path)


def floats(state: State) -> State:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def assert_close(found: State, expected: State, **tolerance: float) -> None:
    for name, tensor in floats(expected).items():
        torch.testing.assert_close(found[name], tensor, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


# Slow twins, of whole tensors


def slerp_twin(a: Tensor, b: Tensor, t: float) -> Tensor:
    if not a.numel():
        return a
    u, v = a.double().flatten(), b.double().flatten()
    theta = torch.arccos(torch.dot(u / u.norm(), v / v.norm()))
    mixed = (torch.sin((1 - t) * theta) * u + torch.sin(t * theta) * v) / torch.sin(theta)
    return mixed.reshape(a.shape).to(a.dtype)


def ties_twin(base: Tensor, others: list[Tensor], weights: list[float], density: float, scale: float) -> Tensor:
    merged = torch.zeros(base.numel())
    kept = []
    for other in others:
        delta = (other - base).flatten()
        count = max(1, int(density * delta.numel())) if delta.numel() else 0
        order = sorted(range(delta.numel()), key=lambda i: -abs(float(delta[i])))
        kept.append([float(delta[i]) if i in order[:count] else 0.0 for i in range(delta.numel())])
    for i in range(base.numel()):
        values = [weight * delta[i] for weight, delta in zip(weights, kept, strict=True)]
        sign = 1 if sum(values) >= 0 else -1
        agree = [j for j, value in enumerate(values) if value * sign > 0]
        if agree:
            merged[i] = sum(values[j] for j in agree) / sum(weights[j] for j in agree)
    return base + scale * merged.reshape(base.shape)


def stock_twin(base: Tensor, others: list[Tensor]) -> Tensor:
    deltas = [(other - base).flatten() for other in others]
    cosines = [torch.cosine_similarity(a, b, dim=0) for i, a in enumerate(deltas) for b in deltas[i + 1 :]]
    cosine = float(torch.stack(cosines).mean().clamp(0, 1)) if base.numel() else 1.0
    ratio = len(others) * cosine / (1 + (len(others) - 1) * cosine)
    return torch.lerp(base, torch.stack(others).mean(dim=0), ratio)


def test_slerp_equals_its_twin(tmp_path: Path) -> None:
    some = states(1)
    found = merge(some, tmp_path, lambda _: Slerp(t=0.3))
    assert_close(found, {name: slerp_twin(some[0][name], some[1][name], 0.3) for name in floats(some[0])})
    assert found["step"] == 0


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_equals_its_twin(tmp_path: Path, density: float) -> None:
    some, weights = states(3), [0.5, 1.5, 1.0]
    found = merge(some, tmp_path, lambda base: Ties(base=base, density=density, scale=0.7), weights)
    for name in floats(some[0]):
        expected = ties_twin(some[0][name], [state[name] for state in some[1:]], weights, density, 0.7)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def test_model_stock_and_task_arithmetic_equal_their_twins(tmp_path: Path) -> None:
    some = states(3)
    others = {name: [state[name] for state in some[1:]] for name in floats(some[0])}
    found = merge(some, tmp_path, lambda base: ModelStock(base=base))
    assert_close(found, {name: stock_twin(some[0][name], others[name]) for name in others})
    found = merge(some, tmp_path, lambda base: TaskArithmetic(base=base, scale=0.5), [0.4, -0.3, 1.1])
    for name, (a, b, c) in others.items():
        base = some[0][name]
        expected = base + 0.5 * (0.4 * (a - base) - 0.3 * (b - base) + 1.1 * (c - base))
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


# Laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_network_of_weight_1_is_that_network(tmp_path: Path, dtype: torch.dtype) -> None:
    some = states(1, dtype=dtype)
    exact = merge(some, tmp_path, lambda base: TaskArithmetic(base=base), [1.0])
    assert all(torch.equal(exact[name], some[1][name]) for name in floats(some[1]))
    for make in (
        lambda base: Ties(base=base, density=1.0),
        lambda base: DareLinear(base=base, density=1.0),
        lambda base: DareTies(base=base, density=1.0),
    ):
        assert_close(merge(some, tmp_path, make, [1.0]), some[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    "make", [lambda base: Ties(base=base, density=1.0), lambda base: ModelStock(base=base)], ids=["ties", "model stock"]
)
def test_equal_networks_give_that_network(tmp_path: Path, make: Any) -> None:
    base, other = states(1)
    assert_close(merge([base, other, other, other], tmp_path, make), other)


def test_without_weight_density_or_distance_the_base_is_left(tmp_path: Path) -> None:
    some = states(2)
    for make, weights in (
        (lambda base: TaskArithmetic(base=base), [0.0, 0.0]),
        (lambda base: Ties(base=base, density=0.0), None),
        (lambda base: DareTies(base=base, density=0.0), [1.0, 1.0]),
        (lambda base: Ties(base=base, scale=0.0), None),
    ):
        found = merge(some, tmp_path, make, weights)
        assert all(torch.equal(found[name], some[0][name]) for name in floats(some[0]))


@given(st.floats(0, 1), st.floats(-0.99, 0.99))
def test_slerp_keeps_the_norm_and_its_ends(t: float, cosine: float) -> None:
    a, b = slerp_weights(torch.tensor([[4.0, 4 * cosine], [4 * cosine, 4.0]], dtype=torch.float64), t)
    assert a * a + b * b + 2 * a * b * cosine == pytest.approx(1.0, abs=1e-9)
    products = torch.tensor([[2.0, cosine], [cosine, 3.0]], dtype=torch.float64)
    assert slerp_weights(products, 0.0) == pytest.approx((1.0, 0.0))
    assert slerp_weights(products, 1.0) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("products", [[[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[1.0, -1.0], [-1.0, 1.0]]])
def test_slerp_is_linear_for_parallel_networks(products: list[list[float]]) -> None:
    assert slerp_weights(torch.tensor(products, dtype=torch.float64), 0.25) == (0.75, 0.25)


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.5, 0.5, 1.0, 2.0, 1e30]) | st.floats(0, 100, width=32), min_size=1),
    st.data(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_are_found_in_passes_over_blocks(values: list[float], data: Any, dtype: torch.dtype) -> None:
    count = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values, dtype=dtype)
    limit, num_equal = kth_largest(lambda: iter(tensor.split(3)), count)
    largest = tensor.sort(descending=True).values
    assert limit == largest[count - 1]
    assert num_equal == int((largest[:count] == limit).sum())
    left, kept = num_equal, []
    for block in tensor.split(3):
        part, left = trimmed(block, limit, left)
        kept.append(part)
    found = torch.cat(kept)
    assert left == 0
    assert torch.equal(found.sort(descending=True).values[:count], largest[:count])
    assert int((found != 0).sum()) <= count


def test_dare_keeps_the_mean_and_the_density(tmp_path: Path) -> None:
    delta = torch.linspace(-1, 1, 200)
    draws = torch.stack([dropped(delta, 0.3, torch.Generator().manual_seed(seed)) for seed in range(2000)])
    assert float((draws != 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    torch.testing.assert_close(draws.mean(dim=0), delta, rtol=0, atol=5 * (0.7 / 0.3 / 2000) ** 0.5)
    some = states(2)
    one, same = (merge(some, tmp_path, lambda base: DareLinear(base=base, density=0.4), [1.0, 0.5]) for _ in range(2))
    other = merge(some, tmp_path, lambda base: DareLinear(base=base, density=0.4, seed=1), [1.0, 0.5])
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed"], other["model.embed"])


def test_the_order_of_networks_does_not_matter() -> None:
    deltas, weights = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 0.5, 1.0])
    order = torch.tensor([2, 0, 3, 1])
    one = merged_by_sign(deltas, weights, normalize=True)
    torch.testing.assert_close(merged_by_sign(deltas[order], weights[order], normalize=True), one)


# Configs


def config(files: list[Path], kind: str, **more: Any) -> dict[str, Any]:
    models = [{"model": str(file), "parameters": {"weight": 0.5}} for file in files[1:]]
    return {"merge_method": kind, "base_model": str(files[0]), "models": models} | more


def test_settings_of_configs_follow_layers_and_filters(tmp_path: Path) -> None:
    files = save_all(states(2), tmp_path)
    t = [{"filter": "mlp", "value": [0.2, 1.0]}, {"value": 0.7}]
    found = merge_config(config(files[:2], "slerp", parameters={"t": t}))
    assert found.paths == (files[0], files[1])
    assert isinstance(found.method, Slerp)
    assert callable(found.method.t)
    assert [found.method.t(name) for name in states(0)[0] if name != "step"] == pytest.approx([0.7, 0.2, 1.0, 0.7])
    shared = {"density": [1, 0.5], "lambda": 0.9, "normalize": False, "int8_mask": True}
    source = config(files, "ties", parameters=shared)
    source["models"][0]["parameters"] = {"density": {"filter": "layers.1", "value": 0.25}, "weight": 0.3}
    source["models"].insert(0, {"model": str(files[0])})
    ties = merge_config(source)
    assert isinstance(ties.method, Ties)
    assert (ties.method.scale, ties.method.normalize, ties.weights) == (0.9, False, (0.3, 0.5))
    first, second = ties.method.densities(2)
    assert callable(first)
    assert callable(second)
    assert [first("model.layers.1.mlp"), first("model.layers.0.mlp"), second("model.layers.1.mlp")] == [0.25, 1.0, 0.5]
    soup = soup_files(ties.paths, tmp_path / "soup.safetensors", ties.weights, method=ties.method)
    assert soup.weights == (0.3, 0.5)


def test_weights_by_tensor_are_the_plain_mean_of_each(tmp_path: Path) -> None:
    some = states(1)
    files = save_all(some, tmp_path)
    source = config([files[0], *files], "linear", dtype="float64")
    source["models"][0]["parameters"]["weight"] = [{"filter": "embed", "value": 3.0}, {"value": 1.0}]
    source["models"][1]["parameters"]["weight"] = 1.0
    del source["base_model"]
    found = merge_config(source)
    soup = soup_files(found.paths, tmp_path / "soup.safetensors", found.weights, method=found.method, dtype=found.dtype)
    state = load_file(soup.path)
    for name, share in {"model.embed": 0.75, "model.layers.0.mlp": 0.5}.items():
        expected = share * some[0][name].double() + (1 - share) * some[1][name].double()
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-7)


def test_a_config_lists_all_that_is_wrong(tmp_path: Path) -> None:
    files = save_all(states(2), tmp_path)
    bad = config(files, "tees", tokenizer_source="union", chat_template="auto")
    bad["models"][0]["parameters"]["gamma"] = 1
    bad["models"][1]["parameters"]["density"] = "half"
    with pytest.raises(ConfigError) as caught:
        merge_config(bad)
    for part in (
        "merge_method is 'tees': did you mean ties?",
        "tokenizer_source is 'union', expected base",
        "'chat_template' is not supported",
        "'gamma' is not supported",
        "'density' is 'half', expected a number, numbers or filters with a value",
    ):
        assert part in str(caught.value)
    for value, message in (
        ([], "holds a list, expected a mapping"),
        ({"merge_method": "slerp"}, r"expected either models or slices[\s\S]*base_model is missing, which slerp needs"),
        (config(files, "model_stock", parameters={"filter_wise": True}), "filter_wise is True, expected False"),
        (config(files, "dare_ties", parameters={"rescale": False}), "rescale is False, expected True"),
        (config(files[:2], "slerp"), "t is missing for slerp"),
        ({**config(files, "ties"), "models": [{"model": str(files[1])}]}, "has no weight"),
        ({**config(files, "ties"), "models": [{"model": str(files[0])}]}, "no network besides the base"),
        ({**config(files, "ties"), "models": [{"path": "a"}]}, "entry 0 of the models has no path under 'model'"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_config(value)
    slices = {"sources": [{"model": str(file), "layer_range": [0, 1]} for file in files[:2]]}
    whole = {"merge_method": "slerp", "base_model": str(files[0]), "parameters": {"t": 0.5}}
    with pytest.raises(ConfigError, match=r"layer_range of .* is \[0, 1\], expected \[0, 2\]"):
        merge_config({**whole, "slices": [slices]})
    with pytest.raises(ConfigError, match="slices that stack parts of networks are not supported"):
        merge_config({**whole, "slices": [slices, slices]})


# Bad input, and the command


@pytest.mark.parametrize(
    ("make", "weights", "message"),
    [
        (lambda base: Ties(base=base, density=1.5, scale=1e9), None, "the density is 1.5.*; the scale is 1e[+]09"),
        (lambda base: Ties(base=base, density=(0.5,)), None, "there are 1 densities for 2 files"),
        (lambda base: TaskArithmetic(base=base), None, "give one weight for each file.*such as 0.5 for the mean of 2"),
        (lambda base: TaskArithmetic(base=base), [1.0], "there are 1 weights for 2 files"),
        (lambda base: TaskArithmetic(base=base), [1.0, float("nan")], "a weight is nan, expected a number"),
        (lambda base: ModelStock(base=base), [0.5, 0.5], "one way to choose its weights"),
        (lambda base: Ties(base=base.with_name("none")), None, "there is no file"),
        (lambda base: Slerp(t=lambda name: 2.0), None, "t is 2 for '.*', expected a number from 0 to 1"),
    ],
)
def test_settings_that_are_invalid(tmp_path: Path, make: Any, weights: Any, message: str) -> None:
    with pytest.raises((ConfigError, SoupError), match=message):
        merge(states(1) if make(tmp_path).name == "slerp" else states(2), tmp_path, make, weights)
    assert not (tmp_path / "soup.safetensors").exists()


def test_a_merge_excludes_what_needs_a_mean(tmp_path: Path) -> None:
    files = save_all(states(2), tmp_path)
    method = Ties(base=files[0])
    with pytest.raises(ConfigError, match="one way to choose its weights, got learned and ties"):
        soup_files(files[1:], tmp_path / "soup.safetensors", method=method, learned=True)
    with pytest.raises(ConfigError, match="ties does not go with alignment, REPAIR or BatchNorm statistics"):
        soup_files(files[1:], tmp_path / "soup.safetensors", method=method, repair=True)
    with pytest.raises(ConfigError, match="slerp cannot be used: slerp interpolates between two networks, got 3"):
        soup_files(files, tmp_path / "soup.safetensors", method=Slerp())


def test_nan_in_a_file_is_named(tmp_path: Path) -> None:
    some = states(2)
    some[2]["model.embed"][0, 0] = torch.nan
    with pytest.raises(SoupError, match=r"'model\.embed' of the average has NaN: leave out .*2\.safetensors"):
        merge(some, tmp_path, lambda base: Ties(base=base, density=0.5))


def test_the_command_merges_by_options_and_by_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, *files = map(str, save_all(states(2), tmp_path))
    text = f"merge_method: ties\nbase_model: {base}\nmodels:\n" + "".join(
        f"- {{model: {file}, parameters: {{weight: 1.0, density: 0.3}}}}\n" for file in files
    )
    (tmp_path / "merge.yml").write_text(text)
    one, other = str(tmp_path / "one.safetensors"), str(tmp_path / "other.safetensors")
    assert main(["soup", "--config", str(tmp_path / "merge.yml"), "-o", one]) == 0
    assert main(["soup", *files, "-o", other, "--merge", "ties", "--base", base, "--density", "0.3"]) == 0
    assert all(torch.equal(load_file(one)[name], value) for name, value in load_file(other).items())
    dare = ["--merge", "dare_linear", "--base", base, "--density", "0.3,0.6", "--weights", "1,1", "--drop-seed", "3"]
    assert main(["soup", *files, "-o", str(tmp_path / "dare.safetensors"), *dare]) == 0
    capsys.readouterr()
    (tmp_path / "aliases.yml").write_text("a: &x [1]\nb: *x\n")
    (tmp_path / "bad.yml").write_text("a: [1\n")
    for arguments, message in (
        (
            [*files, "--merge", "dare_ties", "--t", "0.5"],
            "--t has no meaning for --merge dare_ties; --merge",
        ),
        ([*files, "--density", "0.5"], "--density has no meaning for --merge linear"),
        ([*files, "--merge", "ties", "--base", base, "--density", "a"], "--density is 'a', expected numbers"),
        ([*files, "--stock", base, "--merge", "ties"], "--stock is short for --merge model_stock"),
        (["--config", str(tmp_path / "aliases.yml")], "has aliases"),
        (["--config", str(tmp_path / "bad.yml")], "is not valid YAML"),
        (
            [*files, "--config", str(tmp_path / "merge.yml"), "--drop-seed", "1"],
            "the config says so already; --drop-seed",
        ),
    ):
        assert main(["soup", *arguments, "-o", str(tmp_path / "none.safetensors")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none.safetensors").exists()
