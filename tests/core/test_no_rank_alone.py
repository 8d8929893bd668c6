"""Test that an action of one rank alone (reading a parameter, a caught error, a layer in pieces) never hangs: it works, or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.models import CASES, CLASSES, LENGTH, Batch, Block, class_loss
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import thinned

# So small that nothing stays gathered between forward and backward.
TIGHT = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}
MLP = CASES["mlp"]


def _run(stage: int, **more: Any) -> Run:
    return Run(stage, extra={"zero_optimization": TIGHT}, **more)


def _inner(model: Any) -> Any:
    return getattr(model, "module", model)


def _is_engine(model: Any) -> bool:
    return _inner(model) is not model


# ------------------------------------------------------------------------------------------------ reads


def _looks(weight: nn.Parameter) -> None:
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad and weight.grad is None
    assert (weight.dtype, weight.device.type, weight.shape) == (torch.float32, ranks.device().type, (32, 16))
    assert (weight.numel(), weight.dim(), len(weight), weight.is_floating_point()) == (512, 2, 32, True)


def _computes(weight: nn.Parameter) -> None:
    assert 0 < weight.norm().item() < 10


def _computes_without_gradient(weight: nn.Parameter) -> None:
    with torch.no_grad():
        assert 0 < weight.abs().max() < 1


def _takes_data(weight: nn.Parameter) -> None:
    assert weight.data.std() > 0


READS = (_looks, _computes, _computes_without_gradient, _takes_data)


def _read_behind(read: Callable[[nn.Parameter], None], alone: bool) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        found = class_loss(model, batch)
        if _is_engine(model) and (ranks.rank() == 0 or not alone):
            read(_inner(model).blocks[1].up.weight)
        return found

    return loss


def _penalty(model: Any, batch: Batch) -> Tensor:
    return class_loss(model, batch) + 0.1 * _inner(model).blocks[1].up.weight.square().sum()


def _reads() -> None:
    for read in READS:
        for alone in (True, False):
            check_training(MLP.build, MLP.rows, _read_behind(read, alone), _run(3, accumulation=2), label=read.__name__)
    check_training(MLP.build, MLP.rows, _penalty, _run(3), label="a penalty behind the forward")


def test_a_parameter_that_one_rank_reads_behind_the_forward() -> None:
    ranks.run_ranks(_reads, 2)


def _gathers_of_a_look() -> tuple[int, int]:
    """Return the bytes sent by a look at a parameter after the forward, and by a computation with it."""
    engine = initialize(MLP.build(), _run(3))
    loss = class_loss(engine, MLP.rows(0, 0, ranks.rank()))
    sent = [engine.collectives.sent_bytes]
    for read in (_looks, _computes):
        read(engine.module.blocks[1].up.weight)
        sent.append(engine.collectives.sent_bytes)
    engine.backward(loss)
    return sent[1] - sent[0], sent[2] - sent[1]


def test_a_look_at_a_parameter_sends_nothing() -> None:
    for look, computation in ranks.run_ranks(_gathers_of_a_look, 2):
        assert look == 0 and computation > 0


# ------------------------------------------------------------------------------------------------ layers in pieces


class Pieces(nn.Module):
    """A module that recomputes its layer in pieces of its rows; the batch determines their number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        pieces = [checkpoint(lambda piece: torch.tanh(self.inner(piece)), piece, use_reentrant=True) for piece in hidden.chunk(count)]
        return hidden + self.out(torch.cat(pieces))


class InPieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList(Pieces() for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor, count: int) -> Tensor:
        hidden = self.entry(inputs)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, count if index != 1 else 1)
        return self.head(hidden)


def _counted_rows(step: int, micro: int, rank: int) -> Batch:
    return {**MLP.rows(step, micro, rank), "count": torch.tensor(1 + rank * (step + micro + 1))}


def _loss_in_pieces(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["inputs"], int(batch["count"]))
    return nn.functional.cross_entropy(logits.float(), batch["labels"])


