"""Test parameters in each node, gradients and optimizer states over all ranks (`hf_zero.param_shard_size`), against plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import offload_runs, ranks, sequences, tp_training
from tests.support.checkpoints import differences, full_state, start, steps
from tests.support.models import CASES, STEP_VOTE_BYTES, Batch, TwoBlocks, class_loss
from tests.support.parity import DRIFT, Run, check, check_case, check_training, initialize, reference_case, train
from tests.support.skipped_blocks import Chosen, loss_of_choice
from tests.support.whole_tensors import plain, through_engine


def inside(size: int | str, **zero: Any) -> dict[str, Any]:
    """Return ``Run.extra`` with parameters over ``size`` ranks."""
    return {"hf_zero": {"param_shard_size": size}, "zero_optimization": zero}


def _cells(name: str, size: int, cells: list[tuple[str, int]], zero: dict[str, Any] | None = None) -> None:
    for dtype, accumulation in cells:
        check_case(name, Run(stage=3, dtype=dtype, accumulation=accumulation, clip=0.1, steps=3, extra=inside(size, **(zero or {}))))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_nodes_of_two_ranks(name: str) -> None:
    ranks.run_ranks(_cells, 4, name, 2, [("fp32", 2), ("bf16", 1), ("fp16", 3)])


@pytest.mark.slow  # fast: `test_nodes_of_two_ranks`
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_six_ranks(size: int) -> None:
    ranks.run_ranks(_cells, 6, "mlp", size, [("fp32", 2)])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(4, 2), (6, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("name", ["gpt2", "t5", "albert", "mixtral", "conv"])
def test_every_cell(name: str, world: int, size: int) -> None:
    # A few biases make up the norm of albert's gradients, or cancel almost: a last place of bf16 is a large part of their sums.
    dtypes = ("fp32", "fp16") if name == "albert" else ("fp32", "bf16", "fp16")
    ranks.run_ranks(_cells, world, name, size, [(dtype, accumulation) for dtype in dtypes for accumulation in (1, 3)])


@pytest.mark.slow
def test_nodes_inside_shard_groups() -> None:
    """Run two groups of two nodes of two ranks; a reduction has three hops."""
    ranks.run_ranks(_cells, 8, "gpt2", 2, [("fp32", 3), ("bf16", 1)], {"mics_shard_size": 4})


def _skipping() -> None:
    """Run with blocks that a rank skips, runs twice, or runs in another order: their gradients are late."""
    orders = ([0, 1, 2, 3], [0, 1, 1, 3], [2], [3, 2, 1, 0])

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return Chosen()

    def feed(step: int, micro: int, rank: int) -> Batch:
        return {**CASES["mlp"].rows(step, micro, rank), "choice": torch.tensor(orders[(rank + step) % 4])}

    check_training(build, feed, loss_of_choice, Run(stage=3, accumulation=2, clip=0.1, extra=inside(2)), label="orders")


@pytest.mark.slow  # fast: the same of test_parity_replicas.py
def test_ranks_that_run_other_blocks_in_another_order() -> None:
    ranks.run_ranks(_skipping, 4)


def _overflow() -> None:
    def feed(step: int, micro: int, rank: int) -> Batch:
        batch = CASES["mlp"].rows(step, micro, rank)
        if (step, micro, rank) == (1, 0, 3):
            batch["inputs"][0, 0] = math.inf
        return batch

    run = Run(stage=3, dtype="fp16", accumulation=2, steps=4, extra=inside(2))
    trace = check_training(CASES["mlp"].build, feed, class_loss, run, label="overflow on rank 3")
    assert trace.skipped == [False, True, False, False], trace.skipped


def test_every_node_skips_the_overflow_of_one_rank() -> None:
    ranks.run_ranks(_overflow, 4)


# -- with everything else -------------------------------------------------------------------------------------------------


def _offloaded(only: str) -> list[str]:
    return offload_runs.compare("odd_mlp", Run(stage=3, dtype="bf16", accumulation=2, clip=0.05, extra=inside(2)), only)


@pytest.mark.slow  # fast: test_parity_secondary.py has shards and states on the host
@pytest.mark.parametrize(
    "only", ["half, apart", *(pytest.param(only, marks=pytest.mark.slow) for only in ("both cpu, apart", "both nvme"))]
)
def test_offload_changes_no_bit(only: str) -> None:
    wrong = [text for rank in ranks.run_ranks(_offloaded, 4, only) for text in rank]
    assert not wrong, "\n".join(wrong)


def _whole(name: str) -> None:
    run = Run(stage=3, accumulation=2, clip=0.1, extra=inside(2))
    check(through_engine(name, "odd_mlp", run), plain(name, CASES["odd_mlp"], run, ranks.world()), run, name)


def test_an_optimizer_of_whole_tensors() -> None:
    ranks.run_ranks(_whole, 4, "Adafactor")


def _tensor_parallel() -> None:
    tp_training.check_against_one_rank(CASES["gpt2"], 2, [Run(stage=3, accumulation=2, clip=0.1, extra=inside(2))])


@pytest.mark.slow
def test_tensor_parallelism() -> None:
    """Run on 2 nodes of 2 shards of 2 ranks that together hold one model."""
    ranks.run_ranks(_tensor_parallel, 8, env={"LOCAL_WORLD_SIZE": "4"})


def _sequences() -> None:
    data = sequences.Data()
    run = Run(stage=3, steps=2, clip=0.5, extra=inside(2))
    sequences.compare(sequences.sliced(sequences.llama, run, data, 2), sequences.whole(sequences.llama, run, data, ranks.world() // 2))


@pytest.mark.slow  # fast: `test_masks_and_stages_over_two_ranks` of test_sequence_training.py
def test_sequence_parallelism() -> None:
    ranks.run_ranks(_sequences, 4)


def _with_codes() -> None:
    """Check that the copy holds the values of the weights' codes, whether an update or a gather has filled it."""
    case, traces = CASES["mlp"], []
    for extra in (inside(2, zero_quantized_weights=True), {"zero_optimization": {"zero_quantized_weights": True}}):
        run = Run(stage=3, dtype="bf16", steps=3, extra={**extra, "communication_data_type": "fp32"})
        engine = initialize(case.build(), run)
        traces.append(train(engine, lambda *at: case.rows(*at), case.forward, run))
        engine.destroy()
    check(traces[0], traces[1], run, "codes of weights", DRIFT)


