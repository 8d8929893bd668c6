"""Tests of the engine on a device, as jobs of ranks: on the pretend accelerator (always) and on a GPU (if there is one)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_zero.offload import host_states
from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.models import CASES, CLASSES, class_loss
from tests.support.offload_runs import blocks_of, train_case, ways
from tests.support.parity import (
    LIMITS,
    Masters,
    Run,
    Trace,
    check,
    check_bitwise,
    check_case,
    difference,
    initialize,
    limits_of,
    reference,
    train,
)

OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


def backend_of(device: str, world: int) -> str:
    """Return the ranks' back end: the device's own if each rank has a device of its own, else gloo."""
    if device == pretend.NAME:
        return network.NAME
    return "nccl" if device == "cuda" and world <= max(1, torch.cuda.device_count()) else "gloo"


def _copies() -> tuple[int, int]:
    """Return the pretend accelerator's counts: of copies beside the computation, and of copies that could not be."""
    return (pretend.late_copies(), pretend.pageable_copies()) if pretend.loaded() else (0, 0)


def parity(names: list[str], runs: list[Run]) -> None:
    for run in runs:
        for name in names:
            check_case(name, run)


def offload(name: str, runs: list[Run], only: list[str], keys: dict[str, Any] | None = None) -> None:
    """Compare every way to offload with none; check that copies overlap, and that none is from memory that is not page-locked.

    ``keys`` are additional keys of ``zero_optimization``, in all runs.
    """
    torch.set_num_threads(1)
    recorded = pretend.recorded() if pretend.loaded() else 0
    for run in runs:
        plain, _ = train_case(name, run, dict(keys or {}))
        for label, way in ways(run.stage).items():
            if only and label not in only:
                continue
            late, pageable = _copies()
            with blocks_of(way) as blocks, mock.patch.object(host_states, "_PIECE", 100):
                trace, _ = train_case(name, run, {**blocks, **(keys or {})})
            found = difference(trace, plain)
            assert trace.skipped == plain.skipped and found.within(limits_of(run)), f"{label}: {found}"
            if pretend.loaded():
                assert _copies()[0] > late and _copies()[1] == pageable, f"{label}: copies that overlap nothing"
                assert pretend.recorded() == recorded, f"{label}: memory that is reused when the host catches up, not before"


def compiled(runs: list[Run], backend: str = "inductor") -> None:
    """Compare an engine whose blocks are compiled with plain PyTorch whose blocks are compiled."""
    case = CASES["llama"]
    for run in runs:

        def plain(follow: Masters | None = None, run: Run = run) -> Trace:
            model: Any = case.build()
            for block in model.model.layers:
                block.compile(backend=backend)
            return reference(model, case.rows, case.forward, run, ranks.world(), follow)

        engine = initialize(case.build(), run)
        engine.compile(backend=backend)
        trace = train(engine, case.rows, case.forward, run)
        engine.destroy()
        if ranks.rank() == 0:
            check(trace, plain, run, "compiled")


def float8(runs: list[Run]) -> None:
    """Compare an engine with plain PyTorch, both with torchao's float8 products: of the device, emulated elsewhere."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    case = CASES["llama"]
    emulated = ranks.device().type != "cuda"

    def rows(step: int, micro: int, rank: int) -> Any:  # the matrix units take sizes that 16 divides
        tokens = case.rows(step, micro, rank, rows=2)["input_ids"].repeat(2, 8)[:, :16]
        return {"input_ids": tokens, "labels": tokens}

    def chosen(module: nn.Module, path: str) -> bool:
        return "proj" in path and not any(size % 16 for size in getattr(module, "weight", torch.empty(0)).shape)

    def build(gathers: bool) -> Any:
        recipe = Float8LinearConfig(emulate=emulated, enable_fsdp_float8_all_gather=gathers)
        return convert_to_float8_training(case.build(), config=recipe, module_filter_fn=chosen)

    for run in runs:
        for gathers in (False, True) if run.stage == 3 else (False,):

            def plain(follow: Masters | None = None, run: Run = run) -> Trace:
                return reference(build(False), rows, case.forward, run, ranks.world(), follow)

            engine = initialize(build(gathers), run)
            trace = train(engine, rows, case.forward, run)
            engine.destroy()
            if ranks.rank() == 0:
                check(trace, plain, run, f"float8, gathers {gathers}")


def offload_param_alone() -> None:
    """Check that masters stay on the device when only the parameters are offloaded."""
    engine = initialize(CASES["gpt2"].build(), Run(stage=3, extra={"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    train(engine, CASES["gpt2"].rows, CASES["gpt2"].forward, Run(stage=3, steps=1))
    assert {unit.master.device.type for unit in engine.units} == {ranks.device().type}
    assert {unit.shard.device.type for unit in engine.units} == {"cpu"}
    engine.destroy()


def checkpointing() -> None:
    from tests.support.recomputation import check_recomputation, train_transformers

    check_recomputation(Run(stage=3, accumulation=2), "not reentrant")
    run = Run(stage=3, accumulation=2, clip=0.1)
    trace, plain = train_transformers("gpt2", run, True), train_transformers("gpt2", run, None)
    assert difference(trace, plain).within(LIMITS["fp32"])


class _HostInputs(nn.Module):
    """Model whose blocks' inputs are kept on the host, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from hf_zero.deepspeed.served import checkpointing

        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = checkpointing.checkpoint(block, hidden)
        return self.head(hidden)


