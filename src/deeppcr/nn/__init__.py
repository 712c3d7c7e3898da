"""Networks that run in parallel over their layers, and recurrent ones over their steps, forward and backward."""

from .conversion import convert, revert
from .diagonal import DiagonalGRU, DiagonalLSTM
from .networks import MLP, ResNet
from .sequential import Sequential
from .torch_like import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "MLP", "RNN", "DiagonalGRU", "DiagonalLSTM", "ResNet", "Sequential", "convert", "revert"]
