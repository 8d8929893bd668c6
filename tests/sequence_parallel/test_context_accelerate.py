"""Context parallelism through accelerate and Trainer, with unchanged scripts: ParallelismConfig(cp_size=...)."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hf_zero.errors import ConfigError
from tests.sequence_parallel.loops import ROWS, close, config, samples
from tests.support import parity, ranks, trl_runs
from tests.support.sequences import LENGTH, Result, build, compare, llama
from tests.support.trainers import clean_state, rows

pytest.importorskip("accelerate", minversion="1.12")
pytest.importorskip("transformers", minversion="5.0")
from transformers import LlamaForCausalLM  # noqa: E402 - where there is transformers


def parallelism(size: int, strategy: str = "allgather", **sizes: int) -> Any:
    from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

    return ParallelismConfig(cp_size=size, cp_handler=TorchContextParallelConfig(cp_comm_strategy=strategy), **sizes)


AXES = ("tp_size", "sp_size")  # given in the ParallelismConfig; all others are keys of the configuration


def split(size: int, axes: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, Any]]:
    """Return the number of groups, the sizes for a ParallelismConfig and the keys of a configuration."""
    sizes = {name: value for name, value in axes.items() if name in AXES}
    keys = {name: value for name, value in axes.items() if name not in AXES}
    return ranks.world() // (size * math.prod(axes.values())), sizes, keys


def whole_loop(accumulation: int, groups: int, length: int) -> Result:
    """One process with the batches of all groups, in their order."""
    model = build(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    batches = list(DataLoader(samples(length), batch_size=2))
    losses, norms = [], []
    for step in range(len(batches) // groups):
        found = [model(**batch).loss for batch in batches[step * groups : (step + 1) * groups]]
        loss = torch.stack(found).mean()
        losses.append(float(loss.detach()))
        (loss / accumulation).backward()
        if (step + 1) % accumulation == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, norms, {name: value.detach() for name, value in model.state_dict().items()})


def loop(stage: int, accumulation: int, size: int, length: int, cuts: bool, axes: dict[str, Any]) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    with clean_state():
        groups, sizes, keys = split(size, axes)
        given = parallelism(size, dp_shard_size=groups, **sizes)
        for _ in range(2):  # the second time as in a notebook that runs a cell again
            AcceleratorState._reset_state(True)
            accelerator = Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config(stage, accumulation), **keys}),
                gradient_accumulation_steps=accumulation,
                parallelism_config=given,
            )
        model = build(llama)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(length), batch_size=2))
        assert model.train_batch_size() == 2 * accumulation * groups
        assert len(loader) == ROWS // 2 // groups
        assert accelerator.torch_device_mesh["cp"].size() == size
        losses, norms = [], []
        for batch in loader:
            buffers = [batch["input_ids"], batch["labels"], batch["attention_mask"]] if cuts else None
            before = batch["labels"].clone()
            with accelerator.accumulate(model):
                if buffers is not None:
                    with accelerator.maybe_context_parallel(
                        buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers={batch["input_ids"], batch["attention_mask"]}
                    ):
                        assert batch["labels"].shape[1] == length * groups * axes.get("tp_size", 1) // ranks.world()
                        loss = model(**batch).loss
                        accelerator.backward(loss)
                    assert torch.equal(batch["labels"], before) and batch["input_ids"].shape[1] < length
                else:
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(parity.as_float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(parity.mean_over_ranks([float(loss.detach())]))
        state = model._consolidated_16bit_state_dict()
        compare(Result(losses, norms, state or {}), whole_loop(accumulation, groups, length), f"stage {stage}")
        accelerator.free_memory()


def both(stage: int, accumulation: int, size: int) -> None:
    loop(stage, accumulation, size, LENGTH - 1, False, {})
    loop(stage, accumulation, size, LENGTH, True, {})


@pytest.mark.slow  # fast: the loop of test_sequence_accelerate.py, Trainer here
@pytest.mark.parametrize(("stage", "accumulation"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2)])
def test_accelerate_loop_over_two_ranks(stage: int, accumulation: int) -> None:
    ranks.run_ranks(both, 2, stage, accumulation, 2)


def handlers() -> list[str]:
    """Errors of an ``sp_handler`` beside ``cp_size`` that the run cannot follow."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    found = []
    for handler in ({"sp_seq_length": 8, "sp_seq_length_is_variable": False}, {"sp_attn_implementation": "flash_attention_2"}):
        with clean_state(), pytest.raises(ConfigError) as caught:
            given = parallelism(2, sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(**handler))
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(1, 1)), parallelism_config=given)
            model = build(llama)
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(samples(8), batch_size=2))
        found.append(str(caught.value))
    return found


