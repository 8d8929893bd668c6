"""Models under stage 3: loads that find too little stop, heads and embeddings grow, weights are converted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, trainers
from tests.support.logged import messages_of_log


def _stage_3(folder: Path) -> Any:
    """Training arguments that switch stage 3 on, as a script makes them before its model."""
    trainers.forget()
    return trainers.arguments(folder, trainers.zero_config(3))


def _wrong_names(models: Path, folder: Path, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    from hf_zero.errors import StateError

    if ranks.rank() == 0:
        folder.mkdir(exist_ok=True)
        values = {f"{prefix}.{name}": value for name, value in load_file(models / "llama" / "model.safetensors").items()}
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text((models / "llama" / "config.json").read_text())
    torch.distributed.barrier()
    with trainers.clean_state():
        kept = _stage_3(folder)
        text = trainers.error_of(lambda: trainers.load(folder, "."))
        assert text.startswith(StateError.__name__) and "0 of" in text and "prefix" in text and "model.embed_tokens.weight" in text, text
        trainers.load(models, "llama")
        assert kept is not None


def test_a_load_that_finds_nothing_stops(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_wrong_names, 2, trainer_models, tmp_path / "wrong", "_orig_mod.inner")


def _unfit_weights_may_pass(models: Path, folder: Path) -> None:
    """A new head on a loaded body is no failure; nor is a load the user allows."""
    from transformers import AutoModelForSequenceClassification
    from transformers.testing_utils import CaptureLogger, LoggingLevel
    from transformers.utils import logging as transformers_logging

    with trainers.clean_state():
        kept = _stage_3(folder)
        with LoggingLevel(logging.INFO), CaptureLogger(transformers_logging.get_logger("transformers.modeling_utils")) as lines:
            model = AutoModelForSequenceClassification.from_pretrained(models / "llama", num_labels=3)
            AutoModelForSequenceClassification.from_config(model.config)
        assert lines.out.count("Detected DeepSpeed ZeRO-3") == 2, lines.out  # the library's line for models built as shards
        weights = trainers.weights_of(model)
        body = trainers.load_whole(models, "llama").model.state_dict()
        assert all(torch.equal(weights[f"model.{name}"], value) for name, value in body.items())
        heads = trainers.on_every_rank(weights["score.weight"].tolist())
        assert heads[0] == heads[1], "the new head differs between the ranks"
        assert 0 < weights["score.weight"].std() < 0.1, "the new head is not initialised as transformers does"
        assert kept is not None


def test_new_heads_are_equal_on_all_ranks(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_unfit_weights_may_pass, 2, trainer_models, tmp_path)


def _resize(models: Path, folder: Path, name: str) -> None:
    """Growing the embeddings keeps rows and ties; then one step trains and the model is saved with the new size."""
    from transformers import Trainer

    with trainers.clean_state():
        args = _stage_3(folder)
        model = trainers.load(models, name)
        before = trainers.weights_of(model)
        key = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}[name]
        model.resize_token_embeddings(trainers.VOCAB + 8, mean_resizing=False)
        after = trainers.weights_of(model)
        assert after[key].shape[0] == trainers.VOCAB + 8
        assert torch.equal(after[key][: trainers.VOCAB], before[key])
        rows = trainers.on_every_rank(after[key].tolist())
        assert rows[0] == rows[1], "the new rows differ between the ranks"
        tied = name == "gpt2"
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        args.max_steps = 1
        trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(8, 1))
        trainer.train()
        trainer.save_model(str(folder / "final"))
        torch.distributed.barrier()
        saved = trainers.load_whole(folder, "final")
        assert saved.get_input_embeddings().weight.shape[0] == trainers.VOCAB + 8
        assert (saved.get_output_embeddings().weight is saved.get_input_embeddings().weight) == tied


@pytest.mark.fast_rows("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_resized_embeddings(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_resize, 2, trainer_models, tmp_path, name)


def _shrink(models: Path, folder: Path) -> None:
    """Make the vocabulary smaller as example scripts of transformers do where ``weight.shape[0]`` is 0, and as a script that means it."""
    with trainers.clean_state():
        kept = _stage_3(folder)
        model, tokens = trainers.load(models, "llama"), trainers.VOCAB - 3
        with messages_of_log() as messages:
            if tokens > model.get_input_embeddings().weight.shape[0]:
                model.resize_token_embeddings(tokens)
            model.resize_token_embeddings(tokens)  # changes nothing
            model.resize_token_embeddings(trainers.VOCAB, mean_resizing=False)
        found = [text for text in messages if "resize_token_embeddings" in text]
        assert len(found) == (ranks.rank() == 0), messages
        assert not found or f"it had {trainers.VOCAB} and has {tokens} now" in found[0] and "vocab_size" in found[0], found
        assert kept is not None


def test_a_vocabulary_that_shrinks_because_its_size_is_hidden_gives_one_warning(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_shrink, 2, trainer_models, tmp_path)


def _resized(model: Any, tokens: int | None, pad: int | None) -> dict[str, Any]:
    """Return the weights of a frozen model with another vocabulary, the parameters that train, and the next random number."""
    model.requires_grad_(False)
    torch.manual_seed(3)
    model.resize_token_embeddings(tokens, pad_to_multiple_of=pad, mean_resizing=False)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    return {"next": torch.rand(1), "trained": trained, "rows": model.config.vocab_size} | trainers.weights_of(model)


def _resize_as_in_plain_pytorch(models: Path, folder: Path, name: str) -> None:
    sizes = [
        (trainers.VOCAB, None),
        (trainers.VOCAB + 8, None),
        (trainers.VOCAB - 3, None),
        (None, 128),
        (trainers.VOCAB - 1, trainers.VOCAB),
    ]
    with trainers.clean_state():
        expected = [_resized(trainers.load(models, name), *size) for size in sizes]
        kept = _stage_3(folder)
        for size, plain in zip(sizes, expected, strict=True):
            found = _resized(trainers.load(models, name), *size)
            assert found["trained"] == plain["trained"] == [], (size, found["trained"])
            different = [key for key, value in plain.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(found[key]))]
            assert not different and found.keys() == plain.keys(), (size, different)
        assert kept is not None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_resized_frozen_embeddings_equal_those_of_plain_pytorch(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_resize_as_in_plain_pytorch, 2, trainer_models, tmp_path, name)


def _converted_weights(folder: Path) -> None:
    """Experts that a checkpoint holds one by one and transformers 5 fuses: the same values as a plain load, and as a saved model."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer

    config = MixtralConfig(
        vocab_size=trainers.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with trainers.clean_state():
        if ranks.rank() == 0:
            torch.manual_seed(1)
            MixtralForCausalLM(config).save_pretrained(folder / "moe")
        torch.distributed.barrier()
        expected = dict(AutoModelForCausalLM.from_pretrained(folder / "moe").named_parameters())
        args = _stage_3(folder)
        model = AutoModelForCausalLM.from_pretrained(folder / "moe")
        found = trainers.weights_of(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        args.max_steps = 1
        trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(8, 1))
        trainer.train()
        trainer.save_model(str(folder / "final"))
        torch.distributed.barrier()
        trained = trainers.weights_of(model)
        trainers.forget()
        saved = dict(AutoModelForCausalLM.from_pretrained(folder / "final").named_parameters())
        assert all(torch.equal(saved[name], value) for name, value in trained.items())


def test_converted_weights(tmp_path: Path) -> None:
    ranks.run_ranks(_converted_weights, 2, tmp_path)


def _built_too_early() -> list[str]:
    import hf_zero
    from hf_zero import observe
    from hf_zero.observe import logger

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    observe._warned.clear()
    try:
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 256))  # 68 MiB
            hf_zero.initialize(model=model, config=trainers.zero_config(3) | {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2})
    finally:
        logger.removeHandler(handler)
    return [text for text in messages if "whole on every rank. To load only a shard" in text]


