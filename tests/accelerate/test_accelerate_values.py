"""Values that a script and its configuration both have: the script fills what the configuration leaves open, two that differ are errors."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations import methods, script_values
from hf_zero.integrations.script_values import start_accelerator
from tests.support import ranks, trainers

WIDTH, BATCH, STEPS, LR = 6, 4, 3, 0.5
STAGES = (0, 1, 2, 3)
KEY = "gradient_clipping"
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).to(ranks.device())


def _rows() -> torch.Tensor:
    return torch.randn(BATCH * STEPS * ranks.world(), WIDTH, generator=torch.Generator().manual_seed(1)) * 10


@contextmanager
def _prepared(
    stage: int = 2, accumulation: int = 1, batch: int = BATCH, frozen: bool = False, **keys: Any
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """An Accelerator with a prepared model, optimizer and loader; ``keys`` are those of the configuration, None leaves one out.

    ``frozen``: the first layer is frozen when the engine is made.
    """
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}, **keys}
        config = {key: value for key, value in config.items() if value is not None}
        accelerator = Accelerator(gradient_accumulation_steps=accumulation, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _build()
        model[0].requires_grad_(not frozen)
        engine, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=LR), DataLoader(_rows(), batch_size=batch)
        )
        yield accelerator, engine, optimizer, loader
        engine.destroy()


def _expected(max_norms: list[float]) -> tuple[list[torch.Tensor], list[float]]:
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for rows, max_norm in zip(_rows().split(BATCH * ranks.world()), max_norms, strict=True):
        optimizer.zero_grad()
        model(rows.to(ranks.device())).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return [param.detach() for param in model.parameters()], norms


def _train(prepared: tuple[Any, ...], max_norm: float | None, steps: bool = True) -> list[float]:
    accelerator, engine, optimizer, loader = prepared
    norms = []
    for rows in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(rows).square().mean())
            if max_norm is not None:
                norms.append(accelerator.clip_grad_norm_(engine.parameters(), max_norm).item())  # a tensor, as without an engine
                assert norms[-1] == engine.get_global_grad_norm().item()
                if not math.isinf(max_norm):
                    assert engine.gradient_clipping() == optimizer.optimizer.clip_grad == max_norm
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    return norms


def _weights(engine: Any) -> list[torch.Tensor]:
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def _clipping(every: bool) -> None:
    from hf_zero.errors import ConfigError, StateError, UnsupportedError

    tried = [(stage, "auto", 0.01) for stage in (STAGES if every else (0, 3))]
    tried += [(stage, None, 0.01) for stage in (STAGES if every else (2,))]
    tried += [(2, "auto", 5.0), (3, None, math.inf), (1, 0.3, 0.3), (2, 0.3, None), (2, None, None), (3, 0.3, math.inf)]
    for stage, written, asked in tried:
        with _prepared(stage, **{KEY: written}) as prepared:
            norms = _train(prepared, asked)
            effective = written if isinstance(written, float) else 1.0 if asked is None else asked
            weights, expected = _expected([effective] * STEPS)
            label = f"stage {stage}, {written} written, {asked} asked"
            torch.testing.assert_close(_weights(prepared[1]), weights, rtol=1e-5, atol=1e-6, msg=lambda text, at=label: f"{at}: {text}")
            assert prepared[1].global_steps == STEPS
            if asked is not None:
                torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    for steps in (True, False):  # a loop that never calls optimizer.step() trains as under DeepSpeed
        with _prepared(3, **{KEY: 0.3}) as prepared:
            _train(prepared, None, steps)
            torch.testing.assert_close(_weights(prepared[1]), _expected([0.3] * STEPS)[0], rtol=1e-5, atol=1e-6)
    with _prepared(2, **{KEY: 1.0}) as prepared:
        with pytest.raises(ConfigError, match=r"gradient_clipping is 1.0 in the configuration.*clip_grad_norm_\(max_norm\) is 0.01"):
            _train(prepared, 0.01)
        assert prepared[1].global_steps == 0, "the error comes before the first update"
    with _prepared() as (accelerator, engine, _, loader):
        rows = next(iter(loader))
        accelerator.backward(engine(rows).square().mean())
        with pytest.raises(UnsupportedError, match="2 of the 4 trained parameters"):
            accelerator.clip_grad_norm_(engine.module[0].parameters(), 0.5)
        with pytest.raises(UnsupportedError, match="norm_type=inf"):
            accelerator.clip_grad_norm_(engine.parameters(), 0.5, norm_type=math.inf)
        with pytest.raises(ConfigError, match="max_norm 0;"):
            accelerator.clip_grad_norm_(engine.parameters(), 0)
        if ranks.world() > 1:
            with pytest.raises(StateError, match=r"max_norm is 0.5 on rank 0, 1.5 on rank 1"):
                accelerator.clip_grad_norm_(engine.parameters(), 0.5 + ranks.rank())
    with _prepared() as (accelerator, engine, optimizer, loader):
        for step, rows in enumerate(loader):  # without optimizer.step()
            accelerator.backward(engine(rows).square().mean())
            if step == 0:
                accelerator.clip_grad_norm_(engine.parameters(), 0.5)
                continue
            with pytest.raises(StateError, match=r"with 0.1 after an update whose gradients, of norm .*, were clipped at 0.5"):
                accelerator.clip_grad_norm_(engine.parameters(), 0.1)
            break
    if ranks.world() > 1:
        with _prepared() as (accelerator, engine, optimizer, loader):
            first, second = [rows for _, rows in zip(range(2), loader, strict=False)]
            accelerator.backward(engine(first).square().mean())
            accelerator.clip_grad_norm_(engine.parameters(), 1e3)
            optimizer.step()
            accelerator.backward(engine(second).square().mean())
            accelerator.clip_grad_norm_(engine.parameters(), 0.5 + ranks.rank())
            with pytest.raises(StateError, match=r"clipped to is 0.5 on rank 0, 1.5 on rank 1"):
                optimizer.step()


def _norms_of_what_joins(stages: Sequence[int]) -> None:
    """The first update is measured before it is made: a layer that joins in it counts, and so does a gradient that the script writes."""
    for stage in stages:
        model, norms = _build(), []
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        with _prepared(stage, frozen=True, **{KEY: "auto"}) as (accelerator, engine, optimizer, loader):
            engine.module[0].requires_grad_(True)
            for step, (rows, whole) in enumerate(zip(loader, _rows().split(BATCH * ranks.world()), strict=True)):
                accelerator.backward(engine(rows).square().mean())
                model(whole.to(ranks.device())).square().mean().backward()
                if stage < 3 and step == 0:
                    for side in (model, engine.module):
                        side[2].bias.grad = torch.full_like(side[2].bias, 30.0)
                        side[0].bias.grad = torch.full_like(side[0].bias, 20.0)
                norms.append(float(accelerator.clip_grad_norm_(engine.parameters(), 0.01)))
                norms[-1] -= float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                if stage == 0 and step == 0:  # those that are shown are clipped by the norm that was measured
                    torch.testing.assert_close(engine.module[2].bias.grad, model[2].bias.grad)
                    torch.testing.assert_close(engine.module[0].bias.grad, model[0].bias.grad)
                optimizer.step()
                plain.step()
                optimizer.zero_grad()
                plain.zero_grad()
            torch.testing.assert_close(norms, [0.0] * STEPS, rtol=0, atol=1e-4, msg=lambda text, at=stage: f"stage {at}: {text}")
            weights = [param.detach() for param in model.parameters()]
            torch.testing.assert_close(_weights(engine), weights, rtol=1e-5, atol=1e-6, msg=lambda text, at=stage: f"stage {at}: {text}")


def _sizes() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    from hf_zero.errors import ConfigError

    with _prepared(train_micro_batch_size_per_gpu=16) as prepared:
        with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu is 16 in the configuration, but the DataLoader.* is 4"):
            _train(prepared, None)
        assert prepared[1].global_steps == 0
    for written in (BATCH, "auto", None):
        with _prepared(train_micro_batch_size_per_gpu=written, batch=BATCH) as prepared:
            _train(prepared, None)
            assert prepared[1].train_micro_batch_size_per_gpu() == BATCH
            assert prepared[1].train_batch_size() == BATCH * ranks.world()
    for written, asked, expected in ((None, 3, 3), ("auto", 3, 3), (3, 3, 3), (3, 1, 3)):
        with _prepared(accumulation=asked, gradient_accumulation_steps=written) as prepared:
            assert prepared[1].gradient_accumulation_steps() == prepared[0].gradient_accumulation_steps == expected
    with pytest.raises(ConfigError, match=r"accumulation_steps is 4 in the configuration, but Accelerator\(gradient_.* is 2"):
        with _prepared(accumulation=2, gradient_accumulation_steps=4):
            pass
    for argument, key, found, value in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", 4, 2),
        ("gradient_clipping", KEY, 1.0, 0.5),
        ("zero_stage", "zero_optimization.stage", 2, 3),
    ):
        config = {"gradient_accumulation_steps": 4, KEY: 1.0, "zero_optimization": {"stage": 2}}
        with (
            trainers.clean_state(),
            pytest.raises(ConfigError, match=rf"{key} is {found} in .*, but DeepSpeedPlugin\({argument}\) is {value}"),
        ):
            DeepSpeedPlugin(hf_ds_config=config, **{argument: value})
    with trainers.clean_state(), pytest.raises(ConfigError, match="bf16.enabled is False in the configuration"):
        plugin = DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": False}, "zero_optimization": {"stage": 2}})
        Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)


def _stand_ins() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    from hf_zero.errors import ConfigError

    def prepare(optimizer: dict[str, Any], scheduler: dict[str, Any], lr: float) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", **optimizer},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", **scheduler}},
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _build()
        stand = DummyOptim(model.parameters(), lr=lr)
        return accelerator.prepare(model, stand, DummyScheduler(stand, total_num_steps=10 * ranks.world(), warmup_num_steps=2))[0]

    for total in ({}, {"total_num_steps": "auto"}, {"total_num_steps": 10}):
        with trainers.clean_state():
            engine = prepare({}, total, 0.25)
            assert engine.optimizer.param_groups[0]["lr"] in (0.25, 0.0) and engine.optimizer.inner.defaults["lr"] == 0.25
            assert engine.settings.scheduler.params["total_num_steps"] == 10
            engine.destroy()
    for optimizer, scheduler, message in (
        ({"params": {"lr": 0.5}}, {}, r"optimizer.params.lr is 0.5 in .*DummyOptim\(lr\) is 0.25"),
        (
            {},
            {"total_num_steps": 11},
            r"scheduler.params.total_num_steps is 11 in .*DummyScheduler\(total_num_steps\), for one process is 10",
        ),
        ({}, {"warmup_num_steps": 3}, r"scheduler.params.warmup_num_steps is 3 in .* is 2"),
    ):
        with trainers.clean_state(), pytest.raises(ConfigError, match=message):
            prepare(optimizer, scheduler, 0.25)


@pytest.mark.parametrize(("world", "every"), [(2, False), *(pytest.param(world, True, marks=pytest.mark.slow) for world in (1, 2))])
def test_the_norm_that_a_script_clips_to_is_the_one_that_counts(world: int, every: bool) -> None:
    ranks.run_ranks(_clipping, world, every)
    ranks.run_ranks(_norms_of_what_joins, world, STAGES if every else (0, 3))


def test_sizes_and_schedules_of_a_script_that_contradict_the_configuration_are_errors() -> None:
    ranks.run_ranks(_sizes, 2)
    ranks.run_ranks(_stand_ins, 2)


SCALES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"init_scale": 256.0, "growth_interval": 2}, {}, ""),
    ({"init_scale": 256.0}, {"initial_scale_power": 8}, ""),
    ({"init_scale": 256.0}, {"initial_scale_power": 7}, r"fp16.initial_scale_power is 7 .* GradScalerKwargs\(init_scale\) is 8"),
    ({"growth_interval": 2}, {"loss_scale": 64}, r"fp16.loss_scale is 64 .* GradScalerKwargs\(growth_interval\) is 2"),
    ({"init_scale": 300.0}, {}, r"GradScalerKwargs\(init_scale=300.0\) has no effect"),
    ({"enabled": False}, {}, r"GradScalerKwargs\(enabled=False\) has no effect"),
]


def _scales(options: dict[str, Any], keys: dict[str, Any], error: str) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import GradScalerKwargs

    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", **keys}}
    with trainers.clean_state():
        handlers = [GradScalerKwargs(**options)]
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if error:
            with pytest.raises((ConfigError, UnsupportedError), match=error):
                accelerator.prepare(model, optimizer)
            return []
        engine, optimizer = accelerator.prepare(model, optimizer)
        seen = []
        for _ in range(5):
            seen.append(float(engine.optimizer.cur_scale))
            accelerator.backward(engine(torch.ones(BATCH, WIDTH).half()).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
    return seen


@pytest.mark.parametrize(("options", "keys", "error"), SCALES, ids=lambda value: str(value)[:40])
def test_the_loss_scale_of_the_script_counts(options: dict[str, Any], keys: dict[str, Any], error: str) -> None:
    """accelerate leaves ``GradScalerKwargs`` out where a DeepSpeed plugin is there."""
    seen = ranks.run_ranks(_scales, 1, options, keys, error)[0]
    if not error:
        # DeepSpeed's scale begins to count with the second step.
        assert seen == ([256.0, 256.0, 256.0, 512.0, 512.0] if "growth_interval" in options else [256.0] * 5)


@pytest.mark.parametrize(
    ("launched", "steps", "engine", "error"),
    [
        ("1", 4, True, ""),  # what `accelerate config` writes where its question is left unanswered
        ("2", 4, True, "is 2 in ACCELERATE_GRADIENT_ACCUMULATION_STEPS.* is 4. Remove the key from `deepspeed_config`"),
        ("4", 4, True, ""),
        ("2", 1, True, ""),  # 1 is the argument's default
        ("auto", 4, True, ""),
        (None, 4, True, ""),
        ("1", 4, False, ""),  # accelerate itself: another engine's script
    ],
)
def test_the_number_of_micro_steps_that_the_launcher_has_is_not_taken_silently(
    launched: str | None, steps: int, engine: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate takes the launcher's number and ignores the script's argument."""
    import accelerate

    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", raising=False)
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", launched)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(engine).lower())
    assert accelerate.Accelerator.__init__.__dict__["hf_zero_method"] is methods.ACCELERATOR
    started: list[int] = []

    def start(self: Any, device_placement: bool = True, gradient_accumulation_steps: int = 1, deepspeed_plugin: Any = None) -> None:
        started.append(gradient_accumulation_steps)

    if error:
        with pytest.raises(ConfigError, match=error):
            start_accelerator(start, None, gradient_accumulation_steps=steps)
    else:
        start_accelerator(start, None, True, steps)
        if engine and launched == "1":
            assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == str(steps)  # accelerate and its plugin read it
            with pytest.raises(ConfigError, match="is 2 in"):  # another Accelerator of the script
                monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
                start_accelerator(start, None, gradient_accumulation_steps=steps)
    assert started == ([] if error else [steps])


