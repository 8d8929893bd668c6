"""A plugin that accelerate is going to leave out says so where it is made."""

from __future__ import annotations

from unittest import mock

import pytest

from hf_zero.integrations import methods, parallelism, script_values


@pytest.mark.parametrize(("value", "said"), [("true", 1), ("1", 1), ("Yes", 1), ("false", 0), ("0", 0), ("", 0), (None, 0)])
def test_a_plugin_beside_accelerate_use_cpu(value: str | None, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(parallelism, "warn_once", heard.append)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if value is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    monkeypatch.setattr(script_values, "make_plugin", lambda method, plugin: method(plugin))
    made: list[object] = []
    plugin = mock.MagicMock(hf_ds_config="none")
    parallelism.make_plugin(lambda plugin: made.append(plugin), plugin)
    assert made == [plugin] and len(heard) == said
    assert not said or f"ACCELERATE_USE_CPU is {value}" in heard[0] and "train with DDP, without ZeRO" in heard[0]


def test_every_way_to_make_a_plugin_comes_by() -> None:
    """`Accelerator`, `TrainingArguments(deepspeed=...)` and `DeepSpeedPlugin(...)` all run its ``__post_init__``."""
    from accelerate.utils import DeepSpeedPlugin

    assert methods.PLUGIN in methods.METHODS and "__post_init__" in vars(DeepSpeedPlugin)
