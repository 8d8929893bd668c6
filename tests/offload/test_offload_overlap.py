"""Updates beside the training loop: the same bits as updates inside ``step``, and nobody sees half of one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.memory.buffers import HostMemory
from hf_zero.observe import record_labels
from hf_zero.offload import host_states, speculation, updates
from hf_zero.ops import HostAdam
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.offload_runs import blocks_of, differing, sections, state_of
from tests.support.parity import Run, initialize

CPU = {"device": "cpu"}
PLAIN: tuple[bool, dict[str, Any]] = (False, {})
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "host": (False, {"offload_optimizer": CPU}),
    "apart": (True, {"offload_optimizer": CPU}),
    "apart, parameters too": (True, {"offload_optimizer": CPU, "offload_param": CPU}),
}


def make(run: Run, blocks: dict[str, Any], mode: str) -> Any:
    torch.manual_seed(3)
    own = {"hf_zero": {"offload_overlap": mode}} if blocks else {}
    extra = {**run.extra, **sections(run.stage, {**blocks, **own})}

    def optimizer(params: Any) -> HostAdam:  # where there is no native library, over the torch reference
        return HostAdam(params, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)

    return initialize(CASES["odd_mlp"].build(), Run(**{**vars(run), "extra": extra}), optimizer=optimizer)


def batch(run: Run, step: int) -> Batch:
    rows = CASES["odd_mlp"].rows(step, 0, ranks.rank())
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.dtype, torch.float32)
    return {key: value.to(low) if value.is_floating_point() else value for key, value in rows.items()}


def backward(engine: Any, run: Run, step: int) -> None:
    engine.backward(CASES["odd_mlp"].forward(engine, batch(run, step)))


def drain(engine: Any) -> None:
    """Waits until the other thread has nothing to do, so that no step on copies is cancelled for being late."""
    state_store = engine.optimizer.state_store
    if hasattr(state_store, "_thread"):
        state_store._thread.submit(lambda: None).result()


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Steps on copies that were made, and those that became the real ones."""
    counts = {"made": 0, "kept": 0}
    step, finish = speculation.Speculation.step, speculation.Speculation.finish

    def made(self: Any, settle: Any) -> None:
        step(self, settle)
        counts["made"] += 1

    def kept(self: Any) -> None:
        finish(self)
        counts["kept"] += 1

    with mock.patch.object(speculation.Speculation, "step", made), mock.patch.object(speculation.Speculation, "finish", kept):
        yield counts


def destroy(engine: Any) -> None:
    engine.destroy()
    del engine
    gc.collect()


def play(run: Run, way: tuple[bool, dict[str, Any]], mode: str, act: Callable[[Any, Run], None]) -> dict[str, torch.Tensor]:
    """Two steps, ``act``, and two more; weights, masters and moments after them. Collective."""
    with blocks_of(way) as blocks:
        engine = make(run, blocks, mode)
        for step in (0, 1):
            backward(engine, run, step)
            drain(engine)
            engine.step()
        act(engine, run)
        for step in (8, 9):
            backward(engine, run, step)
            drain(engine)
            engine.step()
        found = state_of(engine)
        destroy(engine)
        del engine
        gc.collect()
    return found


# -- between backward and step ----------------------------------------------------------------------------------------


def nothing(engine: Any, run: Run) -> None:
    backward(engine, run, 2)
    drain(engine)
    engine.step()


def zero_grad(engine: Any, run: Run) -> None:
    backward(engine, run, 2)
    drain(engine)
    engine.zero_grad()


def set_gradient(engine: Any, run: Run) -> None:
    from hf_zero import utils

    backward(engine, run, 2)
    drain(engine)
    parameter = dict(engine.module.named_parameters())["head.weight"]
    utils.safe_set_full_grad(parameter, utils.safe_get_full_grad(parameter) * 0.5)
    engine.step()


def set_rate(engine: Any, run: Run) -> None:
    backward(engine, run, 2)
    drain(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5
    engine.step()


def set_master_and_moment(engine: Any, run: Run) -> None:
    from hf_zero import utils

    backward(engine, run, 2)
    drain(engine)
    parameter = dict(engine.module.named_parameters())["head.weight"]
    utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter) + 1.0)
    other = dict(engine.module.named_parameters())["head.bias"]
    utils.safe_set_full_optimizer_state(
        other, torch.full(other.ds_shape if hasattr(other, "ds_shape") else other.shape, 0.25), "exp_avg_sq"
    )
    engine.step()


def second_backward(engine: Any, run: Run) -> None:
    loss = CASES["odd_mlp"].forward(engine, batch(run, 2))
    engine.backward(loss, retain_graph=True)
    drain(engine)
    engine.backward(loss)
    engine.step()