@pytest.mark.parametrize(
    ("switch", "ranks", "kind", "warned"),
    [
        ("1", "2", "NO", True),
        ("1", "4", "MULTI_GPU", True),
        ("1", "1", "NO", False),
        ("", "2", "NO", False),
        ("1", "2", "DEEPSPEED", False),
    ],
)
def test_a_run_of_several_processes_without_zero_is_told(
    switch: str, ranks: str, kind: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import DistributedType

    told: list[str] = []
    monkeypatch.setattr(script_values, "warn_once", told.append)
    monkeypatch.setenv("HF_ZERO", switch)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    start_accelerator(lambda accelerator: None, SimpleNamespace(distributed_type=DistributedType(kind)))
    assert [text.startswith("ZeRO is off, although HF_ZERO is 1") and f"is {kind} on {ranks}" in text for text in told] == [True] * warned


def _schedule_under_offload() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    with trainers.clean_state():
        plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {**OFFLOAD, "stage": 2}})
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = _build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)
        assert type(model.optimizer.inner).__name__ == "DeepSpeedCPUAdam"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2):
                accelerator.backward(model(torch.ones(BATCH, WIDTH)).sum())
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
                assert prepared.param_groups[0]["lr"] == LR / (step + 2)
        model.destroy()


def test_a_scheduler_of_the_optimizer_that_accelerate_replaces_sees_its_steps() -> None:
    """torch would warn that the scheduler was stepped before the optimizer."""
    ranks.run_ranks(_schedule_under_offload, 1)


def _own_buffers(stage: int, sends: bool) -> list[float]:
    """Train two steps with ``broadcast_buffers`` of the script; return this rank's running mean."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DistributedDataParallelKwargs

    with trainers.clean_state():
        config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": stage}}
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=sends)]
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=handlers)
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(ranks.device())
        engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for _ in range(2):
            accelerator.backward(engine(_rows()[ranks.rank() :: ranks.world()]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found: list[float] = model[1].running_mean.tolist()
        engine.destroy()
        return found


@pytest.mark.parametrize("sends", [True, False])
def test_broadcast_buffers_false_keeps_the_buffers_of_each_rank(sends: bool) -> None:
    first, second = ranks.run_ranks(_own_buffers, 2, 2, sends)
    assert (first == second) is sends
