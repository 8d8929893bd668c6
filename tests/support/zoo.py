"""A tiny model of every text architecture of the installed transformers, with a batch for it.

``architectures()`` lists every class of the auto mappings that reads token ids alone; ``build`` makes one from a configuration whose sizes
are shrunk by the names of its fields, with an entry in ``OVERRIDES`` where an architecture has constraints of its own.
Nothing is downloaded. Dropout is 0, so that two runs of the same weights can be compared.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 96
LENGTH = 16
ROWS = 2
CLASSES = 2
FIRST_TOKEN = 20  # lower ids are special tokens

# Size -> names of config fields. Fields that a config class does not have are not passed to it.
_SIZES = {
    VOCAB: "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input text_vocab_size",
    64: """intermediate_size ffn_dim d_ff n_inner d_inner ffn_hidden_size hidden_dim encoder_ffn_dim decoder_ffn_dim ff_proj_size ffw_size
           dim_ff pooler_hidden_size max_position_embeddings n_positions max_target_positions max_source_positions n_ctx context_length""",
    32: """hidden_size d_model n_embd dim embed_dim d_embed model_dim emb_dim width decoder_hidden_size true_hidden_size d_hidden
           text_hidden_size lru_width""",
    16: """q_lora_rank kv_lora_rank moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size shared_intermediate_size
           moe_shared_expert_intermediate_size expert_ffn_hidden_size embedding_size image_size""",
    8: """head_dim d_kv attention_head_dim kv_channels v_head_dim qk_nope_head_dim global_head_dim swa_head_dim linear_head_dim
          linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size mamba_head_dim chunk_size mamba_chunk_size
          sliding_window patch_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
          num_decoder_attention_heads swa_num_attention_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads
          num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts qk_rope_head_dim rotary_dim""",
    2: """num_hidden_layers num_layers n_layer n_layers num_decoder_layers encoder_layers decoder_layers num_encoder_layers
          speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_key_value_heads num_kv_heads swa_num_key_value_heads
          num_global_key_value_heads linear_num_key_heads linear_num_value_heads num_experts_per_tok moe_k moe_topk
          num_experts_per_token top_k_experts type_vocab_size""",
    1: "n_group topk_group num_expert_groups first_k_dense_replace num_dense_layers encoder_sparse_step decoder_sparse_step",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}

# Constraints that a field's name does not show, by model type or class. A dict is for the sub-config of that name.
_AXIAL = {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 16), "attention_head_size": 8, "feed_forward_size": 64}
_LSH = {"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2}
_BLT_PART = {"num_hidden_layers": 2, "cross_attn_k": 2, "hidden_size_global": 32}
_TWO_KINDS = ["sliding_attention", "full_attention"] * 2
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3], "patcher_config": _BLT_PART, "encoder_config": _BLT_PART,
        "decoder_config": _BLT_PART, "global_config": _BLT_PART,
    },
    "canine": {"num_hash_buckets": 32, "local_transformer_stride": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}},
    "ctrl": {"dff": 64},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2, "shared_experts_intermediate_size": 16, "kv_lora_rank": 16,
                   "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
    "doge": {"is_moe": True},
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "esm": {"pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "flint": {"mlp_only_layers": []},
    "funnel": {"block_sizes": (1, 1), "d_head": 8},
    "gemma3n_text": {"layer_types": _TWO_KINDS, "intermediate_size": 64, "num_hidden_layers": 4,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": None,
                     "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "gemma4": {"text_config": {"enable_moe_block": True}},
    "gemma4_text": {"enable_moe_block": True},
    "git": {"vision_config": {"image_size": 16, "patch_size": 8}},
    "got_ocr2": {"vision_config": {"image_size": 64, "output_channels": 16, "mlp_dim": 64, "global_attn_indexes": (1,)}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 16, "visual_embed": False},
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "inkling_text": {"rel_extent": 32},
    "inkling2_text": {"rel_extent": 32},
    "llama4": {"intermediate_size_mlp": 64},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "longt5": {"decoder_start_token_id": 0},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "markuplm": {"xpath_unit_hidden_size": 8, "max_depth": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 2, "mamba_head_dim": 16},
    "neomme": {"head_dim": 16, "embedding_rank": 8},
    # Over 4 ranks it convolves one channel, where oneDNN writes past its buffers if the kernel is longer than the rows.
    "nystromformer": {"conv_kernel_size": 9},
    "perceiver": {"max_position_embeddings": LENGTH, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
        "vision_config": {"crop_size": 16},
    },
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 8, "output_dim": 32}},
    "qwen4_exp": {"ngram_vocab_size_base": 64, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                  "indexer_budget": 8, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 4},
    "reformer": {**_AXIAL, **_LSH},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "squeezebert": {"embedding_size": 32},
    "switch_transformers": {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": {"decoder_start_token_id": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "chunk_size": LENGTH, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "attention_hidden_size": 64,
              "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_dt_rank": 4},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",  # only model types without a class in the mappings above
}


@dataclass(frozen=True)
class Architecture:
    """One model class. ``task`` selects its inputs and labels: causal, seq2seq, masked or classes."""

    name: str
    model_type: str
    task: str


@cache
def architectures() -> tuple[Architecture, ...]:
    """Return every class of the auto mappings, each once, in the order of the mappings."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Architecture] = {}
    seen_types: set[str] = set()
    for task, mapping in TASKS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                if name not in found and name not in LEFT_OUT and not (task == "classes" and model_type in seen_types):
                    found[name] = Architecture(name, model_type, task)
        seen_types.update(getattr(modeling_auto, mapping))
    return tuple(found.values())


