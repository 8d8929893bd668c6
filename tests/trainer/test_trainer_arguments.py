"""``ZeroTrainingArguments``: fields to configuration, with a JSON, on the command line, and every mistake in one error."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers


def _configs(folder: Path) -> None:
    from hf_zero import ZeroTrainingArguments

    def made(**options: Any) -> Any:
        trainers.forget()
        return ZeroTrainingArguments(output_dir=str(folder), report_to=[], **options)

    with trainers.clean_state():
        plain = made()
        assert plain.deepspeed["zero_optimization"]["stage"] == 2
        assert plain.hf_deepspeed_config.config["train_micro_batch_size_per_gpu"] == plain.per_device_train_batch_size
        assert plain.world_size == 2

        typed = made(zero_stage=3, param_persistence_threshold=0, overlap_comm=True, communication_data_type="bf16", bf16=True)
        zero = typed.deepspeed["zero_optimization"]
        assert zero["stage"] == 3 and zero["stage3_param_persistence_threshold"] == 0 and zero["overlap_comm"] is True
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
        assert typed.deepspeed["communication_data_type"] == "bf16"
        assert typed.hf_deepspeed_config.config["bf16"]["enabled"] is True
        again = dataclasses.replace(typed, learning_rate=1.0)
        assert again.deepspeed == typed.deepspeed and again.zero_stage == 3

        json_stage_3 = {"zero_optimization": {"stage": "auto", "overlap_comm": False}, "train_micro_batch_size_per_gpu": "auto"}
        both = made(zero_stage=3, deepspeed=json_stage_3)
        assert both.deepspeed["zero_optimization"] == {"stage": 3, "overlap_comm": False}
        assert json_stage_3["zero_optimization"]["stage"] == "auto", "the caller's dict was changed"
        path = folder / f"ds_{ranks.rank()}.json"
        path.write_text(json.dumps(json_stage_3))
        assert made(zero_stage=3, deepspeed=str(path)).deepspeed == both.deepspeed


def test_fields_become_the_configuration(tmp_path: Path) -> None:
    ranks.run_ranks(_configs, 2, tmp_path)


def _all_conflicts(folder: Path) -> None:
    from hf_zero import ZeroTrainingArguments

    config = trainers.zero_config(2, gradient_clipping=0.5, optimizer={"type": "AdamW", "params": {"lr": 5e-5}})
    config["zero_optimization"] |= {"overlap_comm": False, "algather_partitions": True}

    def wrong() -> None:
        trainers.forget()
        ZeroTrainingArguments(output_dir=str(folder), deepspeed=config, zero_stage=3, overlap_comm=True, learning_rate=1e-3)

    def out_of_range() -> None:
        trainers.forget()
        ZeroTrainingArguments(output_dir=str(folder), zero_stage=4, offload_param="disk", tensor_parallel_size=0, nvme_path="/fast")

    with trainers.clean_state():
        text = trainers.error_of(wrong)
        parts = ["zero_optimization.stage", "overlap_comm", "gradient_clipping=0.5", "optimizer.params.lr=5e-05", "algather_partitions"]
        assert all(part in text for part in [*parts, "allgather_partitions"]), text
        text = trainers.error_of(out_of_range)
        assert all(part in text for part in ("zero_stage is 4", "'disk'", "tensor_parallel_size is 0", "nvme_path is '/fast'")), text


def test_every_conflict_is_in_one_error(tmp_path: Path) -> None:
    ranks.run_ranks(_all_conflicts, 2, tmp_path)


def test_the_folder_on_nvme_may_come_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero import ZeroTrainingArguments

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}}))

    def missing(**options: Any) -> bool:
        args = ZeroTrainingArguments.__new__(ZeroTrainingArguments)
        args.offload_optimizer, args.deepspeed = "nvme", None
        vars(args).update(options)
        return any("nvme_path is not set" in line for line in args._range_problems())

    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", raising=False)
    assert missing() and not missing(nvme_path="/fast") and not missing(deepspeed=str(path))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert not missing()


def _train(models: Path, folder: Path) -> None:
    """The fields alone train as DDP does, and save whole weights."""
    from transformers import Trainer

    from hf_zero import ZeroTrainingArguments

    found = []
    with trainers.clean_state():
        for typed in (False, True):
            trainers.forget()
            cls = ZeroTrainingArguments if typed else None
            options = {"zero_stage": 3, "param_persistence_threshold": 0} if typed else {}
            args = trainers.arguments(folder, None, cls, **options)
            trainer = Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(32, 1))
            trainer.train()
            found.append(trainers.logs_of(trainer))
        trainers.assert_close(*found, "stage 3 by fields")
        assert trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
        trainer.save_model(str(folder / "final"))
    assert ranks.rank() or (folder / "final" / "model.safetensors").exists()


def test_training_without_a_json(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_train, 2, trainer_models, tmp_path)


def _command_line() -> tuple[dict[str, Any], str]:
    from transformers import HfArgumentParser

    from hf_zero import ZeroTrainingArguments

    def parse(line: str) -> Any:
        trainers.forget()
        return HfArgumentParser(ZeroTrainingArguments).parse_args_into_dataclasses(line.split(), look_for_args_file=False)[0]

    with trainers.clean_state():
        options = "--zero_stage 3 --gather_16bit_weights_on_model_save false --overlap_comm true --learning_rate 1e-3"
        config = parse(f"--output_dir out {options}").deepspeed
        said = io.StringIO()
        with pytest.raises(SystemExit), contextlib.redirect_stderr(said):
            parse("--output_dir out --zero_stage 5")
    return config, said.getvalue()


def test_command_line() -> None:
    config, said = ranks.run_ranks(_command_line, 1, group=False)[0]
    expected = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False, "overlap_comm": True}
    assert config["zero_optimization"] == expected and "invalid choice" in said
