"""The alias: `import deepspeed` finds the part of DeepSpeed's public API that Hugging Face libraries use, served by hf_zero."""

from __future__ import annotations

from hf_zero.deepspeed.finder import install_as_deepspeed

__all__ = ["install_as_deepspeed"]
