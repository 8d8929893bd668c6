"""The comparison of our keys with those of an installed DeepSpeed."""

from __future__ import annotations

from tools.config_census import missing_keys


def test_a_key_that_no_section_has_is_named() -> None:
    listed = [
        ["deepspeed.runtime.zero.config", "compute_grad_norm", "True"],
        ["deepspeed.runtime.zero.config", "overlap_everything", "False"],
        ["deepspeed.runtime.zero.config", "overlap_everything", "False"],
        ["deepspeed.runtime.constants", "bfloat16", "None"],
        ["deepspeed.inference.config", "replace_with_kernel_inject", "False"],
    ]
    assert missing_keys(listed) == [("deepspeed.runtime.zero.config", "overlap_everything", "False")]
