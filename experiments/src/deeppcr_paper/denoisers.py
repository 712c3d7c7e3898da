"""The paper's diffusion models, trained: what an experiment asks for is loaded, or trained first.

Latent models: an autoencoder for each width, then a residual MLP on its whitened latents. Pixel models: a UNet on images
that are pooled to few pixels. Batches are drawn with replacement; an epoch is 60,000 images whatever the data set, so a small
one is gone through more often and gets as many steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import models
from .experiment import Context
from .pictures import Pictures, pictures
from .settings import setting
from .store import PaperError, as_json
from .trainer import Trainer, adamw

T = TypeVar("T")

EPOCH = 60_000
#: Weights of the divergence to the normal distribution and of the discriminator in the autoencoder's loss (appendix E).
DIVERGENCE, ADVERSARY = 1e-6, 0.5
#: So much of a conditional network's training is without classes, which guidance needs.
NO_CLASS = 0.1


@dataclass(frozen=True)
class Preset:
    """How long, and how large. The defaults are the paper's.

    Attributes:
        autoencoder_batch, autoencoder_epochs, autoencoder_rate: the rate is the discriminator's; the generator's is twice that
        base, code: channels of the autoencoder's first layer, and the width of its linear layer
        hidden: width of the residual MLP
        channels: of the UNet's first level
    """

    autoencoder_batch: int = 4096
    autoencoder_epochs: float = 400
    autoencoder_rate: float = 1e-4
    latent_batch: int = 4096
    latent_epochs: float = 400
    latent_rate: float = 1e-4
    pixel_batch: int = 512
    pixel_epochs: float = 500
    pixel_rate: float = 1e-4
    base: int = 16
    code: int = 256
    hidden: int = 2048
    channels: int = 16


PRESETS = {
    "paper": Preset(),
    "short": Preset(
        autoencoder_batch=1024,
        autoencoder_epochs=24,
        autoencoder_rate=5e-4,
        latent_epochs=170,
        latent_rate=3e-4,
        pixel_epochs=34,
        pixel_rate=1e-3,
    ),
    "quick": Preset(
        autoencoder_batch=128,
        autoencoder_epochs=0.4,
        autoencoder_rate=3e-3,
        latent_batch=256,
        latent_epochs=1.2,
        latent_rate=2e-3,
        pixel_batch=128,
        pixel_epochs=0.15,
        pixel_rate=8e-3,
        base=4,
        code=64,
        hidden=96,
        channels=4,
    ),
}


@dataclass
class Model:
    """A trained denoiser with what belongs to it. States are latents, or images.

    Attributes:
        network: predicts noise from states and times in [0, 1]
        train, test: [N, *shape], the states of the images
        labels: [N], of ``train``
        classes: how many the network takes; None where it takes none
        white: whether the states have mean 0 and covariance 1
        decode: states to images [N, channels, side, side] in [-1, 1]
        training: what is to be known of the training: curves and seconds, by network
    """

    network: nn.Module
    train: Tensor
    labels: Tensor
    test: Tensor
    classes: int | None
    white: bool
    decode: Callable[[Tensor], Tensor]
    training: dict[str, Any]

    @property
    def shape(self) -> torch.Size:
        return self.train.shape[1:]

    @property
    def mean(self) -> Tensor:
        """Of the training set, [*shape]."""
        return self.train.mean(0)

    @property
    def class_means(self) -> Tensor:
        """Of every class of the training set, [classes, *shape]."""
        assert self.classes is not None
        return torch.stack([self.train[self.labels == label].mean(0) for label in range(self.classes)])


@dataclass(frozen=True)
class TrainingSettings:
    """What models are trained on, and how: settings of every experiment that samples them.

    Attributes:
        training: "paper" trains as long as the paper does, more than an hour in all; "short" under a minute a network, on a GPU;
            "quick" seconds on a CPU
        train, test: how many images; None for all
    """

    training: str = setting("short", choices=PRESETS)
    train: int | None = None
    test: int | None = None
    seed: int = 0

    @property
    def preset(self) -> Preset:
        return PRESETS[self.training]

    def pictures(self, data: str, context: Context) -> Pictures:
        """On the device; read once a run."""

        def read() -> Pictures:
            return pictures(data, context.data_dir).first(self.train, self.test).to(context.device)

        return _once(context, f"pictures {data}", read)


def latent_model(settings: TrainingSettings, data: str, width: int, context: Context) -> Model:
    """The residual MLP on latents of so many numbers."""

    def make() -> Model:
        images, preset, seed = settings.pictures(data, context), settings.preset, settings.seed
        about = _about(settings, data, images, width=width)
        sizes = {"channels": images.channels, "side": images.side, "base": preset.base, "hidden": preset.code}
        autoencoder, first = _trained(
            lambda: Autoencoding(models.Autoencoder(width, **sizes).to(context.device), images.train, preset),
            {**about, "kind": "autoencoder"},
            context,
        )
        train, test = (_encode(autoencoder, each, seed) for each in (images.train, images.test))
        rates = (preset.latent_batch, preset.latent_epochs, preset.latent_rate)
        hidden, embedding = preset.hidden, min(256, preset.hidden)
        network, second = _trained(
            lambda: Denoising(models.ResidualMLP(width, hidden=hidden, embedding=embedding), train, *rates),
            {**about, "kind": "latent"},
            context,
        )
        decode, training = torch.no_grad()(autoencoder.decode), {"autoencoder": first, "denoiser": second}
        return Model(network, train, images.train_labels, test, None, True, decode, training)

    return _once(context, f"latent {data} {width}", make)


def pixel_model(settings: TrainingSettings, data: str, side: int, conditional: bool, context: Context) -> Model:
    """The UNet on images pooled to so many pixels a side."""

    def make() -> Model:
        images, preset = settings.pictures(data, context).pooled(side), settings.preset
        train, labels, classes = images.train, images.train_labels, images.classes if conditional else None
        about = _about(settings, data, images, side=side, conditional=conditional, kind="pixel")
        unet = partial(models.UNet, images.channels, base=preset.channels, classes=classes)
        rates = (preset.pixel_batch, preset.pixel_epochs, preset.pixel_rate)
        network, training = _trained(lambda: Denoising(unet(), train, *rates, labels, classes), about, context)
        return Model(network, train, labels, images.test, classes, False, lambda z: z, {"denoiser": training})

    return _once(context, f"pixel {data} {side} {conditional}", make)


def _once(context: Context, key: str, make: Callable[[], T]) -> T:
    """What cells share is made for the first that asks for it."""
    if key not in context.cache:
        context.cache[key] = make()
    return context.cache[key]


class Autoencoding:
    """Training of encoder and decoder against a discriminator."""

    losses = ("reconstruction", "divergence", "score", "discriminator")

    def __init__(self, autoencoder: models.Autoencoder, images: Tensor, preset: Preset):
        self.autoencoder, self.images, self.batch = autoencoder, images, preset.autoencoder_batch
        autoencoder.begin_at(images)
        self.adversary = models.Discriminator(channels=images.shape[1], base=preset.base).to(images.device)
        self.modules: dict[str, nn.Module] = {"network": autoencoder, "discriminator": self.adversary}
        rate = preset.autoencoder_rate
        self.optimisers = {"generator": adamw(autoencoder, 2 * rate), "discriminator": adamw(self.adversary, rate)}
        self.number_of_steps = _steps(preset.autoencoder_epochs, self.batch)

    def step(self, generator: torch.Generator) -> Tensor:
        x = self.images[_batch(len(self.images), self.batch, generator)]
        mean, log_variance = self.autoencoder.encoder(x)
        noise = torch.randn(mean.shape, generator=generator, device=x.device)
        found = self.autoencoder.decoder(mean + torch.exp(log_variance / 2) * noise)
        reconstruction = (found - x).square().sum((1, 2, 3)).mean()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        self.adversary.requires_grad_(False)
        score = self.adversary(found).mean()
        # The paper's formula adds the discriminator's score: with a score that is high for real images it is subtracted.
        _descend(self.optimisers["generator"], reconstruction + DIVERGENCE * divergence - ADVERSARY * score)
        self.adversary.requires_grad_(True)
        hinge = torch.relu(1 - self.adversary(x)).mean() + torch.relu(1 + self.adversary(found.detach())).mean()
        _descend(self.optimisers["discriminator"], hinge)
        return torch.stack([reconstruction, divergence, score, hinge]).detach()

    def finish(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            x = self.images[:4096]
            missed = (self.autoencoder.decoder(self.autoencoder.encoder(x)[0]) - x).square().sum()
        if not missed < (x - x.mean((0, 2, 3), keepdim=True)).square().sum():
            # Whatever is sampled in such latents says nothing of images, however fast it is.
            raise PaperError(
                "the autoencoder has learnt nothing: its images are no closer to the data than grey ones; try another --seed"
            )
        self.autoencoder.fit_scale(self.images, generator)


class Denoising:
    """Training of a network to find the noise in states, at all noise levels; with classes, where it takes them."""

    losses = ("noise",)

    def __init__(
        self,
        network: nn.Module,
        states: Tensor,
        batch: int,
        epochs: float,
        rate: float,
        labels: Tensor | None = None,
        classes: int | None = None,
    ):
        self.network, self.states, self.batch = network.to(states.device), states, batch
        self.labels, self.classes = labels, classes
        self.modules, self.optimisers = {"network": self.network}, {"network": adamw(self.network, rate)}
        self.number_of_steps = _steps(epochs, batch)

    def step(self, generator: torch.Generator) -> Tensor:
        picked = _batch(len(self.states), self.batch, generator)
        z, more = self.states[picked], ()
        times = torch.rand(self.batch, generator=generator, device=z.device)
        noise = torch.randn(z.shape, generator=generator, device=z.device)
        if self.classes is not None:
            assert self.labels is not None
            dropped = torch.rand(self.batch, generator=generator, device=z.device) < NO_CLASS
            more = (self.labels[picked].masked_fill(dropped, self.classes),)
        signal = models.signal_at(times).reshape(-1, *[1] * (z.ndim - 1))
        loss = functional.mse_loss(self.network(signal.sqrt() * z + (1 - signal).sqrt() * noise, times, *more), noise)
        _descend(self.optimisers["network"], loss)
        return loss.detach().unsqueeze(0)

    def finish(self, generator: torch.Generator) -> None:
        """There is nothing left to do."""


def _trained(make: Callable[[], Any], about: dict[str, Any], context: Context) -> tuple[Any, dict[str, Any]]:
    """The network of what is made, Autoencoding or Denoising, ready to be used, and the record of its training."""
    about, seed = as_json(about), about["seed"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # on the CPU: the same network on every device
        task = make()
    generator = torch.Generator(context.device).manual_seed(seed)
    step, finish = partial(task.step, generator), partial(task.finish, generator)
    trainer = Trainer(
        about, task.modules, task.optimisers, generator, task.losses, step, task.number_of_steps, finish=finish
    )
    record = trainer.run(context, _path(context.models, about))
    return task.modules["network"].eval().requires_grad_(False), record


def _path(folder: Path | None, about: dict[str, Any]) -> Path | None:
    """Named by what it is, and by all settings in a few letters."""
    if folder is None:
        return None
    words = [str(about[name]) for name in ("kind", "data", "width", "side") if name in about]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"{re.sub(r'[^a-z0-9-]+', '-', '-'.join(words))}-{digest}.safetensors"


def _about(settings: TrainingSettings, data: str, images: Pictures, **more: Any) -> dict[str, Any]:
    return {"data": data, "images": len(images.train), "seed": settings.seed, **more, **asdict(settings.preset)}


@torch.no_grad()
def _encode(autoencoder: models.Autoencoder, images: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(images.device).manual_seed(seed)
    return torch.cat([autoencoder.encode(part, generator) for part in images.split(4096)])


def _steps(epochs: float, batch: int) -> int:
    return max(round(epochs * EPOCH / batch), 1)


def _batch(images: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(images, (count,), generator=generator, device=generator.device)


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
