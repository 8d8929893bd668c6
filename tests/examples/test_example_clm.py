"""The causal language modelling example: its text, flags, model and files, and whole runs of the scripts."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.experiments.measured import count_parameters
from tests.support.examples import EXAMPLES, TEST_SECONDS, launch_on_ranks, losses_of, modules, results_of, run
from tests.support.examples import launch as launch_script

EXAMPLE = EXAMPLES / "clm"
BERT = EXAMPLE / "bert"
# The command of the experiment that the script stands for.
GPT2_XL_FLAGS = shlex.split("""--config_name gpt2-xl --tokenizer_name gpt2-xl
    --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1
    --block_size 128 --output_dir out --learning_rate 5e-4 --per_device_train_batch_size 16 --per_device_eval_batch_size 1
    --num_train_epochs 1 --with_tracking --report_to wandb""")
TINY_FLAGS = shlex.split("""--n_layer 2 --n_embd 32 --n_head 2 --vocab_size 512 --block_size 32 --max_train_samples 90 --max_eval_samples 9
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 5e-3 --weight_decay 0.1 --num_warmup_steps 2
    --num_train_epochs 2 --seed 3""")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as the scripts import them."""
    with modules("clm", "arguments", "data", "flags", "model", "offline", "run_clm_no_trainer") as found:
        yield found


# Text


@pytest.mark.slow  # parses all of it; the other examples read a part
def test_text_without_any_flag_is_the_library_of_this_python(example: SimpleNamespace) -> None:
    raw = example.data.load_raw_datasets(example.arguments.parse_arguments([]))
    texts = raw["train"]["text"][:] + raw["validation"]["text"][:]
    assert sum(len(text) for text in texts) > 500_000
    assert all(text.endswith(example.offline.END_OF_TEXT) for text in texts)
    assert any("JSON" in text for text in texts)
    assert 0.04 < len(raw["validation"]) / len(texts) < 0.06


def test_blocks_join_documents_and_drop_the_rest(example: SimpleNamespace) -> None:
    examples = {"input_ids": [[1, 2, 3], [], [4, 5], [6, 7, 8]], "attention_mask": [[1, 1, 1], [], [1, 1], [1, 1, 1]]}
    blocks = example.data.group_into_blocks(examples, block_size=3)
    assert blocks["input_ids"] == [[1, 2, 3], [4, 5, 6]]
    assert blocks["labels"] == blocks["input_ids"]
    assert blocks["labels"][0] is not blocks["input_ids"][0]
    assert blocks["attention_mask"] == [[1, 1, 1], [1, 1, 1]]
    assert example.data.group_into_blocks({"input_ids": [[1, 2]]}, block_size=3) == {"input_ids": [], "labels": []}


