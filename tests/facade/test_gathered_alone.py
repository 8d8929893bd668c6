"""``GatheredParameters`` of a few parameters of a layer: these alone are sent, and all else is as if the whole layer had been gathered."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.core.units.layout import UnitState
from hf_zero.utils import safe_get_full_fp32_param
from hf_zero.zero import GatheredParameters, ZeroParamStatus
from tests.facade import streams
from tests.support import ranks

NAME = "model.layers.1.self_attn.q_proj.weight"

# Nothing stays whole between forward and backward.
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def _sharded(**zero: Any) -> Any:
    return streams.engine_of(streams.llama(), 3, zero_optimization=ZERO | zero)


def _block(engine: Any) -> tuple[nn.Parameter, nn.Parameter, Any]:
    """A parameter, another one of the same unit, and the unit."""
    attention = engine.module.model.layers[1].self_attn
    unit = next(unit for unit in engine.units if any(param is attention.q_proj.weight for param in unit.params))
    return attention.q_proj.weight, attention.k_proj.weight, unit


def _sent(engine: Any) -> int:
    return sum({id(unit.collectives): unit.collectives.sent_bytes for unit in engine.units}.values())


def _loop() -> int:
    engine, plain = _sharded(), dict(streams.llama().named_parameters())
    before, kept = _sent(engine), {}
    for name, param in engine.module.named_parameters():
        with GatheredParameters([param, None, param]):
            assert param.ds_status is ZeroParamStatus.AVAILABLE
            kept[name] = param.data
        assert param.numel() == 0 and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    for name, value in kept.items():
        assert torch.equal(value, plain[name]), name
    layers = [value for name, value in kept.items() if "layers" in name]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in layers), "a kept parameter keeps its layer"
    return _sent(engine) - before


@pytest.mark.parametrize("world", [2, 3])
def test_a_loop_over_parameters_sends_each_once(world: int) -> None:
    sent = sum(ranks.run_ranks(_loop, world))
    model = streams.llama()
    root = sum(param.nbytes for param in (model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight))
    layers = sum(param.nbytes for param in model.parameters()) - root
    # A rank counts what it hands over once, to however many; the root comes as a whole, each time that one of its three is asked for.
    assert layers <= sent <= layers + 3 * 1.1 * root * (world - 1)


@torch.no_grad()
def _loss(engine: Any) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8) + ranks.rank()
    return engine(input_ids=tokens, labels=tokens).loss


def _changed_inside() -> None:
    engine, plain = _sharded(), streams.llama()
    param, sibling, unit = _block(engine)
    start = _loss(engine)
    for assigns in (False, True):
        with GatheredParameters([param]):
            assert unit.state is UnitState.SHARDED and sibling.numel() == 0
            if assigns:
                param.data = param.data * 3
            else:
                param.data.mul_(3)
            changed = _loss(engine)
            assert torch.equal(param.data, plain.get_parameter(NAME) * 3) and unit.pinned
        assert unit.state is UnitState.SHARDED and param.numel() == 0 and not unit.pinned
        other = copy.deepcopy(plain)
        other.get_parameter(NAME).data.mul_(3)
        torch.testing.assert_close(changed, _loss(other))
        assert not torch.equal(changed, start)
        assert torch.equal(_loss(engine), changed)  # all ranks have written the same
        with GatheredParameters([param], modifier_rank=0):
            param.data.copy_(plain.get_parameter(NAME))
        assert torch.equal(_loss(engine), start)


def _forward(engine: Any) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8) + ranks.rank()
    return engine(input_ids=tokens, labels=tokens).loss


def _held_over_steps() -> None:
    weights = []
    for held in (False, True):
        engine = _sharded()
        param, sibling, unit = _block(engine)
        for order in range(3):
            loss = _forward(engine) if order else None
            assert unit.state is UnitState.SHARDED
            with GatheredParameters([param], enabled=held):
                engine.backward(_forward(engine) if loss is None else loss)
                with GatheredParameters([param], enabled=held and order == 1):
                    engine.step()
                    assert not held or torch.equal(param.data, safe_get_full_fp32_param(param))
                with GatheredParameters([param, sibling], enabled=held):
                    _loss(engine)
                    assert not held or torch.equal(sibling.data, safe_get_full_fp32_param(sibling))
            assert unit.state is UnitState.SHARDED
        weights.append({name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()})
        engine.destroy()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def _step_inside() -> None:
    engine = _sharded()
    param, _, unit = _block(engine)
    engine.backward(_forward(engine))
    with GatheredParameters([param]):
        before = param.data.clone()
        engine.step()
        assert unit.state is UnitState.SHARDED and torch.equal(param.data, safe_get_full_fp32_param(param))
        assert not torch.equal(param.data, before)
        loss = _loss(engine)
    assert torch.equal(loss, _loss(engine))
    streams.train(engine)


def _nested() -> None:
    engine, value = _sharded(), streams.llama().get_parameter(NAME).detach()
    param, sibling, unit = _block(engine)
    with GatheredParameters([param]):
        with GatheredParameters([param, sibling]):
            assert unit.state is UnitState.SHARDED and sibling.numel()
        assert torch.equal(param.data, value) and sibling.numel() == 0
        with pytest.raises(KeyError), GatheredParameters([param]):
            raise KeyError
        assert torch.equal(param.data, value)
        copied, stored = copy.deepcopy(param), io.BytesIO()
        assert torch.equal(copied.data, value) and not hasattr(copied, "ds_id")
        torch.save(param, stored)
        assert torch.equal(engine.module.state_dict()[NAME], value)
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            param.data.fill_(float(ranks.rank() + 2))
        assert torch.equal(param.data, torch.full_like(value, 2.0)), "an inner context wrote to it"
    assert param.numel() == 0 and torch.equal(safe_get_full_fp32_param(param), torch.full_like(value, 2.0))
    param.all_gather()
    assert sibling.numel()
    param.partition()


def _all() -> None:
    for test in (_changed_inside, _held_over_steps, _step_inside, _nested):
        test()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("world", [2, 3])
def test_all_else_is_as_with_the_whole_layer(world: int) -> None:
    ranks.run_ranks(_all, world)


def _elsewhere() -> None:
    for zero in ({"offload_param": {"device": "cpu"}}, {"zero_quantized_weights": True}):
        engine = _sharded(**zero)
        param, _, unit = _block(engine)
        with GatheredParameters([param]):
            assert torch.equal(param.data, streams.llama().get_parameter(NAME))
            assert unit.state is UnitState.UNSHARDED or "offload_param" in zero  # which moves nothing on a CPU
        engine.destroy()


def test_shards_elsewhere_and_codes_come_as_whole_units() -> None:
    ranks.run_ranks(_elsewhere, 2)
