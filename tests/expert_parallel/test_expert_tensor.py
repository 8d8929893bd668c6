"""Experts divided over ranks that split the layers between them too (tensor parallelism), against plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.tensor_parallel.split import tp_model_init
from hf_zero.utils import iter_full_params
from tests.support import parity, ranks, zoo
from tests.support.experts import (
    Records,
    alike,
    build,
    build_listed,
    check_experts,
    lopsided,
    mixed,
    with_adapters,
    with_experts,
    with_split_layers,
)
from tests.support.parity import Difference, Run, Trace, check_bitwise, check_training
from tests.support.reads import counted_reads
from tests.support.tp_trainer import EVALUATED, arguments, losses, norms, rows, zero_config

MIXTRAL, QWEN, GPT_OSS = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"
# Products of split layers are added up after they were rounded to 16 bit; the masters of small gradients see most of that.
ROUNDED = Difference(loss=1e-3, norm=5e-3, weights=2**-6, masters=2**-5)
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def check_both(name: str, run: Run, tp: int, ep: int, odd: bool = False, **changes: Any) -> Trace:
    feed = alike((lopsided if odd else mixed)(name), tp)
    return check_experts(name, with_split_layers(run, tp), ep, feed, limit=ROUNDED if run.dtype != "fp32" else None, **changes)


@pytest.mark.slow  # fast: `test_kinds_of_training`
@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("size", [2, 4])
def test_on_four_ranks(size: int) -> None:
    ranks.run_ranks(check_four, 4, size)


def check_four(size: int) -> None:
    """At stage 0, where norms are added up otherwise; also where tokens of a rank are all for the same experts."""
    check_both(MIXTRAL, Run(0, accumulation=2, clip=0.1), 2, size)
    check_both(QWEN, Run(3, clip=0.1), 2, size, odd=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIXTRAL, QWEN])
def test_every_stage(name: str) -> None:
    for world, tp, ep in ((2, 2, 2), (4, 2, 2), (4, 2, 4), (4, 4, 4), (8, 2, 4)):
        ranks.run_ranks(check_stages, world, name, tp, ep)


def check_stages(name: str, tp: int, ep: int) -> None:
    traces = [check_both(name, Run(stage, accumulation=2, clip=0.1), tp, ep) for stage in (0, 1, 2, 3)]
    check_bitwise(traces[3], traces[1], f"{name}: stage 3 against 1")
    check_bitwise(traces[3], traces[2], f"{name}: stage 3 against 2")
    for stage in (1, 3):
        check_both(name, Run(stage, dtype="bf16", accumulation=2, clip=0.1), tp, ep)


def test_kinds_of_training() -> None:
    ranks.run_ranks(check_kinds, 2)


def check_kinds() -> None:
    """A list of experts in a model that cannot be traced; recomputation; LoRA; a router's loss; a batch of one token."""
    named = {"partition_config": {"layer_specs": [{"patterns": ["head"], "partition_type": "column"}]}}
    run = with_experts(Run(3, accumulation=2, extra={"tensor_parallel": {"autotp_size": 2, **named}}), 2)
    forward = lambda model, batch: model(**batch)  # noqa: E731
    check_training(build_listed, alike(mixed(MIXTRAL), 2), forward, run, label="a list of experts")
    check_both(QWEN, Run(1), 2, 2, prepare=lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}))
    check_both(MIXTRAL, Run(3), 2, 2, changes={"output_router_logits": True, "router_aux_loss_coef": 0.5})
    adapted = {"target_modules": ["q_proj"], "target_parameters": WEIGHTS}
    check_both(MIXTRAL, Run(2, clip=0.1), 2, 2, prepare=lambda model: with_adapters(model, **adapted))


@pytest.mark.slow
def test_more_kinds_of_training() -> None:
    ranks.run_ranks(check_more_kinds, 4)
    ranks.run_ranks(check_groups, 8)


def check_more_kinds() -> None:
    host = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    check_both(QWEN, Run(3, extra=host), 2, 4)
    check_both(GPT_OSS, Run(1, clip=0.2), 2, 4)  # with 0.1 two experts of a token tie in the second step
    check_both(MIXTRAL, Run(1, accumulation=2, extra={"zero_optimization": {"mics_shard_size": 1}}), 2, 2)


def check_groups() -> None:
    """Two shard groups, in each of which 4 ranks hold all experts."""
    for stage in (1, 3):
        check_both(MIXTRAL, Run(stage, accumulation=2, extra={"zero_optimization": {"mics_shard_size": 2}}), 2, 4)


# ------------------------------------------------------------------------------------------------ what ranks have, and send


def test_each_token_is_sent_once_and_whole_weights_come_back(tmp_path: Path) -> None:
    build(MIXTRAL).save_pretrained(tmp_path, max_shard_size="20KB")
    ranks.run_ranks(check_shares, 4, str(tmp_path))


