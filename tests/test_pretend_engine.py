"""The engine on the pretend accelerator: every copy, wait and record_stream that a device needs, and the numbers of a CPU.

A job fails when the device complains (``tests/ranks.py`` asks it), so parity alone is not what is checked here: reading what a stream
may still be writing, freeing what one may still read, and overwriting what is being copied are errors of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests import pretend, ranks
from tests.models import CASES, CLASSES, class_loss
from tests.offload_runs import blocks_of, train_case, ways
from tests.parity import LIMITS, Run, check_bitwise, check_case, difference, initialize, train
from tests.pretend import network

pytestmark = pytest.mark.skipif(
    pretend.compiler() is None, reason="the pretend accelerator is built with a C++ compiler, and none was found"
)

STAGES = (0, 1, 2, 3)
BACKENDS = {"gloo": "staged through the host", network.NAME: "ordered as nccl orders it"}


def on_devices(function: Callable[..., Any], *args: Any, backend: str = network.NAME, world: int = 2, **options: Any) -> list[Any]:
    """Calls ``function`` on ``world`` ranks, each with a pretend device."""
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": backend}
    return ranks.run_ranks(function, world, *args, env=env, timeout=200.0, **options)


# -- parity ------------------------------------------------------------------------------------------------------------


def _parity(names: list[str], runs: list[Run]) -> None:
    for run in runs:
        for name in names:
            check_case(name, run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt2_trains_as_on_the_cpu(backend: str) -> None:
    on_devices(_parity, ["gpt2"], [Run(stage=stage, accumulation=2, clip=0.5) for stage in STAGES], backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit(stage: int, dtype: str) -> None:
    """Over gloo, which adds up in fp32 as the reference does; nccl adds in the type of the message."""
    names = ["gpt2", "llama", "tied_coder", "mlp"]
    on_devices(_parity, names, [Run(stage=stage, dtype=dtype, accumulation=2, clip=0.5)], backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_other_models(stage: int) -> None:
    names = ["llama", "t5", "bart", "albert", "mixtral", "vit", "conv", "tied_coder", "mlp", "mostly_frozen"]
    on_devices(_parity, [name for name in names if name in CASES], [Run(stage=stage), Run(stage=stage, accumulation=2, clip=0.1)])


# -- offload -----------------------------------------------------------------------------------------------------------


def _offload(name: str, runs: list[Run], only: list[str]) -> None:
    """Every way to offload against none: late copies happen, and none of them from memory that is not page-locked."""
    torch.set_num_threads(1)
    for run in runs:
        plain, _ = train_case(name, run, {})
        for label, way in ways(run.stage).items():
            if only and label not in only:
                continue
            late, pageable = pretend.late_copies(), pretend.pageable_copies()
            with blocks_of(way) as blocks:
                trace, _ = train_case(name, run, blocks)
            found = difference(trace, plain)
            assert trace.skipped == plain.skipped and found.within(LIMITS[run.dtype]), f"{label}: {found}"
            assert pretend.late_copies() > late and pretend.pageable_copies() == pageable, f"{label}: copies that overlap nothing"


def test_offload_changes_nothing() -> None:
    runs = [Run(stage=3, dtype="bf16"), Run(stage=2, accumulation=2, clip=0.5)]
    on_devices(_offload, "mlp", runs, ["cpu, apart", "parameters cpu, apart", "both cpu, apart", "both nvme, some kept, apart"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "albert", "mlp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_way_to_offload(stage: int, dtype: str, name: str) -> None:
    on_devices(_offload, name, [Run(stage=stage, dtype=dtype), Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1)], [])


def _offload_param_alone() -> None:
    """Masters stay on the device when only the parameters leave it."""
    engine = initialize(CASES["gpt2"].build(), Run(stage=3, extra={"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    train(engine, CASES["gpt2"].rows, CASES["gpt2"].forward, Run(stage=3, steps=1))
    assert {unit.master.device.type for unit in engine.units} == {pretend.NAME}
    assert {unit.shard.device.type for unit in engine.units} == {"cpu"}
    engine.destroy()


def test_masters_stay_where_only_parameters_are_offloaded() -> None:
    on_devices(_offload_param_alone)


# -- mistakes are noticed ----------------------------------------------------------------------------------------------


def _without(target: str, replacement: Any, way: str, run: Run) -> bool:
    """Whether a mistake in the package shows: in an error, in a complaint, or in the numbers."""
    from hf_zero.offload import copies

    plain, _ = train_case("mlp", run, {})
    owner, name = target.split(".")
    try:
        with blocks_of(ways(run.stage)[way]) as blocks, mock.patch.object(getattr(copies, owner), name, replacement):
            trace, _ = train_case("mlp", run, blocks)
    except Exception:  # whatever it leads to
        pretend.complaints()
        return True
    return bool(pretend.complaints()) or not difference(trace, plain).within(LIMITS[run.dtype])


def _nothing(*_args: Any) -> None: ...


@pytest.mark.parametrize("target", ["CopyLane.use", "Mark.wait", "Mark.order"])
def test_a_forgotten_wait_is_noticed(target: str) -> None:
    outcomes = ranks.observe_ranks(
        _without,
        1,
        target,
        _nothing,
        "both cpu, apart",
        Run(stage=3, dtype="bf16"),
        env={"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME},
    )
    assert outcomes[0].value is True or not outcomes[0].ok


# -- the rest of the engine: jobs of other files, on a device -----------------------------------------------------------


def _checkpointing() -> None:
    from tests.test_parity_checkpointing import _plain, _train_transformers

    _plain(Run(stage=3, accumulation=2), "not reentrant")
    run = Run(stage=3, accumulation=2, clip=0.1)
    trace, plain = _train_transformers("gpt2", run, True), _train_transformers("gpt2", run, None)
    assert difference(trace, plain).within(LIMITS["fp32"])


def test_activation_checkpointing() -> None:
    on_devices(_checkpointing)


class _HostInputs(nn.Module):
    """Blocks whose inputs rest on the host, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from hf_zero.compat import checkpointing

        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = checkpointing.checkpoint(block, hidden)
        return self.head(hidden)


