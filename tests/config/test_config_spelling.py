"""Which sloppiness is accepted and which is refused: spellings, unknown keys, legacy forms, types."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config.problems import RefusedKeyError, nearest
from hf_zero.config.resolve import ResolvedConfig, resolve
from hf_zero.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.quick

# ------------------------------------------------------------------------------------------------------------ unknown keys


@pytest.mark.parametrize(
    ("config", "found", "suggested"),
    [
        ({"ZeRO_optimization": {"stage": 1}}, "ZeRO_optimization", "zero_optimization"),
        ({"gradient_clipp1ng": 1.0}, "gradient_clipp1ng", "gradient_clipping"),
        ({"train_batch": 8}, "train_batch", "train_batch_size"),
        ({"gradient_accumulation": 8}, "gradient_accumulation", "gradient_accumulation_steps"),
        ({"micro_batch_size_per_gpu": 8}, "micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ({"fp-16": {}}, "fp-16", "fp16"),
        ({"overlap_comm": True}, "overlap_comm", "zero_optimization.overlap_comm"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"zero_optimization": {"Stage": 1}}, "zero_optimization.Stage", "zero_optimization.stage"),
        (
            {"zero_optimization": {"reduce_buckets_size": 1}},
            "zero_optimization.reduce_buckets_size",
            "zero_optimization.reduce_bucket_size",
        ),
        ({"zero_optimization": {"offload_param": {"dev1ce": "cpu"}}}, "offload_param.dev1ce", "offload_param.device"),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        ({"fp16": {"gradient_clipping": 1}}, "fp16.gradient_clipping", "`fp16` takes enabled"),
        ({"zero_optimization": {"betas": 1}}, "zero_optimization.betas", "`zero_optimization` takes stage"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate", "takes lr"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_deccay": 0}}}, "weight_deccay", "optimizer.params.weight_decay"),
        ({"optimizer": {"type": "SGD", "params": {"nestrov": True}}}, "nestrov", "optimizer.params.nesterov"),
        ({"optimizer": {"params": {"weight_deccay": 0}}}, "weight_deccay", "optimizer.params.weight_decay"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_steps", "warmup_num_steps"),
        ({"tensorboard": {"enabled": True, "path": "x"}}, "tensorboard.path", "`tensorboard` takes enabled"),
        ({"amp": {"opt_levl": "O1"}}, "amp.opt_levl", "amp.opt_level"),
        ({"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": []}]}}}, "layer_specs[0].pattern", "patterns"),
    ],
)
def test_unknown_key_is_an_error_with_the_nearest_name(config: dict[str, Any], found: str, suggested: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config)
    line = next(line for line in str(error.value).splitlines() if found in line)
    assert suggested in line


@pytest.mark.parametrize(
    "key",
    [
        "my_setting",
        "grandient_accumulation_steps",  # a misspelling of published files
        "gradient_accumulation_dtype",  # EVA-CLIP's
        "stage3_max_live_parameters",  # at the wrong level, in EVA-CLIP's stage 3
        "seed",
        "comment",
        "_comment",
        "model_name",
        "steps_per_epoch",
        "gradient_checkpointing",
        "fp8",
        "wandb_project",
        "dtype",
    ],
)
def test_unlike_key_at_the_top_is_a_warning(key: str) -> None:
    assert [key in text for text in resolve({key: 1}).warnings] == [True]


@pytest.mark.parametrize(
    "key",
    [
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_prefetch_bucket_size",
        "fp16.enabled",
    ],
)
def test_dotted_keys_at_the_top_change_nothing(key: str) -> None:
    config = {key: 921.6, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    resolved = resolve(config)
    assert len(resolved.warnings) == 1
    assert resolved.config.zero_optimization.reduce_bucket_size == 500_000_000
    assert not resolved.config.fp16.enabled


def test_what_trl_adds_for_a_reference_model_is_no_warning() -> None:
    """Three dotted keys that have no effect with DeepSpeed either, beside nested ones that may still be "auto"; strict runs pass too."""
    added = {"reduce_bucket_size": 4096, "stage3_param_persistence_threshold": 640, "stage3_prefetch_bucket_size": 3686.4}
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}} | {
        f"zero_optimization.{name}": value for name, value in added.items()
    }
    resolved = resolve(config, strict=True)
    assert resolved.warnings == [] and resolved.config.zero_optimization.reduce_bucket_size == 500_000_000


def test_strict_makes_warnings_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="my_setting"):
        resolve({"my_setting": 1}, strict=True)
    monkeypatch.setenv("HF_ZERO_STRICT", "1")
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size"):
        resolve({"zero_optimization.reduce_bucket_size": 1})
    monkeypatch.setenv("HF_ZERO_STRICT", "0")
    assert len(resolve({"my_setting": 1}).warnings) == 1


def test_keys_that_are_no_texts() -> None:
    with pytest.raises(ConfigError, match="keys of a configuration are strings"):
        resolve({"zero_optimization": {3: 1}})


def test_client_sections_take_their_own_keys() -> None:
    config = {"msamp": {"enabled": False, "extra": 1}, "pipeline": {"mine": 2}, "amp": {"enabled": False, "keep_batchnorm_fp32": True}}
    assert resolve(config).warnings == []
    kept = resolve({"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9, "centered": "true"}}}).config.optimizer
    assert kept is not None
    assert kept.params == {"alpha": 0.9, "centered": "true"}


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("stage", ["stage3", "stages"], "stage3"),
        ("size_batch", ["train_batch_size"], None),
        ("lr", ["eps"], None),
        ("rl", ["lr"], "lr"),
        ("LR", ["lr"], "lr"),
        ("lrs", ["lr"], None),
        ("", ["lr"], None),
        ("___", ["lr"], None),
        ("comment", ["comet"], None),
    ],
)
def test_nearest(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


# -------------------------------------------------------------------------------------------------------------- spellings


def zero(section: Any) -> Any:
    return resolve({"zero_optimization": section}).config.zero_optimization


def test_stage3_prefix_is_optional() -> None:
    assert zero({"prefetch_bucket_size": 7}).stage3_prefetch_bucket_size == 7
    assert zero({"max_live_parameters": 8}).stage3_max_live_parameters == 8


@pytest.mark.parametrize(
    "spelling",
    [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
    ],
)
def test_spellings_of_the_16bit_gather(spelling: str) -> None:
    resolved = resolve({"zero_optimization": {spelling: True}})
    key = "stage3_gather_16bit_weights_on_model_save"
    assert getattr(resolved.config.zero_optimization, key) is True
    assert resolved.origin[f"zero_optimization.{key}"] == ("file" if spelling == key else f"file (zero_optimization.{spelling})")


@pytest.mark.parametrize(
    ("config", "one", "two"),
    [
        ({"zero_optimization": {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}}, "stage3_prefetch_bucket_size", "prefetch_"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16", "bfloat16"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}}, "cpu_offload", "offload_optimizer"),
    ],
)
def test_two_spellings_at_once(config: dict[str, Any], one: str, two: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config)
    assert one in str(error.value)
    assert two in str(error.value)


def test_bfloat16() -> None:
    assert resolve({"bfloat16": {"enabled": "true"}}).config.bf16.enabled is True


@pytest.mark.parametrize(("value", "stage"), [(True, 1), ("true", 1), (False, 0), ({}, 0)])
def test_zero_optimization_as_a_switch(value: object, stage: int) -> None:
    assert zero(value).stage == stage


@pytest.mark.parametrize(("old", "new"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")])
def test_old_offload_switches(old: str, new: str) -> None:
    assert getattr(zero({old: False}), new).device == "none"
    assert getattr(zero({old: "true"}), new).device == "cpu"
    with pytest.raises(ConfigError, match=rf"{old}.*maybe.*true or false"):
        zero({old: "maybe"})


def test_null_means_not_given() -> None:
    config = {"fp16": None, "gradient_clipping": None, "zero_optimization": {"stage": None, "offload_param": None}, "optimizer": None}
    resolved = resolve(config)
    assert resolved.config.gradient_clipping == 1.0
    assert resolved.config.optimizer is None
    assert "gradient_clipping" not in resolved.origin


# ------------------------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize("value", [200_000_000, 2e8, "2e8", "200000000", " 2E8 "])
def test_whole_numbers(value: object) -> None:
    assert zero({"allgather_bucket_size": value}).allgather_bucket_size == 200_000_000


def test_a_computed_prefetch_size_is_rounded_down() -> None:
    """transformers' documentation writes ``0.9 * model_hidden_size * model_hidden_size``, older releases filled it in like that."""
    resolved = resolve({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 32 * 32}})
    assert resolved.config.zero_optimization.stage3_prefetch_bucket_size == 921
    assert resolved.origin["zero_optimization.stage3_prefetch_bucket_size"] == "file (rounded down from 921.6)"
    with pytest.raises(ConfigError, match="stage3_prefetch_bucket_size"):
        resolve({"zero_optimization": {"stage3_prefetch_bucket_size": -0.5}})


