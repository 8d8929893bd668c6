"""A text-to-image loop like diffusers' examples: a frozen encoder and decoder, a U-Net, its moving average, clipping, saving.

The last line reports losses, norms of the weights and of their average, and the losses of a run that continues from the saved state.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, training_utils
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from transformers import CLIPTextConfig, CLIPTextModel
from transformers.utils import ContextManagers

STEPS, ROWS, BATCH = 4, 32, 2
training_utils.deepspeed = deepspeed  # diffusers 0.42 imports it only if stage 3 is on before its own import, and later needs it


def whole_elsewhere():
    """Return a context in which models that only run forward are built without ZeRO."""
    plugin = AcceleratorState().deepspeed_plugin
    return [] if plugin is None else [plugin.zero3_init_context_manager(enable=False)]


def frozen_models():
    with ContextManagers(whole_elsewhere()):
        size = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
        encoder = CLIPTextModel(CLIPTextConfig(vocab_size=64, max_position_embeddings=8, projection_dim=32, **size))
        decoder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=16)
    return encoder.requires_grad_(False).eval(), decoder.requires_grad_(False).eval()


def unet():
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def rows():
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(ROWS, 3, 16, 16, generator=generator) * 2 - 1
    words = torch.randint(0, 64, (ROWS, 8), generator=generator)
    return [{"pixel_values": image, "input_ids": ids} for image, ids in zip(pixels, words, strict=True)]


def whole(accelerator, model):
    """Return a context in which the model's parameters are whole on every rank."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    noising = DDPMScheduler(num_train_timesteps=100)
    encoder, decoder = frozen_models()
    model = unet()
    model.enable_gradient_checkpointing()
    average = EMAModel(unet().parameters(), decay=0.9, model_cls=UNet2DConditionModel, model_config=model.config)
    average.shadow_params = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2 * accelerator.num_processes)
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    average.to(accelerator.device)
    encoder.to(accelerator.device)
    decoder.to(accelerator.device)

    def run(losses, save=None):
        steps = 0
        generator = torch.Generator().manual_seed(7)
        for batch in loader:
            with accelerator.accumulate(model):
                latents = decoder.encode(batch["pixel_values"]).latent_dist.mode() * decoder.config.scaling_factor
                drawn = torch.randn(latents.shape, generator=generator)
                times = torch.randint(0, 100, (latents.shape[0],), generator=generator)
                noisy = noising.add_noise(latents, drawn, times)
                condition = encoder(batch["input_ids"], return_dict=False)[0]
                predicted = model(noisy, times, condition, return_dict=False)[0]
                loss = torch.nn.functional.mse_loss(predicted.float(), drawn.float(), reduction="mean")
                losses.append(accelerator.gather(loss.detach().repeat(BATCH)).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
                steps += 1
                if save and steps == 2:
                    accelerator.save_state(str(save))
                if steps == STEPS:
                    return

    report = {"losses": [], "again": []}
    run(report["losses"], args.output_dir / "state")
    with whole(accelerator, model):
        report["weights"] = sum(float(param.detach().double().square().sum()) for param in model.parameters()) ** 0.5
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(args.output_dir / "unet")
    report["average"] = sum(float(param.double().square().sum()) for param in average.shadow_params) ** 0.5
    accelerator.wait_for_everyone()
    accelerator.load_state(str(args.output_dir / "state"))
    run(report["again"])
    saved = UNet2DConditionModel.from_pretrained(args.output_dir / "unet")
    report["saved"] = sum(float(param.detach().double().square().sum()) for param in saved.parameters()) ** 0.5
    accelerator.print("REPORT " + json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
