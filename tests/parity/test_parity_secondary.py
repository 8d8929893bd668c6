"""Test secondary copies inside a node (`zero_hpz_partition_size`): the same bits as stage 3 without them, and fewer bytes over all
links.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES, STEP_VOTE_BYTES, TwoBlocks
from tests.support.parity import Run, check_bitwise, check_case, initialize, train


def hpz(size: int, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"zero_hpz_partition_size": size, **zero}}


def _same_bits(name: str, size: int, dtype: str, accumulation: int, **zero: Any) -> None:
    settings: dict[str, Any] = {"stage": 3, "dtype": dtype, "accumulation": accumulation, "clip": 0.1}
    trace, _ = check_case(name, Run(**settings, extra=hpz(size, **zero)))
    case, run = CASES[name], Run(**settings, extra={"zero_optimization": zero})
    engine = initialize(case.build(), run)
    expected = train(engine, lambda *at: case.rows(*at), case.forward, run)
    engine.destroy()
    check_bitwise(trace, expected, name)


@pytest.mark.fast_rows("fp32-2")
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 2), ("bf16", 1), ("fp16", 3)])
def test_nodes_of_two_ranks(dtype: str, accumulation: int) -> None:
    for name in ("gpt2", "mixtral"):
        ranks.run_ranks(_same_bits, 4, name, 2, dtype, accumulation)


@pytest.mark.slow  # fast: `test_nodes_of_two_ranks`
@pytest.mark.fast_rows("6-3")
@pytest.mark.parametrize(("world", "size"), [(6, 3), (6, 2)])
def test_six_ranks(world: int, size: int) -> None:
    ranks.run_ranks(_same_bits, world, "mlp", size, "fp32", 2)


def _coded(reads: bool) -> None:
    """Gather codes over all ranks: the node keeps their values, whether or not exact values were read before."""
    import hf_zero

    case, traces = CASES["mlp"], []
    for node in (1, 2):
        run = Run(stage=3, dtype="bf16", accumulation=2, extra=hpz(node, zero_quantized_weights=True))
        engine = initialize(case.build(), run)

        def feed(step: int, micro: int, rank: int, engine: Any = engine) -> Any:
            if reads:
                with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
                    pass
            return case.rows(step, micro, rank)

        traces.append(train(engine, feed, case.forward, run))
        engine.destroy()
    check_bitwise(traces[1], traces[0], "mlp")


@pytest.mark.fast_rows("True")
@pytest.mark.parametrize("reads", [False, True])
def test_what_codes_say_is_kept(reads: bool) -> None:
    ranks.run_ranks(_coded, 4, reads)


def _offloaded() -> None:
    both = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    _same_bits("mlp", 2, "bf16", 2, **both)


def test_shards_and_states_on_the_host() -> None:
    ranks.run_ranks(_offloaded, 4)


def _written() -> None:
    """Check that values written by a script reach the secondary copy too."""
    import hf_zero

    engine = initialize(CASES["mlp"].build(), Run(stage=3, extra=hpz(2)))
    param = engine.module.head.weight
    for value, modifier in ((0.5, 1), (0.25, None), (0.75, 3)):
        with hf_zero.zero.GatheredParameters([param], modifier_rank=modifier):
            param.data.fill_(value)
        with hf_zero.zero.GatheredParameters([param]):
            assert bool((param == value).all()), value
    hf_zero.utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape, 2.0))
    with hf_zero.zero.GatheredParameters([param]):
        assert bool((param == 2.0).all())
    engine.destroy()


def _written_in_part() -> None:
    """Check writes that only one rank finds in its part: in a context, in a forward of training and of evaluation."""
    import hf_zero

    answers = []
    for extra in (hpz(2), {}):
        torch.manual_seed(0)
        model = TwoBlocks()
        settings = {"stage3_max_reuse_distance": 0, **extra.get("zero_optimization", {})}
        engine = initialize(model, Run(stage=3, accumulation=2, extra={"zero_optimization": settings}))
        writes, found = [False], []

        def write(layer: Any, _: Any, writes: list[bool] = writes) -> None:
            if writes[0]:
                with torch.no_grad():
                    layer.weight[0, 0] += 1.0

        model.layers[0].register_forward_pre_hook(write)
        for micro_step in range(6):
            writes[0] = micro_step in (1, 4)
            loss = engine(torch.ones(2, 8)).square().sum()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            if micro_step % 2 == 0:
                with torch.no_grad(), hf_zero.zero.GatheredParameters(list(model.parameters())[: 1 + micro_step]):
                    model.layers[0].weight.data.view(-1)[:1].fill_(7.0)
                    found.append(engine(torch.ones(2, 8)).sum().item())
                with torch.no_grad():
                    found.append(engine(torch.ones(2, 8)).sum().item())
        answers.append(found)
        engine.destroy()
    assert answers[0] == answers[1]


def _written_alone() -> None:
    """Write in a block that is called alone, and call it again: the node's copy is that of the previous values, and the step says so."""
    settings = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2}
    engine = initialize(TwoBlocks(), Run(stage=3, extra={"zero_optimization": settings}))
    layer = engine.module.layers[0]

    def write(layer: Any, _: Any) -> None:
        layer.weight[0, 0] += 1.0

    loss = engine(torch.ones(2, 8)).square().sum()
    with torch.no_grad():
        hook = layer.register_forward_pre_hook(write)
        layer(torch.ones(2, 8))
        hook.remove()
        layer(torch.ones(2, 8))
    engine.backward(loss)
    with pytest.raises(StateError, match=r"layers\.0.* was written while a part of the model ran alone"):
        engine.step()
    engine.destroy()