def test_codes_of_weights() -> None:
    ranks.run_ranks(_with_codes, 4)


def _generated(gather: bool, copies: bool) -> None:
    """``copies``: parameters are divided over all ranks, and each node keeps a copy (``zero_hpz_partition_size``)."""
    case = CASES["gpt2"]
    own = {"gather_for_generation": gather, **({} if copies else {"param_shard_size": "node"})}
    run = Run(stage=3, extra={"zero_optimization": {"zero_hpz_partition_size": 2} if copies else {}, "hf_zero": own})
    engine = initialize(case.build(), run)
    train(engine, lambda *at: case.rows(*at), case.forward, run)
    plain = case.build()
    plain.load_state_dict(reference_case("gpt2", run, ranks.world()).weights, strict=False)
    plain.eval()
    engine.eval()
    prompt = torch.tensor([[3, 4, 5, 6]]) + ranks.rank()
    new = {"min_new_tokens": 8 - 2 * ranks.rank(), "max_new_tokens": 8 - 2 * ranks.rank(), "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.generate(prompt, **new), plain.generate(prompt, **new))
    engine.destroy()


@pytest.mark.parametrize("copies", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gather", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_generation_after_training_where_ranks_stop_elsewhere(gather: bool, copies: bool) -> None:
    """Each rank waited for the vote on changed shards in the forward of a token that another rank did not generate."""
    ranks.run_ranks(_generated, 4, gather, copies, env={"LOCAL_WORLD_SIZE": "2"})


def _written() -> None:
    """Check that the next gather returns values that a script writes, and the values after a step."""
    import hf_zero

    case, run = CASES["mlp"], Run(stage=3, extra=inside(2))
    engine = initialize(case.build(), run)
    train(engine, lambda *at: case.rows(*at), case.forward, run)
    param = engine.module.head.weight
    with hf_zero.zero.GatheredParameters([param], modifier_rank=3):
        param.data.fill_(0.5)
    with hf_zero.zero.GatheredParameters([param]):
        assert bool((param == 0.5).all())
    hf_zero.utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape, 2.0))
    train(engine, lambda *at: case.rows(*at), case.forward, run)
    with hf_zero.zero.GatheredParameters([param]):
        assert torch.equal(param, hf_zero.utils.safe_get_full_fp32_param(param))
        assert not bool((param == 2.0).any())
    engine.destroy()


