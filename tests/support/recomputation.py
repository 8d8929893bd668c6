"""Models that recompute their blocks in backward, and runs of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, Trace, check_bitwise, initialize, train


class Checkpointed(Mlp):
    """Model that recomputes every block in backward; ``mode`` None: no checkpointing. ``nested``: a checkpoint inside a checkpoint."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        if self.mode == "nested":
            return self.head(checkpoint(self._all_blocks, hidden, use_reentrant=False))
        return self.head(self._all_blocks(hidden))

    def _all_blocks(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.mode == "reentrant") if self.mode else block(hidden)
        return hidden


def _train_plain(mode: str | None, run: Run) -> Trace:
    torch.manual_seed(0)
    engine = initialize(Checkpointed(mode).train(), run)
    trace = train(engine, CASES["mlp"].rows, class_loss, run)
    engine.destroy()
    return trace


def check_recomputation(run: Run, mode: str) -> None:
    check_bitwise(_train_plain(mode, run), _train_plain(None, run), f"checkpointing {mode}")


def train_transformers(name: str, run: Run, reentrant: bool | None) -> Trace:
    case = CASES[name]
    model = case.build()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    engine = initialize(model, run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    return trace
