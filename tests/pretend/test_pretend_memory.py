"""Memory on the pretend accelerator: none is taken because the host is ahead, locks are as large as they must be, one device per rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.errors import HostMemoryError
from hf_zero.memory import budget
from hf_zero.memory.buffers import ALIGNMENT, HostMemory, HostPool
from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.models import cast_floats
from tests.support.parity import Run

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())

WIDTH, DEPTH = 128, 12
BLOCK = 4 * WIDTH * WIDTH  # bytes in fp32, more than half of a power of two in whole pages with the biases
CPU = {"device": "cpu"}


def on_devices(function: Callable[..., Any], *args: Any, world: int = 1, group: bool = True) -> list[Any]:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    return ranks.run_ranks(function, world, *args, env=env, timeout=200.0, group=group)


class Deep(nn.Module):
    """Blocks of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


def config(dtype: str = "fp32", **zero: Any) -> dict[str, Any]:
    own = {"hf_zero": {"offload_overlap": zero.pop("overlap", "auto")}}
    return Run(stage=3, dtype=dtype, extra={"zero_optimization": {"stage3_prefetch_bucket_size": 1, **zero}, **own}).config()


def start(settings: dict[str, Any], model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return hf_zero.initialize(model=model if model is not None else Deep(), config=settings)[0]


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        dtype = engine.precision.param_dtype or torch.float32
        batch = cast_floats({"x": torch.randn(2, WIDTH)}, dtype)["x"].to(engine.collectives.topology.device)
        engine.backward(engine(batch).float().square().mean())
        engine.step()


# -- a host that is ahead of its device -------------------------------------------------------------------------------------


def _reserved(zero: dict[str, Any]) -> None:
    recorded = pretend.recorded()
    engine = start(config(**zero))
    torch.get_device_module(pretend.NAME).empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    train(engine, 2)
    used, held = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    assert held < used + 2 * BLOCK, f"{held / BLOCK:.1f} blocks are held from the device, {used / BLOCK:.1f} are used"
    assert pretend.recorded() == recorded, "memory that is given back through record_stream waits for the host"
    engine.destroy()


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_param": CPU},
        {"offload_param": CPU, "offload_optimizer": CPU, "overlap": "none"},
        {"offload_param": CPU, "offload_optimizer": CPU, "overlap": "full"},
    ],
    ids=["parameters", "both", "both, overlapped"],
)
def test_buffers_are_used_again_however_far_the_host_is_ahead(zero: dict[str, Any]) -> None:
    on_devices(_reserved, zero)


# -- devices ----------------------------------------------------------------------------------------------------------------


def _one_device(overlap: str) -> None:
    engine = start(config("bf16", offload_param=CPU, offload_optimizer=CPU, overlap=overlap))
    train(engine, 3)
    engine.destroy()
    gc.collect()
    assert pretend.contexts() == {ranks.device().index}
    assert torch.accelerator.current_device_index() == ranks.device().index


@pytest.mark.fast_rows("full")
@pytest.mark.parametrize("overlap", ["none", "full"])
def test_a_rank_whose_script_made_the_group_works_on_its_device_alone(overlap: str) -> None:
    """The ranks' harness makes the process group and chooses no device; updates run in a thread, which begins with none."""
    on_devices(_one_device, overlap, world=2)


def _chosen() -> None:
    torch.accelerator.set_device_index(1 - ranks.rank())  # rank 0 has the second device; what rank 1 chose is what nobody chose
    hf_zero.init_distributed()
    engine = start(config(offload_param=CPU))
    assert torch.accelerator.current_device_index() == engine.collectives.topology.device.index == 1
    train(engine, 1)
    assert pretend.contexts() == {1}
    engine.destroy()


def test_a_device_that_the_script_has_chosen_stays() -> None:
    on_devices(_chosen, world=2)


# -- page-locked memory -------------------------------------------------------------------------------------------------------


def _initialize(dtype: str, zero: dict[str, Any]) -> None:
    settings = config(dtype, offload_param=CPU, **zero)
    pretend.reset_counters()
    base = pretend.locked_bytes()
    with hf_zero.zero.Init(config_dict_or_path=settings):
        model = Deep()
    shards = pretend.locked_bytes() - base
    size = sum(param.ds_numel for param in model.parameters()) * (4 if dtype == "fp32" else 2)
    assert size <= shards <= size + 2 * DEPTH * ALIGNMENT
    engine = start(settings, model)
    del model
    kept, peak = pretend.locked_bytes() - base, pretend.peak_locked_bytes() - base
    assert size <= kept <= size + (DEPTH + 1) * ALIGNMENT, "what zero.Init has locked is given back"
    built = shards * (1 if dtype == "fp32" else 2)  # until the model is complete its shards have the type that constructors gave
    assert peak <= max(kept, built) + size // DEPTH + 2 * ALIGNMENT, f"{peak} bytes were locked, {kept} are kept"
    train(engine, 2)
    engine.destroy()
    del engine
    gc.collect()
    assert pretend.locked_bytes() == base


@pytest.mark.parametrize(("dtype", "zero"), [("fp32", {}), ("bf16", {"offload_optimizer": CPU})])
def test_shards_of_init_go_as_their_successors_come(dtype: str, zero: dict[str, Any]) -> None:
    on_devices(_initialize, dtype, zero)