def broken_backward(engine: Any, run: Run) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken on purpose")

    first = next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))
    handle = first.register_forward_hook(lambda module, args, output: Break.apply(output))
    loss = CASES["odd_mlp"].forward(engine, batch(run, 2))
    handle.remove()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engine.backward(loss)
    drain(engine)


BETWEEN = {
    act.__name__: act for act in (nothing, zero_grad, set_gradient, set_rate, set_master_and_moment, second_backward, broken_backward)
}


def _between(stage: int, dtype: str, names: list[str], ways: list[str]) -> tuple[list[str], dict[str, int]]:
    """What differs, and how many steps on copies were taken back."""
    run, wrong, dropped = Run(stage=stage, dtype=dtype), [], dict.fromkeys(names, 0)
    for name in names:
        expected = play(run, PLAIN, "none", BETWEEN[name])
        for label in ways:
            with counted() as counts:
                found = play(run, WAYS[label], "full", BETWEEN[name])
            wrong += [f"{name}, {label}: {key}" for key in differing(found, expected)]
            wrong += [] if counts["kept"] else [f"{name}, {label}: no step on copies was kept"]
            dropped[name] += counts["made"] - counts["kept"]
    return wrong, dropped


def check_between(stage: int, dtype: str, ways: list[str], seconds: float) -> None:
    answers = ranks.run_ranks(_between, 2, stage, dtype, list(BETWEEN), ways, timeout=seconds)
    assert [wrong for wrong, _ in answers] == [[], []]
    # Not on every rank: the parameter that is changed may lie on one of them.
    dropped = {name: sum(counts[name] for _, counts in answers) for name in BETWEEN}
    assert {name for name, count in dropped.items() if count} == set(BETWEEN) - {"nothing"}


def test_what_happens_between_backward_and_step_counts() -> None:
    check_between(3, "bf16", ["apart"], 120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_happens_between_backward_and_step_counts_everywhere(stage: int, dtype: str) -> None:
    check_between(stage, dtype, list(WAYS) if stage == 3 else list(WAYS)[:2], 500)


# -- clipping and overflow --------------------------------------------------------------------------------------------


def _rolled_back(stage: int, way: str) -> list[str]:
    """Some steps clip and some do not; one overflows."""
    wrong = []
    for run in (Run(stage=stage, dtype="bf16", clip=2.0), Run(stage=stage, dtype="fp16", clip=2.0, scale_power=18)):

        def clip_some(engine: Any, run: Run) -> None:
            for step in range(2, 6):
                loss = CASES["odd_mlp"].forward(engine, batch(run, step))
                engine.backward(loss * (40.0 if step % 2 else 0.01))
                drain(engine)
                engine.step()

        with counted() as counts:
            found = play(run, WAYS[way], "full", clip_some)
        wrong += [f"{run.dtype}: {key}" for key in differing(found, play(run, PLAIN, "none", clip_some))]
        if not 0 < counts["kept"] < counts["made"]:
            wrong.append(f"{run.dtype}: {counts}")
    return wrong


@pytest.mark.parametrize(("stage", "way"), [pytest.param(1, "host", marks=pytest.mark.slow), (3, "apart")])
def test_a_step_that_clips_or_overflows_is_taken_back(stage: int, way: str) -> None:
    assert ranks.run_ranks(_rolled_back, 2, stage, way) == [[], []]


# -- between step and forward -----------------------------------------------------------------------------------------


@contextmanager
def slowly() -> Iterator[None]:
    """Every unit's update takes a while, so that whoever does not wait for it sees old values."""
    run = updates.UnitUpdate.run

    def slow(self: Any) -> None:
        time.sleep(0.02)
        run(self)

    with mock.patch.object(updates.UnitUpdate, "run", slow):
        yield


def _readers(folder: str) -> dict[str, Callable[[Any], Any]]:
    from hf_zero import utils, zero

    def gathered(engine: Any) -> Any:
        with zero.GatheredParameters(list(engine.module.parameters())):
            return [parameter.detach().clone() for parameter in engine.module.parameters()]

    def parameter(engine: Any) -> Any:
        return list(engine.module.parameters())[-1]

    def evaluated(engine: Any) -> Any:
        with torch.no_grad():
            return CASES["odd_mlp"].forward(engine, batch(Run(dtype="bf16"), 5))

    def loaded(engine: Any) -> Any:
        engine.save_checkpoint(folder, tag="here")
        engine.load_checkpoint(folder, tag="here")
        return gathered(engine)

    return {
        "gathered": gathered,
        "master": lambda engine: utils.safe_get_full_fp32_param(parameter(engine)),
        "moment": lambda engine: utils.safe_get_full_optimizer_state(parameter(engine), "exp_avg"),
        "local moment": lambda engine: utils.safe_get_local_optimizer_state(parameter(engine), "exp_avg_sq"),
        "state": lambda engine: [dict(state) for state in engine.optimizer.state.values()],
        "state dict": lambda engine: list(engine.optimizer.state_dict()["state"].values()),
        "evaluated": evaluated,
        "checkpoint": loaded,
        "consolidated": lambda engine: list((engine._zero3_consolidated_16bit_state_dict() or {}).values()),
    }


FILES = (True, {"offload_optimizer": {"device": "nvme", "nvme_path": "{nvme}"}})


def _between_steps(folder: str, labels: list[str]) -> list[str]:
    run, wrong = Run(stage=3, dtype="bf16"), []

    def read(way: tuple[bool, dict[str, Any]], mode: str) -> tuple[dict[str, Any], int]:
        with blocks_of(way) as blocks, slowly(), record_labels() as labels:
            engine = make(run, blocks, mode)
            found = {}
            for step, (name, reader) in enumerate(_readers(folder).items()):
                backward(engine, run, step)
                engine.step()
                found[name] = torch.utils._pytree.tree_map(torch.clone, reader(engine))
            destroy(engine)
            del engine
            gc.collect()
            return found, sum(label.startswith("hf_zero::await_update") for label in labels)

    expected, _ = read(PLAIN, "none")
    for label in labels:
        found, waits = read({**WAYS, "nvme": FILES}[label], "forward")
        different = [name for name in expected if not _same(found[name], expected[name])]
        wrong += [f"{label}: {different}"] if different else []
        wrong += [] if waits else [f"{label}: nobody waited"]
    return wrong


def _same(mine: Any, theirs: Any) -> bool:
    mine, theirs = torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs)
    return len(mine) == len(theirs) and all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("labels", [["apart, parameters too", "nvme"], pytest.param(["host", "apart"], marks=pytest.mark.slow)])
