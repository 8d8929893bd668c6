"""Test that ranks with different settings never train together: one error on all of them, with key, values and ranks, and no hang."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def _own(last: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of this rank: the first on the last rank, the second on all others, added to the common ones."""
    return {**CONFIG, **(last if ranks.rank() == ranks.world() - 1 else others)}


def _sgd(lr: Any = 0.1, **options: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": {"lr": lr, **options}}}


def _stage(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}, **_sgd()}


LATE = {"tensor_parallel": {"autotp_size": 2}}
# What the last rank has, what all others have, and the clause of the error with the values of the others and of the last.
OF_CONFIG = {
    "lr": (_sgd(0.2), _sgd(), "optimizer.params.lr is {} on {}, {} on {}", "0.1", "0.2"),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, _sgd(), "optimizer.type is {} on {}, {} on {}", "'SGD'", "'AdamW'"),
    "clipping": ({"gradient_clipping": 0.5, **_sgd()}, _sgd(), "gradient_clipping is {} on {}, {} on {}", "1", "0.5"),
    "accumulation": ({"gradient_accumulation_steps": 2, **_sgd()}, _sgd(), "gradient_accumulation_steps is {} on {}, {} on {}", "1", "2"),
    "stage": (_stage(3), _stage(2), "zero_optimization.stage is {} on {}, {} on {}", "2", "3"),
    "no stage": (_sgd(), _stage(1), "zero_optimization.stage is {} on {}, {} on {}", "1", "0"),
    "precision": ({"bf16": {"enabled": True}, **_sgd()}, _sgd(), "bf16.enabled is {} on {}, {} on {}", "False", "True"),
    "loss scale": (
        {"fp16": {"enabled": True, "loss_scale": 4}, **_sgd()},
        {"fp16": {"enabled": True, "loss_scale": 8}, **_sgd()},
        "fp16.loss_scale is {} on {}, {} on {}",
        "8",
        "4",
    ),
    "threshold": (_stage(3, stage3_param_persistence_threshold=7), _stage(3), "persistence_threshold is {} on {}, {} on {}", "", "7"),
    "axes": ({**_sgd(), **LATE}, _sgd(), "tensor_parallel.autotp_size is {} on {}, {} on {}", "", "2"),
    "scheduler": ({**_sgd(), "scheduler": {"type": "WarmupLR"}}, _sgd(), "scheduler.type is {} on {}, {} on {}", "null", "'WarmupLR'"),
    "refused": ({"train_batch_size": 7, **_sgd()}, _sgd(), "what is wrong with it is {} on {}, {} on {}", "not there", ""),
    "misspelt": ({"gradient_clippping": 7, **_sgd()}, _sgd(), "what is wrong with it is {} on {}, {} on {}", "not there", ""),
}  # fmt: skip


def _text_of(**arguments: Any) -> str:
    """Return the message of the error that ``initialize`` raises; a rank that waited in vain for others would raise another error."""
    with pytest.raises(StateError) as caught:
        hf_zero.initialize(**arguments)
    return str(caught.value)


def _configurations() -> None:
    last = f"rank {ranks.world() - 1}"
    others = "rank 0" if ranks.world() == 2 else "ranks 0, 1"
    for case, (own, shared, clause, value, other) in OF_CONFIG.items():
        text = _text_of(model=_model(), config=_own(own, shared))
        assert text.startswith("the ranks were given different settings: "), text
        head = clause.partition("{}")[0]
        assert head in text and f"{value} on {others}" in text and f"{other} on {last}" in text, (case, text)
    with mock.patch("hf_zero.assembly.same_settings.__version__", "9.9" if ranks.rank() == ranks.world() - 1 else "0.1"):
        text = _text_of(model=_model(), config={**CONFIG, **_sgd()})
        assert f"version of hf_zero is 0.1 on {others}, 9.9 on {last}" in text
    # One rank loads its model sharded, where the others do not.
    with pytest.raises(StateError, match="zero_optimization.stage is 2 on .*, 3 on ") as caught:
        if ranks.rank() == ranks.world() - 1:
            hf_zero.zero.Init(config_dict_or_path={**CONFIG, **_stage(3)})
        hf_zero.initialize(model=_model(), config={**CONFIG, **_stage(2)})
    assert f"the call that ranks are in is 'initialize' on {others}, 'zero.Init' on {last}" in str(caught.value).replace('"', "'")
    unread = str(hf_zero) if ranks.rank() else {**CONFIG, **_sgd()}  # no file, no JSON
    text = _text_of(model=_model(), config=unread)
    assert "the configuration is read on rank 0, refused (" in text and "train_batch_size" not in text, text


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("world", [2, 3])
def test_another_configuration_is_named_before_anybody_waits(world: int) -> None:
    ranks.run_ranks(_configurations, world)


