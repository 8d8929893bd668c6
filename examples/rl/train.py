"""Reinforcement learning with ZeRO whose completions come from a server in another process, which gets the new weights after each step.

    python examples/rl/server.py --model toy --port 8000 &
    torchrun --nproc_per_node 2 examples/rl/train.py --model toy --server http://127.0.0.1:8000 --stage 3

The reward of a completion is how many of its tokens are even: REINFORCE with the mean of a prompt's completions as the baseline. At stage 3
no rank has whole weights; `iter_full_params` gathers them bucket by bucket, and rank 0 sends.
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

PROMPTS, EACH, TOKENS = 4, 8, 12  # prompts of a rank in a step, completions of each, tokens of one


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed configuration."""
    zero = {"stage": arguments.stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "AdamW", "params": {"lr": arguments.learning_rate}}
    return {"train_micro_batch_size_per_gpu": PROMPTS * EACH, "optimizer": optimizer, "zero_optimization": zero}


def rollouts(server: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Completions of this rank's prompts.

    Returns:
        Tokens (rows, length) with the prompt in front, which of them the model has said (rows, length), and advantages (rows,).
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
    """Minus the mean of advantage times log-probability."""
    advantage = (reward.view(PROMPTS, EACH) - reward.view(PROMPTS, EACH).mean(1, keepdim=True)).flatten()
    logits = engine(input_ids=tokens).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -((chosen * said[:, 1:]).sum(1) * advantage).mean()


def server_has(server: str, engine: Any) -> bool:
    """Whether the server's weights are the engine's, bit for bit; collective, and only rank 0 knows."""
    expected = dict(iter_full_params(engine, rank0_only=True))
    if not expected:
        return True
    with urllib.request.urlopen(f"{server}/weights") as response:  # noqa: S310 - the user's own server
        found = load(response.read())
    return all(torch.equal(found[name], value.cpu()) for name, value in expected.items())


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy", help="What the server was started with.")
    parser.add_argument("--server", required=True, help="Its URL.")
    parser.add_argument("--over", choices=sorted(SENDERS), default="gloo", help="The way weights take.")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    model = load_policy(arguments.model)
    engine = hf_zero.initialize(model=model, config=config_of(arguments))[0]
    first = torch.distributed.get_rank() == 0
    send = SENDERS[arguments.over](arguments.server) if first else list  # the others take part in gathering and get nothing
    send(iter_full_params(engine, rank0_only=True))
    for step in range(arguments.steps):
        torch.distributed.barrier()  # nobody asks before the server has the weights of the last step
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
