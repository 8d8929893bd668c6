"""A tiny model of every architecture of the installed transformers that reads images or sound, with inputs for most of them.

``architectures()`` lists one class of every model type in the auto mappings of vision, audio and several kinds of input together whose
shrunk configuration makes a model; the text classes of ``zoo`` are left out. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import zoo

MAPPINGS = [
    "AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "RNNT", "TDT", "AUDIO_XVECTOR",
    "IMAGE_CLASSIFICATION", "BACKBONE", "DEPTH_ESTIMATION", "IMAGE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION", "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "MASKED_IMAGE_MODELING", "MASK_GENERATION",
    "NORMAL_ESTIMATION", "OBJECT_DETECTION", "POINTMAP_ESTIMATION", "POSE_ESTIMATION", "VIDEO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING", "TABLE_RECOGNITION", "TEXT_RECOGNITION", "IMAGE",
]  # fmt: skip
LARGEST = 40_000_000  # maximum number of parameters of a model, because a test may build several copies

_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_SOUND = {"conv_dim": [32] * 7}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 640},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "pvt": _STAGES,
    "pvt_v2": _STAGES,
    "regnet": {"hidden_sizes": [64, 64], "depths": [1, 1]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "segformer": _STAGES,
    "videoprism": {"vision_config": {"image_size": 36}},
    "videoprism_vision_model": {"image_size": 36},
    "glpn": {**_STAGES, "decoder_hidden_size": 8},
    **dict.fromkeys(["hubert", "wav2vec2", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "wav2vec2-conformer"], _SOUND),
}  # fmt: skip


@cache
def candidates() -> dict[str, str]:
    """Return class name -> model type for one class of each model type in the mappings that ``zoo`` does not have."""
    from transformers.models.auto import modeling_auto

    text = {item.name for item in zoo.architectures()}
    types: dict[str, str] = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
            name = names if isinstance(names, str) else names[0]
            if name not in text:
                types.setdefault(model_type, name)
    return {name: model_type for model_type, name in reversed(types.items())}


@cache
def refusals() -> dict[str, str]:
    """Return the reason why a class of ``candidates`` is not built: the error of its small configuration, or its size."""
    found = {}
    for name in sorted(candidates()):
        try:
            with torch.device("meta"):
                size = sum(param.numel() for param in _construct(name).parameters())
        except Exception as error:  # noqa: BLE001 - a package is missing, or the sizes do not fit each other
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
            continue
        if size > LARGEST:
            found[name] = f"{size:,} elements with a small configuration"
    return found


def architectures() -> list[str]:
    """Return the names of the classes that can be built."""
    return [name for name in sorted(candidates()) if name not in refusals()]


def _construct(name: str) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    model_type = candidates().get(name, getattr(cls.config_class, "model_type", ""))
    model: nn.Module = cls(zoo.shrink(cls.config_class, OVERRIDES.get(model_type, {})))
    return model


def build(name: str) -> nn.Module:
    """Return the tiny model of a class in fp32, weights by a fixed seed, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _construct(name).train()


def inputs(model: Any) -> dict[str, Tensor] | None:
    """Return images or sound for a model's forward, by the name of its main input; None where it takes more than one input."""
    config, main = model.config, model.main_input_name
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in takes:
        return None
    generator = torch.Generator().manual_seed(0)
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 64
        height, width = (size[0], size[-1]) if isinstance(size, list | tuple) else (size, size)
        return {main: torch.randn(2, getattr(config, "num_channels", None) or 3, height, width, generator=generator)}
    if main == "input_values" and hasattr(config, "conv_kernel"):
        return {main: torch.randn(2, 2000, generator=generator)}
    if main == "input_values" and hasattr(config, "num_mel_bins"):
        return {main: torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)}
    return None