def _in_pieces(stage: int) -> None:
    for dtype, accumulation in (("fp32", 1), ("bf16", 2)):
        run = _run(stage, dtype=dtype, accumulation=accumulation, steps=3)
        check_training(InPieces, _counted_rows, _loss_in_pieces, run, label=f"{dtype} in pieces")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_that_ranks_recompute_in_different_numbers_of_pieces(stage: int) -> None:
    ranks.run_ranks(_in_pieces, 2, stage)


# ------------------------------------------------------------------------------------------------ errors that one rank catches


class Fragile(nn.Module):
    """A module that raises once if ``armed`` is set: before a block, after a block, after its own forward, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.armed, self.hooked = "", False
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for index, block in enumerate(self.blocks):
            self.fire(f"before {index}")
            hidden = block(hidden)
            if self.armed == f"backward {index}":
                self.armed = ""
                hidden = Breaks.apply(hidden)
        self.fire("at the end")
        return self.head(hidden)

    def fire(self, where: str) -> None:
        if self.armed == where:
            self.armed = ""
            raise torch.OutOfMemoryError("pretended")


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("bad gradient")


WHERE = ("before 0", "before 2", "at the end", "behind")


def _run_again(stage: int) -> None:
    for where in WHERE:

        def loss(model: Any, batch: Batch, where: str = where) -> Tensor:
            inner = _inner(model)
            if not _is_engine(model):
                return class_loss(model, batch)
            if where == "behind" and not inner.hooked:
                inner.hooked = True
                inner.register_forward_hook(lambda module, *_: module.fire("behind"))
            inner.armed = where if ranks.rank() == 1 else ""
            try:
                return class_loss(model, batch)
            except torch.OutOfMemoryError:
                return class_loss(model, {name: value.clone() for name, value in batch.items()})

        check_training(Fragile, MLP.rows, loss, _run(stage, accumulation=2), label=where)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_that_one_rank_runs_again_is_one_micro_step(stage: int) -> None:
    ranks.run_ranks(_run_again, 2, stage)


def _broken_backwards(stage: int) -> list[list[str]]:
    said: list[list[str]] = []
    for where in ("backward 0", "backward 2"):
        for started_by_engine in (True, False):
            engine = initialize(Fragile(), _run(stage))
            said.append([])
            for step in range(2):
                engine.module.armed = where if step == 0 and ranks.rank() == 1 else ""
                while True:
                    loss = class_loss(engine, MLP.rows(step, 0, ranks.rank()))
                    try:
                        (engine.backward if started_by_engine else Tensor.backward)(loss)
                        break
                    except (ValueError, RuntimeError) as error:
                        said[-1].append(str(error))
                        engine.zero_grad()
                engine.step()
            engine.destroy()
    return said


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_breaks_off_on_one_rank_is_told_on_all(stage: int) -> None:
    others, broken = ranks.run_ranks(_broken_backwards, 2, stage)
    assert broken == [["bad gradient"]] * 4
    for texts in others:
        assert len(texts) == 1 and "a backward broke off with an error on another rank" in texts[0]
    assert all("bad gradient" in texts[0] for texts in others[::2])


def _given_up(then: str) -> str:
    engine = initialize(Fragile(), _run(3))
    engine.module.armed = "before 1" if ranks.rank() == 1 else ""
    try:
        try:
            engine.backward(class_loss(engine, MLP.rows(0, 0, ranks.rank())))
        except torch.OutOfMemoryError:
            if then == "save":
                engine.save_checkpoint("nowhere")
        engine.step()
    except RuntimeError as error:
        return str(error)
    return ""


@thinned("step", then=["step", "save"])
def test_a_forward_that_one_rank_gives_up_ends_the_run_on_all(then: str) -> None:
    other, raised = ranks.run_ranks(_given_up, 2, then)
    assert "the forward raised an error on another rank" in other
    assert raised.startswith({"step": "step()", "save": "save_checkpoint()"}[then]) and "run the forward again" in raised
