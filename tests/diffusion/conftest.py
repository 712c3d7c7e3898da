from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import problem


def _diffusers():
    return pytest.importorskip("diffusers", reason="diffusers is not installed: pip install deeppcr[diffusers]")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    """Denoisers that a test before has had checked are checked again, and their runs are the first of their kind."""
    for kept in ("_by_themselves", "_roundings"):
        monkeypatch.setattr(problem, kept, WeakKeyDictionary())
    deeppcr.clear_caches()


@pytest.fixture(scope="module")
def net(device):
    """A denoiser of digits."""
    from diffusion import digits  # which needs scikit-learn

    return digits.trained().to(device)


_SMALL = {
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    """Of diffusers, and small."""
    diffusers = _diffusers()
    torch.manual_seed(3)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    of_blocks = {"down_block_types": down, "up_block_types": up}
    return diffusers.UNet2DModel(in_channels=1, out_channels=1, **of_blocks, **_SMALL).eval()


@pytest.fixture(scope="module")
def conditional() -> nn.Module:
    """The same, of one that is told of prompts."""
    diffusers = _diffusers()
    torch.manual_seed(4)
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    of_blocks = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": 6}
    return diffusers.UNet2DConditionModel(in_channels=2, out_channels=2, **of_blocks, **_SMALL).eval()


@pytest.fixture(scope="module")
def vae() -> nn.Module:
    diffusers = _diffusers()
    torch.manual_seed(5)
    return diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=2, block_out_channels=(8,), norm_num_groups=4
    ).eval()