def architecture(name: str) -> Architecture:
    """Return the architecture of that class name; KeyError when the installed transformers has none."""
    return {item.name: item for item in architectures()}[name]


def build(name: str, seed: int = 0, changes: dict[str, Any] | None = None) -> nn.Module:
    """Return a tiny model of a class, weights by ``seed`` only, in training mode; ``changes`` to the fields of its configuration."""
    import transformers

    config = small_config(name)
    for field, value in (changes or {}).items():
        setattr(config, field, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, name)(config).train()


def small_config(name: str) -> Any:
    """Return the shrunk configuration of a class."""
    import transformers

    cls = getattr(transformers, name)
    item = architecture(name)
    overrides = OVERRIDES.get(item.model_type, {}) | OVERRIDES.get(name, {})
    config = shrink(cls.config_class, overrides)
    if item.task == "causal" and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    return config


def shrink(config_class: type, overrides: dict[str, Any]) -> Any:
    """Return an instance of ``config_class`` whose sizes are those of ``SIZES`` and ``overrides``, sub-configs included."""
    defaults = config_class()
    values = vars(defaults)
    aliases = getattr(config_class, "attribute_map", {})
    taken = {*inspect.signature(config_class.__init__).parameters, *aliases}
    names = [name for name in taken if name in values or name in SIZES]
    small = {name: _small_value(name, values.get(aliases.get(name, name)), overrides) for name in names}
    changes = {name: value for name, value in small.items() if value is not None}
    if "kv_lora_rank" in changes and "num_key_value_heads" in changes:  # multi-head latent attention has no shared heads
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    changes |= _small_layer_lists(values, taken)
    plain = {name: value for name, value in overrides.items() if not isinstance(value, dict) or name not in changes}
    return config_class(**{**changes, **plain})


def _small_layer_lists(values: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Return fields with one entry per layer (``layer_types``): every kind of layer once, and the number of layers that this needs."""
    layers = next((name for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer") if name in values), None)
    if layers is None or values[layers] is None:
        return {}
    per_layer = {
        name: list(dict.fromkeys(value))
        for name, value in values.items()
        if name in taken and isinstance(value, list) and len(value) == values[layers] > 1 and all(isinstance(item, str) for item in value)
    }
    if not per_layer:
        return {}
    count = max(2, *(len(kinds) for kinds in per_layer.values()))
    return {layers: count, **{name: kinds + kinds[-1:] * (count - len(kinds)) for name, kinds in per_layer.items()}}


def _small_value(name: str, value: Any, overrides: dict[str, Any]) -> Any:
    from transformers import PretrainedConfig

    if isinstance(value, PretrainedConfig):
        return shrink(type(value), overrides.get(name, {})).to_dict()
    if name in SIZES:
        return type(value)(SIZES[name] for _ in value) if isinstance(value, list | tuple) else SIZES[name]
    if ("drop" in name and isinstance(value, float)) or "jitter" in name:
        return 0.0
    if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= FIRST_TOKEN:
        return 3 + sum(map(ord, name)) % (FIRST_TOKEN - 3)
    return None


# Classes of the mappings that are left out, with the reason.
LEFT_OUT = {
    "Gemma4AssistantForCausalLM": "a drafter: reads the keys and values of another model",
    "Gemma4UnifiedAssistantForCausalLM": "a drafter: reads the keys and values of another model",
    "Gemma3nForConditionalGeneration": "its vision tower is a timm model",
    "LayoutLMv2ForSequenceClassification": "its vision tower is a detectron2 model",
    "Nemotron3_5TranscribeForConditionalGeneration": "reads audio",
    "VoxtralRealtimeForConditionalGeneration": "reads audio",
    "VibeVoiceAsrForConditionalGeneration": "reads audio",
}


def batch(name: str, generator: torch.Generator, rows: int = ROWS) -> dict[str, Tensor]:
    """Return a batch for a class: token ids and labels of equal length, none ignored."""
    task = architecture(name).task
    tokens = torch.randint(FIRST_TOKEN, VOCAB, (rows, LENGTH), generator=generator)
    if task == "classes":
        return {"input_ids": tokens, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}
    labels = tokens.clone() if task == "causal" else torch.randint(FIRST_TOKEN, VOCAB, (rows, LENGTH), generator=generator)
    if name.startswith("Musicgen"):  # one row per codebook, labels with codebooks last
        return {"input_ids": tokens.repeat(4, 1), "labels": labels[..., None].repeat(1, 1, 4)}
    if name == "GitForCausalLM":  # its labels start after the image
        return {"input_ids": tokens, "labels": labels, "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return {"input_ids": tokens, "labels": labels}


def with_padding(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with the last tokens of the second row masked, for models that take a mask."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return inputs
    inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"]), "labels": inputs["labels"].clone()}
    inputs["attention_mask"][1, -5:] = 0
    if inputs["labels"].shape == inputs["input_ids"].shape:
        inputs["labels"][1, -5:] = -100
    return inputs


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """Return the model's own outputs, without a cache: training does not use it, and one class cannot build it."""
    takes_cache = "use_cache" in inspect.signature(getattr(model, "module", model).forward).parameters
    return model(**inputs, **({"use_cache": False} if takes_cache else {}))


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    return forward(model, inputs).loss