def test_text_file_becomes_blocks(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {index} of the text\n" for index in range(200)))
    args = example.arguments.parse_arguments(["--train_file", str(path), "--block_size", "16", "--max_train_samples", "20"])
    raw = example.data.load_raw_datasets(args)
    assert (len(raw["train"]), len(raw["validation"])) == (190, 10)
    tokenizer = example.offline.train_tokenizer(raw["train"]["text"][:], 300)
    train, validation = example.data.make_blocks(raw, tokenizer, args)
    assert len(train) == 20
    assert tokenizer.decode(train[0]["input_ids"]).startswith("line 10 of the text\n")
    assert {len(block) for block in validation["labels"]} == {16}
    args.block_size = 10_000
    with pytest.raises(ValueError, match="train text is shorter than one block of 10000"):
        example.data.make_blocks(raw, tokenizer, args)


# Flags


def test_flags_of_the_experiment_are_understood(example: SimpleNamespace) -> None:
    args = example.arguments.parse_arguments(GPT2_XL_FLAGS)
    assert (args.config_name, args.dataset_name, args.learning_rate, args.report_to) == ("gpt2-xl", "wikitext", 5e-4, "wandb")
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size, args.num_train_epochs) == (16, 1, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset_name", "a", "--train_file", "b.txt"], "two sources of text"),
        (["--train_file", "b.bin"], "must end in .txt, .csv or .json"),
        (["--validation_file", "b.txt"], "needs --train_file"),
        (["--train_file", "nowhere/b.txt"], "--train_file nowhere/b.txt: there is no such file"),
        (["--checkpointing_steps", "5"], "--checkpointing_steps needs --output_dir"),
        (["--checkpointing_steps", "often", "--output_dir", "o"], "or 'epoch'"),
        (["--validation_split_percentage", "100"], "between 1 and 99"),
        (["--logging_steps", "0"], "--logging_steps 0: must be at least 1"),
        (["--lr_scheduler_type", "lineal"], "lineal"),
    ],
)
def test_contradicting_flags_are_refused(
    example: SimpleNamespace, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.arguments.parse_arguments(flags)
    assert message in capsys.readouterr().err


# Model


@pytest.mark.parametrize(("name", "parameters"), [("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200)])
def test_gpt2_family_is_known_without_network(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, parameters: int
) -> None:
    monkeypatch.setattr(example.offline, "is_reachable", lambda: False)

    def not_cached(*_: Any, **__: Any) -> None:
        raise OSError("not in the cache")

    monkeypatch.setattr(AutoConfig, "from_pretrained", not_cached)
    config, note = example.offline.named_config(name)
    assert note.startswith(f"{name}: the hub is out of reach")
    with torch.device("meta"):
        model = example.model.AutoModelForCausalLM.from_config(config)
    assert count_parameters(model) == parameters


def test_size_flags_and_tokenizer_shape_the_model(example: SimpleNamespace) -> None:
    tokenizer = example.offline.train_tokenizer(["some text"], 300)
    args = example.arguments.parse_arguments(["--n_layer", "1", "--n_embd", "8", "--n_head", "2", "--block_size", "64"])
    config = example.model.finish_config(None, tokenizer, args)
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (1, 8, 2, 64)
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    args.block_size = 65
    with pytest.raises(ValueError, match="--block_size 65: the model has 64 positions"):
        example.model.finish_config(config, tokenizer, args)


def test_parameter_groups_tell_norms_by_name(example: SimpleNamespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=4))
    args = example.arguments.parse_arguments(["--weight_decay", "0.1"])
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None), num_processes=2)
    optimizer, _ = example.run_clm_no_trainer.build_optimizer(args, accelerator, model, steps=10)
    decay, plain = optimizer.param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decay["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decay["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", [script.name for script in sorted(EXAMPLES.glob("*/run_*_no_trainer.py"))])
def test_a_script_is_one_readable_file(name: str) -> None:
    (script,) = EXAMPLES.glob(f"*/{name}")
    source = script.read_text()
    assert len(source.splitlines()) <= 250
    for line in ("for batch in batches:", "accelerator.backward(loss)", "optimizer.step()", "save_pretrained(", "def evaluate("):
        assert line in source, f"{line} is not in the script itself"
    assert "sys.path" not in source


def test_latest_checkpoint_is_the_whole_one_furthest_on(example: SimpleNamespace, tmp_path: Path) -> None:
    loaded: list[str] = []
    accelerator = SimpleNamespace(load_state=loaded.append)
    flags = ["--output_dir", str(tmp_path), "--resume_from_checkpoint"]
    latest = example.arguments.parse_arguments([*flags, "latest"])
    load = example.run_clm_no_trainer.load_checkpoint
    assert load(example.arguments.parse_arguments([]), accelerator) == load(latest, accelerator) == 0
    for name, steps in (("step_8", 8), ("epoch_1", 12), ("step_9", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text(json.dumps({"steps": steps}))
    (tmp_path / "step_16").mkdir()  # the run died before it wrote the position
    assert load(latest, accelerator) == 12
    assert load(example.arguments.parse_arguments([*flags, str(tmp_path / "step_8")]), accelerator) == 8
    assert loaded == [str(tmp_path / "epoch_1"), str(tmp_path / "step_8")]
    with pytest.raises(example.flags.FlagError, match="step_16: give a step_N or epoch_N folder"):
        load(example.arguments.parse_arguments([*flags, str(tmp_path / "step_16")]), accelerator)


# Files


def test_offload_config_holds_the_values_of_the_experiment() -> None:
    config = json.loads((EXAMPLE / "zero3_offload_config_accelerate.json").read_text())
    assert config["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    assert config["zero_optimization"]["offload_param"] == config["zero_optimization"]["offload_optimizer"]
    assert config["zero_optimization"]["sub_group_size"] == 1e9
    assert (config["optimizer"]["type"], config["scheduler"]["type"]) == ("AdamW", "WarmupDecayLR")
    assert (config["steps_per_print"], config["gradient_accumulation_steps"]) == (2000, 1)


# Whole runs


@pytest.fixture(scope="module")
def text_file(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some docstrings: parsing the whole standard library would take most of a short run."""
    root = Path(argparse.__file__).parent
    path = tmp_path_factory.mktemp("text") / "docstrings.txt"
    end = example.offline.END_OF_TEXT
    folders = (root / name for name in ("json", "email", "asyncio"))
    path.write_text("\n".join(text for folder in folders for text in example.offline.standard_library_text(folder, end)))
    return path


def launch(config: Path, text_file: Path, output_dir: Path, *flags: str, start: Callable[..., str] = launch_on_ranks) -> str:
    """Run the script on two ranks of this machine's CPU under the given launcher file; what it printed."""
    words = ["--train_file", str(text_file), "--output_dir", str(output_dir), *TINY_FLAGS, *flags]
    return start(config, EXAMPLE / "run_clm_no_trainer.py", *words, cache=text_file.parent)


@pytest.fixture(scope="module")
def zero3_run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run at stage 3 with every tracker and a checkpoint in the middle of each epoch: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("zero3")
    flags = ("--checkpointing_steps", "8", "--with_tracking", "--report_to", "all")
    return folder, launch(EXAMPLE / "accelerate_zero3.yaml", text_file, folder, *flags)


@pytest.mark.timeout(TEST_SECONDS)
def test_zero3_run_learns_saves_and_reports(zero3_run: tuple[Path, str]) -> None:
    folder, printed = zero3_run
    results = results_of(folder)
    assert results["steps"] == results["epochs"][-1]["steps"] * 2 == 24
    assert results["epochs"][-1]["perplexity"] < 0.6 * results["before"]["perplexity"]
    assert f"The model lies in {folder}" in printed
    reloaded, in_training = (float(re.search(rf"{mark} ([0-9.]+[0-9])", printed)[1]) for mark in ("from_pretrained: loss", "in training:"))
    assert reloaded == pytest.approx(in_training, abs=2e-4)


@pytest.mark.timeout(TEST_SECONDS)
def test_zero3_run_reaches_every_tracker(zero3_run: tuple[Path, str]) -> None:
    folder, printed = zero3_run
    assert sorted(losses_of(folder)) == list(range(1, 25))
    assert all(entry["grad_norm"] > 0 for entry in results_of(folder)["log"])
    assert list(folder.rglob("events.out.tfevents.*"))
    assert list(folder.rglob("offline-run-*/*.wandb"))
    assert "kept offline" in printed


@pytest.mark.timeout(TEST_SECONDS)
def test_killed_zero3_run_resumes_from_its_latest_whole_checkpoint(zero3_run: tuple[Path, str], text_file: Path, tmp_path: Path) -> None:
    folder, _ = zero3_run
    shutil.copytree(folder / "step_8", tmp_path / "step_8")
    shutil.copytree(folder / "step_16", tmp_path / "step_16", ignore=shutil.ignore_patterns("progress.json"))  # died while writing it
    flags = ("--resume_from_checkpoint", "latest")
    printed = launch(EXAMPLE / "accelerate_zero3.yaml", text_file, tmp_path, *flags)
    assert f"Resumed from {tmp_path / 'step_8'}: 8 steps are done" in printed
    expected = losses_of(folder)
    assert losses_of(tmp_path) == {step: expected[step] for step in range(9, 25)}


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("name", ["accelerate_ddp.yaml", "accelerate_zero2.yaml", "accelerate_zero2_plugin.yaml"])
def test_other_launcher_files_train_as_zero3_does(zero3_run: tuple[Path, str], text_file: Path, tmp_path: Path, name: str) -> None:
    folder, _ = zero3_run
    flags = ("--lr_scheduler_type", "linear")
    launch(EXAMPLE / name, text_file, tmp_path, *flags, start=launch_script)
    expected = losses_of(folder)
    found = losses_of(tmp_path)
    assert found.keys() == expected.keys()
    # Same data; transformers draws other random weights under zero.Init, and WarmupDecayLR warms up a little later than linear.
    assert found[1] == pytest.approx(expected[1], rel=0.01)
    assert found[24] == pytest.approx(expected[24], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_trainer_twin_trains_and_resumes_under_zero3(text_file: Path, tmp_path: Path) -> None:
    model = TINY_FLAGS[: TINY_FLAGS.index("--per_device_train_batch_size")]
    flags = ["--train_file", str(text_file), "--output_dir", str(tmp_path), *model, "--report_to", "none", "--save_steps", "8"]
    flags += ["--max_steps", "24", "--per_device_train_batch_size", "4", "--learning_rate", "5e-3", "--logging_steps", "1"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(EXAMPLE / "run_clm.py")]
    config = ["--deepspeed", str(EXAMPLE / "zero3.json")]
    run([*command, *config, *flags], cache=text_file.parent)
    assert json.loads((tmp_path / "all_results.json").read_text())["eval_perplexity"] < 400
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 24
    whole = (tmp_path / "model.safetensors").read_bytes()
    for name in ("checkpoint-16", "checkpoint-24"):
        shutil.rmtree(tmp_path / name)
    run([*command, *config, *flags, "--resume_from_checkpoint", "latest"], cache=text_file.parent)
    assert (tmp_path / "model.safetensors").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_command_of_the_experiment_runs_offline_at_toy_size(tmp_path: Path) -> None:
    shrink = shlex.split("--offline --n_layer 2 --n_embd 32 --n_head 2 --vocab_size 512 --block_size 32 --per_device_train_batch_size 4")
    shrink += ["--max_train_samples", "40", "--max_eval_samples", "4", "--output_dir", str(tmp_path)]
    config = EXAMPLE / "accelerate_zero3_offload.yaml"
    printed = launch_script(config, EXAMPLE / "run_clm_no_trainer.py", *GPT2_XL_FLAGS, *shrink, cache=tmp_path / "cache")
    assert "--offline: in place of --tokenizer_name gpt2-xl, --dataset_name wikitext" in printed
    assert results_of(tmp_path)["steps"] == 5


# BERT


def test_bert_configurations_hold_the_values_of_the_experiments() -> None:
    configs = {path.stem: json.loads(path.read_text()) for path in BERT.glob("*.json")}
    large, base, longer = (configs[f"onebit_{name}"] for name in ("large_seq128", "base_seq128", "seq512"))
    assert (large["train_batch_size"], large["train_micro_batch_size_per_gpu"], large["steps_per_print"]) == (4096, 16, 100)
    assert large["optimizer"] == {
        "type": "OneBitAdam",
        "params": {
            "lr": 2e-4,
            "max_grad_norm": 1.0,
            "weight_decay": 0.01,
            "bias_correction": False,
            "freeze_step": 23000,
            "cuda_aware": True,
        },
    }
    assert large["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    assert [config["optimizer"]["params"]["freeze_step"] for config in (base, longer)] == [16000, 1500]
    squad = configs["onebit_squad_bsz96"]
    assert (squad["train_batch_size"], squad["train_micro_batch_size_per_gpu"]) == (96, 3)
    assert squad["optimizer"]["params"] == {"lr": 3e-5, "weight_decay": 0.0, "freeze_step": 400, "cuda_aware": True}


@pytest.mark.parametrize("path", sorted(BERT.glob("*.json")), ids=lambda path: path.name)
def test_bert_configurations_load_on_the_ranks_of_their_experiment(path: Path) -> None:
    from hf_zero.config.resolve import resolve

    config = json.loads(path.read_text())
    ranks = {"onebit_squad_bsz96.json": 32, "onebit_first.json": 64}.get(path.name, 2)
    resolved = resolve(config, world_size=ranks, strict=True)
    assert resolved.config.optimizer.type == config["optimizer"]["type"]
    assert resolved.config.train_batch_size == config["train_batch_size"]


def test_json_of_a_deepspeed_script_is_completed_for_accelerate(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = example.arguments.read_deepspeed_config
    flags = ["--deepspeed_config", str(BERT / "onebit_base_seq128.json"), "--freeze_step", "7"]
    args = example.arguments.parse_mlm_arguments(flags)
    config = read(args, ranks=8)
    assert (config["gradient_accumulation_steps"], args.per_device_train_batch_size) == (4096 // (16 * 8), 16)
    assert (config["zero_optimization"], config["optimizer"]["params"]["freeze_step"]) == ({"stage": 0}, 7)
    with pytest.raises(ValueError, match="train_batch_size 4096 is not a multiple of 16 per rank x 3 ranks"):
        read(args, ranks=3)
    args.deepspeed_config = str(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"none\.json"):
        read(args, ranks=2)


def test_masks_are_the_same_each_time_and_hide_what_is_to_be_found(example: SimpleNamespace) -> None:
    from datasets import Dataset

    tokenizer = example.offline.train_tokenizer(["text"], 300, example.offline.ENCODER_TOKENS)
    tokens = [[100 + index % 50 for index in range(64)]] * 20
    blocks = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * 64] * 20, "labels": tokens})
    first, second = (example.data.mask_blocks(blocks, tokenizer, 0.15, seed=3)[:] for _ in range(2))
    assert first == second
    hidden = [label != -100 for labels in first["labels"] for label in labels]
    assert 0.1 < sum(hidden) / len(hidden) < 0.2
    assert all(
        label in (-100, token)
        for labels, line in zip(first["labels"], tokens, strict=True)
        for label, token in zip(labels, line, strict=True)
    )
    assert sum(token == tokenizer.mask_token_id for line in first["input_ids"] for token in line) > 0.6 * sum(hidden)


BERT_FLAGS = shlex.split("""--n_layer 2 --n_embd 32 --n_head 2 --vocab_size 512 --block_size 32 --max_train_samples 640
    --max_eval_samples 40 --per_device_eval_batch_size 8 --seed 3""")


def launch_bert(config: str, text_file: Path, output_dir: Path, *flags: str) -> str:
    """Train the small BERT on two ranks under torchrun with one of the JSON files; what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(EXAMPLE / "run_mlm_no_trainer.py")]
    words = ["--deepspeed_config", str(BERT / config), "--train_file", str(text_file), "--output_dir", str(output_dir), *BERT_FLAGS, *flags]
    return run([*launcher, *words], cache=text_file.parent)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_small_bert_trains_with_onebit_adam_across_the_freeze(text_file: Path, tmp_path: Path) -> None:
    printed = launch_bert("onebit_toy.json", text_file, tmp_path, "--num_train_epochs", "3", "--freeze_step", "20", "--skip_initial_eval")
    losses = losses_of(tmp_path)
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert len(losses) > 30
    assert losses[len(losses)] < losses[20] < losses[1]
    assert "Reloaded with from_pretrained it fills 'Return the [MASK] of the list.'" in printed


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_small_bert_trains_with_the_file_of_the_experiment(text_file: Path, tmp_path: Path) -> None:
    launch_bert("onebit_base_seq128.json", text_file, tmp_path, "--max_train_steps", "2", "--skip_initial_eval")
    assert (results_of(tmp_path)["steps"], results_of(tmp_path)["accumulation"]) == (2, 4096 // (16 * 2))
