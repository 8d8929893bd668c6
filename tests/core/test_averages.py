"""Test averages of sharded weights: the bits of torch's ``AveragedModel``, applied and restored, with frozen and unfrozen parameters."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_zero
from hf_zero.core.holdings import alive
from hf_zero.errors import StateError
from hf_zero.utils import AveragedWeights, safe_get_full_fp32_param
from tests.support import ranks
from tests.support.averaged import build, same, step, weights
from tests.support.parity import DTYPES, Run, initialize
from tests.support.rows import slow_but

OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def masters_into(model: nn.Module, engine: Any) -> None:
    """Copy the masters and buffers of an engine into ``model``, in fp32; collective."""
    named = dict(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters(list(named.values())), torch.no_grad():
        for name, param in model.named_parameters():
            full = safe_get_full_fp32_param(named[name])
            param.copy_(named[name].float() if full is None else full)
        for mine, theirs in zip(model.buffers(), engine.module.buffers(), strict=True):
            mine.copy_(theirs)


def check_averages(averages: AveragedWeights, average: AveragedModel, engine: Any, what: str) -> None:
    """Check all trained parameters bit for bit, and that the model with the averages applied computes the same as torch's average."""
    for name, param in average.module.named_parameters():
        if param.requires_grad:
            assert torch.equal(averages.whole(name), param), f"{what}: {name}"
    before = weights(engine)
    with averages.applied():
        inside = weights(engine)
    for name, param in average.module.named_parameters():
        assert torch.equal(inside[name], param.to(inside[name].dtype)), f"{what}, applied: {name}"
    for name, buffer in average.module.named_buffers():
        assert torch.equal(inside[name], buffer.to(inside[name].dtype)), f"{what}, applied: {name}"
    same(weights(engine), before, f"{what}, restored")


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ema": ({"decay": 0.9}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
    "mean": ({"decay": None, "use_buffers": True}, {"use_buffers": True}),
    "ema_of_all": ({"decay": lambda number: 0.8, "use_buffers": True}, {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True}),
}


def _as_torch(run: Run) -> None:
    engine, model = initialize(build(), run), build()
    masters_into(model, engine)
    mine = {name: AveragedWeights(engine, name=name, **given) for name, (given, _) in KINDS.items()}
    torchs = {name: AveragedModel(model, **given) for name, (_, given) in KINDS.items()}
    dtype = DTYPES[run.dtype]
    for number in range(4):
        step(engine, number, dtype)
        masters_into(model, engine)
        for name, averages in mine.items():
            assert averages.update() and averages.updates == number + 1
            torchs[name].update_parameters(model)
        if number % 2:
            for name, averages in mine.items():
                check_averages(averages, torchs[name], engine, f"{run}, {name}, step {number}")
    mine["ema"].copy_to_weights()
    found = weights(engine)
    for name, param in torchs["ema"].module.named_parameters():
        assert torch.equal(found[name], param.to(found[name].dtype)), name
        assert not param.requires_grad or torch.equal(found[f"{name} (master)"], param), name
    step(engine, 9, dtype)
    engine.destroy()
    with pytest.raises(StateError, match="destroyed"):
        mine["ema"].update()


RUNS = [Run(stage) for stage in range(4)] + [Run(stage, "bf16") for stage in range(4)]
RUNS += [Run(2, "bf16", extra=OFFLOADED), Run(3, "fp32", extra=OFFLOADED), Run(3, "bf16", extra=OFFLOADED), Run(3, "fp16")]


@pytest.mark.parametrize("run", slow_but(RUNS, RUNS[0], RUNS[2], RUNS[7], RUNS[10]), ids=str)
def test_the_bits_of_torchs_average(run: Run) -> None:
    ranks.run_ranks(_as_torch, 2, run)


def test_the_bits_of_torchs_average_on_one_rank() -> None:
    ranks.run_ranks(_as_torch, 1, Run(3, "bf16"))


