"""The version of the library, below everything that asks for it."""

__version__ = "0.2.0"
