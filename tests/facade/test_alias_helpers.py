"""Helpers of `deepspeed.runtime.utils`, `deepspeed.utils` and `deepspeed.ops.op_builder` around training."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import logging
import math
import pickle
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import observe
from hf_zero.deepspeed.loss_scalers import CreateLossScaler, DynamicLossScaler, LossScaler
from hf_zero.deepspeed.served import builders, helpers, hosts, logs, norms, state_files
from hf_zero.deepspeed.served.accelerator import get_accelerator
from hf_zero.deepspeed.served.curriculum import CurriculumScheduler
from hf_zero.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, instrument_w_nvtx, trim_mean
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize


def with_grads(*grads: list[float]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(len(grad))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    return params


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_clipping_is_torchs(norm_type: float) -> None:
    ours, theirs = with_grads([3.0, -4.0], [2.0]), with_grads([3.0, -4.0], [2.0])
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(norms.clip_grad_norm_([*ours, nn.Parameter(torch.ones(1))], 1.0, norm_type), expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_norms_of_parts() -> None:
    params = with_grads([3.0], [4.0])
    assert norms.get_grad_norm(params) == norms.get_global_norm([3, 4]) == 5.0
    assert norms.get_weight_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert float(norms.clip_tensors_by_global_norm(tensors, 1.0)) == 5.0
    torch.testing.assert_close(torch.cat(tensors), torch.tensor([0.6, 0.8]))
    bad = with_grads([math.inf], [1.0])
    assert norms.get_grad_norm(bad) == -1.0 and norms.get_global_norm([1.0, math.nan]) == math.inf
    assert norms.CheckOverflow([bad]).check() and not norms.CheckOverflow([params]).check()
    with pytest.raises(UnsupportedError, match="gradient_clipping"):
        norms.clip_grad_norm_(params, 1.0, mpu=object())


def _overflow_on_one_rank() -> None:
    params = with_grads([1.0], [math.inf if ranks.rank() == 1 else 1.0])
    checker = norms.CheckOverflow([params])
    assert checker.check() and checker.has_overflow_serial(params) is (ranks.rank() == 1)
    mine = with_grads([3.0 + ranks.rank()])
    assert float(norms.clip_grad_norm_(mine, 1.75)) == 3.5  # the mean of the ranks' norms
    torch.testing.assert_close(mine[0].grad, torch.tensor([(3.0 + ranks.rank()) / 2]))


def test_ranks_agree_on_overflow_and_on_what_they_clip_to() -> None:
    ranks.run_ranks(_overflow_on_one_rank, 2)


def test_parts_are_balanced() -> None:
    assert helpers.partition_uniform(10, 4) == [0, 3, 6, 8, 10] and helpers.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    weights = [1, 2, 1, 5, 1, 1, 3]
    for parts in (1, 2, 3, 4, 7):
        borders = helpers.partition_balanced(weights, parts)
        heaviest = max(sum(weights[start:stop]) for start, stop in itertools.pairwise(borders))
        every = (
            max(sum(weights[start:stop]) for start, stop in itertools.pairwise((0, *inner, len(weights))))
            for inner in itertools.combinations(range(1, len(weights)), parts - 1)
        )
        assert len(borders) == parts + 1 and borders[0] == 0 and borders[-1] == len(weights) and heaviest == min(every)


def test_small_helpers() -> None:
    pair = namedtuple("pair", "a b")
    moved = helpers.move_to_device({"x": [torch.ones(1), 2], "y": pair(torch.ones(2), None)}, "meta")
    assert moved["x"][0].is_meta and moved["x"][1] == 2 and moved["y"].a.is_meta and moved["y"].b is None
    kept = helpers.move_to_device((torch.ones(1), torch.ones(2)), "meta", lambda tensor: tensor.numel() > 1)
    assert not kept[0].is_meta and kept[1].is_meta
    assert helpers.call_to_str("f") == "f()" and helpers.call_to_str("f", 1, "x", b=2) == "f(1, 'x', b=2)"
    assert helpers.required_torch_version(min_version=1.8) and not helpers.required_torch_version(max_version="1.9")
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    assert helpers.recursive_getattr(model, "0.0.bias") is model[0][0].bias
    for name, layer in (("0.0", nn.Linear(3, 2)), ("0", nn.Tanh())):
        helpers.recursive_setattr(model, name, layer)
        assert helpers.recursive_getattr(model, name) is layer
    helpers.set_random_seed(3)
    first = torch.rand(2)
    helpers.set_random_seed(3)
    assert torch.equal(first, torch.rand(2)) and not helpers.is_zero_param(nn.Parameter(torch.ones(1)))


def test_stopwatches(capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer()
    timers("load").start()
    with pytest.raises(StateError, match="'load' has already been started"):
        timers("load").start()
    timers("load").stop()
    with pytest.raises(StateError, match="'load' was not started"):
        timers("load").stop()
    assert timers("load").elapsed(reset=False) >= 0 and list(timers.get_timers()) == ["load"]
    timers.log(["load", "never started"], memory_breakdown=True)
    out = capsys.readouterr().out
    assert "| load: " in out and "never started" not in out and "GiB" in out
    assert timers("load").elapsed() == 0 and timers.get_mean(["load"]) == {"load": 0.0}
    idle = NoopTimer()
    idle("load").start()
    idle("load").stop()
    assert idle("load").elapsed() == 0 and idle.get_timers() == {}
    assert trim_mean([100.0, *range(1, 9), -50.0], 0.1) == 4.5


def test_throughput_leaves_the_first_steps_out() -> None:
    settings, lines = SimpleNamespace(enabled=True, synchronized=False), []
    timer = ThroughputTimer(settings, 4, start_step=1, steps_per_output=2, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == -math.inf
    for _ in range(4):
        timer.start()
        timer.stop(global_step=True)
    assert timer.global_step_count == 4 and timer.avg_samples_per_sec() > 0 and len(lines) == 2
    for wrong, text in ((0, "greater than 0"), (1.5, "positive integer or None")):
        with pytest.raises(ValueError, match=text):
            ThroughputTimer(settings, 1, steps_per_output=wrong)  # type: ignore[arg-type]


def test_a_decorated_function_is_a_range_in_profiles() -> None:
    @instrument_w_nvtx
    def half(value: float) -> float:
        return value / 2

    with torch.profiler.profile() as profile:
        assert half(3) == 1.5
    assert any("half" in event.name for event in profile.events())


def test_builders_say_what_is_there() -> None:
    assert builders.CPUAdamBuilder().is_compatible() and not builders.InferenceBuilder().is_compatible()
    assert builders.COMPATIBLE_OPS["fused_adam"] and not builders.COMPATIBLE_OPS["sparse_attn"]
    loaded = builders.CPUAdamBuilder().load()
    with pytest.raises(AttributeError, match="use deepspeed.ops.adam.DeepSpeedCPUAdam"):
        loaded.create_adam(0)
    with pytest.raises(UnsupportedError, match="does not implement the operator 'transformer_inference'"):
        builders.InferenceBuilder().load()
    made = get_accelerator().create_op_builder("FusedAdamBuilder")
    assert made is not None and made.NAME == "fused_adam" and get_accelerator().get_op_builder("NoSuchBuilder") is None


def test_levels_and_files_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.Logger("own")
    logs.set_log_level_from_string("warning", own)
    assert own.level == logging.WARNING == logs.get_log_level_from_string("WARNING")
    with pytest.raises(ConfigError, match="'loud' is not a log level"):
        logs.get_log_level_from_string("loud")
    logs.print_json_dist({"a": 1}, ranks=[0], path=tmp_path / "a.json")
    logs.print_json_dist({"a": 1}, ranks=[3], path=tmp_path / "b.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1, "rank": 0} and not (tmp_path / "b.json").exists()
    assert logs.LoggerFactory.create_logger("hf_zero_made_by_a_test").handlers
    assert logs.should_log_le("critical")


def test_scales_by_hand() -> None:
    assert LossScaler(8).loss_scale == 8.0 and CreateLossScaler(torch.bfloat16, 8, True, None).loss_scale == 1.0
    scaler = CreateLossScaler(torch.half, 0, True, {"init_scale": 2**4, "scale_window": 1, "delayed_shift": 1})
    assert isinstance(scaler, DynamicLossScaler) and scaler.has_overflow(with_grads([math.inf]))
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    param = nn.Parameter(torch.ones(1))
    scaler.backward(param.sum())
    assert param.grad is not None and float(param.grad) == 8.0


def test_blocks_are_marked_by_name_and_ending() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    found, missing = set_z3_leaf_modules_by_name(model, ["1", "7"], raise_if_not_found=False)
    assert found == [model[1]] == get_z3_leaf_modules(model) and missing == ["7"]
    assert set_z3_leaf_modules_by_suffix(model, [".0"])[0] == [model[1][0]]
    with pytest.raises(ConfigError, match=r"no module with name \['7'\]"):
        set_z3_leaf_modules_by_name(model, ["7"])
    # The mark is an attribute that libraries read, and that goes with copies.
    assert model[1]._z3_leaf and copy.deepcopy(model)[1][0]._z3_leaf and pickle.loads(pickle.dumps(model))[1]._z3_leaf
    assert set_z3_leaf_modules_by_name(model, ["1"], False)[0] == [model[1]] and model[1]._z3_leaf is False
    assert set_z3_leaf_modules(model, ["ReLU"]) == [model[1][1]] and model[1][1]._z3_leaf is True
    assert unset_z3_leaf_modules(model, [nn.ReLU]) == [model[1][1]] == unset_z3_leaf_modules(model, [nn.ReLU])
    set_z3_leaf_module(model[1][0], False)
    assert get_z3_leaf_modules(model) == []
    with pytest.raises(ConfigError, match="no module of class"):
        unset_z3_leaf_modules(model, [nn.Conv1d])


def _configured(stage: int) -> None:
    observe._warned.clear()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    model = CASES["mlp"].build()
    leaf = {"classes": ["tests.support.models.Block"], "names": ["entry", "blocks.9"], "name_suffixes": ["1.down", "tail"]}
    logging.getLogger("hf_zero").addHandler(handler)
    engine = initialize(model, Run(stage, extra={"zero_optimization": {"leaf_module": leaf}}))
    logging.getLogger("hf_zero").removeHandler(handler)
    marked = get_z3_leaf_modules(model)
    assert [name for name, module in model.named_modules() if module in marked] == [
        "entry",
        "blocks.0",
        "blocks.1",
        "blocks.1.down",
        "blocks.2",
    ]
    assert [block.name for block in engine.runtime.blocks] == ["entry", "blocks.0", "blocks.1", "blocks.2"]
    engine.destroy()
    if ranks.rank() == 0:
        assert any("leaf_module.names" in line and "['blocks.9']" in line for line in said), said
        assert any("leaf_module.name_suffixes" in line and "['tail']" in line for line in said), said


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_configuration_names_is_marked(stage: int) -> None:
    ranks.run_ranks(_configured, 2, stage)


def _read_as_deepspeeds(folder: str) -> None:
    engine = initialize(CASES["mlp"].build(), Run(3))
    engine.save_checkpoint(folder, tag="epoch_1.pth", client_state={"meta": {"seed": 5}})
    files = state_files.get_model_state_files(f"{folder}/epoch_1.pth")
    assert [torch.load(file)["meta"]["seed"] for file in files] == [5]
    engine.destroy()


def test_counters_and_client_state_are_in_a_file_for_torch(tmp_path: Path) -> None:
    ranks.run_ranks(_read_as_deepspeeds, 1, str(tmp_path))


def test_files_of_foreign_checkpoints() -> None:
    assert state_files.get_model_ckpt_name_for_rank("a", "00") == "a/mp_rank_00_model_states.pt"
    assert state_files.VOCABULARY_PARAMETER_PATTERNS == "vocabulary_parameter_patterns"
    assert state_files.UNIVERSAL_CHECKPOINT_VERSION_VALUE == 0.2
    assert state_files.get_zero_ckpt_name_for_rank("a", 1, 2) == "a/zero_pp_rank_1_mp_rank_02_optim_states.pt"
    assert state_files.get_layer_ckpt_name_for_rank("a", "layer_03", 1) == "a/layer_03-model_01_model_states.pt"


SLOTS = {"a": [0, 1, 2, 3], "b": [0, 1]}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("b@a:2,0", "", {"a": [0, 2], "b": [0, 1]}),  # in the order of the hosts
        ("a:1@b:1@a:1,0", "", {"a": [0, 1], "b": [1]}),
        ("a@a:3", "", {"a": [3]}),
        ("", "a:1,1@b", {"a": [0, 2, 3]}),
        ("", "b@a", {}),
        ("", "", SLOTS),
        ("a:4", "", None),
        ("", "a:4", None),
        ("c", "", None),
        ("", "b@a:1@5", None),
        ("a", "b", None),
    ],
)
def test_filters_of_hosts(include: str, exclude: str, expected: dict[str, list[int]] | None) -> None:
    pool = {name: len(slots) for name, slots in SLOTS.items()}
    for find, given in ((hosts.parse_resource_filter, SLOTS), (hosts.parse_inclusion_exclusion, pool)):
        if expected is None:
            with pytest.raises(ValueError, match="has no slot '4'|is unknown|cannot be combined"):
                find(given, include, exclude)
        else:
            found = find(given, include, exclude)
            assert found == expected and list(found) == list(expected)


def test_hostfiles_and_what_a_command_line_says_of_them(tmp_path: Path) -> None:
    lines = ["# ours", "", "  10.0.0.2 slots=4 ", "b slots=1"]
    assert list(hosts._parse_hostfile(lines).items()) == [("10.0.0.2", 4), ("b", 1)]
    for wrong in (["a b slots=1"], ["a"], [], ["a slots=1", "a slots=1"]):
        with pytest.raises(ValueError, match="hostfile"):
            hosts._parse_hostfile(wrong)
    path = tmp_path / "hosts"
    assert hosts.fetch_hostfile(path) is None
    path.write_text("\n".join(lines))
    found = hosts.fetch_hostfile(path)
    assert json.loads(base64.urlsafe_b64decode(hosts.encode_world_info(found))) == {"10.0.0.2": 4, "b": 1}


def test_a_hook_runs_when_a_gradient_has_been_added() -> None:
    param, seen = nn.Parameter(torch.ones(2)), []
    handle = helpers.register_grad_hook(param, lambda given: seen.append(given.grad.tolist()))
    (param * 3).sum().backward()
    handle.remove()
    param.sum().backward()
    assert seen == [[3.0, 3.0]]


def _mesh() -> None:
    from deepspeed import comm
    from deepspeed.utils import groups

    mesh = comm.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel"))
    assert mesh.mesh_dim_names == ("data_parallel", "sequence_parallel") and mesh.get_group("data_parallel").size() == 2
    assert groups._get_data_parallel_group_ranks() == [0, 1] and groups._get_broadcast_src_rank() == 0


def test_a_mesh_of_named_dimensions() -> None:
    ranks.run_ranks(_mesh, 2)


def test_the_report_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_zero import environment

    environment.cli_main(hide_operator_status=True)
    assert "`import deepspeed` is" in capsys.readouterr().out


LINEAR = {"total_curriculum_step": 10, "difficulty_step": 4}


@pytest.mark.parametrize(
    ("kind", "schedule", "expected"),
    [
        ("fixed_linear", LINEAR, {0: 8, 1: 12, 5: 36, 10: 64, 99: 64}),  # 8 + 56 * share, down to a multiple of 4
        ("fixed_root", LINEAR | {"root_degree": 2}, {0: 8, 1: 24, 5: 44, 10: 64}),
        ("fixed_discrete", {"difficulty": [8, 16, 64], "max_step": [2, 4]}, {0: 8, 2: 8, 3: 16, 4: 16, 5: 64}),
    ],
)
def test_schedule_of_a_curriculum(kind: str, schedule: dict[str, Any], expected: dict[int, int]) -> None:
    made = CurriculumScheduler({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": kind, "schedule_config": schedule})
    assert made.get_current_difficulty() == 8
    assert {step: made.get_difficulty(step) for step in expected} == expected
    assert made.update_difficulty(1000) == 64 == made.update_difficulty(0)  # the greatest stays
    other = CurriculumScheduler({"min_difficulty": 1, "max_difficulty": 2, "schedule_type": "custom"})
    other.set_state(made.get_state())
    assert other.get_current_difficulty() == 64


def test_curricula_that_cannot_be() -> None:
    settings = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "custom"}
    made = CurriculumScheduler(settings)
    with pytest.raises(ConfigError, match="set_custom_get_difficulty"):
        made.update_difficulty(1)
    made.set_custom_get_difficulty(lambda step: 8 + step)
    assert made.update_difficulty(3) == 11
    for wrong, text in (
        ({"min_difficulty": 1}, "max_difficulty, schedule_type must be given"),
        (settings | {"schedule_type": "square"}, "'square'"),
        (settings | {"schedule_type": "fixed_linear"}, r"schedule_config\.total_curriculum_step"),
        (settings | {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": [1]}}, "one entry more"),
    ):
        with pytest.raises(ConfigError, match=text):
            CurriculumScheduler(wrong)