def _rules() -> None:
    engine = initialize(build(), Run(2, accumulation=2))
    before = alive(engine).total()
    averages = AveragedWeights(engine, 0.5, warm_up=True, update_every=2)
    rows = sum(unit.shard.nbytes for unit in engine.units if unit.master is not None)  # fp32: as much as the shards, and the buffers
    assert alive(engine).total() - before == rows + sum(buffer.untyped_storage().nbytes() for buffer in engine.module.buffers())
    with pytest.raises(StateError, match="has averages 'average' already"):
        AveragedWeights(engine)
    for wrong in ({"decay": 1.5}, {"update_every": 0}, {"name": "a b"}):
        with pytest.raises(ValueError, match="allowed are"):
            AveragedWeights(engine, **wrong)
    counted = []
    for number in range(8):  # micro-steps
        step(engine, number)
        counted.append(averages.update())
    assert counted == [False, False, False, True] * 2 and (averages.updates, averages.calls) == (2, 4)
    assert [averages._decay_at(number) for number in (1, 2, 1000)] == [2 / 11, 3 / 12, 0.5]
    loss = engine(torch.ones(4, 6)).sum()
    with pytest.raises(StateError, match="between a forward and its backward"):
        averages.apply()
    engine.backward(loss)
    engine.step()
    step(engine, 11)
    with averages.applied():
        for refused in (lambda: step(engine, 12), averages.update, averages.apply, lambda: engine.save_checkpoint("never_written")):
            with pytest.raises(StateError, match=r"averages 'average' replace the weights"):
                refused()
        engine.zero_grad()
    before = weights(engine)
    with pytest.raises(RuntimeError, match="evaluation"), averages.applied():
        raise RuntimeError("evaluation")
    with pytest.raises(StateError, match="call averages.restore"):
        engine.step()
    averages.restore()
    same(weights(engine), before, "after an error")
    with pytest.raises(StateError, match="call apply\\(\\) first"):
        averages.restore()
    with pytest.raises(StateError, match="no parameter 'frozen.weight' is averaged"):
        averages.whole("frozen.weight")
    head = engine.module.head
    engine.module.head = nn.Linear(head.in_features, head.out_features)  # its average would be that of the former head
    with pytest.raises(StateError, match="no parameter 'head.weight' is averaged"):
        averages.whole("head.weight")
    engine.destroy()


def test_when_an_update_counts_and_what_is_refused() -> None:
    ranks.run_ranks(_rules, 2)


# -- other units -----------------------------------------------------------------------------------------------------------


def _laid_out_anew(run: Run, again: Run, folder: Any) -> None:
    """Move parameters to other units, unfreeze and freeze them: averages follow them by name, and through a checkpoint."""
    first, model = initialize(build(), run), build()
    masters_into(model, first)
    averages, average = AveragedWeights(first, 0.7), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for number in range(2):
        step(first, number)
        masters_into(model, first)
        averages.update()
        average.update_parameters(model)
    module = first.module
    module.frozen.requires_grad_(True)  # from here on as the engine of another layout sees it
    module.head.requires_grad_(False)
    second = initialize(module, again)
    averages._engine, first.averages.kept = weakref.ref(second), {}
    second.averages.kept["average"] = averages
    second.averages.follow()
    masters_into(model, second)
    trained = {name for name, param in module.named_parameters() if param.requires_grad} | {"head.weight", "head.bias"}
    for number in range(2, 4):
        step(second, number)
        masters_into(model, second)
        averages.update()
        average.update_parameters(model)
    wanted = dict(average.module.named_parameters())
    assert len(trained) == len(wanted)
    for name in trained:
        assert torch.equal(averages.whole(name), wanted[name]), name
    before = weights(second)
    with averages.applied():
        inside = weights(second)
    assert all(torch.equal(inside[name], wanted[name]) for name in trained)
    same(weights(second), before, "restored")
    second.save_checkpoint(str(folder), tag="saved")
    step(second, 5)
    averages.update()
    second.load_checkpoint(str(folder), tag="saved")
    assert averages.updates == 4 and all(torch.equal(averages.whole(name), wanted[name]) for name in trained)
    third = initialize(build(), Run(3 if again.stage < 3 else 1))  # where head is trained, and frozen is not
    late = AveragedWeights(third)
    third.load_checkpoint(str(folder), tag="saved", load_optimizer_states=True)
    assert late.updates == 4 and all(torch.equal(late.whole(name), wanted[name]) for name in trained)


@pytest.mark.slow  # fast: `test_the_bits_of_torchs_average`
@pytest.mark.parametrize(("run", "again"), [(Run(3), Run(3)), (Run(2), Run(1)), (Run(3), Run(2))], ids=str)
def test_averages_follow_parameters_to_other_units(run: Run, again: Run, tmp_path: Any) -> None:
    ranks.run_ranks(_laid_out_anew, 2, run, again, tmp_path)


# -- where masters rest --------------------------------------------------------------------------------------------------


def _at_rest(folder: Any) -> None:
    """Average on the device masters that are on NVMe, or on the host with updates that continue after ``step``."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    places: list[dict[str, Any]] = [
        {},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": nvme, "offload_param": nvme}},
        {**OFFLOADED, "hf_zero": {"offload_overlap": "full"}},
    ]
    found = []
    for place in places:
        engine = initialize(build(), Run(3, "bf16", extra=place))
        averages = AveragedWeights(engine, 0.8)
        for number in range(3):
            step(engine, number, torch.bfloat16)
            averages.update()
        before = weights(engine)
        with averages.applied():
            inside = weights(engine)
        same(weights(engine), before, "restored")
        step(engine, 5, torch.bfloat16)
        averages.update()
        trained = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        found.append((inside, weights(engine), {name: averages.whole(name) for name in trained}))
        engine.destroy()
    for other in found[1:]:
        for mine, wanted in zip(other, found[0], strict=True):
            same(mine, wanted, "at rest")


@pytest.mark.slow  # fast: `test_the_bits_of_torchs_average` with offload
def test_masters_on_nvme_and_under_way(tmp_path: Any) -> None:
    ranks.run_ranks(_at_rest, 2, tmp_path)