def cpu_checkpointing() -> None:
    """Check that inputs of blocks in page-locked memory give the same bits, also with dropout, with copies beside the computation."""
    from hf_zero.deepspeed.served import checkpointing
    from tests.support.host_activations import small_tensors_move

    found: list[tuple[Any, int]] = []
    for host in (False, True):
        checkpointing.configure(None, checkpoint_in_cpu=host)
        torch.manual_seed(0)
        engine = initialize(_HostInputs().train(), Run(stage=3, dtype="bf16", steps=3))
        late, pageable = _copies()
        torch.manual_seed(1)
        with small_tensors_move():
            trace = train(engine, CASES["mlp"].rows, class_loss, Run(stage=3, dtype="bf16", steps=3))
        found.append((trace, _copies()[0] - late))
        assert _copies()[1] == pageable
        engine.destroy()
        checkpointing.reset()
    check_bitwise(found[1][0], found[0][0], "cpu_checkpointing")
    # Three inputs are moved in each of three steps; of these, one is still on the device when backward begins, and is not copied back.
    assert not pretend.loaded() or found[1][1] == found[0][1] + 3 * (3 + 2), found


def saves(folder: str, names: list[str] | None = None) -> None:
    from tests.support.background_saves import CONFIGS, check_background_save

    for name in names or CONFIGS:
        check_background_save(f"{folder}/{name}", *CONFIGS[name])


def save(folder: str, extra: dict[str, Any]) -> dict[str, Any]:
    from tests.support.checkpoints import full_state, start, steps

    engine = start(3, "bf16", **extra)
    steps(engine, 0, 2, "bf16")
    state = full_state(engine)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()  # no other call waits for the device: rank 1's current device is another
    engine.destroy()
    return state


def load(folder: str, expected: dict[str, Any], extra: dict[str, Any], stage: int) -> list[str]:
    from tests.support.checkpoints import differences, full_state, start

    engine = start(stage, "bf16", seed=3, **extra)
    engine.load_checkpoint(folder)
    found = differences(full_state(engine), expected)
    engine.destroy()
    return found


def interface() -> None:
    """Check zero.Init, gathered and full values, generation, the traffic log, clocks, memory, a lone forward."""
    import hf_zero
    from hf_zero.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param

    run = Run(
        stage=3,
        dtype="bf16",
        extra={
            "comms_logger": {"enabled": True},
            "wall_clock_breakdown": True,
            "memory_breakdown": True,
            "flops_profiler": {"enabled": True, "profile_step": 1},
        },
    )
    config = run.config()
    with hf_zero.zero.Init(config_dict_or_path=config):
        model = CASES["gpt2"].make()
    first = model.transformer.h[0].mlp.c_fc.weight
    assert first.device == ranks.device() and (first.numel() == 0 or ranks.world() == 1)
    engine = hf_zero.initialize(model=model, config=config)[0]
    for step in range(2):
        loss = engine(**CASES["gpt2"].rows(step, ranks.rank())).loss
        engine.backward(loss)
        assert safe_get_full_grad(first).device == ranks.device()
        engine.step()
    engine.module.eval()
    prompt = torch.randint(3, 60, (2, 4), device=ranks.device())
    assert engine.generate(prompt, max_new_tokens=3 + ranks.rank(), do_sample=False, pad_token_id=0).shape[0] == 2
    value = safe_get_full_fp32_param(first)
    safe_set_full_fp32_param(first, torch.zeros_like(value))
    with hf_zero.zero.GatheredParameters([first], modifier_rank=0):
        assert first.float().abs().sum().item() == 0
        if ranks.rank() == 0:
            first.data.fill_(1.0)
    assert safe_get_full_fp32_param(first).eq(1).all()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert ranks.rank() != 0 or {tensor.device.type for tensor in state.values()} == {"cpu"}
    engine.empty_partition_cache()
    if ranks.device().type == "cpu":  # its memory is not counted
        engine.destroy()
        return
    used = torch.accelerator.memory_allocated(ranks.device())
    engine.destroy()
    assert torch.accelerator.memory_allocated(ranks.device()) < used
