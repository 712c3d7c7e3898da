"""A fingerprint sees global variables, where a function or what it calls names them, and the program of a class."""

import functools
from types import ModuleType

import pytest
import torch

from deeppcr.sequence.fingerprint import fingerprint
from sequence.holding import cases

SCALE, NETWORK, SETTINGS = 1, torch.nn.Linear(3, 3), ModuleType("settings")
SETTINGS.SCALE, SETTINGS.inner = 1, ModuleType("settings.inner")
SETTINGS.inner.SCALE = 1


def scaled(z):
    return z * SCALE


class Scaling:
    def __init__(self):
        self.number = 1

    def __call__(self, z, t):
        return self.by_scale(z) * self.number

    def by_scale(self, z):
        return z * SCALE


class ScalingModule(torch.nn.Module):
    by_scale = Scaling.by_scale

    def forward(self, z, t):
        return self.by_scale(z)


class Indirect(torch.nn.Module):
    @property
    def doubled(self):
        return 2 * self.once()

    @staticmethod
    def once():
        return SCALE

    def forward(self, z, t):
        return z * self.doubled


def in_a_function_inside(z, t):
    return sum(z * SCALE for _ in range(1))


GLOBALS = {
    "its own": lambda z, t: z * SCALE,
    "of a function inside": in_a_function_inside,
    "of a function that it calls": lambda z, t: scaled(z),
    "of a method": Scaling().by_scale,
    "of a method that is called": lambda z, t, held=Scaling(): held.by_scale(z),
    "of an object that is called": Scaling(),
    "of a module": torch.nn.Sequential(ScalingModule()),
    "of a module behind properties": Indirect(),
    "of a partial": functools.partial(lambda one, z, t: scaled(z), 1),
}


@pytest.mark.parametrize("denoiser", cases(GLOBALS))
def test_a_fingerprint_sees_global_variables(denoiser, monkeypatch):
    before = fingerprint(denoiser)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 2)
        assert fingerprint(denoiser) != before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "NETWORK", 2)  # which none of them names
        assert fingerprint(denoiser) == before


def test_a_fingerprint_sees_networks_and_settings_that_are_global(monkeypatch):
    def denoiser(z, t):
        return NETWORK(z) * SETTINGS.SCALE + SETTINGS.inner.SCALE

    seen = [fingerprint(denoiser)]
    for where, name, value in ((SETTINGS, "SCALE", 2), (SETTINGS.inner, "SCALE", 3), (NETWORK, "training", False)):
        monkeypatch.setattr(where, name, value)
        seen.append(fingerprint(denoiser))
    monkeypatch.setitem(globals(), "NETWORK", torch.nn.Linear(3, 3))
    seen.append(fingerprint(denoiser))
    assert len(set(seen)) == 5
    monkeypatch.setattr(SETTINGS, "OTHER", 2, raising=False)
    assert fingerprint(denoiser) == seen[-1]


@pytest.mark.parametrize("make", [ScalingModule, Scaling])
def test_a_fingerprint_sees_another_program_of_a_class(make, monkeypatch):
    denoiser = make()
    before = fingerprint(denoiser)
    monkeypatch.setattr(make, "by_scale", lambda self, z: z)
    assert fingerprint(denoiser) != before


@pytest.mark.parametrize(
    "make", [lambda: torch.nn.Linear(3, 3), lambda: torch.compile(torch.nn.Linear(3, 3), backend="eager")]
)
def test_a_fingerprint_stays_when_the_function_is_called(make):
    net = make()

    def denoiser(z, t):
        return scaled(functools.partial(net)(z))

    before = fingerprint(denoiser), fingerprint(net)
    for rows in (1, 2, 3):
        denoiser(torch.ones(rows, 3), None)
        assert (fingerprint(denoiser), fingerprint(net)) == before
