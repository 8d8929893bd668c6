"""1-bit Adam's parts: the code of a vector, the warm-up, the freeze, and what configuration and mistakes lead to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError, StateError
from hf_zero.native.chunks import CHUNK_NUMEL, ChunkTable, Sent, build_chunks
from hf_zero.native.codes import compress, decompress
from hf_zero.onebit.unit import part_numel
from hf_zero.optim import OneBitAdam
from hf_zero.optim.factory import build_optimizer
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

# ------------------------------------------------------------------------------------------------------------- the code


def laid_out(lengths: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Ranges one after another, each starting at a multiple of 16, and the length of their vector with some padding."""
    ranges, start = [], 0
    for length in lengths:
        ranges.append((start, start + length))
        start += -(-length // 16) * 16
    return ranges, start + 32


def decode(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(table.numel)
    decompress(out, table, Sent(bits.unsqueeze(0), scales.unsqueeze(0)), alive)
    return out


def coded(values: torch.Tensor, ranges: list[tuple[int, int]], alive: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a receiver sees of ``values``, and what was lost."""
    table = build_chunks(ranges, values.numel(), values.device)
    bits, scales, lost = torch.empty(values.numel() // 8, dtype=torch.uint8), torch.empty(table.chunks), values.clone()
    compress(lost, table, bits, scales, alive)
    return decode(table, bits, scales, alive), lost


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 2500), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_signs_and_scales_of_each_chunk(lengths: list[int], seed: int) -> None:
    ranges, numel = laid_out(lengths)
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(numel)
    for number, (start, stop) in enumerate(ranges):
        values[start:stop] = torch.randn(stop - start, generator=generator) * 10.0 ** (number - 2)
    seen, lost = coded(values, ranges)
    expected = torch.zeros(numel)
    for start, stop in ranges:
        for chunk in torch.arange(start, stop).split(CHUNK_NUMEL):
            scale = (values[chunk].abs().double().sum() / len(chunk)).float()
            expected[chunk] = torch.where(values[chunk] >= 0, scale, -scale)
    assert torch.equal(seen, expected)
    assert torch.equal(lost, values - expected)
    assert lost.norm() <= values.norm()


def test_bits_lie_eight_to_a_byte_lowest_first() -> None:
    values = torch.tensor([1.0, -1, -1, 1, -1, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1, 1])
    table = build_chunks([(0, 16)], 16, values.device)
    bits, scales = torch.empty(2, dtype=torch.uint8), torch.empty(1)
    compress(values, table, bits, scales)
    assert bits.tolist() == [0b00001001, 0b10000010]
    assert scales.tolist() == [15 / 16]


def test_padding_and_dead_elements_are_in_no_scale_and_decode_to_zero() -> None:
    values = torch.zeros(64)
    values[:5] = torch.tensor([2.0, -2, 2, 100, -2])
    alive = torch.zeros(64, dtype=torch.bool)
    alive[[0, 1, 2, 4]] = True
    seen, lost = coded(values, [(0, 5)], alive)
    assert seen[:5].tolist() == [2, -2, 2, 0, -2]
    assert not seen[5:].any() and not lost.any()


def test_error_feedback_carries_what_was_lost() -> None:
    """The sum of what was sent follows the sum of what there was to send: the error does not grow."""
    generator = torch.Generator().manual_seed(0)
    table = build_chunks([(0, 3000)], 3008, torch.device("cpu"))
    bits, scales = torch.empty(376, dtype=torch.uint8), torch.empty(table.chunks)
    error, total, sent = torch.zeros(3008), torch.zeros(3008), torch.zeros(3008)
    for _ in range(100):
        values = torch.zeros(3008)
        values[:3000] = torch.randn(3000, generator=generator) + 0.3
        total += values
        error += values
        compress(error, table, bits, scales)
        sent += decode(table, bits, scales)
    torch.testing.assert_close(sent + error, total, rtol=1e-4, atol=1e-3)
    assert error.abs().max() < 20 < total.abs().max()


@pytest.mark.parametrize(("numel", "world", "part"), [(16, 1, 16), (16, 4, 16), (1600, 3, 544), (1600, 4, 400)])
def test_parts_are_equal_and_aligned(numel: int, world: int, part: int) -> None:
    assert part_numel(numel, world) == part


# --------------------------------------------------------------------------------------------------------- the warm-up


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (33,))]


def trained(optimizer: torch.optim.Optimizer, steps: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return params


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-4}])
def test_warm_up_is_adam_bit_for_bit(options: dict[str, Any]) -> None:
    mine = trained(build_optimizer("OneBitAdam", {"lr": 0.01, "freeze_step": 100, **options}, parameters()))
    adam = trained(build_optimizer("Adam", {"lr": 0.01, **options}, parameters()))
    assert all(torch.equal(one, other) for one, other in zip(mine, adam, strict=True))


def test_warm_up_without_bias_correction() -> None:
    mine = trained(OneBitAdam(parameters(), lr=0.01, weight_decay=0.1, bias_correction=False))
    plain = trained(UncorrectedAdam(parameters(), lr=0.01, weight_decay=0.1))
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_eps_inside_the_root() -> None:
    """One step from zero moments: m = g / 10, v = g * g / 1000, both corrected to g and g * g."""
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = OneBitAdam([param], lr=0.5, eps=0.25, eps_inside_sqrt=True)
    param.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    expected = torch.tensor([1 - 0.5 * 3 / (9 + 0.25) ** 0.5, 2 + 0.5 * 4 / (16 + 0.25) ** 0.5])
    torch.testing.assert_close(param.data, expected)


def test_step_by_hand_ends_with_the_warm_up() -> None:
    optimizer = OneBitAdam(parameters(), freeze_step=3)
    optimizer.freeze()
    with pytest.raises(StateError, match="hf_zero.initialize"):
        trained(optimizer, 1)


# ---------------------------------------------------------------------------------------------------------- freeze: auto


def frozen_after(norms: list[float], rates: list[float] | None = None, beta2: float = 0.9) -> int | None:
    """Number of looks after which "auto" freezes."""
    optimizer = OneBitAdam(parameters(), betas=(0.9, beta2), freeze_step="auto")
    for look, norm in enumerate(norms):
        if optimizer.note_variance(norm, rates[look] if rates else 1e-3) is not None:
            return look
    return None


def test_auto_waits_for_a_stable_variance() -> None:
    """beta2 0.9: ten steps apart, each step a look."""
    assert OneBitAdam(parameters(), betas=(0.9, 0.9), freeze_step="auto").look_interval() == 1
    growing = [1.05**step for step in range(40)]
    assert frozen_after(growing) is None
    assert frozen_after([1 / norm for norm in growing]) is None
    assert frozen_after([*growing, *[growing[-1]] * 20]) == 40 + 9
    assert frozen_after([1.0] * 20) == 10
    assert frozen_after([0.0] * 20) is None


def test_auto_waits_while_the_learning_rate_rises() -> None:
    rates = [min(look, 15) * 1e-4 for look in range(30)]
    assert frozen_after([1.0] * 30, rates) == 16


def test_auto_looks_sixteen_times_in_the_memory_of_the_variance() -> None:
    assert OneBitAdam(parameters(), betas=(0.9, 0.999), freeze_step="auto").look_interval() == 62


# --------------------------------------------------------------------------------------------------------- configuration


def test_configuration_of_the_tutorial() -> None:
    config = resolve(
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {
                    "lr": 2e-4, "max_grad_norm": 1.0, "weight_decay": 0.01, "bias_correction": False, "freeze_step": 23000,
                    "cuda_aware": True, "comm_backend_name": "mpi",
                },
            },
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        },
        world_size=8,
    )  # fmt: skip
    section = config.resolved["optimizer"]
    optimizer = build_optimizer(section["type"], section["params"], parameters())
    assert isinstance(optimizer, OneBitAdam)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["freeze_step"], group["bias_correction"]) == (2e-4, 0.01, 23000, False)
    assert optimizer.max_grad_norm == 1.0


@pytest.mark.parametrize("word", ["auto", "stable"])
def test_freeze_step_auto_is_a_value(word: str) -> None:
    """accelerate refuses an "auto" that it cannot fill, so there is a second word."""
    section = resolve({"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": word}}}).resolved["optimizer"]
    assert build_optimizer(section["type"], section["params"], parameters()).freezes_by_itself


@pytest.mark.parametrize("value", [0, -3, 2.5, "soon"])
def test_freeze_step_must_be_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ConfigError, match="freeze_step"):
        resolve({"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": value}}})
    with pytest.raises(ConfigError, match="freeze_step"):
        OneBitAdam(parameters(), freeze_step=value)


def test_mistakes_in_code() -> None:
    with pytest.raises(ConfigError, match="amsgrad"):
        OneBitAdam(parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="max_grad_norm"):
        OneBitAdam(parameters(), max_grad_norm=-1.0)
    with pytest.raises(ConfigError, match="freeze_step"):
        build_optimizer("OneBitAdam", {"freeze_stepp": 3}, parameters())
