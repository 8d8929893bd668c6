"""Train with transformers' Trainer under ZeRO stage 3 on workers of Ray; a worker or node that dies costs the steps since the last save.

python examples/clusters/ray/trainer.py --storage runs/clusters/ray --workers 2 --max_steps 100

Without GPUs add --cpu. The storage is a folder on a disk that all nodes share. Flags that are not listed at the end of this file are those
of ZeroTrainingArguments.
"""

import argparse
import os

import ray.train
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict) -> None:
    """Run on every worker. Ray has made the process group, and sets RANK and the like, which hf_zero and accelerate read."""
    # Imports of training stand here, because this function runs in other processes.
    from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

    from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, HfArgumentParser, Trainer, TrainerCallback, set_seed

    from hf_zero import ZeroTrainingArguments

    class Report(TrainerCallback):
        """Report each checkpoint to Ray. All ranks have written into one folder in Ray's storage, so nothing is copied."""

        def on_save(self, args, state, control, **kwargs):
            metrics = {name: value for entry in state.log_history for name, value in entry.items()}
            written = Checkpoint.from_directory(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
            whole = written if state.is_world_process_zero else None
            ray.train.report(metrics, checkpoint=whole, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    # The arguments come before the model, so that at stage 3 each rank creates only its shards.
    words = HfArgumentParser(ZeroTrainingArguments)
    words.set_defaults(zero_stage=3, per_device_train_batch_size=8, learning_rate=3e-3, report_to="none")
    words.set_defaults(save_steps=50, logging_steps=10, logging_first_step=True, disable_tqdm=True)
    (args,) = words.parse_args_into_dataclasses(settings["words"])

    # A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
    # AutoModelForCausalLM.from_pretrained("...") for your model.
    length = 64
    set_seed(args.seed)
    tokenizer = ByT5Tokenizer()
    shape = {"n_positions": length, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape))
    tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
    samples = [{"input_ids": block, "labels": block} for block in tokens.split(length)[:-1]]  # drop the last block, which is shorter

    trainer = Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer, callbacks=[Report()])
    newest = ray.train.get_checkpoint()  # the newest one that Ray knows of; None at the first start
    trainer.train(resume_from_checkpoint=newest.path if newest else None)
    trainer.save_model()  # collective: every rank must call it; rank 0 writes the whole weights


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--storage", required=True, help="folder on a disk that all nodes share")
parser.add_argument("--name", default="trainer", help="a run of the same name goes on from its newest checkpoint in the storage")
parser.add_argument("--workers", type=int, default=2, help="ranks; one GPU each")
parser.add_argument("--cpu", action="store_true", help="train without GPUs")
parser.add_argument("--max_failures", type=int, default=3, help="restarts after workers or nodes that died")

if __name__ == "__main__":
    flags, words = parser.parse_known_args()
    storage = os.path.abspath(flags.storage)
    output_dir = os.path.join(storage, flags.name)  # Ray's folder of this run; Ray deletes its older checkpoints
    result = TorchTrainer(
        train,
        train_loop_config={"words": ["--output_dir", output_dir, *words]},
        scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=not flags.cpu),
        run_config=RunConfig(
            name=flags.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=flags.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"Loss {result.metrics['loss']:.6f}; the newest checkpoint is {result.checkpoint.path}.")
