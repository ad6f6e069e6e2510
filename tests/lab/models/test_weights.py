import os
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from papa.errors import ConfigError
from papa.lab.models import VGG, load_weights_, make_model, resnet20


def small(num_classes=10, **options):
    return make_model("resnet20", num_classes=num_classes, width=4, **options)


@pytest.fixture
def trained():
    """A state dict that differs from that of a new network, running statistics included."""
    torch.manual_seed(0)
    model = small()
    model(torch.randn(4, 3, 32, 32))
    return model.state_dict()


def assert_same(model: nn.Module, state, but=()):
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]) == (key not in but), key


LAYOUTS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "model": lambda state: {"epoch": 3, "model": state},
    "data parallel": lambda state: {f"module.{key}": value for key, value in state.items()},
    "nested data parallel": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
    "compiled": lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    "ordered": OrderedDict,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_torch_files_in_every_layout(layout, trained, tmp_path):
    torch.save(layout(trained), tmp_path / "net.pt")
    assert_same(small(weights=tmp_path / "net.pt"), trained)


def test_other_precision_is_converted(trained, tmp_path):
    halves = {key: value.half() if value.is_floating_point() else value for key, value in trained.items()}
    save_file(halves, tmp_path / "net.safetensors")
    weight = small(weights=tmp_path / "net.safetensors").head.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, trained["head.weight"].half().float())


def test_another_number_of_classes_gives_the_new_head_of_the_seed(trained, tmp_path):
    torch.save(trained, tmp_path / "net.pt")
    torch.manual_seed(5)
    fresh = small(num_classes=100)
    torch.manual_seed(5)
    model = small(num_classes=100, weights=tmp_path / "net.pt")
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert torch.equal(model.head.bias, fresh.head.bias)
    trained.update({"head.weight": fresh.head.weight, "head.bias": fresh.head.bias})
    assert_same(model, trained)


def test_a_file_without_a_head_gives_a_new_one(trained, tmp_path):
    torch.save({key: value for key, value in trained.items() if not key.startswith("head.")}, tmp_path / "net.pt")
    model = small()
    assert load_weights_(model, tmp_path / "net.pt") == ["head.weight", "head.bias"]
    assert_same(model, trained, but=("head.weight", "head.bias"))


def test_a_file_that_fits_leaves_nothing_unfilled(trained, tmp_path):
    torch.save(trained, tmp_path / "net.pt")
    assert load_weights_(small(), tmp_path / "net.pt") == []


def test_a_head_of_other_features_is_no_other_number_of_classes(tmp_path):
    model = nn.Module()
    model.head = nn.Linear(4, 10)
    save_file({"head.weight": torch.zeros(10, 5), "head.bias": torch.zeros(10)}, tmp_path / "net.safetensors")
    with pytest.raises(ConfigError, match=r"'head\.weight' found \(10, 5\), expected \(10, 4\)"):
        load_weights_(model, tmp_path / "net.safetensors")


def test_other_shapes_raise_and_leave_the_network_alone(trained, tmp_path):
    torch.save(trained, tmp_path / "net.pt")
    wider = resnet20(width=8)
    before = {key: value.clone() for key, value in wider.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights_(wider, tmp_path / "net.pt")
    message = str(caught.value)
    assert "'stem.0.weight' found (4, 3, 3, 3), expected (8, 3, 3, 3)" in message
    assert message.count(" found ") == 10
    assert "more. Expected weights of the same network" in message
    assert_same(wider, before)


def test_missing_and_extra_tensors_raise(trained, tmp_path):
    trained["extra"] = torch.zeros(2)
    del trained["stem.0.weight"]
    torch.save(trained, tmp_path / "net.pt")
    with pytest.raises(ConfigError) as caught:
        small(weights=tmp_path / "net.pt")
    assert "'stem.0.weight' found nothing, expected (4, 3, 3, 3)" in str(caught.value)
    assert "'extra' found (2,), expected nothing" in str(caught.value)
    assert "more" not in str(caught.value)


def test_another_number_of_channels_raises(trained, tmp_path):
    torch.save(trained, tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=r"'stem\.0\.weight' found \(4, 3, 3, 3\), expected \(4, 1, 3, 3\)"):
        small(weights=tmp_path / "net.pt", in_channels=1)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"the weights cannot be loaded: there is no file .*gone\.pt"):
        small(weights=tmp_path / "gone.pt")