def test_readers_between_step_and_forward_wait(tmp_path: Any, labels: list[str]) -> None:
    assert ranks.run_ranks(_between_steps, 2, str(tmp_path), labels) == [[], []]


# -- failure and memory -----------------------------------------------------------------------------------------------


def _failure(forward: bool) -> str:
    run = Run(stage=3, dtype="bf16")
    with blocks_of(WAYS["apart, parameters too"]) as blocks:
        engine = make(run, blocks, "forward")
        backward(engine, run, 0)
        engine.step()
        backward(engine, run, 1)
        with mock.patch.object(host_states.HostStates, "open", side_effect=OSError("the disk is gone")):
            engine.step()
            try:
                if forward:
                    backward(engine, run, 2)
                text = "nothing was raised"
            except OSError as error:
                text = str(error)
        destroy(engine)
        del engine
        gc.collect()
    return text


def test_an_update_that_fails_is_told_by_the_next_forward() -> None:
    assert ranks.run_ranks(_failure, 1, True) == ["the disk is gone"]


def test_an_engine_whose_update_fails_can_be_destroyed() -> None:
    assert ranks.run_ranks(_failure, 1, False) == ["nothing was raised"]


def _memory_line(mode: str) -> str:
    from hf_zero.observe import logger

    run = Run(stage=2, dtype="bf16", extra={"memory_breakdown": True})
    with blocks_of(WAYS["host"]) as blocks, mock.patch.object(logger, "log") as log:
        engine = make(run, blocks, mode)
        for step in range(2):
            backward(engine, run, step)
            engine.step()
        destroy(engine)
        del engine
        gc.collect()
    lines = [call.args[1] % call.args[2:] for call in log.call_args_list]
    return next(line for line in lines if line.startswith("step 2 memory"))


def test_memory_breakdown_shows_offloaded_states() -> None:
    line = ranks.run_ranks(_memory_line, 1, "none")[0]
    assert ", optimizer states on host 0.0 MiB" in line


def test_spares_are_reused_and_limited() -> None:
    spares = speculation.Spares(HostMemory(torch.device("cpu")), 6000)
    one, other = torch.zeros(1000), torch.zeros(500)
    taken = spares.take([one, other])
    assert taken is not None and [tensor.numel() for tensor in taken] == [1000, 500] and spares.nbytes == 6000
    assert spares.take([other]) is None
    spares.give(taken)
    assert spares.take([other, one, other]) is None  # and gives back what it had
    again = spares.take([other, one])
    assert again is not None and {tensor.data_ptr() for tensor in again} == {tensor.data_ptr() for tensor in taken}
