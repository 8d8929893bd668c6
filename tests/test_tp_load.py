"""Loading a saved model under tensor parallelism reads and holds slices only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.sharding.slices import slice_of
from tests import parity, ranks
from tests.models import CASES
from tests.parity import Run


def load(folder: str) -> tuple[float, float, int, int]:
    """The loss of the loaded model, that of the saved one, the elements this rank holds and those of the whole."""
    from transformers import AutoModelForCausalLM

    from hf_zero.integrations.load_split import tp_from_pretrained

    case = CASES["gpt2"]
    whole = case.build(seed=4).eval()
    if ranks.rank() == 0:
        whole.save_pretrained(folder, max_shard_size="8KB")
    dist.barrier()
    model = tp_from_pretrained(AutoModelForCausalLM, folder, 2)
    batch = case.rows(0, 0, 0)
    with torch.no_grad():
        found, expected = float(case.forward(model, batch)), float(case.forward(whole, batch))
    held = sum(param.untyped_storage().nbytes() // 4 for param in model.parameters())
    split = sum(slice_of(param) is not None for param in model.parameters())
    assert split > 8
    engine = parity.initialize(model.train(), Run(stage=1, extra={"tensor_parallel": {"autotp_size": 2}}))
    parity.micro_step(engine, batch, case.forward, 0)
    return found, expected, held, sum(param.numel() for param in whole.parameters())


def test_each_rank_holds_its_slices(tmp_path: Path) -> None:
    for found, expected, held, whole in ranks.run_ranks(load, 2, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)
        assert held < 0.6 * whole


def generate() -> tuple[list[int], list[int]]:
    case = CASES["llama"]
    whole = case.build().eval()
    engine = hf_zero.initialize(
        model=case.build().eval(), config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
    )[0]
    tokens = case.rows(0, 0, 0)["input_ids"][:1, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return engine.module.generate(tokens, **options)[0].tolist(), whole.generate(tokens, **options)[0].tolist()


def test_generate() -> None:
    for found, expected in ranks.run_ranks(generate, 2):
        assert found == expected


def checkpointed_with_dropout() -> tuple[list[float], float, list[float]]:
    """Norms without and with recomputation, and values of a dropped-out whole tensor's row on this rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    norms = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)).train()
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7 + ranks.rank())  # the engine makes them one
        engine = parity.initialize(model, Run(stage=2, extra={"tensor_parallel": {"autotp_size": 2}}))
        losses = [parity.micro_step(engine, CASES["gpt2"].rows(step, 0, 0), CASES["gpt2"].forward, 0) for step in range(2)]
        norms.append(float(engine.get_global_grad_norm()))
    return norms, losses[-1], torch.rand(3).tolist()


def test_dropout_and_recomputation() -> None:
    (first, loss, state), (second, other_loss, other_state) = ranks.run_ranks(checkpointed_with_dropout, 2)
    assert first == second and loss == other_loss and state == other_state
    assert first[0] == pytest.approx(first[1], rel=1e-5)
