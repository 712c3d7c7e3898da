"""A network of two precisions, for machines that have one."""

import contextlib

import torch

from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window import prepared as window
from deeppcr.runtime import full_precision


class Rough:
    """Stands for a GPU's two precisions: ``precision`` replaces the settings', ``network`` one that obeys them.

    Where ``bits`` are given, its numbers are cut; else the rough one is off by more than TF32.
    """

    def __init__(self, network, monkeypatch, bits=None):
        self.exact, self.rough, self.calls, self.bits = network, False, [], bits
        monkeypatch.setattr(window, "has_tf32", lambda problem: True)
        monkeypatch.setattr(window, "full_precision", self.precision)
        # Of the checks' calls none is made before: what they compare must be of one precision, and they do not set it here. What
        # they are remembered by holds all switches, this one too: it is found while that is off.
        monkeypatch.setattr(Problem, "look", lambda problem: problem._kind)

    @contextlib.contextmanager
    def precision(self, device, *, tf32=False):
        before, self.rough = self.rough, tf32
        with full_precision(device):
            yield
        self.rough = before

    def network(self, z, t):
        self.calls.append((self.rough, len(z)))
        if self.rough and self.bits is not None:
            return self.cut(self.exact(self.cut(z), t))
        found = self.exact(z, t)
        return found + 1e-2 * torch.sin(1e3 * found) if self.rough else found

    def cut(self, values):
        """To so many bits after the first; TF32 has 10."""
        mantissa, exponent = torch.frexp(values)
        scale = 2 ** (self.bits + 1)
        return torch.ldexp((mantissa * scale).round() / scale, exponent)
