"""The causal language modelling example: its text, arithmetic and files, and whole runs of the script."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "clm"
MODULES = ("arguments", "data", "demo", "measure", "model", "results", "steps", "tracking")
RUN_SECONDS = 240
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
    """The example's modules, imported as the script imports them; their short names are forgotten afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    hidden: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


# Text


def test_standard_library_files_are_sorted_and_exclude_tests_and_packages(example: SimpleNamespace, tmp_path: Path) -> None:
    for name in ("zlib.py", "abc.py", "test/test_abc.py", "json/decoder.py", "json/tests/x.py", "site-packages/torch.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("'''doc'''")
    assert [path.relative_to(tmp_path).as_posix() for path in example.data.standard_library_files(tmp_path)] == [
        "abc.py",
        "json/decoder.py",
        "zlib.py",
    ]


def test_docstrings_come_in_file_order_without_running_the_code(example: SimpleNamespace) -> None:
    source = b"""'Module.'
class A:
    'Class.'
    def f(self):
        'Method.'
raise SystemExit
async def g():
    'Last.'
"""
    assert list(example.data.docstrings(source)) == ["Module.", "Class.", "Method.", "Last."]


@pytest.mark.parametrize("source", [b"print 'python 2'", b"\x00", b"x = 1"])
def test_docstrings_of_files_without_any_or_of_another_syntax(example: SimpleNamespace, source: bytes) -> None:
    assert list(example.data.docstrings(source)) == []


def test_text_without_any_flag_is_the_library_of_this_python(example: SimpleNamespace) -> None:
    raw = example.data.load_raw_datasets(example.arguments.parse_arguments([]))
    texts = raw["train"]["text"][:] + raw["validation"]["text"][:]
    assert sum(len(text) for text in texts) > 500_000
    assert all(text.endswith(example.data.END_OF_TEXT) for text in texts)
    assert any("JSON" in text for text in texts)
    assert 0.04 < len(raw["validation"]) / len(texts) < 0.06


def test_missing_library_sources_are_named(example: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--train_file"):
        example.data.standard_library_text(tmp_path)


@pytest.mark.parametrize(("count", "percent", "held_out"), [(1000, 5, 50), (7, 50, 3), (100, 99, 99), (10, 1, 0)])
def test_split_holds_out_the_share_and_loses_nothing(example: SimpleNamespace, count: int, percent: int, held_out: int) -> None:
    texts = [str(index) for index in range(count)]
    train, validation = example.data.split_texts(texts, percent)
    assert len(validation) == held_out
    assert sorted(train + validation, key=int) == texts
    assert train == sorted(train, key=int)


def test_blocks_join_documents_and_drop_the_rest(example: SimpleNamespace) -> None:
    examples = {"input_ids": [[1, 2, 3], [], [4, 5], [6, 7, 8]], "attention_mask": [[1, 1, 1], [], [1, 1], [1, 1, 1]]}
    blocks = example.data.group_into_blocks(examples, block_size=3)
    assert blocks["input_ids"] == [[1, 2, 3], [4, 5, 6]]
    assert blocks["labels"] == blocks["input_ids"]
    assert blocks["labels"][0] is not blocks["input_ids"][0]
    assert blocks["attention_mask"] == [[1, 1, 1], [1, 1, 1]]
    assert example.data.group_into_blocks({"input_ids": [[1, 2]]}, block_size=3) == {"input_ids": [], "labels": []}


def test_tokenizer_keeps_every_byte_and_is_the_same_each_time(example: SimpleNamespace) -> None:
    texts = ["Return the length of the list.", "Return the list of the lengths."] * 5
    tokenizer = example.data.train_tokenizer(texts, vocab_size=300)
    assert len(tokenizer) <= 300
    sample = "Return π → the\tlist  é"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    assert tokenizer(example.data.END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    assert example.data.train_tokenizer(texts, vocab_size=300).get_vocab() == tokenizer.get_vocab()


def test_tokenizer_needs_room_for_the_bytes(example: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="--vocab_size 100: .*257"):
        example.data.train_tokenizer(["text"], vocab_size=100)


def test_tokenizer_cache_is_used_for_the_same_text_only(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = example.data.cached_tokenizer(["one two two"], 260, tmp_path)
    monkeypatch.setattr(example.data, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert example.data.cached_tokenizer(["one two two"], 260, tmp_path).get_vocab() == first.get_vocab()
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        example.data.cached_tokenizer(["another text"], 260, tmp_path)


def test_text_file_becomes_blocks(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {index} of the text\n" for index in range(200)))
    args = example.arguments.parse_arguments(["--train_file", str(path), "--block_size", "16", "--max_train_samples", "20"])
    raw = example.data.load_raw_datasets(args)
    assert (len(raw["train"]), len(raw["validation"])) == (190, 10)
    tokenizer = example.data.train_tokenizer(raw["train"]["text"][:], 300)
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
    monkeypatch.setattr(example.model, "hub_is_reachable", lambda: False)

    def not_cached(*_: Any, **__: Any) -> None:
        raise OSError("not in the cache")

    monkeypatch.setattr(example.model.AutoConfig, "from_pretrained", not_cached)
    config, note = example.model.named_config(name)
    assert note.startswith(f"{name}: the hub is out of reach")
    with torch.device("meta"):
        model = example.model.AutoModelForCausalLM.from_config(config)
    assert example.measure.count_parameters(model) == parameters


def test_size_flags_and_tokenizer_shape_the_model(example: SimpleNamespace) -> None:
    tokenizer = example.data.train_tokenizer(["some text"], 300)
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
    decay, plain = example.model.parameter_groups(model, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decay["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decay["params"]) + len(plain["params"]) == len(list(model.parameters()))


# Arithmetic


@pytest.mark.parametrize(
    ("stage", "sixteen_bit", "bytes_per_parameter"),
    [
        (None, False, 12),
        (None, True, 12),
        (0, False, 12),
        (1, False, 4 + 8 / 4),
        (2, False, 4 + 8 / 4),
        (3, False, 12 / 4),
        (0, True, 14),
        (1, True, 2 + 12 / 4),
        (2, True, 2 + 12 / 4),
        (3, True, 14 / 4),
    ],
)
def test_state_bytes_by_stage(example: SimpleNamespace, stage: int | None, sixteen_bit: bool, bytes_per_parameter: float) -> None:
    found = example.measure.expected_state_bytes(1000, stage=stage, ranks=4, sixteen_bit=sixteen_bit)
    assert found == 1000 * bytes_per_parameter


def test_measured_state_counts_each_memory_block_once(example: SimpleNamespace) -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert example.measure.measured_state_bytes(model, optimizer) == 400
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    step_counter = 4
    assert example.measure.measured_state_bytes(model, optimizer) == 1200 + step_counter


@pytest.mark.parametrize(
    ("sequences", "ranks", "accumulation", "limit", "expected"),
    [
        (100, 1, 1, None, (25, 25, 2, 50)),
        (101, 2, 1, None, (13, 13, 2, 26)),
        (101, 2, 4, None, (13, 4, 2, 8)),
        (100, 2, 1, 30, (13, 13, 3, 30)),
        (1, 4, 8, 1, (1, 1, 1, 1)),
    ],
)
def test_plan_of_steps(
    example: SimpleNamespace, sequences: int, ranks: int, accumulation: int, limit: int | None, expected: tuple[int, ...]
) -> None:
    plan = example.steps.plan_steps(
        sequences, micro_batch_size=4, ranks=ranks, accumulation_steps=accumulation, num_epochs=2, max_train_steps=limit
    )
    assert (plan.micro_steps_per_epoch, plan.steps_per_epoch, plan.num_epochs, plan.max_train_steps) == expected


def test_progress_survives_its_file_and_names_a_wrong_folder(example: SimpleNamespace, tmp_path: Path) -> None:
    progress = example.steps.Progress(steps=7, epoch=1, micro_steps_in_epoch=3, perplexity_before=12.5)
    progress.save(tmp_path)
    assert example.steps.Progress.load(tmp_path) == progress
    with pytest.raises(FileNotFoundError, match="step_N or epoch_N"):
        example.steps.Progress.load(tmp_path / "elsewhere")


# Results and trackers


def test_results_survive_their_file_and_fill_one_table(example: SimpleNamespace, tmp_path: Path) -> None:
    results = example.results
    facts = results.RunFacts(3, 2, "gloo", "cpu", "fp32", 10, 4, 2, 8, 1, 1, 5, 60, 120)
    measured = results.RunResults(1.0, 0.5, 64.0, 2**20, 60, 2.0, 9.0, 7.5, 5)
    results.write_results(tmp_path / "results.json", facts, measured)
    assert results.read_results(tmp_path / "results.json") == (facts, measured)
    script = [sys.executable, str(EXAMPLE / "results.py"), str(tmp_path / "results.json"), str(tmp_path / "results.json")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.count("ZeRO stage 3, fp32, 2 ranks") == 2
    assert "9.0 -> 7.5" in printed
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no results\.json"):
        results.read_results(tmp_path / "other.json")


def test_perplexity_of_a_diverged_run_is_infinite(example: SimpleNamespace) -> None:
    assert example.results.to_perplexity(0.0) == 1.0
    assert example.results.to_perplexity(1e6) == float("inf")


@pytest.mark.parametrize(
    ("report_to", "names", "note"),
    [("csv", ["csv"], ""), ("tensorboard", ["tensorboard"], ""), ("wandb", ["wandb"], "offline"), ("all", ["csv", "all"], "offline")],
)
def test_choice_of_trackers(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report_to: str, names: list[str], note: str
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the code sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    args = example.arguments.parse_arguments(["--output_dir", str(tmp_path), "--with_tracking", "--report_to", report_to])
    trackers, said = example.tracking.make_trackers(args)
    assert [getattr(tracker, "name", tracker) for tracker in trackers] == names
    assert (note in said) and (os.environ.get("WANDB_MODE") == ("offline" if note else None))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert example.tracking.make_trackers(args)[1] == ""


# Files and the demo


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


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.json")), ids=lambda path: path.name)
def test_config_files_are_accepted_without_a_warning(path: Path) -> None:
    from hf_zero.config.resolve import resolve

    config = json.loads(path.read_text())
    for block in ("offload_optimizer", "offload_param"):  # where shards rest is none of this test's business
        config["zero_optimization"].pop(block, None)
    assert resolve(config, world_size=2, strict=True).warnings == []


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.yaml")), ids=lambda path: path.name)
def test_launcher_files_load_and_name_existing_configs(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    config_file = config.deepspeed_config.get("deepspeed_config_file")
    if config_file is not None:
        assert (REPOSITORY / config_file).is_file()
        assert config.mixed_precision is None, "accelerate refuses mixed_precision beside a deepspeed_config_file"


@pytest.mark.parametrize(
    ("gpus", "wanted", "processes", "precision"), [(0, "", "2", "no"), (1, "", "1", "bf16"), (8, "", "8", "bf16"), (0, "4", "4", "no")]
)
def test_demo_takes_all_gpus_or_two_gloo_ranks(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: str, processes: str, precision: str
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(example.demo, "count_gpus", lambda: gpus)
    monkeypatch.setattr(example.demo.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--max_train_steps", "3"])
    monkeypatch.setitem(os.environ, "RANKS", wanted)
    with pytest.raises(SystemExit) as exit_info:
        example.demo.main()
    assert exit_info.value.code == 7
    (command,) = started
    assert command[command.index("--num_processes") + 1] == processes
    assert command[command.index("--mixed_precision") + 1] == precision
    script = command.index("examples/clm/run_clm_no_trainer.py")
    assert (REPOSITORY / command[command.index("--config_file") + 1]).is_file()
    assert example.arguments.parse_arguments(command[script + 1 :]).max_train_steps == 3


def test_demo_shares_out_the_cores_unless_told(example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert example.demo.launch_environment(ranks=2, cores=8)["OMP_NUM_THREADS"] == "4"
    assert example.demo.launch_environment(ranks=8, cores=2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert example.demo.launch_environment(ranks=2, cores=8)["OMP_NUM_THREADS"] == "3"


# Whole runs


@pytest.fixture(scope="module")
def text_file(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some docstrings: parsing the whole standard library would take most of a short run."""
    root = Path(argparse.__file__).parent
    path = tmp_path_factory.mktemp("text") / "docstrings.txt"
    path.write_text("\n".join(text for name in ("json", "email", "asyncio") for text in example.data.standard_library_text(root / name)))
    return path


def launch(config: Path, text_file: Path, output_dir: Path, *flags: str) -> str:
    """Run the script on two ranks of this machine's CPU under the given launcher file.

    Args:
        config: Launcher file.
        text_file: What to train on.
        output_dir: Where the run leaves its files; the cache of the text lies beside ``text_file``.
        *flags: Further flags of the script.

    Returns:
        What it printed. Fails with all of it when the run fails or lasts longer than ``RUN_SECONDS``.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "WANDB_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NETRC": os.devnull, "HF_ZERO": "1"}
    environment["HF_DATASETS_CACHE"] = str(text_file.parent)
    if "MULTI_GPU" in config.read_text():
        environment["ACCELERATE_USE_CPU"] = "true"  # with a DeepSpeed configuration this would switch ZeRO off
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    script = [
        "--main_process_port",
        "0",
        "examples/clm/run_clm_no_trainer.py",
        "--train_file",
        str(text_file),
        "--output_dir",
        str(output_dir),
    ]
    command = [*launcher, *script, *TINY_FLAGS, *flags]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def tracked(path: Path, name: str) -> dict[int, float]:
    """Values of one metric in a ``metrics.csv``, by step."""
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["value"]) for row in csv.DictReader(file) if row["name"] == name}


@pytest.fixture(scope="module")
def zero3_run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run at stage 3 with every tracker and a checkpoint in the middle of each epoch: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("zero3")
    flags = ("--checkpointing_steps", "8", "--with_tracking", "--report_to", "all")
    return folder, launch(EXAMPLE / "accelerate_zero3.yaml", text_file, folder, *flags)


@pytest.mark.timeout(RUN_SECONDS)
def test_zero3_run_learns_saves_and_reports(zero3_run: tuple[Path, str], example: SimpleNamespace) -> None:
    folder, printed = zero3_run
    facts, results = example.results.read_results(folder / "results.json")
    assert (facts.stage, facts.ranks, facts.backend, facts.precision) == (3, 2, "gloo", "fp32")
    assert results.steps == facts.max_train_steps == 24
    assert results.perplexity < 0.6 * results.perplexity_before
    assert facts.expected_state_bytes * 2 == facts.stage0_state_bytes
    assert results.state_bytes == pytest.approx(facts.expected_state_bytes, rel=0.03)
    assert "50% of stage 0" in printed
    assert f"The model lies in {folder}" in printed
    reloaded, in_training = (float(re.search(rf"{mark} ([0-9.]+[0-9])", printed)[1]) for mark in ("from_pretrained: loss", "in training:"))
    assert reloaded == pytest.approx(in_training, abs=2e-4)


@pytest.mark.timeout(RUN_SECONDS)
def test_zero3_run_reaches_every_tracker(zero3_run: tuple[Path, str]) -> None:
    folder, printed = zero3_run
    assert sorted(tracked(folder / "metrics.csv", "train_loss")) == list(range(1, 25))
    assert all(norm > 0 for norm in tracked(folder / "metrics.csv", "grad_norm").values())
    assert sorted(tracked(folder / "metrics.csv", "perplexity")) == [12, 24]
    assert list(folder.rglob("events.out.tfevents.*"))
    assert list(folder.rglob("offline-run-*/*.wandb"))
    assert "kept offline" in printed


@pytest.mark.timeout(RUN_SECONDS)
def test_zero3_run_resumes_where_it_stopped(zero3_run: tuple[Path, str], text_file: Path, tmp_path: Path) -> None:
    folder, _ = zero3_run
    printed = launch(
        EXAMPLE / "accelerate_zero3.yaml",
        text_file,
        tmp_path,
        *("--resume_from_checkpoint", str(folder / "step_8"), "--with_tracking", "--report_to", "csv"),
    )
    assert "8 of 24 steps are done" in printed
    expected = tracked(folder / "metrics.csv", "train_loss")
    assert tracked(tmp_path / "metrics.csv", "train_loss") == {step: expected[step] for step in range(9, 25)}


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS)
@pytest.mark.parametrize("name", ["accelerate_ddp.yaml", "accelerate_zero2.yaml", "accelerate_zero2_plugin.yaml"])
def test_other_launcher_files_train_as_zero3_does(zero3_run: tuple[Path, str], text_file: Path, tmp_path: Path, name: str) -> None:
    folder, _ = zero3_run
    launch(EXAMPLE / name, text_file, tmp_path, "--with_tracking", "--report_to", "csv", "--lr_scheduler_type", "linear")
    expected = tracked(folder / "metrics.csv", "train_loss")
    found = tracked(tmp_path / "metrics.csv", "train_loss")
    assert found.keys() == expected.keys()
    # Same data; transformers draws other random weights under zero.Init, and WarmupDecayLR warms up a little later than linear.
    assert found[1] == pytest.approx(expected[1], rel=0.01)
    assert found[24] == pytest.approx(expected[24], rel=0.05)