class Intruder:
    def __reduce__(self):
        return os.mkdir, ("intruded",)


def test_timm_weights_with_another_number_of_classes(tmp_path):
    torch.manual_seed(0)
    source = make_model("timm:test_efficientnet", num_classes=10)
    save_file(source.state_dict(), tmp_path / "net.safetensors")
    model = make_model("timm:test_efficientnet", num_classes=7, weights=tmp_path / "net.safetensors")
    expected = source.state_dict()
    expected.update({f"classifier.{key}": value for key, value in model.classifier.state_dict().items()})
    assert_same(model, expected)


def test_timm_networks_with_two_heads(tmp_path):
    name = "timm:deit_tiny_distilled_patch16_224"
    torch.save(make_model(name, num_classes=5).state_dict(), tmp_path / "net.pt")
    unfilled = load_weights_(make_model(name, num_classes=3), tmp_path / "net.pt")
    assert unfilled == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


def test_heads_with_a_norm_keep_it_from_the_file(tmp_path):
    source = make_model("timm:levit_128s", num_classes=5, image_size=224)
    torch.save(source.state_dict(), tmp_path / "net.pt")
    model = make_model("timm:levit_128s", num_classes=3, image_size=224)
    unfilled = load_weights_(model, tmp_path / "net.pt")
    assert unfilled == [f"{head}.linear.{kind}" for head in ("head", "head_dist") for kind in ("weight", "bias")]


def test_timm_weights_of_another_image_size_are_converted_as_timm_does(tmp_path):
    source = make_model("timm:test_vit", num_classes=10, image_size=64)
    torch.save(source.state_dict(), tmp_path / "net.pt")
    model = make_model("timm:test_vit", num_classes=10, image_size=32, weights=tmp_path / "net.pt")
    assert model.pos_embed.shape != source.pos_embed.shape
    assert_same(model, source.state_dict() | {"pos_embed": model.pos_embed})


def test_timm_weights_from_masked_pretraining(tmp_path):
    """Such files have a mask token and a language head, no classifier, and another name for the last norm."""
    name = "timm:eva02_tiny_patch14_224.mim_in22k"
    source = make_model(name, num_classes=10, image_size=56)
    nn.init.normal_(source.fc_norm.weight)
    state = {key.replace("fc_norm.", "norm."): value for key, value in source.state_dict().items() if "head" not in key}
    extra = {
        "mask_token": torch.zeros(1, 1, 192),
        "lm_head.weight": torch.zeros(8, 192),
        "lm_head.bias": torch.zeros(8),
    }
    torch.save(state | extra, tmp_path / "net.pt")
    model = make_model(name, num_classes=10, image_size=56)
    assert load_weights_(model, tmp_path / "net.pt") == ["head.weight", "head.bias"]
    assert_same(model, source.state_dict(), but=("head.weight",))


def test_timm_weights_of_another_network_raise(tmp_path):
    torch.save(VGG(11, width=4).state_dict(), tmp_path / "net.pt")
    for name in ["timm:test_vit", "timm:test_resnet"]:
        with pytest.raises(ConfigError, match=r"do not fit .*; and \d+ more"):
            make_model(name, num_classes=10, weights=tmp_path / "net.pt")


def test_a_conversion_that_fails_still_reports_the_differences(tmp_path, monkeypatch):
    def fail(state, model):
        raise KeyError("pos_embed")

    torch.save(VGG(11, width=4).state_dict(), tmp_path / "net.pt")
    model = make_model("timm:test_vit", num_classes=10)
    monkeypatch.setattr("timm.models.vision_transformer.checkpoint_filter_fn", fail)
    with pytest.raises(ConfigError, match=r"'cls_token' found nothing|'pos_embed' found nothing"):
        load_weights_(model, tmp_path / "net.pt")
