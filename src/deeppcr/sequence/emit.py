"""Steps that give something beside their state."""

from __future__ import annotations

from typing import Any


class Emitting:
    """A step ``both(z, x)`` that gives the next state and an output; called, the state alone."""

    def both(self, z: Any, x: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def __call__(self, z: Any, x: Any) -> Any:
        return self.both(z, x)[0]