def test_values_that_a_script_writes() -> None:
    ranks.run_ranks(_written, 4)


def _resumed(folder: str) -> None:
    """Check that a resumed run equals the uninterrupted one, and that its checkpoint loads without the key too."""
    engine = start(3, "bf16", 0, hf_zero=inside(2)["hf_zero"])
    steps(engine, 0, 2, "bf16")
    engine.save_checkpoint(folder, tag="t")
    saved = full_state(engine)
    expected, end = steps(engine, 2, 2, "bf16"), full_state(engine)
    engine.destroy()
    engine = start(3, "bf16", 5, hf_zero=inside(2)["hf_zero"])
    steps(engine, 5, 1, "bf16")
    engine.load_checkpoint(folder, tag="t")
    assert steps(engine, 2, 2, "bf16") == expected
    assert differences(full_state(engine), end) == []
    engine.destroy()
    engine = start(2, "bf16", 7)
    engine.load_checkpoint(folder, tag="t")
    assert differences(full_state(engine), saved) == []
    engine.destroy()


@pytest.mark.slow  # fast: test_checkpoint_replicas.py and test_checkpoint_node_local.py
def test_checkpoints(tmp_path: Path) -> None:
    ranks.run_ranks(_resumed, 4, str(tmp_path))


# -- what is sent -----------------------------------------------------------------------------------------------------------


