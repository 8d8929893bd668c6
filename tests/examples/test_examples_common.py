"""What the examples share: offline text, tokenizers, arithmetic, results, trackers, the comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.examples import EXAMPLES, REPOSITORY, library_part, modules

MODULES = ("docstrings", "tokenizer", "hub", "measure", "steps", "results", "tracking", "chart", "compare", "optimizer", "arguments")


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.fixture(scope="module")
def common() -> Iterator[SimpleNamespace]:
    """The shared modules, imported as the scripts import them."""
    with modules("clm", *(f"common.{name}" for name in MODULES), "arguments") as found:
        yield SimpleNamespace(flags=found.arguments, **{name: getattr(found, f"common_{name}") for name in MODULES})


# Files


@pytest.mark.parametrize("path", sorted([*EXAMPLES.glob("*/*.json"), *EXAMPLES.glob("*/sft/*.json")]), ids=name_of)
def test_config_files_are_accepted_without_a_warning(path: Path) -> None:
    from hf_zero.config.resolve import resolve

    ranks = 4 if path.parent.name == "sft" else 2
    assert resolve(json.loads(path.read_text()), world_size=ranks, strict=True).warnings == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=name_of)
def test_launcher_files_load_and_name_existing_configs(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    config_file = config.deepspeed_config.get("deepspeed_config_file")
    if config_file is not None:
        assert (REPOSITORY / config_file).is_file()
        assert config.mixed_precision is None, "accelerate refuses mixed_precision beside a deepspeed_config_file"


# Text


def test_standard_library_files_are_sorted_and_exclude_tests_and_packages(common: SimpleNamespace, tmp_path: Path) -> None:
    for name in ("zlib.py", "abc.py", "test/test_abc.py", "json/decoder.py", "json/tests/x.py", "site-packages/torch.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("'''doc'''")
    assert [path.relative_to(tmp_path).as_posix() for path in common.docstrings.standard_library_files(tmp_path)] == [
        "abc.py",
        "json/decoder.py",
        "zlib.py",
    ]


def test_docstrings_come_in_file_order_without_running_the_code(common: SimpleNamespace) -> None:
    source = b"""'Module.'
class A:
    'Class.'
    def f(self):
        'Method.'
raise SystemExit
async def g():
    'Last.'
