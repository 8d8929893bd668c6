"""accelerate's own loop over groups of ranks: its loaders, losses, metrics, the saved model; adapters in a model that is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support import ranks
from tests.support.models import CASES, ModelCase
from tests.support.parity import Run
from tests.support.rows import slow_but
from tests.support.tp_trainer import rows
from tests.support.tp_training import check_against_one_rank
from tests.support.trainers import forget

BATCH, ROWS, EVALUATED = 2, 16, 9


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> tuple[list[int], list[int], torch.Tensor]:
    """Sums of the rows' tokens: gathered as tensors, as objects, and every rank's own through ``gather``."""
    tensors, objects = [], []
    for batch in loader:
        with torch.no_grad():
            model(**batch)
        sums = batch["input_ids"].sum(-1)
        tensors += accelerator.gather_for_metrics({"sums": sums})["sums"].tolist()
        objects += accelerator.gather_for_metrics([str(value) for value in sums.tolist()], use_gather_object=True)
    return tensors, [int(value) for value in objects], accelerator.gather(torch.tensor(accelerator.process_index))


def loop(how: str, stage: int) -> dict[str, Any]:
    """Two steps of two micro-steps each, and an evaluation."""
    from accelerate import Accelerator, DeepSpeedPlugin

    from hf_zero import ZeroPlugin

    forget()
    if how == "ZeroPlugin":
        plugin = ZeroPlugin(stage=stage, tensor_parallel_size=2, gradient_accumulation_steps=2, gradient_clipping=1.0)
    else:
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"},
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = CASES["gpt2"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaders = DataLoader(rows(ROWS), batch_size=BATCH), DataLoader(rows(EVALUATED), batch_size=BATCH)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    losses = []
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = accelerator.get_state_dict(model)
    tensors, objects, everyone = evaluate(accelerator, model.eval(), eval_loader)
    accelerator.free_memory()
    forget()
    return {"losses": losses, "state": state, "tensors": tensors, "objects": objects, "everyone": everyone.tolist()}


def one_rank() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses of the two data-parallel ranks, and the weights."""
    model = CASES["gpt2"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = list(DataLoader(rows(ROWS), batch_size=BATCH))
    losses: list[list[float]] = [[], []]
    for step in range(0, len(batches), 4):
        for micro in range(4):
            loss = model(**batches[step + micro]).loss
            (loss / 4).backward()
            losses[micro % 2].append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.fast_rows("DeepSpeedPlugin-3")
@pytest.mark.parametrize(("how", "stage"), [("ZeroPlugin", 2), ("DeepSpeedPlugin", 3)])
def test_loop_is_that_of_one_rank(how: str, stage: int) -> None:
    losses, weights = one_rank()
    sums = [int(row["input_ids"].sum()) for row in rows(EVALUATED)]
    for rank, found in enumerate(ranks.run_ranks(loop, 4, how, stage, group=False)):
        assert found["losses"] == pytest.approx(losses[rank // 2], rel=1e-4)
        assert found["tensors"] == found["objects"] == sums  # each row once, in order, none of those that fill the last batch
        assert found["everyone"] == [0, 1, 2, 3]
        if rank == 0:
            for name, value in weights.items():
                torch.testing.assert_close(found["state"][name], value, rtol=2e-3, atol=2e-4)


def adapted() -> nn.Module:
    """A Llama with adapters on layers of both kinds, in a wrapper whose ``forward`` names no arguments."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(CASES["llama"].make(), config)


def train_adapters(stage: int) -> None:
    case = ModelCase("adapters", adapted, CASES["llama"].batch, CASES["llama"].forward)
    check_against_one_rank(case, 2, [Run(stage=stage, clip=0.5)])


@pytest.mark.slow  # fast: `test_loop_is_that_of_one_rank`
@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_adapters_train_as_on_one_rank(stage: int) -> None:
    ranks.run_ranks(train_adapters, 2, stage)
