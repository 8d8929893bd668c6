"""Train in your own loop with Accelerate under ZeRO stage 3; started again with the same words, it goes on from its newest checkpoint.

torchrun --nproc_per_node 2 examples/clusters/accelerate_loop.py --output_dir runs/clusters/accelerate_loop --max_steps 100
"""

import argparse
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer

from hf_zero import ZeroPlugin
from hf_zero.utils import end_preempted, preempted

LENGTH = 64

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output_dir", type=Path, required=True, help="folder on a disk that all nodes share")
parser.add_argument("--max_steps", type=int, default=100)
parser.add_argument("--save_steps", type=int, default=50, help="a rank that dies costs at most this number of steps")
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

# The Accelerator comes before the model, so that at stage 3 each rank creates only its shards. If `accelerate launch` has a DeepSpeed
# file, leave the plugin out. With this sampler the order of the batches depends on seed and epoch alone, so a run goes on with the next.
order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(stage=3), dataloader_config=order)

# A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
# AutoModelForCausalLM.from_pretrained("...") for your model.
set_seed(args.seed)
tokenizer = ByT5Tokenizer()
shape = {"n_positions": LENGTH, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape)
model = AutoModelForCausalLM.from_config(config)

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = TensorDataset(tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH))
# With a generator of its own the loader draws nothing from the random states of dropout, which a checkpoint restores.
loader = DataLoader(samples, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

newest = args.output_dir / "newest"  # a file with the name of the newest complete checkpoint


def save(step: int) -> None:
    """Save the state after `step`, then name it in the file, then delete the older one; collective."""
    folder = args.output_dir / f"step-{step}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        older = newest.read_text() if newest.exists() else folder.name
        written = newest.with_suffix(".part")
        written.write_text(folder.name)
        os.replace(written, newest)  # a run that is killed at any moment leaves the name of a complete checkpoint
        if older != folder.name:
            shutil.rmtree(args.output_dir / older, ignore_errors=True)
    accelerator.wait_for_everyone()


step = 0
if newest.exists():
    step = int(newest.read_text().removeprefix("step-"))
    accelerator.load_state(str(args.output_dir / newest.read_text()))
    accelerator.print(f"Resumed after step {step}.")

while step < args.max_steps:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for (block,) in accelerator.skip_first_batches(loader, done):
        loss = model(input_ids=block, labels=block).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 1 or step % 10 == 0:
            accelerator.print(f"step {step:3}  loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
        ends = preempted()  # whether a signal asked any rank to end; the same answer on all ranks
        if ends or step % args.save_steps == 0 or step == args.max_steps:
            save(step)
        if ends:
            end_preempted()  # waits for all ranks, then ends with status 75
        if step == args.max_steps:
            break

weights = accelerator.get_state_dict(model)  # collective; whole weights on rank 0, which writes them
accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=weights, is_main_process=accelerator.is_main_process)
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output_dir)
accelerator.print(f"Saved: AutoModelForCausalLM.from_pretrained('{args.output_dir}') loads it.")
accelerator.end_training()
