"""Trainer with a ParallelismConfig beside a DeepSpeed configuration: losses, tokens, evaluation, predictions, saved model, resuming."""

from __future__ import annotations

import math
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


def _trainer_of(mesh: dict[str, int], average: bool, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the attributes of a Trainer whose ranks form ``mesh`` and cut batches; tensor parallelism by a ``ParallelismConfig``."""
    from hf_zero.integrations import pipelines, token_weights

    sizes = SimpleNamespace(**{"tp": 1, "pp": 1, "cp": 1, "sp": 1, **mesh})
    for module in (pipelines, token_weights):
        monkeypatch.setattr(module, "mesh_here", lambda: sizes)
    monkeypatch.setattr(token_weights, "cuts_batches", lambda trainer, batch: sizes.cp > 1)
    monkeypatch.setattr(token_weights, "sharing_parts_here", lambda: 1)  # in a step whose batch is cut
    named = SimpleNamespace(tp_size=sizes.tp, non_data_parallel_size=sizes.tp, sp_enabled=False)
    type_of = type("Accelerator", (SimpleNamespace,), {"parallelism_config": property(lambda self: self.state.parallelism_config)})
    return SimpleNamespace(
        accelerator=type_of(state=SimpleNamespace(parallelism_config=named)),
        args=SimpleNamespace(average_tokens_across_devices=average),
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
    )


MESHES: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("average", [True, False])
def test_labels_count_once_with_older_transformers(mesh: dict[str, int], average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.19 it counts the labels of all ranks, and divides only by the sizes of a ``ParallelismConfig``, rounded down."""
    from hf_zero.integrations import token_weights

    trainer = _trainer_of(mesh, average, monkeypatch)
    same = math.prod(mesh.values())

    def older(trainer: Any, *_: Any) -> torch.Tensor:
        found = torch.tensor(7 * same if average else 7)  # two groups of ranks would have 14
        sizes = trainer.accelerator.parallelism_config
        return found // sizes.non_data_parallel_size if sizes else found

    found = token_weights.count_labels(older, trainer, [{}], torch.device("cpu"))
    assert found == (7 if average else 7 / mesh.get("cp", 1))
    assert trainer.accelerator.parallelism_config is not None

    def newer(trainer: Any, *_: Any) -> torch.Tensor:
        return torch.tensor(7 * trainer.get_tp_size()) / trainer.get_tp_size()

    if average:
        trainer.get_tp_size = lambda: 2
        assert token_weights.count_labels(newer, trainer, [{}], torch.device("cpu")) == 7


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("count", "average"), [(7, True), (None, True), (7, False)])
def test_a_loss_multiplied_by_ranks_with_the_same_samples_is_divided_by_them(
    mesh: dict[str, int], count: int | None, average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers before 5.19 multiplies a loss by all ranks; its later versions leave out those of tensor parallelism."""
    from hf_zero.integrations.token_weights import compute_loss

    trainer = _trainer_of(mesh, average, monkeypatch)
    loss = torch.tensor(3.0)
    same = mesh.get("tp", 1) * mesh.get("pp", 1) if average and count else 1
    assert compute_loss(lambda *_: loss, trainer, None, {}, False, count) == 3 / same
    assert compute_loss(lambda *_: (loss, "outputs"), trainer, None, {}, True, count) == (3 / same, "outputs")

    def leaves_out(trainer: Any, *_: Any) -> torch.Tensor:
        return loss if trainer.accelerator.parallelism_config.tp_size else loss

    assert compute_loss(leaves_out, trainer, None, {}, False, count) == 3 / (mesh.get("pp", 1) if average and count else 1)
