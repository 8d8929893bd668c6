"""Experts divided over ranks together with what else divides parameters, or looks at whole ones; each against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_zero.utils import safe_get_full_optimizer_state
from tests.support import parity, ranks, zoo
from tests.support import zeropp_reference as zeropp
from tests.support.experts import build, build_listed, check_experts, lopsided, mixed, with_adapters, with_experts
from tests.support.parity import DTYPES, LIMITS, Run, check, check_bitwise
from tests.support.whole_tensors import OPTIMIZERS, plain

MIXTRAL = "MixtralForCausalLM"
ADAPTED = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


# ------------------------------------------------------------------------------------------------ groups of ranks


@pytest.mark.slow  # fast: `test_codes_of_everything_but_experts`
def test_shard_groups_and_copies_in_the_node() -> None:
    ranks.run_ranks(check_groups, 4)


def check_groups() -> None:
    """All experts in each of two shard groups; copies of everything else in each node, or of the parameters for good."""
    groups = {"zero_optimization": {"mics_shard_size": 2}}
    traces = [check_experts(MIXTRAL, Run(stage, accumulation=2, clip=0.1, extra=groups), 2) for stage in (1, 3)]
    check_bitwise(traces[1], traces[0], "experts in shard groups: stage 3 against 1")
    check_experts(MIXTRAL, Run(3, clip=0.1, extra={"zero_optimization": {"zero_hpz_partition_size": 2}}), 2, lopsided(MIXTRAL))
    check_experts(MIXTRAL, Run(3, accumulation=2, extra={"hf_zero": {"param_shard_size": 2}}), 2)


@pytest.mark.slow
def test_more_groups() -> None:
    ranks.run_ranks(check_more_groups, 4)
    ranks.run_ranks(check_two_in_four, 8)


def check_more_groups() -> None:
    groups = {"zero_optimization": {"mics_shard_size": 2}}
    for stage in (2, 3):
        check_experts(MIXTRAL, Run(stage, dtype="bf16", accumulation=2, clip=0.1, extra=groups), 2)
        check_experts(MIXTRAL, Run(stage, extra=groups), 2, prepare=lambda model: with_adapters(model, **ADAPTED))


def check_two_in_four() -> None:
    """Experts are sharded inside a shard group too."""
    for stage in (1, 3):
        check_experts(MIXTRAL, Run(stage, accumulation=2, clip=0.1, extra={"zero_optimization": {"mics_shard_size": 4}}), 2)


# ------------------------------------------------------------------------------------------------ whole tensors


@pytest.mark.slow  # `test_checkpoint_experts.py` trains with LAMB
def test_optimizers_of_whole_tensors() -> None:
    ranks.run_ranks(check_whole, 2, 2)


@pytest.mark.slow
def test_optimizers_of_whole_tensors_on_four_ranks() -> None:
    ranks.run_ranks(check_whole, 4, 2)
    ranks.run_ranks(check_whole, 4, 4)
    ranks.run_ranks(check_whole_in_groups, 4)


def check_whole(size: int) -> None:
    """They see all experts of a stack, which no rank has; of experts in a list one at a time; and adapters whose columns are divided."""
    for name, stage in (("LAMB", 0), ("LAMB", 3), ("Adafactor", 2), ("Muon", 1), ("Muon", 3), ("8 bit", 1)):
        _check_whole(name, Run(stage, clip=0.1), size, lambda: build(MIXTRAL))
    for stage in (0, 3):
        _check_whole("LAMB", Run(stage), size, build_listed, lambda model, batch: model(**batch))
    for stage in (0, 2):
        _check_whole("RowScaled", Run(stage), size, lambda: with_adapters(build(MIXTRAL), **ADAPTED))


def check_whole_in_groups() -> None:
    _check_whole("LAMB", Run(3, accumulation=2, extra={"zero_optimization": {"mics_shard_size": 2}}), 2, lambda: build(MIXTRAL))


def _check_whole(name: str, run: Run, size: int, make: Callable[[], nn.Module], forward: Any = zoo.loss) -> None:
    case: Any = SimpleNamespace(build=make, rows=mixed(MIXTRAL), forward=forward)
    of_stacks = {"Muon": (_muon, _muon_groups)}  # torch's own takes matrices alone
    optimizer, groups_of = of_stacks.get(name) or OPTIMIZERS[name]
    model = make()
    engine = parity.initialize(model, with_experts(run, size), optimizer=optimizer(groups_of(model)), model_parameters=None)
    trace = parity.train(engine, case.rows, case.forward, run)
    trace.masters = {key: value for key, value in trace.masters.items() if value is not None}
    if name == "LAMB" and forward is zoo.loss:
        state = safe_get_full_optimizer_state(model.get_parameter("model.layers.0.mlp.experts.down_proj"), "exp_avg")
        assert state is not None and state.shape == make().model.layers[0].mlp.experts.down_proj.shape and state.any()
    engine.destroy()
    if ranks.rank() == 0:
        with patch.dict(OPTIMIZERS, of_stacks):
            expected = plain(name, case, run, ranks.world())
        check(trace, expected, run, f"{name}, experts over {size} of {ranks.world()} ranks")


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    from hf_zero.optim.muon import muon_parameters

    found = muon_parameters(model)
    halves = {uses: [param for param in model.parameters() if (id(param) in found) is uses] for uses in (True, False)}
    # A small rate: what it makes of a small singular value is rounding noise.
    return [{"params": params, "use_muon": uses, "lr": 2e-3} for uses, params in halves.items()]


def _muon(groups: Any) -> torch.optim.Optimizer:
    from hf_zero.optim.muon import MuonWithAuxAdam

    return MuonWithAuxAdam(groups)


# ------------------------------------------------------------------------------------------------ ZeRO++


def test_codes_of_everything_but_experts() -> None:
    ranks.run_ranks(check_codes, 4)


def check_codes() -> None:
    """What all ranks gather and send is coded as without experts; theirs is exact."""
    weights = {"zero_quantized_weights": True}
    for dtype, keys in (("fp32", weights), ("bf16", {**weights, "zero_quantized_gradients": True})):
        run = with_experts(Run(3, dtype=dtype, extra={"zero_optimization": keys}), 2)
        model = build(MIXTRAL)
        engine = parity.initialize(model, run)
        trace = parity.train(engine, mixed(MIXTRAL), zoo.loss, run)
        places: zeropp.Places = [
            (unit.layout.padded_numel, [(slot.name, slot.offset, slot.numel) for slot in unit.layout.slots])
            for unit in engine.units
            if not unit.collectives.topology.of_experts
        ]
        engine.destroy()
        if ranks.rank() == 0:
            _check_codes(trace, places, run, "zero_quantized_gradients" in keys)


def _check_codes(trace: parity.Trace, places: zeropp.Places, run: Run, gradients: bool) -> None:
    whole = build(MIXTRAL)
    coded = len(places)
    places = [*places, *((param.numel(), [(name, 0, param.numel())]) for name, param in whole.named_parameters() if "experts" in name)]
    dtype, plain_units = DTYPES[run.dtype], frozenset(range(coded, len(places)))
    settings = zeropp.Settings(ranks.world(), run.steps, True, gradients, dtype=dtype, plain=plain_units)
    wanted = zeropp.run(whole, lambda model, *of: zoo.loss(model, mixed(MIXTRAL)(*of)), settings, places)
    limit = LIMITS[run.dtype]
    assert trace.losses == pytest.approx(wanted.losses, rel=limit.loss)
    assert trace.norms == pytest.approx(wanted.norms, rel=limit.norm if run.dtype == "fp32" else 5e-3)
    if run.dtype == "fp32":  # in bf16 an expert's sum over tokens of several ranks rounds once, not once per rank
        for name, value in wanted.masters.items():
            torch.testing.assert_close(trace.masters[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
