import pytest
import torch
from torch import Tensor, nn

from papa.errors import ConfigError, DataError
from papa.lab.models import UNet, make_model, resnet18, resnet20
from papa.lab.models.networks import ZeroPadShortcut

NUM_PARAMETERS = {
    "digits-cnn": 14_458,
    "vgg11": 9_231_114,
    "vgg16": 14_728_266,
    "resnet18": 11_173_962,
    "resnet20": 269_722,
    "unet": 31_044_106,
    "linear": 650,
}
CONVOLUTIONAL = [name for name in NUM_PARAMETERS if name != "linear"]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def options_for(name: str) -> dict[str, int]:
    if name in ("digits-cnn", "linear"):
        return {"in_channels": 1, "image_size": 8}
    return {"in_channels": 3, "image_size": 32}


def thin(name: str, num_classes: int = 10) -> nn.Module:
    width = None if name == "linear" else 4
    return make_model(name, num_classes=num_classes, width=width, **options_for(name))


def images_for(name: str, num_images: int = 2) -> Tensor:
    options = options_for(name)
    size = options["image_size"]
    return torch.randn(num_images, options["in_channels"], size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = make_model(name, num_classes=10, **options_for(name))
    assert num_parameters(model) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_output_has_one_score_a_class(name):
    shape = (2, 7, 32, 32) if name == "unet" else (2, 7)
    assert thin(name, num_classes=7)(images_for(name)).shape == shape


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_width_sets_the_channels_of_the_first_stage(name):
    convolutions = [module for module in thin(name).modules() if isinstance(module, nn.Conv2d)]
    assert convolutions[0].out_channels == 4
    assert num_parameters(thin(name)) < NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_gradients_reach_every_parameter(name):
    torch.manual_seed(0)
    model = thin(name)
    scores = model(images_for(name, num_images=4))
    classes = torch.arange(4).view(-1, *[1] * (scores.dim() - 2)).expand(4, *scores.shape[2:])
    nn.functional.cross_entropy(scores, classes).backward()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        # A bias right before BatchNorm is subtracted again, so its gradient is nothing but rounding.
        is_undone_bias = path.endswith(".bias") and path.startswith(("features.", "first.", "down.", "join."))
        assert is_undone_bias or parameter.grad.abs().sum() > 0, path


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "resnet20"])
def test_larger_and_odd_images_fit(name):
    model = make_model(name, num_classes=10, width=4, image_size=45)
    assert model(torch.zeros(2, 3, 45, 45)).shape == (2, 10)


def test_unet_keeps_the_size_and_halves_four_times():
    model = make_model("unet", num_classes=5, width=2, image_size=48).eval()
    assert model(torch.zeros(1, 3, 16, 64)).shape == (1, 5, 16, 64)
    below = []
    model.down[-1].register_forward_hook(lambda module, inputs, output: below.append(tuple(output.shape)))
    model(torch.zeros(1, 3, 48, 32))
    assert below == [(1, 32, 3, 2)]


def test_unet_raises_for_sizes_it_cannot_halve():
    with pytest.raises(DataError, match="UNet got images of 40 x 32, expected multiples of 16"):
        UNet(width=2)(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ConfigError, match=r"unet does not take images of 3x40x40 .*expected multiples of 16"):
        make_model("unet", num_classes=5, width=2, image_size=40)


def test_zero_pad_shortcut_keeps_every_second_pixel_and_adds_empty_channels():
    shortcut = ZeroPadShortcut(2, 5, 2)
    inputs = torch.randn(3, 2, 4, 4)
    outputs = shortcut(inputs)
    assert not list(shortcut.parameters())
    assert outputs.shape == (3, 5, 2, 2)
    assert torch.equal(outputs[:, :2], inputs[:, :, ::2, ::2])
    assert not outputs[:, 2:].any()


def test_resnet18_halves_three_times_and_resnet20_twice():
    assert resnet18(width=4).stages(torch.zeros(1, 4, 32, 32)).shape == (1, 32, 4, 4)
    assert resnet20(width=4).stages(torch.zeros(1, 4, 32, 32)).shape == (1, 16, 8, 8)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_networks_can_be_traced(name):
    model = thin(name).eval()
    images = images_for(name)
    assert torch.equal(torch.fx.symbolic_trace(model)(images), model(images))


def test_digits_network_learns_in_seconds():
    torch.manual_seed(0)
    model = make_model("digits-cnn", num_classes=10, in_channels=1, image_size=8)
    images, labels = torch.randn(40, 1, 8, 8), torch.arange(40) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
