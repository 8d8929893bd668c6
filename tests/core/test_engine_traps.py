"""Test undocumented details that accelerate, transformers, trl and Lightning rely on: arguments, attributes, classes, schedulers."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize, micro_step
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
MLP = CASES["mlp"]
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}


def step(engine: Any, number: int = 0) -> None:
    micro_step(engine, MLP.rows(number, 0, ranks.rank()), class_loss, 0)


# ------------------------------------------------------------------------------------------------ arguments


def _configuration_arguments(folder: str) -> None:
    """Pass ``config``, ``config_params``, a path, JSON text, or ``args.deepspeed_config``; ``config`` has priority."""
    import hf_zero

    config, other = Run(stage=2).config(), {**Run(stage=1).config(), "train_micro_batch_size_per_gpu": 7}
    path = f"{folder}/rank{ranks.rank()}.json"
    with open(path, "w") as file:
        json.dump(config, file)
    namespace = argparse.Namespace(deepspeed_config=path, device_rank=0)
    for arguments in (
        {"config": config}, {"config_params": config}, {"config": config, "config_params": other}, {"config": path},
        {"config": json.dumps(config)}, {"args": namespace},
    ):  # fmt: skip
        engine, optimizer, loader, scheduler = hf_zero.initialize(model=MLP.build(), **arguments)
        assert engine.train_micro_batch_size_per_gpu() == 2 and engine.zero_optimization_stage() == 2, arguments
        assert optimizer is engine.optimizer and loader is None and scheduler is None
        engine.destroy()
    hf_zero.initialize(model=MLP.build(), args=namespace, config=path)[0].destroy()  # the same twice
    with pytest.raises(AssertionError, match=r"two configurations that differ: args.deepspeed_config \('.*json'\) and config= \(a dict\)"):
        hf_zero.initialize(model=MLP.build(), args=namespace, config=other)


def _optimizer_situations(stage: int) -> None:
    """Pass a client optimizer; the configuration's over a list, a lazy iterator, or None; a function; or no optimizer."""
    import hf_zero

    config = Run(stage=stage).config()
    without = {key: value for key, value in config.items() if key != "optimizer"}
    model = MLP.build()
    situations: list[dict[str, Any]] = [
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "config": without},
        {"model": MLP.build(), "config": config},
        {"model": (listed := MLP.build()), "model_parameters": list(listed.parameters()), "config": config},
        {"model": (lazy := MLP.build()), "model_parameters": filter(lambda p: p.requires_grad, lazy.parameters()), "config": config},
        {"model": (called := MLP.build()), "model_parameters": called.parameters(), "optimizer": torch.optim.SGD, "config": without},
    ]
    for arguments in situations:
        engine, optimizer, _, _ = hf_zero.initialize(**arguments)
        assert sum(len(group["params"]) for group in optimizer.param_groups) > 0
        before = _first_weight(engine)
        step(engine)
        assert not torch.equal(before, _first_weight(engine)), arguments.keys()
        engine.destroy()
    if stage:
        offloading = {**without, "zero_optimization": {**without["zero_optimization"], "offload_optimizer": {"device": "cpu"}}}
        model = MLP.build()
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(hf_zero.errors.ConfigError, match="optimizer Adam with .*zero_force_ds_cpu_optimizer is true"):
            hf_zero.initialize(model=model, optimizer=adam, config={**offloading, "zero_force_ds_cpu_optimizer": True})
        hf_zero.initialize(model=model, optimizer=adam, config=offloading)[0].destroy()
    engine, optimizer, _, scheduler = hf_zero.initialize(model=MLP.build(), config={**without, "scheduler": WARMUP})
    assert optimizer is None and scheduler is None, "a scheduler section without optimizer is ignored"
    engine.destroy()


def _first_weight(engine: Any) -> torch.Tensor:
    import hf_zero

    weight = engine.module.blocks[0].up.weight
    with hf_zero.zero.GatheredParameters(weight):
        return weight.detach().clone()


def _creates_the_process_group() -> int:
    """Check that without a group, ``initialize`` and ``zero.Init`` create the default one from the launcher's variables."""
    import hf_zero

    assert not dist.is_initialized()
    if ranks.device().type == "cpu":
        hf_zero.init_distributed(dist_backend="gloo")
    with hf_zero.zero.Init(config_dict_or_path=Run(stage=3).config()):
        model = MLP.build()
    engine = initialize(model, Run(stage=3))
    step(engine)
    engine.destroy()
    return dist.get_world_size()


def _initialize_creates_the_group() -> int:
    engine = initialize(MLP.build(), Run(stage=2))
    step(engine)
    engine.destroy()
    return dist.get_world_size()