def _sent(accumulation: int, dtype: str) -> tuple[list[str], dict[str, int], int, int]:
    """Return of the third step: labels, bytes that this rank sent by network, and elements of the units and of the root."""
    import hf_zero
    from hf_zero.observe import record_labels

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    config |= {"gradient_accumulation_steps": accumulation, "hf_zero": {"param_shard_size": 2}}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    model = TwoBlocks()
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    hops = engine.stepper.reducer.exchange.nodes
    networks = {"all": engine.collectives, "node": engine.units[0].secondary._node, "inside": hops.inside, "across": hops.across}
    inputs = torch.ones(2, 8, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    for _step in range(3):
        before = {name: network.sent_bytes for name, network in networks.items()}
        with record_labels() as labels:
            for _micro in range(accumulation):
                engine.backward(engine(inputs))
                engine.step()
    sent = {name: network.sent_bytes - before[name] for name, network in networks.items()}
    root = sum(unit.layout.padded_numel for unit in engine.runtime.root.units)
    total = sum(unit.layout.padded_numel for unit in engine.units)
    engine.destroy()
    return [label.removeprefix("hf_zero::") for label in labels], sent, total, root


@pytest.mark.fast_rows("3-bf16")
@pytest.mark.parametrize(("accumulation", "dtype"), [(1, "fp32"), (3, "bf16")])
def test_bytes_of_a_step(accumulation: int, dtype: str) -> None:
    """Check the bytes with M = 2 nodes of H = 2 ranks, N = M H: gathers of (H-1)/H P b in forward and, except for the root, in backward
    stay inside a node, and so does the first hop; the second hop sends (M-1)/M P/H b; updates are sent to the one rank of every node that
    keeps them, P/N b each.
    """
    for number, (labels, sent, total, root) in enumerate(ranks.run_ranks(_sent, 4, accumulation, dtype)):
        element = 4 if dtype == "fp32" else 2
        half, norm, late, passes = total * element // 2, 2 * 3 * 8 // 4, 4 * (2 + 3), 4 * (3 + 1)
        changed = 4 * (1 + 1)  # a vote on changed shards as a forward begins, and a part of the vote on another pass
        assert sent["node"] == accumulation * (2 * half - root * element // 2)
        assert sent["inside"] == accumulation * half
        assert sent["across"] == accumulation * half // 2
        keepers = {0: (0, 2), 1: (0, 2), 2: (1, 3), 3: (1, 3)}[number]
        updates = len(set(keepers) - {number}) * total // 4 * element
        assert sent["all"] == updates + norm + 3 * (STEP_VOTE_BYTES + accumulation * (late + passes + changed))
        assert [label for label in labels if "update)" in label or label == "spread"] == [
            *("exchange_parts (root: update)", "exchange_parts (layers.0: update)", "exchange_parts (layers.1: update)"),
            "spread",
        ]


# -- what is refused --------------------------------------------------------------------------------------------------------


def _refusals(cells: list[tuple[dict[str, Any], tuple[int, ...]]]) -> list[str]:
    answers = []
    for extra, local in cells:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", str(local[ranks.rank()]))
            try:
                initialize(CASES["gpt2" if "tensor_parallel" in extra else "mlp"].build(), Run(stage=3, extra=extra)).destroy()
                answers.append("")
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
    return answers


def test_refusals() -> None:
    cells = [
        (inside(3), (4,) * 4, ("ConfigError", "param_shard_size is 3", "the 4 ranks", "; 2, 4 would")),
        (inside(1), (4,) * 4, ("ConfigError", "param_shard_size` is 1")),
        (inside(2, stage=2), (4,) * 4, ("ConfigError", "param_shard_size", "stage` is 2", "set that to 3")),
        (inside(2, zero_hpz_partition_size=2), (4,) * 4, ("ConfigError", "param_shard_size", "zero_hpz_partition_size", "set one")),
        (inside("node"), (3, 3, 3, 1), ("ConfigError", "param_shard_size is 'node'", "nodes of 1 and of 3 ranks")),
        (inside("node"), (0,) * 4, ("ConfigError", "param_shard_size is 'node'", "LOCAL_WORLD_SIZE is not set")),
        (inside(2), (3, 3, 3, 1), ("ConfigError", "param_shard_size", "nodes of 1 and of 3 ranks", "1 or 4 ranks would")),
        ({"zero_optimization": {"zero_hpz_partition_size": 3}}, (3, 3, 3, 1), ("ConfigError", "partition_size is 3", "; 1, 4 would")),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, (3, 3, 3, 1), ("ConfigError", "zero_hpz_partition_size", "of 1 and of 3")),
        ({"zero_optimization": {"mics_shard_size": 2}}, (3, 3, 3, 1), ("ConfigError", "shard groups", "mics_shard_size", "of 1 and of 3")),
        ({"tensor_parallel": {"autotp_size": 2}}, (1, 3, 3, 3), ("ConfigError", "tensor parallelism (tp 2)", "1 or 4 ranks would")),
        ({"zero_optimization": {"mics_shard_size": 2}}, (2,) * 4, ()),
        ({"zero_optimization": {"mics_shard_size": 2}}, (1,) * 4, ()),
    ]
    for answers in ranks.run_ranks(_refusals, 4, [(extra, local) for extra, local, _ in cells]):
        for answer, (_, _, words) in zip(answers, cells, strict=True):
            assert all(word in answer for word in words) and bool(answer) == bool(words), answer
