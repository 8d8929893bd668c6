"""Test that an engine without references is collected, with its model and everything that they hold, without ``destroy``."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import DTYPES, Run, initialize, micro_step


def _train_and_drop(run: Run, divided: bool, keep: list[Any]) -> dict[str, weakref.ref[Any]]:
    import hf_zero

    case = CASES["mlp"]
    with hf_zero.zero.Init(config_dict_or_path=run.config(), enabled=divided):
        model = case.build()
    model.register_forward_hook(lambda module, inputs, output: module.__dict__.update(last=output))  # a graph inside of the model
    engine = initialize(model, run)
    for step in range(2):
        batch = case.rows(step, 0, ranks.rank())
        micro_step(engine, {**batch, "inputs": batch["inputs"].to(DTYPES[run.dtype])}, class_loss, 0)
    engine(case.rows(2, 0, ranks.rank())["inputs"].to(DTYPES[run.dtype]))  # and a forward that no backward follows
    unit = engine.units[0]
    state = next(value for value in engine.optimizer.inner.state.values() if "exp_avg" in value)
    held = {"engine": engine, "model": model, "runtime": engine.runtime, "optimizer": engine.optimizer, "inner": engine.optimizer.inner}
    held |= {"unit": unit, "parameter": next(model.parameters()), "buffer": unit.whole.flat, "shard": unit.shard, "master": unit.master}
    held |= {"moment": state["exp_avg"]}
    if keep is not None and run.stage == 3:
        keep.append(next(model.parameters()).detach())  # a tensor of the script's own holds nothing else
    return {name: weakref.ref(value) for name, value in held.items()}


def _is_collected() -> None:
    keep: list[Any] = []
    for stage in range(4):
        for divided in (False, True) if stage == 3 else (False,):
            for dtype in ("fp32", "bf16"):
                found = _train_and_drop(Run(stage, dtype=dtype), divided, keep)
                gc.collect()
                gc.collect()  # the first one frees the graph, which holds parameters
                alive = [name for name, reference in found.items() if reference() is not None]
                assert not alive, f"stage {stage}, zero.Init {divided}, {dtype}: {alive} are still there"


def _model_alone_still_trains() -> None:
    """Keep only the model and the optimizer, and no reference to the engine: its hooks still work."""
    for stage in (1, 3):
        case = CASES["mlp"]
        engine = initialize(case.build(), Run(stage))
        model: nn.Module = engine.module
        seen = []
        for _ in range(2):
            loss = class_loss(model, case.rows(0, 0, ranks.rank()))
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        assert seen[1] < seen[0]
        loss = class_loss(model, case.rows(0, 0, ranks.rank()))
        del engine
        gc.collect()
        (gradient,) = torch.autograd.grad(loss, [model.head.bias], allow_unused=True) if stage == 1 else (torch.ones(1),)
        assert gradient is not None and bool(gradient.abs().sum() > 0)


def _tensors_of_graphs() -> int:
    gc.collect()
    return sum(isinstance(found, torch.Tensor) and found.grad_fn is not None for found in gc.get_objects())


def _graphs_are_freed() -> None:
    """Drop the outputs of a forward, with the keys and values of all layers or without; with a backward or without."""
    case = CASES["gpt2"]
    before = _tensors_of_graphs()  # torch.compile's caches of earlier jobs hold some
    for stage in (0, 3):
        for caches in (False, True):
            model: Any = case.build()
            model.config.use_cache = caches
            engine = initialize(model, Run(stage))
            for trains in (True, False, True):
                loss = engine(**case.rows(0, 0, ranks.rank())).loss
                if trains:
                    engine.backward(loss)
                    engine.step()
                del loss
                assert _tensors_of_graphs() <= before, f"stage {stage}, caches {caches}, trains {trains}"
            engine.destroy()


def test_a_graph_is_freed_with_the_outputs_of_its_forward() -> None:
    ranks.run_ranks(_graphs_are_freed, 2)


def test_a_dropped_engine_is_collected_without_destroy() -> None:
    ranks.run_ranks(_is_collected, 2)


def test_a_model_outlives_the_name_of_its_engine() -> None:
    ranks.run_ranks(_model_alone_still_trains, 2)
