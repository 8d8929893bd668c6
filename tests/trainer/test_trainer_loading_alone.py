"""One rank that loads a model after training at stage 3, while the others wait for it elsewhere, loads a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.units.unit import find_unit
from tests.support import ranks, trainers


def _reload(models: Path, folder: Path) -> None:
    from transformers import Trainer

    with trainers.clean_state():
        args = trainers.arguments(folder, trainers.zero_config(3), max_steps=1)
        trainer = Trainer(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1))
        trainer.train()
        trainer.save_model(str(folder / "trained"))
        if dist.get_rank() == 0:
            alone = trainers.load(folder, "trained")
            assert all(find_unit(param) is None and param.numel() for param in alone.parameters())
            alone(**{name: value[None] for name, value in trainers.rows(1, 2)[0].items()})
            expected = {name: param.detach().clone() for name, param in alone.named_parameters()}
        dist.barrier()
        together = trainers.load(folder, "trained")
        assert all(find_unit(param) is not None for param in together.parameters()), "all ranks divide what they load"
        with GatheredParameters(list(together.parameters())):
            if dist.get_rank() == 0:
                for name, param in together.named_parameters():
                    assert torch.equal(param, expected[name]), name


@pytest.mark.slow  # fast: test_trainer_loading.py
def test_a_model_that_rank_0_loads_by_itself(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_reload, 2, trainer_models, tmp_path)
