"""Trainer with ``optim="adafactor"`` and with bitsandbytes' optimizers: the same training as under DDP, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers

ADAFACTOR = {"optim": "adafactor", "learning_rate": 1e-2}


def _trainer(models: Path, folder: Path, config: Any, **options: Any) -> Any:
    from transformers import Trainer

    trainers.forget()
    args = trainers.arguments(folder, config, **(ADAFACTOR | options))
    return Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(24, 1))


OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu", "pin_memory": True}}
WITH_OPTIONS = {"optim_args": "scale_parameter=True,relative_step=False,beta1=0.9"}


def _against_ddp(models: Path, folder: Path, options: dict[str, Any], zero: dict[str, Any], stages: tuple[int, ...]) -> None:
    with trainers.clean_state():
        plain = _trainer(models, folder, None, **options)
        plain.train()
        weights = trainers.weights_of(plain.model)
        for stage in stages:
            config = trainers.zero_config(stage, zero_force_ds_cpu_optimizer=False)  # else accelerate puts Adam in its place
            config["zero_optimization"] |= zero
            trainer = _trainer(models, folder, config, **options)
            trainer.train()
            assert type(trainer.model_wrapped.optimizer.inner).__name__ == "Adafactor"
            trainers.assert_close(trainers.logs_of(plain), trainers.logs_of(trainer), f"stage {stage}")
            # A step moves each weight by about the rate, 0.01, however small its gradient is: rounding of small ones is seen in full.
            trainers.assert_same_weights(weights, trainers.weights_of(trainer.model), f"stage {stage}", atol=3e-4)


@pytest.mark.fast_rows("options and offload")
@pytest.mark.parametrize(
    ("options", "zero", "stages"),
    [
        pytest.param({}, {}, (2,), id="as Trainer builds it"),
        pytest.param(WITH_OPTIONS, OFFLOADED, (3,), id="options and offload"),
        pytest.param({}, OFFLOADED, (2, 3), id="offload", marks=pytest.mark.slow),
        pytest.param(WITH_OPTIONS, {}, (2, 3), id="options", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_ddp(options: Any, zero: Any, stages: tuple[int, ...], trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_against_ddp, 2, trainer_models, tmp_path, options, zero, stages)


def _replaced(models: Path, folder: Path) -> str:
    with trainers.clean_state():
        config = trainers.zero_config(2)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        return trainers.error_of(_trainer(models, folder, config).train)


def test_adam_in_its_place_is_refused(trainer_models: Path, tmp_path: Path) -> None:
    for answer in ranks.run_ranks(_replaced, 2, trainer_models, tmp_path):
        assert "clip_threshold" in answer and '"zero_force_ds_cpu_optimizer": false' in answer


def _resumed(models: Path, folder: Path, stage: int, resume: bool) -> tuple[Any, Any]:
    """Six steps of four rows, whatever the number of ranks; with ``resume`` the last two of them."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
    options["average_tokens_across_devices"] = True  # transformers 4: else a rank with one row weighs as much as one with two
    with trainers.clean_state():
        rows = 4 // ranks.world()
        where = folder / "again" if resume else folder
        trainer = _trainer(models, where, trainers.zero_config(stage), per_device_train_batch_size=rows, **options)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
        return trainers.logs_of(trainer), trainers.weights_of(trainer.model)


@pytest.mark.slow  # fast: test_checkpoint_whole_tensors.py
@pytest.mark.parametrize("places", [[(2, 1)], pytest.param([(2, 4), (3, 1), (3, 2)], marks=pytest.mark.slow)], ids=["one", "several"])
def test_resume_on_another_number_of_ranks(places: list[tuple[int, int]], trainer_models: Path, tmp_path: Path) -> None:
    """``places``: stages and numbers of ranks that a run of two ranks at stage 3 goes on with."""
    logs, weights = ranks.run_ranks(_resumed, 2, trainer_models, tmp_path, 3, False)[0]
    for stage, world in places:
        found, after = ranks.run_ranks(_resumed, world, trainer_models, tmp_path, stage, True)[0]
        trainers.assert_close(logs, found, f"stage {stage} on {world} ranks", rel=1e-3)
        trainers.assert_same_weights(weights, after, f"stage {stage} on {world} ranks")


def _eight_bit(folder: Path, optim: str) -> None:
    """Train an embedding of 64 x 64, whose states Trainer keeps in 32 bits, and matrices with states in 8 bits."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer

    def run(config: Any, resume: str | None = None, **options: Any) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
        trainers.forget()
        torch.manual_seed(0)
        dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2, **dropout))
        options |= {"optim": optim, "learning_rate": 1e-2, "max_grad_norm": 0.0}
        trainer = Trainer(model=model, args=trainers.arguments(folder, config, **options), train_dataset=trainers.rows(24, 1))
        trainer.train(resume_from_checkpoint=resume)
        inner = trainer.optimizer.optimizer
        states = getattr(inner, "inner", inner).state.items()
        return trainers.weights_of(trainer.model), {state["state1"].dtype for param, state in states if param.shape == (64, 64)}

    with trainers.clean_state():
        weights, types = run(None)
        assert types == {torch.float32, torch.uint8}  # of the embedding and of a projection
        offloaded = trainers.zero_config(3, zero_force_ds_cpu_optimizer=False)
        offloaded["zero_optimization"] |= OFFLOADED
        saving = {"save_strategy": "steps", "save_steps": 2}
        for config, resume in ((trainers.zero_config(2), None), (offloaded, None), (offloaded, str(folder / "checkpoint-2"))):
            found, own = run(config, resume, **(saving if config is not offloaded else {}))
            everyones = set().union(*trainers.on_every_rank(own))
            assert everyones == types, (config, resume)
            trainers.assert_same_weights(weights, found, f"{config}, {resume}", atol=3e-4)


@pytest.mark.fast_rows("adamw_bnb_8bit")
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_states_of_embeddings_in_32_bits(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    ranks.run_ranks(_eight_bit, 2, tmp_path, optim)