def _budget() -> None:
    """Free memory for a quarter of the model: enough for one whose shards ``zero.Init`` has on the host already."""
    settings, size = config(offload_param=CPU), DEPTH * (BLOCK + 4 * WIDTH)
    with hf_zero.zero.Init(config_dict_or_path=settings):
        model = Deep()
    with mock.patch.object(budget, "free_memory", lambda: budget.FreeMemory(size // 4, "that is what there is")):
        start(settings, model).destroy()
        with pytest.raises(HostMemoryError, match=r"needs 0\.8 MiB of host memory .* \(parameters 0\.8 MiB on the first"):
            start(settings, Deep())


def test_the_budget_counts_on_what_init_will_give_back() -> None:
    on_devices(_budget)


def _saves(folder: str) -> None:
    settings = {**config(), "checkpoint": {"writer": {"decoupled": True}}}
    engine = start(settings)
    train(engine, 1)
    pretend.reset_counters()
    base, locked = pretend.locked_bytes(), []
    for step in range(3):
        engine.save_checkpoint(folder, tag=f"save{step}")
        locked.append(pretend.locked_bytes() - base)
    engine.wait_for_checkpoint()
    size = 3 * sum(param.numel() for param in Deep().parameters()) * 4  # masters and two moments
    assert size <= locked[0] <= size + 64 * 1024, f"{locked[0]} bytes are locked for {size}"
    assert len(set(locked)) == 1 and pretend.peak_locked_bytes() - base == locked[0]
    engine.destroy()
    assert pretend.locked_bytes() == base


def test_saves_in_the_background_use_one_block_of_their_size(tmp_path: Path) -> None:
    on_devices(_saves, str(tmp_path))


def _waiting_states() -> None:
    engine = start(config("bf16"))
    train(engine, 1)
    pretend.reset_counters()
    base, locked, size = pretend.locked_bytes(), [], 0
    for _ in range(3):
        engine.offload_states()
        size = engine.offloaded_states.nbytes
        locked.append(pretend.locked_bytes() - base)
        engine.reload_states(non_blocking=True)
        train(engine, 1)
    tensors = 5 * (DEPTH + 1)
    assert size <= locked[0] <= size + tensors * ALIGNMENT, f"{locked[0]} bytes are locked for {size}"
    assert len(set(locked)) == 1 and pretend.peak_locked_bytes() - base == locked[0]
    engine.destroy()
    assert pretend.locked_bytes() == base


def test_states_that_wait_on_the_host_use_the_same_memory_each_time() -> None:
    on_devices(_waiting_states)


def _inputs() -> None:
    from hf_zero.activation_checkpointing.host_activations import HostActivations

    recorded, base = pretend.recorded(), pretend.locked_bytes()
    device, store = ranks.device(), HostActivations()
    pages = 5  # of 4 KiB: torch's allocator would take 8

    def there_and_back(store: HostActivations, scale: int) -> None:
        values = [torch.full((pages * 1024 * scale,), float(index), device=device) for index in range(6)]
        saved = []
        for index in range(6):
            store.advance()
            saved.append(store.save(values[index]))
        del values
        for index in reversed(range(6)):
            assert store.load(saved[index]).eq(index).all()
            assert store.load(saved[index]).eq(index).all(), "a second backward"

    for _ in range(3):
        there_and_back(store, 1)
        assert pretend.locked_bytes() - base == 5 * pages * ALIGNMENT, "all but the last, which stays"
    there_and_back(store, 2)
    there_and_back(store, 1)
    assert pretend.locked_bytes() - base == 10 * pages * ALIGNMENT, "larger blocks came in exchange for smaller ones"
    assert pretend.recorded() == recorded
    del store
    gc.collect()
    assert pretend.locked_bytes() == base


def test_inputs_on_the_host_use_the_blocks_of_the_last_step() -> None:
    on_devices(_inputs)


# -- blocks that come and go, on any machine ------------------------------------------------------------------------------------


def test_a_pool_never_holds_more_blocks_than_were_in_use() -> None:
    pool = HostPool(memory := HostMemory(torch.device("cpu")))
    sizes = [3, 1, 7, 2, 9, 9, 4, 1, 12, 5]
    for round_ in range(40):
        blocks = [pool.take(ALIGNMENT * size * (1 + round_ * 7 % 5)) for size in sizes]
        assert len({block.data_ptr() for block in blocks}) == len(sizes)
        assert memory.nbytes <= len(sizes) * 5 * 12 * ALIGNMENT
        for block in blocks:
            pool.give(block)
    del blocks, block
    pool.take(0)
    assert len(pool._free) == len(sizes) - 1


def test_a_pool_leaves_large_blocks_to_those_who_need_them() -> None:
    pool = HostPool(memory := HostMemory(torch.device("cpu")))
    for block in [pool.take(ALIGNMENT), pool.take(100 * ALIGNMENT)]:
        pool.give(block)
    del block
    small, large = pool.take(2 * ALIGNMENT), pool.take(100 * ALIGNMENT)
    assert memory.nbytes == 102 * ALIGNMENT and (small.numel(), large.numel()) == (2 * ALIGNMENT, 100 * ALIGNMENT)
    pool.give(large)
    assert pool.take(1).data_ptr() == large.data_ptr(), "where nothing else is free a large one serves"
