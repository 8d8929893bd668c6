"""Train in your own loop with Accelerate under ZeRO stage 3 on workers of Ray; a node that dies costs the steps since the last save.

python examples/clusters/ray/accelerate_loop.py --storage runs/clusters/ray --workers 2 --max_steps 100

Without GPUs add --cpu. The storage is a folder on a disk that all nodes share.
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

    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer

    from hf_zero import ZeroPlugin

    # The Accelerator comes before the model, so that at stage 3 each rank creates only its shards. With this sampler the order of the
    # batches depends on seed and epoch alone, so a run goes on with the next one.
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=settings["seed"])
    accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(stage=3), dataloader_config=order)

    # A tiny model with random weights. Replace these lines by AutoTokenizer.from_pretrained("...") and
    # AutoModelForCausalLM.from_pretrained("...") for your model.
    length = 64
    set_seed(settings["seed"])
    tokenizer = ByT5Tokenizer()
    shape = {"n_positions": length, "n_layer": 2, "n_embd": 160, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape))
    tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
    samples = TensorDataset(tokens[: len(tokens) // length * length].view(-1, length))
    # With a generator of its own the loader draws nothing from the random states of dropout, which a checkpoint restores.
    loader = DataLoader(samples, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(settings["seed"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, newest = 0, ray.train.get_checkpoint()  # the newest one that Ray knows of; None at the first start
    if newest is not None:
        accelerator.load_state(newest.path)
        step = int(newest.path.rpartition("-")[2])
        accelerator.print(f"Resumed after step {step}.")

    while step < settings["max_steps"]:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for (block,) in accelerator.skip_first_batches(loader, done):
            loss = model(input_ids=block, labels=block).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            metrics = {"step": step, "loss": accelerator.reduce(loss.detach(), "mean").item()}
            accelerator.print(f"step {step:3}  loss {metrics['loss']:.6f}")
            if step % settings["save_steps"] == 0 or step == settings["max_steps"]:
                folder = os.path.join(settings["output_dir"], f"step-{step}")
                accelerator.save_state(folder)
                # All ranks have written into one folder in Ray's storage, so nothing is copied. The report waits for every rank.
                whole = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
                ray.train.report(metrics, checkpoint=whole, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
            if step == settings["max_steps"]:
                break

    weights = accelerator.get_state_dict(model)  # collective; whole weights on rank 0, which writes them
    save = accelerator.unwrap_model(model).save_pretrained
    save(settings["output_dir"], state_dict=weights, is_main_process=accelerator.is_main_process)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--storage", required=True, help="folder on a disk that all nodes share")
parser.add_argument("--name", default="accelerate_loop", help="a run of the same name goes on from its newest checkpoint in the storage")
parser.add_argument("--workers", type=int, default=2, help="ranks; one GPU each")
parser.add_argument("--cpu", action="store_true", help="train without GPUs")
parser.add_argument("--max_steps", type=int, default=100)
parser.add_argument("--save_steps", type=int, default=50)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--max_failures", type=int, default=3, help="restarts after workers or nodes that died")

if __name__ == "__main__":
    flags = parser.parse_args()
    storage = os.path.abspath(flags.storage)
    result = TorchTrainer(
        train,
        train_loop_config={**vars(flags), "output_dir": os.path.join(storage, flags.name)},  # Ray's folder of this run
        scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=not flags.cpu),
        run_config=RunConfig(
            name=flags.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=flags.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"Loss {result.metrics['loss']:.6f}; the newest checkpoint is {result.checkpoint.path}.")
