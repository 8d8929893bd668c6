"""A run that saves and resumes is the run that was never interrupted, at any number of ranks and any stage."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.checkpoints import build, config, differences, full_state, groups, start, steps
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)


# -- same ranks, same stage: bitwise ------------------------------------------------------------------------------------


def _interrupted(folder: str, stage: int, dtype: str, optimizer: Any, extra: dict[str, Any] | None = None) -> None:
    engine = start(stage, dtype, optimizer=optimizer, **(extra or {}))
    steps(engine, 0, 3, dtype)
    assert engine.save_checkpoint(folder) is True
    saved = full_state(engine)
    expected = steps(engine, 3, 3, dtype)
    end = full_state(engine)
    engine.destroy()

    engine = start(stage, dtype, seed=5, optimizer=optimizer, **(extra or {}))
    steps(engine, 7, 1, dtype)  # its state is not fresh either
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client_state == {}
    assert differences(full_state(engine), saved) == []
    assert steps(engine, 3, 3, dtype) == expected
    assert differences(full_state(engine), end) == []
    engine.destroy()


RESUMED = itertools.product(STAGES, ["fp32", "bf16", "fp16"])
FAST = {(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32")}  # the tests below have stage 3 in bf16


@pytest.mark.parametrize(("stage", "dtype"), [pytest.param(*run, marks=() if run in FAST else pytest.mark.slow) for run in RESUMED])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stage: int, dtype: str) -> None:
    ranks.run_ranks(_interrupted, 2, str(tmp_path), stage, dtype, torch.optim.AdamW)


@pytest.mark.slow  # fast: `test_resumed_run_is_the_uninterrupted_one`
def test_units_that_stay_gathered_at_stage_3_resume(tmp_path: Path) -> None:
    persistent = {"zero_optimization": {"stage": 3}}  # the default threshold keeps units this small whole
    ranks.run_ranks(_interrupted, 2, str(tmp_path), 3, "bf16", torch.optim.AdamW, persistent)


@pytest.mark.slow  # fast: `test_resumed_run_is_the_uninterrupted_one` with Adam's states
@pytest.mark.parametrize("stage", slow_but([1, 3], 1))
def test_sgd_with_momentum_resumes(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_interrupted, 2, str(tmp_path), stage, "fp32", torch.optim.SGD)


# -- other ranks, other stages: full state -------------------------------------------------------------------------------


def _save(folder: str, stage: int, dtype: str, count: int = 3) -> dict[str, Any]:
    engine = start(stage, dtype)
    steps(engine, 0, count, dtype)
    engine.save_checkpoint(folder, client_state={"from": stage})
    state = full_state(engine)
    engine.destroy()
    return state


def _load_at_all_stages(folder: str, dtype: str, expected: dict[str, Any]) -> list[str]:
    """Loads with other groups order too; a step afterwards gives the same numbers at every stage."""
    wrong, losses = [], []
    for stage in STAGES:
        engine = start(stage, dtype, seed=5, reverse=True)
        engine.load_checkpoint(folder)
        wrong += [f"stage {stage}: {name}" for name in differences(full_state(engine), expected)]
        losses.append(steps(engine, 3, 1, dtype, same_on_all=True)[0][0])
        engine.destroy()
    if len(set(losses)) != 1:
        wrong.append(f"losses of the next step by stage: {losses}")
    return wrong


QUICK = {(0, 1, 2), (1, 2, 3), (2, 3, 2), (3, 2, 1)}  # stage that saves, ranks before and after


@pytest.mark.fast_rows("2-3-2")
@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(STAGES, (1, 2, 3, 4, 8), (1, 2, 3, 4, 8))
    ],
)
def test_full_state_at_every_other_stage_and_number_of_ranks(tmp_path: Path, stage: int, before: int, after: int) -> None:
    expected = ranks.run_ranks(_save, before, str(tmp_path), stage, "bf16")[0]
    for wrong in ranks.run_ranks(_load_at_all_stages, after, str(tmp_path), "bf16", expected):
        assert wrong == []


def _load_in_other_precision(folder: str, dtype: str, expected: dict[str, Any]) -> list[str]:
    engine = start(3, dtype, seed=5)
    engine.load_checkpoint(folder)
    wrong = [
        name for name in differences(full_state(engine), expected) if not name.startswith(("weight", "buffer shift", "scaler", "buffer"))
    ]
    engine.destroy()
    return wrong


@pytest.mark.parametrize("pair", slow_but([("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")], ("fp32", "fp16")), ids="-".join)
def test_masters_and_moments_survive_a_change_of_precision(tmp_path: Path, pair: tuple[str, str]) -> None:
    expected = ranks.run_ranks(_save, 2, str(tmp_path), 2, pair[0])[0]
    for wrong in ranks.run_ranks(_load_in_other_precision, 2, str(tmp_path), pair[1], expected):
        assert wrong == []


class CountsInARow(torch.optim.Optimizer):
    """Momentum that fades; the step is kept as (1,), like a row of a parameter of one element."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=torch.zeros(1), momentum_buffer=torch.zeros_like(param))
                state["step"] += 1
                state["momentum_buffer"].mul_(0.9).add_(param.grad)
                param.sub_(state["momentum_buffer"] / state["step"].to(param.device) * group["lr"])


