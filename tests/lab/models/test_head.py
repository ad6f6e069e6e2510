import pytest
import torch
from torch import nn

from papa.errors import ConfigError
from papa.lab.models import freeze_all_but_head_, head_of, make_model, unfreeze_


def build(name):
    if name.startswith("timm:"):
        return make_model(name, num_classes=10)
    options = {"in_channels": 1, "image_size": 8} if name in ("digits-cnn", "linear") else {}
    return make_model(name, num_classes=10, width=None if name == "linear" else 4, **options)


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


NAMES = [
    *("digits-cnn", "vgg11", "resnet18", "resnet20", "unet", "linear"),
    "timm:test_vit",
    "timm:test_resnet",
    "timm:test_efficientnet",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_head_gives_the_class_scores(name):
    head = head_of(build(name))
    assert isinstance(head, nn.Conv2d if name == "unet" else nn.Linear)
    assert len(head.weight) == 10


@pytest.mark.parametrize("name", NAMES)
def test_freezing_leaves_the_head_and_unfreezing_restores_all(name):
    model = build(name)
    everything = trainable(model)
    head = list(head_of(model).parameters())
    frozen = freeze_all_but_head_(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in head}
    assert len(frozen) == len(everything) - len(head)
    unfreeze_(frozen)
    assert trainable(model) == everything


def test_two_heads_are_both_heads():
    model = build("timm:deit_tiny_distilled_patch16_224")
    assert isinstance(head_of(model), nn.ModuleList)
    freeze_all_but_head_(model)
    assert trainable(model) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_what_was_frozen_before_stays_frozen():
    model = build("resnet20")
    model.stem.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    before = trainable(model)
    frozen = freeze_all_but_head_(model)
    assert trainable(model) == {"head.weight"}
    unfreeze_(frozen)
    assert trainable(model) == before


def test_freezing_twice_freezes_nothing_more():
    model = build("resnet20")
    frozen = freeze_all_but_head_(model)
    assert freeze_all_but_head_(model) == []
    unfreeze_(frozen)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_head_moves_while_all_else_is_frozen():
    torch.manual_seed(0)
    model = build("vgg11")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    images = torch.randn(4, 3, 32, 32)
    # The optimizer must not use gradients from before freezing.
    model(images).sum().backward()
    freeze_all_but_head_(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model(images).square().sum().backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), nn.Sequential()])
def test_networks_without_a_head_raise(model):
    with pytest.raises(ConfigError, match="Sequential has no classifier with parameters"):
        head_of(model)


def test_headless_timm_networks_raise():
    import timm

    with pytest.raises(ConfigError, match="has no classifier with parameters"):
        freeze_all_but_head_(timm.create_model("test_resnet", num_classes=0))
