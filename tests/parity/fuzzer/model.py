"""Define the tiny causal model that scripts of the fuzzer train, its data, and values that both sides of a comparison draw alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.core.units.marks import whole_shape
from tests.parity.fuzzer.grammar import Cell

VOCABULARY, WIDTH, INNER, LENGTH, ROWS = 11, 6, 10, 4, 2  # odd shares of two ranks: pieces of parameters lie on both
EXPERTS = 4
Seen = dict[str, Any]  # what an operation of a script shows, by name
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ScriptError(RuntimeError):
    """Error that a forward or backward of the model raises when a script asks for it."""


class Adapter(nn.Module):
    """A product of two thin matrices that a script adds to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden))


class Mixture(nn.Module):
    """Experts in a list or in one tensor, of which each token takes two by its position: nearly equal scores could choose others on a side.

    Half of a batch leaves the last expert idle.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.stacked = kind == "stacked"
        if self.stacked:
            from transformers import MixtralConfig  # in tests, which need transformers 5 for it
            from transformers.models.mixtral.modeling_mixtral import MixtralExperts

            sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS}
            self.experts: nn.Module = MixtralExperts(MixtralConfig(**sizes, experts_implementation="eager"))
        else:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        first = torch.arange(len(tokens)) // 2 % EXPERTS
        chosen = torch.stack([first, (first + 1) % EXPERTS], 1)
        weights = self.router(tokens).softmax(-1).gather(1, chosen)
        if self.stacked:
            return self.experts(tokens, chosen, weights).view_as(hidden)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, column = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, column, None])
        return out.view_as(hidden)


class Layer(nn.Module):
    """A repeated block: two matrices, a vector, experts if the cell has some, and an adapter if a script has added one.

    Attributes:
        fails: "forward" or "backward" makes the next one raise a ``ScriptError``.
        recompute: "block" recomputes the layer in backward; "pieces" recomputes its two halves, as often as the data determines.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        if cell.mixture != "none":
            self.mixture = Mixture(cell.mixture)
        self.recompute = cell.recompute
        self.fails = ""

    def forward(self, hidden: Tensor, pieces: int = 1, mask: Tensor | None = None) -> Tensor:
        rest = () if mask is None else (mask,)
        parts = list(zip(hidden.chunk(pieces), hidden.chunk(pieces), *(given.chunk(pieces) for given in rest), strict=True))
        if self.recompute == "none" or not torch.is_grad_enabled():
            hidden = torch.cat([self._first(*part) for part in parts])
        elif self.recompute == "block":
            hidden = checkpoint(self._first, hidden, hidden, *rest, use_reentrant=False)
        else:
            hidden = torch.cat([checkpoint(self._first, *part, use_reentrant=True) for part in parts])
        fails, self.fails = self.fails, ""
        if fails == "forward":
            raise ScriptError("a forward that a script catches")
        if fails == "backward":
            hidden.register_hook(_raise)
        return hidden

    def _first(self, hidden: Tensor, rest: Tensor) -> Tensor:
        out = self.down(torch.tanh(self.up(hidden))) * self.gain
        if hasattr(self, "mixture"):
            out = out + self.mixture(hidden)
        if hasattr(self, "adapter"):
            out = out + self.adapter(hidden)
        return rest + out


