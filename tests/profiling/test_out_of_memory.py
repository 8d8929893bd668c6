"""When memory runs out: the error keeps its class and text, says what was alive to the byte, and its advice saves what it says."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.assembly import out_of_memory
from hf_zero.assembly.out_of_memory import Failure, most_gathered, savings
from hf_zero.core.holdings import alive
from tests import pretend
from tests.pretend import network
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.parity import Run

GPT2 = CASES["gpt2"]
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def _engine(stage: int, **extra: Any) -> Any:
    model = GPT2.build().bfloat16()
    return parity.initialize(model, Run(stage, dtype="bf16", extra=extra))


def _train(engine: Any, step: int) -> None:
    engine.backward(GPT2.forward(engine, GPT2.rows(step, ranks.rank())))
    engine.step()


def _fail(engine: Any, where: str, error: BaseException) -> None:
    """The next forward, backward or step of the second block raises ``error``."""
    block = engine.module.transformer.h[1]

    def fail(*_: Any) -> None:
        made = torch.ones(16 << 20)  # 64 MiB, alive while the error is
        raise error from ValueError(made)

    if where == "forward":
        block.mlp.register_forward_pre_hook(fail)
    elif where == "backward":
        block.register_forward_hook(lambda _module, _inputs, output: _first(output).register_hook(fail) and None)
    else:
        engine.stepper.optimizer.update = fail


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _raised(engine: Any, where: str, error: BaseException) -> str:
    _fail(engine, where, error)
    with pytest.raises(type(error)) as caught:
        _train(engine, 1)
    assert type(caught.value) is type(error) and len(caught.value.args) == 1
    assert str(caught.value).startswith(TEXT) and str(caught.value).count("memory in use on rank") == 1
    return str(caught.value)


def _expected(engine: Any, stage: int) -> Counter[tuple[str, str]]:
    """Bytes between two steps by the table of stages: bf16 parameters, fp32 masters, two fp32 moments and Adam's counts of steps."""
    elements = sum(unit.layout.padded_numel for unit in engine.units)
    own = elements if stage == 0 else elements // 2
    loose = sum(buffer.nbytes for buffer in engine.module.buffers())
    counts = sum(value.nbytes for state in engine.optimizer.inner.state.values() for value in state.values() if not value.ndim)
    books = Counter(
        {
            ("host", "parameters"): 2 * (elements // 2 if stage == 3 else elements),
            ("host", "masters"): 4 * own,
            ("host", "moments"): 8 * sum(segment.range.numel for segment in engine.optimizer.segments) + counts,
        }
    )
    return books + Counter({("host", "other"): loose})


def check_stages() -> None:
    books: dict[int, Counter[tuple[str, str]]] = {}
    told: dict[int, dict[str, int]] = {}
    for stage in range(4):
        engine = _engine(stage)
        _train(engine, 0)
        books[stage] = alive(engine)
        assert books[stage] == _expected(engine, stage), (stage, books[stage], _expected(engine, stage))
        failure = Failure("host", "step", Counter(books[stage]))
        told[stage] = {found.change: found.nbytes for found in savings(engine, engine.resolved, failure)}
        where = ("forward", "backward", "step")[stage % 3]
        text = _raised(engine, where, torch.OutOfMemoryError(TEXT))
        assert f"on rank {ranks.rank()} in {where}" in text and "(the failed allocation needed 2.00 GiB)" not in text.splitlines()[0]
        for kind in ("parameters", "masters", "moments"):
            assert f"{kind} " in text.splitlines()[1]
        engine.destroy()
    totals = {stage: sum(found.values()) for stage, found in books.items()}
    states = {stage: found["host", "masters"] + found["host", "moments"] for stage, found in books.items()}
    counts = states[0] - states[1] * 2  # Adam's counts are not shared out
    assert told[0]["zero_optimization.stage: 1"] == pytest.approx(totals[0] - totals[1], abs=abs(counts) + 1)
    parameters = books[1]["host", "parameters"]
    engine = _engine(1)
    live = min(parameters, most_gathered(engine))
    for stage in (1, 2):
        saved = told[stage].get("zero_optimization.stage: 3", 0)
        assert saved == totals[stage] - totals[3] - live
    assert told[3]["zero_optimization.offload_optimizer.device: nvme"] == states[3]
    assert told[3]["twice as many ranks"] == pytest.approx((states[3] + parameters // 2) / 2, abs=1)
    engine.destroy()


def test_what_was_alive_at_each_stage_and_what_another_stage_saves() -> None:
    ranks.run_ranks(check_stages, 2)


def _bytes_of_tensors(_: torch.device) -> int:
    """Count the bytes of all living tensors: the process' own memory rises and falls with what other tests left behind."""
    gc.collect()
    storages = {held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in gc.get_objects() if type(held) is Tensor}
    return sum(storages.values())


def check_host() -> None:
    """Errors of the host: Python's, and that of torch's allocator; other errors are left alone."""
    with mock.patch.object(out_of_memory, "taken", _bytes_of_tensors):
        _check_host()


def _check_host() -> None:
    engine = _engine(3)
    _train(engine, 0)
    text = _raised(engine, "forward", MemoryError(TEXT))
    assert "activations " in text and "gathered " in text and "last block: transformer.h.1" in text
    assert "train_micro_batch_size_per_gpu: 1 with gradient_accumulation_steps: 2" in text
    engine.destroy()
    engine = _engine(3)
    text = _raised(engine, "backward", RuntimeError(f"{TEXT} DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"))
    assert "model.gradient_checkpointing_enable()" in text
    engine.destroy()
    engine = _engine(0)
    engine.module.gradient_checkpointing_enable()
    assert "model.gradient_checkpointing_enable()" not in _raised(engine, "backward", torch.OutOfMemoryError(TEXT))
    engine.destroy()
    engine = _engine(0)
    _fail(engine, "forward", RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="^something else$"):
        _train(engine, 0)
    engine.destroy()


def test_errors_of_the_host_and_errors_that_are_none_of_memory() -> None:
    ranks.run_ranks(check_host, 2)


# -- a device that counts ---------------------------------------------------------------------------------------------------

WIDTH, DEPTH, ROWS = 256, 8, 1024


class Deep(nn.Module):
    """Blocks with many activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


def _deep(stage: int, micro: int) -> Any:
    torch.manual_seed(0)
    size = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 4 // micro}
    return hf_zero.initialize(model=Deep(), config=Run(stage, extra=size).config())[0]


def _steps(engine: Any, micro: int) -> None:
    for _ in range(2 * (4 // micro)):
        batch = torch.randn(micro * ROWS, WIDTH).to(engine.collectives.topology.device)
        engine.backward(engine(batch).square().mean())
        engine.step()


def check_device() -> None:
    """The device holds 12 MiB: activations of four samples (8 blocks x 2 tensors x 1 MiB) are too many, of two they fit."""
    engine = _deep(1, 4)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _steps(engine, 4)
    message = str(caught.value)
    first, second, *advice = message.splitlines()
    assert "out of memory: 4194304 bytes asked for" in first and "on the device" in second and "activations " in second
    assert "(the failed allocation needed 4.0 MiB)" in advice[0]
    wanted = "train_micro_batch_size_per_gpu: 2 with gradient_accumulation_steps: 2"
    assert any(wanted in line for line in advice) and any("offload_optimizer.device: cpu" in line or "stage: 3" in line for line in advice)
    engine.destroy()
    del engine, caught
    gc.collect()  # the traceback of the error refers to itself, and to activations
    smaller = _deep(1, 1)
    _steps(smaller, 1)
    smaller.destroy()


@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_a_device_that_is_full_and_the_change_that_helps() -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME, "PRETEND_MEMORY": str(20 << 20)}
    ranks.run_ranks(check_device, 2, env=env, timeout=120.0)
