"""What stands for CUDA graphs where there are none."""

from contextlib import nullcontext


class Recorded:
    """Stands for the CUDA graphs: calls the function, and remembers for which counts of rows."""

    def __init__(self, device):
        self.keys, self.refusal = [], None

    def turn(self):
        return nullcontext()

    def knows(self, function, *key):
        return (function.__name__, *key) in self.keys

    def __call__(self, function, *key):
        self.keys.append((function.__name__, *key))
        function(*key)
