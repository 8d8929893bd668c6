"""Test that an engine without references is collected, with its model and all it holds, and that training keeps nothing of a step."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.utils import safe_get_full_fp32_param
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import DTYPES, Run, initialize, micro_step

OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


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


def _counts() -> dict[str, int]:
    gc.collect()
    return {"objects": len(gc.get_objects()), "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def _nothing_is_kept(folder: Path) -> None:
    """Train, evaluate, read, generate and save; compare how many objects each of the equal parts of a run adds.

    A part may add objects once (a module that is imported, a size that is new); what a step keeps is added by every part.
    """
    case, steps = CASES["gpt2"], 3
    runs = [Run(0), Run(2, dtype="fp16"), Run(3, dtype="bf16", accumulation=2), Run(3, extra=OFFLOADED)]
    for number, run in enumerate(runs):
        engine: Any = initialize(case.build(), run)
        parameter = next(engine.module.parameters())

        def part(engine: Any = engine, run: Run = run, parameter: nn.Parameter = parameter, number: int = number) -> dict[str, int]:
            for step in range(steps):
                for micro in range(run.accumulation):
                    micro_step(engine, case.rows(step, micro, ranks.rank()), case.forward, micro)
                engine(**case.rows(step, 0, ranks.rank()))  # a forward that no backward follows
            engine.get_global_grad_norm()
            safe_get_full_fp32_param(parameter)
            engine.eval()
            with torch.no_grad():
                engine.module.generate(case.rows(0, 0, ranks.rank())["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
            engine.train()
            engine.save_checkpoint(str(folder / str(number)), tag="last")
            engine.save_16bit_model(str(folder / str(number)))
            return _counts()

        found = [part() for _ in range(5)]
        for name in found[0]:
            added = [after[name] - before[name] for before, after in zip(found[:-1], found[1:], strict=True)]
            assert min(added) <= 0, f"{run}: each {steps} steps add {added} {name}"
        engine.destroy()


def test_a_step_keeps_nothing_of_itself(tmp_path: Path) -> None:
    ranks.run_ranks(_nothing_is_kept, 2, tmp_path)


def test_a_graph_is_freed_with_the_outputs_of_its_forward() -> None:
    ranks.run_ranks(_graphs_are_freed, 2)


def test_a_dropped_engine_is_collected_without_destroy() -> None:
    ranks.run_ranks(_is_collected, 2)


def test_a_model_outlives_the_name_of_its_engine() -> None:
    ranks.run_ranks(_model_alone_still_trains, 2)
