"""Whole weights that a script loads into an engine of stage 3: parameters are gathered unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.unit import is_sharded
from tests.support import ranks
from tests.support.parity import Run, initialize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.frozen = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen(self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Blocks between an embedding and a head that share a weight; the last block is used twice."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.layers.append(self.layers[-1])
        self.loaded: list[list[str]] = []
        for name, module in self.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_load_state_dict_pre_hook(lambda *given, name=name: self.note(name))

    def note(self, name: str) -> None:
        units = {id(unit): unit for unit in self.units}
        self.loaded.append([unit.name for unit in units.values() if unit.state is UnitState.UNSHARDED])
        assert not any(is_sharded(param) for param in self.get_submodule(name).parameters()), name

    units: Any = ()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def _loads(threshold: int) -> None:
    other = Tied(1)
    run = Run(3, extra={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold}})
    engine = initialize(Tied(), run)
    model = engine.module
    model.units = engine.units
    at_rest = sum(unit.state is UnitState.UNSHARDED for unit in engine.units)
    assert threshold or at_rest == 0
    engine.load_module_state_dict(other.state_dict())
    blocks = [{name.split()[0] for name in names} - {"root"} for names in model.loaded]  # root: tied, or used by several modules
    assert len(blocks) >= 13 and max(map(len, blocks)) == (3 if at_rest else 1), model.loaded
    compare(model, other)
    assert sum(unit.state is UnitState.UNSHARDED for unit in engine.units) == at_rest

    short = {name: value for name, value in Tied(2).state_dict().items() if name != "layers.1.up.weight"}
    with pytest.raises(RuntimeError, match=r"layers\.1\.up\.weight"):
        engine.load_module_state_dict(short)
    hook = model.layers[2].down.register_load_state_dict_pre_hook(_fail)
    with pytest.raises(ValueError, match="in the middle"):
        engine.load_module_state_dict(other.state_dict())
    hook.remove()
    assert sum(unit.state is UnitState.UNSHARDED for unit in engine.units) == at_rest
    assert not any("_load_from_state_dict" in vars(module) for module in model.modules())
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    engine.load_module_state_dict(other.state_dict())
    ids = torch.arange(12).view(2, 6)
    engine.backward(engine(ids).square().mean())
    engine.step()
    plain = Tied(1)
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    plain(ids).square().mean().backward()
    optimizer.step()
    compare(model, plain)


def compare(model: nn.Module, plain: nn.Module) -> None:
    import hf_zero

    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), expected[name].detach(), msg=name)


def _fail(*given: Any) -> None:
    raise ValueError("in the middle")


@pytest.mark.parametrize("threshold", [0, 10_000])
def test_weights_are_loaded_unit_by_unit(threshold: int) -> None:
    ranks.run_ranks(_loads, 2, threshold)


class InParts(Tied):
    """A model that loads its children one by one, and its blocks twice."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        parts = {name: {key.removeprefix(f"{name}."): value for key, value in state_dict.items()} for name in ("embed", "head", "layers")}
        for name in ("embed", "layers", "head", "layers"):
            child = self.get_submodule(name)
            child.load_state_dict({key: value for key, value in parts[name].items() if key in child.state_dict()}, strict=strict)


def _loads_in_parts() -> None:
    other = InParts(1)
    engine = initialize(InParts(), Run(3, extra={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    engine.module.units = engine.units
    for _ in range(2):
        engine.load_module_state_dict(other.state_dict())
        compare(engine.module, other)
    assert not any(unit.state is UnitState.UNSHARDED for unit in engine.units)


def test_a_model_may_load_its_children_by_itself() -> None:
    ranks.run_ranks(_loads_in_parts, 2)
