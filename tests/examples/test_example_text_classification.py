"""The text classification example: its pairs, metric, flags and files, and whole runs of the scripts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.examples import (
    EXAMPLES,
    TEST_SECONDS,
    launch,
    launch_on_ranks,
    library_part,
    losses_of,
    modules,
    results_of,
    run,
    small_library,
)

EXAMPLE = EXAMPLES / "text_classification"
# The command of the experiment that the script stands for.
MRPC_FLAGS = shlex.split("""--model_name_or_path microsoft/deberta-v2-xlarge-mnli --task_name mrpc --ignore_mismatched_sizes
    --max_length 128 --per_device_train_batch_size 40 --learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/mrpc/deepspeed_stage2/
    --with_tracking --report_to wandb""")
TINY_FLAGS = shlex.split("""--num_hidden_layers 1 --hidden_size 32 --num_attention_heads 2 --vocab_size 600 --max_length 32 --seed 3
    --max_train_samples 256 --max_eval_samples 41 --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --learning_rate 1e-2""")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the scripts import them."""
    with modules("text_classification", "arguments", "data", "f1_accuracy", "model", "offline") as found:
        with small_library(found.offline, library_part()):
            yield found


@pytest.fixture(scope="module")
def pairs(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags with a file of pairs: parsing the whole standard library would take most of a short run."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    example.data.load_raw_datasets(example.arguments.parse_arguments([]))["train"].to_csv(str(path))
    return ["--train_file", str(path)]


# Pairs


def test_offline_pairs_have_mrpcs_columns_and_are_the_same_each_time(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments([])
    first = example.data.load_raw_datasets(args)
    example.offline.standard_library.cache_clear()
    second = example.data.load_raw_datasets(args)
    assert first["train"].column_names == ["sentence1", "sentence2", "label", "idx"]
    for split in ("train", "validation"):
        assert first[split].to_dict() == second[split].to_dict()
        assert 0.45 < sum(first[split]["label"]) / len(first[split]) < 0.55
    seen = set(zip(first["train"]["sentence1"], first["train"]["sentence2"], strict=True))
    assert not seen & set(zip(first["validation"]["sentence1"], first["validation"]["sentence2"], strict=True))


def test_every_function_meets_its_own_summary_and_a_stranger(example: SimpleNamespace) -> None:
    functions = [example.offline.Function(f"def f{index}()", f"Do {index}.") for index in range(6)]
    pairs = example.data.function_pairs(functions, ["A class."])
    assert pairs["label"] == [1, 0] * 6
    assert pairs["sentence2"][:4] == ["Do 0.", "A class.", "Do 1.", "Do 5."]
    assert pairs["sentence1"][:4] == ["def f0()", "def f0()", "def f1()", "def f1()"]
    assert pairs["idx"] == list(range(12))


def test_file_without_the_needed_columns_is_refused_by_name(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "pairs.csv"
    path.write_text("sentence1,sentence2,label\n" + "a,b,0\nc,d,1\n" * 10)
    args = example.arguments.parse_arguments(["--train_file", str(path)])
    raw = example.data.load_raw_datasets(args)
    assert example.data.text_columns(raw, args) == ("sentence1", "sentence2")
    assert example.data.label_names(raw) == ["not_equivalent", "equivalent"]
    with pytest.raises(ValueError, match=r"pairs\.csv: has the columns text; needed are"):
        example.data.text_columns(raw.rename_columns({"sentence1": "text"}).remove_columns(["sentence2", "label"]).map(), args)


@pytest.mark.parametrize(
    ("predictions", "references", "f1", "accuracy"),
    [([1, 0, 1, 1], [1, 0, 0, 1], 0.8, 0.75), ([0, 0], [0, 0], 0.0, 1.0), ([1, 0], [0, 1], 0.0, 0.0)],
)
def test_metric_module_counts_as_glue_does(
    example: SimpleNamespace, predictions: list[int], references: list[int], f1: float, accuracy: float
) -> None:
    metric = example.f1_accuracy.F1Accuracy(keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references) == pytest.approx({"f1": f1, "accuracy": accuracy})


# Flags and files


def test_flags_of_the_experiment_are_understood(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments(MRPC_FLAGS)
    assert (args.task_name, args.ignore_mismatched_sizes, args.max_length, args.report_to) == ("mrpc", True, 128, "wandb")
    assert (args.per_device_train_batch_size, args.learning_rate, args.num_train_epochs) == (40, 2e-5, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task_name", "stsb"], "stsb"),
        (["--task_name", "mrpc", "--train_file", "a.csv"], "two sources of text"),
        (["--train_file", "a.txt"], "must end in .csv or .json"),
        (["--max_length", "4"], "--max_length 4: must be at least 8"),
        (["--with_tracking"], "--with_tracking needs --output_dir"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0: must be at least 1"),
        (["--pad_to_max_length", "perhaps"], "give True or False"),
    ],
)
def test_contradicting_flags_are_refused(
    example: SimpleNamespace, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.arguments.parse_arguments(flags)
    assert message in capsys.readouterr().err


def test_plugin_file_holds_the_answers_of_the_experiment() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLE / "accelerate_zero2_plugin_fp16.yaml"))
    assert (config.mixed_precision, config.deepspeed_config["zero_stage"], config.deepspeed_config["gradient_clipping"]) == ("fp16", 2, 1.0)


# Whole runs


@pytest.mark.timeout(TEST_SECONDS)
def test_zero2_run_learns_judges_and_reloads(pairs: list[str], tmp_path: Path) -> None:
    flags = ["--output_dir", str(tmp_path), "--num_train_epochs", "2"]
    printed = launch_on_ranks(
        EXAMPLE / "accelerate_zero2.yaml", EXAMPLE / "run_cls_no_trainer.py", *TINY_FLAGS, *pairs, *flags, cache=tmp_path / "cache"
    )
    results = results_of(tmp_path)
    assert "256 samples to train, 41 to evaluate; 32 steps on 2 ranks" in printed
    assert sorted(losses_of(tmp_path)) == list(range(1, 33))
    assert {"f1", "accuracy"} <= results["epochs"][-1].keys()
    assert round(results["epochs"][-1]["accuracy"] * 41, 6).is_integer()  # every sample counted once on two ranks
    assert "step 32/32  train loss" in printed
    assert re.search(r"def .*\n +(not_)?equivalent \(\d+%\): (right|wrong)", printed)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_trainer_twin_trains_under_zero3(pairs: list[str], tmp_path: Path) -> None:
    model = TINY_FLAGS[:12]
    flags = ["--max_train_samples", "128", "--max_eval_samples", "40", "--per_device_train_batch_size", "8", "--learning_rate", "1e-2"]
    flags += ["--output_dir", str(tmp_path), "--num_train_epochs", "1", "--report_to", "none", "--save_strategy", "no"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    config = ["--deepspeed", str(EXAMPLE / "zero3.json")]
    run([*launcher, str(EXAMPLE / "run_cls.py"), *config, *model, *pairs, *flags], cache=tmp_path / "cache")
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 8
    assert 0 <= json.loads((tmp_path / "all_results.json").read_text())["eval_accuracy"] <= 1
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_command_of_the_experiment_runs_offline_at_toy_size(tmp_path: Path) -> None:
    shrink = shlex.split("--offline --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 2 --vocab_size 600 --max_train_steps 2")
    shrink += ["--per_device_train_batch_size", "4", "--max_eval_samples", "8", "--output_dir", str(tmp_path)]
    config = EXAMPLE / "accelerate_zero2_plugin_fp16.yaml"
    printed = launch(config, EXAMPLE / "run_cls_no_trainer.py", *MRPC_FLAGS, *shrink, cache=tmp_path / "cache")
    assert "--offline: in place of --model_name_or_path microsoft/deberta-v2-xlarge-mnli, --task_name mrpc" in printed
    assert results_of(tmp_path)["steps"] == 2
