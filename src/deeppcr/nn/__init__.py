"""Networks that run in parallel over their layers, forward and backward."""

from .networks import MLP, ResNet
from .sequential import Sequential

__all__ = ["MLP", "ResNet", "Sequential"]
