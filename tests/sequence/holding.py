"""What functions hold in the tests of fingerprints."""

import pytest


class Processor:
    """As attention's are: a plain object that a module calls."""

    def __init__(self):
        self.scale = 1.0

    def __call__(self, z):
        return self.scale * z


def closing_over(value):
    return lambda z: z * value


def cases(table):
    rows = {name: case if isinstance(case, tuple) else (case,) for name, case in table.items()}
    return [pytest.param(*row, id=name) for name, row in rows.items()]
