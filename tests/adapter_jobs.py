"""Trainings by papa's adapters and by `papa.train`, each with checkpoints, that the soak test kills and resumes.

Every job continues from what it finds in its directory, and writes its last weights to `result/` there. Libraries are
imported once, by the server that forks these processes. As a program, with a directory: a member of `papa.member`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import papa
from papa.storage.tensors import save_network
from papa.training import Callback, Monitoring, Training

MEMBER = "papa.member"
LIBRARIES = ["accelerate", "lightning.pytorch", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"]
LIBRARIES += [f"papa.integrations.{name}" for name in ("accelerate", "fabric", "lightning", "transformers")]
"""What the jobs import."""
NUM_EPOCHS, NUM_MEMBERS, BATCH_SIZE = 16, 2, 16
INPUTS = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, :2].prod(dim=1) > 0).long()
DATA = TensorDataset(INPUTS, TARGETS)
STEPS_PER_EPOCH = len(DATA) // BATCH_SIZE
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
RULE = papa.Push(half_life=0.05, every_steps=3)
"""A push is under way at the end of most epochs."""


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def seeded_net(member: int) -> nn.Module:
    torch.manual_seed(member)
    return make_net()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loader(member: int) -> DataLoader[Any]:
    """In an order that depends on the member and the epoch."""
    return DataLoader(DATA, BATCH_SIZE, sampler=DistributedSampler(DATA, num_replicas=1, rank=0, seed=member))


def batches_of(loaders: Iterable[DataLoader[Any]], epoch: int) -> Iterable[Any]:
    for one in loaders:
        one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return zip(*loaders, strict=True)


def write_result(directory: Path, **states: Mapping[str, Tensor]) -> None:
    (directory / "result").mkdir(exist_ok=True)
    for name, state in states.items():
        save_network(directory / "result" / f"{name}.safetensors", dict(state))


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in net.state_dict().items()}


def save_whole(value: Any, path: Path) -> None:
    """Save a file as a careful script does: there is all of it or none."""
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def newest_common(folders: Iterable[Path], pattern: str, is_whole: Callable[[Path], bool]) -> str | None:
    """The name of the newest checkpoint that all members have."""
    names = [{path.name for path in folder.glob(pattern) if is_whole(path)} for folder in folders]
    common = set.intersection(*names)
    return max(common, key=lambda name: int("".join(filter(str.isdigit, name)))) if common else None


def can_be_read(file: Path) -> bool:
    try:
        torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile):
        return False
    return True


class MeansOfMembers(Callback):
    """Keeps a running mean of each member's weights, which must survive a resume."""

    def setup(self, training: Training) -> None:
        self.means = [state_of(net) for net in training.population]
        self.count = 0

    def on_step_end(self, training: Training) -> None:
        for mean, net in zip(self.means, training.population, strict=True):
            for name, tensor in net.state_dict().items():
                if tensor.is_floating_point():
                    mean[name].lerp_(tensor, 0.1)

    def member_state(self, index: int) -> dict[str, Tensor]:
        return {f"mean {name}": tensor for name, tensor in self.means[index].items()}

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        self.means[index] = {name.removeprefix("mean "): tensor.clone() for name, tensor in tensors.items()}


def train(directory: Path) -> int:
    """`papa.train` with a callback that keeps tensors, and the best soup."""
    callback = MeansOfMembers()
    outcome = papa.train(
        make_net,
        (INPUTS, TARGETS),
        num_epochs=NUM_EPOCHS,
        num_members=3,
        batch_size=BATCH_SIZE,
        validation=0.25,
        rule=RULE,
        monitoring=Monitoring(keep_best_soup=True),
        callbacks=[callback],
        checkpoints=directory / "checkpoint",
        verbose=False,
    )
    members = {f"member-{number}": state_of(net) for number, net in enumerate(outcome.population)}
    means = {f"mean-{number}": mean for number, mean in enumerate(callback.means)}
    soups = {"average": outcome.average_soup, "greedy": outcome.greedy.network}
    write_result(directory, **members, **means, **{name: state_of(net) for name, net in soups.items()})
    return 0


