"""Train LoRA adapters (PEFT) with transformers' Trainer, under ZeRO stage 3.

torchrun --nproc_per_node 2 examples/minimal/lora.py
"""

import os
from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Trainer

from hf_zero import ZeroTrainingArguments

BASE, OUTPUT = "runs/minimal/base", "runs/minimal/lora"  # BASE: name on the hub, or folder, of your model
LENGTH = 64

# Write a tiny model with random weights to BASE, instead of a pretrained model. Delete this block if BASE is your model.
if int(os.environ["RANK"]) == 0:
    torch.manual_seed(0)
    letters = ByT5Tokenizer()
    shape = {
        "n_positions": LENGTH,
        "n_layer": 2,
        "n_embd": 160,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.1,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=len(letters), **shape)).save_pretrained(BASE)
    letters.save_pretrained(BASE)

# Make the arguments before the model, so that at stage 3 each rank loads only its shards.
args = ZeroTrainingArguments(
    output_dir=OUTPUT,
    zero_stage=3,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    max_steps=100,
    logging_steps=20,
    logging_first_step=True,
    save_strategy="no",
    report_to="none",
)
torch.distributed.barrier()  # wait until rank 0 has written BASE

tokenizer = AutoTokenizer.from_pretrained(BASE)
base = AutoModelForCausalLM.from_pretrained(BASE)
model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
if args.process_index == 0:
    model.print_trainable_parameters()

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = [{"input_ids": block, "labels": block} for block in tokens.split(LENGTH)[:-1]]  # drop the last block, which is shorter

trainer = Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer)
trainer.train()
trainer.save_model()  # collective: every rank must call it; rank 0 writes the adapters
if trainer.is_world_process_zero():
    print(f"Saved: AutoPeftModelForCausalLM.from_pretrained({OUTPUT!r}) loads the adapters and their base.")
