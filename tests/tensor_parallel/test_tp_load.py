"""Loading a saved model under tensor parallelism reads and holds slices only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.tensor_parallel.split import tp_model_init
from tests.support import parity, ranks, trainers
from tests.support.memory import peak_growth
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.tp_trainer import arguments, losses, norms, rows, zero_config


def load(folder: str) -> tuple[float, float, int, int]:
    """The loss of the loaded model, that of the saved one, the elements this rank holds and those of the whole."""
    from transformers import AutoModelForCausalLM

    from hf_zero.integrations.pretrained import tp_from_pretrained

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
    split = sum(tp_shard_of(param) is not None for param in model.parameters())
    assert split > 8
    engine = parity.initialize(model.train(), Run(stage=1, extra={"tensor_parallel": {"autotp_size": 2}}))
    parity.micro_step(engine, batch, case.forward, 0)
    return found, expected, held, sum(param.numel() for param in whole.parameters())


def test_each_rank_holds_its_slices(tmp_path: Path) -> None:
    for found, expected, held, whole in ranks.run_ranks(load, 2, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)
        assert held < 0.6 * whole


def save_wide(folder: str) -> None:
    """A Llama of 54 MB, and a tiny one whose loading imports all there is to import."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if ranks.rank() == 0:
        for name, width, vocab in (("wide", 512, 8192), ("tiny", 16, 32)):
            sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": vocab, "num_hidden_layers": 2}
            LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(f"{folder}/{name}")
    dist.barrier()


def load_as_scripts_do(folder: str, kind: str) -> tuple[int, int]:
    """Bytes of one kind that a load by ``from_pretrained`` and the split add at their peak, and bytes of the file."""
    from transformers import AutoModelForCausalLM

    save_wide(folder)

    def load(name: str) -> Any:
        return tp_model_init(AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype="auto"), tp_size=2)

    load("tiny")
    return peak_growth(lambda: load("wide"), kind), Path(f"{folder}/wide/model.safetensors").stat().st_size


@pytest.mark.fast_rows("RssAnon")
@pytest.mark.parametrize("kind", ["RssAnon", "RssFile"])
def test_from_pretrained_reads_and_holds_slices(kind: str, tmp_path: Path) -> None:
    """Half of the model in memory of its own; of the file not all pages: the kernel maps more than is asked for, of matrices this small."""
    for added, size in ranks.run_ranks(load_as_scripts_do, 2, str(tmp_path), kind):
        assert 0.2 * size < added < {"RssAnon": 0.62, "RssFile": 0.92}[kind] * size


def train_loaded(stage: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses and norms of a script that makes its arguments, loads a model and trains it over groups of 2 ranks."""
    from transformers import AutoModelForCausalLM, Trainer

    if ranks.rank() == 0:
        CASES["llama"].build().save_pretrained(folder)
        CASES["mixtral"].build().save_pretrained(f"{folder}/mixtral")
    dist.barrier()
    args = arguments(folder, zero_config(stage, 2), max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert hasattr(next(model.parameters()), "ds_id") == (stage == 3)
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    trainer.train()
    experts = AutoModelForCausalLM.from_pretrained(f"{folder}/mixtral")  # its experts are put together while loading
    whole = trainers.weights_of(experts)
    assert all(torch.equal(whole[name], value) for name, value in CASES["mixtral"].build().named_parameters())
    return losses(trainer), norms(trainer)


@pytest.mark.parametrize(("stage", "world"), [(3, 4), *(pytest.param(stage, 2, marks=pytest.mark.slow) for stage in (0, 1, 2, 3))])
def test_a_script_that_loads_its_model_trains_at_every_stage(stage: int, world: int, tmp_path: Path) -> None:
    found = ranks.run_ranks(train_loaded, world, stage, str(tmp_path / "model"))
    expected = ranks.run_ranks(train_alone, 1, str(tmp_path / "one"), world // 2 * 2, group=False)[0]
    for got in found:
        assert got[0] == pytest.approx(expected[0], rel=1e-4) and got[1] == pytest.approx(expected[1], rel=1e-3)


def train_alone(folder: str, batch: int) -> tuple[list[float], list[float]]:
    from transformers import Trainer

    trainer = Trainer(model=CASES["llama"].build(), args=arguments(folder, None, batch=batch, max_steps=2), train_dataset=rows())
    trainer.train()
    return losses(trainer), norms(trainer)


def generate(stage: int) -> tuple[list[int], list[int]]:
    case = CASES["llama"]
    whole = case.build().eval()
    engine = hf_zero.initialize(
        model=case.build().eval(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW"},
        },
    )[0]
    tokens = case.rows(0, 0, 0)["input_ids"][:1, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return engine.module.generate(tokens, **options)[0].tolist(), whole.generate(tokens, **options)[0].tolist()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_generate(stage: int) -> None:
    for found, expected in ranks.run_ranks(generate, 2, stage):
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


@pytest.mark.slow  # fast: test_tp_training.py, test_parity_checkpointing.py
def test_dropout_and_recomputation() -> None:
    (first, loss, state), (second, other_loss, other_state) = ranks.run_ranks(checkpointed_with_dropout, 2)
    assert first == second and loss == other_loss and state == other_state
    assert first[0] == pytest.approx(first[1], rel=1e-5)
