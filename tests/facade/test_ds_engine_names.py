"""What training scripts read off the engine and its optimizer, and the engine's methods with arguments."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from hf_zero import observe
from hf_zero.core.units.unit import full_shape
from hf_zero.deepspeed import held_weights
from hf_zero.deepspeed.optimizer import VALUES, DeepSpeedOptimizer
from hf_zero.errors import ConfigError, StateError
from hf_zero.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES
from tests.support.parity import Run, initialize

STAGES = (0, 1, 2, 3)
MLP = CASES["mlp"]


def micro_step(engine: Any, factor: float = 1.0) -> None:
    batch = {name: value.half() if value.is_floating_point() else value for name, value in MLP.rows(0, 0, ranks.rank()).items()}
    engine.backward(MLP.forward(engine, batch) * factor)
    engine.step()


def _loss_scale(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage, "fp16", scale_power=4, scale_window=2))
    optimizer = engine.optimizer
    assert optimizer.optimizer is optimizer.inner is engine.basic_optimizer
    assert optimizer == optimizer.inner and optimizer != engine and {optimizer: 1}[optimizer]
    assert isinstance(optimizer, DeepSpeedOptimizer)
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (16.0, 16.0, True)
    assert optimizer.needs_scaler()
    assert optimizer._global_grad_norm is None
    micro_step(engine)
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    micro_step(engine, float("inf"))
    assert optimizer.overflow and (optimizer.cur_scale, engine.loss_scale()) == (8.0, 8.0)
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    for place in (optimizer, optimizer.loss_scaler):
        place.cur_scale = 4
        assert engine.loss_scale() == optimizer.loss_scale == 4
        with pytest.raises(ValueError, match="a finite number above 0 is allowed"):
            place.cur_scale = 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_optimizer_shows_loss_scale_and_norm(stage: int) -> None:
    ranks.run_ranks(_loss_scale, 2, stage)


def _without_loss_scale() -> None:
    optimizer = initialize(MLP.build(), Run(1)).optimizer
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (1.0, 1.0, False)
    assert not optimizer.needs_scaler()
    fixed = initialize(MLP.build(), Run(1, "fp16", extra={"fp16": {"loss_scale": 8.0}})).optimizer
    assert fixed.needs_scaler() and not fixed.dynamic_loss_scale


def test_without_fp16_the_loss_scale_is_one() -> None:
    ranks.run_ranks(_without_loss_scale, 1)


def _no_optimizer(stage: int) -> None:
    import hf_zero

    engine, optimizer, _, scheduler = hf_zero.initialize(
        model=MLP.build(), config={"train_batch_size": ranks.world(), "zero_optimization": {"stage": stage}}
    )
    assert optimizer is None and scheduler is None
    assert engine.get_lr() == [] and engine.get_mom() == [] and engine.basic_optimizer is None
    engine.empty_partition_cache()


@pytest.mark.parametrize("stage", [0, 3])
def test_questions_about_the_optimizer_of_an_engine_without_one(stage: int) -> None:
    ranks.run_ranks(_no_optimizer, 2, stage)


def _places() -> None:
    """With tensor parallelism 2 on 4 ranks: which process this is, and how many there are, not its place on the data axis."""
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    engine = hf_zero.initialize(model=CASES["llama"].build(), config=config)[0]
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (4, 2, 2)
    assert (engine.get_data_parallel_world_size(), engine.get_data_parallel_rank()) == (2, ranks.rank() // 2)
    assert (engine.get_tensor_parallel_world_size(), engine.get_model_parallel_rank()) == (2, ranks.rank() % 2)
    assert (engine.get_pipeline_parallel_world_size(), engine.get_sequence_parallel_world_size()) == (1, 1)
    assert engine.get_parallel_world_sizes() == {"dp": 2, "tp": 2}
    assert engine.global_rank == engine.local_rank == ranks.rank()
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
    assert not engine.inside_no_sync_ctxt and not engine.pipeline_parallelism and not engine.eigenvalue_enabled()
    assert engine.param_names[engine.module.model.norm.weight] == "model.norm.weight"


def test_an_engine_knows_its_place() -> None:
    ranks.run_ranks(_places, 4)


def _batch_sizes() -> None:
    world = ranks.world()
    engine = initialize(MLP.build(), Run(1))
    engine.set_train_batch_size(6 * world)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6 * world, 3)
    for expected in (0, 0, 1, 1):
        engine.backward(MLP.forward(engine, MLP.rows(0, 0, ranks.rank())))
        engine.step()
        assert engine.global_steps == expected
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15 * world, 5, 3)
    for refused in (0, 6 * world + 1):
        with pytest.raises(ValueError, match=rf"set_train_batch_size\({refused}\): not a multiple of {5 * world}"):
            engine.set_train_batch_size(refused)
    with pytest.raises(ValueError, match=r"set_train_micro_batch_size\(0\)"):
        engine.set_train_micro_batch_size(0)


def test_batch_sizes_change_between_steps() -> None:
    ranks.run_ranks(_batch_sizes, 2)


def doubled(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([2 * sample[0] for sample in samples])


def _loaders() -> None:
    import hf_zero

    world, data = ranks.world(), TensorDataset(torch.arange(12.0))
    engine, _, loader, _ = hf_zero.initialize(
        model=nn.Linear(1, 1), config={"train_micro_batch_size_per_gpu": 2}, training_data=data, collate_fn=doubled
    )
    assert engine.training_dataloader is loader and len(loader) == 12 // (2 * world)
    mine = torch.cat(list(loader))
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, mine.tolist())
    assert sorted(value for part in everyone for value in part) == [2.0 * value for value in range(12)]
    in_order = engine.deepspeed_io(data, batch_size=3, route="eval", collate_fn=lambda samples: [int(sample[0]) for sample in samples])
    assert list(in_order) == [[ranks.rank() + world * (3 * batch + row) for row in range(3)] for batch in range(12 // (3 * world))]


def test_loaders_of_training_data_and_deepspeed_io() -> None:
    ranks.run_ranks(_loaders, 2)


def _state_dict(stage: int) -> None:
    import hf_zero

    model = MLP.build()
    frozen, _ = next(iter(model.named_parameters()))
    model.get_parameter(frozen).requires_grad = False
    engine = initialize(model, Run(stage))
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        state, trained = engine.module_state_dict(), engine.module_state_dict(exclude_frozen_parameters=True)
        assert set(state) - set(trained) == {frozen}
        torch.testing.assert_close(dict(state), dict(MLP.build().state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_module_state_dict_has_the_names_of_the_module(stage: int) -> None:
    ranks.run_ranks(_state_dict, 2, stage)


def _wrong_arguments() -> None:
    import hf_zero

    model = MLP.build()
    elsewhere = LambdaLR(torch.optim.AdamW(model.parameters()), lambda step: 1.0)
    with pytest.raises(ValueError, match="lr_scheduler is a LambdaLR that belongs to another optimizer"):
        initialize(model, Run(1), lr_scheduler=elsewhere)
    with pytest.raises(
        ValueError, match=r"lr_scheduler is a str; a scheduler of torch.optim.lr_scheduler, another object with step\(\), or"
    ):
        initialize(MLP.build(), Run(1), lr_scheduler="cosine")
    with pytest.raises(
        ValueError, match=r"model_parameters is 'all'; parameters or param groups are allowed, such as model.parameters\(\)"
    ):
        hf_zero.initialize(model=MLP.build(), model_parameters="all", config={"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ValueError, match=r"training_data is 'train.json'; a dataset is allowed"):
        initialize(MLP.build(), Run(1), training_data="train.json")
    engine = initialize(MLP.build(), Run(1))
    with pytest.raises(ValueError, match="given an engine that it has made before; train with that engine"):
        initialize(engine, Run(1))
    engine.destroy()


def test_a_scheduler_of_another_optimizer_and_other_wrong_arguments_are_refused() -> None:
    ranks.run_ranks(_wrong_arguments, 1)


def _loaded_by_hand(stage: int) -> None:
    import hf_zero

    other = {name: value.bfloat16() for name, value in MLP.build(1).state_dict().items()}
    engine = initialize(MLP.build(), Run(stage, "bf16"))
    engine.module.load_state_dict(other)
    engine.optimizer.refresh_fp32_params()
    for name, param in engine.module.named_parameters():
        assert torch.equal(hf_zero.utils.safe_get_full_fp32_param(param), other[name].float()), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_follow_weights_loaded_into_the_module(stage: int) -> None:
    ranks.run_ranks(_loaded_by_hand, 2, stage)


def _compiled(section: dict[str, Any], expected: bool) -> None:
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 2, "compile": {"backend": "eager", **section}, "zero_optimization": {"stage": 3}}
    model = MLP.build()
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)[0]
    assert any(module._compiled_call_impl is not None for module in model.modules()) is expected
    micro = {name: value[:2] for name, value in MLP.rows(0, 0, ranks.rank()).items()}
    engine.backward(MLP.forward(engine, micro))
    engine.step()
    if not expected:
        with pytest.raises(ConfigError, match="Leave schedule out"):
            engine.compile("eager", schedule=[(0, ["prefetch"])])
        with pytest.raises(TypeError, match="no_such_option"):
            engine.compile("eager", no_such_option=True)
        engine.compile("eager", {"dynamic": True}, fullgraph=True)  # DeepSpeed's arguments, and those of torch
        assert engine.is_compiled


@pytest.mark.parametrize(("section", "expected"), [({"enabled": True}, True), ({"enabled": True, "disable": True}, False), ({}, False)])
def test_the_compile_section_of_an_older_release(section: dict[str, Any], expected: bool) -> None:
    ranks.run_ranks(_compiled, 1, section, expected)


def _version_is_a_text() -> None:
    import deepspeed

    assert isinstance(deepspeed.version, str) and deepspeed.version == deepspeed.__version__ and deepspeed.__git_hash__


def test_version_of_the_package() -> None:
    ranks.run_ranks(_version_is_a_text, 1)


def _every_question(stage: int) -> None:
    from hf_zero.deepspeed import getters

    engine = initialize(MLP.build(), Run(stage))
    for name in getters.METHODS:
        getattr(engine, name)()
    for name in getters.VALUES:
        getattr(engine, name)
    assert engine.get_data_parallel_rank() == ranks.rank() and engine.get_model_parallel_rank() == 0 and engine.autotp_size() == 1
    assert not engine.is_compiled and not engine.zero_use_cpu_optimizer() and engine.zero_hpz_partition_size() == 1
    engine.optimizer.set_lr(0.25)
    assert engine.optimizer.get_lr() == 0.25 and engine.get_lr() == [0.25] * len(engine.get_lr())


@pytest.mark.parametrize("stage", [0, 3])
def test_every_question_has_an_answer(stage: int) -> None:
    ranks.run_ranks(_every_question, 2, stage)


def _optimizer_values(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage, "bf16"))
    optimizer, param = engine.optimizer, next(engine.parameters())
    batch = MLP.rows(0, 0, ranks.rank())
    engine.backward(MLP.forward(engine, {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}))
    assert torch.equal(optimizer.get_fp32_grad_for_param(param), safe_get_full_grad(param))  # type: ignore[arg-type]
    engine.step()
    value = optimizer.get_full_hp_param(param)
    assert value.dtype == torch.float32 and optimizer.get_full_hp_param(param, "exp_avg").shape == value.shape
    optimizer.set_full_hp_param(value + 1, param)
    assert torch.equal(optimizer.get_full_hp_param(param), value + 1)
    assert optimizer.get_local_fp32_param(param).numel() <= value.numel()
    optimizer.empty_partition_cache()
    optimizer._set_fp32_optimizer_param_groups()
    assert {held.dtype for group in optimizer.optimizer.param_groups for held in group["params"]} == {torch.float32}
    optimizer._clear_fp32_optimizer_param_groups()
    assert optimizer.quantize_nontrainable_params() is None
    assert optimizer.dp_process_group is engine.seq_data_parallel_group and optimizer.dtype == torch.bfloat16
    assert optimizer.partition_count == [ranks.world()] * len(optimizer.param_groups) and optimizer.module is engine.module
    if engine.zero_optimization_stage() < 3:
        parts, align = optimizer.parallel_partitioned_bit16_groups, 2 * optimizer.nccl_start_alignment_factor
        assert all(len(unit) == ranks.world() and part.data_ptr() % align == 0 for unit in parts for part in unit)
    for name in VALUES:
        getattr(optimizer, name)
    optimizer.overlap_comm = 3  # what a script assigns stands in place of the answer
    assert optimizer.overlap_comm == 3


@pytest.mark.parametrize("stage", [2, 3])
def test_further_names_of_the_optimizer(stage: int) -> None:
    ranks.run_ranks(_optimizer_values, 2, stage)


def _lower_precision(stage: int) -> None:
    from hf_zero.deepspeed.served import autocast

    def build(names: list[str] | None) -> Any:
        section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": names}
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        return initialize(model, Run(stage, extra={"torch_autocast": section})).module

    linear, norm = build(None)
    assert {autocast.get_comm_dtype(param) for param in linear.parameters()} == {torch.bfloat16} == {autocast.get_autocast_dtype()}
    assert not any(autocast.has_comm_dtype(param) for param in norm.parameters())
    assert autocast.get_all_comm_dtypes(norm.parameters()) == {torch.float32}
    linear, norm = build(["torch.nn.LayerNorm"])
    assert autocast.has_comm_dtype(norm.weight) and not autocast.has_comm_dtype(linear.weight)
    for name in ("torch.nn.Nope", "Linear", "torch.nn.functional.relu"):
        with pytest.raises(ValueError, match=f"lower_precision_safe_modules has '{name}', which .*torch.nn.Linear"):
            build([name])


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_marks_what_may_be_communicated_in_its_type(stage: int) -> None:
    ranks.run_ranks(_lower_precision, 2, stage)


def _whole_weights_loaded(stage: int) -> None:
    import hf_zero

    other = MLP.build(1).state_dict()
    engine = initialize(MLP.build(), Run(stage))
    gathered = engine._consolidated_16bit_state_dict()
    if gathered is not None:
        gathered._metadata = {}  # type: ignore[attr-defined]  # mmengine does so: the dict takes attributes, as DeepSpeed's
    assert (held_weights.held_for(engine.module) is not None) is (gathered is not None)
    given = other if ranks.rank() == 0 or stage < 3 else {}
    engine.load_module_state_dict({"module": given, "step": 1} if stage == 1 else given, strict=ranks.rank() == 0 or stage < 3)
    for name, param in engine.module.named_parameters():
        assert torch.equal(hf_zero.utils.safe_get_full_fp32_param(param), other[name].float()), name
    assert held_weights.held_for(engine.module) is None, "what was gathered before is old"


def _written_since() -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(3))
    params = list(engine.module.parameters())
    for write in ("none", "gathered", "set"):
        gathered = engine._consolidated_16bit_state_dict()
        with hf_zero.zero.GatheredParameters(params):
            seen = [float(param.sum()) for param in params]  # a look changes nothing
        assert len(seen) == len(params)
        if write == "gathered":
            with hf_zero.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                params[-1].fill_(0.5)
        elif write == "set":
            hf_zero.utils.safe_set_full_fp32_param(params[0], torch.ones(full_shape(params[0])))
        held = held_weights.held_for(engine.module)
        assert (held is not None) is (gathered is not None and write == "none"), write


def test_weights_that_were_gathered_before_a_write_are_old() -> None:
    ranks.run_ranks(_written_since, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_loaded_by_the_engine(stage: int) -> None:
    ranks.run_ranks(_whole_weights_loaded, 2, stage)


def _scale_names() -> None:
    optimizer = initialize(MLP.build(), Run(0, "fp16", scale_power=4, scale_window=2)).optimizer
    scaler = optimizer.loss_scale_config
    assert scaler is optimizer.loss_scaler and (scaler.cur_scale, scaler.loss_scale, scaler.scale_window, scaler.cur_iter) == (16, 16, 2, 0)
    assert scaler.dynamic_loss_scale and scaler.scale_factor == 2 and scaler.min_loss_scale == 1 and scaler.cur_hysteresis >= 1


def test_the_loss_scale_has_deepspeeds_names() -> None:
    ranks.run_ranks(_scale_names, 1)


def _assigned() -> None:
    engine = initialize(MLP.build(), Run(0))
    kept = engine.timers
    assert engine.timers is kept, "stopwatches are kept from the first look on"
    engine.global_steps = 7
    engine.get_lr = lambda: "mine"
    assert (engine.global_steps, engine.progress.global_steps, engine.get_lr()) == (7, 7, "mine")
    assert initialize(MLP.build(), Run(0)).global_steps == 0


def test_what_a_script_assigns_to_a_name_takes_its_place() -> None:
    ranks.run_ranks(_assigned, 1)


def _children() -> None:
    model = MLP.build()
    wrapper = nn.Module()
    wrapper.policy, wrapper.value_model = model, nn.Linear(4, 1)  # as TRL's PPO wraps them
    engine = initialize(wrapper, Run(2))
    assert engine.policy is model and engine.value_model is wrapper.value_model


def test_children_of_the_model_are_reached_through_the_engine() -> None:
    ranks.run_ranks(_children, 1)


def _star() -> None:
    names: dict[str, Any] = {}
    exec("from deepspeed.runtime.lr_schedules import *\nfrom deepspeed.utils import *\nfrom deepspeed.comm import *", names)
    assert names["WarmupLR"].__name__ == "WarmupLR"
    assert {"safe_get_full_grad", "logger", "all_reduce", "init_distributed"} <= names.keys()


def test_star_imports_bring_the_names() -> None:
    ranks.run_ranks(_star, 1)


def _parts_of_the_optimizer(stage: int) -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(stage, "fp16", scale_power=4))
    optimizer = engine.optimizer
    assert optimizer.low_precision_dtype is torch.float16 and engine.sparse_tensor_module_names == set()
    assert optimizer.averaged_gradients == {}
    batch = {name: value.half() if value.is_floating_point() else value for name, value in MLP.rows(0, 0, ranks.rank()).items()}
    engine.backward(MLP.forward(engine, batch))
    parts, exact = optimizer.averaged_gradients, optimizer.get_fp32_grad_partitions()
    assert set(parts) == set(exact) == set(range(len(optimizer.param_groups)))
    shapes = [[param.ds_shape if stage == 3 else param.shape for param in group] for group in optimizer.fp16_groups]
    assert [len(group) for group in shapes] == [len(parts[index]) for index in range(len(parts))] and optimizer.bit16_groups
    assert sum(map(math.prod, sum(shapes, []))) == sum(value.numel() for value in MLP.build().parameters())
    own = [hf_zero.utils.safe_get_local_grad(param) * optimizer.loss_scale for param in engine.module.parameters()]
    squares = sum(float(part.double().square().sum()) for group in parts.values() for part in group)
    assert squares == pytest.approx(sum(float(part.double().square().sum()) for part in own), rel=1e-6) and squares > 0
    assert all(exact[group][place].dtype is torch.float32 for group in exact for place in exact[group])
    everyones = torch.tensor(squares)
    torch.distributed.all_reduce(everyones)
    norms = torch.stack(optimizer._get_norm_groups())
    copies = 1 if stage else ranks.world()
    assert float(norms.square().sum()) == pytest.approx(float(everyones) / copies, rel=1e-5)
    for group in parts.values():  # live: what is written there is what the step uses
        for part in group:
            part.zero_()
    engine.step()
    assert engine.get_global_grad_norm() == 0.0 and optimizer.averaged_gradients == {}
    masters = optimizer.fp32_partitioned_groups_flat
    assert sum(master.numel() for master in masters) and all(master.dtype is torch.float32 for master in masters)
    assert all("exp_avg" in optimizer.optimizer.state[master] for master in masters)
    micro_step(engine, float("inf"))
    again = initialize(MLP.build(), Run(stage, "fp16", scale_power=4))
    state = copy.deepcopy(optimizer.state_dict())
    again.optimizer.load_state_dict(state)
    assert again.loss_scale() == engine.loss_scale() == 8.0
    for restored, values in zip(_masters_and_weights(again), _masters_and_weights(engine), strict=True):
        torch.testing.assert_close(restored, values, rtol=0, atol=0)  # exact: nothing was rounded to 16 bit
    observe._warned.clear()
    with messages_of_log() as messages:
        again.optimizer.load_state_dict(state)
        assert not messages
        micro_step(again, 1.0)
        again.optimizer.load_state_dict(state)
    assert ranks.rank() or (len(messages) == 1 and "To reset the optimizer alone" in messages[0]), messages
    state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"].pop()
    with pytest.raises(StateError, match="another model or another number of ranks"):
        again.optimizer.load_state_dict(state)


def _masters_and_weights(engine: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Whole masters, and what a forward computes with."""
    from hf_zero.zero import GatheredParameters

    masters = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    with GatheredParameters(list(engine.module.parameters())):
        return masters, [param.detach().clone() for param in engine.module.parameters()]


