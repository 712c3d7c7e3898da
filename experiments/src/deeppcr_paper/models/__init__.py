"""The paper's diffusion models (appendix E): autoencoder, residual MLP, UNet.

A denoiser is called ``denoiser(z, t)`` or ``denoiser(z, t, classes)`` with z [rows, *shape], t [rows], classes [rows], and
predicts the noise in z. These networks are told the noise level on a scale that does not depend on the number of steps
(`time_of`), so one that is trained once serves every L: `AtSteps` makes it a denoiser of the steps of one schedule.
"""

from .autoencoder import Autoencoder, Decoder, Discriminator, Encoder
from .mlp import ResidualMLP
from .time import AtSteps, signal_at, time_of
from .unet import UNet

__all__ = [
    "AtSteps",
    "Autoencoder",
    "Decoder",
    "Discriminator",
    "Encoder",
    "ResidualMLP",
    "UNet",
    "signal_at",
    "time_of",
]
