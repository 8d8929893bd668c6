"""Losses that never make the logits, in models whose head is divided over the vocabulary: the numbers of whole logits."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.apply import plan_of
from hf_zero.tensor_parallel.overrides import overrides_of
from hf_zero.tensor_parallel.plan import GATHERED, VOCABULARY, WHOLE
from hf_zero.tensor_parallel.planner import make_plan
from tests.support import fused_losses, parity, ranks, trainers, trl_runs
from tests.support.parity import Run
from tests.support.rows import thinned
from tests.support.sequences import Data, Result, build, compare, llama, whole

# So small that nothing stays gathered between forward and backward.
TIGHT = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}
DATA = Data(padding="right", prompt=3)
LOGGED = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins", "logps/chosen")
BEHIND = ("behind", "frozen")  # the script's loss reads the head, behind the forward


def _model(kind: str, tied: bool = False) -> nn.Module:
    if kind in fused_losses.KINDS:
        return fused_losses.model(kind, tied)
    made = llama(tie_word_embeddings=tied)
    if kind == "asked":  # TRL's as its trainers ask for it: call by call, so that a trace sees the head's own forward
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(made)
        return made

    @functools.wraps(type(made).forward)
    def forward(self: Any, labels: Tensor | None = None, **given: Any) -> dict[str, Any]:
        hidden = self.model(**given).last_hidden_state
        return {"logits": self.lm_head(hidden)} if labels is None else {"hidden": hidden}

    made.lm_head.requires_grad_(kind != "frozen")
    made.forward = MethodType(forward, made)
    return made


def _plain(kind: str, tied: bool) -> nn.Module:
    made = llama(tie_word_embeddings=tied)
    made.lm_head.requires_grad_(kind != "frozen")
    return made


def _loss(engine: Any, kind: str, batch: dict[str, Tensor]) -> Tensor:
    if kind == "asked":
        return engine(**batch, fused_lm_head=True).loss
    if kind not in BEHIND:
        return engine(**batch).loss
    targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    hidden = engine(**batch)["hidden"]
    return fused_losses.FusedLinearCrossEntropy.apply(hidden.flatten(0, 1), engine.module.lm_head.weight, targets.flatten())


def _trained(kind: str, tied: bool, run: Run, split: str) -> Result:
    engine = parity.initialize(build(partial(_model, kind, tied)), run)
    assert plan_of(engine.module).modules["lm_head"].split == split
    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            loss = _loss(engine, kind, DATA.batch(step, micro, ranks.rank() // 2))
            parts.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    weights = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return Result(losses, norms, {name: value.float() for name, value in (weights or {}).items()})


# Tied or not, stage, whether the head's logits stay in parts; on two ranks and on groups of two among four.
CASES = {2: ((False, 0, False), (True, 3, True)), 4: ((False, 1, True), (True, 2, False), (False, 3, False))}


def _trains(kind: str) -> None:
    for tied, stage, parts in CASES[ranks.world()]:
        tied, parts = tied and kind not in BEHIND, parts and kind != "trl"
        extra = {
            "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": parts},
            "zero_optimization": TIGHT if stage == 3 else {},
        }
        run = Run(stage, accumulation=2, clip=0.5, extra=extra)
        found = _trained(kind, tied, run, WHOLE if kind == "trl" else VOCABULARY if parts else GATHERED)
        compare(found, whole(partial(_plain, kind, tied), run, DATA, ranks.world() // 2), f"{kind}, tied {tied}, stage {stage}, {parts}")


@pytest.mark.fast_rows("2-liger", "2-frozen")
@thinned(2, world=[2, 4], kind=["liger", "asked", "trl", "tiled", *BEHIND])
def test_every_stage(world: int, kind: str) -> None:
    ranks.run_ranks(_trains, world, kind)


def _logged(models: Path, folder: Path, kind: str, tp: int) -> list[dict[str, float]]:
    with trainers.clean_state():
        settings = {**trainers.zero_config(2), "tensor_parallel": {"autotp_size": 2}} if tp > 1 else None
        trainer = trl_runs.KINDS[kind](models, folder / f"{kind}{tp}", settings)
        trainer.train()
        return [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow  # `test_every_stage` has the loss of TRL
@pytest.mark.parametrize("kind", ["sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft_lora", "dpo"))])
def test_trl_trainers(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    expected = ranks.run_ranks(_logged, 1, trainer_models, tmp_path, kind, 1, timeout=200)[0]
    found = ranks.run_ranks(_logged, 2, trainer_models, tmp_path, kind, 2, timeout=200)[0]
    assert len(expected) == trl_runs.STEPS
    trainers.assert_close(expected, found, f"{kind} with a divided head", rel=1e-3)


def _never_called() -> None:
    model = fused_losses.model("trl")
    assert make_plan(model, 2).modules["lm_head"].split == WHOLE
    with pytest.raises(ConfigError, match="lm_head cannot be split by vocabulary: its weight is read by .* in LlamaForCausalLM"):
        make_plan(model, 2, overrides=overrides_of({"vocab_parallel_lm_head": True}, None, model))


def test_a_head_that_its_model_never_calls_stays_whole() -> None:
    ranks.run_ranks(_never_called, 1)  # which has TRL imported