def _init_creates_the_group() -> int:
    import hf_zero

    with hf_zero.zero.Init(config_dict_or_path=Run(stage=3).config()):
        nn.Linear(4, 4)
    return dist.get_world_size()


def _training_data() -> None:
    """Check that the third result is a loader that gives every rank its own part, one micro-batch at a time."""
    import hf_zero

    rows = torch.utils.data.TensorDataset(torch.arange(24))
    engine, _, loader, _ = hf_zero.initialize(model=MLP.build(), config=Run(stage=1).config(), training_data=rows)
    mine = torch.cat([batch[0] for batch in loader])
    parts = [torch.empty_like(mine) for _ in range(ranks.world())]
    dist.all_gather(parts, mine)
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert next(iter(loader))[0].shape == (2,)
    engine.destroy()


# ------------------------------------------------------------------------------------------------ attributes and classes


def _engine_surface(stage: int) -> None:
    """Check the attributes that callers read, with the types that they expect."""
    raw = Run(stage=stage).config()
    model = CASES["gpt2"].build()
    engine = initialize(model, Run(stage=stage))
    assert isinstance(engine, nn.Module) and engine.module is model
    assert engine.config == raw, "the raw dict, though the model has a config of its own"
    engine.config, engine.generation_config = model.config, model.generation_config  # for code that takes the engine for the model
    assert engine.config is model.config
    assert engine.device == torch.device("cpu")
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert "load_module_strict" in inspect.signature(engine.load_checkpoint).parameters
    assert engine.optimizer.overflow is False, "accelerate asks for it once, at construction"
    assert not hasattr(engine, "_hf_hook") and not hasattr(engine, "no_such_name")
    assert engine.can_generate(), "unknown names are looked up on the module"
    engine._is_accelerate_prepared = True
    assert list(engine.parameters()) == list(model.parameters())
    assert not engine.eval().training and not model.training
    assert engine.train().training and model.training
    assert engine.zero_grad() is None
    with pytest.raises(TypeError, match=r"needs the loss as a tensor, not float 1\.0"):
        engine.backward(1.0)
    for value, advice in (
        (None, 'not NoneType; give the model labels (labels=batch["shift_labels"] if a loader cuts'),
        ({"loss": torch.zeros(())}, "not dict; pass its `loss`"),
        ([torch.zeros(2)], "not list; pass the tensor that the model"),
    ):
        with pytest.raises(TypeError) as caught:
            engine.backward(value)
        assert str(caught.value).startswith(f"backward() needs the loss as a tensor, {advice}")
    engine.destroy()


def _state_dict(stage: int) -> None:
    """Check the 16-bit consolidated state dict: rank 0 only, with storages of its own; ValueError is the only "not available"."""
    engine = initialize(CASES["tied_coder"].build(), Run(stage=stage, dtype="bf16"))
    if stage < 3:
        with pytest.raises(ValueError):
            engine._zero3_consolidated_16bit_state_dict()
    else:
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (ranks.rank() != 0)
        for first, second in itertools.combinations(state or {}, 2):
            tied = state[first].data_ptr() == state[second].data_ptr()
            shared = state[first].untyped_storage().data_ptr() == state[second].untyped_storage().data_ptr()
            assert not shared or tied, f"{first} and {second} are views of one storage"
        for name, tensor in (state or {}).items():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), f"{name} is a view of something larger"
    engine.destroy()


def _optimizer_surface(stage: int) -> None:
    """Check the attributes that Fabric, Trainer and schedulers use on the returned optimizer."""
    engine = initialize(MLP.build(), Run(stage=stage))
    optimizer = engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert dict(optimizer.state.items()) is not None and optimizer.defaults["lr"] == 1e-2
    assert optimizer.state_dict()

    class Wrapper:
        """A wrapper as Fabric makes it: a class made at run time from a wrapper and the optimizer's own class."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.__dict__ = {key: value for key, value in inner.__dict__.items() if key not in ("state_dict", "step")}
            self.__class__ = type("FabricOptimizer", (Wrapper, type(inner)), {})
            self._inner = inner

        def step(self) -> Any:
            return self._inner.step()

    wrapped: Any = Wrapper(optimizer)
    before = _first_weight(engine)
    engine.backward(class_loss(engine, MLP.rows(0, 0, ranks.rank())))
    wrapped.step()
    wrapped.zero_grad()
    assert not torch.equal(before, _first_weight(engine))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    before = _first_weight(engine)
    step(engine, 1)
    assert torch.equal(before, _first_weight(engine)), "param_groups are live"
    engine.destroy()


def _trl_takes_the_hooks_off(stage: int) -> None:
    """Run trl's remove_hooks / gather / generate / add_hooks around a stage-3 model."""
    import hf_zero

    case = CASES["gpt2"]
    engine = initialize(case.build(), Run(stage=3))
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if offload.param_coordinator.is_invalid_trace():
        offload.param_coordinator._invalidate_trace()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    for _, parameter in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
        parameter.ds_active_sub_modules.clear()
    prompt = case.rows(0, 0, 0)["input_ids"][:, :4]
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    length = 3 + ranks.rank()  # no synced_gpus: everything is gathered
    with hf_zero.zero.GatheredParameters(engine.parameters()):
        tokens = engine.module.generate(prompt, max_new_tokens=length, **settings)
    offload._register_deepspeed_module(offload.module)
    assert torch.equal(tokens, case.build().eval().generate(prompt, max_new_tokens=length, **settings))
    engine.train()
    micro_step(engine, case.rows(0, 0, ranks.rank()), case.forward, 0)
    assert engine.optimizer.param_groups
    engine.destroy()


