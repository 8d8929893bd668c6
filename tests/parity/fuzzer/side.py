"""Define what both sides of a comparison share: the model that they train, and operations that are the same on both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.fuzzer import model as script_model
from tests.parity.fuzzer import sequences
from tests.parity.fuzzer.grammar import Cell
from tests.parity.fuzzer.model import DTYPES, ScriptModel, Seen, batch, noise


class Side:
    """Base class of both sides of a comparison, with the operations that are the same on both.

    Args:
        cell: Settings under which the script runs.
        rank: The rank whose values are shown.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell, self.rank = cell, rank
        self.place = cell.place(rank)
        self.dtype = DTYPES[cell.dtype]
        self.model = build(cell)
        self.shadow: dict[str, Tensor] = {}  # averages of parameters by name

    def freeze(self, layer: str) -> Seen:
        self.model.get_submodule(layer).requires_grad_(False)
        return {}

    def unfreeze(self, layer: str) -> Seen:
        self.model.get_submodule(layer).requires_grad_(True)
        return {}

    def compute(self, param: str, what: str) -> Seen:
        return {what: script_model.compute(what, self.model.get_parameter(param))}

    def hook_layer(self, layer: str) -> Seen:
        self.model.get_submodule(layer).register_forward_hook(lambda _module, _args, output: output * 0.9)
        return {}

    @staticmethod
    def scale_gradient(parameter: nn.Parameter) -> Seen:
        """Halve gradients of ``parameter`` from now on."""
        parameter.register_hook(lambda gradient: gradient / 2)
        return {}

    def loss_of(self, model: Any, data: int, place: int) -> Tensor:
        """Return the loss of a batch."""
        return sequences.loss_of(model, self.model.embed, data, place) if self.cell.sequences > 1 else model(*batch(data, place))

    def logits_of(self, model: Any, data: int) -> Tensor:
        """Return the logits of the own batch."""
        found: Tensor = sequences.logits_of(model, data, self.place) if self.cell.sequences > 1 else model(self.prompt(data))
        return found

    def prompt(self, data: int) -> Tensor:
        """Return the tokens of the own batch."""
        return sequences.batch(data, self.place)["input_ids"] if self.cell.sequences > 1 else batch(data, self.place)[0]

    def average_of(self, named: dict[str, nn.Parameter]) -> Seen:
        """Add complete parameters to their averages, and show these."""
        for name, parameter in named.items():
            value = parameter.detach().float()
            self.shadow[name] = torch.lerp(self.shadow[name], value, 0.5) if name in self.shadow else value.clone()
        return {f"average of {name}": value.clone() for name, value in self.shadow.items()}

    def take_average(self, named: dict[str, nn.Parameter]) -> Seen:
        """Write averages to the complete parameters that have one."""
        with torch.no_grad():
            for name, parameter in named.items():
                if name in self.shadow:
                    parameter.data.copy_(self.shadow[name])
        return {}


def build(cell: Cell) -> ScriptModel:
    """Return the model of a cell, the same on every rank and both sides, in fp32."""
    torch.manual_seed(1)
    model = sequences.LlamaForCausalLM(cell) if cell.sequences > 1 else ScriptModel(cell)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(noise(name, parameter.shape, 0) + (1.0 if name.endswith("gain") else 0.0))
    if cell.frozen != "none":
        model.get_submodule(cell.frozen).requires_grad_(False)
    return model
