"""Test spikes after which all ranks go back to the newest saved state: the weights are those of plain PyTorch without the batches since."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.checkpoint import rewinds
from hf_zero.config.resolve import resolve
from hf_zero.core.step import spikes
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from tests.support import ranks
from tests.support.checkpoints import differences, full_state
from tests.support.logged import messages_of_log
from tests.support.models import CASES, Batch, cast_floats, class_loss
from tests.support.parity import Run, initialize
from tests.support.spikes import few_values

MLP = CASES["mlp"]
EVERY, SPIKE, STEPS = 3, 7, 11  # snapshots after steps 2 and 5 (from 0 on), so steps 6 and 7 are left out
USED = [*range(6), *range(8, STEPS)]
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 20}}}


def _rows(step: int, micro: int, rank: int, drawn: float, large: tuple[int, ...] = ()) -> Batch:
    """Return a batch; in the steps of ``large`` the inputs of rank 1 are 50 times as large."""
    batch = MLP.rows(step % 2, micro, rank)
    batch["inputs"] *= (1 + drawn / 10) * (50 if step in large and rank == 1 else 1)
    return batch


def _settings(folder: Path, **own: Any) -> dict[str, Any]:
    section = {"spike_action": "rewind", "spike_factor": 3.0, "snapshot_steps": EVERY, "snapshot_folder": str(folder)}
    return {"hf_zero": section | own}


def _train(
    engine: Any, steps: list[int], accumulation: int = 1, large: tuple[int, ...] = (SPIKE,), saves: dict[int, Path] | None = None
) -> None:
    """Train on the batches of ``steps``; each draws a random number. After the steps in ``saves`` a checkpoint is saved."""
    for step in steps:
        for micro in range(accumulation):
            batch = _rows(step, micro, ranks.rank(), float(torch.rand(())), large)
            engine.backward(class_loss(engine, cast_floats(batch, engine.precision.param_dtype or torch.float32)))
            engine.step()
        engine.snapshot({"next": step + 1})
        if saves and step in saves:
            engine.save_checkpoint(saves[step], client_state={"drawn": torch.get_rng_state()})


def _without_counters(engine: Any) -> dict[str, Any]:
    return {name: value for name, value in full_state(engine).items() if name != "counters"}


def _seed() -> None:
    torch.manual_seed(17 + ranks.rank())


def _reference(accumulation: int, world: int) -> list[torch.Tensor]:
    """Train in plain PyTorch on the batches of all ranks in the steps ``USED``, as if there were no others."""
    run, module = Run(), MLP.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=run.lr, betas=(0.9, 0.99), weight_decay=run.weight_decay, eps=run.eps)
    draws = [torch.Generator().manual_seed(17 + rank) for rank in range(world)]
    for step in USED:
        for micro in range(accumulation):
            for rank in range(world):
                batch = _rows(step, micro, rank, float(torch.rand((), generator=draws[rank])))
                (class_loss(module, batch) / (world * accumulation)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


def _case(folder: Path, run: Run, **own: Any) -> None:
    """Go back once; compare with an engine that never had the batches between, bit for bit, and in fp32 with plain PyTorch."""
    plain = Run(**{**vars(run), "extra": {key: value for key, value in run.extra.items() if key != "hf_zero"}})
    with few_values(), messages_of_log() as messages:
        _seed()
        engine = initialize(MLP.build(), Run(**{**vars(run), "extra": {**run.extra, **_settings(folder, **own)}}))
        _train(engine, list(range(STEPS)), run.accumulation)
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (STEPS, 2, STEPS * run.accumulation)
    if ranks.rank() == 0:
        (told,) = [line for line in messages if "samples" in line and "of the run" in line]
        rows = ranks.world() * run.accumulation * 2
        assert told.startswith(f"step={SPIKE + 1}: the {'loss' if 'loss_spike_factor' in own else 'gradient norm'}")
        assert f"samples {SPIKE * rows} to {(SPIKE + 1) * rows - 1} of the run" in told
        assert (
            f"step={SPIKE + 1}: restored the snapshot of step 6; the batches of steps 7 to 8 are skipped, and training continues"
            in messages
        )
    assert engine.reports.measured["Train/Spike/step"] == SPIKE + 1 and engine.reports.measured["Train/Spike/back_to_step"] == 6
    found = _without_counters(engine)
    engine.destroy()
    _seed()
    other = initialize(MLP.build(), plain)
    other.snapshot = lambda client_state: False
    _train(other, USED, run.accumulation, large=())
    assert differences(found, _without_counters(other)) == []
    other.destroy()
    if run.dtype == "fp32" and "scheduler" not in run.extra:
        named = MLP.build().named_parameters()
        for (name, _), expected in zip(named, _reference(run.accumulation, ranks.world()), strict=True):
            torch.testing.assert_close(found[f"weight {name}"].float(), expected, rtol=1e-5, atol=1e-6)


def _resumed(folder: Path) -> None:
    """A checkpoint is nearer than the snapshot; runs that resume from it, or from a later one, decide alike and take the same batches."""
    run = Run(stage=2, extra={**SCHEDULE, **_settings(folder)})
    saves = {6: folder / "before", 8: folder / "after"}
    with few_values():
        _seed()
        engine = initialize(MLP.build(), run)
        _train(engine, list(range(STEPS)), saves=saves)
        found, state = full_state(engine), engine.spikes.state_dict()
        assert engine.skipped_steps == 1, "step 7 alone"
        engine.destroy()
        for place in saves.values():
            resumed = initialize(MLP.build(), run)
            _, client_state = resumed.load_checkpoint(place)
            assert client_state.keys() == {"drawn"}
            torch.set_rng_state(client_state["drawn"])
            _train(resumed, list(range(resumed.global_steps, STEPS)))
            assert differences(full_state(resumed), found) == [] and resumed.spikes.state_dict() == state
            resumed.destroy()


def _limit(folder: Path) -> None:
    """From the second return to the same weights on a spike is skipped; without a saved state, too. A scheduler must be known."""
    run = Run(stage=1, extra=_settings(folder, snapshot_steps=6))
    with (
        few_values(),
        messages_of_log() as messages,
        mock.patch.object(spikes, "MOST_REWINDS", 1),
        mock.patch.object(rewinds, "MOST_REWINDS", 1),
    ):
        engine = initialize(MLP.build(), run)
        _train(engine, list(range(STEPS)), large=(SPIKE, SPIKE + 2))
        assert engine.skipped_steps == 3, "steps 6, 7 and 9"
        assert ranks.rank() or any("spikes the weights of step 8 were restored" in line for line in messages)
        engine.destroy()
        model = MLP.build()
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        early = initialize(model, Run(stage=1, extra=_settings(folder, snapshot_steps=50)), optimizer=first)
        scheduler = torch.optim.lr_scheduler.LambdaLR(early.optimizer, lambda step: 1 / (1 + step))
        _train(early, list(range(9)))
        assert early.skipped_steps == 1
        assert ranks.rank() or any("there is no snapshot or checkpoint to restore" in line for line in messages)
        with pytest.raises(StateError, match="rewind_also"):
            early.save_checkpoint(folder / "unknown")
        with pytest.raises(TypeError, match="not int"):
            early.rewind_also(3)
        early.rewind_also(scheduler)
        early.save_checkpoint(folder / "known")
        scheduler.step()
        _train(early, [9], large=(9,))
        assert scheduler.last_epoch == 0 and early.skipped_steps == 2, "back with the checkpoint of step 9"
        early.destroy()


def _all(folder: Path, every: bool) -> None:
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    if every:
        _case(folder, Run(stage=0, accumulation=2))
        _case(folder, Run(stage=3, dtype="bf16", extra={**SCHEDULE, **offload}))
    _case(folder, Run(stage=1, dtype="fp16", scale_power=4, extra=SCHEDULE))
    _case(folder, Run(stage=3), spike_factor=0, loss_spike_factor=2.0)
    _resumed(folder)
    _limit(folder)
    torch.distributed.barrier()  # rank 0 removes them
    assert not list(folder.glob("hf_zero-*")), "the snapshots are removed with their engines"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_go_back_and_take_the_next_batches(tmp_path: Path, every: bool) -> None:
    ranks.run_ranks(_all, 2, tmp_path, every)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"spike_factor": 5}, "hf_zero.snapshot_steps"),
        ({"snapshot_steps": 5}, "hf_zero.spike_factor"),
        ({"spike_factor": 5, "snapshot_steps": 5, "stages": 2}, "pipeline.stages"),
    ],
)
def test_what_a_rewind_lacks_is_named(own: dict[str, Any], text: str) -> None:
    stages = own.pop("stages", 1)
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        resolve({"train_batch_size": 1, "hf_zero": {"spike_action": "rewind", **own}, "pipeline": {"stages": stages}})
