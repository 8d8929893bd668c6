"""Nothing that a file of somebody else's holds is obeyed by a terminal: errors, log records and what commands print."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from hf_zero import errors
from hf_zero.checkpoint.commit import folders
from hf_zero.checkpoint.zero_to_fp32 import Checkpoint
from hf_zero.cli import main
from hf_zero.errors import ConfigError, HfZeroError, OffloadError, PrintableStream, printable
from hf_zero.observe import logger
from tests.support.processes import REPO, environment

HOSTILE = "a\x1b]0;title\x07\x9b2J\u202e\u2028\r\b\ud800"


def hostile(text: str) -> bool:
    return any(letter not in "\n\t" and not letter.isprintable() for letter in text)


def test_what_a_terminal_obeys_is_written_out_and_the_rest_stays() -> None:
    assert printable(HOSTILE) == r"a\x1b]0;title\x07\x9b2J\u202e\u2028\x0d\x08\ud800"
    for text in ("", "plain", "two\nlines\tand a tab", "é ü 中文 😀", "100 %", r"C:\x1b"):
        assert printable(text) == text
    everything = printable("".join(map(chr, range(sys.maxunicode + 1))))
    kept = {unicodedata.category(letter) for letter in set(everything) - {"\n", "\t"}}
    assert not kept & {"Cc", "Cs", "Zl", "Zp"} and not {unicodedata.bidirectional(letter) for letter in everything} & {
        *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
    }


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HfZeroError)],
    ids=lambda kind: kind.__name__,
)
def test_every_error_can_be_printed(kind: type[HfZeroError]) -> None:
    error = kind(f"the file {HOSTILE} is damaged\nadvice")
    assert not hostile(str(error)) and r"\x1b]0;title" in str(error) and "\nadvice" in str(error)
    assert error.args == (f"the file {HOSTILE} is damaged\nadvice",)
    assert not hostile(str(OffloadError(5, HOSTILE, HOSTILE)))


def test_every_record_of_the_log_can_be_printed() -> None:
    """Whoever handles it: the filter is the logger's own."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.warning("the tag %s and %d %%", HOSTILE, 5)
        logger.warning(f"100 % {HOSTILE}")
        logger.warning("%s", "%s stays")
    finally:
        logger.removeHandler(handler)
    first, second, third = stream.getvalue().splitlines()
    assert (
        not hostile(stream.getvalue()) and first.endswith(r"\ud800 and 5 %") and second.startswith(r"100 % a\x1b") and third == "%s stays"
    )


def test_what_commands_print_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    config = {
        "bf16": {"enabled": True},
        HOSTILE[:-1]: HOSTILE[:-1],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, HOSTILE[:-1]: 1}},
    }
    file.write_text(json.dumps(config, ensure_ascii=False))
    for words in (["explain", str(file), "--all"], ["explain", str(file), "--json"], ["explain", str(file), "--strict"]):
        main(words)
        found = capsys.readouterr()
        assert "title" in found.out + found.err and not hostile(found.out + found.err), words
    fsdp = tmp_path / "fsdp.json"
    for content in ({"fsdp_version": HOSTILE[:-1]}, {"fsdp": "full_shard", HOSTILE[:-1]: 1}, {"fsdp_version": 2, HOSTILE[:-1]: 1}):
        fsdp.write_text(json.dumps(content, ensure_ascii=False))
        main(["plan", "--from", str(fsdp)])
        found = capsys.readouterr()
        assert "title" in found.out + found.err and not hostile(found.out + found.err), content
    stream = io.StringIO()
    print(HOSTILE, file=PrintableStream(stream))
    assert not hostile(stream.getvalue())


def test_names_in_a_checkpoint_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(HOSTILE[:-1].encode())
    with pytest.raises(HfZeroError, match="title") as ours:
        folders.find_latest(tmp_path)
    with pytest.raises(FileNotFoundError, match="title") as script:
        Checkpoint(tmp_path)
    assert not hostile(str(ours.value)) and not hostile(str(script.value))


@pytest.mark.fast_rows("\\x1b[2J")
@pytest.mark.parametrize("level", ["verbose", "INF0", "\x1b[2J"])
def test_a_level_of_the_log_that_is_none_is_said_in_a_line(level: str) -> None:
    env = {**environment(), "HF_ZERO_LOG_LEVEL": level, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-m", "hf_zero", "report"], env=env, capture_output=True, text=True, cwd=REPO, timeout=600)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not hostile(done.stderr), done.stderr
    assert "hf-zero: HF_ZERO_LOG_LEVEL is" in done.stderr and "DEBUG, INFO, WARNING, ERROR, CRITICAL are allowed" in done.stderr


def test_a_configuration_error_is_one_of_several_kinds() -> None:
    """What scripts catch stays what it was."""
    assert issubclass(ConfigError, ValueError) and str(ConfigError("a", "b")) == "('a', 'b')"
