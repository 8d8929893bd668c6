"""The pretend accelerator finds what it is made to find: each mistake below is one that a real device forgives most of the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import pretend
from tests.support import ranks

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` in a process that has the device; what it complains of is an error there."""
    return ranks.run_ranks(function, 1, *args, env={"HF_ZERO_TEST_DEVICE": pretend.NAME}, group=False)[0]


def refused(work: Callable[[], Any]) -> str:
    """What the device says of ``work``; the complaint is settled with that."""
    try:
        work()
    except RuntimeError as error:
        pretend.complaints()
        return str(error)
    raise AssertionError("nothing was noticed")


def _side() -> tuple[Any, Any]:
    module = torch.get_device_module(pretend.NAME)
    return module, module.Stream()


def _host_sees_copies_when_it_has_waited() -> None:
    module, side = _side()
    source, host = torch.arange(4.0, device=pretend.NAME), torch.zeros(4).pin_memory()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        host.copy_(source, non_blocking=True)
        source.record_stream(side)
        copied = side.record_event()
    assert host.tolist() == [0, 0, 0, 0]
    copied.synchronize()
    assert host.tolist() == [0, 1, 2, 3]
    target = torch.empty(4, device=pretend.NAME)
    target.copy_(host, non_blocking=True)
    host.fill_(7.0)  # too early: the copy takes what is there when it runs
    assert target.tolist() == [7, 7, 7, 7]


def _streams_are_checked() -> None:
    module, side = _side()
    values = torch.ones(4, device=pretend.NAME)
    with module.stream(side):
        text = refused(lambda: values + 1)
        assert "aten::add on stream" in text and "reads memory that" in text and "has not waited" in text
    side.wait_stream(module.current_stream())
    with module.stream(side):
        more = values[:2] + 1
        values[2:].mul_(3)  # other bytes than those the default stream goes on with
        values.record_stream(side)
    assert values[:2].sum().item() == 2
    refused(lambda: values.sum())
    module.current_stream().wait_stream(side)
    assert (values.sum() + more.sum()).item() == 12


def _freed_memory_is_checked() -> None:
    module, side = _side()

    def use(record: bool) -> torch.Tensor:
        values = torch.full((64,), 2.0, device=pretend.NAME)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            result = values * 2
            if record:
                values.record_stream(side)
        return result

    use(record=True)
    torch.empty(64, device=pretend.NAME).fill_(1.0)
    use(record=False)
    assert "record_stream is missing" in refused(lambda: torch.empty(64, device=pretend.NAME).fill_(1.0))
    host = torch.zeros(64).pin_memory()
    values = torch.ones(64, device=pretend.NAME)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        host.copy_(values, non_blocking=True)
    del values
    torch.empty(64, device=pretend.NAME)
    side.synchronize()
    assert host.isnan().all() and "record_stream is missing" in pretend.complaints()[0]


def _devices_are_kept_apart() -> None:
    values = torch.ones(4, device=pretend.NAME)
    assert "same device" in refused(lambda: values + torch.ones(4))
    assert "same device" in refused(lambda: values + torch.ones(4, device=f"{pretend.NAME}:1"))
    assert (values + torch.tensor(1.0)).sum().item() == 8
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        import ctypes
        import faulthandler

        faulthandler.disable()
        ctypes.memset(values.data_ptr(), 0, 4)  # what a host kernel does with it
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 << 30, dtype=torch.uint8, device=pretend.NAME)


def _models_train_as_on_the_cpu() -> None:
    def losses(device: str, autocast: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 16))
        model[2].weight = model[0].weight
        model.to(device)
        assert model[2].weight is model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(24).view(2, 12).remainder(16).to(device)
        found = []
        for _ in range(3):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    host, device, mixed = losses("cpu", False), losses(pretend.NAME, False), losses(pretend.NAME, True)
    assert device == pytest.approx(host, rel=1e-5)
    assert mixed == pytest.approx(host, rel=2e-2) and mixed != device


def _random_numbers_are_its_own() -> None:
    torch.manual_seed(1)
    first, host = torch.rand(4, device=pretend.NAME), torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4), host) and torch.equal(torch.rand(4, device=pretend.NAME), first)
    state = torch.get_device_module(pretend.NAME).get_rng_state()
    drop = nn.functional.dropout(torch.ones(64, device=pretend.NAME))
    torch.get_device_module(pretend.NAME).set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device=pretend.NAME)), drop)


CHECKS = [
    _host_sees_copies_when_it_has_waited,
    _streams_are_checked,
    _freed_memory_is_checked,
    _devices_are_kept_apart,
    _models_train_as_on_the_cpu,
    _random_numbers_are_its_own,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_device(check: Callable[[], None]) -> None:
    on_device(check)
