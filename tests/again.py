"""Functions that are recorded, without a GPU, too: there, what was recorded is done again by Python."""

import torch

from deeppcr.graphs.record import Scratch


class Counts:
    """How often something was recorded and replayed; and whether recording fails."""

    recorded = replayed = 0
    fails = False


def _counted(function, record):
    if Counts.fails:
        raise RuntimeError("operation not permitted when stream is capturing")
    replay = record(function)
    Counts.recorded += 1

    def counted():
        Counts.replayed += 1
        replay()

    return counted


class Again:
    """Stands for ``Scratch`` on a CPU."""

    bytes = 0

    def __init__(self, device):
        self.device = device

    def call(self, function):
        function()

    def record(self, function):
        def record(function):
            gradients = torch.is_grad_enabled()

            def replay():  # whatever mode that is in
                with torch.set_grad_enabled(gradients):
                    function()

            function()
            return replay

        return _counted(function, record)


class OnDevice(Scratch):
    def record(self, function):
        return _counted(function, super().record)


def record_here(device, monkeypatch):
    """From now on functions are recorded on the device, and counted from 0."""
    from deeppcr.graphs import function

    monkeypatch.setitem(function.SCRATCH, device.type, Again if device.type == "cpu" else OnDevice)
    for name, value in (("recorded", 0), ("replayed", 0), ("fails", False)):
        monkeypatch.setattr(Counts, name, value)
