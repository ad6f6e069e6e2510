"""Studies of short trainings, which stop long before the data are used up."""

from __future__ import annotations

from results.study import Study, Table
from results.tables import (
    against_long,
    alike,
    half_lives,
    main_tables,
    of_methods,
    push_against_merge,
    rates,
    renamed,
)


def _compare(
    recipe: str, out: str, *options: str, methods: str, seeds: str = "1,2,3", precision: str = "float32"
) -> str:
    """A command at the `mini` budget; the precision is given since its default depends on the processor."""
    words = ("papa compare", recipe, "--budget mini --methods", methods, "--seeds", seeds, *options)
    return " ".join([*words, "--train.precision", precision, "--data.root DATA --out", f"runs/{out}"])


ALL_METHODS = "independent,papa,papa-all,papa-2"
SIDE_BY_SIDE = "--parallel 2"
MAIN_CIFAR10, MAIN_CIFAR100 = (
    _compare(recipe, f"main/{recipe}", "--analysis", SIDE_BY_SIDE, methods=ALL_METHODS)
    for recipe in ("cifar10-vgg11", "cifar100-resnet18")
)
LONG_CIFAR10 = _compare("cifar10-vgg11", "long/cifar10-vgg11", "--diversity.per-batch", SIDE_BY_SIDE, methods="longer")
# Every main run ends with the analysis, so that nothing has to be trained twice for it.

