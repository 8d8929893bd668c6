"""An Accelerate loop that asks after its steps whether a signal came: what it saves then is where the resumed run goes on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support import ranks, signalled, trainers

BATCHES, ACCUMULATION = 10, 2


def _loop(folder: str, to: dict[int, tuple[int, ...]]) -> tuple[list[float], torch.Tensor]:
    """Numbers of the batches that this run has taken, and the weights at its end; ``to``: ranks that get the signal before a batch."""
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin
    from hf_zero.utils import end_preempted, preempted

    trainers.forget()
    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, deepspeed_plugin=ZeroPlugin(stage=2, gradient_accumulation_steps=ACCUMULATION)
    )
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    rows = torch.arange(2.0 * BATCHES).reshape(-1, 1)
    loader = torch.utils.data.DataLoader(rows, batch_size=1, shuffle=False)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    taken: list[float] = []
    try:
        saved, first = Path(folder, "saved"), 0
        if saved.exists():
            accelerator.load_state(str(saved))
            first = model.global_steps * ACCUMULATION
        assert not preempted()
        for number, batch in enumerate(accelerator.skip_first_batches(loader, first), first):
            signalled.send(*to.get(number, ()))
            taken.append(float(batch))
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if preempted():
                accelerator.save_state(str(saved))
                end_preempted()
        return taken, torch.cat([param.detach().flatten() for param in model.module.parameters()])
    finally:
        _taken.append(taken)
        model.destroy()


_taken: list[list[float]] = []


def _check(folder: str) -> None:
    with signalled.new_process():
        whole, weights = _loop(f"{folder}/none", {})
    for number, to in enumerate(({2: (1,)}, {5: (0,)})):  # the first and the second micro-step of a step
        place = f"{folder}/{number}"
        with signalled.new_process():
            assert signalled.preempted(lambda: _loop(place, to))  # noqa: B023
        with signalled.new_process():
            first = _taken[-1]
            rest, found = _loop(place, {})
        assert len(first) == (4, 6)[number] and first + rest == whole, (first, rest, whole)
        assert torch.equal(found, weights)
    trainers.forget()


def test_the_resumed_loop_takes_the_next_batch(tmp_path: Path) -> None:
    ranks.run_ranks(_check, 2, str(tmp_path))
