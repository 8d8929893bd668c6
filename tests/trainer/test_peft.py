"""PEFT adapters on frozen bases: the numbers of plain PyTorch and of DDP, and checkpoints of the adapter's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks, trainers
from tests.support.models import CASES, Batch
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import slow_but

KINDS = ("lora", "ia3", "prompt", "prefix", "dora", "lora_and_embeddings")
STAGES = (2, 3)
SMALL_BYTES = 40_000  # an adapter of these tests with its optimizer state takes less, the frozen base alone takes more


def config_of(kind: str) -> Any:
    """The adapter's configuration, for a Llama."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig

    task = {"task_type": "CAUSAL_LM"}
    return {
        "lora": lambda: LoraConfig(**task, r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "ia3": lambda: IA3Config(**task, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prompt": lambda: PromptTuningConfig(**task, num_virtual_tokens=4),
        "prefix": lambda: PrefixTuningConfig(**task, num_virtual_tokens=4),
        "dora": lambda: LoraConfig(**task, r=4, use_dora=True, target_modules=["q_proj", "up_proj"]),
        "lora_and_embeddings": lambda: LoraConfig(**task, r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    }[kind]()


def adapted(base: nn.Module, kind: str, checkpointing: bool = False) -> nn.Module:
    """``base`` with an adapter, the same on every rank; activation checkpointing as scripts switch it on."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(base, config_of(kind)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


# ------------------------------------------------------------------------------------------------ the engine alone


@pytest.mark.parametrize(("kind", "checkpointing"), [("lora", True), ("ia3", False), ("prompt", True)])
def test_kinds_against_plain_pytorch(kind: str, checkpointing: bool) -> None:
    ranks.run_ranks(_against_plain, 2, kind, checkpointing, (3,))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "checkpointing"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS[:3])])
def test_every_kind_at_both_stages(kind: str, checkpointing: bool) -> None:
    ranks.run_ranks(_against_plain, 2, kind, checkpointing, STAGES)


def _against_plain(kind: str, checkpointing: bool, stages: tuple[int, ...]) -> None:
    def feed(step: int, micro: int, rank: int) -> Batch:
        return CASES["llama"].rows(step, micro, rank)

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).loss

    for stage in stages:
        run = Run(stage, accumulation=2, clip=0.1, lr=1e-2)
        check_training(lambda: adapted(CASES["llama"].build(), kind, checkpointing), feed, forward, run, label=kind)


def _adapters_tied() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero
    from hf_zero.errors import StateError

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 24}
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with pytest.raises(StateError, match=r"are two tensors that share memory.*option ties them \(ensure_weight_tying\), turn it off"):
        hf_zero.initialize(model=model, optimizer=optimizer, config=config)


def test_adapters_that_their_library_ties_by_views_are_an_error_that_names_the_option() -> None:
    ranks.run_ranks(_adapters_tied, 1)


def test_a_prompt_is_saved_by_one_rank_alone() -> None:
    """PEFT calls the prompt's embedding on the rank that saves; it must be there, however large it is."""
    ranks.run_ranks(_prompt_on_one_rank, 2)


def _prompt_on_one_rank() -> None:
    for kind in ("prompt", "prefix"):
        plain = adapted(CASES["llama"].build(), kind)
        engine = initialize(adapted(CASES["llama"].build(), kind), Run(3))
        if ranks.rank() == 0:
            assert torch.equal(engine.module.get_prompt_embedding_to_save("default"), plain.get_prompt_embedding_to_save("default"))
        base = next(param for name, param in engine.module.named_parameters() if "q_proj" in name)
        assert base.numel() == 0
        engine.destroy()


# ------------------------------------------------------------------------------------------------ Trainer


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_lora_through_trainer(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_through_trainer, 2, trainer_models, tmp_path, "lora", (stage,), True)


@pytest.mark.slow  # fast: `test_lora_through_trainer`, `test_kinds_against_plain_pytorch`
def test_prompt_through_trainer(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_through_trainer, 2, trainer_models, tmp_path, "prompt", (3,), False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ia3", "prefix", "dora"])
def test_more_kinds_through_trainer(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_through_trainer, 2, trainer_models, tmp_path, kind, STAGES, False)


def _through_trainer(models: Path, folder: Path, kind: str, stages: tuple[int, ...], checkpointing: bool) -> None:
    """Logs and weights of DDP; what is saved is small, loads into a plain model, and resumes bit for bit."""
    data = trainers.rows(16, 1)
    with trainers.clean_state():
        expected = _train(models, folder / "ddp", kind, None, data, checkpointing)
        for stage in stages:
            target = folder / f"stage{stage}"
            trainer = _train(models, target, kind, stage, data, checkpointing, save_steps=2)
            trainers.assert_close(trainers.logs_of(expected), trainers.logs_of(trainer), f"{kind}, stage {stage}", rel=1e-3)
            trainer.save_model(str(target / "final"))
            trainer.accelerator.wait_for_everyone()
            _check_sizes(target / "checkpoint-2", target / "final", models)
            _check_loads(models, target / "final", trainer)
            again = _train(models, target, kind, stage, data, checkpointing, resume=str(target / "checkpoint-2"))
            assert trainers.logs_of(again) == trainers.logs_of(trainer), f"{kind}, stage {stage}: resumed run differs"


def _train(
    models: Path, folder: Path, kind: str, stage: int | None, data: Any, checkpointing: bool, resume: str = "", save_steps: int = 0
) -> Any:
    from transformers import Trainer

    trainers.forget()
    changes: dict[str, Any] = {"learning_rate": 1e-2, "gradient_checkpointing": checkpointing}
    if save_steps:
        changes |= {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": None}
    args = trainers.arguments(folder, None if stage is None else trainers.zero_config(stage), **changes)
    model = adapted(trainers.load(models, "llama"), kind)
    if checkpointing:
        model.enable_input_require_grads()
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def _check_sizes(checkpoint: Path, final: Path, models: Path) -> None:
    """No file and no folder holds the frozen base."""
    base = (models / "llama" / "model.safetensors").stat().st_size
    assert base > SMALL_BYTES
    saved = {path.name: path.stat().st_size for path in final.iterdir()}
    assert 0 < saved["adapter_model.safetensors"] < base / 2, saved
    assert "model.safetensors" not in saved
    written = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.rglob("*.safetensors")}
    assert sum(written.values()) < SMALL_BYTES, f"{written}; the base has {base} bytes"


def _check_loads(models: Path, final: Path, trainer: Any) -> None:
    """A plain base with the saved adapter computes what the sharded model computes."""
    from peft import PeftModel

    rows = trainers.rows(4, 9)
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    loaded = PeftModel.from_pretrained(trainers.load_whole(models, "llama"), final).eval()
    trainer.model_wrapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(trainer.model_wrapped(**batch).loss, loaded(**batch).loss)


# ------------------------------------------------------------------------------------------------ after the step


def _adalora(steps: int) -> nn.Module:
    from peft import AdaLoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": steps, "lora_dropout": 0.0}
        return get_peft_model(
            CASES["llama"].build(), AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **sizes)
        ).train()


def _allocate(model: Any, optimizer: Any, backward: Any, clip: Any, steps: int) -> None:
    """Train as PEFT's documentation says: ranks are allocated by the gradients, after the step and before ``zero_grad``."""
    inner = getattr(model, "module", model)
    for step in range(steps):
        backward(model, step)
        clip(model.parameters(), 0.05)
        optimizer.step()
        inner.base_model.update_and_allocate(step)
        optimizer.zero_grad()


def _ranks_by_gradients(kinds: tuple[tuple[int, dict[str, Any]], ...]) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    import hf_zero

    steps = 6
    plain = _adalora(steps)

    def backward_of_all(model: Any, step: int) -> None:
        for rank in range(ranks.world()):
            (model(**CASES["llama"].rows(step, 0, rank)).loss / ranks.world()).backward()

    _allocate(plain, torch.optim.SGD(plain.parameters(), lr=0.5), backward_of_all, nn.utils.clip_grad_norm_, steps)
    expected = {name: param.detach() for name, param in plain.named_parameters() if param.requires_grad}
    assert any(bool((value == 0).any()) and bool((value != 0).any()) for name, value in expected.items() if "lora_E" in name)
    for stage, keys in kinds:
        with trainers.clean_state():
            config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto", "zero_optimization": {"stage": stage}, **keys}
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            model = _adalora(steps)
            engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

            def backward(model: Any, step: int, accelerator: Any = accelerator) -> None:
                accelerator.backward(model(**CASES["llama"].rows(step, 0, ranks.rank())).loss)

            _allocate(engine, optimizer, backward, accelerator.clip_grad_norm_, steps)
            trained = [(name, param) for name, param in engine.module.named_parameters() if name in expected]
            for name, param in trained:
                found = hf_zero.utils.safe_get_full_fp32_param(param)
                torch.testing.assert_close(found, expected[name], rtol=2e-4, atol=2e-5, msg=lambda text, at=(stage, name): f"{at}: {text}")
            backward(engine, 0)
            accelerator.clip_grad_norm_(engine.parameters(), 0.05)
            before = [hf_zero.utils.safe_get_full_grad(param) for _, param in trained]
            optimizer.step()
            after = [hf_zero.utils.safe_get_full_grad(param) for _, param in trained]
            torch.testing.assert_close(after, before)
            shown = [param.grad for _, param in trained]
            torch.testing.assert_close(shown, before if stage == 0 or "hf_zero" in keys else [None] * len(before))
            optimizer.zero_grad()
            assert {hf_zero.utils.safe_get_full_grad(param) for _, param in trained} == {None}
            assert {param.grad for _, param in trained} == {None}
            engine.destroy()


def test_adalora_allocates_ranks_by_the_gradients_of_the_step() -> None:
    ranks.run_ranks(_ranks_by_gradients, 2, ((0, {}), (2, {"hf_zero": {"show_gradients": True}}), (3, {})))