"""
    assert common.docstrings.parse(source).texts == ["Module.", "Class.", "Method.", "Last."]


@pytest.mark.parametrize("source", [b"print 'python 2'", b"\x00", b"x = 1"])
def test_docstrings_of_files_without_any_or_of_another_syntax(common: SimpleNamespace, source: bytes) -> None:
    assert common.docstrings.parse(source).texts == []


def test_missing_library_sources_are_named(common: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--train_file"):
        common.docstrings.standard_library_text(tmp_path)


@pytest.mark.parametrize(("count", "percent", "held_out"), [(1000, 5, 50), (7, 50, 3), (100, 99, 99), (10, 1, 0)])
def test_split_holds_out_the_share_and_loses_nothing(common: SimpleNamespace, count: int, percent: int, held_out: int) -> None:
    texts = [str(index) for index in range(count)]
    train, validation = common.docstrings.split_items(texts, percent)
    assert len(validation) == held_out
    assert sorted(train + validation, key=int) == texts
    assert train == sorted(train, key=int)


def test_tokenizer_keeps_every_byte_and_is_the_same_each_time(common: SimpleNamespace) -> None:
    texts = ["Return the length of the list.", "Return the list of the lengths."] * 5
    tokenizer = common.tokenizer.train_tokenizer(texts, vocab_size=300)
    assert len(tokenizer) <= 300
    sample = "Return π → the\tlist  é"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    assert tokenizer(common.tokenizer.END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    assert common.tokenizer.train_tokenizer(texts, vocab_size=300).get_vocab() == tokenizer.get_vocab()


def test_tokenizer_needs_room_for_the_bytes(common: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="--vocab_size 100: .*257"):
        common.tokenizer.train_tokenizer(["text"], vocab_size=100)


def test_tokenizer_cache_is_used_for_the_same_text_only(common: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = common.tokenizer.cached_tokenizer(["one two two"], 260, tmp_path)
    monkeypatch.setattr(common.tokenizer, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert common.tokenizer.cached_tokenizer(["one two two"], 260, tmp_path).get_vocab() == first.get_vocab()
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        common.tokenizer.cached_tokenizer(["another text"], 260, tmp_path)


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
def test_state_bytes_by_stage(common: SimpleNamespace, stage: int | None, sixteen_bit: bool, bytes_per_parameter: float) -> None:
    found = common.measure.expected_state_bytes(1000, stage=stage, ranks=4, sixteen_bit=sixteen_bit)
    assert found == 1000 * bytes_per_parameter


def test_measured_state_counts_each_memory_block_once(common: SimpleNamespace) -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert common.measure.measured_state_bytes(model, optimizer) == 400
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    step_counter = 4
    assert common.measure.measured_state_bytes(model, optimizer) == 1200 + step_counter


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
    common: SimpleNamespace, sequences: int, ranks: int, accumulation: int, limit: int | None, expected: tuple[int, ...]
) -> None:
    plan = common.steps.plan_steps(
        sequences, micro_batch_size=4, ranks=ranks, accumulation_steps=accumulation, num_epochs=2, max_train_steps=limit
    )
    assert (plan.micro_steps_per_epoch, plan.steps_per_epoch, plan.num_epochs, plan.max_train_steps) == expected


def test_progress_survives_its_file_and_names_a_wrong_folder(common: SimpleNamespace, tmp_path: Path) -> None:
    progress = common.steps.Progress(steps=7, epoch=1, micro_steps_in_epoch=3, metrics_before={"perplexity": 12.5})
    progress.save(tmp_path)
    assert common.steps.Progress.load(tmp_path) == progress
    with pytest.raises(ValueError, match="step_N or epoch_N"):
        common.steps.Progress.load(tmp_path / "elsewhere")


# Results and trackers


def test_results_survive_their_file_and_fill_one_table(common: SimpleNamespace, tmp_path: Path) -> None:
    results = common.results
    facts = results.RunFacts("task", 3, 2, "gloo", "cpu", "fp32", 10, 4, 2, "lines", 8, 8, 1, 5, 60, 120)
    measured = results.RunResults(1.0, 0.5, 64.0, 2**20, 60, 2.0, {"bleu": 9.0}, {"bleu": 7.5, "loss": 1.0}, 5)
    results.write_results(tmp_path / "results.json", facts, measured)
    assert results.read_results(tmp_path / "results.json") == (facts, measured)
    script = [sys.executable, str(EXAMPLES / "common" / "results.py"), str(tmp_path / "results.json"), str(tmp_path / "results.json")]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.count("ZeRO stage 3, fp32, 2 ranks") == 2
    assert "9.000 -> 7.500" in printed
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no results\.json"):
        results.read_results(tmp_path / "other.json")


def test_perplexity_of_a_diverged_run_is_infinite(common: SimpleNamespace) -> None:
    assert common.results.to_perplexity(0.0) == 1.0
    assert common.results.to_perplexity(1e6) == float("inf")


@pytest.mark.parametrize(
    ("report_to", "names", "note"),
    [("csv", ["csv"], ""), ("tensorboard", ["tensorboard"], ""), ("wandb", ["wandb"], "offline"), ("all", ["csv", "all"], "offline")],
)
def test_choice_of_trackers(
    common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report_to: str, names: list[str], note: str
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the code sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    args = common.flags.parse_arguments(["--output_dir", str(tmp_path), "--with_tracking", "--report_to", report_to])
    trackers, said = common.tracking.make_trackers(args)
    assert [getattr(tracker, "name", tracker) for tracker in trackers] == names
    assert (note in said) and (os.environ.get("WANDB_MODE") == ("offline" if note else None))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert common.tracking.make_trackers(args)[1] == ""


def test_latest_checkpoint_is_the_whole_one_furthest_on(common: SimpleNamespace, tmp_path: Path) -> None:
    assert common.steps.latest_checkpoint(tmp_path / "nowhere") is None
    for name, steps in (("step_8", 8), ("epoch_1", 12), ("step_9", 9)):
        (tmp_path / name).mkdir()
        common.steps.Progress(steps=steps).save(tmp_path / name)
    (tmp_path / "step_16").mkdir()  # the run died before it wrote the position
    assert common.steps.latest_checkpoint(tmp_path) == tmp_path / "epoch_1"


# Functions and their summaries


def test_functions_have_a_signature_on_one_line_and_one_sentence(common: SimpleNamespace) -> None:
    source = b'''
class A:
    "A class is no function."
    def __eq__(self, other):
        "Special methods are left out."
    async def read(self, size: int = -1, *rest) -> bytes:
        """Read at most
        size bytes. Then stop.

        More.
        """
    def unsaid(self): ...
    def word(self):
        "Word"
'''
    documentation = common.docstrings.parse(source)
    (found,) = documentation.functions
    assert (found.signature, found.summary) == ("def read(self, size: int=-1, *rest)", "Read at most size bytes.")
    assert documentation.descriptions == ["A class is no function."]


def test_offline_functions_are_the_same_each_time_and_none_twice(common: SimpleNamespace) -> None:
    first = common.docstrings.standard_library_functions(library_part())
    common.docstrings.standard_library.cache_clear()
    assert common.docstrings.standard_library_functions(library_part()) == first
    assert len(first) == len(set(first)) > 200


# Tokenizers with special tokens


def test_encoder_tokenizer_frames_a_pair_and_masks(common: SimpleNamespace) -> None:
    tokenizer = common.tokenizer.train_tokenizer(["a b c"], 300, common.tokenizer.ENCODER_TOKENS)
    encoded = tokenizer("a", "b")
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert [encoded["input_ids"][index] for index in (0, 2, 4)] == [special[0], special[1], special[1]]
    assert (tokenizer.pad_token_id, tokenizer.convert_ids_to_tokens(tokenizer.mask_token_id)) == (0, "[MASK]")


def test_seq2seq_tokenizer_ends_a_text(common: SimpleNamespace) -> None:
    tokenizer = common.tokenizer.train_tokenizer(["a b c"], 300, common.tokenizer.SEQ2SEQ_TOKENS)
    ids = tokenizer("a b")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"


# The hub


@pytest.fixture
def unreachable(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common.hub, "is_reachable", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


@pytest.mark.usefixtures("unreachable")
def test_flags_that_need_the_hub_stop_the_run_and_name_the_way_out(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = common.flags.parse_arguments(["--model_name_or_path", "gpt2-xl", "--dataset_name", "wikitext"])
    main = common.arguments.told_once(lambda: common.hub.check_offline(args, "tokenizer_name", "dataset_name"))
    with pytest.raises(SystemExit, match="--model_name_or_path gpt2-xl, --dataset_name wikitext .*--offline"):
        main()
    monkeypatch.setitem(os.environ, "RANK", "1")  # only the first rank says it
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1


@pytest.mark.usefixtures("unreachable")
def test_offline_replaces_what_the_hub_would_give_and_says_so(common: SimpleNamespace) -> None:
    args = common.flags.parse_arguments(["--model_name_or_path", "gpt2-xl", "--dataset_name", "wikitext", "--offline"])
    note = common.hub.check_offline(args, "tokenizer_name", "dataset_name")
    assert (args.model_name_or_path, args.config_name, args.dataset_name) == (None, "gpt2-xl", None)
    assert "--model_name_or_path gpt2-xl, --dataset_name wikitext" in note


@pytest.mark.usefixtures("unreachable")
def test_configuration_that_cannot_be_had_is_named_with_those_that_can(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(common.arguments.FlagError, match=r"No configuration gpt3: no route to the hub\n.*built in: gpt2, gpt2-medium"):
        common.hub.named_config("gpt3")


def test_table_over_files_that_are_none_says_which(common: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name, message in (("none.json", "No such file or directory"), ("other.json", r"other\.json is no results\.json")):
        monkeypatch.setattr("sys.argv", ["results.py", str(tmp_path / name)])
        with pytest.raises(SystemExit, match=message):
            common.results.main()


def test_local_folders_need_no_hub(common: SimpleNamespace, tmp_path: Path) -> None:
    args = common.flags.parse_arguments(["--model_name_or_path", str(tmp_path)])
    assert common.hub.check_offline(args, "tokenizer_name", "dataset_name") == ""


@pytest.mark.parametrize(
    ("name", "millions"),
    [("microsoft/deberta-v2-xlarge-mnli", 885), ("facebook/blenderbot-400M-distill", 365), ("bert-large-uncased", 335)],
)
def test_published_shapes_have_the_published_size(common: SimpleNamespace, name: str, millions: int) -> None:
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(common.hub.known_config(name))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


# Comparison


def comparison_row(common: SimpleNamespace, stage: int | None, seconds: float | None) -> object:
    results = common.results
    facts = results.RunFacts("task", stage, 2, "gloo", "cpu", "fp32", 10, 4, 2, "lines", 8, 16, 1, 5, 60, 120)
    run = None
    if seconds is not None:
        run = (facts, results.RunResults(seconds, 0.5, 64.0, 2**20, 2**19, 2.0, {}, {"f1": 0.75}, 5))
    return common.compare.Comparison(common.compare.method_name(stage), run)


def test_comparison_is_a_table_and_a_drawing(common: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [comparison_row(common, None, None), comparison_row(common, 2, 3.25), comparison_row(common, 3, 4.0)]
    common.compare.write_comparison(tmp_path, rows)
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    assert lines[0].startswith("| Method | Batch size per rank | Eval size per rank | Train time per epoch (s) |")
    assert lines[2] == "| DDP | - | - | out of memory | - | - | - | - |"
    assert lines[3] == "| ZeRO stage 2 | 8 | 16 | 3.25 | 0.50 | 1.0 | 0.5 | 0.750 |"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "ZeRO stage 3" in capsys.readouterr().out


def test_comparison_under_a_launcher_is_the_first_ranks_work(
    common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def launch(command: list[str], log: Path) -> int:
        log.write_text("torch.OutOfMemoryError: CUDA out of memory")
        started.append(command)
        return 1

    monkeypatch.setattr(common.compare, "launch", launch)
    argv = ["--compare", "--output_dir", str(tmp_path), "--seed", "3"]
    args = common.flags.parse_arguments(argv)
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert common.compare.compare("script.py", argv, args) == 0
    assert started == []
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    assert common.compare.compare("script.py", argv, args) == 0
    assert [command[command.index("--num_processes") + 1] for command in started] == ["3"] * 4
    assert all("--compare" not in command and command[-1] != str(tmp_path) for command in started)
    assert (tmp_path / "comparison.md").read_text().count("out of memory") == 4
    assert json.loads((tmp_path / "zero3" / "ds.json").read_text())["zero_optimization"]["stage"] == 3
    assert not (tmp_path / "ddp" / "ds.json").exists()


def test_failed_comparison_ends_with_the_runs_exit_code(
    common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(command: list[str], log: Path) -> int:
        log.write_text("ValueError: no such thing")
        return 7

    monkeypatch.setattr(common.compare, "launch", launch)
    argv = ["--compare", "--output_dir", str(tmp_path)]
    assert common.compare.compare("script.py", argv, common.flags.parse_arguments(argv)) == 7
    assert str(tmp_path / "ddp" / "log.txt") in capsys.readouterr().out
    assert not (tmp_path / "comparison.md").exists()
