"""Training over the axes of a mesh on the ranks' device, each beside plain PyTorch: what ``make gpu`` runs on two ranks."""

from __future__ import annotations

from typing import Any

from tests import pretend
from tests.pipeline import pipelines
from tests.sequence_parallel import context
from tests.support.experts import check_experts
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.sequences import Data, llama
from tests.support.tp_training import check_against_one_rank, zoo_case


def tensor() -> None:
    runs = [Run(stage, dtype, accumulation=2, clip=0.1) for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))]
    check_against_one_rank(CASES["llama"], 2, runs)
    check_against_one_rank(CASES["gpt2"], 2, runs[:1])


def pipeline() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        pipelines.check(CASES["llama"], Run(1, dtype, accumulation=2, clip=0.1), 2)
    pipelines.check_schedule(zoo_case("LlamaForCausalLM", {}), Run(0, accumulation=2, clip=0.1), 2, "1F1B")


def experts() -> None:
    def prepare(model: Any) -> None:
        if pretend.loaded():  # transformers' default counts integers by a histogram, which the CPU has for floats only
            model.set_experts_implementation("batched_mm")

    for stage in range(4):
        check_experts("MixtralForCausalLM", Run(stage, accumulation=2, clip=0.1), 2, prepare=prepare)


def sequences() -> None:
    """Check Ulysses and both strategies of context parallelism, with padding."""
    for stage in (0, 3):
        run, data = Run(stage, accumulation=2, clip=0.5), Data(padding="right")
        context.check(llama, run, data, 1, sequence=2)
        for strategy in ("allgather", "alltoall"):
            context.check(llama, run, data, 2, strategy=strategy)
            context.check(llama, run, Data(), 2, strategy=strategy)


AXES = {"tensor": tensor, "pipeline": pipeline, "experts": experts, "sequences": sequences}
