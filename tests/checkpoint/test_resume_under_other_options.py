"""A checkpoint resumed with param groups in another order or number, another class of the same optimizer, or parts that were not there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import CheckpointError
from hf_zero.ops import HostAdam
from tests.support import ranks
from tests.support.checkpoints import build, config, groups, steps

# -- learning rates of a scheduler follow their groups ------------------------------------------------------------------


def _scheduled(division: str, seed: int) -> tuple[Any, dict[str, int]]:
    """Return an engine with a scheduler of the script, and the group of each kind of parameter."""
    import hf_zero

    model = build(seed)
    decayed, plain = groups(model)
    made = [plain, decayed] if division == "reversed" else [decayed, plain]
    if division == "split":
        made = [decayed, {**plain, "params": plain["params"][:3]}, {**plain, "params": plain["params"][3:]}]
    optimizer = torch.optim.AdamW(made, lr=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[1])
    settings = {key: value for key, value in config(2, "fp32").items() if key != "scheduler"}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings)[0]
    places = {"two": (0, 1), "reversed": (1, 0), "split": (0, 2)}[division]
    return engine, dict(zip(("decayed", "plain"), places, strict=True))


def _rates(engine: Any, places: dict[str, int]) -> dict[str, list[float]]:
    """Train two steps; return the learning rates after each."""
    seen: dict[str, list[float]] = {kind: [] for kind in places}
    for step in range(2):
        steps(engine, 3 + step, 1)
        for kind, place in places.items():
            seen[kind].append(engine.optimizer.param_groups[place]["lr"])
            assert engine.lr_scheduler.get_last_lr()[place] == seen[kind][-1]
    return seen


def _regrouped(folder: str) -> list[dict[str, list[float]]]:
    engine, places = _scheduled("two", 0)
    steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    found = [_rates(engine, places)]
    engine.destroy()
    for division in ("two", "reversed", "split"):
        engine, places = _scheduled(division, 5)
        engine.load_checkpoint(folder)
        found.append(_rates(engine, places))
        engine.destroy()
    return found


def test_rates_of_a_scheduler_follow_their_param_groups(tmp_path: Path) -> None:
    for expected, *resumed in ranks.run_ranks(_regrouped, 2, str(tmp_path)):
        assert expected["plain"][0] == pytest.approx(3 * expected["decayed"][0])
        assert all(one[kind] == pytest.approx(expected[kind]) for one in resumed for kind in one)


# -- another class of the same optimizer --------------------------------------------------------------------------------


def _engine(cls: Any, seed: int, **options: Any) -> Any:
    import hf_zero

    model = build(seed)
    optimizer = cls(groups(model), lr=0.01, eps=1e-3, **options)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config(2, "fp32", zero_force_ds_cpu_optimizer=False))[0]


def _other_class(folder: str) -> None:
    for saving, resuming in ((HostAdam, torch.optim.AdamW), (torch.optim.AdamW, HostAdam)):
        engine = _engine(saving, 0)
        steps(engine, 0, 2)
        engine.save_checkpoint(folder)
        expected = steps(engine, 2, 2)
        engine.destroy()
        engine = _engine(resuming, 5)
        engine.load_checkpoint(folder)
        for found, wanted in zip(steps(engine, 2, 2), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)
        engine.destroy()


def test_native_and_torch_adam_load_each_other(tmp_path: Path) -> None:
    ranks.run_ranks(_other_class, 2, str(tmp_path))


def _refused(folder: str, saving: Any, options: dict[str, Any], resuming: Any, present: dict[str, Any]) -> str:
    engine = _engine(saving, 0, **options)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = _engine(resuming, 5, **present)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


ADAMW = torch.optim.AdamW
REFUSED = {
    "switch": (ADAMW, {"amsgrad": True}, HostAdam, {}, "saved by AdamW with amsgrad True, and HostAdam, which trains now, does not have"),
    "correction": (HostAdam, {"bias_correction": False}, ADAMW, {}, "saved by HostAdam with bias_correction False, and AdamW"),
    "state": (HostAdam, {}, ADAMW, {"amsgrad": True}, "was saved by HostAdam, without max_exp_avg_sq, which AdamW needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_the_other_class_lacks_are_named(tmp_path: Path, name: str) -> None:
    *case, expected = REFUSED[name]
    first, second = ranks.run_ranks(_refused, 2, str(tmp_path), *case)
    assert first == second and expected in first and "load_optimizer_states=False" in first


# -- parts that only one of the two has ---------------------------------------------------------------------------------


class Counts(torch.nn.Linear):
    """A layer with state of its own kind."""

    def get_extra_state(self) -> Any:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def _extra_state(folder: str) -> list[str]:
    import hf_zero

    said = []
    for name, kinds in (("with", (Counts, torch.nn.Linear)), ("without", (torch.nn.Linear, Counts))):
        for index, kind in enumerate(kinds):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(2, 2))
            settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
            engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)[0]
            if not index:
                engine.save_checkpoint(f"{folder}/{name}")
            else:
                with pytest.raises(CheckpointError) as caught:
                    engine.load_checkpoint(f"{folder}/{name}")
                said.append(str(caught.value))
                engine.load_checkpoint(f"{folder}/{name}", load_module_strict=False)
            engine.destroy()
    return said


def test_extra_state_that_only_one_side_has_is_named(tmp_path: Path) -> None:
    for said in ranks.run_ranks(_extra_state, 2, str(tmp_path)):
        assert "this model lacks the extra state of 1 of the checkpoint" in said[0]
        assert "the checkpoint lacks the extra state of 1 of this model" in said[1]


def _said_of_states(folder: str, frozen: str, scheduled: bool) -> list[str]:
    import hf_zero
    from hf_zero import observe

    seen: list[str] = []
    for name in ("", frozen):
        model = build(0)
        if name:
            model.get_submodule(name).requires_grad_(False)
        optimizer = torch.optim.AdamW(groups(model, reverse=bool(name)))
        settings = config(2, "fp32")
        if name or not scheduled:
            del settings["scheduler"]
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings)[0]
        if name:
            handler = logging.Handler()
            handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
            observe.logger.addHandler(handler)
            engine.load_checkpoint(folder)
            observe.logger.removeHandler(handler)
        else:
            steps(engine, 0, 1)
            engine.save_checkpoint(folder)
        engine.destroy()
    return seen


def test_states_that_are_not_loaded_are_named(tmp_path: Path) -> None:
    said = "\n".join(ranks.run_ranks(_said_of_states, 2, str(tmp_path / "engine"), "entry", True)[0])
    assert "holds optimizer states of 2 parameters that this engine does not train (entry.weight, ...)" in said
    assert "holds the state of a scheduler, but this engine has none" in said
    said = "\n".join(ranks.run_ranks(_said_of_states, 2, str(tmp_path / "script"), "entry", False)[0])
    assert "groups of this optimizer are the saved groups [1, 0] of 2" in said and "a scheduler whose state the script loads itself" in said