@pytest.mark.fast_rows("0", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_masters_gradients_and_loss_scale_of_the_optimizer(stage: int) -> None:
    ranks.run_ranks(_parts_of_the_optimizer, 2, stage)


def _no_sync(stage: int) -> None:
    engine, other = initialize(MLP.build(), Run(stage)), initialize(MLP.build(), Run(stage))
    batch = MLP.rows(0, 0, ranks.rank())
    with other.no_sync():  # at stages 2 and 3, which DeepSpeed refuses, each backward reduces all the same
        other.backward(MLP.forward(other, batch))
    with pytest.raises(AssertionError, match=r"step\(\) is due to update, but the last backward ran inside no_sync\(\)"):
        other.step()
    other.zero_grad()  # as the message says
    other.backward(MLP.forward(other, batch))
    expected = [safe_get_full_grad(param) for param in other.module.parameters()]
    other.step()
    assert other.global_steps == 1
    with engine.no_sync():
        assert all(safe_get_full_grad(param) is None for param in engine.module.parameters())
        engine.backward(MLP.forward(engine, batch))
        with pytest.raises(AssertionError, match=r"It is illegal to call Engine.step\(\) inside no_sync context manager"):
            engine.step()
        with pytest.raises(AssertionError, match="no_sync context manager reentry is unsupported"):
            engine.no_sync().__enter__()
        torch.testing.assert_close([safe_get_full_grad(param) for param in engine.module.parameters()], expected)
    engine.backward(MLP.forward(engine, batch))  # outside of the block, as the message of step() says
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.fast_rows("0", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_allows_no_step_and_no_second_block(stage: int) -> None:
    ranks.run_ranks(_no_sync, 2, stage)


def _steps_of_checkpoints() -> None:
    engine = initialize(MLP.build(), Run(2))
    for name in ("_create_checkpoint_file", "_save_checkpoint"):
        with pytest.raises(AttributeError, match=rf"engine.{name} is a step of DeepSpeed's own .* engine.save_16bit_model\(folder\)"):
            getattr(engine, name)
    assert not hasattr(engine, "_get_ckpt_name")


def test_a_step_of_deepspeeds_checkpoints_names_the_whole() -> None:
    """SwissArmyTransformer saves by these methods, at the end of a run: the error was "'GPT2Model' object has no attribute ..."."""
    ranks.run_ranks(_steps_of_checkpoints, 2)