def _counted(stage: int, seed: int, offload: bool) -> Any:
    """One group holds a single element, which one rank's segment is made of."""
    import hf_zero

    settings = config(stage, "fp32")
    if offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build(seed)
    own = [{**group, "params": [param for param in group["params"] if param is not model.scale]} for group in groups(model)]
    own.append({"params": [model.scale], "lr": 0.02, "weight_decay": 0.0})
    return hf_zero.initialize(model=model, optimizer=CountsInARow(own), config=settings)[0]


def _save_counted(folder: str, stages: tuple[int, ...]) -> dict[str, Any]:
    """At these stages, with the later steps of the run that went on and of the one that resumed."""
    states = {}
    for stage in stages:
        engine = _counted(stage, 0, stage == 2)
        steps(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{stage}")
        states[f"{folder}/{stage}"] = full_state(engine)
        expected = steps(engine, 2, 1), full_state(engine)
        engine.destroy()
        engine = _counted(stage, 5, stage == 2)
        engine.load_checkpoint(f"{folder}/{stage}")
        assert differences(full_state(engine), states[f"{folder}/{stage}"]) == []
        assert {tuple(state["step"].shape) for state in engine.optimizer.inner.state.values()} == {(1,)}
        assert steps(engine, 2, 1) == expected[0] and differences(full_state(engine), expected[1]) == []
        engine.destroy()
    return states


def _load_counted(states: dict[str, Any], stages: tuple[int, ...]) -> list[str]:
    wrong = []
    for (folder, expected), stage in zip(states.items(), reversed(stages), strict=True):
        engine = _counted(stage, 5, False)
        engine.load_checkpoint(folder)
        wrong += [f"stage {stage}: {name}" for name in differences(full_state(engine), expected)]
        engine.destroy()
    return wrong


def _save_one_element(folder: str) -> list[str]:
    import hf_zero

    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = CountsInARow(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config(3, "fp32"))[0]
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    engine.save_checkpoint(folder, "one")
    engine.destroy()
    found: list[str] = json.loads(Path(folder, "one", "index.json").read_text())["optimizer"]["states"]
    return found


@pytest.mark.parametrize("stages", [(2, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)], ids=["few", "every"])
def test_a_step_with_a_shape_resumes_on_any_ranks(tmp_path: Path, stages: tuple[int, ...]) -> None:
    """Optimizers of others keep it as ``torch.zeros(1)``."""
    states = ranks.run_ranks(_save_counted, 2, str(tmp_path), stages)[0]
    assert all(state["step scale"] == 2 for state in states.values())
    assert ranks.run_ranks(_load_counted, 3, states, stages) == [[]] * 3
    assert ranks.run_ranks(_save_one_element, 2, str(tmp_path)) == [["momentum_buffer"]] * 2  # one rank has that element, one nothing


def _shards_of_padding(stage: int) -> None:
    import hf_zero

    model = torch.nn.Linear(2, 2)  # all of it lies in rank 0's shard
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    for param in model.parameters():
        assert hf_zero.utils.safe_get_full_optimizer_state(param, "momentum_buffer") is None
        value = hf_zero.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert value is not None and value.ne(0).all()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_agree_on_states_that_are_not_there(stage: int) -> None:
    ranks.run_ranks(_shards_of_padding, 3, stage)


def _save_and_load_before_the_first_step(folder: str, stage: int) -> None:
    engine = start(stage)
    engine.save_checkpoint(folder)
    expected = steps(engine, 0, 2)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 0 and not engine.optimizer.inner.state
    assert steps(engine, 0, 2) == expected
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoint_before_the_first_step_takes_back_later_moments(tmp_path: Path, stage: int) -> None:
    ranks.run_ranks(_save_and_load_before_the_first_step, 2, str(tmp_path), stage)


# -- what a rank reads ----------------------------------------------------------------------------------------------------


def _bytes_read(folder: str, world_before: int) -> tuple[int, int]:
    import hf_zero
    from hf_zero.checkpoint.load import LoadRequest, load_checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    extra = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config={**extra, "bf16": {"enabled": True}})[
        0
    ]
    if ranks.world() == world_before:
        engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(folder, "t")
    loaded = load_checkpoint(engine.checkpoints.state_of(engine), LoadRequest(folder, "t"))
    share = sum(3 * unit.master.nbytes for unit in engine.units)
    engine.destroy()
    return loaded.bytes_read, share


