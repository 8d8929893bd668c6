"""Plans: what is found in models, saved and edited, wished for in the configuration, printed by the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hf_zero.cli import main
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.overrides import overrides_of
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan
from tests.support import zoo
from tests.support.models import CASES


def splits(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    plan = make_plan(model, ranks)
    return {row[0]: row[1] for row in plan.table()}


def test_llama() -> None:
    found = splits(zoo.build("LlamaForCausalLM"))
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    assert [found[attention + name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")] == ["column", "column", "column", "row"]
    assert [found[mlp + name] for name in ("gate_proj", "up_proj", "down_proj")] == ["column", "column", "row"]
    assert found["model.embed_tokens"] == "vocabulary" and found["lm_head"] == "column, gathered"


def test_fused_query_key_value_of_gpt2_is_cut_in_three() -> None:
    plan = make_plan(CASES["gpt2"].build(), 2)
    entry = plan.parameters["transformer.h.0.attn.c_attn.weight"]
    assert (entry.dim, entry.ranges) == (1, [[(0, 8), (16, 24), (32, 40)], [(8, 16), (24, 32), (40, 48)]])
    assert plan.attributes["transformer.h.0.attn"] == {"split_size": 8}


@pytest.mark.fast_rows("MixtralForCausalLM-model.layers.0.mlp.experts.down_proj-2")
@pytest.mark.parametrize(
    ("name", "parameter", "split"),
    [
        ("T5ForConditionalGeneration", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 1),
        ("MixtralForCausalLM", "model.layers.0.mlp.experts.down_proj", 2),
    ],
)
def test_parameters_that_are_no_linear_weights(name: str, parameter: str, split: int) -> None:
    assert make_plan(zoo.build(name), 2).parameters[parameter].dim == split


def test_gradients_of_norms_inside_split_attention_are_summed() -> None:
    plan = make_plan(zoo.build("Olmo2ForCausalLM"), 2)
    assert "model.layers.0.self_attn.q_norm.weight" in plan.summed
    assert "model.layers.0.post_attention_layernorm.weight" not in plan.summed


def test_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plan = make_plan(CASES["gpt2"].build(), 2)
    plan.save(tmp_path / "plan.json")
    loaded = TpPlan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == plan.to_dict() and not loaded.edited


def test_edited_plan_is_followed() -> None:
    model = CASES["gpt2"].build()
    data = make_plan(model, 2).to_dict()
    data["modules"]["transformer.h.0.mlp.c_fc"]["split"] = "whole"
    data["modules"]["transformer.h.1.mlp.c_fc"]["split"] = "row"
    edited = TpPlan.from_dict(data)
    assert edited.edited
    found = make_plan(model, 2, overrides=overrides_of({}, edited, model)).modules
    assert found["transformer.h.0.mlp.c_fc"].split == "whole"
    assert found["transformer.h.1.mlp.c_fc"].split == "row, scattered"
    assert found["transformer.h.1.attn.c_attn"].split == "column"
    data["modules"]["lm_head"]["split"] = "diagonal"
    with pytest.raises(ConfigError, match="lm_head.split is 'diagonal'"):
        TpPlan.from_dict(data)


def test_rules_of_the_configuration() -> None:
    model = CASES["gpt2"].build()
    specs = [{"patterns": [r"\.c_attn\."], "partition_type": "skip"}, {"patterns": [r"mlp\.c_fc\."], "partition_type": "column"}]
    section = {"partition_config": {"layer_specs": specs}}
    plan = make_plan(model, 2, overrides=overrides_of(section, None, model))
    assert plan.modules["transformer.h.0.attn.c_attn"].split == "whole"
    assert plan.modules["transformer.h.0.mlp.c_fc"].split == "column"
    section["partition_config"]["strict_mode"] = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no rule matches the linear layer transformer.h.0.attn.c_proj"):
        overrides_of(section, None, model)


def test_the_models_own_plan_is_checked_against_the_data_flow() -> None:
    """What it says and the data flow allows is its; what it gets wrong or misses is inferred, with the reason."""
    rows = {row[0]: row for row in make_plan(zoo.build("LlamaForCausalLM"), 2).table()}
    assert {rows[f"model.layers.*.{name}"][2] for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")} == {"tp_plan"}
    assert rows["lm_head"][1:3] == ("column, gathered", "tp_plan")
    rows = {row[0]: row for row in make_plan(zoo.build("Olmo2ForCausalLM"), 2).table()}
    query = rows["model.layers.*.self_attn.q_proj"]
    assert query[1:3] == ("column", "inferred") and query[3].endswith("; tp_plan says colwise_gather_output")
    model = zoo.build("LlamaForCausalLM")
    model._tp_plan = {"lm_head": "rowwise_split_input", "model.layers.*.mlp.down_proj": "colwise"}
    rows = {row[0]: row for row in make_plan(model, 2).table()}
    assert rows["lm_head"][1:3] == ("row, scattered", "tp_plan")  # as exact, so it decides
    assert rows["model.layers.*.mlp.down_proj"][1:3] == ("row", "inferred")


def test_plan_as_patterns() -> None:
    model = zoo.build("LlamaForCausalLM")
    patterns = {"model.layers.*.mlp.*_proj": "whole", "lm_head": "row", "model.layers.0.self_attn.o_proj": "colwise"}
    found = make_plan(model, 2, overrides=overrides_of({}, patterns, model)).modules
    assert {found[f"model.layers.1.mlp.{name}"].split for name in ("gate_proj", "up_proj", "down_proj")} == {"whole"}
    assert (found["lm_head"].split, found["lm_head"].source) == ("row, scattered", "patterns")
    assert found["model.layers.0.self_attn.o_proj"].split == "column, gathered"
    assert (found["model.layers.1.self_attn.o_proj"].split, found["model.layers.1.self_attn.o_proj"].source) == ("row", "tp_plan")
    with pytest.raises(ConfigError, match="'model.layers.*.nothing' matches no linear layer of the model, such as model.layers.0"):
        overrides_of({}, {"model.layers.*.nothing": "row"}, model)
    with pytest.raises(ConfigError, match="'lm_head' is 'diagonal'"):
        overrides_of({}, {"lm_head": "diagonal"}, model)


def test_wish_that_does_not_divide_names_layer_size_and_usable_ranks() -> None:
    model = CASES["gpt2"].build()
    section = {"partition_config": {"layer_specs": [{"patterns": ["c_fc"], "partition_type": "column"}]}}
    with pytest.raises(ConfigError, match=r"c_fc cannot be split by column over 3 ranks: its weight is \(16, 64\).*\[2, 4, 8, 16\]"):
        make_plan(model, 3, overrides=overrides_of(section, None, model))


def test_layers_that_do_not_divide_are_told_with_usable_numbers_of_ranks() -> None:
    plan = make_plan(zoo.build("LlamaForCausalLM"), 3)
    assert plan.notes == [
        "14 linear layers do not divide by 3 and stay whole on every rank, such as model.layers.0.self_attn.q_proj (32, 32); "
        "usable numbers of ranks are [2, 4, 8, 16, 32]"
    ]
    assert not make_plan(zoo.build("LlamaForCausalLM"), 2).notes
    model = zoo.build("GPT2LMHeadModel", changes={"vocab_size": 97})
    reason = make_plan(model, 2).modules["lm_head"].reason
    assert reason == "97 outputs do not divide by 2, and a tied weight is split over outputs only"


def test_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.small_config("LlamaForCausalLM").save_pretrained(tmp_path)
    assert main(["explain", "--model", str(tmp_path), "--tp", "2", "--save-plan", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.self_attn.o_proj" in out and "sums over a split dimension" in out
    assert TpPlan.load(tmp_path / "plan.json").ranks == 2
    with pytest.raises(SystemExit):
        main(["explain", "--tp", "2"])


def test_a_conv1d_that_is_split_by_itself_is_told_its_width() -> None:
    plan = make_plan(CASES["gpt2"].build(), 4)  # 2 heads: attention is not split by them
    assert plan.modules["transformer.h.0.attn.c_attn"].split == "column, gathered"
    assert plan.attributes["transformer.h.0.attn.c_attn"] == {"nf": 12}
