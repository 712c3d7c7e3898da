"""Steps of training in one CUDA graph: the batch is picked, and what is plotted is kept, on the device.

On a CPU the same steps are taken one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from deeppcr.linearised import GradientOverflow

from .data import Images
from .timing import capture


def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What does again on the device what ``step`` does."""
    return capture(step, torch.cuda.current_stream(device))[0] if device.type == "cuda" else step


class ReplayedSteps:
    """A network's steps of training, recorded once and replayed: Python only says "again".

    All of it runs on one stream, which must not be the default one: autograd waits for the streams of earlier passes, and
    another stream would end the recording.

    Args:
        forward: from images to scores
        state: every tensor that a step changes besides the gradients
        order: [epoch, batch], the images of every step; its content may change from epoch to epoch
        room: steps whose losses are kept at a time
        before: what is done before every step, and not recorded
        extra: a tensor to keep for every step, looked up after the forward pass; None for none
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        optimiser: torch.optim.Optimizer,
        state: list[Tensor],
        images: Images,
        order: Tensor,
        room: int,
        before: Callable[[], None],
        extra: Callable[[], Tensor | None],
    ):
        self.forward, self.optimiser, self.images, self.order = forward, optimiser, images, order
        self.before, self.extra = before, extra
        device = order.device
        self.position, self.slot = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.losses, self.hits = (torch.zeros(room, device=device, dtype=images.train.dtype) for _ in range(2))
        self.extras: Tensor | None = None
        kept = [each.detach().clone() for each in state]
        for _ in range(2):  # libraries set themselves up before the recording
            with suppress(GradientOverflow):  # the replayed steps, in which nothing is raised, will show that
                self._step()
        self.again = record(self._step, device)
        with torch.no_grad():
            for each, was in zip(state, kept, strict=True):
                each.copy_(was)

    def _step(self) -> None:
        picked = self.order.index_select(0, self.position)[0]
        x, labels = self.images.train.index_select(0, picked), self.images.train_labels.index_select(0, picked)
        self.optimiser.zero_grad(set_to_none=True)
        scores = self.forward(x)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        self.optimiser.step()
        hits = (scores.argmax(-1) == labels).to(loss.dtype).mean()
        self.losses.index_copy_(0, self.slot, loss.detach().unsqueeze(0))
        self.hits.index_copy_(0, self.slot, hits.unsqueeze(0))
        extra = self.extra()
        if extra is not None:
            if self.extras is None:
                self.extras = torch.zeros(len(self.losses), *extra.shape, dtype=extra.dtype, device=extra.device)
            # A recorded pass may find less than the ones before it: it cannot ask the host whether to go on.
            self.extras[:, : len(extra)].index_copy_(0, self.slot, extra.unsqueeze(0))
        self.position += 1
        self.slot += 1

    def run(self, first: int, count: int) -> tuple[list[float], list[float], Tensor | None]:
        """Take ``count`` steps from step ``first`` of the epoch: the loss, the accuracy and the extra of each."""
        self.position.fill_(first)
        self.slot.zero_()
        for _ in range(count):
            self.before()
            self.again()
        extras = None if self.extras is None else self.extras[:count]
        return self.losses[:count].tolist(), self.hits[:count].tolist(), extras
