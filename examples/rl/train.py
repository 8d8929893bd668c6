"""Train a policy by reinforcement learning with ZeRO; a server in another process generates and gets the new weights after each step.

    python examples/rl/server.py --model toy --port 8000 &
    torchrun --nproc_per_node 2 examples/rl/train.py --model toy --server http://127.0.0.1:8000 --stage 3

The reward of a completion is the share of its tokens that are even. The algorithm is REINFORCE; the baseline is the mean reward of a
prompt's completions. At stage 3 no rank has the whole weights; `iter_full_params` gathers them in buckets, and rank 0 sends them.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from typing import Any

import torch
from policy import load_policy
from safetensors.torch import load
from senders import SENDERS, post

import hf_zero
from hf_zero.utils import iter_full_params

PROMPTS, EACH, TOKENS = 4, 8, 12  # prompts per rank and step, completions per prompt, tokens per completion


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed configuration."""
    zero = {"stage": arguments.stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "AdamW", "params": {"lr": arguments.learning_rate}}
    return {"train_micro_batch_size_per_gpu": PROMPTS * EACH, "optimizer": optimizer, "zero_optimization": zero}


def rollouts(server: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Get completions of this rank's prompts from the server.

    Returns:
        Tokens of prompts and completions (rows, length), a mask of the completions' tokens (rows, length), and rewards (rows,).
    """
    prompts = torch.randint(3, 64, (PROMPTS, 4), generator=torch.Generator().manual_seed(1000 * step + rank)).tolist()
    body = {"prompt": prompts, "n": EACH, "max_tokens": TOKENS, "temperature": 1.0, "seed": 1000 * step + rank}
    choices = post(f"{server}/v1/completions", body)["choices"]
    rows = [choice["prompt_token_ids"] + choice["token_ids"] for choice in choices]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    said = torch.tensor([[4 <= place < len(row) for place in range(length)] for row in rows])
    reward = torch.tensor([sum(token % 2 == 0 for token in choice["token_ids"]) / TOKENS for choice in choices])
    return tokens, said, reward


def policy_loss(engine: Any, tokens: torch.Tensor, said: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """Return the loss, minus the mean over completions of advantage times log-probability; ``said`` masks the completions' tokens."""
    advantage = (reward.view(PROMPTS, EACH) - reward.view(PROMPTS, EACH).mean(1, keepdim=True)).flatten()
    logits = engine(input_ids=tokens).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -((chosen * said[:, 1:]).sum(1) * advantage).mean()


def server_has(server: str, engine: Any) -> bool:
    """Return whether the server's weights equal the engine's exactly; always True on other ranks than 0. Collective."""
    expected = dict(iter_full_params(engine, rank0_only=True))
    if not expected:
        return True
    with urllib.request.urlopen(f"{server}/weights") as response:  # noqa: S310 - the user's own server
        found = load(response.read())
    return all(torch.equal(found[name], value.cpu()) for name, value in expected.items())


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy", help="Model that the server was started with.")
    parser.add_argument("--server", required=True, help="URL of the server.")
    parser.add_argument("--over", choices=sorted(SENDERS), default="gloo", help="Transport of the weights.")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    model = load_policy(arguments.model)
    engine = hf_zero.initialize(model=model, config=config_of(arguments))[0]
    first = torch.distributed.get_rank() == 0
    send = SENDERS[arguments.over](arguments.server) if first else list  # the other ranks take part in the gathers and receive no tensors
    send(iter_full_params(engine, rank0_only=True))
    for step in range(arguments.steps):
        torch.distributed.barrier()  # wait until the server has the weights of the last step
        tokens, said, reward = rollouts(arguments.server, step, torch.distributed.get_rank())
        engine.backward(policy_loss(engine, tokens, said, reward))
        engine.step()
        start = time.perf_counter()
        send(iter_full_params(engine, rank0_only=True))
        seconds = time.perf_counter() - start
        mean = reward.mean()
        torch.distributed.all_reduce(mean)
        same = server_has(arguments.server, engine)
        if first:
            mean /= torch.distributed.get_world_size()
            print(f"step {step}: reward {mean:.3f}, weights sent in {seconds:.3f} s, the server has them: {same}", flush=True)


if __name__ == "__main__":
    main()
