"""Checkpoints of every released format version load, at another stage and number of ranks, to the values they were saved with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_golden_checkpoint import CLIENT_STATE, FOLDERS, OPTIMIZERS, TAG
from tests.support import ranks
from tests.support.checkpoints import full_state, start, steps


def _load(folder: str, stage: int) -> None:
    engine = start(stage, "bf16", seed=5, optimizer=OPTIMIZERS[folder.rpartition("_")[2]])
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / TAG) and client_state is not None
    assert torch.equal(client_state.pop("best"), CLIENT_STATE["best"])
    assert client_state == {key: value for key, value in CLIENT_STATE.items() if key != "best"}
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    state = full_state(engine)
    for name, value in load_file(Path(folder) / "expected.safetensors").items():
        assert torch.equal(state[name], value), name
    assert all(state[name] == 3 for name in state if name.startswith("step "))
    steps(engine, 3, 1, "bf16")
    engine.destroy()


@pytest.mark.parametrize(("stage", "world"), [(2, 3), *(pytest.param(*place, marks=pytest.mark.slow) for place in ((0, 1), (3, 2)))])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_released_checkpoint_loads(folder: Path, stage: int, world: int) -> None:
    ranks.run_ranks(_load, world, str(folder), stage)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_released_checkpoint_is_read_by_the_script(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    masters = {name.removeprefix("master "): value for name, value in expected.items() if name.startswith("master ")}
    assert masters and all(torch.equal(weights[name], value) for name, value in masters.items())


def test_there_are_folders_of_the_present_version() -> None:
    from hf_zero.checkpoint.format.names import VERSION

    assert {f"checkpoint_v{VERSION}_{optimizer}" for optimizer in OPTIMIZERS} <= {folder.name for folder in FOLDERS}
