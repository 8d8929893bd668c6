"""What must not be shown: keys and passwords in `explain`, `dump_state`, `report`, messages and reprs."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hf_zero.cli import main
from hf_zero.config.keys import all_keys
from hf_zero.config.resolve import resolve
from hf_zero.config.view import view_of
from hf_zero.environment import environment_facts
from hf_zero.errors import ConfigError
from hf_zero.system.secrets import MASK, hidden, is_secret, without_credentials

SECRET = "S3CRETvalue"  # pragma: allowlist secret
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "dump_state": True,
    "comet": {"enabled": True, "api_key": SECRET, "project": f"https://user:{SECRET}@comet.example/?key={SECRET}"},
    "pipeline": {"Auth_Header": SECRET, "max_tokens": 5},
}
# Text keys of the schema that look like secrets and are none.
NO_SECRETS = {"comet.experiment_key", "compile.passes"}


def test_every_key_that_looks_secret_is_marked() -> None:
    marked = {path for path, key in all_keys().items() if key.secret}
    looks = {path for path, key in all_keys().items() if "text" in key.type_text and is_secret(path.rpartition(".")[2])}
    assert marked == looks - NO_SECRETS == {"comet.api_key"}


@pytest.mark.parametrize("further", [[], ["--json"], ["--all"], ["--all", "--json"]])
def test_explain(further: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", json.dumps(CONFIG), *further]) == 0
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    row = next(line for line in out.splitlines() if "comet.api_key" in line) if "--json" not in further else out
    assert MASK in row
    if "--json" in further:
        rows = {row["key"]: row["value"] for row in json.loads(out)["keys"]}
        assert rows["comet.api_key"] == rows["pipeline.Auth_Header"] == MASK
        assert rows["pipeline.max_tokens"] == "5"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"comet": {"api_key": [SECRET]}}),
        json.dumps({"comet": {"api_key": {SECRET: 1}}}),
        f'{{"comet": {{"api_key": "{SECRET}", "api_key": "x"}}}}',
        json.dumps({"comet": [{"api_key": SECRET}]}),
        json.dumps({"sparse_attention": {"token": SECRET}, "nebula": {"enabled": True}}),
        json.dumps({"comet": {"mode": f"https://a:{SECRET}@host/x?sig={SECRET}"}}),
    ],
)
def test_messages(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 1
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    with pytest.raises(ConfigError) as error:
        resolve(text)
    assert SECRET not in str(error.value)


def test_the_value_itself_is_there_for_its_reader() -> None:
    resolved = resolve(CONFIG)
    assert resolved.config.comet.api_key == SECRET == resolved.raw["comet"]["api_key"]
    for shown in (repr(resolved.config.comet), repr(resolved.config), str(resolved.table(everything=True)), repr(view_of(CONFIG))):
        assert SECRET not in shown


def test_dump_state_and_print_user_config(caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.assembly.reports import announce

    with caplog.at_level(logging.INFO, logger="hf_zero"):
        logging.getLogger("hf_zero").addHandler(caplog.handler)
        try:
            announce(resolve(CONFIG))
            view_of(CONFIG).print_user_config()
            view_of(CONFIG).print("name")
        finally:
            logging.getLogger("hf_zero").removeHandler(caplog.handler)
    assert "comet.api_key" in caplog.text and '"api_key"' in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "name",
    ["DS_PASSWD", "DS_CREDENTIALS", "DS_db_pass", "HF_ZERO_auth", "NCCL_Token", "ACCELERATE_SECRET", "DS_API_KEY", "DS_PWD", "GLOO_BEARER"],
)
def test_report_hides_by_name(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    assert f"{name}" in out and SECRET not in out


def test_report_hides_inside_urls() -> None:
    address = f"https://user:{SECRET}@host.example:80/path{'x' * 80}?token={SECRET}&b={SECRET}#access={SECRET}"
    facts = environment_facts({"DS_PROXY": address, "DS_SHORT": f"ftp://{SECRET}@host"})["variables"]
    assert SECRET not in str(facts)
    assert facts["DS_PROXY"].startswith(f"https://{MASK}@host.example:80/path")
    assert facts["DS_SHORT"] == f"ftp://{MASK}@host"


def test_masking_leaves_the_rest() -> None:
    assert without_credentials("tcp://10.0.0.1:29500") == "tcp://10.0.0.1:29500"
    assert without_credentials("a@b.c?x=1") == "a@b.c?x=1"
    assert without_credentials("see http://a/b?x=1&y=2, or c") == f"see http://a/b?x={MASK}&y={MASK} or c"
    value = {"key": "a", "Tokens": 3, "inner": [{"passphrase": "b", "empty_key": ""}], "pair": ("http://u:p@h", 1)}
    assert hidden(value) == {
        "key": MASK, "Tokens": 3, "inner": [{"passphrase": MASK, "empty_key": ""}], "pair": (f"http://{MASK}@h", 1),
    }  # fmt: skip
    assert value["key"] == "a"