def own_loop(directory: Path) -> int:
    """A loop of one's own, with `papa.averaging`."""
    nets = [seeded_net(member) for member in range(NUM_MEMBERS)]
    optimizers, loaders = [make_optimizer(net) for net in nets], [loader(member) for member in range(NUM_MEMBERS)]
    joined = papa.averaging(nets, optimizers, RULE, num_steps=NUM_STEPS)
    parts, file = [*nets, *optimizers, joined], directory / "checkpoints" / "last.pt"
    epoch = 0
    if file.exists():
        epoch, states = torch.load(file, weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    for number in range(epoch, NUM_EPOCHS):
        for batches in batches_of(loaders, number):
            for net, optimizer, (inputs, targets) in zip(nets, optimizers, batches, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
        save_whole((number + 1, [part.state_dict() for part in parts]), file)
    write_result(directory, soup=state_of(joined.soup()), **{str(j): state_of(net) for j, net in enumerate(nets)})
    return 0


def accelerate(directory: Path) -> int:
    """Several members in one process with Accelerate."""
    from accelerate import Accelerator

    from papa.integrations.accelerate import PopulationAveraging

    accelerator = Accelerator(cpu=True)
    nets = [seeded_net(member) for member in range(NUM_MEMBERS)]
    optimizers = [accelerator.prepare(make_optimizer(net)) for net in nets]
    models = [accelerator.prepare(net) for net in nets]
    loaders = [accelerator.prepare(one) for one in papa.loaders(DATA, members=NUM_MEMBERS, batch_size=BATCH_SIZE)]
    averaging = PopulationAveraging(accelerator, models, optimizers, RULE, num_steps=NUM_STEPS, loaders=loaders)
    epoch = _load_state(accelerator, directory / "checkpoints")
    for number in range(epoch, NUM_EPOCHS):
        for batches in zip(*loaders, strict=True):
            for model, optimizer, (inputs, targets) in zip(models, optimizers, batches, strict=True):
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        _save_state(accelerator, directory / "checkpoints", number + 1)
    states = {str(member): state_of(net) for member, net in enumerate(nets)}
    write_result(directory, soup=state_of(averaging.soup()), **states)
    return 0


def _save_state(accelerator: Any, folder: Path, epoch: int) -> None:
    shutil.rmtree(folder / "partial", ignore_errors=True)
    accelerator.save_state(folder / "partial")
    os.replace(folder / "partial", folder / f"epoch-{epoch}")


def _load_state(accelerator: Any, folder: Path, *others: Path) -> int:
    newest = newest_common([folder, *others], "epoch-*", Path.is_dir)
    if newest is None:
        return 0
    accelerator.load_state(folder / newest)
    return int(newest.partition("-")[2])


def fabric(directory: Path) -> int:
    """Several members in one process with Fabric."""
    from lightning.fabric import Fabric

    from papa.integrations.fabric import averaging

    fabric = Fabric(accelerator="cpu", devices=1)
    nets = [seeded_net(member) for member in range(NUM_MEMBERS)]
    pairs = [fabric.setup(net, make_optimizer(net)) for net in nets]
    models, optimizers = zip(*pairs, strict=True)
    loaders = [loader(member) for member in range(NUM_MEMBERS)]
    joined = averaging(fabric, models, optimizers, RULE, num_steps=NUM_STEPS)
    state = {"papa": joined, **{f"{kind} {j}": pair[kind] for j, pair in enumerate(pairs) for kind in range(2)}}
    folder = directory / "checkpoints"
    newest = newest_common([folder], "epoch-*", Path.is_file)
    if newest is not None:
        fabric.load(folder / newest, state)
    for number in range(0 if newest is None else int(newest.partition("-")[2]), NUM_EPOCHS):
        for batches in batches_of(loaders, number):
            for model, optimizer, (inputs, targets) in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                fabric.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
        fabric.save(folder / "partial", state)
        os.replace(folder / "partial", folder / f"epoch-{number + 1}")
    states = {str(member): state_of(net) for member, net in enumerate(nets)}
    write_result(directory, soup=state_of(joined.soup()), **states)
    return 0


def _classifier(member: int) -> Any:
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded_net(member)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor]) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    return Classifier()


