"""The paper's networks: their shapes, that they can be differentiated in every way, and that a time means a noise level."""

import pytest
import torch
from torch.func import jacfwd, jacrev, vmap

from deeppcr_paper import models


def networks(classes=None):
    return {
        "mlp": (models.ResidualMLP(6, hidden=32, embedding=8, classes=classes), (6,)),
        "unet": (models.UNet(2, base=4, embedding=8, classes=classes), (2, 8, 8)),
    }


@pytest.mark.parametrize("name", ["mlp", "unet"])
@pytest.mark.parametrize("classes", [None, 10])
def test_a_denoiser_depends_on_its_row_alone(name, classes):
    network, shape = networks(classes)[name]
    network = network.double().eval()
    z, t = torch.randn(4, *shape, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    more = () if classes is None else (torch.tensor([0, 3, 9, 10]),)
    found = network(z, t, *more)
    assert found.shape == z.shape
    for row in range(4):
        alone = network(z[row : row + 1], t[row : row + 1], *(each[row : row + 1] for each in more))
        assert torch.allclose(alone[0], found[row], rtol=1e-12)
    assert not torch.allclose(network(z, t.flip(0), *more), found)  # the time counts
    if classes is not None:
        assert not torch.allclose(network(z, t, more[0].flip(0)), found)


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_jacobians_of_all_rows_by_both_modes(name):
    network, shape = networks()[name]
    network = network.double().eval().requires_grad_(False)
    z, t = torch.randn(3, *shape, dtype=torch.float64), torch.rand(3, dtype=torch.float64)

    def one(z, t):
        return network(z[None], t[None])[0]

    forward = vmap(jacfwd(one))(z, t)
    assert torch.allclose(forward, vmap(jacrev(one))(z, t), rtol=1e-9, atol=1e-12)
    direction, step = torch.randn_like(z), 1e-6
    numeric = (network(z + step * direction, t) - network(z - step * direction, t)) / (2 * step)
    exact = torch.einsum("nij,nj->ni", forward.reshape(3, z[0].numel(), -1), direction.flatten(1)).reshape(z.shape)
    assert torch.allclose(exact, numeric, rtol=1e-4, atol=1e-6)


def test_a_network_says_whether_it_takes_classes():
    z, t, classes = torch.zeros(2, 6), torch.zeros(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="unconditional"):
        networks()["mlp"][0](z, t, classes)
    with pytest.raises(ValueError, match="10 says no class"):
        networks(10)["mlp"][0](z, t)
    with pytest.raises(ValueError, match="sides that 4 divides"):
        models.UNet()(torch.zeros(1, 1, 6, 6), t[:1])


def test_the_sizes_of_the_tables():
    mlp = models.ResidualMLP(16)
    assert [layer.weight.shape for layer in mlp.layers] == [(2048, 2048)] * 6
    unet = models.UNet()
    assert [tuple(layer.weight.shape[:2]) for layer in unet.shrink] == [(32, 16), (64, 32)]
    assert [tuple(layer.weight.shape[:2]) for layer in unet.grow] == [(32, 64), (16, 32)]
    autoencoder = models.Autoencoder(16)
    assert autoencoder.encoder.layers[9].in_features == 2048  # 4 x 4 x 128
    assert autoencoder.decoder.layers[1].out_features == 2048


@pytest.mark.parametrize("side", [4, 8, 16, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_autoencoders_of_every_size(side, channels):
    autoencoder = models.Autoencoder(5, channels=channels, side=side, base=4, hidden=16)
    images = torch.randn(7, channels, side, side)
    assert autoencoder.encode(images).shape == (7, 5)
    assert autoencoder.decode(torch.randn(7, 5)).shape == images.shape
    assert models.Discriminator(channels=channels, base=4)(images).shape == (7,)


def test_dark_pixels_can_be_decoded():
    decoder = models.Decoder(5, base=4)
    assert decoder(10 * torch.randn(50, 5)).min() < 0


@pytest.mark.parametrize("side", [2, 12, 64])
def test_sides_that_do_not_fit(side):
    with pytest.raises(ValueError, match=f"got {side}"):
        models.Encoder(5, side=side)


def test_latents_are_whitened_and_come_back():
    autoencoder = models.Autoencoder(6, side=8, base=4, hidden=16)
    images = torch.randn(500, 1, 8, 8)
    plain = autoencoder.encode(images)
    before = autoencoder.decode(plain)
    autoencoder.fit_scale(images, torch.Generator().manual_seed(1))
    drawn = autoencoder.encode(images, torch.Generator().manual_seed(1))
    assert torch.allclose(drawn.mean(0), torch.zeros(6), atol=1e-3)
    assert torch.allclose(torch.cov(drawn.mT, correction=0), torch.eye(6), atol=1e-2)
    assert torch.allclose(autoencoder.decode(autoencoder.encode(images)), before, atol=1e-4)


def test_times_and_noise_levels():
    times = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert torch.allclose(models.time_of(models.signal_at(times)), times, atol=1e-13)
    # DDPM's own schedule, in its thousand steps: the same noise levels but for the discretisation.
    signals = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    found = models.time_of(signals)
    assert (found - torch.arange(1, 1001) / 1000).abs().max() < 5e-3


def test_one_network_serves_every_number_of_steps():
    """Steps of the same noise level are the same step, however many there are."""
    network, shape = networks()["mlp"]
    signals = models.signal_at(torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64))
    few, many = models.AtSteps(network, signals[1::2]), models.AtSteps(network, signals)
    z = torch.randn(2, *shape)
    assert torch.equal(few(z, torch.tensor([0, 1])), many(z, torch.tensor([1, 3])))