def axes_of_four() -> list[str]:
    loop(2, 2, 2, LENGTH, True, {})
    loop(3, 1, 2, LENGTH, True, {"sp_size": 2})
    loop(1, 1, 2, LENGTH, True, {"tp_size": 2})
    return handlers()


@pytest.mark.slow  # two ranks, and Trainer over four, stay
def test_accelerate_loop_over_four_ranks() -> None:
    for length, attention in ranks.run_ranks(axes_of_four, 4):
        assert "sp_seq_length_is_variable of the ParallelismConfig is False (sp_seq_length is 8)" in length
        assert "sp_attn_implementation of the ParallelismConfig is 'flash_attention_2' and the model was made with" in attention


class _OwnForward(LlamaForCausalLM):
    """A model with a forward as research code has it, which shifts labels itself."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids, attention_mask=attention_mask).last_hidden_state)
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def _shifting_itself() -> nn.Module:
    return _OwnForward(llama().config)  # type: ignore[arg-type]


def trainer_run(folder: str, stage: int | None, size: int, resume: bool = False, **extra: Any) -> dict[str, list[float]]:
    """Losses and norms of a Trainer, an evaluation and a prediction; on one rank without ``stage``."""
    from transformers import Trainer, TrainingArguments

    with clean_state():
        for name in [name for name in os.environ if name.startswith("PARALLELISM_CONFIG_")]:
            del os.environ[name]
        accumulation = extra.get("gradient_accumulation_steps", 1)
        groups, sizes, shared = split(size, extra.pop("axes", {}))
        make = _shifting_itself if extra.pop("own_forward", False) else llama
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2 // groups, per_device_eval_batch_size=4, max_steps=6, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, lr_scheduler_type="constant", save_strategy="steps",
            save_steps=3, deepspeed={**config(stage, accumulation), **shared} if stage is not None else None,
            parallelism_config=parallelism(size, dp_shard_size=groups, **sizes) if size > 1 else None, include_num_input_tokens_seen="all",
            **extra,
        )  # fmt: skip
        trainer = Trainer(model=build(make), args=args, train_dataset=rows(20, 1), eval_dataset=rows(16, 2))
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3") if resume else None)
        history = trainer.state.log_history
        found = {name: [float(entry[name]) for entry in history if name in entry] for name in ("loss", "grad_norm")}
        found["tokens"] = [float(trainer.state.num_input_tokens_seen)]
        found["eval_loss"] = [trainer.evaluate()["eval_loss"]]
        predicted = trainer.predict(rows(5, 3))
        found["predicted"] = [float(predicted.predictions.sum()), *map(float, predicted.predictions.shape)]
        return found


def _plain(folder: str, extra: dict[str, Any]) -> dict[str, list[float]]:
    return trainer_run(folder, None, 1, **extra)


def _divided(folder: str, stage: int, size: int, extra: dict[str, Any]) -> dict[str, list[float]]:
    return trainer_run(folder, stage, size, **extra)


@pytest.mark.fast_rows("2-3-extra1")
@pytest.mark.parametrize(
    ("world", "stage", "extra"),
    [
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        (2, 3, {"gradient_accumulation_steps": 2}),
        (4, 2, {}),
        (2, 2, {"label_smoothing_factor": 0.1}),
        (2, 1, {"own_forward": True, "gradient_accumulation_steps": 2}),
        pytest.param(4, 3, {"axes": {"sequence_parallel_size": 2}}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"axes": {"sp_size": 2}, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        (4, 3, {"axes": {"tp_size": 2}}),
    ],
)
def test_trainer_trains_evaluates_and_predicts_like_one_rank(tmp_path: Path, world: int, stage: int, extra: dict[str, Any]) -> None:
    one = {name: value for name, value in extra.items() if name != "axes"}
    expected = ranks.run_ranks(_plain, 1, str(tmp_path / "whole"), one)[0]
    for found in ranks.run_ranks(_divided, world, str(tmp_path / "parts"), stage, 2, extra):
        close(found, expected)


def _resumed(folder: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    return trainer_run(folder, 2, 2), trainer_run(folder, 2, 2, resume=True)


def test_trainer_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    first, resumed = ranks.run_ranks(_resumed, 2, str(tmp_path))[0]
    assert resumed["loss"] == first["loss"] and resumed["grad_norm"] == first["grad_norm"] and resumed["eval_loss"] == first["eval_loss"]


def sft(folder: str, size: int) -> list[dict[str, float]]:
    """What TRL's SFTTrainer logs, which computes its loss and metrics from outputs of its own."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with clean_state():
        args = SFTConfig(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", seed=3, max_length=20,
            gradient_checkpointing=False, deepspeed=config(3, 2) if size > 1 else None,
            parallelism_config=parallelism(size) if size > 1 else None,
        )  # fmt: skip
        words = trl_runs.texts(16, 7, 0)
        data = Dataset.from_dict({"prompt": words, "completion": [f" {text}" for text in trl_runs.texts(16, 9, 1)]})
        trainer = SFTTrainer(model=build(llama), args=args, train_dataset=data, processing_class=trl_runs.tokenizer())  # type: ignore[arg-type]
        trainer.train()
        names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
        return [{name: float(entry[name]) for name in names} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow  # fast: `test_trainer_trains_evaluates_and_predicts_like_one_rank`
def test_sft_trains_and_logs_like_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    expected = ranks.run_ranks(sft, 1, str(tmp_path / "whole"), 1)[0]
    assert len(expected) == 3
    for found in ranks.run_ranks(sft, 2, str(tmp_path / "parts"), 2):
        assert found == [{name: pytest.approx(value, rel=2e-4) for name, value in entry.items()} for entry in expected]


def contradictions() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    tries = [
        (parallelism(2), {"hf_zero": {"context_parallel_size": 1}}, None),
        (parallelism(3), {}, "3 ranks .pp x cp x sp x tp. are to share their samples; 1 or 2 would fit"),
        (parallelism(2), {"sequence_parallel_size": 2}, "4 ranks .pp x cp x sp x tp. are to share"),
        (ParallelismConfig(sp_size=2), {"hf_zero": {"context_parallel_size": 2}}, "4 ranks .pp x cp x sp x tp. are to share"),
        (parallelism(2, sp_size=1), {"sequence_parallel_size": 1}, None),
        (parallelism(2, sp_size=2), {}, "4 ranks .pp x cp x sp x tp. are to share"),
        (parallelism(2, "alltoall"), {"hf_zero": {"context_parallel_strategy": "allgather"}}, "cp_comm_strategy of the ParallelismConfig"),
    ]
    for given, extra, text in tries:
        with clean_state():
            plugin = DeepSpeedPlugin(hf_ds_config={**config(1, 1), **extra})
            with pytest.raises(ConfigError, match=text) if text is not None else nullcontext():
                Accelerator(deepspeed_plugin=plugin, parallelism_config=given)
    with clean_state(), pytest.raises(ConfigError, match="but nothing divides the sequences of LlamaForCausalLM"):
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config(1, 1), "sequence_parallel_size": 2}))
        model = build(llama)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(samples(8), batch_size=2))
    with clean_state(), pytest.raises(ConfigError, match="cp_size 2 and sp_size 2, which need a DeepSpeed plugin"):
        Accelerator(parallelism_config=parallelism(2, sp_size=2), fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_sizes_that_contradict_each_other_are_one_error() -> None:
    ranks.run_ranks(contradictions, 2)