def test_a_large_model_built_too_early_is_told_once() -> None:
    first, second = ranks.run_ranks(_built_too_early, 2)
    assert len(first) == 1 and "TrainingArguments" in first[0] and not second


def _without_counters(folder: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    from tests.support import senses
    from tests.support.parity import Run
    from tests.support.zero3 import transformers_zero3, whole_parameters

    name = "ResNetForImageClassification"
    plain: Any = senses.build(name)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
    if ranks.rank() == 0:
        plain.save_pretrained(folder)
        values = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in values.items() if not name.endswith("num_batches_tracked")}
        assert len(kept) < len(values)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    with transformers_zero3(Run(3)):
        model = getattr(transformers, name).from_pretrained(folder)
    for name, value in whole_parameters(model).items():
        assert torch.equal(value.cpu(), plain.get_parameter(name)), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name).cpu(), buffer), name
    assert not any("_load_from_state_dict" in vars(module) for module in model.modules())


def test_a_checkpoint_without_counters_of_batch_norms_loads(tmp_path: Path) -> None:
    ranks.run_ranks(_without_counters, 2, tmp_path / "resnet")


def _with_parametrizations(folder: Path) -> None:
    import transformers

    from hf_zero.core.units.unit import find_unit
    from tests.support import senses
    from tests.support.parity import Run
    from tests.support.zero3 import transformers_zero3, whole_parameters

    name = "Wav2Vec2ForCTC"
    plain: Any = senses.build(name)
    if ranks.rank() == 0:
        plain.save_pretrained(folder)
    torch.distributed.barrier()
    with transformers_zero3(Run(3)):
        model = getattr(transformers, name).from_pretrained(folder)
    whole = [name for name, param in model.named_parameters() if find_unit(param) is None]
    assert whole and all("parametrizations" in name for name in whole), "no unit shards them, and rank 0 alone loads them"
    for name in whole:
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name
    for name, value in whole_parameters(model).items():
        assert torch.equal(value.cpu(), plain.get_parameter(name)), name