def _cpu_checkpointing() -> None:
    """Inputs of blocks rest in page-locked memory: the same bits, dropout too, with copies beside the computation."""
    from hf_zero.compat import checkpointing

    found: list[tuple[Any, int]] = []
    for host in (False, True):
        checkpointing.configure(None, checkpoint_in_cpu=host)
        torch.manual_seed(0)
        engine = initialize(_HostInputs().train(), Run(stage=3, dtype="bf16"))
        late, pageable = pretend.late_copies(), pretend.pageable_copies()
        torch.manual_seed(1)
        trace = train(engine, CASES["mlp"].rows, class_loss, Run(stage=3, dtype="bf16"))
        found.append((trace, pretend.late_copies() - late))
        assert pretend.pageable_copies() == pageable
        engine.destroy()
        checkpointing.reset()
    check_bitwise(found[1][0], found[0][0], "cpu_checkpointing")
    assert found[1][1] >= found[0][1] + 2 * 3 * 4, "inputs of four blocks, there and back, in three steps"


def test_cpu_checkpointing() -> None:
    on_devices(_cpu_checkpointing)


def _saves(folder: str) -> None:
    from tests.test_checkpoint_background import CONFIGS, _train_on

    for name, (stage, extra) in CONFIGS.items():
        _train_on(f"{folder}/{name}", stage, extra)


def test_saving_in_the_background(tmp_path: Path) -> None:
    on_devices(_saves, str(tmp_path))


def _save(folder: str, extra: dict[str, Any]) -> dict[str, Any]:
    from tests.checkpoints import full_state, start, steps

    engine = start(3, "bf16", **extra)
    steps(engine, 0, 2, "bf16")
    state = full_state(engine)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()  # nothing else waits for the device: the current one of rank 1 is another
    engine.destroy()
    return state


def _load(folder: str, expected: dict[str, Any], extra: dict[str, Any], stage: int) -> list[str]:
    from tests.checkpoints import differences, full_state, start

    engine = start(stage, "bf16", seed=3, **extra)
    engine.load_checkpoint(folder)
    found = differences(full_state(engine), expected)
    engine.destroy()
    return found


IN_BACKGROUND = {"checkpoint": {"writer": {"decoupled": True}}}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


def test_checkpoints_travel_between_device_and_host(tmp_path: Path) -> None:
    state = on_devices(_save, str(tmp_path / "device"), IN_BACKGROUND)[0]
    assert ranks.run_ranks(_load, 2, str(tmp_path / "device"), state, {}, 2) == [[], []]
    assert on_devices(_load, str(tmp_path / "device"), state, OFFLOADED, 3) == [[], []]
    state = ranks.run_ranks(_save, 2, str(tmp_path / "host"), {})[0]
    assert on_devices(_load, str(tmp_path / "host"), state, {}, 3) == [[], []]


# -- a rank whose device is not the current one (nobody called set_device) ----------------------------------------------


def _other_device() -> None:
    from hf_zero.activation_checkpointing.random_states import random_states, seed_model_parallel
    from hf_zero.checkpoint.background import Background
    from hf_zero.checkpoint.tensor_file import Entry
    from hf_zero.comm.traffic import DeviceWatch

    device = ranks.device()
    assert torch.accelerator.current_device_index() != device.index
    values = torch.arange(8.0, device=device)
    copied = Background(0, 10.0).copy({"file": [Entry("values", torch.float32, (8,), (values,))]})[1]
    assert copied["file"][0].pieces[0].tolist() == list(range(8))

    watch = DeviceWatch(device)
    begin = watch.now()
    values.mul_(2)
    assert watch.seconds(begin, watch.now()) >= 0

    seed_model_parallel(3, ranks.rank())
    with random_states().fork():
        split = torch.rand(4, device=device)
    whole = torch.rand(4, device=device)
    seed_model_parallel(3, ranks.rank())
    assert torch.equal(torch.rand(4, device=device), whole)
    with random_states().fork():
        assert torch.equal(torch.rand(4, device=device), split) and not torch.equal(split, whole)


def _on_rank_1(work: Callable[[], None]) -> None:
    if ranks.rank() == 1:
        work()


def test_a_device_that_is_not_the_current_one() -> None:
    on_devices(_on_rank_1, _other_device)


# -- names and numbers of the public interface --------------------------------------------------------------------------


def _interface() -> None:
    """zero.Init, gathered and full values, generation, the traffic log, clocks, memory, a lone forward."""
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
    assert first.device == ranks.device() and first.numel() == 0
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
    used = torch.accelerator.memory_allocated(ranks.device())
    engine.destroy()
    assert torch.accelerator.memory_allocated(ranks.device()) < used


@pytest.mark.parametrize("backend", BACKENDS)
def test_public_interface(backend: str) -> None:
    on_devices(_interface, backend=backend)


def _facts() -> None:
    from hf_zero.compat.logs import see_memory_usage
    from hf_zero.environment import environment_facts
    from hf_zero.launch.command import _devices

    assert environment_facts()["devices"][f"{pretend.NAME}:1"] == "Pretend accelerator 1, 2.0 GiB"
    assert _devices() == 2
    see_memory_usage("here", force=True)


def test_facts_of_any_accelerator() -> None:
    on_devices(_facts)
