"""Checkpoints of models whose layers are unfrozen, replaced or moved in training: each parameter under its present name, in each reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.checkpoint.convert.run import Conversion, convert
from hf_zero.checkpoint.zero_to_fp32 import Checkpoint, get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint import drawn_frozen
from tests.support import ranks

RUN = {"precision": "fp32", "optimizer": "sgd", "given": "all", "offload": None, "what": "all", "second": "none"}
CASES: dict[str, dict[str, Any]] = {
    "a part of a frozen layer is unfrozen": {"frozen": "blocks", "first": "unfreeze part", "load": "start", "to stage": 1},
    "a layer resumes after it was unfrozen": {"frozen": "blocks", "first": "unfreeze blocks.0", "load": "events"},
    "a part is unfrozen, its states are in files": {"frozen": "blocks", "first": "unfreeze part", "load": "start", "offload": "nvme"},
    "a trained head is replaced": {"frozen": "nothing", "first": "replace head", "load": "same"},
    "a frozen head with a tied weight is replaced": {"frozen": "head", "first": "replace head", "load": "save"},
    "a layer is added and removed": {"frozen": "entry", "first": "add layer", "second": "remove layer", "load": "save"},
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_all_that_is_written_and_loaded(tmp_path: Path, name: str, stage: int) -> None:
    run = {**RUN, "to stage": 3, **CASES[name], "stage": stage, "ranks": 2, "to ranks": 2}
    assert drawn_frozen.compared(run, tmp_path) == []


def _unfreezes(folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine: Any = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
    model[1].weight.requires_grad_(True)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_parameter_that_was_unfrozen_is_not_left_out_as_frozen(tmp_path: Path) -> None:
    ranks.run_ranks(_unfreezes, 1, str(tmp_path))
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert sorted(found) == ["0.bias", "0.weight", "1.weight"]
    assert Checkpoint(tmp_path).frozen == {"1.bias"}
    convert(Conversion(tmp_path, tmp_path / "hf", to="hf", quiet=True))
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["1.weight"], found["1.weight"])


def _averages(folder: str) -> None:
    """Replace a head whose average is kept, and take another name for a parameter by wrapping its layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine: Any = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
    averages = hf_zero.utils.AveragedWeights(engine, decay=0.5)

    def train() -> None:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        averages.update()

    train()
    model[1] = nn.Linear(4, 4)
    model[0] = nn.Sequential(model[0])
    engine.optimizer.add_param_group({"params": model[1].parameters()})
    first = model[1].weight.detach().clone()
    train()
    engine.save_checkpoint(folder)
    kept = {name: averages.whole(name).clone() for name in ("0.0.weight", "1.weight")}
    assert torch.allclose(kept["1.weight"], first, atol=0.15)  # not the average of the former head
    train()
    engine.load_checkpoint(folder)
    assert all(torch.equal(averages.whole(name), value) for name, value in kept.items())
    engine.destroy()


def test_averages_follow_names(tmp_path: Path) -> None:
    ranks.run_ranks(_averages, 1, str(tmp_path))


def _wraps(folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine: Any = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
    model[0] = torch.compile(model[0], backend="eager")
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


def test_blocks_that_torch_wraps_in_training_keep_their_names(tmp_path: Path) -> None:
    ranks.run_ranks(_wraps, 1, str(tmp_path))
    assert sorted(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))) == ["0.bias", "0.weight", "1.bias", "1.weight"]


class Coded(nn.Linear):
    """A layer with frozen codes and scales in float8 that no library packed."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.codes = nn.Parameter(torch.randn(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scales = nn.Parameter(torch.rand(4).to(torch.float8_e5m2), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.codes.float() + self.scales.float()


def _float8(folder: str) -> None:
    from hf_zero.zero import GatheredParameters

    for stage, other in ((0, 3), (3, 1)):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        torch.manual_seed(0)
        first, second = Coded(), Coded()
        saved = {name: value.clone() for name, value in first.state_dict().items()}
        engine: Any = hf_zero.initialize(model=first, optimizer=torch.optim.SGD([first.weight, first.bias], 0.1), config=config)[0]
        engine.save_checkpoint(folder, f"t{stage}")
        engine.destroy()
        config["zero_optimization"] = {"stage": other}
        engine = hf_zero.initialize(model=second, optimizer=torch.optim.SGD([second.weight, second.bias], 0.1), config=config)[0]
        engine.load_checkpoint(folder, f"t{stage}")
        with GatheredParameters(list(second.parameters())):
            for name, value in second.state_dict().items():
                assert value.dtype == saved[name].dtype and torch.equal(value.float(), saved[name].float()), name
        engine.destroy()


def test_frozen_float8_parameters_are_saved(tmp_path: Path) -> None:
    ranks.run_ranks(_float8, 2, str(tmp_path))
    for tag in ("t0", "t3"):
        assert {"codes", "scales"} <= get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag).keys()
