"""Train a causal language model in your own loop with Accelerate, under ZeRO stage 3.

torchrun --nproc_per_node 2 examples/minimal/accelerate_loop.py
"""

from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer

from hf_zero import ZeroPlugin

OUTPUT = "runs/minimal/accelerate_loop"
LENGTH, STEPS = 64, 100

# Make the Accelerator before the model, so that at stage 3 each rank creates only its shards. If `accelerate launch` has a DeepSpeed
# file, write Accelerator() without the plugin.
accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(stage=3))

# A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
# AutoModelForCausalLM.from_pretrained("...") for your model.
torch.manual_seed(0)
tokenizer = ByT5Tokenizer()
shape = {"n_positions": LENGTH, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape)
model = AutoModelForCausalLM.from_config(config)

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = TensorDataset(tokens[: STEPS * 16 * LENGTH].view(-1, LENGTH))
loader = DataLoader(samples, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# From here on, each rank stores only its shards of weights, gradients and optimizer state, and receives its part of the batches.
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, (block,) in enumerate(loader, start=1):
    loss = model(input_ids=block, labels=block).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 20 == 0:
        accelerator.print(f"step {step:3}  loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")

# Collective: every rank must call get_state_dict. It returns the whole weights on rank 0, which writes them.
weights = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(OUTPUT, state_dict=weights, is_main_process=accelerator.is_main_process)
if accelerator.is_main_process:
    tokenizer.save_pretrained(OUTPUT)
accelerator.print(f"Saved: AutoModelForCausalLM.from_pretrained({OUTPUT!r}) loads it.")
accelerator.end_training()
