"""Models that run the blocks chosen by a batch, and skip the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.models import CLASSES, LENGTH, Batch, Block, Mlp

WIDTH = 16


class Chosen(Mlp):
    """Model that runs the blocks listed in the batch, in the batch's order."""

    def __init__(self, checkpointing: bool = False, blocks: int = 4) -> None:
        super().__init__(blocks=blocks)
        self.checkpointing = checkpointing

    def forward(self, inputs: Tensor, choice: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for index in choice.tolist():
            block = self.blocks[index]
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointing else block(hidden)
        return self.head(hidden)


class Regions(Mlp):
    """Model whose checkpointed functions run two blocks each, from two lists; the batch chooses the functions and their order."""

    def __init__(self, regions: int = 4) -> None:
        super().__init__(blocks=2 * regions)

    def _region(self, index: int, hidden: Tensor) -> Tensor:
        mixed: Tensor = hidden + self.blocks[index](hidden)
        result: Tensor = mixed + self.blocks[index + len(self.blocks) // 2](mixed)
        return result

    def forward(self, inputs: Tensor, choice: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for index in choice.tolist():
            hidden = checkpoint(self._region, index, hidden, use_reentrant=False)
        return self.head(hidden)


class Nested(Mlp):
    """Model whose reentrant checkpoints run one block, and the first block of the model inside another checkpoint of either kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(blocks=4)
        self.reentrant = reentrant

    def _region(self, index: int, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.blocks[0], self.blocks[index](hidden), use_reentrant=self.reentrant)
        return result

    def forward(self, inputs: Tensor, choice: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for index in choice.tolist():
            hidden = checkpoint(self._region, index, hidden, use_reentrant=True)
        return self.head(hidden)


class TwoTowers(nn.Module):
    """Text blocks that always run, and vision blocks that run only when the batch has pixels."""

    def __init__(self, vision: int = 2, text: int = 2) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Block(WIDTH) for _ in range(vision))
        self.bridge = nn.Linear(WIDTH, WIDTH)
        self.entry = nn.Linear(LENGTH, WIDTH)
        self.text = nn.ModuleList(Block(WIDTH) for _ in range(text))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, choice: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        if len(choice):
            pixels = functional.pad(inputs, (0, WIDTH - LENGTH))
            for block in self.vision:
                pixels = block(pixels)
            hidden = hidden + self.bridge(pixels)
        for block in self.text:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of_choice(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["inputs"], batch["choice"]).float(), batch["labels"])


def loss_of_two_backwards(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss of inputs moved along their gradient (adversarial training), and of the graph that this gradient is from."""
    inputs = batch["inputs"].detach().requires_grad_()
    logits = model(inputs, batch["choice"]).float()
    loss = functional.cross_entropy(logits, batch["labels"])
    (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    moved = model((inputs + 0.1 * slope.sign()).detach(), batch["choice"]).float()
    return loss + functional.mse_loss(moved, logits)
