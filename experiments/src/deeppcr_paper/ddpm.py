"""A denoiser of real size: the UNet of google/ddpm-cifar10-32, of diffusers, trained here for a given time.

Shapes: N images [N, channels, side, side], from -1 to 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deeppcr.diffusion import Schedule

from . import tensor_files
from .store import PaperError

#: Noise levels that it is trained on, as DDPM has them.
LEVELS = 1000
#: Steps over which the rate rises; after that it falls to a twentieth, in proportion to the time.
_WARM_UP, _LAST = 100, 0.05


class Denoiser(nn.Module):
    """A model of diffusers as ``denoiser(z, t)``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return self.model(z, t, return_dict=False)[0]


def unet(side: int, channels: int, base: int) -> Denoiser:
    """With 128 channels at its first level and images of 3 x 32 x 32 it has 35.7 million parameters.

    Args:
        base: channels of the first level; the others have twice as many
    """
    try:
        from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise PaperError("ddpm-cifar10: needs diffusers: pip install diffusers") from None
    levels = 4 if side >= 32 else 2
    attends = [level == 1 for level in range(levels)]
    model = UNet2DModel(
        sample_size=side,
        in_channels=channels,
        out_channels=channels,
        down_block_types=tuple("AttnDownBlock2D" if each else "DownBlock2D" for each in attends),
        up_block_types=tuple("AttnUpBlock2D" if each else "UpBlock2D" for each in reversed(attends)),
        block_out_channels=(base, *[2 * base] * (levels - 1)),
        layers_per_block=2 if base > 32 else 1,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        attention_head_dim=None,
        norm_num_groups=min(32, base // 2),
        norm_eps=1e-6,
    )
    return Denoiser(model)


def trained(
    network: nn.Module,
    images: Tensor,
    seconds: float,
    *,
    batch: int,
    rate: float,
    seed: int,
    path: Path | None = None,
    told: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Train for so many seconds in bfloat16, or load what was; what came of it.

    Args:
        network: is called with [N, ...] and N levels of noise
        images: or vectors, [N, size]
        path: where the network is kept; None: nowhere
        told: is told the share of the time that is over
    """
    if path is not None and path.exists():
        tensors, texts = tensor_files.load(path)
        network.load_state_dict(tensors)
        network.eval().requires_grad_(False)
        return {"steps": int(texts["steps"]), "seconds": float(texts["seconds"]), "loss": float(texts["loss"])}
    device = images.device
    # Convolutions in half precision are several times faster with the channels last.
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    shares = Schedule.linear(LEVELS).alphas_bar.to(device, torch.float32)
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(seed)
    losses: list[float] = []
    number, begun, over, loss = 0, time.monotonic(), 0.0, images.new_zeros(())
    with torch.enable_grad():
        while over < 1:
            x = images[torch.randint(len(images), (batch,), generator=generator, device=device)]
            each = (batch,) + (1,) * (x.dim() - 1)
            if x.dim() == 4:
                flipped = torch.rand(each, generator=generator, device=device) < 0.5
                x = torch.where(flipped, x.flip(-1), x).contiguous(memory_format=torch.channels_last)
            level = torch.randint(LEVELS, (batch,), generator=generator, device=device)
            noise = torch.randn(x.shape, generator=generator, device=device)
            share = shares[level].view(each)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found = network(share.sqrt() * x + (1 - share).sqrt() * noise, level)
            loss = functional.mse_loss(found.float(), noise)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1, (number + 1) / _WARM_UP) * max(_LAST, 1 - over)
            optimiser.step()
            number += 1
            if number % 10 == 0:
                losses.append(loss.item())  # waits for the device, so that the clock is right
                told(over)
            over = (time.monotonic() - begun) / seconds
    network.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    network.eval().requires_grad_(False)
    last = losses[-20:] or [loss.item()]
    record = {"steps": number, "seconds": time.monotonic() - begun, "loss": sum(last) / len(last)}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensor_files.save(path, network.state_dict(), {name: str(value) for name, value in record.items()})
    return record