def _fit(folder: Path, module: Any, data: Any, newest: str | None, *callbacks: Any) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    every = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=[every, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = None if newest is None else str(folder / newest)
    trainer.fit(module, data, DataLoader(DATA, batch_size=128), ckpt_path=path)


def member_index() -> int:
    return int(os.environ["PAPA_MEMBER"])


def folders_of(directory: Path) -> list[Path]:
    """Where each member has its checkpoints."""
    return [directory / f"checkpoints-{member}" for member in range(NUM_MEMBERS)]


def plain_member(directory: Path) -> None:
    """A member of `papa.member`, in a script that saves and loads its own state."""
    member, folders = member_index(), folders_of(directory)
    net = seeded_net(member)
    optimizer, data = make_optimizer(net), loader(member)
    newest = newest_common(folders, "epoch-*.pt", Path.is_file)
    epoch = 0 if newest is None else int(newest.removeprefix("epoch-").removesuffix(".pt"))
    joined = papa.join(net, optimizer, RULE, num_steps=NUM_STEPS, num_steps_taken=epoch * STEPS_PER_EPOCH)
    parts = [net, optimizer, joined]
    if newest is not None:
        for part, state in zip(parts, torch.load(folders[member] / newest, weights_only=True), strict=True):
            part.load_state_dict(state)
    for number in range(epoch, NUM_EPOCHS):
        for ((inputs, targets),) in batches_of([data], number):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        save_whole([part.state_dict() for part in parts], folders[member] / f"epoch-{number + 1}.pt")
    write_result(directory, **{str(member): state_of(net)})


def lightning_member(directory: Path) -> None:
    """One member per process with Lightning."""
    from papa.integrations.lightning import PopulationAveraging

    member, folders = member_index(), folders_of(directory)
    newest = newest_common(folders, "*.ckpt", can_be_read)
    module = _classifier(member)
    _fit(folders[member], module, loader(member), newest, PopulationAveraging(RULE))
    write_result(directory, **{str(member): state_of(module)})


def accelerate_member(directory: Path) -> None:
    """One member per process with Accelerate."""
    from accelerate import Accelerator

    from papa.integrations.accelerate import PopulationAveraging

    member, folders = member_index(), folders_of(directory)
    accelerator, net, data = Accelerator(cpu=True), seeded_net(member), loader(member)
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    PopulationAveraging(accelerator, model, optimizer, RULE, num_steps=NUM_STEPS)
    epoch = _load_state(accelerator, folders[member], *folders)
    for number in range(epoch, NUM_EPOCHS):
        for ((inputs, targets),) in batches_of([data], number):
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        _save_state(accelerator, folders[member], number + 1)
    write_result(directory, **{str(member): state_of(net)})


def trainer_member(directory: Path) -> None:
    """One member per process with the Trainer of transformers, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from papa.integrations.transformers import PopulationAveragingCallback

    member, folders = member_index(), folders_of(directory)
    torch.manual_seed(member)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=12, n_embd=32, n_layer=1, n_head=2, **tokens))
    rows = (torch.arange(32)[:, None] + torch.arange(12)) % 10
    newest = newest_common(folders, "checkpoint-*", lambda path: (path / "trainer_state.json").is_file())
    path = None if newest is None else str(folders[member] / newest)
    args = TrainingArguments(
        output_dir=str(folders[member]),
        seed=member,
        max_steps=40,
        learning_rate=1e-2,
        save_steps=5,
        resume_from_checkpoint=path,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    examples = [{"input_ids": row, "labels": row} for row in rows]
    callback = PopulationAveragingCallback(RULE, soup=directory / "soup")
    trainer = Trainer(model, args, train_dataset=examples, callbacks=[callback])
    trainer.train(resume_from_checkpoint=path)
    write_result(directory, **{str(member): state_of(model)})


def fork_members(job: Callable[[Path], None], directory: Path) -> int:
    """Run a job for each member in forked processes, with the variables that `papa.member` sets; returns the code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for folder in (directory / "weights", *folders_of(directory)):
        folder.mkdir(exist_ok=True)
    for member in range(NUM_MEMBERS):
        if os.fork() == 0:
            names = {"PAPA_MEMBER": member, "PAPA_MEMBERS": NUM_MEMBERS, "PAPA_WEIGHTS": directory / "weights"}
            names |= {"PAPA_STORE": f"127.0.0.1:{port}", "PAPA_STORE_RUNS": 1}
            os.environ.update({name: str(value) for name, value in names.items()})
            try:
                job(directory)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # has threads: after forking
    codes = (os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(NUM_MEMBERS))
    has_failed = any(code != 0 for code in codes)  # the other one is ended by whoever started this
    del store
    return int(has_failed)


JOBS: dict[str, Callable[[Path], int]] = {
    "papa.train": train,
    "own loop": own_loop,
    "Accelerate": accelerate,
    "Fabric": fabric,
    MEMBER: lambda directory: fork_members(plain_member, directory),
    "Lightning, one member per process": lambda directory: fork_members(lightning_member, directory),
    "Accelerate, one member per process": lambda directory: fork_members(accelerate_member, directory),
    "Trainer, one member per process": lambda directory: fork_members(trainer_member, directory),
}


def run(name: str, directory: Path) -> int:
    """Start or resume a job; returns its exit code."""
    warnings.simplefilter("ignore")
    return JOBS[name](directory)


def command(directory: Path) -> list[str]:
    """The same as the job `MEMBER`, by torchrun and in new processes."""
    for folder in folders_of(directory):
        folder.mkdir(exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_MEMBERS)]
    own = ["-m", "papa.member", "--overwrite", "--soup", str(directory / "soup.safetensors")]
    return [sys.executable, *torchrun, *own, __file__, str(directory)]


if __name__ == "__main__":
    plain_member(Path(sys.argv[1]))