HALF_LIVES = {
    5: (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    20: (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    80: (0.0005, 0.002, 0.01, 0.02, 0.05, 0.1),
}
"""Half-lives as shares of training, for each length in epochs; the longest has enough steps for a shorter one."""
PRECISIONS = {80: "bfloat16"}
"""The precision of lengths that were not run in float32."""


def _half_life_commands(epochs: int) -> tuple[str, ...]:
    """A small setting: independent members, and PAPA with each half-life."""
    setting = (
        f"--members 4 --data.max-train 4000 --data.validation 0.125 --train.epochs {epochs} --average.every-steps 2"
    )

    def command(method: str, share: str = "") -> str:
        options = (setting, f"--average.half-life {share}") if share else (setting,)
        out = f"half-life/{epochs}-epochs{f'-{share}' if share else ''}"
        precision = PRECISIONS.get(epochs, "float32")
        return _compare("cifar10-vgg11", out, *options, methods=method, seeds="1", precision=precision)

    return (command("independent"), *(command("papa", f"{share}") for share in HALF_LIVES[epochs]))


def _rate_command(recipe: str, rate: float, *more: str) -> str:
    """A few independent members with a seed that no other study uses, and with more validation data."""
    options = ("--members 3 --data.validation 0.1", f"--train.lr {rate}", *more)
    return _compare(recipe, f"rates/{recipe}-{rate}", *options, methods="independent", seeds="11")


HIGH_RATE = "--analysis --train.lr 0.1 --train.epochs 20"
REPAIRS = {
    f"average.repair {batches}, average.repair_policy {policy}, average.repair_scope {scope}": name
    for batches, policy, scope, name in (
        (5, "own", "all", "REPAIR as in the paper"),
        (5, "shared", "all", "REPAIR on the same images for all"),
        (5, "own", "batch-norm", "BatchNorm reset alone"),
        (0, "own", "all", "no REPAIR"),
    )
}
"""Names of the runs in the table of REPAIR."""
PUSHES = {f"average.every_steps {steps}": f"a push every {steps} steps" for steps in (10, 4)}
"""Names of the runs in the table of cadences."""


SHORT = (
    Study(
        name="main",
        title="Five members, four ways to train them",
        tables=(
            Table(title="CIFAR-10, VGG-11", commands=(MAIN_CIFAR10,), render=main_tables),
            Table(title="CIFAR-100, ResNet-18", commands=(MAIN_CIFAR100,), render=main_tables),
        ),
    ),
    Study(
        name="half-life",
        title="How strong the push should be, and how that depends on the length of training",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, four members, three lengths",
                commands=tuple(command for epochs in HALF_LIVES for command in _half_life_commands(epochs)),
                render=half_lives,
            ),
        ),
    ),
    Study(
        name="cadence",
        title="How often to push",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, the same half-life, a push every 4 steps or every 10",
                commands=(
                    _compare(
                        *("cifar10-vgg11", "cadence/every-4-steps", "--average.every-steps 4", SIDE_BY_SIDE),
                        methods="papa",
                    ),
                ),
                shown_with=(MAIN_CIFAR10,),
                render=renamed(of_methods("independent", "papa"), PUSHES),
            ),
        ),
    ),
    Study(
        name="rates",
        title="Which learning rate",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, three independent members",
                commands=tuple(_rate_command("cifar10-vgg11", rate) for rate in (0.005, 0.01, 0.02, 0.05, 0.1)),
                render=rates,
            ),
            Table(
                title="CIFAR-100, ResNet-18, three independent members",
                commands=tuple(
                    _rate_command("cifar100-resnet18", rate, "--train.epochs 10") for rate in (0.02, 0.05, 0.1, 0.2)
                ),
                render=rates,
            ),
        ),
    ),
    Study(
        name="high-rate",
        title="A learning rate that is too high",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, the paper's 0.1 for 20 epochs",
                commands=(
                    _compare(
                        *("cifar10-vgg11", "high-rate/cifar10-vgg11", HIGH_RATE),
                        *("--average.every-epochs 0.3333333333333333", SIDE_BY_SIDE),
                        methods=ALL_METHODS,
                    ),
                ),
                render=main_tables,
            ),
            Table(
                title="The same with a weaker push, and with rarer merges",
                commands=(
                    _compare(
                        *("cifar10-vgg11", "high-rate/half-life-0.02", HIGH_RATE),
                        *("--average.half-life 0.02", SIDE_BY_SIDE),
                        methods="papa",
                    ),
                    _compare(
                        *("cifar10-vgg11", "high-rate/every-epoch", HIGH_RATE),
                        *("--average.every-epochs 1", SIDE_BY_SIDE),
                        methods="papa-all,papa-2",
                    ),
                ),
            ),
        ),
    ),
    Study(
        name="sizes",
        title="Fewer members",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, two, three and five members",
                commands=tuple(
                    _compare(
                        *("cifar10-vgg11", f"sizes/{members}-members", f"--members {members}", SIDE_BY_SIDE),
                        methods="independent,papa",
                    )
                    for members in (2, 3)
                ),
                shown_with=(MAIN_CIFAR10,),
                render=of_methods("independent", "papa"),
            ),
        ),
    ),
    Study(
        name="plain",
        title="Without augmentation",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members with crops and flips alone",
                commands=(
                    _compare(
                        *("cifar10-vgg11", "plain/cifar10-vgg11", "--diversity.grid none", SIDE_BY_SIDE),
                        methods="independent,papa",
                    ),
                ),
                render=main_tables,
            ),
        ),
    ),
    Study(
        name="long",
        title="The same compute spent on one network",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members, or one network for five times as many epochs",
                commands=(LONG_CIFAR10,),
                shown_with=(MAIN_CIFAR10,),
                render=against_long,
            ),
        ),
    ),
    Study(
        name="repair",
        title="PAPA-all with and without REPAIR",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members",
                commands=tuple(
                    _compare("cifar10-vgg11", f"repair/{out}", option, SIDE_BY_SIDE, methods="papa-all")
                    for out, option in (
                        ("none", "--average.repair 0"),
                        ("batch-norm", "--average.repair-scope batch-norm"),
                        ("shared", "--average.repair-policy shared"),
                    )
                ),
                shown_with=(MAIN_CIFAR10,),
                render=renamed(of_methods("independent", "papa-all"), REPAIRS),
            ),
            Table(
                title="Merged as often as PAPA pushes, without REPAIR",
                commands=(
                    _compare(
                        *("cifar10-vgg11", "repair/every-10-steps", "--average.repair 0"),
                        *("--average.every-epochs 0.082", SIDE_BY_SIDE),
                        methods="papa-all",
                    ),
                ),
                shown_with=(MAIN_CIFAR10,),
                render=push_against_merge,
            ),
        ),
    ),
    Study(
        name="alike",
        title="What members share",
        tables=(
            Table(title="CIFAR-10, VGG-11: features and straight lines", shown_with=(MAIN_CIFAR10,), render=alike),
            Table(title="CIFAR-100, ResNet-18: features and straight lines", shown_with=(MAIN_CIFAR100,), render=alike),
        ),
    ),
    Study(
        name="finetune",
        title="Fine-tuning a pretrained network",
        tables=(
            Table(
                title="CIFAR-100, EfficientNet-Lite0 from ImageNet, two members",
                commands=(
                    _compare(
                        *("cifar100-finetune-effnetv2s", "finetune/efficientnet-lite0"),
                        "--model.name timm:tf_efficientnet_lite0 --model.weights lite0.safetensors",
                        "--data.image-size 96 --data.max-train 2000 --data.max-test 1000",
                        "--train.epochs 6 --train.lr 0.0003",
                        SIDE_BY_SIDE,
                        methods="independent,papa",
                        seeds="1",
                    ),
                ),
            ),
        ),
    ),
)
"""The studies of short trainings, in the order of their page."""
