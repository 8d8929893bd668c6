"""Test backwards that no tensor announces, at stage 3 with blocks that are resharded, by the outputs of blocks and later changes to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from tests.support import ranks
from tests.support.models import CASES, CLASSES, LENGTH, Batch, Block
from tests.support.parity import Run, check_training, initialize

# So small that nothing stays gathered between forward and backward, and little is gathered ahead.
TIGHT = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}


class Slots:
    """A script's own result class without a dict."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Closure:
    """A result in which no tensor can be found."""

    def __init__(self, hidden: Tensor) -> None:
        self.get = lambda: hidden


class Normed(Block):
    """A block with a norm, whose weight autograd saves itself, not a view of it; ``wrap`` makes the result."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wrap = wrap
        self.stash: Tensor | None = None

    def forward(self, hidden: Tensor) -> Any:
        result = super().forward(self.norm(hidden))
        self.stash = self.up(result).square().mean()  # behind the result: nothing of it is in what is returned
        return self.wrap(result)


def _plain(hidden: Tensor) -> Tensor:
    return hidden


def _value(result: Any) -> Tensor:
    if isinstance(result, torch.distributions.Normal):
        return result.mean
    if isinstance(result, Slots):
        return _value(result.inner)
    return result.get() if isinstance(result, Closure) else result


class Chain(nn.Module):
    """Blocks whose results are ``wrap``ped, and may be changed by the caller."""

    def __init__(self, wrap: Callable[[Tensor], Any], change: Callable[[Tensor], Any] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList(Normed(wrap) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            result = _value(block(hidden))
            self.change(result)
            hidden = result.reshape(hidden.shape)
        return self.head(hidden)


def _view(hidden: Tensor) -> Tensor:
    return hidden.view(hidden.shape[0], 1, -1)


def _change_part(result: Tensor) -> None:
    result[:, :, :4].mul_(1.5)


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "distribution": (lambda hidden: torch.distributions.Normal(hidden, 1.0), lambda _: None),
    "slots": (lambda hidden: Slots(Slots(hidden)), lambda _: None),
    "closure": (Closure, lambda _: None),
    "view changed in place": (_view, lambda result: result.mul_(1.5)),
    "part of a view changed in place": (_view, _change_part),
}


def _logits(model: Any, batch: Batch) -> Tensor:
    return model(batch["inputs"]).square().mean()  # type: ignore[no-any-return]


def _with_stashes(model: Any, batch: Batch) -> Tensor:
    loss = _logits(model, batch)
    return loss + sum(block.stash for block in getattr(model, "module", model).blocks)


def _one_stash(number: int) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        _logits(model, batch)
        return getattr(model, "module", model).blocks[number].stash  # type: ignore[no-any-return]

    return loss


def _trains(names: list[str]) -> None:
    run = Run(3, accumulation=2, clip=0.1, extra={"zero_optimization": TIGHT})
    for name in names:
        wrap, change = WRAPS[name]
        check_training(lambda wrap=wrap, change=change: Chain(wrap, change), CASES["mlp"].rows, _logits, run, label=name)
    losses = {"stashes beside the result": _with_stashes, "a stash alone": _one_stash(1), "the last stash alone": _one_stash(3)}
    for name, loss in losses.items() if len(names) > 1 else ():
        check_training(lambda: Chain(_plain), CASES["mlp"].rows, loss, run, label=name)


def test_what_blocks_return_needs_no_tensor_that_is_found() -> None:
    ranks.run_ranks(_trains, 2, list(WRAPS))


def _memory_between(wrap: Callable[[Tensor], Any]) -> list[int]:
    """Return the bytes of the blocks' whole buffers when a forward is over, and when backward is over."""
    engine = initialize(Chain(wrap), Run(3, extra={"zero_optimization": TIGHT}))
    loss = _logits(engine, CASES["mlp"].rows(0, 0, ranks.rank()))

    def held() -> int:
        units = [unit for block in engine.runtime.blocks for unit in block.units]
        return sum(view.untyped_storage().nbytes() for unit in units for view in (unit.whole.flat, *unit.whole._left[:1]))

    found = [held()]
    engine.backward(loss)
    return [*found, held()]


def _memories() -> list[list[int]]:
    return [_memory_between(wrap) for wrap in (_plain, WRAPS["slots"][0], Closure)]


def test_memory_stays_only_where_nothing_tells_and_until_backward_is_over() -> None:
    for plain, found, silent in ranks.run_ranks(_memories, 2):
        assert plain == [0, 0] and found == [0, 0]
        assert silent[0] > 0 and silent[1] == 0


class Nothing(Chain):
    """A model that returns nothing and keeps its loss."""

    def forward(self, inputs: Tensor) -> None:  # type: ignore[override]
        self.loss = super().forward(inputs).square().mean()


def _kept_loss(model: Any, batch: Batch) -> Tensor:
    model(batch["inputs"])
    return getattr(model, "module", model).loss  # type: ignore[no-any-return]


def _returns_nothing(stage: int) -> None:
    check_training(lambda: Nothing(_plain), CASES["mlp"].rows, _kept_loss, Run(stage, extra={"zero_optimization": TIGHT}), label="nothing")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_returns_nothing_has_not_failed(stage: int) -> None:
    ranks.run_ranks(_returns_nothing, 2, stage)


def _tensors_of_an_inference_mode() -> None:
    kept: list[Any] = []

    def loss(model: Any, batch: Batch) -> Tensor:
        inner = getattr(model, "module", model)
        with torch.inference_mode():
            kept.append(model(batch["inputs"]))
            for wanted in (list(inner.parameters()), [inner.blocks[0].up.weight], [inner.blocks[1].norm.weight]):
                with hf_zero.zero.GatheredParameters(wanted):
                    kept.append([param.detach() for param in wanted])
        return _logits(model, batch)

    run = Run(3, extra={"zero_optimization": TIGHT})
    check_training(lambda: Chain(_plain), CASES["mlp"].rows, loss, run, label="inference mode")


def test_what_an_inference_mode_has_made_does_not_reach_training() -> None:
    ranks.run_ranks(_tensors_of_an_inference_mode, 2)