def check_shares(folder: str) -> None:
    """Four ranks in pairs that split layers; each holds one expert of four, which it alone has read."""
    from transformers.distributed import DistributedConfig
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    for stage in (2, 3):
        own = Run(stage, extra={"hf_zero": {"expert_load": 1, "expert_load_each": True}})
        config = with_experts(with_split_layers(own, 2), 4).config() if stage == 2 else own.config()
        sizes = {} if stage == 2 else {"distributed_config": DistributedConfig(tp_size=2, ep_size=4, fsdp_size=2)}
        holder = HfDeepSpeedConfig(config)
        with counted_reads() as reads:
            model = type(build(MIXTRAL)).from_pretrained(folder, **sizes)
        unset_hf_deepspeed_config()
        assert {key.split("experts.")[1][0] for key in reads if ".experts." in key} == {str(ranks.rank())}
        engine = hf_zero.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        layer, attention = model.model.layers[0].mlp.experts, model.model.layers[0].self_attn.q_proj.weight
        expert, split = tp_shard_of(layer.down_proj), tp_shard_of(attention)
        assert expert.expert and [(run.start, run.stop) for run in expert.ranges] == [(ranks.rank(), ranks.rank() + 1)]
        assert split.dim == 0 and split.ranges[0].start == ranks.rank() % 2 * split.full_shape[0] // 2
        wanted = build(MIXTRAL).state_dict()
        streamed = dict(iter_full_params(engine, merge_adapters=False))
        whole = engine._consolidated_16bit_state_dict()
        for found in (streamed, whole) if ranks.rank() == 0 else (streamed,):
            assert all(torch.equal(value, wanted[name]) for name, value in found.items()) and len(found) >= len(wanted) - 1
        records: list[dict[str, float]] = []
        engine.reports.sinks.append(Records(records))
        batch = mixed(MIXTRAL)(0, 0, ranks.rank() // 2)
        parity.micro_step(engine, batch, zoo.loss, 0)
        told = [value for key, value in records[0].items() if key.startswith("Train/Experts/model.layers.0.mlp.experts/tokens/")]
        assert sum(told) == 2 * batch["input_ids"].numel() * build(MIXTRAL).config.num_experts_per_tok
        generated = model.generate(torch.full((1, 3), zoo.FIRST_TOKEN + ranks.rank() // 2), max_new_tokens=3, do_sample=False)
        assert generated.shape == (1, 6)
        engine.destroy()
        del holder


@pytest.mark.slow  # fast: test_expert_trainer.py
def test_trainer(tmp_path: Path) -> None:
    ranks.run_ranks(check_trainer, 2, str(tmp_path), group=False)


def check_trainer(folder: str) -> None:
    """Trainer splits the model through ``tp_model_init``; losses, norms and the saved model are those of whole layers and experts."""
    from transformers import AutoModelForCausalLM, Trainer
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    place, found = Path(folder), {}
    for kind, (tp, ep) in {"both": (2, 2), "none": (1, 1)}.items():
        config = {**zero_config(2, tp), "expert_parallel": {"enabled": ep > 1, "autoep_size": ep}}
        args = arguments(str(place / "run"), config, batch=2 if tp == 2 else 1)
        model = build(MIXTRAL, {"use_cache": False})
        trainer = Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(EVALUATED - 1))
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(place / kind))
        dist.barrier()
        found[kind] = [*losses(trainer), *norms(trainer), evaluated]
    assert found["both"] == pytest.approx(found["none"], rel=1e-4)
    unset_hf_deepspeed_config()
    both, none = (AutoModelForCausalLM.from_pretrained(place / kind).state_dict() for kind in ("both", "none"))
    assert both.keys() == none.keys()
    for name, value in both.items():
        assert (value - none[name]).abs().mean() < 1e-4, name  # Adam moves elements whose gradient is rounding noise


# ------------------------------------------------------------------------------------------------ wrong input


def test_what_does_not_go_together() -> None:
    ranks.run_ranks(check_refusals, 4)


def check_refusals() -> None:
    def refused(kind: Any, text: str, tp: int, ep: int, model: Any) -> None:
        with pytest.raises(kind, match=text):
            parity.initialize(model, with_experts(with_split_layers(Run(1), tp), ep))

    refused(ConfigError, "ep 2 is no multiple of tp 4, .* ep 4 would fit", 4, 2, build(MIXTRAL))
    biased = with_adapters(build(GPT_OSS), target_modules=[], target_parameters=["mlp.experts.down_proj_bias"])
    refused(UnsupportedError, "the adapter of down_proj_bias .* is not supported together with tensor_parallel", 2, 2, biased)
    split = tp_model_init(build(MIXTRAL), 2)
    refused(StateError, "was split by tensor parallelism before expert parallelism was configured", 2, 2, split)
    engine = parity.initialize(build(MIXTRAL), with_experts(with_split_layers(Run(1), 2), 4))
    again = parity.initialize(engine.module, with_experts(with_split_layers(Run(1), 2), 4))
    loss = zoo.loss(again, mixed(MIXTRAL)(0, 0, ranks.rank() // 2))
    assert math.isclose(float(loss), float(zoo.loss(build(MIXTRAL), mixed(MIXTRAL)(0, 0, ranks.rank() // 2))), rel_tol=1e-5)