def _memory_of_a_save(folder: str, stage: int) -> tuple[int, int]:
    import hf_zero
    from tests.support.memory import peak_growth

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    extra = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=extra)[0]
    engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum())
    engine.step()
    engine.save_checkpoint(folder, "warm")
    grown = peak_growth(lambda: engine.save_checkpoint(folder, "t"))
    state = sum(3 * unit.master.nbytes for unit in engine.units)
    engine.destroy()
    return grown, state


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_a_save_takes_little_memory(tmp_path: Path, stage: int) -> None:
    for grown, state in ranks.run_ranks(_memory_of_a_save, 2, str(tmp_path), stage):
        assert grown < 24 * 2**20 < state / 1.5, (grown, state)


def _sizes_written(folder: str) -> list[int]:
    engine = start(0, "bf16")
    steps(engine, 0, 1, "bf16")
    engine.save_checkpoint(folder, "t")
    engine.destroy()
    return sorted(path.stat().st_size for path in (Path(folder) / "t").glob("master-*"))


def test_at_stage_0_every_rank_writes_its_part(tmp_path: Path) -> None:
    sizes = ranks.run_ranks(_sizes_written, 3, str(tmp_path))[0]
    assert len(sizes) == 3 and sizes[0] == sizes[2]


def test_a_rank_reads_little_more_than_its_share(tmp_path: Path) -> None:
    for read, share in ranks.run_ranks(_bytes_read, 2, str(tmp_path), 2):
        assert share <= read <= 1.01 * share, (read, share)
    for read, share in ranks.run_ranks(_bytes_read, 3, str(tmp_path), 2):
        assert read <= 1.1 * share, (read, share)


# -- offloaded or not ---------------------------------------------------------------------------------------------------


def _offloaded(path: str, tier: str) -> dict[str, Any]:
    place = {"device": tier, **({"nvme_path": path} if tier == "nvme" else {})}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": place, "offload_param": place}
    return {"zero_optimization": zero}


@pytest.mark.parametrize("tier", [pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def test_offloaded_run_resumes(tmp_path: Path, tier: str) -> None:
    extra = _offloaded(str(tmp_path / "swap"), tier)
    ranks.run_ranks(_interrupted, 2, str(tmp_path / "run"), 3, "bf16", torch.optim.AdamW, extra)


def _between_tiers(folder: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    engine = start(before.get("zero_optimization", {}).get("stage", 1), "bf16", **before)
    steps(engine, 0, 2, "bf16")
    engine.save_checkpoint(folder)
    expected = full_state(engine)
    engine.destroy()
    engine = start(after.get("zero_optimization", {}).get("stage", 1), "bf16", seed=5, **after)
    engine.load_checkpoint(folder)
    wrong = differences(full_state(engine), expected)
    engine.destroy()
    return wrong


@pytest.mark.slow  # fast: `test_offloaded_run_resumes`
@pytest.mark.fast_rows("to a file")
@pytest.mark.parametrize("turned", [False, True], ids=["to a file", "from a file"])
def test_full_state_moves_between_tiers(tmp_path: Path, turned: bool) -> None:
    pair = [{}, {**_offloaded(str(tmp_path / "swap"), "nvme"), "checkpoint": {"writer": {"decoupled": True}}}]
    before, after = pair[::-1] if turned else pair
    assert ranks.run_ranks(_between_tiers, 2, str(tmp_path / "run"), before, after) == [[], []]
