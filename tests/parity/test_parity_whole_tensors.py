"""Test that optimizers over complete tensors (Adafactor, Muon, LAMB, ...) train as in plain PyTorch, at every stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.memory import live_bytes
from tests.support.models import CASES, CLASSES, LENGTH, Mlp, class_loss
from tests.support.parity import DRIFT, Run, Trace, check, check_bitwise, initialize, micro_step, train
from tests.support.whole_tensors import OPTIMIZERS, RowScaled, plain, start, through_engine

STAGES = (0, 1, 2, 3)


def _bitwise(name: str, case: str, stages: tuple[int, ...], accumulation: int) -> None:
    """Check that losses and weights are plain PyTorch's bit for bit; norms are summed in another order."""
    run = Run(accumulation=accumulation)
    expected = plain(name, CASES[case], run, ranks.world())
    for stage in stages:
        trace = through_engine(name, case, replace(run, stage=stage))
        check(trace, expected, run, f"{name}, {case}, stage {stage}")
        check_bitwise(trace, _with_norms_of(expected, trace), f"{name}, {case}, stage {stage}")


def _with_norms_of(expected: Trace, trace: Trace) -> Trace:
    return replace(expected, norms=trace.norms)


def _close(name: str, case: str, run: Run) -> None:
    expected = plain(name, CASES[case], run, ranks.world())
    check(through_engine(name, case, run), expected, run, f"{name}, {case}")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bitwise_on_two_ranks(name: str) -> None:
    ranks.run_ranks(_bitwise, 2, name, "odd_mlp", (list(OPTIMIZERS).index(name) % 3, 3), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bitwise_at_every_stage(name: str) -> None:
    ranks.run_ranks(_bitwise, 2, name, "odd_mlp", STAGES, 1)


@pytest.mark.slow  # fast: `test_bitwise_on_two_ranks`
@pytest.mark.fast_rows("3-RowScaled")
@pytest.mark.parametrize(("world", "name"), [(1, "Adafactor groups"), (3, "RowScaled"), (4, "Adafactor groups")])
def test_bitwise_on_other_numbers_of_ranks(world: int, name: str) -> None:
    ranks.run_ranks(_bitwise, world, name, "odd_mlp", (1, 3), 2)


def test_optimizers_that_look_at_all_parameters_where_every_rank_has_them() -> None:
    ranks.run_ranks(_close, 2, "Prodigy", "mlp", Run(stage=0, accumulation=2))
    ranks.run_ranks(_close, 1, "Prodigy", "mlp", Run(stage=3))


def test_parameters_are_in_the_order_of_the_scripts_groups_where_every_rank_has_them() -> None:
    """Units begin with the root's parameters, which a model lists before and after those of its blocks."""
    ranks.run_ranks(_close, 2, "Positions", "gpt2", Run(stage=0))
    ranks.run_ranks(_close, 1, "Positions groups", "gpt2", Run(stage=3))


@pytest.mark.fast_rows("gpt2", "conv")
@pytest.mark.parametrize("case", ["tied_coder", "gpt2", "conv"])
def test_tied_weights_transformers_and_convolutions(case: str) -> None:
    ranks.run_ranks(_close, 2, "Adafactor", case, Run(stage=3, clip=0.1))


@pytest.mark.fast_rows("3-bf16-LAMB")
@pytest.mark.parametrize(
    ("stage", "dtype", "name"),
    [(2, "bf16", "transformers relative step"), (3, "fp16", "transformers relative step"), (3, "bf16", "LAMB"), (2, "fp16", "LAMB")],
)
def test_16_bit(stage: int, dtype: str, name: str) -> None:
    ranks.run_ranks(_close, 2, name, "mlp", Run(stage=stage, dtype=dtype, clip=0.1, accumulation=2))


@pytest.mark.slow  # fast: test_parity_trained_set.py has whole tensors and offloaded states
@pytest.mark.fast_rows("Adafactor")
@pytest.mark.parametrize("name", ["Adafactor", "RowScaled"])
def test_states_on_the_host_and_shards_in_files(name: str, tmp_path: Any) -> None:
    for stage, param in ((2, None), (3, {"device": "cpu"}), (3, {"device": "nvme", "nvme_path": str(tmp_path)})):
        zero = {"offload_optimizer": {"device": "cpu"}, **({"offload_param": param} if param else {})}
        ranks.run_ranks(_close, 2, name, "mlp", Run(stage=stage, extra={"zero_optimization": zero}))


def _overflow(stage: int) -> tuple[list[bool], list[float]]:
    """Check that a gradient that is not finite skips the step: weights and states do not change; the next step updates."""
    run = Run(stage=stage, dtype="fp16")
    case = CASES["mlp"]
    engine = start("RowScaled", case, run)
    found, counts = [], []
    for step in range(3):
        batch = {key: value.half() if value.is_floating_point() else value for key, value in case.rows(step, 0, ranks.rank()).items()}
        engine.backward(case.forward(engine, batch) * (float("inf") if step == 1 and ranks.rank() == 0 else 1.0))
        engine.step()
        found.append(bool(engine.optimizer.overflow))
        counts.append(max((state["step"] for state in engine.optimizer.inner.state.values()), default=0))
    engine.destroy()
    return found, counts


@pytest.mark.parametrize("stage", [1, 3])
def test_overflow_skips_the_step(stage: int) -> None:
    for found, counts in ranks.run_ranks(_overflow, 2, stage):
        assert found == [False, True, False] and counts == [1, 1, 2]


class Few(nn.Module):
    """A model of two parameters, one of them without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, CLASSES, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.scale


def _few(stage: int) -> None:
    torch.manual_seed(0)
    model, expected = Few(), Few()
    expected.load_state_dict(model.state_dict())
    case, reference = CASES["mlp"], torch.optim.Adafactor(expected.parameters(), lr=0.1)
    engine = initialize(model, Run(stage=stage), optimizer=torch.optim.Adafactor(model.parameters(), lr=0.1))
    for step in range(3):
        micro_step(engine, case.rows(step, 0, ranks.rank()), class_loss, 0)
        for rank in range(ranks.world()):
            (class_loss(expected, case.rows(step, 0, rank)) / ranks.world()).backward()
        reference.step()
        reference.zero_grad()
    import hf_zero

    for param, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(hf_zero.utils.safe_get_full_fp32_param(param), wanted, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_more_ranks_than_parameters(stage: int) -> None:
    ranks.run_ranks(_few, 4, stage)


class Stacked(nn.Module):
    """A model with the weights of its experts in two stacks, as transformers 5 has them, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 2 * LENGTH, LENGTH) / 4)
        self.down = nn.Parameter(torch.randn(3, CLASSES, 2 * LENGTH) / 4)
        self.router = nn.Linear(LENGTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eoi->beo", inputs, self.up).relu()
        return torch.einsum("beo,eco,be->bc", hidden, self.down, self.router(inputs).softmax(-1))


def _stacks(stage: int) -> None:
    """Check the first update of Muon: each expert's gradient with its singular values passed through the polynomial."""
    torch.manual_seed(0)
    model, expected = Stacked(), Stacked()
    expected.load_state_dict(model.state_dict())
    case = CASES["mlp"]
    engine = initialize(model, Run(stage=stage, extra={"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}))
    micro_step(engine, case.rows(0, 0, ranks.rank()), class_loss, 0)
    for rank in range(ranks.world()):
        (class_loss(expected, case.rows(0, 0, rank)) / ranks.world()).backward()
    import hf_zero

    for name in ("up", "down"):
        found = hf_zero.utils.safe_get_full_fp32_param(getattr(model, name))
        for weight, before, grad in zip(found, getattr(expected, name).detach(), getattr(expected, name).grad, strict=True):
            left, values, right = torch.linalg.svd(grad.double(), full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            update = left @ values.diag() @ right * math.sqrt(max(1, grad.shape[0] / grad.shape[1]))
            assert torch.allclose((before - weight).double() / 0.02, update, atol=2e-3), name
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_updates_each_expert_of_a_stack_alone(stage: int) -> None:
    ranks.run_ranks(_stacks, 2, stage)


def _by_config(stage: int, optimizer: dict[str, Any], dtype: str = "fp32", **extra: Any) -> Trace:
    case = CASES["gpt2"]
    run = Run(stage=stage, dtype=dtype, steps=3, extra={"optimizer": optimizer, **extra})  # clipping would bring the norm's rounding in
    engine = initialize(case.build(), run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    return trace


@pytest.mark.fast_rows("optimizer2")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}},
        {"type": "lamb", "params": {"lr": 1e-2, "max_coeff": 5.0, "weight_decay": 0.1}},
        {"type": "Adafactor", "params": {"lr": 1e-2}},
    ],
)
def test_types_of_the_configuration_are_the_same_on_any_number_of_ranks_and_stages(optimizer: dict[str, Any]) -> None:
    """Check that stages agree on two ranks bit for bit, except for norms, which they sum in different orders."""
    traces = [ranks.run_ranks(_by_config, 2, stage, optimizer)[0] for stage in (0, 3)]
    for trace in traces[1:]:
        check(trace, traces[0], Run(), str(optimizer))
    assert traces[0].losses[-1] < traces[0].losses[0]


def _low_masters(stage: int) -> Trace:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return _by_config(stage, {"type": "Adafactor", "params": {"lr": 1e-2}}, "bf16", bf16=bf16)


@pytest.mark.slow  # fast: `test_types_of_the_configuration_are_the_same_on_any_number_of_ranks_and_stages`
def test_masters_in_16_bit() -> None:
    traces = [ranks.run_ranks(_low_masters, 2, stage)[0] for stage in (0, 3)]
    check(traces[1], traces[0], Run(dtype="bf16"), "16-bit masters", DRIFT)


def _full_values(stage: int) -> None:
    import hf_zero

    engine = start("Adafactor groups", CASES["mlp"], Run(stage=stage))
    weight = next(param for name, param in engine.module.named_parameters() if name.endswith("up.weight"))
    get, put = hf_zero.utils.safe_get_full_optimizer_state, hf_zero.utils.safe_set_full_optimizer_state
    assert get(weight, "row_var") is None
    micro_step(engine, CASES["mlp"].rows(0, 0, ranks.rank()), CASES["mlp"].forward, 0)
    shape = hf_zero.utils.safe_get_full_fp32_param(weight).shape
    rows = get(weight, "row_var")
    assert rows is not None and rows.shape == (shape[0], 1) and float(rows.sum()) > 0
    assert get(weight, "exp_avg") is None
    put(weight, torch.full_like(rows, 3.0), "row_var")
    assert torch.equal(get(weight, "row_var"), torch.full_like(rows, 3.0))
    state = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(state)
    assert torch.equal(get(weight, "row_var"), torch.full_like(rows, 3.0))
    owners = engine.collectives.gather_objects(len(engine.optimizer.whole), "test")
    count = sum(1 for param in engine.module.parameters())
    assert owners == [count] * 2 if stage == 0 else sum(owners) == count
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_of_states(stage: int) -> None:
    ranks.run_ranks(_full_values, 2, stage)


def _bad_values(stage: int) -> list[str]:
    import hf_zero

    torch.distributed.barrier()
    put, put_own = hf_zero.utils.safe_set_full_optimizer_state, hf_zero.utils.safe_set_local_optimizer_state
    engine = start("RowScaled", CASES["mlp"], Run(stage=stage))
    param = next(param for param in engine.module.parameters() if param.requires_grad)
    found = []

    def refused(set_it: Any, value: Tensor, key: str) -> None:
        try:
            set_it(param, value, key)
        except hf_zero.errors.StateError as error:
            found.append(str(error))

    shape = param.ds_shape if hasattr(param, "ds_shape") else param.shape
    refused(put, torch.zeros(shape), "momentum")
    refused(put_own, torch.zeros(shape), "momentum")
    micro_step(engine, CASES["mlp"].rows(0, 0, ranks.rank()), CASES["mlp"].forward, 0)
    refused(put, torch.zeros(shape), "momentun")
    refused(put, torch.zeros(3, 3, 3), "momentum")
    put_own(param, torch.full(tuple(shape), 0.5).flatten(), "momentum")
    value = hf_zero.utils.safe_get_full_optimizer_state(param, "momentum")
    assert value is not None and (value == 0.5).all() and value.shape == tuple(shape)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_cannot_be_set_are_refused_on_all_ranks(stage: int) -> None:
    answers = ranks.run_ranks(_bad_values, 2, stage)
    assert sorted(map(len, answers)) == ([4, 4] if stage == 0 else [3, 4])  # of the local function the owner's alone
    for answer in answers:
        assert "no optimizer state 'momentum'" in answer[0]
        assert "no optimizer state 'momentun'" in answer[-2] and "the value has (3, 3, 3)" in answer[-1]


def _memory(stage: int) -> tuple[int, int]:
    before = live_bytes()
    model = Mlp(192, 6)
    engine = initialize(model, Run(stage=stage, dtype="bf16"), optimizer=RowScaled(model.parameters()))
    generator = torch.Generator().manual_seed(ranks.rank())
    for _ in range(2):
        batch = {"inputs": torch.randn(2, LENGTH, generator=generator).bfloat16(), "labels": torch.zeros(2, dtype=torch.int64)}
        micro_step(engine, batch, class_loss, 0)
    held = live_bytes() - before
    numel = sum(unit.layout.numel for unit in engine.units)
    engine.destroy()
    return held, numel


@pytest.mark.fast_rows("3-0-10")
@pytest.mark.parametrize(("stage", "whole", "shared"), [(0, 10, 0), (1, 2, 8), (2, 2, 8), (3, 0, 10)])
def test_memory_between_steps_is_shared(stage: int, whole: int, shared: int) -> None:
    """Check the bytes: 16-bit weights (2), masters (4), a moment per element (4); moments are distributed in complete parameters."""
    for held, numel in ranks.run_ranks(_memory, 3, stage):
        assert held == pytest.approx(numel * (whole + shared / 3), rel=0.08)


def _host_bytes() -> tuple[int, int]:
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    engine = start("RowScaled", CASES["mlp"], Run(stage=2, dtype="bf16", extra=extra))
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in CASES["mlp"].rows(0, 0, ranks.rank()).items()}
    micro_step(engine, batch, CASES["mlp"].forward, 0)
    masters = sum(unit.master.nbytes for unit in engine.units)
    found = engine.optimizer.offloaded()["host"]
    owned = sum(entry.param.numel() for entry in engine.optimizer.whole)
    engine.destroy()
    return found, masters + 4 * owned


def test_bytes_on_the_host_are_counted() -> None:
    for found, expected in ranks.run_ranks(_host_bytes, 2):
        assert expected <= found < 1.5 * expected  # besides: a number per row, and some more


def _refusal(run: Run) -> str:
    import hf_zero

    torch.distributed.barrier()  # a rank that is done must not leave before the others have connected
    model = CASES["llama"].build()
    try:
        hf_zero.initialize(model=model, config=run.config())
    except hf_zero.errors.UnsupportedError as error:
        return str(error)
    return "accepted"


def _marked() -> str:
    from hf_zero.errors import ConfigError

    torch.distributed.barrier()
    model = CASES["mlp"].build()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[next(model.parameters())]["of a script"] = True
    try:
        initialize(model, Run(stage=2), optimizer=optimizer, model_parameters=None)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_marks_of_parts_of_parameters_are_refused() -> None:
    for answer in ranks.run_ranks(_marked, 2):
        assert "AdamW given to initialize() has marks in its state ({'of a script': True})" in answer


def test_combinations_that_are_not_provided_are_named(tmp_path: Any) -> None:
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "weight_decay": None, "betas": [0.9, 0.99], "eps": 1e-6}}}
    parallel = Run(stage=1, extra={**lamb, "tensor_parallel": {"autotp_size": 2}})
    for answer in ranks.run_ranks(_refusal, 2, parallel):
        assert "Lamb with tensor parallelism is not provided" in answer and "norms of the whole parameter" in answer
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for answer in ranks.run_ranks(_refusal, 2, Run(stage=2, extra={**lamb, "zero_optimization": zero})):
        assert "Lamb with zero_optimization.offload_optimizer.device nvme is not provided" in answer


def _rate_of_its_own() -> list[float]:
    engine = start("transformers relative step", CASES["mlp"], Run(stage=3, extra={"steps_per_print": 1}))
    micro_step(engine, CASES["mlp"].rows(0, 0, ranks.rank()), CASES["mlp"].forward, 0)
    rates = [*engine.get_lr(), engine.optimizer.get_lr()]
    engine.destroy()
    return rates


def test_optimizer_that_sets_its_rate_itself_is_reported_as_such() -> None:
    for rates in ranks.run_ranks(_rate_of_its_own, 2):
        assert len(rates) == 2 and all(map(math.isnan, rates))


def _over_slices(stages: tuple[int, ...]) -> None:
    from tests.support.sequences import Data, compare, llama, sliced

    extra = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02}}}
    found = [sliced(llama, Run(stage=stage, extra=extra), Data(), 2) for stage in stages]
    for stage, result in zip(stages[1:], found[1:], strict=True):
        compare(result, found[0], f"stage {stage}")


@pytest.mark.slow  # fast: `test_bitwise_on_two_ranks`
def test_ranks_that_share_their_sequences_are_owners_too() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    ranks.run_ranks(_over_slices, 4, (0, 1, 3))