@pytest.mark.parametrize("value", [921.6, "921.6", "many", True, [1], -1, float("inf"), float("nan")])
def test_not_whole_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size.*a whole number, at least 1"):
        zero({"reduce_bucket_size": value})


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("True", True), (1, True), ("false", False), (0, False), ("no", False)])
def test_booleans(value: object, expected: bool) -> None:
    assert resolve({"fp16": {"enabled": value}}).config.fp16.enabled is expected


@pytest.mark.parametrize("value", [float("inf"), "inf", "Infinity", None])
def test_steps_per_print_may_be_never(value: object) -> None:
    assert resolve({"steps_per_print": value}).config.steps_per_print is None


def test_steps_per_print_as_a_number() -> None:
    assert resolve({"steps_per_print": 2e3}).config.steps_per_print == 2000
    with pytest.raises(ConfigError, match="steps_per_print"):
        resolve({"steps_per_print": "often"})


@pytest.mark.parametrize(("value", "expected"), [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("FP32", "fp32"), ("half", "fp16")])
def test_dtypes(value: str, expected: str) -> None:
    config = resolve(
        {"communication_data_type": value, "torch_autocast": {"dtype": value}, "data_types": {"grad_accum_dtype": value}}
    ).config
    assert config.communication_data_type == config.torch_autocast.dtype == config.data_types.grad_accum_dtype == expected


