"""Checkpoints of optimizers that need whole tensors: states of any shape, loaded at another number of ranks and another stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import checkpoints, ranks
from tests.support.parity import full_masters
from tests.support.whole_tensors import OPTIMIZERS, RowScaled


def _start(name: str, stage: int, dtype: str, seed: int = 0) -> Any:
    import hf_zero

    model = checkpoints.build(seed)
    make, groups_of = OPTIMIZERS[name]
    settings = checkpoints.config(stage, dtype, **({"checkpoint": {"writer": {"decoupled": True}}} if name == "8 bit" else {}))
    if name == "transformers relative step":  # it sets its rate itself
        del settings["scheduler"]
    return hf_zero.initialize(model=model, optimizer=make(groups_of(model)), config=settings)[0]


def _everything(engine: Any) -> dict[str, Any]:
    """Weights, masters and all states, whole, by name; collective."""
    import hf_zero

    named = list(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters([param for _, param in named]):
        state = {f"weight {name}": param.detach().clone() for name, param in named}
    state |= {f"master {name}": value for name, value in full_masters(engine).items()}
    for name, param in engine.module.named_parameters():
        for key in (
            "row_var",
            "col_var",
            "variance",
            "step",
            "exp_avg_sq_row",
            "exp_avg_sq_col",
            "exp_avg_sq",
            "exp_avg",
            "momentum",
            "codes",
            "scales",
        ):
            value = hf_zero.utils.safe_get_full_optimizer_state(param, key) if param.requires_grad and param.is_floating_point() else None
            if value is not None:
                state[f"{key} {name}"] = value
    return state


def _save(folder: str, name: str, stage: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    engine = _start(name, stage, dtype)
    checkpoints.steps(engine, 0, 3, dtype, same_on_all=True)
    engine.save_checkpoint(folder, "a")
    saved = _everything(engine)
    after = checkpoints.steps(engine, 3, 2, dtype, same_on_all=True)
    final = _everything(engine)
    engine.destroy()
    return saved, final, after


def _load(folder: str, name: str, stage: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    engine = _start(name, stage, dtype, seed=1)
    engine.load_checkpoint(folder, "a")
    for state in engine.optimizer.inner.state.values():
        if "turned" in state:
            assert torch.equal(state["turned"]["by"], torch.arange(6.0).view(2, 3).T) and state["turned"][2].item() == 1.5
            assert state["turned"][2].dtype == torch.float64 and len(state["rows"]) == 1 and state["extent"] > 0
    loaded = _everything(engine)
    after = checkpoints.steps(engine, 3, 2, dtype, same_on_all=True)
    final = _everything(engine)
    engine.destroy()
    return loaded, final, after


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key], key


@pytest.mark.fast_rows("RowScaled-fp16-saved1-loaded1", "marks-fp32-saved2-loaded2")
@pytest.mark.parametrize(
    ("name", "dtype", "saved", "loaded"),
    [
        ("Adafactor groups", "bf16", (3, 3), (1, 2)),
        ("RowScaled", "fp16", (1, 3), (3, 1)),
        ("marks", "fp32", (3, 2), (1, 2)),
        pytest.param("transformers relative step", "fp32", (2, 2), (0, 2), marks=pytest.mark.slow),
        pytest.param("LAMB", "fp32", (0, 2), (3, 4), marks=pytest.mark.slow),
        pytest.param("8 bit", "fp32", (2, 3), (3, 2), marks=pytest.mark.slow),
    ],
)
def test_states_move_between_stages_and_numbers_of_ranks(
    name: str, dtype: str, saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """What is loaded is what was saved, bit for bit, and training goes on as it would have."""
    before, final, after = ranks.run_ranks(_save, saved[1], str(tmp_path), name, saved[0], dtype)[0]
    found, end, later = ranks.run_ranks(_load, loaded[1], str(tmp_path), name, loaded[0], dtype)[0]
    assert sum(any(key.startswith(kind) for kind in ("row_var", "exp_avg", "momentum", "codes")) for key in before)
    _same(found, before)
    if saved[1] == loaded[1]:
        assert [loss for loss, _ in after] == [loss for loss, _ in later]
    assert torch.tensor(later).allclose(torch.tensor(after), rtol=2e-2 if dtype != "fp32" else 2e-5)
    for key, value in final.items():
        if key.startswith("master"):
            assert torch.allclose(end[key], value, rtol=1e-2 if dtype != "fp32" else 1e-4, atol=2e-3 if dtype != "fp32" else 1e-5), key


@pytest.mark.slow  # fast: `test_states_move_between_stages_and_numbers_of_ranks`
def test_each_state_is_written_once(tmp_path: Path) -> None:
    for stage in (0, 3):
        ranks.run_ranks(_save, 2, str(tmp_path / str(stage)), "RowScaled", stage, "fp32")
        index = json.loads((tmp_path / str(stage) / "a" / "index.json").read_text())
        records = index["optimizer"]["params"]
        trained = {param["name"] for unit in index["units"] if unit["kind"] == "master" for param in unit["params"]}
        assert sorted(record["param"] for record in records) == sorted(trained - {"nothing"})
        assert {record["file"] for record in records} == {f"optimizer_params-0000{rank}-of-00002.safetensors" for rank in (0, 1)}
        assert all(set(record["values"]) == {"step", "momentum", "rows", "extent", "turned"} for record in records)


class KeepsObject(RowScaled):
    """Its state holds an object of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["projector"] = object()


