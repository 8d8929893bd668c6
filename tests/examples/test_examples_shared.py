"""What the experiments share: their files, offline text, tokenizers, trackers, the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.examples import EXAMPLES, REPOSITORY, library_part, modules


@pytest.fixture(scope="module")
def common() -> Iterator[SimpleNamespace]:
    """The shared modules, imported as the scripts import them."""
    with modules("clm", "offline", "flags", "arguments") as found:
        yield found


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("name", ["flags.py", "offline.py"])
def test_every_experiment_has_a_link_to_what_they_share(name: str) -> None:
    for folder in ("clm", "seq2seq", "text_classification"):
        link = EXAMPLES / folder / name
        assert link.is_symlink() and not Path(os.readlink(link)).is_absolute()
        assert link.resolve() == EXAMPLES / name


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
    assert [path.relative_to(tmp_path).as_posix() for path in common.offline.standard_library_files(tmp_path)] == [
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
    assert common.offline.parse(source).texts == ["Module.", "Class.", "Method.", "Last."]


@pytest.mark.parametrize("source", [b"print 'python 2'", b"\x00", b"x = 1"])
def test_docstrings_of_files_without_any_or_of_another_syntax(common: SimpleNamespace, source: bytes) -> None:
    assert common.offline.parse(source).texts == []


def test_missing_library_sources_are_named(common: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--train_file"):
        common.offline.standard_library_text(tmp_path)


@pytest.mark.parametrize(("count", "percent", "held_out"), [(1000, 5, 50), (7, 50, 3), (100, 99, 99), (10, 1, 0)])
def test_split_holds_out_the_share_and_loses_nothing(common: SimpleNamespace, count: int, percent: int, held_out: int) -> None:
    texts = [str(index) for index in range(count)]
    train, validation = common.offline.split_items(texts, percent)
    assert len(validation) == held_out
    assert sorted(train + validation, key=int) == texts
    assert train == sorted(train, key=int)


def test_tokenizer_keeps_every_byte_and_is_the_same_each_time(common: SimpleNamespace) -> None:
    texts = ["Return the length of the list.", "Return the list of the lengths."] * 5
    tokenizer = common.offline.train_tokenizer(texts, vocab_size=300)
    assert len(tokenizer) <= 300
    sample = "Return π → the\tlist  é"
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    assert tokenizer(common.offline.END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    assert common.offline.train_tokenizer(texts, vocab_size=300).get_vocab() == tokenizer.get_vocab()


def test_tokenizer_needs_room_for_the_bytes(common: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="--vocab_size 100: .*257"):
        common.offline.train_tokenizer(["text"], vocab_size=100)


# Trackers


@pytest.mark.parametrize(("report_to", "note"), [("tensorboard", ""), ("wandb", "offline"), ("all", "offline")])
def test_wandb_is_kept_offline_where_no_account_is_known(
    common: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    report_to: str,
    note: str,
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the code sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert common.flags.trackers(common.arguments.parse_arguments([])) is None
    args = common.arguments.parse_arguments(["--output_dir", str(tmp_path), "--with_tracking", "--report_to", report_to])
    assert common.flags.trackers(args) == report_to
    assert (note in capsys.readouterr().out) and (os.environ.get("WANDB_MODE") == (note or None))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert common.flags.trackers(args) == report_to
    assert capsys.readouterr().out == ""


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
    documentation = common.offline.parse(source)
    (found,) = documentation.functions
    assert (found.signature, found.summary) == ("def read(self, size: int=-1, *rest)", "Read at most size bytes.")
    assert documentation.descriptions == ["A class is no function."]


def test_offline_functions_are_the_same_each_time_and_none_twice(common: SimpleNamespace) -> None:
    first = common.offline.standard_library_functions(library_part())
    common.offline.standard_library.cache_clear()
    assert common.offline.standard_library_functions(library_part()) == first
    assert len(first) == len(set(first)) > 200


# Tokenizers with special tokens


def test_encoder_tokenizer_frames_a_pair_and_masks(common: SimpleNamespace) -> None:
    tokenizer = common.offline.train_tokenizer(["a b c"], 300, common.offline.ENCODER_TOKENS)
    encoded = tokenizer("a", "b")
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert [encoded["input_ids"][index] for index in (0, 2, 4)] == [special[0], special[1], special[1]]
    assert (tokenizer.pad_token_id, tokenizer.convert_ids_to_tokens(tokenizer.mask_token_id)) == (0, "[MASK]")


def test_seq2seq_tokenizer_ends_a_text(common: SimpleNamespace) -> None:
    tokenizer = common.offline.train_tokenizer(["a b c"], 300, common.offline.SEQ2SEQ_TOKENS)
    ids = tokenizer("a b")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"


# The hub


@pytest.fixture
def unreachable(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common.offline, "is_reachable", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


@pytest.mark.usefixtures("unreachable")
def test_flags_that_need_the_hub_stop_the_run_and_name_the_way_out(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = common.arguments.parse_arguments(["--model_name_or_path", "gpt2-xl", "--dataset_name", "wikitext"])
    main = common.flags.told_once(lambda: common.offline.check_offline(args, "tokenizer_name", "dataset_name"))
    with pytest.raises(SystemExit, match="--model_name_or_path gpt2-xl, --dataset_name wikitext .*--offline"):
        main()
    monkeypatch.setitem(os.environ, "RANK", "1")  # only the first rank says it
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1


@pytest.mark.usefixtures("unreachable")
def test_offline_replaces_what_the_hub_would_give_and_says_so(common: SimpleNamespace) -> None:
    args = common.arguments.parse_arguments(["--model_name_or_path", "gpt2-xl", "--dataset_name", "wikitext", "--offline"])
    note = common.offline.check_offline(args, "tokenizer_name", "dataset_name")
    assert (args.model_name_or_path, args.config_name, args.dataset_name) == (None, "gpt2-xl", None)
    assert "--model_name_or_path gpt2-xl, --dataset_name wikitext" in note


@pytest.mark.usefixtures("unreachable")
def test_configuration_that_cannot_be_had_is_named_with_those_that_can(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(common.flags.FlagError, match=r"No configuration gpt3: no route to the hub\n.*built in: gpt2, gpt2-medium"):
        common.offline.named_config("gpt3")


def test_local_folders_need_no_hub(common: SimpleNamespace, tmp_path: Path) -> None:
    args = common.arguments.parse_arguments(["--model_name_or_path", str(tmp_path)])
    assert common.offline.check_offline(args, "tokenizer_name", "dataset_name") == ""


@pytest.mark.parametrize(
    ("name", "millions"),
    [("microsoft/deberta-v2-xlarge-mnli", 885), ("facebook/blenderbot-400M-distill", 365), ("bert-large-uncased", 335)],
)
def test_published_shapes_have_the_published_size(common: SimpleNamespace, name: str, millions: int) -> None:
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(common.offline.known_config(name))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
