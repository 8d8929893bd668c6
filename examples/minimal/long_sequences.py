"""Train on long sequences with Trainer: ranks divide each sequence; feed-forward layers, norms and the loss are computed in tiles.

torchrun --nproc_per_node 2 examples/minimal/long_sequences.py

To predict without GPUs whether a sequence fits in memory: hf-zero plan python:THIS_FILE:build (docs/long-sequences.md).
"""

from pydoc_data.topics import topics  # training text: the language reference, which is part of every Python

from torch.nn import functional
from transformers import AutoConfig, ByT5Tokenizer, LlamaForCausalLM, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_zero import ZeroTrainingArguments
from hf_zero.sequence_parallel.tiled import TiledFusedLogitsLoss, TiledMLP

OUTPUT = "runs/minimal/long_sequences"
LENGTH, TILE, LOSS_TILE = 128, 4096, 1024  # tokens per sequence, per tile of layers, per tile of the loss
BATCH = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def tiled(layer):
    return type(layer.__name__, (layer,), {"forward": lambda self, x: TiledMLP.apply(layer.forward, self, x, -(-x.shape[1] // TILE))})


TILED = {layer: tiled(layer) for layer in (LlamaMLP, LlamaRMSNorm)}  # replace by the feed-forward and norm classes of your model


class TiledLlama(LlamaForCausalLM):  # replace by your model's class; checkpoints do not change
    def __init__(self, config):
        super().__init__(config)
        for module in self.modules():
            module.__class__ = TILED.get(type(module), type(module))

    def forward(self, input_ids, labels=None, position_ids=None, shift_labels=None, num_items_in_batch=None, **inputs):
        if labels is None or not self.training:
            return super().forward(input_ids, labels=labels, position_ids=position_ids, **inputs)
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **inputs).last_hidden_state
        if shift_labels is None:
            shift_labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        total = TiledFusedLogitsLoss.apply(loss_of, self, hidden, shift_labels, None, -(-hidden.shape[1] // LOSS_TILE), None, "sum")
        return CausalLMOutputWithPast(loss=total / (num_items_in_batch or (shift_labels != -100).sum()))


def loss_of(model, hidden, labels):
    return functional.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")


def build(**shape):
    return TiledLlama(AutoConfig.for_model("llama", use_cache=False, **shape))


def main():
    args = ZeroTrainingArguments(
        output_dir=OUTPUT,
        deepspeed={**BATCH, "zero_optimization": {"stage": 3}, "hf_zero": {"context_parallel_size": 2}},
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"offload": True},  # keeps saved activations on the host; needs transformers 5.17
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        max_steps=60,
        logging_steps=20,
        logging_first_step=True,
        report_to="none",
    )
    tokenizer = ByT5Tokenizer()
    sizes = {"hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 320}
    model = build(vocab_size=len(tokenizer), **sizes)  # for your model: TiledLlama.from_pretrained("...")
    tokens = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0]
    samples = [{"input_ids": block, "labels": block} for block in tokens.split(LENGTH)[:-1]]
    trainer = Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()  # collective: every rank must call it; rank 0 writes the whole weights
    if trainer.is_world_process_zero():
        print(f"Saved: AutoModelForCausalLM.from_pretrained({OUTPUT!r}) loads it.")


if __name__ == "__main__":
    main()
