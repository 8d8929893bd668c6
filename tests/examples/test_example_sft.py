"""Supervised fine-tuning in the language modelling example: its samples, flags and files, and the comparison of loss curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.experiments import compare_sft
from tests.support.examples import RUN_SECONDS, TEST_SECONDS, library_part, modules, run, small_library


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the scripts import them."""
    names = ("arguments", "model", "sft_data", "offline", "flags")
    with modules("clm", *names) as found:
        with small_library(found.offline, library_part()):
            yield found


def flags_of(example: SimpleNamespace, *argv: str) -> object:
    parser = example.flags.Parser()
    example.arguments.add_data_flags(parser)
    example.arguments.add_model_flags(parser, model_type="llama")
    return parser.parse_args(argv)


def test_only_the_answer_and_its_end_count(example: SimpleNamespace) -> None:
    tokenizer = example.offline.train_tokenizer(["some text"], 300)
    sample = {"instruction": "Add.", "input": "1 2", "output": "Three."}
    prompt = example.sft_data.prompt_of(sample)
    assert prompt == "### Instruction\nAdd.\n\n### Input\n1 2\n\n### Response\n"
    encoded = example.sft_data.encode(sample, tokenizer, length=128)
    assert {len(column) for column in encoded.values()} == {128}
    counted = [token for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True) if label != -100]
    assert tokenizer.decode(counted) == "Three." + tokenizer.eos_token
    assert sum(encoded["attention_mask"]) == len(tokenizer(prompt)["input_ids"]) + len(counted)
    assert "### Input" not in example.sft_data.prompt_of({"instruction": "Add.", "input": "", "output": "x"})


def test_samples_without_room_for_an_answer_are_left_out(example: SimpleNamespace) -> None:
    args = flags_of(example, "--block_size", "120")
    raw = example.sft_data.load_instructions(args)
    tokenizer = example.offline.train_tokenizer(["some text"], 300)
    train, _ = example.sft_data.encode_splits(raw, tokenizer, args)
    assert 0 < len(train) < len(raw["train"])
    args.block_size = 8
    with pytest.raises(ValueError, match="--block_size 8 leaves no room for an answer after any prompt of the train data"):
        example.sft_data.encode_splits(raw, tokenizer, args)


def test_file_of_another_format_is_refused(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Add.", "input": "", "output": str(index)} for index in range(40)]))
    assert len(example.sft_data.load_instructions(flags_of(example, "--train_file", str(path)))["train"]) == 38
    path.write_text(json.dumps([{"text": "a"}] * 40))
    with pytest.raises(ValueError, match="has the columns text; needed are instruction, output"):
        example.sft_data.load_instructions(flags_of(example, "--train_file", str(path)))


def test_small_llama_keeps_its_heads_together(example: SimpleNamespace) -> None:
    tokenizer = example.offline.train_tokenizer(["some text"], 300)
    config = example.model.finish_config(None, tokenizer, flags_of(example, "--n_embd", "64", "--n_head", "8", "--n_layer", "2"))
    assert (config.model_type, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == ("llama", 8, 8, 256)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "6"], "--ranks 6: TP 4 needs a multiple of 4"),
        (["--max_steps", "10", "--resume_step", "10"], "--resume_step 10: must lie between 1 and --max_steps 10"),
        (["--setups", "zero4"], "zero4"),
    ],
)
def test_comparison_that_cannot_work_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_sft.parse_arguments(["--output_dir", "out", *flags])
    assert message in capsys.readouterr().err


def test_curves_are_drawn_and_their_difference_is_relative(tmp_path: Path) -> None:
    whole = {"zero1": {1: 4.0, 2: 2.0}, "zero1_tp": {1: 4.0, 2: 2.001}}
    assert compare_sft.largest_difference(whole["zero1_tp"], whole["zero1"]) == pytest.approx(0.0005)
    compare_sft.write_curves(tmp_path, whole, {"zero1_tp": {2: 2.001}})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "curves.json").read_text())["resumed"] == {"zero1_tp": {"2": 2.001}}


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_curves_of_zero_and_tensor_parallelism_coincide(tmp_path: Path) -> None:
    samples = [{"instruction": "Name the number.", "input": str(index), "output": "It is " + "x" * (index % 7)} for index in range(400)]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    flags = ["--output_dir", str(tmp_path / "curves"), "--train_file", str(tmp_path / "samples.json"), "--max_steps", "8"]
    printed = run(
        ["-m", "benchmarks.experiments.compare_sft", *flags], cache=tmp_path / "cache", seconds=2 * RUN_SECONDS
    )  # it fails where they do not
    assert "ZeRO-2 + TP 2, resumed" in printed
    assert (tmp_path / "curves" / "curves.png").stat().st_size > 10_000
