"""Models of diffusers, with the losses that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import Trained, images

UNET: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
DOWN_UP: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
}  # fmt: skip
CROSS: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16, "attention_head_dim": 4,
}  # fmt: skip
LATENT = (8, 4, 8, 8)


class Denoiser(Trained):
    """The noise comes with the batch, so that nothing is drawn."""

    def loss(self, batch: Any) -> Tensor:
        inputs, target = dict(batch["inputs"]), batch["noise"]
        return F.mse_loss(self.model(**inputs).sample, target)


class Diffusion(Trained):
    """DDPM: noise and time are drawn in the step, before the model and for the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)

    def loss(self, batch: Any) -> Tensor:
        noise = torch.randn_like(batch)
        times = torch.randint(0, 50, (len(batch),))
        return F.mse_loss(self.model(self.scheduler.add_noise(batch, noise, times), times).sample, noise)


class Autoencoder(Trained):
    """A reparametrised sample, or the mode, with the divergence from a normal distribution."""

    def __init__(self, model: nn.Module, sample: bool) -> None:
        super().__init__(model)
        self.sample = sample

    def loss(self, batch: Any) -> Tensor:
        posterior = self.model.encode(batch).latent_dist
        decoded = self.model.decode(posterior.sample() if self.sample else posterior.mode()).sample
        return F.mse_loss(decoded, batch) + 1e-3 * posterior.kl().mean()


class Quantised(Trained):
    """VQ: reconstruction, and the commitment loss."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(batch)
        return F.mse_loss(output.sample, batch) + output.commit_loss.mean()


def denoiser(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], by_nature: Nature | None = None, **extra: Any
) -> Entry:
    """The batch has noise of a shape, times, and what ``extra`` makes."""

    def batch() -> dict[str, Any]:
        inputs = {key: value() for key, value in extra.items()}
        return {"inputs": inputs, "noise": torch.randn(shape)}

    return Entry(name, "diffusers", lambda: Denoiser(make()), batch, by_nature=by_nature)


def of(shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def times() -> Tensor:
    return torch.randint(0, 50, (8,))


def kl() -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def vq() -> nn.Module:
    return diffusers.VQModel(
        block_out_channels=(8, 16), norm_num_groups=4, num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def kl_with(sample: bool) -> Callable[[], Trained]:
    return lambda: Autoencoder(kl(), sample)


def unet() -> nn.Module:
    return diffusers.UNet2DModel(**UNET, **DOWN_UP)


def conditional(**settings: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(**UNET, **CROSS, **settings)


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=4, sample_size=8,
        patch_size=2, num_embeds_ada_norm=50, norm_num_groups=4,
    )  # fmt: skip


def pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=4, sample_size=8,
        cross_attention_dim=32, caption_channels=16, norm_num_groups=4, use_additional_conditions=False,
    )  # fmt: skip


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16,
        pos_embed_max_size=8,
    )  # fmt: skip


ENTRIES = (
    denoiser("unet", unet, (8, 3, 8, 8), sample=of((8, 3, 8, 8)), timestep=times),
    Entry("unet, ddpm", "diffusers", lambda: Diffusion(unet()), lambda: images(8), by_nature=Nature.DRAWS),
    denoiser(
        "unet, conditional", conditional, LATENT, sample=of(LATENT), timestep=times,
        encoder_hidden_states=of((8, 5, 16)),
    ),
    denoiser(
        "dit, dropped classes", dit, LATENT, Nature.DRAWS, hidden_states=of(LATENT), timestep=times,
        class_labels=lambda: torch.randint(0, 50, (8,)),
    ),
    denoiser(
        "pixart", pixart, LATENT, hidden_states=of(LATENT), timestep=times, encoder_hidden_states=of((8, 5, 16)),
    ),
    denoiser(
        "stable diffusion 3", sd3, LATENT, hidden_states=of(LATENT), timestep=times,
        encoder_hidden_states=of((8, 5, 16)), pooled_projections=of((8, 16)),
    ),
    Entry("kl autoencoder", "diffusers", kl_with(sample=False), lambda: images(16)),
    Entry("kl autoencoder, sampled", "diffusers", kl_with(sample=True), lambda: images(16), by_nature=Nature.DRAWS),
    Entry("vq autoencoder", "diffusers", lambda: Quantised(vq()), lambda: images(16)),
)  # fmt: skip
