"""Settings of bitsandbytes for single parameters: as in plain PyTorch at every stage, whenever a script makes them, and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import UnsupportedError
from hf_zero.optim.elementwise import check_whole_tensors
from hf_zero.optim.own_settings import OwnSettings, keep_settings
from tests.support import ranks
from tests.support.parity import Run, full_masters, initialize, micro_step

pytest.importorskip("bitsandbytes")

STEPS, SAVED = 6, 4


class Words(nn.Module):
    """An embedding and matrices that are large enough for states in 8 bits, and a layer that joins later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.words = nn.Embedding(80, 64)
        self.late = nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.words(ids)
        for layer in (*self.layers, self.late):
            rows = rows + torch.tanh(layer(rows))
        return rows.square().mean(-1)


def _rows(step: int, rank: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 80, (16,), generator=torch.Generator().manual_seed(10 * step + rank))}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = (model(batch["ids"]) - 1).square().mean()
    return loss


@contextmanager
def _manager() -> Iterator[Any]:
    """Yield the manager of all optimizers, without settings."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager._instance = None
    yield GlobalOptimManager.get_instance()
    GlobalOptimManager._instance = None


def _start(kind: str, manager: Any) -> tuple[Words, torch.optim.Optimizer]:
    """Return a model and its optimizer: settings are made before and after the optimizer, as Trainer makes those of embeddings."""
    import bitsandbytes

    model = Words()
    model.late.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    manager.override_config(model.layers[1].weight, "lr", 0.05)
    manager.register_parameters(params)
    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(params, lr=1e-3)
    manager.register_module_override(model.words, "weight", {"optim_bits": 32})
    manager.override_config(model.layers[0].bias, key_value_dict={"lr": 0.02, "betas": (0.5, 0.6)})
    return model, optimizer


def _change(step: int, model: Words, optimizer: Any, manager: Any) -> None:
    """Make further settings during the run, also for parameters that join."""
    if step == 1:
        manager.override_config(model.layers[0].weight, "lr", 0.03)
    if step == 2:
        model.late.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.late.parameters())})
        manager.override_config(model.late.weight, key_value_dict={"lr": 0.04, "optim_bits": 32})
    if step == 3:
        model.words.weight.requires_grad_(False)
        manager.override_config([model.layers[1].weight, model.layers[1].bias], "lr", 0.01)
    if step == 4:
        model.words.weight.requires_grad_(True)


def _plain(kind: str, world: int) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Train in plain PyTorch; return the weights and the types of the first state, by name."""
    with _manager() as manager:
        model, optimizer = _start(kind, manager)
        for step in range(STEPS):
            _change(step, model, optimizer, manager)
            for rank in range(world):
                (_loss(model, _rows(step, rank)) / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = list(model.named_parameters())
        return {name: param.detach().clone() for name, param in named}, {
            name: optimizer.state[param]["state1"].dtype for name, param in named
        }


def _run(kind: str, stage: int, folder: Path, resumes: bool) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Train through the engine, from the start or from the saved step; return this rank's types of states with the weights."""
    zero = {"offload_optimizer": {"device": "cpu"}} if stage == 3 else {}
    with _manager() as manager:
        model, optimizer = _start(kind, manager)
        if resumes:  # what the script has done by then
            for step in range(SAVED):
                _change(step, model, optimizer, manager)
        engine = initialize(model, Run(stage=stage, extra={"zero_optimization": zero}), optimizer=optimizer)
        if resumes:
            engine.load_checkpoint(str(folder))
        for step in range(SAVED if resumes else 0, STEPS):
            if step == SAVED and not resumes:
                engine.save_checkpoint(str(folder))
            _change(step, model, engine.optimizer, manager)
            micro_step(engine, _rows(step, ranks.rank()), _loss, 0)
        types = {entry.slot.name: entry.state["state1"].dtype for entry in engine.optimizer.whole}
        weights = full_masters(engine)
        engine.destroy()
    return weights, types


def _check(kinds: tuple[str, ...], stages: tuple[int, ...], folder: Path) -> None:
    for kind in kinds:
        weights, types = _plain(kind, ranks.world())
        assert types["words.weight"] is types["late.weight"] is torch.float32
        for stage in stages:
            for of_stage, resumes in ((stage, False), (3 - stage, True)):
                found, own = _run(kind, of_stage, folder / kind / str(stage), resumes)
                assert own == {name: types[name] for name in own}, (kind, stage, resumes)
                for name, value in weights.items():
                    assert torch.equal(found[name], value), (kind, stage, resumes, name)


def test_settings_train_as_in_plain_pytorch(tmp_path: Path) -> None:
    ranks.run_ranks(_check, 2, ("AdamW8bit",), (0, 2), tmp_path)


@pytest.mark.slow
def test_settings_at_every_stage(tmp_path: Path) -> None:
    ranks.run_ranks(_check, 2, ("PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit", "AdamW"), (0, 1, 2, 3), tmp_path, timeout=300.0)


def _made(params: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, OwnSettings, list[nn.Parameter]]:
    """Return an optimizer, its view of the manager, and tensors that have taken the place of ``params``, in the reverse order."""
    import bitsandbytes

    optimizer = bitsandbytes.optim.AdamW8bit(params, lr=1e-3)
    replaced = keep_settings(optimizer)
    others = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer.mng.manager.pid2config[id(others[0])] = {"lr": 9.0}
    replaced({id(param): [other] for param, other in zip(params, others, strict=True)})
    optimizer.param_groups[0]["params"] = others[::-1]
    return optimizer, optimizer.mng, others


def test_settings_by_position_follow_their_parameter() -> None:
    """Releases of bitsandbytes before 0.49 look at positions alone."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    module = nn.ParameterDict({"own": params[1]})
    with _manager() as manager:
        manager.override_config(params[2], "lr", 0.5)
        manager.register_parameters(params)
        _, view, others = _made(params)
        assert view.index2config[0, 0] == view.pid2config[id(others[2])] == {"lr": 0.5}
        assert (0, 1) not in view.index2config and (0, 7) not in view.index2config and id(others[1]) not in view.pid2config
        view.register_module_override(module, "own", {"optim_bits": 32})
        assert view.module_weight_config_triple == [] and view.index2config[0, 1] == view.pid2config[id(others[1])] == {"optim_bits": 32}
        assert view.uses_config_override


def test_settings_of_tensors_in_the_groups_and_of_freed_ones() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    with _manager() as manager:
        _, view, others = _made(params)
        assert id(others[0]) not in view.pid2config  # an entry with the id of a tensor that was made later
        manager.override_config(params[0], key_value_dict={"lr": 0.5, "eps": 1e-3})
        manager.override_config(others[0], "lr", 0.1)
        assert view.pid2config[id(others[0])] == {"lr": 0.1, "eps": 1e-3}
        assert len(view.pid2config) == 0 and id(params[0]) not in view.pid2config


@pytest.mark.parametrize(("kind", "text"), [("AdamW", "settings of single parameters"), ("AdamW8bit", "in blocks of a whole parameter")])
def test_reasons_of_refusals(kind: str, text: str) -> None:
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, kind)([nn.Parameter(torch.ones(4))], lr=1e-3)
    for split, device in ((True, "none"), (False, "nvme")):
        with pytest.raises(UnsupportedError, match=text):
            check_whole_tensors(optimizer, split, device)
