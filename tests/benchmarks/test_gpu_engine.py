"""The engine on GPUs, where the pretend accelerator checks order and not speed: one rank on nccl, two on nccl or, with one GPU, on gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import context_attention, deep_skips, device_axes, device_jobs, late_skips, ranks
from tests.support.checkpoints import IN_BACKGROUND
from tests.support.parity import Run

pytestmark = pytest.mark.gpu

PLACES = [(world, device_jobs.backend_of("cuda", world)) for world in (1, 2)]


def on_gpu(function: Callable[..., Any], world: int, backend: str, *args: Any) -> list[Any]:
    """Calls ``function`` on ``world`` ranks of one GPU."""
    env = {"HF_ZERO_TEST_DEVICE": "cuda", "HF_ZERO_TEST_BACKEND": backend}
    return ranks.run_ranks(function, world, *args, env=env, timeout=200.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("world", "backend"), PLACES)
def test_parity(world: int, backend: str, dtype: str) -> None:
    runs = [Run(stage=stage, dtype=dtype, accumulation=2, clip=0.5) for stage in range(4)]
    on_gpu(device_jobs.parity, world, backend, ["mlp", "gpt2", "llama"], runs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("world", "backend"), PLACES)
def test_every_way_to_offload(world: int, backend: str, dtype: str) -> None:
    runs = [Run(stage=3, dtype=dtype), Run(stage=2, dtype=dtype, accumulation=2, clip=0.1)]
    on_gpu(device_jobs.offload, world, backend, "gpt2", runs, [])


@pytest.mark.parametrize(("world", "backend"), PLACES)
@pytest.mark.parametrize("job", ["offload_param_alone", "checkpointing", "cpu_checkpointing", "interface"])
def test_job(job: str, world: int, backend: str) -> None:
    on_gpu(getattr(device_jobs, job), world, backend)


@pytest.mark.parametrize(("dtype", "clip_inside"), late_skips.STEPS)
def test_steps_that_the_device_skips(dtype: str, clip_inside: bool) -> None:
    on_gpu(late_skips.same_steps, *PLACES[0], dtype, clip_inside)


@pytest.mark.parametrize("axis", device_axes.AXES)
def test_axes_of_a_mesh(axis: str) -> None:
    on_gpu(device_axes.AXES[axis], *PLACES[1])


def test_attention_of_context_parallelism() -> None:
    on_gpu(context_attention.heads_in_turn, *PLACES[0])
    on_gpu(context_attention.ring_of, *PLACES[1], torch.bfloat16)


@pytest.mark.parametrize("job", ["skipped_blocks", "images_on_some_ranks"])
def test_blocks_that_a_rank_skips(job: str) -> None:
    on_gpu(getattr(deep_skips, job), *PLACES[1])


@pytest.mark.parametrize(("world", "backend"), PLACES)
def test_saving_in_the_background(world: int, backend: str, tmp_path: Path) -> None:
    on_gpu(device_jobs.saves, world, backend, str(tmp_path))


@pytest.mark.parametrize(("world", "backend"), PLACES)
def test_checkpoints_travel_between_device_and_host(world: int, backend: str, tmp_path: Path) -> None:
    state = on_gpu(device_jobs.save, world, backend, str(tmp_path), IN_BACKGROUND)[0]
    assert ranks.run_ranks(device_jobs.load, 2, str(tmp_path), state, {}, 2) == [[], []]
    assert on_gpu(device_jobs.load, world, backend, str(tmp_path), state, device_jobs.OFFLOADED, 3) == [[]] * world
