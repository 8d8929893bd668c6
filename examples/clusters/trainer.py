"""Train with transformers' Trainer under ZeRO stage 3; started again with the same words, it goes on from its newest checkpoint.

torchrun --nproc_per_node 2 examples/clusters/trainer.py --output_dir runs/clusters/trainer --max_steps 100

All flags are those of ZeroTrainingArguments. With --checkpoint_url s3://bucket/run the checkpoints lie in an object store.
"""

from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, HfArgumentParser, Trainer, set_seed

from hf_zero import ZeroTrainingArguments
from hf_zero.utils import newest_trainer_checkpoint

LENGTH = 64

# The arguments come before the model, so that at stage 3 each rank creates only its shards.
parser = HfArgumentParser(ZeroTrainingArguments)
parser.set_defaults(zero_stage=3, per_device_train_batch_size=8, learning_rate=3e-3, report_to="none")
parser.set_defaults(save_steps=50, save_total_limit=2)  # a rank that dies costs at most the steps since the last save
parser.set_defaults(logging_steps=10, logging_first_step=True, disable_tqdm=True)  # a log file has no use for a progress bar
(args,) = parser.parse_args_into_dataclasses()

# A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
# AutoModelForCausalLM.from_pretrained("...") for your model.
set_seed(args.seed)
tokenizer = ByT5Tokenizer()
shape = {"n_positions": LENGTH, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape)
model = AutoModelForCausalLM.from_config(config)

tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
samples = [{"input_ids": block, "labels": block} for block in tokens.split(LENGTH)[:-1]]  # drop the last block, which is shorter

trainer = Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer)
# The newest complete checkpoint, on this machine or in the store; None if there is none. After SIGTERM to any rank Trainer saves one, and
# all ranks end with status 75: that needs no line here.
trainer.train(resume_from_checkpoint=newest_trainer_checkpoint(args.output_dir, args.checkpoint_url))
trainer.save_model()  # collective: every rank must call it; rank 0 writes the whole weights
if trainer.is_world_process_zero():
    print(f"Saved: AutoModelForCausalLM.from_pretrained({args.output_dir!r}) loads it.")
