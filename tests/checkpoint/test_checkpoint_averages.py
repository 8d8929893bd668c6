"""Averages of weights in checkpoints: read by other numbers of ranks and other stages, by averages made before and after the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.errors import CheckpointError
from hf_zero.utils import AveragedWeights
from tests.support import ranks
from tests.support.averaged import build, same, step, weights
from tests.support.models import CASES
from tests.support.parity import Run, initialize

SETTINGS: dict[str, dict[str, Any]] = {"ema": {"decay": 0.9}, "mean": {"decay": None, "use_buffers": True}}


def _values(averages: AveragedWeights, engine: Any) -> dict[str, Tensor]:
    named = engine.module.named_parameters()
    found = {name: averages.whole(name).clone() for name, param in named if param.requires_grad}
    return found | {f"buffer {name}": value.clone() for name, value in averages.buffers.items()}


def _save(run: Run, folder: Path, frozen: str = "") -> dict[str, Any]:
    """Trains and saves; then goes on, which is what every resumed run must do."""
    engine = initialize(build(), run)
    kept = {name: AveragedWeights(engine, name=name, **given) for name, given in SETTINGS.items()}
    for number in range(3):
        step(engine, number)
        for averages in kept.values():
            averages.update()
    engine.save_checkpoint(str(folder), tag="saved")
    saved = {name: _values(averages, engine) for name, averages in kept.items()}
    with kept["ema"].applied():
        applied = weights(engine)
    for number in range(3, 5):
        step(engine, number)
        for averages in kept.values():
            averages.update()
    after = {name: _values(averages, engine) for name, averages in kept.items()}
    engine.destroy()
    return {"saved": saved, "after": after, "applied": applied}


def _resume(run: Run, folder: Path, expected: dict[str, Any], late: bool) -> None:
    """``late``: averages are made after the load, as a callback of Trainer does."""
    engine = initialize(build(), run)
    kept = {} if late else {name: AveragedWeights(engine, name=name, **given) for name, given in SETTINGS.items()}
    engine.load_checkpoint(str(folder), tag="saved")
    if late:
        kept = {name: AveragedWeights(engine, name=name, **given) for name, given in SETTINGS.items()}
    for name, averages in kept.items():
        assert (averages.updates, averages.calls) == (3, 3)
        same(_values(averages, engine), expected["saved"][name], f"{run}, {name}, loaded")
    with kept["ema"].applied():
        found = weights(engine)
    assert all(torch.equal(found[name], value) for name, value in expected["applied"].items() if "running" not in name)
    if ranks.world() == 2:  # the same batches
        for number in range(3, 5):
            step(engine, number)
            for averages in kept.values():
                averages.update()
        for name, averages in kept.items():
            for label, value in _values(averages, engine).items():
                torch.testing.assert_close(value, expected["after"][name][label], rtol=1e-5, atol=1e-6)
    _begins_anew(engine, kept["ema"], folder)
    engine.destroy()


def _begins_anew(engine: Any, averages: AveragedWeights, folder: Path) -> None:
    """Weights alone are loaded: the average begins with them."""
    engine.load_checkpoint(str(folder), tag="saved", load_module_only=True)
    assert averages.updates == 0
    named = weights(engine)
    assert all(torch.equal(averages.whole(name[:-9]), value) for name, value in named.items() if name.endswith(" (master)"))
    other = AveragedWeights(engine, name="other")
    assert other.updates == 0
    engine.load_checkpoint(str(folder), tag="saved")
    assert averages.updates == 3 and other.updates == 0


@pytest.mark.parametrize(("saved", "loaded"), [(Run(3), Run(1)), pytest.param(Run(0), Run(3), marks=pytest.mark.slow)], ids=str)
def test_any_stage_and_number_of_ranks_reads_them(saved: Run, loaded: Run, tmp_path: Path) -> None:
    expected = ranks.run_ranks(_save, 2, saved, tmp_path)[0]
    ranks.run_ranks(_resume, 2, loaded, tmp_path, expected, False)
    ranks.run_ranks(_resume, 1, Run(2), tmp_path, expected, True)
    ranks.run_ranks(_resume, 2, saved, tmp_path, expected, True)


def _damaged(folder: Path) -> None:
    engine = initialize(build(), Run(2))
    AveragedWeights(engine, **SETTINGS["ema"])
    step(engine, 0)
    engine.save_checkpoint(str(folder), tag="saved")
    file = folder / "saved" / f"average.average-{ranks.rank():05d}-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"average\.average-0000"):
        engine.load_checkpoint(str(folder), tag="saved")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    ranks.run_ranks(_damaged, 2, tmp_path)


# -- split layers --------------------------------------------------------------------------------------------------------


def _split(folder: Path, size: int, loads: bool) -> None:
    """With a decay of 0 the average is the master, whatever a rank has of the parameter."""
    from hf_zero.utils import safe_get_full_fp32_param
    from tests.support.parity import micro_step

    case = CASES["llama"]
    engine = initialize(case.build(), Run(2, extra={"tensor_parallel": {"autotp_size": size}} if size > 1 else {}))
    averages = AveragedWeights(engine, 0.0)
    for number in range(0 if loads else 2):
        micro_step(engine, case.rows(number, 0, 0), case.forward, 0)
        averages.update()
    if loads:
        engine.load_checkpoint(str(folder), tag="saved")
    assert averages.updates == 2
    for name, param in engine.module.named_parameters():
        assert torch.equal(averages.whole(name), safe_get_full_fp32_param(param)), name
    if not loads:
        engine.save_checkpoint(str(folder), tag="saved")
    engine.destroy()


def test_another_tensor_parallel_size_reads_them(tmp_path: Path) -> None:
    ranks.run_ranks(_split, 2, tmp_path, 2, False)
    ranks.run_ranks(_split, 1, tmp_path, 1, True)