class ScriptModel(nn.Module):
    """A model of embedding, two layers and head. It returns the loss if labels are given, else logits of every position."""

    layer: type[Layer] = Layer

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.layer(cell) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not cell.tied)
        if cell.tied:
            self.head.weight = self.embed.weight
        self.has_experts = cell.mixture != "none"
        self.has_buffers = bool(cell.buffers)
        if self.has_buffers:
            self.register_buffer("table", 1 + torch.rand(WIDTH) / 300)  # in bf16 another table
            self.register_buffer("running", torch.zeros(WIDTH))
            self.register_buffer("squares", torch.ones(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        if self.has_buffers:
            hidden = self._through_buffers(hidden)
        pieces = 1 if self.has_experts else 1 + int(input_ids[0, 0]) % 2  # layers of experts run equally often on all ranks
        for block in self.blocks:
            hidden = block(hidden, pieces)
        logits = self.head(hidden).float()
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def generate(self, tokens: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
        """Return ``tokens`` continued greedily by ``length`` tokens, and the logits of each of them."""
        return self.continued(tokens, length, self)

    @staticmethod
    def continued(tokens: Tensor, length: int, logits_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the same with the logits of a model's own kind."""
        seen = []
        with torch.no_grad():
            for _ in range(length):
                seen.append(logits_of(tokens)[:, -1])
                tokens = torch.cat([tokens, seen[-1].argmax(-1, keepdim=True)], 1)
        return tokens, seen

    def _through_buffers(self, hidden: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running.lerp_(hidden.detach().to(self.running.dtype).mean((0, 1)), 0.25)
                self.squares.lerp_(hidden.detach().to(self.running.dtype).square().mean((0, 1)), 0.25)
                self.count += 1
            return (hidden * self.table).to(hidden.dtype)
        return ((hidden * self.table - self.running) / self.squares.sqrt()).to(hidden.dtype)


def _raise(_grad: Tensor) -> None:
    raise ScriptError("a backward that a script catches")


def add_adapter(model: nn.Module, layer: str, dtype: torch.dtype, trains: bool) -> list[nn.Parameter]:
    """Give ``layer`` an adapter, the same on both sides, and return its parameters."""
    adapter = Adapter()
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            parameter.copy_(noise(f"{layer}.{name}", parameter.shape, 0))
    model.get_submodule(layer).adapter = adapter.to(dtype).requires_grad_(trains)
    return list(adapter.parameters())


def noise(name: str, shape: Any, seed: int) -> Tensor:
    """Return values that depend on the name and the seed, fp32, large enough for a comparison in bf16 to detect."""
    source = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return torch.randn(tuple(shape), generator=source) * 0.4


def shape_of(parameter: Any) -> torch.Size:
    """Return the complete shape of a parameter, which may be sharded or divided."""
    return whole_shape(parameter) or torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def batch(data: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels, (``ROWS``, ``LENGTH``) each, of a rank's micro-step."""
    source = torch.Generator().manual_seed(1000 * (rank + 1) + data)
    tokens = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=source)
    return tokens[0], tokens[1]


def write(parameter: nn.Parameter, how: str, value: Tensor) -> None:
    """Change a complete parameter by the method ``how``; ``value`` has its shape."""
    value = value.to(parameter.dtype)
    if how == "assign":
        parameter.data = value
    elif how == "data_mul":
        parameter.data.mul_(0.5)
    elif how == "data_copy":
        parameter.data.copy_(value)
    else:
        with torch.no_grad():
            if how == "mul":
                parameter.mul_(-0.5)
            elif how == "clamp":
                parameter.clamp_(-0.1, 0.1)
            else:
                parameter.copy_(value)


def compute(what: str, parameter: Tensor) -> Tensor:
    """Return the result of a script's computation with a parameter's values."""
    with torch.no_grad():
        if what == "sum":
            return parameter.sum()
        if what == "norm":
            return parameter.norm()
        if what == "float":
            return parameter.detach().float() * 2
        if what == "clone":
            return parameter.detach().clone()
        if what == "compare":
            return (parameter > 0).sum()
        return torch.cat([parameter.detach().reshape(-1), torch.zeros(1, dtype=parameter.dtype)])


def penalty(how: str, over: str, model: nn.Module) -> Tensor:
    """Return a penalty on the parameters of the model, or of one layer, that a script adds to a loss."""
    layer = model if over == "all" else model.get_submodule(over)
    if how == "iterated":
        found = list(layer.parameters())
    else:
        found = [getattr(part, name) for part in layer.modules() for name, _ in part.named_parameters(recurse=False)]
    return 0.1 * torch.stack([torch.linalg.vector_norm(parameter.float()) for parameter in found]).square().sum()


def read(what: str, model: nn.Module, name: str) -> None:
    """Read a property of the parameter ``name`` that needs no values; one rank may do this alone."""
    if what == "attribute":  # as a script's log does
        layer, _, last = name.rpartition(".")
        assert getattr(model.get_submodule(layer), last).dtype.is_floating_point
        return
    parameter = dict(model.named_parameters(remove_duplicate=False))[name]
    if what == "dtype":
        assert parameter.dtype.is_floating_point
    elif what == "shape":
        assert len(tuple(parameter.shape)) in (1, parameter.ndim) and parameter.device is not None  # a sharded one has no elements
    elif what == "repr":
        assert repr(parameter) and str(model)
    elif what == "grad":
        assert parameter.grad is None or parameter.grad.shape is not None
    elif what == "requires_grad":
        assert parameter.requires_grad in (True, False)
    else:
        assert len(list(model.named_parameters())) == len(dict(model.named_parameters()))
