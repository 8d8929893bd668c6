"""Threads that native passes, norms and copies share: any number, several callers at once, a forked child."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from hf_zero import native
from hf_zero.errors import HfZeroError
from hf_zero.native.ranges import copy
from hf_zero.ops import HostAdam

NUMEL = 3_000_001  # several chunks of every kernel, the last of them not whole


def adam(threads: int) -> list[torch.Tensor]:
    """Parameter, 16-bit copy and moments after two steps."""
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
    low = torch.empty(NUMEL, dtype=torch.bfloat16)
    optimizer = HostAdam([param], lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        grad = torch.randn(NUMEL, generator=generator).bfloat16()
        optimizer.update([param], [grad], [low], 0.5, threads)
    return [param.detach(), low, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]]


@pytest.mark.parametrize("threads", [2, 3, 300])
def test_a_pass_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    assert all(torch.equal(one, other) for one, other in zip(adam(1), adam(threads), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_copies_and_norms_of_several_callers_at_once(dtype: torch.dtype, threads: int) -> None:
    values = torch.randn(NUMEL).to(dtype)
    square, failures = native.squared_norm(values, threads=1), []

    def call() -> None:
        for _ in range(5):
            target = torch.full_like(values, float("nan"))
            copy(target, values, threads=threads)
            if not torch.equal(target, values) or native.squared_norm(values, threads=threads) != square:
                failures.append(threads)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_a_forked_child_has_threads_of_its_own() -> None:
    values = torch.randn(NUMEL)
    square = native.squared_norm(values, threads=3)
    child = os.fork()
    if child == 0:
        os._exit(0 if native.squared_norm(values, threads=3) == square else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert native.squared_norm(values, threads=3) == square


def test_a_copy_refuses_what_does_not_fit() -> None:
    with pytest.raises(HfZeroError, match="source torch.float32, 3 on cpu; both must be alike"):
        copy(torch.zeros(4), torch.zeros(3))
    with pytest.raises(HfZeroError, match="contiguous"):
        copy(torch.zeros(2), torch.zeros(4)[::2])
