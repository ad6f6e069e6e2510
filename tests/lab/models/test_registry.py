import sys

import pytest
import torch

from papa.errors import ConfigError
from papa.lab.models import head_of, input_size_of, make_model, normalization_of

FINE_TUNED = ["tf_efficientnetv2_s", "eva02_tiny_patch14_224", "convit_tiny"]


def without_fit_check(monkeypatch):
    monkeypatch.setattr("papa.lab.models.registry._check_fit", lambda *args, **options: None)


def test_unknown_name_suggests_the_closest():
    with pytest.raises(ConfigError, match=r"unknown network 'vgg12': did you mean vgg\d\d\? Known: digits-cnn"):
        make_model("vgg12", num_classes=10)


def test_unknown_name_far_from_all_lists_them():
    with pytest.raises(ConfigError, match=r"known: digits-cnn, vgg11.*resnet20, unet, linear, timm:NAME"):
        make_model("xyzzy", num_classes=10)


@pytest.mark.parametrize("ask", [input_size_of, normalization_of])
def test_properties_of_unknown_networks_raise(ask):
    with pytest.raises(ConfigError, match="did you mean resnet18"):
        ask("resnet-18")


def test_vgg_raises_for_images_that_are_too_small():
    with pytest.raises(ConfigError, match=r"vgg11 does not take images of 3x8x8 .*it was made for 32x32"):
        make_model("vgg11", num_classes=10, image_size=8, width=4)


@pytest.mark.parametrize("name", ["vgg11", "resnet20", "timm:test_vit"])
def test_the_seed_decides_the_weights_and_the_fit_check_draws_nothing(name, monkeypatch):
    options = {"num_classes": 10, "image_size": 32} | ({} if name.startswith("timm:") else {"width": 4})
    torch.manual_seed(3)
    first, drawn_after_first = make_model(name, **options), torch.rand(4)
    torch.manual_seed(3)
    again = make_model(name, **options)
    without_fit_check(monkeypatch)
    torch.manual_seed(3)
    unchecked, drawn_after_unchecked = make_model(name, **options), torch.rand(4)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
        assert torch.equal(tensor, unchecked.state_dict()[key]), key
    assert torch.equal(drawn_after_first, drawn_after_unchecked)


@pytest.mark.parametrize("name", ["resnet20", "timm:test_vit"])
def test_networks_come_in_training_mode_with_fresh_statistics(name):
    model = make_model(name, num_classes=10)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    counters = [value for key, value in model.state_dict().items() if key.endswith("num_batches_tracked")]
    assert not any(counters)


@pytest.mark.parametrize("name", ["resnet50", *FINE_TUNED])
def test_timm_networks_build_without_a_connection(name, monkeypatch):
    without_fit_check(monkeypatch)  # The pass at 224 is left to the small one below.
    model = make_model(f"timm:{name}", num_classes=100, image_size=224)
    assert head_of(model).out_features == 100


def test_timm_network_at_224():
    model = make_model("timm:convit_tiny.fb_in1k", num_classes=100, image_size=224)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 100)


def test_timm_options_are_passed_on():
    model = make_model("timm:test_vit", num_classes=7, in_channels=1, image_size=48)
    assert model(torch.zeros(2, 1, 48, 48)).shape == (2, 7)
    model = make_model("timm:test_resnet", num_classes=7, in_channels=1, image_size=48)
    assert model(torch.zeros(2, 1, 48, 48)).shape == (2, 7)


def test_timm_network_on_images_it_cannot_take():
    with pytest.raises(ConfigError, match=r"timm:test_vit\b.*3x8x8"):
        make_model("timm:test_vit", num_classes=10, image_size=8)


def test_unknown_timm_network_suggests_the_closest_few():
    with pytest.raises(
        ConfigError, match=r"did you mean timm:convit_tiny\?.* and \d+ more, see timm\.list_models"
    ) as e:
        make_model("timm:convitt_tiny", num_classes=10)
    assert len(str(e.value)) < 400


def test_unknown_timm_network_far_from_all():
    with pytest.raises(ConfigError, match=r"unknown network 'timm:0': timm\.list_models\(\) names the \d+"):
        make_model("timm:0", num_classes=10)


def test_unknown_timm_tag_suggests_the_closest():
    with pytest.raises(ConfigError, match=r"unknown weights 'in21' .*did you mean timm:tf_efficientnetv2_s\.in21k\?"):
        make_model("timm:tf_efficientnetv2_s.in21", num_classes=10)


def test_timm_networks_have_no_width():
    with pytest.raises(ConfigError, match="have their width in their name"):
        make_model("timm:resnet50", num_classes=10, width=32)


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'papa-torch\[lab\]'"):
        make_model("timm:resnet50", num_classes=10)
    assert make_model("resnet20", num_classes=10, width=4)


def test_published_weights_are_asked_of_timm(monkeypatch):
    import timm

    asked = {}
    original = timm.create_model

    def create_model(name, *, pretrained, **options):
        asked.update(name=name, pretrained=pretrained)
        return original(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create_model)
    make_model("timm:test_vit.r160_in1k", num_classes=10, pretrained=True)
    assert asked == {"name": "test_vit.r160_in1k", "pretrained": True}


def test_a_failed_download_says_what_to_do(monkeypatch):
    def create_model(*args, **options):
        raise OSError("no route to host")

    monkeypatch.setattr("timm.create_model", create_model)
    with pytest.raises(ConfigError, match=r"OSError: no route to host.*give a downloaded file as `weights`"):
        make_model("timm:test_vit", num_classes=10, pretrained=True)


def test_a_linear_network_has_no_width_and_is_as_large_as_its_images():
    with pytest.raises(ConfigError, match="one layer on all pixels has none"):
        make_model("linear", num_classes=10, in_channels=1, image_size=8, width=4)
    assert make_model("linear", num_classes=5, in_channels=2, image_size=6).head.weight.shape == (5, 72)


def test_input_sizes():
    names = {"digits-cnn": 8, "linear": 8, "unet": 256, "vgg16": 32, "resnet18": 32}
    assert {name: input_size_of(name) for name in names} == names
    assert input_size_of("timm:convit_tiny") == 224
    assert input_size_of("timm:tf_efficientnetv2_s.in21k") == 300


def test_normalization():
    assert normalization_of("vgg11") is None
    assert normalization_of("timm:tf_efficientnetv2_s.in21k") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    mean, std = normalization_of("timm:convit_tiny")
    assert mean == (0.485, 0.456, 0.406)
    assert std == (0.229, 0.224, 0.225)
