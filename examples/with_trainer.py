"""Language models that the transformers Trainer trains, one in each process:

torchrun --nproc-per-node 2 -m papa.member examples/with_trainer.py --seed {member} --output-dir out/{member}
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import papa
from papa.integrations.transformers import PopulationAveragingCallback

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output-dir", default="out")
parser.add_argument("--soup", default="soup")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

starts = torch.arange(64) % 10
rows = (starts[:, None] + torch.arange(12)) % 10  # counting upward
torch.manual_seed(options.seed)
tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=12, n_embd=32, n_layer=1, n_head=2, **tokens))
args = TrainingArguments(
    output_dir=options.output_dir,
    seed=options.seed,
    max_steps=options.steps,
    learning_rate=1e-2,
    save_steps=50,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model,
    args,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[PopulationAveragingCallback(papa.Push(half_life=0.05), soup=options.soup)],
)
trainer.train()
if options.seed == 0:
    soup = AutoModelForCausalLM.from_pretrained(options.soup)
    found = soup(rows).logits[:, :-1].argmax(dim=-1)
    print(f"the soup predicts {100 * (found == rows[:, 1:])[:, 1:].float().mean():.0f}% of the numbers")
