"""What does not fit a pipeline is one clear error; and where its size may be said."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero import observe
from hf_zero.config.mesh import Claim, solve
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations import pipelines
from tests.pipeline.pipelines import with_stages
from tests.support import parity, ranks
from tests.support.parity import Run
from tests.support.tp_training import zoo_case


def refusals() -> None:
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2})

    def refused(kind: type[Exception], says: str, run: Run) -> None:
        with pytest.raises(kind, match=says):
            parity.initialize(case.build(), run)

    refused(UnsupportedError, "and `zero_optimization.stage` 3 exclude each other", with_stages(Run(3), 2))
    refused(ConfigError, "3 ranks .* would fit|does not divide|does not fit the 2 rank", with_stages(Run(1), 3))
    refused(ConfigError, "has one stage on each rank, and pipeline.stages_per_rank is 2", with_stages(Run(1), 2, stages_per_rank=2))
    refused(ConfigError, "pipeline.schedule is 'sideways'", with_stages(Run(1), 2, schedule="sideways"))
    refused(ConfigError, "stages|blocks", with_stages(Run(1), 2, schedule="Interleaved1F1B", stages_per_rank=4))
    quantized = {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}
    refused(UnsupportedError, "pipeline.stages and ZeRO", with_stages(Run(2, dtype="bf16", extra=quantized), 2))
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    observe.logger.addHandler(handler)
    engine = parity.initialize(case.build(), with_stages(Run(1), 2, micro_batches=3))
    observe.logger.removeHandler(handler)
    assert ("on 2 rank(s) (groups of 2 divide one model), global batch" in lines.getvalue()) is (ranks.rank() == 0), lines.getvalue()
    batch = parity.prepare(case.rows(0, 0, 0), parity.DTYPES["fp32"])
    with pytest.raises(ConfigError, match="pipeline.micro_batches is 3, which does not divide a batch of 2"):
        case.forward(engine, batch)
    with pytest.raises(UnsupportedError, match="output_hidden_states"):
        engine(**batch, output_hidden_states=True)
    elsewhere = engine.module.model.layers[1 - ranks.rank()]
    with pytest.raises(hf_zero.errors.StateError, match="only one stage of the pipeline has it"):
        elsewhere(batch["input_ids"])


def after_destroy() -> None:
    """The model has its own forwards again, refuses what it has not, and another engine trains it."""
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2})
    model, batch = case.build(), parity.prepare(case.rows(0, 0, 0), parity.DTYPES["fp32"])
    names = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    engine = parity.initialize(model, with_stages(Run(1), 2))
    expected = float(case.forward(engine, batch))
    second = parity.initialize(model, with_stages(Run(0), 2))  # takes the model over
    engine.destroy()
    assert float(case.forward(second, batch)) == expected
    second.destroy()
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == names
    with pytest.raises(hf_zero.errors.StateError, match="without an engine, but only one stage of the pipeline has it"):
        case.forward(model, batch)
    third = parity.initialize(model, with_stages(Run(1), 2))
    assert float(case.forward(third, batch)) == expected
    third.destroy()


def refused_writes(folder: str) -> None:
    """What one stage's ranks cannot take is an error on all: the others have no such parameter, and would wait."""
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2})
    engine = parity.initialize(case.build(), with_stages(Run(1), 2))
    engine.backward(case.forward(engine, parity.prepare(case.rows(0, 0, 0), parity.DTYPES["fp32"])))
    weight = engine.module.model.layers[1].mlp.up_proj.weight
    if ranks.rank() == 1:
        weight.data = torch.zeros(3)
    says = r"layers\.1\.mlp\.up_proj\.weight has shape .* was given data of shape \(3,\)"
    with pytest.raises(hf_zero.errors.StateError, match=says):
        engine.step()
    with pytest.raises(hf_zero.errors.StateError, match=says):
        engine.save_checkpoint(folder)
    engine.destroy()


def test_a_write_that_one_stage_refuses_is_refused_by_all(tmp_path: Path) -> None:
    ranks.run_ranks(refused_writes, 2, str(tmp_path), ordered=False)  # the stages have collectives of their own


def test_a_destroyed_engine_leaves_nothing_on_the_model() -> None:
    ranks.run_ranks(after_destroy, 2, ordered=False)  # the first layer is one stage's


def test_what_does_not_fit_is_refused() -> None:
    ranks.run_ranks(refusals, 2, ordered=False)  # errors end forwards in the middle


def test_slices_of_sequences_beside_a_pipeline() -> None:
    with pytest.raises(UnsupportedError, match="sequence parallelism"):
        solve([Claim("pp", 2, "pipeline.stages"), Claim("sp", 2, "sequence_parallel_size")], 4)


def test_a_pipeline_takes_its_part_of_the_ranks() -> None:
    mesh = solve([Claim("pp", 2, "pipeline.stages"), Claim("tp", 2, "autotp_size")], 8)
    assert (mesh.pp, mesh.dp_shard, mesh.tp, mesh.replicas, mesh.sharers) == (2, 2, 2, 2, 4)
    with pytest.raises(ConfigError, match="pp 3|does not fit|to share their samples"):
        solve([Claim("pp", 3, "pipeline.stages")], 4)


def test_training_arguments_and_distributed_config_say_it() -> None:
    from hf_zero.integrations.distributed_config import NotedSizes
    from hf_zero.integrations.training_arguments import ZeroTrainingArguments

    with pytest.raises(ConfigError, match="pipeline.stages: pp 2"):  # one rank here
        ZeroTrainingArguments(output_dir="unused", report_to=[], pipeline_parallel_size=2)
    assert ZeroTrainingArguments(output_dir="unused", report_to=[], pipeline_parallel_size=1).deepspeed.get("pipeline") is None
    assert Claim("pp", 2, "DistributedConfig.pp_size") in NotedSizes({"pp_size": 2})._claims


@pytest.mark.parametrize("newer", [True, False])
def test_stages_count_among_the_ranks_of_a_sample_where_trainer_divides_by_these(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def divides(trainer: Any) -> Any:
        return trainer.get_tp_size()

    def before_5_19(trainer: Any) -> Any:
        return trainer.non_data_parallel_size

    trainer = type("Trainer", (), {"_get_num_items_in_batch": divides if newer else before_5_19})
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=trainer))  # type: ignore[misc]
    monkeypatch.setattr(pipelines, "stages_here", lambda: 2)
    monkeypatch.setattr(pipelines, "_counts_by_it", pipelines._counts_by_it.__wrapped__)
    assert pipelines.get_tp_size(lambda trainer: 3, None) == (6 if newer else 3)
