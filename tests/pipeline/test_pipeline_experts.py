"""Experts divided over the ranks of each stage of a pipeline, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.core.units.marks import tp_shard_of
from tests.pipeline.pipelines import check, check_schedule, replica, with_stages
from tests.support import parity, ranks, zoo
from tests.support.experts import build, with_experts
from tests.support.models import ModelCase
from tests.support.parity import Run
from tests.support.reads import loaded_under, saved_sizes

MIXTRAL = "MixtralForCausalLM"
RUN = Run(1, clip=0.1, extra={"train_micro_batch_size_per_gpu": 2})


def case_of(name: str = MIXTRAL, **changes: object) -> ModelCase:
    """A mixture whose router tells tokens apart."""
    return ModelCase(name, lambda: build(name, dict(changes)), lambda generator, rows: zoo.batch(name, generator, rows), zoo.loss)


def check_training() -> None:
    """ZeRO's stages, of which 0 adds norms up otherwise; clipping, accumulation, parts of a batch; tied weights; a schedule."""
    for stage in (0, 2):
        check(case_of(num_hidden_layers=4), with_experts(Run(stage, accumulation=2, clip=0.1), 2), 2)
    check(case_of("Qwen3MoeForCausalLM", tie_word_embeddings=True), with_experts(Run(1, clip=0.1), 2), 2, micro_batches=1)
    check_schedule(case_of(num_hidden_layers=4), with_experts(Run(1, accumulation=4, clip=0.1), 2), 2, "1F1B")


@pytest.mark.slow  # `test_read_saved_and_resumed` trains them too
def test_trained_as_by_one_rank() -> None:
    ranks.run_ranks(check_training, 4)


def check_with_layers() -> None:
    """Stages, tensor parallelism and experts at once."""
    for name in (MIXTRAL, "Qwen3MoeForCausalLM"):
        check(case_of(name, num_hidden_layers=4), with_experts(Run(1, accumulation=2, clip=0.1), 2), 2, tp=2)
    check(case_of(num_hidden_layers=4), with_experts(Run(2, clip=0.1), 4), 2, tp=2)


@pytest.mark.slow
def test_stages_layers_and_experts_over_eight_ranks() -> None:
    ranks.run_ranks(check_with_layers, 8, timeout=250)


def check_saved(folder: str, whole: dict[str, int], every: bool) -> None:
    """A rank reads its experts of its stage's layers; saves, generates, and resumes over other axes."""
    wanted = build(MIXTRAL, {"num_hidden_layers": 4})
    config = with_experts(with_stages(RUN, 2), 2).config()
    model, reads = loaded_under(config, type(wanted), folder)
    stage, own = divmod(ranks.rank(), 2)
    experts = {(int(key.split("layers.")[1][0]), int(key.split("experts.")[1][0])) for key in reads if ".experts." in key}
    half = wanted.config.num_local_experts // 2
    assert {layer // 2 for layer, _ in experts} == {stage} and {expert // half for _, expert in experts} == {own}
    assert sum(reads.values()) < 0.4 * sum(whole.values())
    engine = parity.initialize(model, with_experts(with_stages(RUN, 2), 2))
    here, other = (model.model.layers[2 * place].mlp.experts.down_proj for place in (stage, 1 - stage))
    assert len(here) == half and tp_shard_of(other).elsewhere and other.numel() == 0
    check_whole(engine, wanted)
    batch = case_of().rows(0, 0, 0)
    assert torch.allclose(zoo.loss(engine.eval(), batch), zoo.loss(wanted.eval(), batch), rtol=1e-5)
    tokens = batch["input_ids"][: 1 + own, :3]  # each rank its own
    expected = wanted.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist() == expected.tolist()
    engine.train()
    two_steps(engine, 0, 2)
    engine.save_checkpoint(f"{folder}/saved", tag="both")
    after = two_steps(engine, 2, 2)
    engine.destroy()
    for stages, ep in ((2, 2), (1, 2), (2, 1), (1, 4)) if every else ((2, 2), (1, 4)):
        run = with_stages(RUN, stages) if stages > 1 else RUN
        again = parity.initialize(build(MIXTRAL, {"num_hidden_layers": 4}), with_experts(run, ep) if ep > 1 else run)
        again.load_checkpoint(f"{folder}/saved", tag="both")
        found = two_steps(again, 2, stages)
        assert stages == 1 or found == pytest.approx(after, rel=1e-5), (stages, ep)
        again.destroy()
        dist.barrier()


def check_whole(engine: Any, wanted: torch.nn.Module) -> None:
    """What is saved is the model."""
    whole = engine._consolidated_16bit_state_dict()
    if ranks.rank() == 0:
        expected = wanted.state_dict()
        assert whole.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in whole.items())


def two_steps(engine: Any, first: int, stages: int) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        batch = parity.prepare(case_of().rows(step, 0, replica(stages, 1)), torch.float32)
        losses.append(parity.mean_over_ranks([parity.micro_step(engine, batch, zoo.loss, 0)]))
    return losses


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_read_saved_and_resumed(tmp_path: Path, every: bool) -> None:
    sizes = saved_sizes(build(MIXTRAL, {"num_hidden_layers": 4}), tmp_path)
    ranks.run_ranks(check_saved, 4, str(tmp_path), sizes, every)