def _cannot_be_saved(folder: str) -> str:
    import hf_zero

    model = checkpoints.build()
    engine = hf_zero.initialize(model=model, optimizer=KeepsObject(model.parameters()), config=checkpoints.config(3, "fp32"))[0]
    checkpoints.steps(engine, 0, 1)
    try:
        engine.save_checkpoint(folder, "a")
    except hf_zero.errors.CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()
    return "saved"


def test_state_that_is_an_object_is_refused_by_name(tmp_path: Path) -> None:
    for answer in ranks.run_ranks(_cannot_be_saved, 2, str(tmp_path)):
        assert "optimizer.state[" in answer and "['projector'] is a builtins.object" in answer
    assert not list(tmp_path.iterdir())


MAKERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95)),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02),
    "Adafactor of transformers": lambda groups: _relative(groups),
    "Lamb": lambda groups: _lamb(groups),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02),
    "RowScaled": lambda groups: RowScaled(groups),
}


def _lamb(groups: Any) -> torch.optim.Optimizer:
    from hf_zero.optim.lamb import Lamb

    return Lamb(groups, lr=0.02, betas=(0.7, 0.9))


def _relative(groups: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    return Adafactor([{"params": group["params"]} for group in groups], lr=None, relative_step=True)


def _of(name: str, stage: int) -> Any:
    import hf_zero

    model = checkpoints.build()
    settings = checkpoints.config(stage, "fp32")
    del settings["scheduler"]
    return hf_zero.initialize(model=model, optimizer=MAKERS[name](checkpoints.groups(model)), config=settings)[0]


def _into_another(folder: str, saved: str, loaded: list[str], stage: int) -> list[dict[str, Any]]:
    engine = _of(saved, stage)
    checkpoints.steps(engine, 0, 2, same_on_all=True)
    engine.save_checkpoint(folder, saved)
    moments = {key: value for key, value in _everything(engine).items() if key.startswith("exp_avg") and value.numel()}
    engine.destroy()
    answers = []
    for name in loaded:
        engine = _of(name, stage)
        checkpoints.steps(engine, 5, 1, same_on_all=True)  # what is loaded replaces a state that is there
        own = dict(engine.optimizer.param_groups[0])
        engine.load_checkpoint(folder, saved)
        group = engine.optimizer.param_groups[0]
        kept = [key for key in own if key not in ("lr", "weight_decay", "initial_lr", "params") and group[key] != own[key]]
        found = {key: value for key, value in _everything(engine).items() if key.startswith("exp_avg") and value.numel()}
        whole = [set(state) for state in engine.optimizer.inner.state.values()]
        answer = {"kept": kept, "lr": (own["lr"], group["lr"]), "states": whole, "same": found.keys() == moments.keys() and bool(found)}
        answer["same"] = answer["same"] and all(torch.equal(value, moments[key]) for key, value in found.items())
        answer["steps"] = checkpoints.steps(engine, 7, 2, same_on_all=True)
        answers.append(answer)
        engine.destroy()
    return answers


@pytest.mark.fast_rows("AdamW-loaded0-3")
@pytest.mark.parametrize(
    ("saved", "loaded", "stage"),
    [
        ("AdamW", ["Adafactor", "Adafactor of transformers", "Lamb", "SGD", "Adagrad"], 3),
        ("Adafactor", ["Lamb", "AdamW", "RowScaled"], 1),
        pytest.param("SGD", ["AdamW", "Lamb", "Adafactor"], 2, marks=pytest.mark.slow),
        pytest.param("Lamb", ["AdamW", "SGD"], 3, marks=pytest.mark.slow),
    ],
)
def test_state_of_another_optimizer_is_taken_only_where_it_has_the_same_names(
    saved: str, loaded: list[str], stage: int, tmp_path: Path
) -> None:
    answers = ranks.run_ranks(_into_another, 2, str(tmp_path), saved, loaded, stage)
    for position, name in enumerate(loaded):
        answer = answers[0][position]
        assert answer["kept"] == [], name
        assert answer["lr"][1] == (None if "transformers" in name else 0.01), (name, answer["lr"])
        assert answer["same"] == (saved == "AdamW" and name == "Lamb"), name
        if not answer["same"]:
            assert all(names == {"step", "sum"} if name == "Adagrad" else not names for names in answer["states"]), answer["states"]
        assert all(torch.tensor(step).isfinite().all() for step in answer["steps"])
        assert answers[1][position]["steps"] == answer["steps"]
