"""Activations on the host on the pretend accelerator: the bits of a run without, waits that a device needs, and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hf_zero.activation_checkpointing.host_activations import HostActivations
from hf_zero.memory.copies import Mark
from tests import pretend
from tests.pretend import network
from tests.support import host_activations as flags
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())

ENVIRONMENT = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
DEPTH, ROWS, WIDTH = 10, 1024, 32
TENSOR = 4 * ROWS * WIDTH
BLOCK = 2 * TENSOR  # what a block saves


def on_devices(function: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    return ranks.run_ranks(function, world, *args, env=ENVIRONMENT, timeout=300.0)


# -- the same bits ------------------------------------------------------------------------------------------------------


def _flags(run: Run, names: list[str], kinds: list[str], adapters: bool) -> None:
    late, pageable = pretend.late_copies(), pretend.pageable_copies()
    found = flags.check_flags(run, names, kinds, adapters)
    assert all(not moved.outer for moved in found.values()), found
    assert pretend.late_copies() > late and pretend.pageable_copies() == pageable, "copies that overlap nothing"


@pytest.mark.slow  # fast: `test_a_forgotten_wait_is_noticed`; test_host_activations.py has the numbers
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_the_same_to_the_bit(stage: int) -> None:
    on_devices(_flags, Run(stage=stage), ["save_on_cpu", "offload"], ["kept", "not reentrant"], False)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_flag_with_every_kind_of_checkpointing(stage: int, adapters: bool) -> None:
    on_devices(_flags, Run(stage=stage, accumulation=2, clip=0.1), list(flags.FLAGS), list(flags.KINDS), adapters)


@pytest.mark.slow
def test_16_bit() -> None:
    on_devices(_flags, Run(stage=3, dtype="bf16"), list(flags.FLAGS), list(flags.KINDS), False)


# -- mistakes are noticed -------------------------------------------------------------------------------------------------


def _without(owner: type, name: str, replacement: Any) -> bool:
    """Whether a mistake shows: in an error, in a complaint, or in the numbers."""
    run = Run(stage=3)
    try:
        with mock.patch.object(owner, name, replacement):
            flags.check_flags(run, ["save_on_cpu"], ["kept"])
    except Exception:  # whatever it leads to
        pretend.complaints()
        return True
    return bool(pretend.complaints())


def _never_ordered(mark: Mark) -> None: ...


def _settles_nothing(store: HostActivations, leave: bool) -> None:
    """Memory leaves while it may be under way."""
    for group in store._under_way:
        for piece in group.alive():
            piece.leave_device() if leave and piece.fetched is None else None
        group.held = []
    store._under_way = []


def _holds_nothing(store: HostActivations, group: Any, mark: Mark) -> None:
    group.held = []
    group.marks, store._under_way = [*group.marks, mark], [*store._under_way, group]


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [(Mark, "order", _never_ordered), (HostActivations, "_settle", _settles_nothing)],
    ids=["order", "settle"],
)
def test_a_forgotten_wait_is_noticed(owner: type, name: str, replacement: Any) -> None:
    outcomes = ranks.observe_ranks(_without, 1, owner, name, replacement, env=ENVIRONMENT)
    # A read of memory that the device gave back ends the process.
    assert outcomes[0].value is True or outcomes[0].status == "died", outcomes[0].text


def _dropped(hold: bool) -> None:
    """A graph that goes while its tensors are on their way: in a forward without backward, say."""
    store, device = HostActivations(), ranks.device()
    change = mock.patch.object(HostActivations, "_begun", HostActivations._begun if hold else _holds_nothing)
    with change:
        saved = [store.save(torch.ones(2048, device=device))]
        store.advance()
        saved.clear()
        other = torch.zeros(2048, device=device)
        other.add_(1)
        store.advance()
    torch.accelerator.synchronize()


def test_memory_is_held_while_it_is_copied() -> None:
    on_devices(_dropped, True, world=1)
    outcome = ranks.observe_ranks(_dropped, 1, False, env=ENVIRONMENT)[0]
    assert not outcome.ok, "given away too early, and nothing noticed"


# -- memory ---------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Blocks that save two tensors of one size each: what their functions share counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean()


def _memory(stage: int, moves: bool) -> tuple[int, int, int]:
    """Bytes on the device after a forward and at the peak of forward and backward, beyond those before; locked bytes of the host."""
    torch.manual_seed(0)
    engine = initialize(Deep(), Run(stage=stage))
    batch = torch.randn(ROWS, WIDTH).to(ranks.device())
    for _ in range(2):  # the first step makes what stays
        locked = pretend.locked_bytes()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        with torch.autograd.graph.save_on_cpu() if moves else nullcontext():
            loss = engine(batch)
            after = torch.accelerator.memory_allocated()
            engine.backward(loss)
        peak = torch.accelerator.max_memory_allocated()
        engine.step()
        del loss
    engine.destroy()
    return after - before, peak - before, locked


@pytest.mark.parametrize("stage", [0, 3])
def test_two_blocks_are_on_the_device(stage: int) -> None:
    (kept, kept_peak, _), (moved, moved_peak, locked) = (on_devices(_memory, stage, moves, world=1)[0] for moves in (False, True))
    assert kept >= DEPTH * BLOCK
    # Beside two blocks: what stage 3 keeps gathered, and numbers.
    weights = 2 * 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert moved <= 2 * BLOCK + weights, f"{moved / BLOCK:.2f} blocks' activations after forward"
    # In backward the gradients of a block's tensors come on top, and those of the weights.
    assert kept_peak >= (DEPTH + 1) * BLOCK and moved_peak <= 4 * BLOCK, f"{kept_peak / BLOCK:.2f} and {moved_peak / BLOCK:.2f} blocks"
    assert locked <= (DEPTH - 1) * BLOCK + TENSOR + 4096, "the weights did not go to the host"


def _interrupted() -> None:
    """An evaluation with gradients, whose graph goes without a backward, leaves no activations on the device."""
    engine, case = initialize(flags.llama(), Run(stage=3)), CASES["llama"]
    with flags.small_tensors_move(), torch.autograd.graph.save_on_cpu():
        for _ in range(2):
            loss = case.forward(engine, case.rows(0, 0, 0))
            del loss
        assert not [piece for group in engine.runtime.saved.host._groups for piece in group.alive()]
        engine.backward(case.forward(engine, case.rows(0, 0, 0)))
    engine.step()
    engine.destroy()


def test_a_forward_without_backward() -> None:
    on_devices(_interrupted, world=1)
