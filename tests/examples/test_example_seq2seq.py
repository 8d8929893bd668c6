"""The sequence-to-sequence example: its samples, metric, flags and files, the chat, and whole runs of the scripts."""

from __future__ import annotations

import csv
import io
import json
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

EXAMPLE = EXAMPLES / "seq2seq"
# The command of the experiment that the script stands for.
MUDOCONV_FLAGS = shlex.split("""--dataset_name smangrul/MuDoConv --max_source_length 128 --source_prefix "chatbot: " --max_target_length 64
    --val_max_target_length 64 --val_min_target_length 20 --n_val_batch_generations 5 --n_train 10000 --n_val 1000 --pad_to_max_length
    --num_beams 10 --model_name_or_path facebook/blenderbot-400M-distill --per_device_train_batch_size 200
    --per_device_eval_batch_size 100 --learning_rate 1e-6 --weight_decay 0.0 --num_train_epochs 1 --gradient_accumulation_steps 1
    --num_warmup_steps 100 --output_dir /tmp/deepspeed_zero_stage2_accelerate_test --seed 25 --logging_steps 100 --with_tracking
    --report_to wandb --report_name blenderbot_400M_finetuning""")
MODEL_FLAGS = shlex.split("--d_model 32 --encoder_layers 1 --decoder_layers 1 --num_attention_heads 2 --vocab_size 600")
DATA_FLAGS = shlex.split("""--source_prefix "chatbot: " --max_source_length 32 --max_target_length 16 --val_min_target_length 4
    --n_train 128 --n_val 11 --num_beams 2""")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the scripts import them."""
    names = ("arguments", "bleu", "chat", "data", "model", "offline")
    with modules("seq2seq", *names) as found:
        with small_library(found.offline, library_part()):
            yield found


@pytest.fixture(scope="module")
def samples(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags with a file of samples: parsing the whole standard library would take most of a short run."""
    path = tmp_path_factory.mktemp("samples") / "samples.csv"
    example.data.load_raw_datasets(example.arguments.parse_arguments([]))["train"].to_csv(str(path))
    return ["--train_file", str(path)]


# Samples


