"""Files that a trainer's own ``_save`` writes with safetensors' ``save_model``, and names of weights in saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import StateError
from tests.support import ranks, trainers
from tests.support.checkpoints import on_node


def _own_files(models: Path, folder: Path, stage: int) -> None:
    """Save a layer and the tied model by ``save_model`` on each rank; ranks without gathered weights write nothing."""
    from safetensors.torch import load_file, load_model, save_model
    from transformers import Trainer

    saves = []

    class OwnFiles(Trainer):  # type: ignore[misc]
        def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
            saves.append(output_dir)
            save_model(self.model.transformer.h[0], folder / f"layer{ranks.rank()}.safetensors")
            save_model(self.model, folder / f"model{ranks.rank()}.safetensors")

    with trainers.clean_state():
        args = trainers.arguments(folder, trainers.zero_config(stage), max_steps=1)
        trainer = OwnFiles(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1))
        trainer.train()
        trainer.save_model(str(folder / "out"))
        torch.distributed.barrier()
        assert trainer.model_wrapped.zero_optimization_stage() == stage
        expected = trainers.weights_of(trainer.model)
        calls = trainers.on_every_rank(len(saves))
        assert calls[0] == 1 and calls[1] in (0, 1), calls  # only newer versions of transformers call it on all ranks
        assert (folder / "layer1.safetensors").exists() == (folder / "model1.safetensors").exists() == (stage < 3 and calls[1] == 1)
        found = load_file(folder / "model0.safetensors")
        for name, value in load_file(folder / "layer0.safetensors").items():
            assert torch.equal(value, found[f"transformer.h.0.{name}"])
        tied = {"lm_head.weight", "transformer.wte.weight"}
        for name, value in expected.items():
            assert any(torch.equal(found[other], value) for other in (tied if name in tied else {name}) & found.keys()), name
        if stage < 3:
            assert len(tied & found.keys()) == 1, "tied weights are one tensor of the file"
            with torch.no_grad():
                for param in trainer.model.transformer.h[0].parameters():
                    param.zero_()
            load_model(trainer.model, folder / "model0.safetensors")
            loaded = trainers.weights_of(trainer.model)
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_that_saves_parts_of_its_model(stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_own_files, 2, trainer_models, tmp_path, stage)


def _own_dicts(models: Path, folder: Path) -> None:
    """Save copies of the values that the model's and a layer's ``state_dict()`` have, at a checkpoint and at the end."""
    from safetensors.torch import load_file
    from transformers import Trainer

    class OwnDicts(Trainer):  # type: ignore[misc]
        def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
            if self.args.should_save:
                values = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.model.save_pretrained(output_dir, state_dict=values)
                torch.save(self.model.transformer.h[0].state_dict(), Path(str(output_dir)) / "layer.bin")

    with trainers.clean_state():
        args = trainers.arguments(folder, trainers.zero_config(3), max_steps=2, save_strategy="steps", save_steps=1)
        trainer = OwnDicts(model=trainers.load(models), args=args, train_dataset=trainers.rows(16, 1))
        trainer.train()  # a file without values would make the second step raise
        trainer.save_model(str(folder / "out"))
        torch.distributed.barrier()
        expected = trainers.weights_of(trainer.model)
        expected["lm_head.weight"] = expected["transformer.wte.weight"]
        for name in ("out", "checkpoint-2"):
            saved, layer = load_file(folder / name / "model.safetensors"), torch.load(folder / name / "layer.bin")
            assert saved and all(torch.equal(value, expected[key]) for key, value in saved.items())
            assert layer and all(torch.equal(value, expected[f"transformer.h.0.{key}"]) for key, value in layer.items())
        first = load_file(folder / "checkpoint-1" / "model.safetensors")
        assert first.keys() == saved.keys() and not torch.equal(first["transformer.wte.weight"], expected["transformer.wte.weight"])
        with pytest.raises(StateError, match="state dict has no values"):
            trainer.model.state_dict()["transformer.wte.weight"].sum()  # outside of a save


def test_a_trainer_that_saves_the_state_dict_of_its_model(trainer_models: Path, tmp_path: Path) -> None:
    """FlagEmbedding and adapters save this way."""
    ranks.run_ranks(_own_dicts, 2, trainer_models, tmp_path)


def _names(folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=trainers.VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    with trainers.clean_state():
        if ranks.rank() == 0:
            BertModel(config).save_pretrained(folder / "plain")
        torch.distributed.barrier()
        trainers.forget()
        kept = trainers.arguments(folder, trainers.zero_config(3))
        model = BertModel.from_pretrained(folder / "plain")
        model.save_pretrained(folder / "saved", state_dict=trainers.weights_of(model), is_main_process=ranks.rank() == 0)
        torch.distributed.barrier()
        plain, saved = (load_file(folder / name / "model.safetensors") for name in ("plain", "saved"))
        assert "embeddings.LayerNorm.weight" in plain and plain.keys() == saved.keys()
        assert all(torch.equal(saved[name], value) for name, value in plain.items()) and kept is not None


def test_a_bert_keeps_the_names_of_its_weights(tmp_path: Path) -> None:
    ranks.run_ranks(_names, 2, tmp_path)


class _Plain(torch.nn.Module):
    """A model that is none of transformers', whose own ``save_pretrained`` writes on rank 0 alone."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def _on_nodes(models: Path, folder: Path, stage: int, kind: str) -> None:
    """Save on two nodes of one rank each, which share no disk."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import ProjectConfiguration
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import Trainer

    with trainers.clean_state(), on_node(str(folder), 1):
        config = trainers.zero_config(stage, checkpoint={"use_node_local_storage": True}, train_micro_batch_size_per_gpu=2)
        if kind == "accelerator":
            project = ProjectConfiguration(save_on_each_node=True)
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), project_config=project)
            accelerator.save_model(accelerator.prepare(trainers.load(models)), "saved")
        else:
            args = trainers.arguments(Path("run"), config, max_steps=2, save_strategy="steps", save_steps=2, save_on_each_node=True)
            whole: Any = trainers.load_whole(models, "gpt2")
            whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())  # save_file refuses tied weights
            lora = LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"])
            model: Any = _Plain(whole) if kind == "plain" else get_peft_model(trainers.load(models), lora)
            trainer = Trainer(model=model, args=args, train_dataset=trainers.rows(16, 1))
            trainer.train()
            trainer.save_model("saved")
        torch.distributed.barrier()
        name = "adapter_model.safetensors" if kind == "adapters" else "model.safetensors"
        for where in ("saved",) if kind == "accelerator" else ("run/checkpoint-2", "saved"):
            first, second = (load_file(folder / node / where / name) for node in ("node0", "node1"))
            assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first), where
            assert first and all(value.numel() for value in first.values())
        torch.distributed.barrier()


@pytest.mark.parametrize(("stage", "kind"), [(3, "plain"), (3, "adapters"), (3, "accelerator"), (2, "plain")])
def test_every_node_gets_the_model_where_the_script_asks_for_it(stage: int, kind: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_on_nodes, 2, trainer_models, tmp_path, stage, kind)
