"""accelerate's own loop with experts divided over ranks, alone and beside split layers: losses, norms, states, the saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support import ranks
from tests.support.experts import build
from tests.support.tp_trainer import rows
from tests.support.trainers import forget

NAME = "MixtralForCausalLM"
BATCH, ROWS, ACCUMULATION, CLIP = 2, 8, 2, 1.0
ADAMW = {"lr": 1e-2, "eps": 1e-3}


def _model() -> nn.Module:
    return build(NAME, {"use_cache": False, "output_router_logits": True})


class Loop:
    """A script that knows nothing of experts: one optimizer, one loader, everything through the accelerator."""

    def __init__(self, stage: int, experts: int, tp: int) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
            "expert_parallel": {"enabled": True, "autoep_size": experts},
            "tensor_parallel": {"autotp_size": tp},
        }
        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, DataLoader(rows(ROWS), batch_size=BATCH))

    def epoch(self) -> tuple[list[float], list[float]]:
        """Mean losses of all ranks per micro-step, norms per step."""
        losses, norms = [], []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(float(self.accelerator.gather(loss.detach()).mean()))
        return losses, norms


def train(folder: str, stage: int, experts: int, tp: int) -> tuple[list[float], list[float]]:
    """Two epochs, the second of which is trained once more from the state between them; the whole model is in ``folder``."""
    forget()
    loop = Loop(stage, experts, tp)
    losses, norms = loop.epoch()
    loop.accelerator.save_state(f"{folder}/state")
    second = loop.epoch()
    loop.accelerator.load_state(f"{folder}/state")
    assert loop.epoch() == second  # bit for bit
    state = loop.accelerator.get_state_dict(loop.model)
    whole = loop.accelerator.unwrap_model(loop.model)
    whole.save_pretrained(f"{folder}/hf", state_dict=state, is_main_process=loop.accelerator.is_main_process)
    loop.accelerator.end_training()
    loop.accelerator.free_memory()
    forget()
    return losses + second[0], norms + second[1]


def one_process(replicas: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """The same in plain PyTorch: losses per micro-step of ``replicas`` ranks, norms per step, the weights."""
    model, losses, norms = _model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    batches = 2 * list(DataLoader(rows(ROWS), batch_size=BATCH))
    for start in range(0, len(batches), replicas):
        loss = sum(model(**batch).loss for batch in batches[start : start + replicas]) / replicas
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (start // replicas + 1) % ACCUMULATION == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


# ranks, stage, autoep_size, autotp_size
@pytest.mark.fast_rows("4-3-2-2")
@pytest.mark.parametrize(
    ("world", "stage", "experts", "tp"), [pytest.param(2, 1, 2, 1, marks=pytest.mark.slow), (2, 3, 2, 1), (4, 3, 2, 2)]
)
def test_loop_is_that_of_one_process(tmp_path: Path, world: int, stage: int, experts: int, tp: int) -> None:
    from transformers import MixtralForCausalLM

    losses, norms, weights = one_process(world // tp)
    for found in ranks.run_ranks(train, world, str(tmp_path), stage, experts, tp, group=False):
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(norms, rel=1e-3)
    saved = MixtralForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