def test_offline_samples_are_the_same_each_time_and_cut_as_asked(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments(["--n_train", "50", "--n_val", "20"])
    first = example.data.load_raw_datasets(args)
    example.offline.standard_library.cache_clear()
    second = example.data.load_raw_datasets(args)
    assert (len(first["train"]), len(first["validation"])) == (50, 20)
    assert first["train"].to_dict() == second["train"].to_dict()
    assert first["train"]["source"][0].startswith("def ")
    pairs = [set(zip(split["source"], split["target"], strict=True)) for split in first.values()]
    assert not pairs[0] & pairs[1]


@pytest.mark.parametrize(("padded", "ignored"), [(False, False), (True, True), (True, False)])
def test_padding_is_kept_out_of_the_loss_unless_told(example: SimpleNamespace, padded: bool, ignored: bool) -> None:
    flags = ["--max_source_length", "12", "--max_target_length", "10", "--n_train", "4", "--n_val", "2", "--source_prefix", "chatbot: "]
    flags += ["--pad_to_max_length", str(padded), "--ignore_pad_token_for_loss", str(ignored)]
    args = example.arguments.parse_arguments(flags)
    raw = example.data.load_raw_datasets(args)
    tokenizer = example.offline.train_tokenizer(["chatbot: def"], 300, example.offline.SEQ2SEQ_TOKENS)
    raw["train"] = raw["train"].map(lambda _: {"source": "ab", "target": "cd"})
    train, _ = example.data.tokenize_samples(raw, tokenizer, args)
    assert tokenizer.decode(train[0]["input_ids"], skip_special_tokens=True) == "chatbot: ab"
    filler = [-100 if ignored else tokenizer.pad_token_id] * 7
    assert train[0]["labels"] == [*tokenizer("cd")["input_ids"], *(filler if padded else [])]


def test_columns_are_the_first_two_or_those_named(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments([])
    raw = example.data.load_raw_datasets(args)
    assert example.data.text_columns(raw, args) == ("source", "target")
    args = example.arguments.parse_arguments(["--text_column", "target", "--summary_column", "source"])
    assert example.data.text_columns(raw, args) == ("target", "source")
    args.text_column = "question"
    with pytest.raises(ValueError, match="--text_column question: the data has the columns source, target"):
        example.data.text_columns(raw, args)


def test_metric_module_is_corpus_bleu(example: SimpleNamespace) -> None:
    metric = example.bleu.Bleu(keep_in_memory=True)
    metric.add_batch(predictions=["the cat sat on the mat"], references=["the cat sat on the mat"])
    assert metric.compute()["bleu"] == pytest.approx(100)
    half = metric.compute(predictions=["the cat sat on a hat"], references=["the cat sat on the mat"])["bleu"]
    assert half == pytest.approx(100 * (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


# Flags and files


def test_flags_of_the_experiment_are_understood(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments(MUDOCONV_FLAGS)
    assert (args.dataset_name, args.source_prefix, args.pad_to_max_length, args.num_beams) == ("smangrul/MuDoConv", "chatbot: ", True, 10)
    assert (args.val_min_target_length, args.n_val_batch_generations, args.n_train, args.n_val) == (20, 5, 10000, 1000)
    assert (args.report_name, args.learning_rate, args.logging_steps) == ("blenderbot_400M_finetuning", 1e-6, 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--val_min_target_length", "70"], "--val_min_target_length 70 is above --val_max_target_length 64"),
        (["--num_beams", "0"], "--num_beams 0: must be at least 1"),
        (["--n_train", "0"], "--n_train 0: must be at least 1"),
        (["--train_file", "a.txt"], "must end in .csv or .json"),
    ],
)
def test_contradicting_flags_are_refused(
    example: SimpleNamespace, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.arguments.parse_arguments(flags)
    assert message in capsys.readouterr().err


def test_model_without_room_for_the_text_is_refused(example: SimpleNamespace) -> None:
    tokenizer = example.offline.train_tokenizer(["text"], 300, example.offline.SEQ2SEQ_TOKENS)
    args = example.arguments.parse_arguments(["--config_name", str(EXAMPLE), "--max_source_length", "200"])
    args.config_name = None
    config, _ = example.model.build_config(args, tokenizer)
    assert (config.max_position_embeddings, config.decoder_start_token_id) == (200, tokenizer.bos_token_id)
    args.config_name = "facebook/blenderbot-400M-distill"
    with pytest.raises(ValueError, match="at most 128, the model's positions"):
        example.model.build_config(args, tokenizer)


def test_zero2_config_holds_the_values_of_the_experiment() -> None:
    config = json.loads((EXAMPLE / "zero2_config_accelerate.json").read_text())
    assert (config["fp16"]["enabled"], config["fp16"]["initial_scale_power"]) == ("true", 15)
    assert config["optimizer"]["params"] == {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}
    assert (config["zero_optimization"]["stage"], config["zero_optimization"]["allgather_bucket_size"]) == (2, 2e8)


# Whole runs


@pytest.mark.slow  # fast: test_example_clm.py, test_trainer_generation.py
@pytest.mark.timeout(TEST_SECONDS)
def test_zero3_run_generates_on_both_ranks_and_then_talks(
    example: SimpleNamespace, samples: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = shlex.split("--per_device_train_batch_size 4 --per_device_eval_batch_size 3 --learning_rate 5e-3 --logging_steps 8")
    flags += ["--output_dir", str(tmp_path), "--skip_initial_eval"]
    script = EXAMPLE / "run_seq2seq_no_trainer.py"
    printed = launch_on_ranks(
        EXAMPLE / "accelerate_zero3.yaml", script, *MODEL_FLAGS, *DATA_FLAGS, *samples, *flags, cache=tmp_path / "cache"
    )
    results, losses = results_of(tmp_path), losses_of(tmp_path)
    assert results["steps"] == results["epochs"][-1]["steps"] == 16
    assert losses[16] < losses[8]
    assert 0 <= results["epochs"][-1]["bleu"] <= 100
    with (tmp_path / "generations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"].startswith("chatbot: def ") for row in rows] == [True] * 11  # every sample once, though 2 ranks x 3 pads to 12
    assert printed.count("  generated  ") == 5

    monkeypatch.setattr("sys.stdin", io.StringIO("def read(self)\ndef close(self)\n\nnever said\n"))
    monkeypatch.setattr("sys.argv", ["chat.py", str(tmp_path)])
    example.chat.main()
    answers = capsys.readouterr().out.splitlines()
    assert [answer.startswith("bot: ") for answer in answers] == [True, True]


def test_chat_names_a_folder_without_a_model(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["chat.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"{tmp_path} holds no sequence-to-sequence model"):
        example.chat.main()


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("config", [["--deepspeed", str(EXAMPLE / "zero3.json")], ["--deepspeed", str(EXAMPLE / "zero2.json")]])
def test_trainer_twin_trains_and_generates(samples: list[str], tmp_path: Path, config: list[str]) -> None:
    flags = ["--output_dir", str(tmp_path), "--report_to", "none", "--save_strategy", "no", "--num_train_epochs", "1"]
    flags += ["--per_device_train_batch_size", "4", "--learning_rate", "5e-3"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run([*launcher, str(EXAMPLE / "run_seq2seq.py"), *config, *MODEL_FLAGS, *DATA_FLAGS, *samples, *flags], cache=tmp_path / "cache")
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 16
    assert {"eval_bleu", "eval_loss", "train_runtime"} <= json.loads((tmp_path / "all_results.json").read_text()).keys()
    assert json.loads((tmp_path / "chat.json").read_text())["source_prefix"] == "chatbot: "


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_command_of_the_experiment_runs_offline_at_toy_size(tmp_path: Path) -> None:
    shrink = ["--offline", *MODEL_FLAGS, "--n_train", "24", "--n_val", "8", "--per_device_train_batch_size", "4"]
    shrink += ["--per_device_eval_batch_size", "4", "--logging_steps", "1", "--output_dir", str(tmp_path)]
    config = EXAMPLE / "accelerate_zero2_fp16.yaml"
    printed = launch(config, EXAMPLE / "run_seq2seq_no_trainer.py", *MUDOCONV_FLAGS, *shrink, cache=tmp_path / "cache")
    assert "--offline: in place of --model_name_or_path facebook/blenderbot-400M-distill, --dataset_name smangrul/MuDoConv" in printed
    assert results_of(tmp_path)["steps"] == 3
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