def test_originals_of_parametrizations_are_loaded_on_all_ranks(tmp_path: Path) -> None:
    ranks.run_ranks(_with_parametrizations, 2, tmp_path / "wav2vec2")


def test_buffers_that_transformers_does_not_load_are_loaded() -> None:
    """Before 5.15 transformers loads buffers on rank 0 only, and reports the other ranks' as missing, so that they would be drawn."""
    from hf_zero.errors import StateError
    from hf_zero.integrations.loading import fill_sharded

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    model.register_buffer("table", torch.zeros(3), persistent=False)
    model.base_model_prefix = "0"
    state = {name: torch.randn(value.shape).to(value.dtype) for name, value in model.state_dict().items()}
    wanted = {**state, "table": torch.zeros(3)}
    missing = {"1.running_mean", "table", "head.weight"}
    assert fill_sharded(lambda *_: ([], missing), model, state, None) == ([], {"table", "head.weight"})
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, wanted[name]), name
    with pytest.raises(StateError, match=r"did not load 1 weights at stage 3 that the checkpoint has.*: 0\.bias\. Version 5\.0\.0"):
        fill_sharded(lambda *_: ([], {"0.bias", "head.weight"}), model, state, None)


def _with_own_buffers(models: Path, folder: Path) -> None:
    """A class of a script, as of OpenRLHF's reward models: only its constructor gives its buffers values."""
    from transformers import LlamaForCausalLM

    class Scored(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
            self.register_buffer("std", torch.full((2,), 3.0) + 0 * torch.rand(2), persistent=False)
            self.register_buffer("kept", torch.ones(2))
            self.post_init()

    with trainers.clean_state():
        torch.manual_seed(5)
        plain = Scored.from_pretrained(models / "llama")
        state = torch.get_rng_state()
        kept = _stage_3(folder)
        torch.manual_seed(5)
        model = Scored.from_pretrained(models / "llama")
        assert torch.equal(torch.get_rng_state(), state)
        assert model.std.tolist() == [3.0, 3.0] and model.kept.tolist() == [1.0, 1.0]
        found = trainers.weights_of(model)
        assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())
        del kept


def test_buffers_of_a_class_of_the_script_have_the_values_of_its_constructor(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_with_own_buffers, 2, trainer_models, tmp_path)


def _as_transformers_5_2_0(models: Path, folder: Path) -> None:
    """The names of shared weights, which 5.2.0 finds by the addresses of the values in the state dict."""
    from transformers import LlamaForCausalLM, PreTrainedModel

    def adjust(model: Any, missing: list[str]) -> None:
        raise AssertionError([value.data_ptr() for value in model.state_dict().values()])

    def finish(model: Any, *args: Any, **kwargs: Any) -> Any:
        model._adjust_tied_keys_with_tied_pointers([])
        return finalize(model, *args, **kwargs)

    class Twice(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.again = self.model.layers[0].mlp.up_proj

    finalize, patch, weight = PreTrainedModel._finalize_model_loading, pytest.MonkeyPatch(), "model.layers.0.mlp.up_proj.weight"
    expected = trainers.load_whole(models, "llama").get_parameter(weight)
    with trainers.clean_state(), patch.context() as patches:
        patches.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(finish))
        patches.setattr(PreTrainedModel, "_adjust_tied_keys_with_tied_pointers", adjust, raising=False)
        kept = _stage_3(folder)
        model = Twice.from_pretrained(models / "llama")
        assert model.all_tied_weights_keys == {"again.weight": weight}
        assert "_adjust_tied_keys_with_tied_pointers" not in vars(model)
        assert torch.equal(trainers.weights_of(model)[weight], expected)
        del kept


def test_shared_weights_as_transformers_5_2_0_looks_for_them(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_as_transformers_5_2_0, 2, trainer_models, tmp_path)
