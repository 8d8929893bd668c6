"""What modules add to state dicts is loaded as by plain PyTorch; wrappers and further names of a buffer make no difference."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

from tests.support import ranks


class Counting(nn.Linear):
    """A layer whose output depends on a count that it adds to its state dict, and on a buffer that grows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count = 0
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = torch.cat([self.seen, torch.full((1,), float(self.count))])
        return super().forward(inputs) * (1 + 0.1 * self.count + 0.01 * self.seen.sum())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(self.count)
        destination[f"{prefix}renamed"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.count = int(state_dict.pop(f"{prefix}count"))
        state_dict.pop(f"{prefix}renamed", None)
        self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(nn.Linear):
    """A layer whose hooks add a number to its state dict and take it out again."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor = 1.0
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}factor": module.factor}))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: _take_factor(module, state, prefix))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.factor += 0.5
        return super().forward(inputs) * self.factor


def _take_factor(module: Any, state: dict[str, Any], prefix: str) -> None:
    module.factor = state.pop(f"{prefix}factor")


class Plain(nn.Linear):
    """A layer with a buffer and extra state, both drawn at random."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.drawn = int(torch.randint(9, ()))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.shift * self.drawn

    def get_extra_state(self) -> int:
        return self.drawn

    def set_extra_state(self, state: int) -> None:
        self.drawn = state


class Joined(nn.Module):
    """A model that joins the state dicts of its parts under prefixes of its own, and adds a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        parts = {name: part.state_dict(*args, prefix=f"{name}.", **kwargs) for name, part in self._modules.items()}
        return {**parts["body"], **parts["head"], "alpha": 0.5}


def test_a_model_that_gives_its_parts_prefixes_keeps_its_entries() -> None:
    from hf_zero.checkpoint.state.module_entries import entries_of

    assert entries_of(Joined()) == {"alpha": 0.5}


def _engine(model: nn.Module, stage: int) -> Any:
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    trained = [param for param in model.parameters() if param.requires_grad]
    return hf_zero.initialize(model=model, optimizer=torch.optim.Adam(trained, 0.01), config=config)[0]


def _batch(number: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


def _train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(_batch(step)).square().mean())
        engine.step()


def _reference(model: nn.Module, steps: range) -> dict[str, Any]:
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], 0.01)
    for step in steps:
        model(_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _check_equal(model: nn.Module, reference: dict[str, Any]) -> None:
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        state = {name: value for name, value in model.state_dict().items() if not isinstance(value, int)}
        for name, value in state.items():
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(reference[name]), msg=lambda text, name=name: f"{name}: {text}"
            )
        assert {name: value for name, value in reference.items() if isinstance(value, int)}.items() <= model.state_dict().items()


def _resumed(folder: str, stages: tuple[int, int], build: Callable[[], nn.Module], again: Callable[[], nn.Module]) -> None:
    """Train two steps, save, load into another model, train two more; weights, buffers and entries equal those without a break."""
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    reference = _reference(plain, range(4))
    first = _engine(model, stages[0])
    _train(first, range(2))
    first.save_checkpoint(folder, "t")
    first.destroy()
    torch.manual_seed(1)
    other = again()
    second = _engine(other, stages[1])
    second.load_checkpoint(folder, "t")
    _train(second, range(2, 4))
    _check_equal(other, reference)
    second.destroy()


def _entries_of() -> nn.Module:
    return nn.Sequential(Counting(), Hooked(), Plain(), nn.Linear(4, 2))


def _all_entries(folder: str) -> None:
    _resumed(f"{folder}/a", (3, 1), _entries_of, _entries_of)
    _resumed(f"{folder}/b", (1, 3), _entries_of, _entries_of)


def test_entries_of_modules_are_loaded_as_by_plain_pytorch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    ranks.run_ranks(_all_entries, 2, str(tmp_path))
    index = json.loads((tmp_path / "a/t/index.json").read_text())
    assert set(index["entries"]) == {"0.count", "1.factor"}, "no parameter, no buffer, no extra state"


def _without_entries(folder: str) -> None:
    from hf_zero.errors import CheckpointError

    first = _engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 2)
    first.save_checkpoint(folder, "old")
    first.destroy()
    other = nn.Sequential(Hooked(), nn.Linear(4, 2))
    second = _engine(other, 2)
    second.load_checkpoint(folder, "old")
    assert other[0].factor == 1.0
    second.destroy()
    third = _engine(nn.Sequential(Counting(), nn.Linear(4, 2)), 2)
    _train(third, range(1))
    third.save_checkpoint(folder, "new")
    third.module[0]._load_from_state_dict = lambda *given: given[-1].append("size mismatch for 0.seen")
    with pytest.raises(CheckpointError, match="module 0 cannot load its state: size mismatch for 0.seen"):
        third.load_checkpoint(folder, "new")
    third.destroy()


def test_checkpoints_without_entries_load_and_a_refusal_names_the_module(tmp_path: Path) -> None:
    ranks.run_ranks(_without_entries, 1, str(tmp_path))


def _blocks(wrapped: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = [Plain() for _ in range(3)]
        layers[1].requires_grad_(False)
        return nn.Sequential(*(checkpoint_wrapper(layer) if wrapped else layer for layer in layers), nn.Linear(4, 2))

    return build


def _wrapped(folder: str) -> None:
    for number, (before, after, stages) in enumerate(((True, False, (3, 1)), (False, True, (1, 3)))):
        _resumed(f"{folder}/{number}", stages, _blocks(before), _blocks(after))
    torch.manual_seed(0)
    model = _blocks(False)()
    engine = _engine(model, 1)
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, Plain))
    engine.save_checkpoint(folder, "later")
    plain = _blocks(False)()
    other = _engine(plain, 3)
    other.load_checkpoint(folder, "later")
    assert torch.equal(plain[1].shift, model.state_dict()["1.shift"])
    engine.destroy()
    other.destroy()


def test_checkpoints_move_between_wrapped_and_plain_blocks(tmp_path: Path) -> None:
    from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    ranks.run_ranks(_wrapped, 2, str(tmp_path))
    index = (tmp_path / "later/index.json").read_text()
    assert "_checkpoint_wrapped_module" not in index + (tmp_path / "0/t/index.json").read_text()
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "later")
    plain = _blocks(False)().state_dict()
    assert set(weights) == {name for name in plain if not name.endswith("_extra_state")}


def _sharing(shared: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        table = torch.randn(3)
        model[0].register_buffer("table", table)
        model[1].register_buffer("table", table if shared else table.clone())
        return model

    return build


def _shared(folder: str) -> None:
    for number, (before, after) in enumerate(((True, False), (False, True), (True, True))):
        _resumed(f"{folder}/{number}", (3, 1), _sharing(before), _sharing(after))


def test_a_shared_buffer_is_saved_under_all_its_names(tmp_path: Path) -> None:
    from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint

    for name in ("0", "1", "2"):
        (tmp_path / name).mkdir()
    ranks.run_ranks(_shared, 2, str(tmp_path))
    assert json.loads((tmp_path / "0/t/index.json").read_text())["aliases"] == {"1.table": "0.table"}
    model = _sharing(True)()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "0", "t"))
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "0", tmp_path / "all.bin", tag="t")
    model.load_state_dict(torch.load(tmp_path / "all.bin", weights_only=True))


class Tree(nn.Module):
    """A model with a block named ``root``."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.root, self.leaf = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.leaf(self.root(inputs)) * self.scale


def _tree(folder: str) -> None:
    _resumed(folder, (3, 1), Tree, Tree)


def test_a_model_with_a_block_named_root_is_saved(tmp_path: Path) -> None:
    ranks.run_ranks(_tree, 2, str(tmp_path))
    index = json.loads((tmp_path / "t/index.json").read_text())
    assert sorted(unit["name"] for unit in index["units"]) == ["leaf", "root", "root."]