def test_values_that_a_script_writes() -> None:
    ranks.run_ranks(_written, 4)
    ranks.run_ranks(_written_alone, 4)
    ranks.run_ranks(_written_in_part, 4)


def _bytes(size: int, accumulation: int) -> tuple[int, int, int, int]:
    import hf_zero

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "zero_hpz_partition_size": size}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    model = TwoBlocks()
    config["gradient_accumulation_steps"] = accumulation
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    node = engine.units[0].secondary._node
    gathers = all_before = node_before = 0
    for _ in range(2):
        all_before, node_before = engine.collectives.sent_bytes, node.sent_bytes
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
    root = sum(unit.layout.padded_numel for unit in engine.runtime.root.units)
    gathers = engine.collectives.sent_bytes - all_before
    whole = sum(unit.layout.padded_numel for unit in engine.units)
    engine.destroy()
    return gathers, node.sent_bytes - node_before, whole, root


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_of_a_step(accumulation: int) -> None:
    """Check that each parameter is gathered over all ranks once per optimizer step; other gathers stay inside the node."""
    for everywhere, inside, whole, root in ranks.run_ranks(_bytes, 4, 2, accumulation):
        # To each of three ranks: votes of the step, of late gradients and those outside of units, of another pass, behind the forward, and
        # of changed shards, in which the vote on another pass has a part.
        votes = 3 * (STEP_VOTE_BYTES + accumulation * (4 * (3 + 2) + 4 * (1 + 3) + 4 * (1 + 1)))
        assert everywhere == whole * 4 * 3 // 4 + _all_reduced(8, 4) + votes
        assert inside == (2 * accumulation - 1) * whole * 4 // 2 - accumulation * root * 4 // 2


def _all_reduced(nbytes: int, world: int) -> int:
    return 2 * (world - 1) * nbytes // world


@pytest.mark.parametrize(
    ("stage", "size", "words"),
    [(3, 3, ("ConfigError", "zero_hpz_partition_size is 3", "the 4 ranks", "1, 2, 4 would"))],
)
def test_refusals(stage: int, size: int, words: tuple[str, ...]) -> None:
    for answer in ranks.run_ranks(_refusal, 4, stage, size):
        assert all(word in answer for word in words), answer


def test_sizes_without_effect() -> None:
    """Programs have 8 as a default, and run on fewer ranks and at other stages."""
    ranks.run_ranks(_same_bits, 2, "mlp", 8, "fp32", 2)
    assert ranks.run_ranks(_refusal, 2, 2, 8) == ["", ""]


def _refusal(stage: int, size: int) -> str:
    try:
        initialize(CASES["mlp"].build(), Run(stage=stage, extra=hpz(size))).destroy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
