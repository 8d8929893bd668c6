"""Checkpoints of pipelines load over any number of stages, and models are saved whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pipeline.pipelines import replica, with_numbers, with_stages
from tests.support import parity, ranks
from tests.support.parity import Run
from tests.support.tp_training import zoo_case

CHANGES = {"num_hidden_layers": 4, "tie_word_embeddings": True}


def check_resumed(folder: str, sizes: tuple[tuple[int, int], ...]) -> None:
    """Two steps, a checkpoint, two more; then the same from the checkpoint over other numbers of stages and ranks of a layer."""
    case = with_numbers(zoo_case("LlamaForCausalLM", CHANGES))

    def steps(engine: object, stages: int, tp: int, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 2):
            batch = parity.prepare(case.rows(step, 0, replica(stages, tp)), torch.float32)
            losses.append(parity.mean_over_ranks([parity.micro_step(engine, batch, case.forward, 0)]))
        return losses

    run, expected = Run(1, clip=0.1, extra={"train_micro_batch_size_per_gpu": 2}), []
    for stages, tp in ((2, 1), *sizes):
        engine = parity.initialize(case.build(), with_stages(run, stages, tp))
        if not expected:
            steps(engine, stages, tp, 0)
            engine.save_checkpoint(folder, tag="both", client_state={"seen": 2})
            engine.save_16bit_model(folder, "model.safetensors")
            expected = steps(engine, stages, tp, 2)
            replicas = ranks.world() // (stages * tp)
        else:
            _, state = engine.load_checkpoint(folder, tag="both")
            assert state == {"seen": 2}
            assert engine.global_steps == 2
            losses = steps(engine, stages, tp, 2)
            if ranks.world() // (stages * tp) == replicas:
                assert losses == pytest.approx(expected, rel=1e-5), (stages, tp)
        engine.destroy()
        dist.barrier()


@pytest.mark.parametrize("sizes", [((2, 1), (1, 2)), pytest.param(((1, 1), (2, 2)), marks=pytest.mark.slow)], ids=["few", "others"])
def test_resumed_over_other_stages(tmp_path: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    """Of stages and ranks of a layer."""
    ranks.run_ranks(check_resumed, 4, str(tmp_path), sizes)
