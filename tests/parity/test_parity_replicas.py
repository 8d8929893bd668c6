"""Test shard groups with replicas (`mics_shard_size`): stages 1 to 3 against plain PyTorch, and against each other bit for bit."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import offload_runs, ranks, sequences, tp_training
from tests.support.models import CASES, Batch, class_loss
from tests.support.parity import DRIFT, Run, check, check_bitwise, check_case, check_training, initialize, micro_step, reference_case, train
from tests.support.skipped_blocks import Chosen, loss_of_choice
from tests.support.whole_tensors import plain, through_engine

STAGES = (1, 2, 3)


def grouped(size: int, **zero: Any) -> dict[str, Any]:
    """Return ``Run.extra`` with shard groups of ``size`` ranks."""
    return {"zero_optimization": {"mics_shard_size": size, **zero}}


def _stages(name: str, size: int, dtype: str, accumulation: int, clip: float) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "accumulation": accumulation, "clip": clip, "extra": grouped(size)}
    expected = reference_case(name, Run(**settings), ranks.world()) if ranks.rank() == 0 else None
    traces = {stage: check_case(name, Run(stage=stage, **settings), expected=expected)[0] for stage in STAGES}
    check_bitwise(traces[2], traces[1], "stage 2 against 1")
    check_bitwise(traces[3], traces[2], "stage 3 against 2")


@pytest.mark.fast_rows("bf16-3-0.1")
@pytest.mark.parametrize(
    ("dtype", "accumulation", "clip"),
    [("fp32", 1, 0.0), ("bf16", 3, 0.1), ("fp16", 3, 0.1)],  # test_every_cell has all
)
def test_two_groups_of_two(dtype: str, accumulation: int, clip: float) -> None:
    ranks.run_ranks(_stages, 4, "gpt2", 2, dtype, accumulation, clip)


@pytest.mark.slow  # fast: `test_two_groups_of_two`
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("size", [2, 3])
def test_six_ranks(size: int) -> None:
    """Run on a number of ranks that is not a power of two, as 3 x 2 and 2 x 3."""
    ranks.run_ranks(_stages, 6, "mlp", size, "fp32", 2, 0.1)


def test_groups_of_one_rank_hold_everything() -> None:
    ranks.run_ranks(_stages, 4, "mlp", 1, "fp32", 2, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(4, 1), (4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "albert", "mixtral", "conv"])
def test_every_cell(name: str, dtype: str, world: int, size: int) -> None:
    for accumulation, clip in itertools.product((1, 3), (0.0, 0.1)):
        ranks.run_ranks(_stages, world, name, size, dtype, accumulation, clip)


# -- what comes late, is left out, or overflows -------------------------------------------------------------------------


def _skipping(stage: int) -> None:
    """Run the blocks in reverse order on rank 3, and some of them twice on another rank: their gradients are late at stage 3."""
    orders = ([0, 1, 2, 3], [0, 1, 1, 3], [2], [3, 2, 1, 0])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Chosen()

    def feed(step: int, micro: int, rank: int) -> Batch:
        choice = torch.tensor(orders[(rank + step) % 4])
        return {**CASES["mlp"].rows(step, micro, rank), "choice": choice}

    check_training(build, feed, loss_of_choice, Run(stage=stage, accumulation=2, clip=0.1, extra=grouped(2)), label="orders")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_run_other_blocks_in_another_order(stage: int) -> None:
    ranks.run_ranks(_skipping, 4, stage)


def _overflow(stage: int) -> None:
    def feed(step: int, micro: int, rank: int) -> Batch:
        batch = CASES["mlp"].rows(step, micro, rank)
        if (step, micro, rank) == (1, 0, 3):
            batch["inputs"][0, 0] = math.inf
        return batch

    run = Run(stage=stage, dtype="fp16", accumulation=2, steps=4, extra=grouped(2))
    trace = check_training(CASES["mlp"].build, feed, class_loss, run, label="overflow on rank 3")
    assert trace.skipped == [False, True, False, False], trace.skipped
    assert trace.norms[1] == math.inf


@pytest.mark.slow  # fast: test_parity_overflow.py, and the same of nodes
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", STAGES)
def test_every_group_skips_the_overflow_of_one_rank(stage: int) -> None:
    ranks.run_ranks(_overflow, 4, stage)


# -- reading and writing gradients --------------------------------------------------------------------------------------


def _gradient_of(stage: int, dtype: str, size: int) -> None:
    """Read gradients after every micro-step, and write them in the middle of an accumulation."""
    import hf_zero

    case = CASES["mlp"]
    run = Run(stage=stage, dtype=dtype, accumulation=3, steps=1, extra=grouped(size))
    twins = [initialize(case.build(), run) for _ in range(2)]
    seen: list[dict[str, Tensor]] = []
    for micro in range(3):
        for engine in twins:
            batch = case.rows(0, micro, ranks.rank())
            if dtype != "fp32":
                batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
            engine.backward(case.forward(engine, batch))
            if micro == 1 and engine is twins[1]:  # what is written is what was there: nothing may change
                for param in engine.module.parameters():
                    hf_zero.utils.safe_set_full_grad(param, hf_zero.utils.safe_get_full_grad(param))
            if micro < 2:
                engine.step()
        named = [list(engine.module.named_parameters()) for engine in twins]
        grads = [{name: hf_zero.utils.safe_get_full_grad(param) for name, param in params} for params in named]
        for name, grad in grads[0].items():
            close = {"rtol": 1e-5, "atol": 1e-7} if dtype == "fp32" else {"rtol": 0.02, "atol": 1e-3}  # what came after travelled alone
            torch.testing.assert_close(grads[1][name], grad, **close)
        seen.append(grads[0])
    plain = case.build()
    total = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for micro in range(3):
        for rank in range(ranks.world()):
            loss = case.forward(plain, case.rows(0, micro, rank)) / (3 * ranks.world())
            for (name, _), grad in zip(plain.named_parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
                total[name] += grad
        for name, grad in seen[micro].items():
            loose = {"rtol": 1e-4, "atol": 1e-6} if dtype == "fp32" else {"rtol": 0.1, "atol": 2e-3}
            torch.testing.assert_close(grad.float(), total[name], **loose)
    for engine in twins:
        engine.step()
        engine.destroy()


@pytest.mark.slow  # fast: `test_two_groups_of_two` accumulates, and test_parity_written_gradients.py
@pytest.mark.fast_rows("4-2-fp32")
@pytest.mark.parametrize(("world", "size", "dtype"), [(4, 2, "fp32"), (6, 2, "bf16")])
def test_gradients_in_the_middle_of_an_accumulation(world: int, size: int, dtype: str) -> None:
    for stage in (1, 3):
        ranks.run_ranks(_gradient_of, world, stage, dtype, size)


def _all_inside(stage: int) -> None:
    """Run all backwards of one step inside ``no_sync`` and ``coalesce_grad_reduction``."""
    case = CASES["mlp"]
    run = Run(stage=stage, accumulation=3, steps=2, extra=grouped(2))
    traces = []
    for inside in (False, True):
        engine = initialize(case.build(), run)

        def steps(engine: Any, batch: Batch, forward: Any, micro: int) -> float:
            loss = forward(engine, batch)
            if micro < 2:
                with engine.no_sync() if engine.stage_policy.allows_deferral else nullcontext():
                    engine.backward(loss)
            else:
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(loss)
                engine.step()
            return float(loss.detach())

        traces.append(train(engine, lambda *at: case.rows(*at), case.forward, run, steps if inside else micro_step))
        engine.destroy()
    check(traces[1], traces[0], run, "no_sync")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync(stage: int) -> None:
    ranks.run_ranks(_all_inside, 4, stage)


def _coalesced(stage: int) -> None:
    case = CASES["mlp"]
    run = Run(stage=stage, steps=2, accumulation=2, extra=grouped(2))
    engine = initialize(case.build(), Run(**{**vars(run), "accumulation": 1}))
    losses = []
    for step in range(2):
        with engine.coalesce_grad_reduction():
            for micro in range(2):
                loss = case.forward(engine, case.rows(step, micro, ranks.rank())) / 2
                engine.backward(loss)
        engine.step()
        losses.append(engine.get_global_grad_norm())
    if ranks.rank() == 0:
        assert losses == pytest.approx(reference_case("mlp", run, ranks.world()).norms, rel=2e-5)
    engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", STAGES)
def test_coalesced_backwards(stage: int) -> None:
    ranks.run_ranks(_coalesced, 4, stage)


# -- with everything else -------------------------------------------------------------------------------------------------


def _offloaded(run: Run, only: str) -> list[str]:
    return offload_runs.compare("odd_mlp", run, only)


@pytest.mark.fast_rows("2-half, apart")
@pytest.mark.parametrize(("stage", "only"), [(2, "half, apart"), (3, "both cpu, apart"), (3, "both nvme")])
def test_offload_changes_no_bit(stage: int, only: str) -> None:
    run = Run(stage=stage, dtype="bf16", accumulation=2, clip=0.05, extra=grouped(2))
    wrong = [text for rank in ranks.run_ranks(_offloaded, 4, run, only) for text in rank]
    assert not wrong, "\n".join(wrong)


def _whole(name: str, stage: int, dtype: str) -> None:
    run = Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1, extra=grouped(2))
    limit = None if dtype == "fp32" else DRIFT
    check(through_engine(name, "odd_mlp", run), plain(name, CASES["odd_mlp"], run, ranks.world()), run, name, limit)


@pytest.mark.slow  # fast: test_parity_node_parameters.py has one
@pytest.mark.fast_rows("Adafactor")
@pytest.mark.parametrize("name", ["Adafactor", "RowScaled", "LAMB"])
def test_optimizers_of_whole_tensors(name: str) -> None:
    for stage in (1, 3):
        ranks.run_ranks(_whole, 4, name, stage, "fp32")


def _tensor_parallel(stage: int) -> None:
    run = Run(stage=stage, accumulation=2, clip=0.1, extra=grouped(1 if ranks.world() == 4 else 2))
    tp_training.check_against_one_rank(CASES["gpt2"], 2, [run])


@pytest.mark.slow  # fast: `test_two_groups_of_two` of test_tp_training.py
@pytest.mark.fast_rows("4-1")
@pytest.mark.parametrize(("world", "stage"), [(4, 1), (8, 3)])
def test_tensor_parallelism(world: int, stage: int) -> None:
    """Run on 2 groups x 1 or 2 shards x 2 ranks that together hold one model."""
    ranks.run_ranks(_tensor_parallel, world, stage)


def _sequences(stage: int, size: int) -> None:
    data = sequences.Data()
    run = Run(stage=stage, steps=2, clip=0.5, extra=grouped(size))
    sequences.compare(sequences.sliced(sequences.llama, run, data, 2), sequences.whole(sequences.llama, run, data, ranks.world() // 2))


@pytest.mark.slow  # fast: `test_masks_and_stages_over_two_ranks` of test_sequence_training.py
@pytest.mark.fast_rows("3-2")
@pytest.mark.parametrize(("stage", "size"), [(1, 2), (3, 2)])
def test_sequence_parallelism(stage: int, size: int) -> None:
    """Share each sequence between two ranks, in shard groups as large as theirs or smaller."""
    ranks.run_ranks(_sequences, 4, stage, size)


# -- built sharded, and whole again ---------------------------------------------------------------------------------------


def _built_sharded() -> None:
    import hf_zero
    from hf_zero.integrations.loading import MiCSInit

    case, run = CASES["gpt2"], Run(stage=3, extra=grouped(2))
    for kind in (hf_zero.zero.Init, MiCSInit):
        with kind(config_dict_or_path=run.config()):
            torch.manual_seed(1000 + ranks.rank())  # values are rank 0's
            model = case.build()
        parts = [param.ds_tensor.numel() for param in model.parameters()]
        assert sum(parts) >= sum(param.ds_numel for param in model.parameters()) // 3
        assert all(param.ds_process_group.size() == 2 for param in model.parameters())
        engine = initialize(model, run)
        trace = train(engine, lambda *at: case.rows(*at), case.forward, run)
        engine.destroy()
        if ranks.rank() == 0:
            check(trace, reference_case("gpt2", run, ranks.world()), run, kind.__name__)


def test_a_model_that_was_built_in_shard_groups() -> None:
    ranks.run_ranks(_built_sharded, 4)


def _changed_on_the_last_rank() -> None:
    """Check that values which a rank of another group writes inside GatheredParameters reach all ranks."""
    import hf_zero

    engine = initialize(CASES["mlp"].build(), Run(stage=3, dtype="bf16", extra=grouped(2)))
    param = engine.module.head.weight
    with hf_zero.zero.GatheredParameters([param], modifier_rank=3):
        if ranks.rank() == 3:
            param.data.fill_(0.5)
    with hf_zero.zero.GatheredParameters([param]):
        assert bool((param == 0.5).all())
    assert bool((hf_zero.utils.safe_get_full_fp32_param(param) == 0.5).all())
    assert (engine.dp_world_size, engine.get_data_parallel_rank()) == (4, ranks.rank())
    engine.destroy()


def test_gathered_parameters() -> None:
    ranks.run_ranks(_changed_on_the_last_rank, 4)


def _generated(gather: bool) -> None:
    case = CASES["gpt2"]
    plain = case.build().eval()
    engine = initialize(case.build(), Run(stage=3, extra={**grouped(2), "hf_zero": {"gather_for_generation": gather}}))
    engine.eval()
    prompt = torch.tensor([[3, 4, 5, 6]]) + ranks.rank()
    new = {"min_new_tokens": 8 - 2 * ranks.rank(), "max_new_tokens": 8 - 2 * ranks.rank(), "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.generate(prompt, **new), plain.generate(prompt, **new))
    engine.destroy()


@pytest.mark.fast_rows("True")
@pytest.mark.parametrize("gather", [True, False])
def test_generation_where_every_rank_stops_elsewhere(gather: bool) -> None:
    ranks.run_ranks(_generated, 4, gather)


# -- what is refused ------------------------------------------------------------------------------------------------------


def _refusal(extra: dict[str, Any], replicate: int = 1) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", str(replicate))
        try:
            initialize(CASES["mlp"].build(), Run(stage=3, extra=extra)).destroy()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("world", "extra", "replicate", "words"),
    [
        (4, {"zero_optimization": {"mics_shard_size": 3}}, 1, ("ConfigError", "mics_shard_size", "shard groups of 3", "1 or 2 or 4 would")),
        (4, {"zero_optimization": {"mics_shard_size": 8}}, 1, ("ConfigError", "mics_shard_size: shard group 8", "1 or 2 or 4 would")),
        (2, {"zero_optimization": {"mics_shard_size": 0}}, 1, ("ConfigError", "mics_shard_size", "is 0", "-1")),
        (2, {"zero_optimization": {"mics_shard_size": 1, "stage": 0}}, 1, ("ConfigError", "mics_shard_size", "stage` is 0", "1, 2 or 3")),
        (2, {}, 3, ("ConfigError", "dp_replicate is 3", "the 2 rank(s)", "1 or 2 would")),
        (
            4,
            {"zero_optimization": {"mics_shard_size": 2}},
            4,
            ("ConfigError", "REPLICATE_SIZE: dp_replicate 4", "group 2 makes 8"),
        ),
        (
            2,
            {"zero_optimization": {"mics_shard_size": 1, "stage": 1}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
            1,
            ("UnsupportedError", "OneBitAdam with 2 shard groups", "mics_shard_size"),
        ),
    ],
)
def test_refusals(world: int, extra: dict[str, Any], replicate: int, words: tuple[str, ...]) -> None:
    for answer in ranks.run_ranks(_refusal, world, extra, replicate):
        assert all(word in answer for word in words), answer
