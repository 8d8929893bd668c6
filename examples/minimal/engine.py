"""Train with DeepSpeed's interface: hf_zero.initialize has the arguments and results of deepspeed.initialize.

A script with `import deepspeed` runs unchanged; hf_zero provides that module too.

hf-zero launch --num_gpus 2 examples/minimal/engine.py
"""

from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer
from transformers.integrations import HfDeepSpeedConfig

import hf_zero

OUTPUT = "runs/minimal/engine"
LENGTH, STEPS = 64, 100
CONFIG = {  # a dict, or the path of your DeepSpeed JSON file
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}

# Make this object before the model and keep a reference to it: while it exists, transformers creates models in shards.
keep = HfDeepSpeedConfig(CONFIG)

# A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
# AutoModelForCausalLM.from_pretrained("...") for your model.
torch.manual_seed(0)
tokenizer = ByT5Tokenizer()
shape = {"n_positions": LENGTH, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape)
model = AutoModelForCausalLM.from_config(config)

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = [{"input_ids": block, "labels": block} for block in tokens.split(LENGTH)[: STEPS * 16]]

# From here on, each rank stores only its shards of weights, gradients and optimizer state; the loader yields its part of the data.
engine, _, loader, _ = hf_zero.initialize(model=model, training_data=samples, config=CONFIG)

for step, batch in enumerate(loader, start=1):
    batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0 and (step == 1 or step % 20 == 0):
        print(f"step {step:3}  loss {loss.item():.3f}  gradient norm {engine.get_global_grad_norm():.3f}", flush=True)

engine.save_16bit_model(OUTPUT, "model.safetensors")  # collective: every rank must call it; rank 0 writes the whole weights
if engine.global_rank == 0:
    config.save_pretrained(OUTPUT)
    tokenizer.save_pretrained(OUTPUT)
    print(f"Saved: AutoModelForCausalLM.from_pretrained({OUTPUT!r}) loads it.")
engine.destroy()