def _optimizers() -> None:
    last = ranks.rank() == ranks.world() - 1
    named = f"on rank {ranks.world() - 1}"
    for stage in (0, 2, 3):
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        kinds = {
            "lr": lambda params: torch.optim.SGD(params, lr=0.2 if last else 0.1),
            "class": lambda params: (torch.optim.AdamW if last else torch.optim.SGD)(params, lr=0.1),
            "second group": lambda params: torch.optim.AdamW(
                [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5 if last else 0.25}], lr=0.1, betas=(0.8, 0.9)
            ),
            "betas": lambda params: torch.optim.AdamW(params, betas=(0.9, 0.95 if last else 0.99)),
        }
        found = {}
        for case, make in kinds.items():
            model = _model()
            found[case] = _text_of(model=model, config=config, optimizer=make(list(model.parameters())))
            model = _model()
            function = _text_of(model=model, config=config, optimizer=lambda params, make=make: make(list(params)))
            assert function == found[case]
        assert "lr of param group 0 is 0.1 on" in found["lr"] and f"0.2 {named}" in found["lr"]
        assert "optimizer is torch.optim.sgd.SGD on" in found["class"] and f"torch.optim.adamw.AdamW {named}" in found["class"]
        assert "weight_decay of param group 1 is 0.25 on" in found["second group"] and f"0.5 {named}" in found["second group"]
        assert "betas of param group 0 is (0.9, 0.99) on" in found["betas"] and f"(0.9, 0.95) {named}" in found["betas"]


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("world", [2, 3])
def test_another_optimizer_is_named(world: int) -> None:
    ranks.run_ranks(_optimizers, world)


def _boundaries() -> None:
    """Check that a learning rate changed by one rank's scheduler or callback ends the run at the next step, before any update."""
    last = ranks.rank() == ranks.world() - 1
    for stage in (0, 2, 3):
        for change in ("lr", "weight_decay", "betas", "scheduler"):
            model = _model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 if last and change == "scheduler" else 1.0)
            config = {**CONFIG, "zero_optimization": {"stage": stage}}
            engine = hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
            for step in range(2):
                if step == 1 and last and change != "scheduler":
                    engine.optimizer.param_groups[0][change] = {"lr": 0.25, "weight_decay": 0.5, "betas": (0.5, 0.5)}[change]
                engine.backward(engine(torch.ones(1, 4)).sum())
                if step == 0:
                    engine.step()
                    continue
                with pytest.raises(StateError, match="hyper-parameters are not the same on all ranks") as caught:
                    engine.step()
            assert engine.global_steps == 1
            key = "lr" if change == "scheduler" else change
            values = {"lr": ("0.5", "0.25"), "weight_decay": ("0.25", "0.5"), "betas": ("(0.9, 0.999)", "(0.5, 0.5)")}[key]
            assert f"{key} of param group 0 is {values[0]} on rank" in str(caught.value), caught.value
            assert f"{values[1]} on rank {ranks.world() - 1}." in str(caught.value), caught.value
            engine.destroy()


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("world", [2, 3])
def test_a_rate_that_changes_on_one_rank_ends_the_run(world: int) -> None:
    ranks.run_ranks(_boundaries, world)


def _allowed(folder: str) -> None:
    """Check differences that are allowed: local paths and devices, logging settings, and a learning rate as a number or as a tensor."""
    rank = ranks.rank()
    config = {
        **CONFIG,
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": rank == 1, "output_path": f"{folder}/{rank}"},
        "steps_per_print": 5 if rank else None,
        "log_level": "error" if rank else "warning",
        **({"gradient_accumulation_steps": 1} if rank else {"train_batch_size": ranks.world()}),
    }
    model = _model()
    rate = torch.tensor(1e-3) if rank else 1e-3
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.global_steps == 1


def test_what_is_a_ranks_own_may_differ(tmp_path: Any) -> None:
    ranks.run_ranks(_allowed, 2, str(tmp_path))


def _parts() -> None:
    """Check with tensor parallelism, where no rank has another one's parameters, that the ranks of a model agree too."""
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    from tests.support.models import CASES

    case = CASES["llama"]
    model = case.build()
    last = ranks.rank() == ranks.world() - 1
    text = _text_of(model=model, config=config, optimizer=lambda params: torch.optim.SGD(params, lr=0.2 if last else 0.1))
    assert "lr of param group 0 is 0.1 on rank 0, 0.2 on rank 1" in text
    model = case.build()
    engine = hf_zero.initialize(model=model, config={**config, **_sgd()})[0]
    batch = case.rows(0, 0, 0)
    engine.backward(case.forward(engine, batch))
    engine.step()
    engine.optimizer.param_groups[0]["lr"] = 0.5 if last else 0.1
    engine.backward(case.forward(engine, batch))
    with pytest.raises(StateError, match="lr of param group 0 is 0.1 on rank 0, 0.5 on rank 1"):
        engine.step()
    engine.destroy()


def test_ranks_that_hold_parts_of_a_model_agree() -> None:
    ranks.run_ranks(_parts, 2)