def _forward_is_looked_up_at_call_time(stage: int) -> None:
    """Replace ``module.forward`` for one call, as trl does; a cached bound method would run the original."""
    engine = initialize(MLP.build(), Run(stage=stage))
    original = engine.module.forward

    def replaced(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(original(inputs), labels)

    batch = MLP.rows(0, 0, ranks.rank())
    expected = class_loss(engine, batch).item()
    engine.module.forward = replaced
    assert engine(**batch).item() == pytest.approx(expected, rel=1e-6)
    engine.module.forward = original
    engine.destroy()


# ------------------------------------------------------------------------------------------------ schedulers


def _scheduler_of_the_configuration(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage=stage, extra={"scheduler": WARMUP}))
    assert engine.lr_scheduler.optimizer is engine.optimizer.optimizer  # loggers go by its class
    rates = []
    for number in range(6):
        step(engine, number)
        rates.append(engine.get_lr()[0])
    assert rates == sorted(rates) and rates[-1] == pytest.approx(1e-2) and rates[0] < rates[2]
    assert engine.lr_scheduler.get_last_lr() == [pytest.approx(rates[-1])]
    engine.lr_scheduler = None  # Lightning steps its own
    engine.optimizer.param_groups[0]["lr"] = 0.5
    step(engine, 7)
    assert engine.get_lr()[0] == 0.5
    engine.destroy()


def _scheduler_function(stage: int) -> None:
    """Pass a ``lr_scheduler`` callable, as Trainer does: it gets a torch optimizer, and the engine steps the scheduler that it returns."""
    received: list[Any] = []

    def make(optimizer: torch.optim.Optimizer) -> Any:
        received.append(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0 / (1 + number))

    engine = initialize(MLP.build(), Run(stage=stage), lr_scheduler=make)
    assert isinstance(received[0], torch.optim.Optimizer)
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.LambdaLR)
    rates = []
    for number in range(3):
        step(engine, number)
        rates.append(engine.get_lr()[0])
    assert rates == [pytest.approx(1e-2 / number) for number in (2, 3, 4)]
    engine.destroy()


def test_configuration_arguments(tmp_path: Any) -> None:
    ranks.run_ranks(_configuration_arguments, 2, str(tmp_path))


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_situations(stage: int) -> None:
    ranks.run_ranks(_optimizer_situations, 2, stage)


@pytest.mark.parametrize("function", [_creates_the_process_group, _initialize_creates_the_group, _init_creates_the_group])
def test_process_group_is_made_from_the_launchers_variables(function: Any) -> None:
    assert ranks.run_ranks(function, 2, group=False) == [2, 2]


def test_training_data_gives_a_loader() -> None:
    ranks.run_ranks(_training_data, 2)


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_engine_surface(stage: int) -> None:
    ranks.run_ranks(_engine_surface, 2, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_consolidated_state_dict(stage: int) -> None:
    ranks.run_ranks(_state_dict, 2, stage)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_optimizer_surface(stage: int) -> None:
    ranks.run_ranks(_optimizer_surface, 2, stage)


def test_trl_takes_the_hooks_off() -> None:
    ranks.run_ranks(_trl_takes_the_hooks_off, 2, 3)


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_forward_is_looked_up_at_call_time(stage: int) -> None:
    ranks.run_ranks(_forward_is_looked_up_at_call_time, 2, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_scheduler_of_the_configuration(stage: int) -> None:
    ranks.run_ranks(_scheduler_of_the_configuration, 2, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_scheduler_function(stage: int) -> None:
    ranks.run_ranks(_scheduler_function, 2, stage)