@pytest.mark.parametrize(
    ("config", "key", "allowed"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "from 0 to 3"),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage", "from 0 to 3"),
        ({"communication_data_type": "fp8"}, "communication_data_type", "fp16, bf16, fp32"),
        ({"gradient_clipping": -1}, "gradient_clipping", "at least 0"),
        ({"gradient_clipping": "high"}, "gradient_clipping", "a number"),
        ({"train_batch_size": 0}, "train_batch_size", "above 0"),
        ({"fp16": True}, "fp16", "a block"),
        ({"optimizer": "AdamW"}, "optimizer", "a block"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params", "a block"),
        ({"optimizer": {"type": "Adam", "params": {"betas": "auto?"}}}, "optimizer.params.betas", "a list"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "offload_param.device", "none, cpu, nvme"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op", "mean, sum"),
        ({"tensor_parallel": {"partition_config": {"layer_specs": {}}}}, "layer_specs", "a list of blocks"),
    ],
)
def test_values_that_do_not_fit(config: dict[str, Any], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config)
    line = next(line for line in str(error.value).splitlines() if key in line)
    assert allowed in line


# ------------------------------------------------------------------------------------------------------- refused and accepted


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1"),
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 3}}}, "optimizer.type"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"local_step_clipper": 8}}}, "optimizer.params.local_step_clipper"),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}}, "optimizer.type"),
        ({"optimizer": {"params": {"cuda_aware": True, "freeze_step": 3}, "type": "ZeroOneAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "params": {"ns_method": "standard"}}}, "optimizer.params.ns_method"),
        ({"optimizer": {"type": "Muon", "params": {"max_coeff": 5.0}}}, "optimizer.params.max_coeff"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        ({"optimizer": {"type": "AdamW", "params": {"freeze_step": 400}}}, "optimizer.params.freeze_step"),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "amp.enabled"),
        ({"msamp": {"opt_level": "O1"}}, "msamp.enabled"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ({"weight_quantization": {}}, "weight_quantization.enabled"),
        ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}}, "row_pruning.shared_parameters.enabled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"compile": {"deepcompile": True, "offload_parameters": True}}, "compile.offload_parameters"),
        ({"compile": {"deepcompile": True, "passes": ["z3", "autosp"]}}, "compile.passes"),
        ({"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}, "hybrid_engine.inference_tp_size"),
        ({"nebula": {"enabled": True}}, "nebula.enabled"),
        ({"expert_parallel": {"enabled": True, "load_balance_coeff": 0.1}}, "expert_parallel.load_balance_coeff"),
        ({"disable_allgather": True}, "disable_allgather"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "zero_quantized_weights` is true: it is for the all-gathers"),
        ({"zero_optimization": {"stage": 1, "zero_quantized_nontrainable_weights": True}}, "zero_quantized_nontrainable_weights"),
        ({"zero_optimization": {"zero_quantized_gradients": True}, "bf16": {"enabled": True}}, "use stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "this is fp32: enable `bf16` or `fp16`"),
        (
            {
                "zero_optimization": {"stage": 1, "zero_quantized_gradients": True},
                "bf16": {"enabled": True},
                "optimizer": {"type": "OneBitAdam"},
            },
            "OneBitAdam, which sends signs itself",
        ),
        ({"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.5}}}, "zeropp_loco_param"),
    ],
)
def test_refused_when_it_asks_for_something(config: dict[str, Any], key: str) -> None:
    with pytest.raises(RefusedKeyError) as error:
        resolve(config)
    assert isinstance(error.value, (ConfigError, UnsupportedError))
    lines = [line for line in str(error.value).splitlines() if line.startswith("- ")]
    assert len(lines) == 1, "one refusal, not one per key of the section"
    assert key in lines[0]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": None}, "offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True, "buffer_count": 9}}},
        {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"tensor_parallel": {"autotp_size": 0, "dtype": "bfloat16"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 4}},
        {"inference": {"tensor_parallel": {"tp_size": 2}}},
        {"sequence_parallel_size": 1},
        {"sequence_parallel_size": 2, "data_parallel_size": 4, "seq_parallel_communication_data_type": "fp16"},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4}},
        {"flops_profiler": {"enabled": False, "detailed": False}},
        {"elasticity": {"enabled": False, "max_gpus": 8}},
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False, "method": "topk"}}}},
        {"amp": {"enabled": False, "opt_level": "O2"}},
        {"weight_quantization": {"enabled": False, "num_bits": 4}},
        {"aio": {"block_size": 1048576, "thread_count": 1}},
        {"hybrid_engine": {"enabled": True, "max_out_tokens": 256, "release_inference_cache": True, "pin_parameters": False}},
        {"hybrid_engine": {"enabled": False, "inference_tp_size": 2}},
        {"datastates_ckpt": False},
        {"zero_optimization": {"reduce_scatter": False, "round_robin_gradients": True, "sub_group_size": 1e9}},
    ],
)
def test_harmless_values_of_refused_keys_pass(config: dict[str, Any]) -> None:
    assert resolve(config).warnings == []


