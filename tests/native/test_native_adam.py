"""The fused Adam pass: its torch reference, torch's own optimizers, and the independence of slices, threads and instruction sets."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.errors import HfZeroError
from hf_zero.native.host_updates import AdamRule, adam_reference, adam_update
from hf_zero.ops import HostAdam
from tests.native.libraries import TORCH_ADAM_ROUNDS_ALIKE, isa, needs_library, needs_torch_adam_alike, same_bits, sizes, values

__all__ = ["isa"]

MIXED = {"grad_dtype": torch.bfloat16, "moment_dtype": torch.float32, "low_dtype": torch.bfloat16}
PLAIN = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

cases = st.fixed_dictionaries(
    {
        "grad_dtype": st.sampled_from(DTYPES),
        "moment_dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "low_dtype": st.sampled_from([None, torch.bfloat16, torch.float16]),
        "offset": st.integers(0, 17),
        "finite": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 3e-5, 0.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.3, 0.99)]),
        "eps": st.sampled_from([1e-8, 1e-6, 0.0]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
        "decoupled": st.booleans(),
        "bias_correction": st.booleans(),
        "step": st.sampled_from([1, 2, 1000]),
        "grad_factor": st.sampled_from([1.0, 0.25, 1 / 3, 1 / 65536]),
    }
)


def tensors(count: int, case: dict[str, Any]) -> list[torch.Tensor | None]:
    """Master, gradient, two moments and the low copy."""
    seed, offset = case["seed"], case["offset"]
    second = values(count, seed + 3, dtype=case["moment_dtype"], offset=offset).abs()
    return [
        values(count, seed, offset=offset),
        values(count, seed + 1, dtype=case["grad_dtype"], offset=offset, finite=case["finite"]),
        values(count, seed + 2, dtype=case["moment_dtype"], offset=offset),
        second,
        None if case["low_dtype"] is None else torch.zeros(offset + count, dtype=case["low_dtype"])[offset:],
    ]


def copies(given_tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.clone() for tensor in given_tensors]


def assert_same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> None:
    for name, one, other in zip(("master", "grad", "exp_avg", "exp_avg_sq", "low"), left, right, strict=True):
        assert one is None or same_bits(one, other), name


@needs_torch_adam_alike
@given(count=sizes(), case=cases, option=options)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_kernel_equals_the_reference_bit_for_bit(isa: str, count: int, case: dict[str, Any], option: dict[str, Any]) -> None:
    native, reference = tensors(count, case), tensors(count, case)
    adam_update(*native, AdamRule(**option))
    adam_reference(*reference, AdamRule(**option))
    assert_same(native, reference)


@needs_library
@given(count=st.integers(0, 3000), case=cases, option=options, cut=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_result_does_not_depend_on_where_a_range_is_cut(count: int, case: dict[str, Any], option: dict[str, Any], cut: float) -> None:
    whole, cut_in_two = tensors(count, case), tensors(count, case)
    place = int(cut * count)
    adam_update(*whole, AdamRule(**option))
    for part in (slice(0, place), slice(place, None)):
        adam_update(*(None if tensor is None else tensor[part] for tensor in cut_in_two), AdamRule(**option))
    assert_same(whole, cut_in_two)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_result_does_not_depend_on_threads(isa: str, threads: int) -> None:
    case = {
        "grad_dtype": torch.bfloat16,
        "moment_dtype": torch.float32,
        "low_dtype": torch.bfloat16,
        "offset": 3,
        "finite": True,
        "seed": 5,
    }
    one, several = tensors(300_007, case), tensors(300_007, case)
    adam_update(*one, AdamRule(**PLAIN, step=3))
    adam_update(*several, AdamRule(**PLAIN, step=3), threads)
    assert_same(one, several)


@needs_torch_adam_alike
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_one_pass_equals_casts_around_torch_fused(isa: str, decoupled: bool, low: torch.dtype) -> None:
    """The mixed step: unscale, clip, Adam in fp32 and the 16-bit copy, against torch doing each by itself."""
    count, factor = 4096, 1 / 48
    start = values(count, 1)
    param = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = kind([param], lr=1e-2, weight_decay=0.1, fused=True)
    master, first, second, copy = start.clone(), torch.zeros(count), torch.zeros(count), torch.zeros(count, dtype=low)
    for step in range(1, 6):
        grad = torch.randn(count, generator=torch.Generator().manual_seed(step)).to(low)
        param.grad = grad.float() * factor
        peer.step()
        option = PLAIN | {"lr": 1e-2, "weight_decay": 0.1, "decoupled": decoupled}
        adam_update(master, grad, first, second, copy, AdamRule(**option, step=step, grad_factor=factor))
    assert same_bits(master, param.detach()) and same_bits(copy, param.detach().to(low))
    assert same_bits(first, peer.state[param]["exp_avg"]) and same_bits(second, peer.state[param]["exp_avg_sq"])


@pytest.mark.parametrize("bias_correction", [True, False])
def test_reference_is_adam(bias_correction: bool) -> None:
    """The formula of the paper in double precision; what everything else here is compared with comes from torch."""
    master = torch.randn(50, dtype=torch.float64)
    expected, m, v = master.clone(), torch.zeros_like(master), torch.zeros_like(master)
    states = [torch.zeros_like(master), torch.zeros_like(master)]
    for step in range(1, 5):
        grad = torch.randn(50, dtype=torch.float64)
        adam_reference(master, grad, *states, None, AdamRule(**PLAIN, bias_correction=bias_correction, step=step))
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        m_hat, v_hat = (m / (1 - 0.9**step), v / (1 - 0.999**step)) if bias_correction else (m, v)
        expected = expected - 1e-3 * 0.01 * expected - 1e-3 * m_hat / (v_hat.sqrt() + 1e-8)
    torch.testing.assert_close(master, expected, rtol=1e-12, atol=1e-13)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    def call(**changed: torch.Tensor) -> None:
        given_tensors = {name: torch.zeros(8) for name in ("master", "grad", "exp_avg", "exp_avg_sq")} | {"low": None} | changed
        adam_update(**given_tensors, rule=AdamRule(**PLAIN, step=1))

    call()
    with pytest.raises(HfZeroError, match=r"grad has 7 elements.*master has 8"):
        call(grad=torch.zeros(7))
    with pytest.raises(HfZeroError, match=r"the first state has 8 elements.*contiguous: False"):
        call(exp_avg=torch.zeros(16)[::2])
    with pytest.raises(HfZeroError, match=r"master is torch.bfloat16; allowed: torch.float32"):
        call(master=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(HfZeroError, match=r"low is torch.float32; allowed: torch.bfloat16, torch.float16"):
        call(low=torch.zeros(8))


@pytest.mark.parametrize("decoupled", [True, False])
def test_host_adam_equals_torch_optimizer(decoupled: bool) -> None:
    shapes = [(4, 16), (32,), (3, 5), (0,), ()]  # the last three end in part of a vector, where torch rounds otherwise
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = [{"weight_decay": 0.1}, {"lr": 1e-2, "betas": (0.8, 0.9)}]
    pairs = ((ours, HostAdam, {"decoupled_weight_decay": decoupled}), (theirs, kind, {"fused": True}))
    optimizers = [
        kind_([{"params": ps[:2]} | groups[0], {"params": ps[2:]} | groups[1]], lr=3e-3, weight_decay=0.0, **more)
        for ps, kind_, more in pairs
    ]
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if index < 2 and TORCH_ADAM_ROUNDS_ALIKE:
            assert same_bits(one.detach(), other.detach())
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_host_adam_state_dict_goes_to_torch_and_back() -> None:
    param = torch.nn.Parameter(torch.randn(64))
    ours, theirs = HostAdam([param], lr=1e-2), torch.optim.AdamW([param], lr=1e-2, weight_decay=0.0, fused=True)
    param.grad = torch.randn(64)
    ours.step()
    theirs.load_state_dict({"state": copy.deepcopy(ours.state_dict()["state"]), "param_groups": theirs.state_dict()["param_groups"]})
    start = param.detach().clone()
    param.grad = torch.randn(64)
    theirs.step()
    expected = param.detach().clone()
    param.data.copy_(start)
    ours.step()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-7)
    assert same_bits(param.detach(), expected) or not TORCH_ADAM_ROUNDS_ALIKE


def test_host_adam_steps_a_subset_with_given_gradients() -> None:
    params = [torch.nn.Parameter(torch.randn(40)) for _ in range(3)]
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, twin = HostAdam(params, lr=1e-2), HostAdam(twins, lr=1e-2)
    grads = [torch.randn(40).bfloat16() for _ in params]
    lows = [torch.zeros(40, dtype=torch.bfloat16), None]
    optimizer.update(params[1:], grads[1:], lows, grad_factor=0.5)
    for param, grad in zip(twins[1:], grads[1:], strict=True):
        param.grad = grad.float() * 0.5
    twin.step()
    for param, other in zip(params, twins, strict=True):
        assert same_bits(param.detach(), other.detach())
    assert same_bits(lows[0], params[1].detach().bfloat16()) and params[1].grad is None
    with pytest.raises(HfZeroError, match="not one of its parameters"):
        optimizer.update(twins[:1], grads[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_host_adam_takes_parameters_of_other_types_and_layouts(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.randn(6, 8, dtype=dtype).t())
    start = param.detach().clone()
    optimizer = HostAdam([param], lr=0.25)
    param.grad = torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), start - 0.25)  # the first step of Adam is lr * sign(gradient)
    assert optimizer.state[param]["exp_avg"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_host_adam_keeps_bf16_moments() -> None:
    param = torch.nn.Parameter(torch.zeros(33))
    optimizer = HostAdam([param], lr=1.0, moment_dtype=torch.bfloat16)
    param.grad = torch.full((33,), 2.0)
    optimizer.step()
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert math.isclose(float(state["exp_avg"][32]), 0.2, rel_tol=2**-8) and math.isclose(float(param.detach()[32]), -1.0, rel_tol=1e-6)


def test_host_adam_refuses_wrong_hyperparameters() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}, {"moment_dtype": torch.float16}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HostAdam([param], **wrong)
