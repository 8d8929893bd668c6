"""Trainer with a ParallelismConfig beside a DeepSpeed configuration: losses, tokens, evaluation, predictions, saved model, resuming."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.models import CASES
from tests.support.tp_trainer import arguments, losses, norms, zero_config
from tests.support.trainers import clean_state, rows

pytest.importorskip("accelerate", minversion="1.12")
pytest.importorskip("transformers", minversion="5.0")

EVALUATED, STEPS = 9, 4


def parallelism(sizes: dict[str, int]) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})


def evaluated() -> list[dict[str, torch.Tensor]]:
    """Without masks: Trainer weighs the rows that ranks evaluate together by their tokens."""
    return rows(EVALUATED, 2, masked=False)


def trained(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    found = {"losses": losses(trainer), "norms": norms(trainer), "tokens": trainer.state.num_input_tokens_seen}
    found["eval"] = trainer.evaluate()["eval_loss"]
    found["predictions"] = trainer.predict(evaluated()).predictions
    return found


def over_ranks(folder: str, stage: int, sizes: dict[str, int], typed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run finds, and what one finds that is resumed half-way."""
    from transformers import Trainer

    from hf_zero.integrations.training_arguments import ZeroTrainingArguments

    found = []
    for resume in (None, str(Path(folder) / f"checkpoint-{STEPS // 2}")):
        with clean_state():
            for name in [name for name in os.environ if name.startswith("PARALLELISM_CONFIG_")]:
                del os.environ[name]
            options = {"parallelism_config": parallelism(sizes), "save_strategy": "steps", "save_steps": STEPS // 2}
            options |= {"include_num_input_tokens_seen": "all", "per_device_eval_batch_size": 1}
            config = zero_config(stage, 1)
            if typed:
                common = {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "report_to": []}
                options |= {"disable_tqdm": True, "seed": 3, "deepspeed": config}
                args: Any = ZeroTrainingArguments(output_dir=folder, **common, **options)
            else:
                args = arguments(folder, config, max_steps=STEPS, **options)
            model = CASES["gpt2"].build()
            trainer = Trainer(model=model, args=args, train_dataset=rows(32, 1), eval_dataset=evaluated())
            found.append(trained(trainer, resume))
            if resume is None:
                trainer.save_model(str(Path(folder) / "saved"))
            dist.barrier()
    return found[0], found[1]


def one_rank(folder: str, batch: int) -> dict[str, Any]:
    from transformers import Trainer

    with clean_state():
        options = {"max_steps": STEPS, "include_num_input_tokens_seen": "all", "per_device_eval_batch_size": 1}
        args = arguments(folder, None, batch=batch, **options)
        trainer = Trainer(model=CASES["gpt2"].build(), args=args, train_dataset=rows(32, 1), eval_dataset=evaluated())
        found = trained(trainer)
        found["state"] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return found


@pytest.mark.fast_rows("2-sizes0-True")
@pytest.mark.parametrize(
    ("stage", "sizes", "typed"),
    [(2, {"tp": 2}, True), (3, {"dp_replicate": 2, "dp_shard": 2}, False), (1, {"dp_replicate": 2, "dp_shard": 2}, True)],
)
def test_trainer_trains_like_one_rank(stage: int, sizes: dict[str, int], typed: bool, tmp_path: Path) -> None:
    replicas = 4 // sizes.get("tp", 1)
    expected = ranks.run_ranks(one_rank, 1, str(tmp_path / "one"), 2 * replicas, group=False)[0]
    for whole, resumed in ranks.run_ranks(over_ranks, 4, str(tmp_path / "four"), stage, sizes, typed, group=False):
        assert whole["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert whole["norms"] == pytest.approx(expected["norms"], rel=1e-3)
        assert whole["eval"] == pytest.approx(expected["eval"], rel=1e-4), "each row once"
        assert whole["predictions"].shape == expected["predictions"].shape
        assert abs(whole["predictions"] - expected["predictions"]).max() < 2e-3 * abs(expected["predictions"]).max()
        assert whole["tokens"] == expected["tokens"], "each sample once"
        assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "four" / "saved")).state_dict()
    for name, value in expected["state"].items():
        torch.testing.assert_close(loaded[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("parts", "named", "counted"), [(2, 1, 8), (2, 2, 16), (1, 1, 16)])
def test_labels_of_a_batch_whose_parts_ranks_compute_count_once(
    parts: int, named: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers before 5.19 divides the labels of all ranks only by the sizes of a ``ParallelismConfig``."""
    from hf_zero.integrations import token_weights

    monkeypatch.setattr(token_weights, "parts_here", lambda: parts)
    monkeypatch.setattr(token_weights, "cuts_batches", lambda trainer, batch: True)
    sizes = SimpleNamespace(cp_size=named, sp_enabled=False)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(parallelism_config=sizes),
        args=SimpleNamespace(average_tokens_across_devices=True),
        get_tp_size=lambda: 1,
    )
    device = torch.device("cpu")
    assert token_weights.count_labels(lambda *_: torch.tensor(16), trainer, [{}], device) == counted
    assert token_weights.count_labels(lambda trainer, *_: torch.tensor(16 // trainer.get_tp_size()), trainer, [{}], device) == 16


@pytest.mark.parametrize(("count", "average", "size", "factor"), [(7, True, 2, 0.5), (None, True, 2, 1), (7, False, 2, 1), (7, True, 1, 1)])
def test_a_loss_multiplied_by_tensor_parallel_ranks_is_divided_by_them(count: int | None, average: bool, size: int, factor: float) -> None:
    """transformers before 5.15 multiplies by all ranks what it has divided by the labels of those that have samples of their own."""
    from hf_zero.integrations.token_weights import compute_loss

    sizes = SimpleNamespace(tp_size=size, sp_enabled=False)
    arguments = SimpleNamespace(average_tokens_across_devices=average)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(parallelism_config=sizes), args=arguments, model_accepts_loss_kwargs=True, compute_loss_func=None
    )
    loss = torch.tensor(3.0)
    assert compute_loss(lambda *_: loss, trainer, None, {}, False, count) == 3 * factor
    assert compute_loss(lambda *_: (loss, "outputs"), trainer, None, {}, True, count) == (3 * factor, "outputs")

    def counts_itself(trainer: Any, *_: Any) -> torch.Tensor:
        return loss if trainer.accelerator.parallelism_config.tp_size else loss

    assert compute_loss(counts_itself, trainer, None, {}, False, count) == 3
