"""TRL's trainers with PEFT's adapters and drawn options: logs, weights and saved files are those of the same run under DDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers
from tests.support.rows import slow_but
from tests.trainer import drawn_adapters, drawn_trl, drawn_trl_inputs
from tests.trainer.drawn_trl_options import changed, draw, full

MANY = 10  # runs of a seed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    drawn_trl_inputs.save_models(folder)
    return folder


def _differences(run: dict[str, Any], models: Path, folder: Path) -> list[str]:
    return sorted({line for lines in ranks.run_ranks(drawn_trl.compared, 2, run, models, folder, timeout=60) for line in lines})


@pytest.mark.slow  # fast: the rows below, test_trl.py
@pytest.mark.parametrize("seed", [4, 5])
def test_drawn_runs(seed: int, models: Path, tmp_path: Path) -> None:
    source = random.Random(seed)
    for index in range(MANY):
        run = draw(source)
        found = [line for line in _differences(run, models, tmp_path / str(index)) if not line.startswith("both raise")]
        assert not found, f"{changed(run)}: {found[:5]}"


# Files of an adapter that was frozen when Trainer saved, of TRL's reference, and of the embeddings under an adapter.
SAVED = [("sft", "lora", "two"), ("rloo", "c3a", "loaded"), ("sft", "embeddings", "before"), ("sft", "head", "two")]


@pytest.mark.parametrize("case", slow_but(SAVED, *SAVED[:3]), ids=" ".join)
def test_frozen_weights_of_an_adapter_are_saved(case: tuple[str, str, str], models: Path, tmp_path: Path) -> None:
    name, adapter, made = case
    assert not _differences(full({"trainer": name, "adapter": adapter, "made": made, "stage": 3}), models, tmp_path)


# Adapters that take the shape of their layer, copy it, decompose its weight, or sort its values.
READ = [("loha", "by the trainer"), ("layer norms", "loaded"), ("osf", "before"), ("delora", "before"), ("tiny", "before"),
        ("deft", "before"), ("supertuning", "before"), ("adalora", "before"), ("trainable tokens", "before"),
        ("frod", "by the trainer")]  # fmt: skip


@pytest.mark.parametrize("case", slow_but(READ, *READ[:3], READ[-1]), ids=" ".join)
def test_adapters_that_read_their_layer_train_at_stage_3(case: tuple[str, str], models: Path, tmp_path: Path) -> None:
    adapter, made = case
    if not hasattr(pytest.importorskip("peft"), drawn_adapters.KINDS[adapter][0]):
        pytest.skip(f"this version of peft has no adapter {adapter}")
    assert not _differences(full({"trainer": "sft", "adapter": adapter, "made": made, "stage": 3}), models, tmp_path)


def _resized(models: Path, folder: Path, zero: bool) -> dict[str, torch.Tensor]:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    with trainers.clean_state():
        args = trainers.arguments(folder, trainers.zero_config(3) if zero else None, max_steps=1)
        model = drawn_trl_inputs.load(models, "llama")
        torch.manual_seed(1)
        model.resize_token_embeddings(trainers.VOCAB + 3, mean_resizing=False)
        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(8, 1))
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        trainer.accelerator.wait_for_everyone()
        found: dict[str, torch.Tensor] = drawn_trl.files_of(folder / "saved")["adapter_model.safetensors"]
        return found


def _both_resized(models: Path, folder: Path) -> None:
    plain, found = (_resized(models, folder / str(zero), zero) for zero in (False, True))
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} < plain.keys()
    trainers.assert_same_weights(plain, found, "adapter with a resized vocabulary")


def test_embeddings_that_were_resized_are_saved_with_the_adapter(models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_both_resized, 2, models, tmp_path)
