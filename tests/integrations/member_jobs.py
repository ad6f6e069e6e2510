"""Trainings of two members in processes of their own with transformers, PEFT and Accelerate.

Run as a program with a directory: it imports these libraries once, which takes seconds, and forks all processes from
that state. Members find each other as under `papa.member`. What they write is read by `test_transformers.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import papa
from papa.integrations.accelerate import PopulationAveraging
from papa.integrations.transformers import PopulationAveragingCallback

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_MEMBERS, NUM_STEPS, BATCH_SIZE, LENGTH, VOCABULARY = 2, 12, 4, 8, 24
LR = 0.01
PUSH = papa.Push(half_life=0.1, every_steps=2)
OUTER = papa.OuterStep(every_steps=2)


def make_model(seed: int, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **rates, **tokens)
    return GPT2LMHeadModel(config)


def examples_of(member: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + member)
    tokens = torch.randint(VOCABULARY, (NUM_STEPS * BATCH_SIZE, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The same for all loops; the Trainer's own depends on its version."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_parts(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=LR)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)


def member_index() -> int:
    return int(os.environ["PAPA_MEMBER"])


def train(directory: Path, name: str, rule: Any, *, checkpoint: str = "", dropout: float = 0.0, **more: Any) -> None:
    """One member with the Trainer; resumed from the checkpoint of another training if its name is given."""
    member = member_index()
    model = more.pop("model", None) or make_model(member, dropout)
    place = str(directory / checkpoint / str(member) / "checkpoint-5") if checkpoint else None
    args = TrainingArguments(
        output_dir=str(directory / name / str(member)),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        save_steps=5,
        logging_steps=4,
        max_grad_norm=0.0,
        seed=member,
        train_sampling_strategy=more.pop("sampling", "random"),
        resume_from_checkpoint=place if more.pop("name_checkpoint", True) else None,
        restore_callback_states_from_checkpoint=more.pop("restore", False),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_total_limit=None,
    )
    callback = PopulationAveragingCallback(rule, soup=directory / name / "soup", **more)
    trainer = Trainer(
        model,
        args,
        train_dataset=examples_of(member),
        compute_loss_func=loss_of,
        optimizers=make_parts(model),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=place)
    torch.save(trainer.model.state_dict(), directory / name / f"{member}.pt")
    (directory / name / f"{member}.json").write_text(json.dumps(trainer.state.log_history))


def train_plainly(directory: Path) -> None:
    """Both members in one process, by a loop of papa's own."""
    models = [make_model(member) for member in range(NUM_MEMBERS)]
    optimizers, schedulers = zip(*map(make_parts, models), strict=True)
    loaders = [DataLoader(examples_of(member), batch_size=BATCH_SIZE) for member in range(NUM_MEMBERS)]
    with papa.averaging(models, optimizers, PUSH, num_steps=NUM_STEPS) as joined:
        for batches in zip(*loaders, strict=True):
            for model, optimizer, scheduler, batch in zip(models, optimizers, schedulers, batches, strict=True):
                model.train()
                loss_of(model(input_ids=batch["input_ids"]), batch["labels"]).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for member, model in enumerate(models):
        torch.save(model.state_dict(), directory / f"plain-{member}.pt")
    joined.soup().save_pretrained(directory / "plain-soup")


def train_adapters(directory: Path) -> None:
    """LoRA over a frozen network that all members share; its adapters begin alike."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    train(directory, "adapters", PUSH, model=peft.get_peft_model(make_model(7), config))


def train_with_accelerate(directory: Path) -> None:
    """One member per process, prepared by Accelerate as in a single process."""
    member = member_index()
    model = make_model(member)
    optimizer, scheduler = make_parts(model)
    loader = DataLoader(examples_of(member), batch_size=BATCH_SIZE)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert not isinstance(model, DistributedDataParallel)
    rates = []
    with PopulationAveraging(accelerator, model, optimizer, PUSH, num_steps=NUM_STEPS) as averaging:
        for batch in loader:
            model.train()
            accelerator.backward(loss_of(model(input_ids=batch["input_ids"]), batch["labels"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    found = {"processes": accelerator.num_processes, "rates": rates, "averagings": averaging.averager.num_averagings}
    (directory / f"accelerate-{member}.json").write_text(json.dumps(found))
    torch.save(accelerator.unwrap_model(model).state_dict(), directory / f"accelerate-{member}.pt")


def run_example(directory: Path, name: str, arguments: str) -> None:
    """A script of `examples/`, with its output in a file for each member."""
    member = os.environ.get("PAPA_MEMBER", "0")
    sys.argv = [name, *arguments.format(member=member, directory=directory).split()]
    with open(directory / f"{name}-{member}.txt", "a") as output, contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES / name))


def fork_members(
    job: Callable[[], object], weights: Path, *, num_members: int = NUM_MEMBERS, num_ranks: int = 1
) -> None:
    """Run a job in forked processes, with the variables that `papa.member` sets, and torchrun if a member has ranks."""
    store_port, *ports = free_ports(1 + num_members)
    weights.mkdir()
    children = []
    for member, rank in itertools.product(range(num_members), range(num_ranks)):
        child = os.fork()
        if child == 0:
            names = {"PAPA_MEMBER": member, "PAPA_MEMBERS": num_members, "PAPA_WEIGHTS": weights}
            names |= {"PAPA_STORE": f"127.0.0.1:{store_port}", "PAPA_STORE_RUNS": 1}
            if num_ranks > 1:
                names |= {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
                names |= {"MASTER_PORT": ports[member], "GLOO_SOCKET_IFNAME": "lo"}
            os.environ.update({name: str(value) for name, value in names.items()})
            try:
                job()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=True, wait_for_workers=False)  # has threads: after forking
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    del store


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], object]] = {
        "ordered": lambda: train(directory, "ordered", PUSH, sampling="sequential"),
        "accelerate": lambda: train_with_accelerate(directory),
        "unbroken": lambda: train(directory, "unbroken", PUSH, dropout=0.1),
        "resumed": lambda: train(directory, "resumed", PUSH, dropout=0.1, checkpoint="unbroken"),
        "restored": lambda: train(directory, "restored", PUSH, dropout=0.1, checkpoint="unbroken", restore=True),
        "outer": lambda: train(directory, "outer", OUTER),
        "outer, resumed": lambda: train(directory, "outer, resumed", OUTER, checkpoint="outer"),
        "adapters": lambda: train_adapters(directory),
        "trainer": lambda: run_example(
            directory,
            "with_trainer.py",
            "--seed {member} --output-dir {directory}/out/{member} --soup {directory}/soup --steps 60",
        ),
    }
    for name, job in jobs.items():
        fork_members(job, directory / f"weights {name}")
    fsdp = functools.partial(run_example, directory, "with_fsdp.py", "--seed {member} --steps 40")
    fork_members(fsdp, directory / "weights fsdp", num_ranks=2)
    train_plainly(directory)
    run_example(directory, "with_accelerate.py", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
