"""Train a causal language model with transformers' Trainer, under ZeRO stage 3.

torchrun --nproc_per_node 2 examples/minimal/trainer.py
"""

from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, Trainer

from hf_zero import ZeroTrainingArguments

OUTPUT = "runs/minimal/trainer"
LENGTH = 64

# Make the arguments before the model, so that at stage 3 each rank creates only its shards. If you have a DeepSpeed JSON file, write
# TrainingArguments(..., deepspeed="ds.json") instead.
args = ZeroTrainingArguments(
    output_dir=OUTPUT,
    zero_stage=3,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    max_steps=100,
    logging_steps=20,
    logging_first_step=True,
    save_steps=50,  # to resume, on any number of ranks: trainer.train(resume_from_checkpoint=True)
    report_to="none",
)

# A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
# AutoModelForCausalLM.from_pretrained("...") for your model.
tokenizer = ByT5Tokenizer()
shape = {"n_positions": LENGTH, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape)
model = AutoModelForCausalLM.from_config(config)

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = [{"input_ids": block, "labels": block} for block in tokens.split(LENGTH)[:-1]]  # drop the last block, which is shorter

trainer = Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer)
trainer.train()
trainer.save_model()  # collective: every rank must call it; rank 0 writes the whole weights
if trainer.is_world_process_zero():
    print(f"Saved: AutoModelForCausalLM.from_pretrained({OUTPUT!r}) loads it.")