# ---------------------------------------------------------------------------------------------------------- contradictions


def test_both_16bit_formats() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled.*bf16\.enabled"):
        resolve({"fp16": {"enabled": True}, "bf16": {"enabled": "true"}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16.bf16_optimizer_states", "bf16_master_weights_and_grads"]),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, ["bf16.bf16_optimizer_states", "bf16_master_weights_and_grads"]),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, ["fp16.min_loss_scale", "fp16.loss_scale"]),
        ({"optimizer": {"params": {"lr": 1}}}, ["optimizer.type", "missing"]),
        ({"optimizer": {"type": "AdamX"}}, ["optimizer.type", "did you mean Adam?"]),
        ({"optimizer": {"type": "Novelty"}}, ["optimizer.type", "Lamb, Muon, OneBitAdam or a class of torch.optim"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": "-1e-3"}}}, ["optimizer.params.lr", "-1e-3", "at least 0"]),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, ["optimizer.params.betas", "[0.9]", "two numbers"]),
        ({"optimizer": {"type": "Lion", "params": {"betas": [0.9, 1]}}}, ["optimizer.params.betas", "below 1"]),
        ({"scheduler": {"type": "WarmupDecay"}}, ["scheduler.type", "WarmupDecayLR"]),
        ({"scheduler": {"params": {}}}, ["scheduler.type", "missing"]),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 1001}}, ["size must be a multiple of nccl_start_alignment_factor"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ["zero_optimization.offload_param.nvme_path", "missing"]),
        ({"bf16": True}, ["`bf16` is true", 'such as {"enabled": true}']),
        ({"zero_optimization": 3}, ["`zero_optimization` is 3", 'such as {"stage": 3}']),
        ({"optimizer": "AdamW"}, ['`optimizer` is "AdamW"', 'such as {"type": "AdamW"}']),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": True}}, ["offload_optimizer` is true", 'such as {"device": "cpu"}']),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "nvme"}}, ['such as {"device": "nvme"}']),
        ({"scheduler": []}, ["`scheduler` is []; allowed: a block {...}"]),
        ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}, ["`pipeline.stages` is 2", "stage` 3 exclude each other"]),
        ({"pipeline": {"stages": 2}, "sequence_parallel_size": 2}, ["`pipeline.stages` is 2", "`sequence_parallel_size` 2 cannot"]),
        ({"pipeline": {"stages": 2}, "hf_zero": {"context_parallel_size": 2}}, ["`hf_zero.context_parallel_size` 2 cannot"]),
        ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}, ["autotp_size` is 2", "context_parallel_size` divides"]),
    ],
)
def test_contradictions(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({"expert_parallel": {"autoep_size": 2}}, True),
        ({"fp16": {"loss_scale": 0}}, True),
        ({"csv_monitor": {"output_path": "logs"}}, True),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, False),
        ({"bf16": {"enabled": "auto", "check_grad_overflow": False}}, False),
        ({"fp16": {}}, False),
        ({"compile": {"backend": "inductor"}}, True),
        ({"compile": {"deepcompile": True}}, False),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memory": True}}}, False),
    ],
)
def test_a_section_without_its_switch_is_a_warning(config: dict[str, Any], warned: bool) -> None:
    found = [text for text in resolve(config).warnings if "the section has no effect" in text]
    assert found == (
        [
            f"`{next(iter(config))}.enabled` is missing, and its default is false, so the section has no effect: set it to true, or "
            "remove the section"
        ]
        if warned
        else []
    )


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_masters_in_bf16_with_moments_in_fp32_go_with_offload(device: str) -> None:
    offload = {"device": device, "nvme_path": "swap"}
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}
    resolve({"bf16": bf16, "zero_optimization": {"stage": 1, "offload_optimizer": offload}})
    with pytest.raises(ConfigError, match=r"bf16_optimizer_states.*only beside masters in bf16"):
        resolve({"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 1, "offload_optimizer": offload}})
    with pytest.raises(ConfigError, match=r"bf16_optimizer_states.*offload the optimizer"):
        resolve({"bf16": bf16, "zero_optimization": {"stage": 1}})


def test_scheduler_without_optimizer_is_fine() -> None:
    resolved: ResolvedConfig = resolve({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}})
    assert resolved.config.optimizer is None
    assert resolved.config.scheduler is not None


def test_everything_is_reported_at_once() -> None:
    config = {
        "gradient_clipp1ng": 1,
        "zero_optimization": {"stage": 9, "legacy_stage1": True, "stag": 1},
        "fp16": {"enabled": 1},
        "bf16": {"enabled": 1},
    }
    with pytest.raises(ConfigError) as error:
        resolve(config)
    lines = [line for line in str(error.value).splitlines() if line.startswith("- ")]
    assert len(lines) == 5, str(error.value)


def test_an_aio_block_inside_zero_optimization_is_read_in_its_place() -> None:
    """It stands there in transformers' example of NVMe offload."""
    found = resolve({"train_batch_size": 1, "zero_optimization": {"stage": 3, "aio": {"block_size": 4096}}})
    assert found.config.aio.block_size == 4096 and "zero_optimization.aio" in found.warnings[0]
    with pytest.raises(ConfigError, match=r"two places of the same block"):
        resolve({"train_batch_size": 1, "aio": {}, "zero_optimization": {"aio": {"block_size": 4096}}})
    with pytest.raises(ConfigError, match=r"aio.block_sise.*did you mean"):
        resolve({"train_batch_size": 1, "zero_optimization": {"aio": {"block_sise": 4096}}})
