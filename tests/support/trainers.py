"""transformers' Trainer inside a rank: tiny models and rows, the same arguments under DDP and under every stage, and comparisons."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCAB, LENGTH = 64, 8
TRAIN, EVAL = 32, 7  # rows; 7 is no multiple of the batch or of the ranks
STAGES = (0, 1, 2, 3)
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
Logs = list[dict[str, float]]


@contextmanager
def clean_state() -> Iterator[None]:
    """Reset, before and after the context, the globals in which transformers and accelerate keep the configuration of a run."""
    forget()
    try:
        yield
    finally:
        forget()


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def rows(count: int, seed: int, masked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return token rows of one length; with ``masked`` their first labels are ignored, more in some rows than in others."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, ids in enumerate(torch.randint(7, VOCAB, (count, LENGTH), generator=generator)):
        labels = ids.clone()
        if masked:
            labels[: (index * 3) % 6] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def ragged_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return token rows of different lengths, for collators that pad and samplers that group by length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator).tolist()
    return [{"input_ids": (ids := torch.randint(7, VOCAB, (n,), generator=generator).tolist()), "labels": ids} for n in lengths]


def pad(features: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows of ``ragged_rows``."""
    length = max(len(feature["input_ids"]) for feature in features)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        missing = length - len(feature["input_ids"])
        columns["input_ids"].append([*feature["input_ids"], *[0] * missing])
        columns["labels"].append([*feature["labels"], *[-100] * missing])
        columns["attention_mask"].append([1] * len(feature["input_ids"]) + [0] * missing)
    return {name: torch.tensor(values) for name, values in columns.items()}


def save_models(folder: Path) -> None:
    """Write the tiny models of these tests, as checkpoints for ``from_pretrained``: ``gpt2``, ``llama`` and ``t5``."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    special = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt2 = GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **special
        )
        GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
        llama = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **special,
        )
        LlamaForCausalLM(llama).save_pretrained(folder / "llama")
        t5 = T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=6,
        )
        T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")


def load(folder: Path, name: str = "gpt2", **options: Any) -> nn.Module:
    """Return a model of ``save_models``."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    return auto.from_pretrained(folder / name, **options)


def zero_config(stage: int, **changes: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration like users give it to Trainer; tiny models are really sharded at stage 3."""
    section: dict[str, Any] = {"stage": stage}
    if stage == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        section |= {"stage3_max_reuse_distance": 0}
    config: dict[str, Any] = {
        "zero_optimization": section,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    }
    return config | changes


def arguments(folder: Path, deepspeed: Any, cls: Any = None, **changes: Any) -> Any:
    """Return training arguments: 4 steps of 2 ranks x 2 micro-steps x 2 rows; for DDP when ``deepspeed`` is None."""
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "data_seed": 3,
        "ddp_find_unused_parameters": False,
    }
    options |= {"use_cpu": True} if deepspeed is None else {"deepspeed": deepspeed}
    return (cls or TrainingArguments)(**(options | changes))


def logs_of(trainer: Any) -> Logs:
    """Return Trainer's log entries, per step and per evaluation."""
    history = trainer.state.log_history
    return [{key: entry[key] for key in LOGGED if key in entry} for entry in history if "loss" in entry or "eval_loss" in entry]


def assert_close(expected: Logs, found: Logs, what: str, rel: float = 2e-4) -> None:
    """Assert that both logs have the same entries with the same keys and, within rounding, values."""
    assert len(expected) == len(found), f"{what}: {len(expected)} entries expected, {len(found)} found"
    for step, (left, right) in enumerate(zip(expected, found, strict=True)):
        assert left.keys() == right.keys(), f"{what}, entry {step}: {left} and {right}"
        for key, value in left.items():
            limit = rel * max(1.0, abs(value))
            assert abs(value - right[key]) <= limit, f"{what}, entry {step}: {key} is {right[key]}, expected {value}"


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole weights of a model, sharded or not; collective."""
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        return {name: param.detach().float().cpu().clone() for name, param in model.named_parameters()}


def assert_same_weights(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], what: str, atol: float = 3e-5) -> None:
    """Assert that weights are equal within rounding; weights with gradients that are only rounding noise (a key's bias) are left out."""
    assert expected.keys() == found.keys(), what
    for name, value in expected.items():
        if name.endswith("attn.c_attn.bias"):
            continue
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=atol, msg=lambda text, name=name: f"{what}, {name}: {text}")


def on_every_rank(value: Any) -> list[Any]:
    """Return the ``value`` of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def error_of(call: Callable[[], Any]) -> str:
    """Return the text of the error that ``call`` raises; fail unless it is the same on every rank."""
    try:
        call()
    except Exception as error:
        texts = on_every_rank(f"{type(error).__name__}: {error}")
    else:
        texts = on_every_rank("no error")
    assert len(set(texts)) == 1, f"the ranks disagree: {texts}"
    return texts[0]


@contextmanager
def loading_plainly() -> Iterator[None]:
    """Let ``from_pretrained`` load plain, unsharded models, even while a run at stage 3 is in progress."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def load_whole(folder: Path, name: str) -> nn.Module:
    """Return a plain, unsharded model of ``save_models``, even while a run is in progress."""
    with loading_plainly():
        return load(folder, name)


def train_with(models: Path, folder: Path, deepspeed: Any, name: str = "gpt2", **options: Any) -> Any:
    """Train once; return the Trainer."""
    from transformers import Trainer

    forget()
    callbacks = options.pop("callbacks", None)
    ragged = options.pop("ragged", False)
    schedule = options.pop("schedule", False)
    args = arguments(folder, deepspeed, **options)
    assert args.world_size == 2
    data = ragged_rows(TRAIN, 1) if ragged else rows(TRAIN, 1)
    model = load(models, name)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=rows(EVAL, 2),
        callbacks=callbacks,
        data_collator=pad if ragged else None,
        optimizers=_with_schedule(model, args) if schedule else (None, None),
    )
    trainer.train()
    return trainer


def _with_schedule(model: torch.nn.Module, args: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return plain AdamW with the schedule of the JSON."""
    from hf_zero.optim.factory import build_scheduler

    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, weight_decay=0.0)
    values = {"warmup_min_lr": 0.0, "warmup_max_lr": args.learning_rate, "warmup_num_steps": 2, "total_num_steps": args.max_steps}
    return optimizer, build_scheduler("WarmupDecayLR", values | {"warmup_type": "linear"}, optimizer)
