"""``optimizer.load_state_dict`` of an engine takes the state of a plain torch optimizer, and refuses the part of another rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.errors import ConfigError, StateError
from tests.support import ranks

STEPS = 3
Made = Callable[[nn.Module], torch.optim.Optimizer]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))


def _batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [param for param in named.values() if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in named.values() if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(model), lr=1e-2)


def _by_name(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def _sgd_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(model), lr=1e-2, momentum=0.9)


def _whole(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(_groups(model), lr=1e-2)


def _loss(model: nn.Module, step: int) -> Tensor:
    found: Tensor = (model(_batch(step)) - 1).square().mean()
    return found


def _plain(make: Made) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    """Return weights and optimizer state after some steps of plain PyTorch, and the losses of further ones."""
    model = _model()
    optimizer = make(model)
    losses, weights, state = [], {}, {}
    for step in range(2 * STEPS):
        if step == STEPS:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            state = torch.load(_saved(optimizer.state_dict()), weights_only=True)
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return weights, state, losses[STEPS:]


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _engine(make: Made, zero: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Any:
    model = _model()
    if weights is not None:
        model.load_state_dict(weights)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    return hf_zero.initialize(model=model, optimizer=make(model), config=config)[0]


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _continues(make: Made, zero: dict[str, Any]) -> None:
    weights, state, expected = _plain(make)
    engine = _engine(make, zero, weights)
    engine.optimizer.load_state_dict(state)
    assert _train(engine, range(STEPS, 2 * STEPS)) == pytest.approx(expected, rel=1e-5)
    engine.destroy()


def _all_kinds() -> None:
    host = {"offload_optimizer": {"device": "cpu"}}
    for make in (_adamw, _by_name, _sgd, _whole):
        for zero in ({"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 1, **host}):
            _continues(make, zero)


def test_the_state_of_a_plain_optimizer_is_continued() -> None:
    ranks.run_ranks(_all_kinds, 2)


def _parts() -> None:
    """The state that rank 0 has saved is loaded by all ranks, as scripts for DDP do it."""
    for zero in ({"stage": 0}, {"stage": 1}, {"stage": 3}):
        engine = _engine(_sgd, zero)
        _train(engine, range(STEPS))
        own = torch.load(_saved(engine.optimizer.state_dict()), weights_only=True)
        box = [own]
        dist.broadcast_object_list(box, 0)
        expected = _train(engine, range(STEPS, 2 * STEPS))
        again = _engine(_sgd, zero)
        _train(again, range(STEPS))
        if ranks.rank() and zero["stage"]:
            with pytest.raises(StateError, match=r"state of other parts of the parameters than this rank trains.*save_checkpoint"):
                again.optimizer.load_state_dict(box[0])
        again.optimizer.load_state_dict(own if zero["stage"] else box[0])
        assert _train(again, range(STEPS, 2 * STEPS)) == expected


def test_the_part_of_another_rank_is_refused() -> None:
    ranks.run_ranks(_parts, 2)


def _unfit() -> None:
    state = _plain(_adamw)[1]
    for make, text in (
        (_sgd, r"param groups of \[2, 4\] parameters, and this one has groups of \[6\]"),
        (_sgd_in_groups, r"keeps exp_avg, exp_avg_sq, step of 0.weight, and SGD, which trains now, keeps momentum_buffer"),
    ):
        engine = _engine(make, {"stage": 3})
        before = _train(engine, range(1))
        with pytest.raises(StateError, match=text):
            engine.optimizer.load_state_dict(state)
        assert _train(engine, range(1)) < before  # goes on


def test_a_plain_state_that_does_not_fit_is_one_error() -> None:
    ranks.run_ranks(_unfit, 2)


def _loaded_before() -> None:
    """The script loads weights and optimizer before it prepares them, as scripts for DDP do it."""
    host = {"offload_optimizer": {"device": "cpu"}}
    for make in (_adamw, _sgd, _whole):
        weights, state, expected = _plain(make)

        def loaded(model: nn.Module, make: Made = make, state: dict[str, Any] = state) -> torch.optim.Optimizer:
            optimizer = make(model)
            optimizer.load_state_dict(state)
            return optimizer

        for zero in ({"stage": 0}, {"stage": 3}, {"stage": 2, **host}):
            engine = _engine(loaded, zero, weights)
            assert _train(engine, range(STEPS, 2 * STEPS)) == pytest.approx(expected, rel=1e-5)
            engine.destroy()


def test_state_that_the_optimizer_has_before_initialize_is_continued() -> None:
    ranks.run_ranks(_loaded_before, 2)


def _prepare(make: Made, zero: dict[str, Any]) -> tuple[Any, Any, Any, list[float]]:
    """Return an Accelerator with an engine and an optimizer, whose state was loaded before, and the losses of plain PyTorch."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    weights, state, expected = _plain(make)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = _model()
    model.load_state_dict(weights)
    optimizer = make(model)
    optimizer.load_state_dict(state)
    return accelerator, *accelerator.prepare(model, optimizer), expected


def _prepared(stage: int, host: bool) -> None:
    from tests.support.trainers import clean_state

    with clean_state():
        zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if host else {})}
        accelerator, engine, optimizer, expected = _prepare(_adamw, zero)
        losses = []
        for step in range(STEPS, 2 * STEPS):
            loss = _loss(engine, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("stage", "host"), [(3, False), (2, True)])
def test_state_that_the_optimizer_has_before_prepare_is_continued(stage: int, host: bool) -> None:
    pytest.importorskip("accelerate")
    ranks.run_ranks(_prepared, 2, stage, host)


def _of_another_kind() -> None:
    """Accelerate replaces SGD by an Adam on the host, which cannot go on with momentum."""
    from tests.support.trainers import clean_state

    text = r"the DeepSpeedCPUAdam given to initialize\(\) already has state, which cannot be continued: its optimizer keeps momentum_buffer"
    with clean_state(), pytest.raises(ConfigError, match=text):
        _prepare(_sgd, {"stage": 2, "offload_optimizer": {"device": "cpu"}})


def test_state_of_another_kind_of_optimizer_is_one_error() -> None:
    pytest.importorskip("accelerate")
    ranks.run_ranks(_of_another_kind, 2)
