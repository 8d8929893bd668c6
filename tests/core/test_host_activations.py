"""Test saved tensors on the host: which ones are moved, and when; strides of the restored tensors; writes to the originals meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.activation_checkpointing import host_activations
from hf_zero.activation_checkpointing.host_activations import (
    HostActivations,
    SavedHere,
    SavedOnHost,
    is_resident,
    mark_resident,
    moves_to_host,
)
from hf_zero.core.schedule.runtime import SavedTensors
from hf_zero.errors import StateError
from tests.support import host_activations as flags
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize
from tests.support.versions import has


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    with flags.small_tensors_move():
        yield


def hosts(store: HostActivations) -> list[list[bool]]:
    """Return, for each group and piece, whether it has a copy on the host."""
    return [[piece.host is not None for piece in group.alive()] for group in store._groups]


def held(saved: SavedOnHost | SavedHere) -> bool:
    """Return whether a saved tensor still has memory on its device."""
    assert isinstance(saved, SavedOnHost)
    return saved.piece.source is not None or saved.piece.fetched is not None


def test_two_groups_are_on_the_device_in_forward_and_in_backward() -> None:
    store = HostActivations(copies_always=True)
    values, saved = [torch.randn(8) for _ in range(5)], []
    for value in values:
        store.advance()
        saved.append(store.save(value))
        assert sum(map(held, saved)) <= 2
    assert hosts(store) == [[True]] * 4 + [[False]], "the last one, which backward wants first, is not moved"
    assert [held(one) for one in saved] == [False] * 3 + [True] * 2
    for index in reversed(range(5)):
        assert torch.equal(store.load(saved[index]), values[index])
        assert [held(one) for one in saved[:index]] == [False] * (index - 1) + [True] * min(index, 1), "the next is on its way, not all"


GEOMETRIES: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(6, 8).t(),
    "heads": lambda: torch.randn(2, 5, 12).view(2, 5, 3, 4).transpose(1, 2),
    "one of three": lambda: torch.randn(4, 5, 24)[..., 8:16],
    "small part": lambda: torch.randn(64, 64)[3, 5:11],
    "small part, apart": lambda: torch.randn(64, 64)[::16, ::32],
    "small part, apart, transposed": lambda: torch.randn(64, 64)[::16, ::32].t(),
    "expanded": lambda: torch.randn(4, 1, 3).expand(4, 7, 3),
    "small part, expanded": lambda: torch.randn(64, 64)[:1, :4].expand(5, 4),
    "bytes seen as numbers": lambda: torch.randn(16).view(torch.int64),
    "truth values": lambda: torch.rand(40) < 0.5,
    "one number": lambda: torch.randn(()),
    "complex": lambda: torch.randn(6, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_strides_and_values_come_back(name: str) -> None:
    """Check strides and values, because kernels choose the order of their sums by strides."""
    store, tensor = HostActivations(copies_always=True), GEOMETRIES[name]()
    saved = store.save(tensor)
    assert isinstance(saved, SavedOnHost)
    for _ in range(2):
        store.advance()
        store.save(torch.randn(4))
    assert not held(saved)
    for _ in range(2):  # a second backward
        found = store.load(saved)
        assert found.stride() == tensor.stride() and found.shape == tensor.shape and found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


STAY: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.randn(8)),
    "overlapping windows": lambda: torch.randn(4000).as_strided((5, 4), (2, 1)),
    "conjugate": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "empty": lambda: torch.randn(8)[:0],
    "sparse": lambda: torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    store, tensor = HostActivations(copies_always=True), STAY[name]()
    saved = store.save(tensor)
    assert isinstance(saved, SavedHere)
    assert store.load(saved).shape == tensor.shape


def test_memory_that_is_marked_stays_after_it_was_freed_and_its_views_too() -> None:
    memory = torch.randn(16)
    mark_resident(memory)
    memory.untyped_storage().resize_(0)
    memory.untyped_storage().resize_(64)
    gc.collect()
    view = memory.view(4, 4).t()
    assert is_resident(view) and not is_resident(view.clone())
    assert isinstance(HostActivations(copies_always=True).save(view), SavedHere)


def test_memory_that_several_functions_save_is_moved_once() -> None:
    store, value = HostActivations(copies_always=True), torch.randn(6, 8)
    saved = [store.save(value), store.save(value.t()), store.save(value[1:])]
    store.advance()
    assert len(store._groups[0].alive()) == 1
    store.save(torch.randn(4))
    store.advance()
    assert not any(map(held, saved))
    assert torch.equal(store.load(saved[2]), value[1:]) and held(saved[0]), "two of three still want it"
    assert torch.equal(store.load(saved[1]), value.t()) and torch.equal(store.load(saved[0]), value)
    assert not held(saved[0])


@pytest.mark.parametrize("moved", [False, True])
def test_a_tensor_that_was_written_to_is_an_error_as_without_hooks(moved: bool) -> None:
    store = HostActivations(copies_always=True)
    base = torch.randn(8)
    saved = store.save(base[:4])
    if moved:
        store.advance()
    base.mul_(2)
    store.save(torch.randn(4))
    store.advance()
    with pytest.raises(StateError, match=r"shape \(4,\).*modified by an inplace operation"):
        store.load(saved)
    later = store.save(base)
    assert torch.equal(store.load(later), base), "saved after the write"
    stays = store.save(weight := nn.Parameter(torch.randn(4)))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(StateError, match="modified by an inplace operation"):
        store.load(stays)


def test_memory_goes_with_the_graph() -> None:
    store = HostActivations(copies_always=True)
    saved = [store.save(torch.randn(4))]
    store.advance()
    saved.append(store.save(torch.randn(4)))
    store.advance()
    assert [len(group) for group in hosts(store)] == [1, 1, 0]
    saved.clear()
    store.advance()
    assert hosts(store) == [[]], "groups of graphs that have gone are forgotten"
    resources = next(iter(store._resources.values()))
    first = resources.pool.memory.nbytes
    for _ in range(3):
        kept = store.save(torch.randn(4))
        store.advance()
        del kept
    assert resources.pool.memory.nbytes == first, "their memory on the host is used again"


# -- engines --------------------------------------------------------------------------------------------------------------


def test_hooks_that_only_move_are_known() -> None:
    offloading = pytest.importorskip("trl.models.activation_offloading")
    assert moves_to_host(torch.autograd.graph.save_on_cpu().pack_hook)
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")):
        assert moves_to_host(offloading.OffloadActivations(use_pin_memory=False, use_streams=False).pack_hook)
    assert not moves_to_host(lambda tensor: tensor)


def _always(engine: Any) -> SavedTensors:
    engine.runtime.saved.host.copies_always = True
    saved: SavedTensors = engine.runtime.saved
    return saved


def _other_hooks_get_everything(stage: int) -> None:
    """Check that hooks that may change values get the same tensors as without an engine."""
    case = CASES["llama"]
    packed: list[list[tuple[int, ...]]] = []
    for wraps_engine in (False, True):
        model = flags.llama()
        called = initialize(model, Run(stage=stage)) if wraps_engine else model
        packed.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (packed[-1].append(tuple(tensor.shape)), tensor)[1], lambda one: one):
            case.forward(called, case.rows(0, 0, 0)).backward()
        if wraps_engine:
            called.destroy()
    assert packed[0] and packed[1] == packed[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_other_hooks_get_everything(stage: int) -> None:
    ranks.run_ranks(_other_hooks_get_everything, 1, stage)


def _a_forward_that_raises_leaves_no_hooks() -> None:
    engine = initialize(flags.llama(), Run(stage=3))
    _always(engine)
    layer, case = engine.module.model.layers[2], CASES["llama"]

    def fail(*_: Any) -> None:
        raise ValueError("in a layer")

    handle = layer.mlp.register_forward_pre_hook(fail)
    around = torch.autograd.graph.save_on_cpu()
    with around:
        with pytest.raises(ValueError, match="in a layer"):
            case.forward(engine, case.rows(0, 0, 0))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is around.pack_hook
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    handle.remove()
    with around:
        engine.backward(case.forward(engine, case.rows(0, 0, 0)))
    engine.step()
    engine.destroy()


def test_a_forward_that_raises_leaves_no_hooks() -> None:
    with flags.small_tensors_move():
        ranks.run_ranks(_a_forward_that_raises_leaves_no_hooks, 1)


class _Deep(nn.Module):
    """Blocks that save two tensors of one size."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def _few_blocks_keep_the_hooks_of_the_script(depth: int) -> int:
    """Return the number of tensors that the script's own hooks get; with two blocks all would stay on the device, so the script's hooks are
    used.
    """
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    config["optimizer"] = {"type": "AdamW"}
    engine = hf_zero.initialize(model=_Deep(depth), config=config)[0]
    _always(engine)
    around, count = torch.autograd.graph.save_on_cpu(), [0]
    pack = around.pack_hook

    @wraps(pack)
    def counted(tensor: Tensor) -> Any:
        count[0] += 1
        return pack(tensor)

    around.pack_hook = counted
    with around:
        engine.backward(engine(torch.randn(2, 16)))
    engine.step()
    engine.destroy()
    return count[0]


