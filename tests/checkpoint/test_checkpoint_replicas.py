"""Shard groups with replicas: a checkpoint is written once, by all ranks, and loads at any other layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.rows import slow_but
from tests.support.whole_tensors import RowScaled

SLOW = pytest.mark.slow


def grouped(stage: int, size: int) -> dict[str, Any]:
    """Sections of a configuration with shard groups of ``size`` ranks; 0: one group."""
    groups = {"mics_shard_size": size} if size else {}
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **groups}}


def _interrupted(folder: str, stage: int, dtype: str, optimizer: Any, extra: dict[str, Any]) -> None:
    extra = {**grouped(stage, 2), **extra}
    engine = start(stage, dtype, optimizer=optimizer, **extra)
    steps(engine, 0, 3, dtype)
    engine.save_checkpoint(folder, client_state={"rank": ranks.rank()})
    saved = full_state(engine)
    expected = steps(engine, 3, 2, dtype)
    end = full_state(engine)
    engine.checkpoints.wait()
    engine.destroy()

    engine = start(stage, dtype, seed=5, optimizer=optimizer, **extra)
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"rank": ranks.rank()}  # every rank's own, of all groups
    assert differences(full_state(engine), saved) == []
    assert steps(engine, 3, 2, dtype) == expected
    assert differences(full_state(engine), end) == []
    engine.destroy()


@pytest.mark.slow  # fast: `test_full_state_at_another_layout`
@pytest.mark.fast_rows("3-bf16")
@pytest.mark.parametrize(("stage", "dtype"), [pytest.param(1, "fp32", marks=SLOW), (2, "fp16"), (3, "bf16")])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stage: int, dtype: str) -> None:
    ranks.run_ranks(_interrupted, 4, str(tmp_path), stage, dtype, torch.optim.AdamW, {})


@pytest.mark.slow  # fast: test_checkpoint_background.py
def test_a_save_in_the_background(tmp_path: Path) -> None:
    ranks.run_ranks(_interrupted, 4, str(tmp_path), 3, "bf16", torch.optim.AdamW, IN_BACKGROUND)


@pytest.mark.slow  # fast: test_checkpoint_whole_tensors.py
@pytest.mark.fast_rows("Adafactor")
@pytest.mark.parametrize("optimizer", [RowScaled, torch.optim.Adafactor])
def test_states_of_whole_tensors(tmp_path: Path, optimizer: Any) -> None:
    ranks.run_ranks(_whole_tensors, 4, str(tmp_path), optimizer)
    _written_once(tmp_path / "global_step3")


def _whole_tensors(folder: str, optimizer: Any) -> None:
    import hf_zero
    from tests.support.checkpoints import build, config

    def engine_of(seed: int) -> Any:
        model = build(seed)
        trained = [param for param in model.parameters() if param.requires_grad]
        return hf_zero.initialize(model=model, optimizer=optimizer(trained, lr=0.01), config=config(3, "fp32", **grouped(3, 2)))[0]

    engine = engine_of(0)
    steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    expected = steps(engine, 3, 2)
    engine.destroy()
    engine = engine_of(5)
    engine.load_checkpoint(folder)
    assert steps(engine, 3, 2) == expected
    engine.destroy()


# -- other layouts ------------------------------------------------------------------------------------------------------


def _save(folder: str, stage: int, size: int) -> dict[str, Any]:
    engine = start(stage, "bf16", **grouped(stage, size))
    steps(engine, 0, 3, "bf16")
    engine.save_checkpoint(folder)
    state = full_state(engine)
    engine.destroy()
    return state


def _load(folder: str, stage: int, size: int, expected: dict[str, Any]) -> list[str]:
    engine = start(stage, "bf16", seed=5, reverse=True, **grouped(stage, size))
    engine.load_checkpoint(folder)
    wrong = differences(full_state(engine), expected)
    steps(engine, 3, 1, "bf16")
    engine.destroy()
    return wrong


@pytest.mark.fast_rows("before3-after3")
@pytest.mark.parametrize(
    ("before", "after"),  # (ranks, stage, size of a shard group)
    [
        pytest.param((4, 3, 2), (4, 3, 0), marks=SLOW),
        ((4, 2, 2), (3, 3, 0)),
        pytest.param((4, 3, 2), (6, 1, 3), marks=SLOW),
        ((6, 3, 3), (4, 3, 2)),
        pytest.param((6, 2, 2), (1, 0, 0), marks=SLOW),
        pytest.param((4, 1, 1), (4, 3, 2), marks=SLOW),
        ((2, 3, 0), (4, 3, 2)),
        pytest.param((3, 0, 0), (6, 2, 3), marks=SLOW),
    ],
)
def test_full_state_at_another_layout(tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    expected = ranks.run_ranks(_save, before[0], str(tmp_path), *before[1:])[0]
    _written_once(tmp_path / "global_step3")
    for wrong in ranks.run_ranks(_load, after[0], str(tmp_path), *after[1:], expected):
        assert wrong == []


def _sizes(folder: Path) -> Counter[str]:
    """Bytes by kind of file."""
    sizes: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        sizes[file.name.split("-")[0]] += file.stat().st_size
    return sizes


def _written_once(folder: Path) -> None:
    """A tensor is in one file, the pieces of a unit in one per rank."""
    seen: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        kind, _, number = file.name.removesuffix(".safetensors").partition("-")
        world = int(number.rpartition("-")[2]) if "-of-" in number else 1
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                seen[f"{kind} {name}"] += 1
                pieces = world if kind.startswith(("master", "weights", "optimizer.")) else 1
                assert seen[f"{kind} {name}"] <= pieces, (file.name, name)


@pytest.mark.slow  # fast: `test_full_state_at_another_layout`
@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_as_many_bytes_as_without_groups_spread_as_evenly(tmp_path: Path, stage: int) -> None:
    folders = {size: tmp_path / str(size) for size in (0, 2)}
    for size, folder in folders.items():
        ranks.run_ranks(_save, 4, str(folder), stage, size)
    flat, groups = (_sizes(folder / "global_step3") for folder in folders.values())
    assert groups == flat
    files = sorted((folders[2] / "global_step3").glob("master-*"))
    assert len(files) == 4 and len({file.stat().st_size for file in files}) == 1, [(file.name, file.stat().st_size) for file in files]


# -- whole models -------------------------------------------------------------------------------------------------------


def _export(folder: str) -> bool:
    from safetensors.torch import load_file

    zero = grouped(3, 2)["zero_optimization"]
    engine = start(3, "bf16", zero_optimization={**zero, "stage3_gather_16bit_weights_on_model_save": True})
    steps(engine, 0, 2, "bf16")
    state = full_state(engine)
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is not None) == (ranks.rank() == 0)
    engine.save_16bit_model(folder)
    if ranks.rank() == 0:
        files = load_file(Path(folder) / "model.safetensors")
        for name, value in files.items():
            expected = state.get(f"weight {name}", state.get(f"buffer {name}"))
            assert torch.equal(value, expected) and torch.equal(whole[name], expected), name
    engine.destroy()
    return whole is not None


@pytest.mark.slow  # fast: test_stage3_saving.py
def test_whole_weights_are_written_by_one_rank(tmp_path: Path) -> None:
    assert ranks.run_ranks(_export, 4, str(tmp_path)) == [True, False, False, False]


def _node_local() -> str:
    try:
        start(3, **grouped(3, 2), checkpoint={"use_node_local_storage": True})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_disks_of_nodes_are_refused_by_name() -> None:
    for answer in ranks.run_ranks(_node_local, 4):
        assert answer.startswith("UnsupportedError") and "checkpoint.use_node_local_storage" in answer and "mics_shard_size" in answer
