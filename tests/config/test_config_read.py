"""Every form in which a configuration may be handed over, and the errors of those that cannot be read."""

from __future__ import annotations

import base64
import json
import sys
import threading
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from hf_zero.config.read import read_config
from hf_zero.errors import ConfigError

pytestmark = pytest.mark.quick

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}, "name": "größe?>~"}


def test_path(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_config(file) == CONFIG
    assert read_config(str(file)) == CONFIG


def test_text() -> None:
    assert read_config(json.dumps(CONFIG)) == CONFIG
    assert read_config("\n  " + json.dumps(CONFIG, indent=1)) == CONFIG


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode])
@pytest.mark.parametrize("padding", [True, False])
def test_base64(encode: object, padding: bool) -> None:
    for extra in range(3):  # every length of the padding
        config = {**CONFIG, "pad": "~?" * extra}
        text = encode(json.dumps(config, ensure_ascii=False).encode()).decode()  # type: ignore[operator]
        assert read_config(text if padding else text.rstrip("=")) == config


def test_mapping_is_copied_deeply() -> None:
    source = {"zero_optimization": {"stage": 1}}
    read = read_config(MappingProxyType(source))
    read["zero_optimization"]["stage"] = 3
    assert source["zero_optimization"]["stage"] == 1


def test_objects_of_a_config_in_code_are_kept() -> None:
    group, lock = object(), threading.Lock()  # a lock cannot be copied, like a process group
    read = read_config({"tensor_parallel": {"tp": {"mpu": lock, "tp_group": group}}, "list": [group]})
    assert read["tensor_parallel"]["tp"] == {"mpu": lock, "tp_group": group}
    assert read["list"][0] is group


def test_infinity_survives() -> None:
    assert read_config('{"steps_per_print": Infinity}') == {"steps_per_print": float("inf")}


def test_comments_and_trailing_commas() -> None:
    text = '{ // rate\n "lr": "http://x", # two\n /* three\n lines */ "b": [1, 2,], "c": ",}",\n}'
    assert read_config(text) == {"lr": "http://x", "b": [1, 2], "c": ",}"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no_such_file.json", ["no_such_file.json", "neither an existing file"]),
        ("{'a': 1}", ["not JSON", "line 1, column 2"]),
        ('{"a": 1,\n "b": }', ["line 2, column 7"]),
        ("{} {}", ["not JSON"]),
        ('{"fp16": {"enabled": true, "enabled": false}}', ["`enabled` occurs twice"]),
        (None, ["NoneType"]),
        (3, ["int"]),
        (base64.b64encode(b"[1]").decode(), ["neither an existing file"]),
    ],
)
def test_unreadable(source: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(source)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_config(tmp_path / "list.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path / "latin.json")


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_config(tmp_path / "bom.json") == {"a": 1}


def test_the_line_of_a_mistake_is_shown(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  "bf16": {"enabled": True},\n  "train_batch_size": 8\n}\n')
    with pytest.raises(ConfigError, match=r'is not JSON: Expecting value \(line 2, column 23\): "bf16": \{"enabled": True\},$'):
        read_config(tmp_path / "ds.json")


def test_hjson_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "{ train_batch_size: 8 }"
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(text)
    loads = {text: {"train_batch_size": 8}}
    fake = SimpleNamespace(loads=lambda given, object_pairs_hook: loads[given], HjsonDecodeError=ValueError)
    monkeypatch.setitem(sys.modules, "hjson", fake)
    assert read_config(text) == {"train_batch_size": 8}
