"""Supervised fine-tuning like PEFT's example: three dataclasses, a base in 4 or 8 bit or whole, new special tokens, TRL's trainer."""

from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer


@dataclass
class ModelArguments:
    model_name_or_path: str
    lora_r: int = 4
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    lora_target_modules: str = "all-linear"
    use_peft_lora: bool = False
    use_4bit_quantization: bool = False
    use_8bit_quantization: bool = False
    use_nested_quant: bool = False
    bnb_4bit_quant_storage_dtype: str = "uint8"
    new_tokens: list[str] = field(default_factory=lambda: ["<|tool|>", "<|/tool|>"])


@dataclass
class DataArguments:
    dataset_name: str = ""


def prepared(names, training):
    """Return the model, its tokenizer with new tokens, and the adapter's configuration."""
    quantization, dtype = None, torch.float32
    if names.use_4bit_quantization:
        storage = getattr(torch, names.bnb_4bit_quant_storage_dtype)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=names.use_nested_quant,
            bnb_4bit_quant_storage=storage,
        )
        dtype = storage if storage.is_floating_point else dtype
    elif names.use_8bit_quantization:
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        names.model_name_or_path, quantization_config=quantization, attn_implementation="eager", dtype=dtype
    )
    tokenizer = AutoTokenizer.from_pretrained(names.model_name_or_path)
    tokenizer.add_tokens(names.new_tokens, special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)
    model.config.use_cache = not training.gradient_checkpointing
    adapter = None
    if names.use_peft_lora:
        adapter = LoraConfig(
            r=names.lora_r,
            lora_alpha=names.lora_alpha,
            lora_dropout=names.lora_dropout,
            target_modules=names.lora_target_modules,
            task_type="CAUSAL_LM",
        )
    return model, tokenizer, adapter


def main():
    names, data, training = HfArgumentParser((ModelArguments, DataArguments, SFTConfig)).parse_args_into_dataclasses()
    set_seed(training.seed)
    model, tokenizer, adapter = prepared(names, training)
    splits = load_dataset(data.dataset_name)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=training,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        peft_config=adapter,
    )
    trainer.accelerator.print(f"{trainer.model}")
    if names.use_peft_lora:
        trainer.model.print_trainable_parameters()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