def test_few_blocks_keep_the_hooks_of_the_script() -> None:
    assert ranks.run_ranks(_few_blocks_keep_the_hooks_of_the_script, 1, 2)[0] > 0
    assert ranks.run_ranks(_few_blocks_keep_the_hooks_of_the_script, 1, 3) == [0]


def _parity_on_hosts(stage: int, adapters: bool) -> None:
    """Test the mechanism without streams: copies are made although the training device is the host."""
    init = SavedTensors.__init__

    def always(saved: SavedTensors, module: nn.Module, blocks: int) -> None:
        init(saved, module, blocks, copies_always=True)

    with mock.patch.object(SavedTensors, "__init__", always):
        own = ["offload"] if has("transformers", "5.17") else []  # older ones have no such argument
        found = flags.check_flags(Run(stage=stage), ["save_on_cpu", *own], list(flags.KINDS), adapters)
    assert all(moved.nbytes for moved in found.values()), found


@pytest.mark.fast_rows("3-True")
@pytest.mark.parametrize(("stage", "adapters"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_training_on_two_ranks_is_training_without(stage: int, adapters: bool) -> None:
    ranks.run_ranks(_parity_on_hosts, 2, stage, adapters, timeout=200.0)


def test_sizes_are_of_pages() -> None:
    with mock.patch.object(host_activations, "LEAST_BYTES", 4096):
        store = HostActivations(copies_always=True)
        assert isinstance(store.save(torch.zeros(1023)), SavedHere) and isinstance(store.save(torch.zeros(1024)), SavedOnHost)
