"""QLoRA through Trainer, as scripts write it: the logs of DDP, adapters of the adapter's size, and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_zero.zero import GatheredParameters
from tests.support import ranks, trainers
from tests.support.rows import slow_but
from tests.support.versions import needs

pytest.importorskip("bitsandbytes")


def _model(models: Path) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(models / "llama", quantization_config=quantization, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False))


def _train(models: Path, folder: Path, stage: int | None, resume: str = "") -> Any:
    from transformers import Trainer

    trainers.forget()
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None} if stage is not None else {}
    config = None if stage is None else trainers.zero_config(stage)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    args = trainers.arguments(folder, config, learning_rate=1e-2, **checkpointing, **saving)
    trainer = Trainer(model=_model(models), args=args, train_dataset=trainers.rows(16, 1))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def _through_trainer(models: Path, folder: Path, stages: tuple[int, ...]) -> None:
    from peft import PeftModel

    with trainers.clean_state():
        expected = _train(models, folder / "ddp", None)
        for stage in stages:
            target = folder / f"stage{stage}"
            trainer = _train(models, target, stage)
            trainers.assert_close(trainers.logs_of(expected), trainers.logs_of(trainer), f"stage {stage}")
            trainer.save_model(str(target / "final"))
            trainer.accelerator.wait_for_everyone()
            assert {path.name for path in (target / "final").glob("*.safetensors")} == {"adapter_model.safetensors"}
            base = next(param for name, param in trainer.model.named_parameters() if "q_proj.base_layer" in name)
            assert base.numel() == (0 if stage == 3 else 32 * 32 // 2)
            loaded = PeftModel.from_pretrained(_model(models).unload(), target / "final")
            found = trainers.weights_of(trainer.model)
            for name, param in loaded.named_parameters():
                assert "lora" not in name or torch.equal(param, found[name]), name
            again = _train(models, target, stage, resume=str(target / "checkpoint-2"))
            assert trainers.logs_of(again) == trainers.logs_of(trainer), f"stage {stage}: resumed run differs"


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_qlora_through_trainer(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_through_trainer, 2, trainer_models, tmp_path, (stage,))


# ------------------------------------------------------------------------------------------------ loading


def _load(source: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = {"quantization_config": BitsAndBytesConfig(**options)} if options else {}
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **quantization)


def _packed(model: nn.Module) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if name.endswith("_proj.weight")}


def _divided_while_loading(source: Path, folder: Path, options: dict[str, Any]) -> None:
    """No rank ever has two whole quantized weights; what it keeps is its share of those that one process loads."""
    with trainers.clean_state():
        whole = _packed(_load(source, **options))
        args = trainers.arguments(folder, trainers.zero_config(3))
        seen: list[nn.Parameter] = []

        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if type(param) is type(next(iter(whole.values()))) and not param.is_meta:
                held = [value for other in seen for value in (other, getattr(other, "CB", None)) if value is not None]
                assert all(value.untyped_storage().nbytes() == 0 for value in held)
                seen.append(param)

        handle = register_module_parameter_registration_hook(registered)
        model = _load(source, **options)
        handle.remove()
        found = _packed(model)
        assert len(seen) == len(whole) == 14 and found.keys() == whole.keys()
        assert all(param.numel() == 0 and param.untyped_storage().nbytes() == 0 for param in found.values())
        units = {id(unit): unit for unit, _ in (param._hf_zero_owner for param in found.values())}
        scales = sum(param.quant_state.absmax.nbytes for param in whole.values() if getattr(param, "quant_state", None) is not None)
        nbytes = sum(param.nbytes for param in whole.values()) + scales
        assert nbytes <= 2 * sum(unit.shard.nbytes for unit in units.values()) <= nbytes * 1.2
        with GatheredParameters(list(found.values())):
            assert all(torch.equal(param, whole[name]) for name, param in found.items())
        assert args is not None


@needs("transformers", "5.1", "a rank keeps whole weights until the model is loaded")
@pytest.mark.parametrize("kind", ["nf4", "int8", "saved"])
def test_each_rank_keeps_its_share_while_loading(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    options = {"nf4": nf4, "int8": {"load_in_8bit": True}, "saved": {}}[kind]
    source = trainer_models / "llama"
    if kind == "saved":  # weights that lie in the files quantized
        _load(source, **nf4).save_pretrained(source := tmp_path / "packed")
    ranks.run_ranks(_divided_while_loading, 2, source, tmp_path / "run", options)
