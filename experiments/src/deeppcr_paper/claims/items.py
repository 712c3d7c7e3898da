"""The paper's figures and tables in its order: what it claims with them, and which of our results answers. Written by hand.

The figures of the paper are counted as it prints them; its tables of network parts are one table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..denoisers import PRESETS
from . import diffusion, networks, trainings
from .check import Check, Table
from .results import Finished, Needs, command

_PAPER, _OURS = PRESETS["paper"], PRESETS["short"]
_TRAINED = (
    f"Epochs: autoencoders {_OURS.autoencoder_epochs} for {_PAPER.autoencoder_epochs}, denoisers of latents "
    f"{_OURS.latent_epochs} for {_PAPER.latent_epochs}, of pixels {_OURS.pixel_epochs} for {_PAPER.pixel_epochs}."
)
_COARSE = "Widths 4, 16 and 64, by defaults 256 too."


@dataclass(frozen=True)
class Part:
    """One experiment that answers a figure.

    Attributes:
        experiment: its name
        figures: patterns of the names of our figures that are shown, in their order
        read: a result to checks
        also: a result to a table beside them
        needs: whether a result has what is asked for
        second: whether it is to come from another machine than the result that is taken elsewhere
        how: what is other than in the other parts, in words
        more: what the command has besides
    """

    experiment: str
    figures: Sequence[str] = ()
    read: Callable[[Finished], list[Check]] = lambda result: []
    also: Callable[[Finished], Table] | None = None
    needs: Needs = lambda result: True
    second: bool = False
    how: str = ""
    more: str = ""

    @property
    def command(self) -> str:
        """What runs it at full size."""
        return (
            command(self.experiment)
            + (f" {self.more}" if self.more else "")
            + ("   # on another machine" if self.second else "")
        )


@dataclass(frozen=True)
class Item:
    """A figure or table of the paper.

    Attributes:
        label: as the paper counts it
        title: a few words
        claim: what the paper says with it, with its numbers
        parts: what answers it; none where there is nothing to measure
        note: how ours is made other than the paper's, or what stands in place of a measurement
    """

    label: str
    title: str
    claim: str
    parts: Sequence[Part] = ()
    note: str = ""


def _timing(activation: str) -> tuple[Part, Part]:
    """The method as printed in plain PyTorch decides; until that was run, the same by `deeppcr.solve`."""
    read, needs = networks.timing(activation), networks.has_activation(activation)

    def part(experiment: str, how: str) -> Part:
        figures = tuple(f"{experiment}-{activation}-{way}" for way in ("forward", "backward"))
        return Part(experiment, figures, read, needs=needs, how=how)

    return part("mlp-printed", "as printed in plain PyTorch"), part("mlp-timing", "as printed by `deeppcr.solve`")


def _training(figure: str, read: Callable[[Finished], list[Check]]) -> tuple[Part, Part]:
    """Trained as printed, which decides, and with the defaults."""
    more = "--set solver=paper --set depths=1024 --set seeds=1"
    return (
        Part("resnet-training", read=read, needs=trainings.as_printed, how="trained as printed", more=more),
        Part("resnet-training", (figure,), read, needs=trainings.with_defaults, how="trained with the defaults"),
    )


ITEMS: tuple[Item, ...] = (
    Item(
        "Figure 1",
        "image generation by latent diffusion",
        "Denoising in O(log₂ L): 11.2× over the sequential baseline.",
        (Part("latent-diffusion", read=diffusion.headline, needs=diffusion.of_data("mnist")),),
    ),
    Item(
        "Figure 2",
        "the algorithm, and a scheme of its reductions",
        "log₂ L rounds of parallel cyclic reduction leave L systems of one unknown each.",
        note="`deeppcr.PCR`; [the mathematics](mathematics.md#slips-in-the-paper) has its signs right.",
    ),
    Item(
        "Figure 3",
        "forward and backward passes of MLPs, ReLU",
        "The loop's time is linear in L, DeepPCR's logarithmic for the most part; at best more than 30× forward and 200× backward; "
        "break-even at L ≈ 2⁷ and 2⁵.",
        _timing("relu"),
        "The paper's are the shortest of up to 100 runs (V100), ours medians. PyTorch's initial weights, one row. Backward: all gradients, without "
        "the forward pass; as printed without autograd.",
    ),
    Item(
        "Figure 4",
        "time of the forward pass in the training of ResNets",
        "7× at w = 16 with skip connections of 4 layers, and the time stays roughly constant.",
        _training("resnet-training-time", trainings.times_of_passes),
        "The curves are the defaults'. At L = 256 and 512 these are nearly the loop: two chunks, one iteration.",
    ),
    Item(
        "Figure 5",
        "loss in training",
        "The losses evolve in a practically equivalent way.",
        _training("resnet-training-loss", trainings.losses),
    ),
    Item(
        "Figure 6",
        "latent diffusion on MNIST: times, speed-ups, distances",
        "Up to 11×; Wasserstein-2 distances of the latents to the test set are the same.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-mnist-time", "latent-diffusion-mnist-distance"),
                diffusion.latents,
                needs=diffusion.of_data("mnist"),
            ),
        ),
        _TRAINED,
    ),
    Item(
        "Figure 7",
        "latent diffusion on CIFAR-10 and CelebA",
        "8× on CIFAR-10 and 9× on CelebA.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-cifar10-time", "latent-diffusion-celeba-time"),
                diffusion.other_data,
                needs=diffusion.of_data("cifar10"),
            ),
        ),
        "CelebA needs a folder of its images.",
    ),
    Item(
        "Figure 8",
        "Newton's method: iterations and errors",
        "At most 6 iterations, practically independent of L, more for ReLU than for sigmoid, to machine precision. In training, parameters "
        "drift apart, but boundedly.",
        (
            Part("mlp-newton", ("mlp-newton-repeat-initial",), networks.newton),
            *_training("resnet-training-newton", trainings.newton),
        ),
        "For PyTorch's weights; [others](convergence.md) need more.",
    ),
    Item(
        "Figure 9",
        "forward and backward passes of MLPs, tanh",
        "As for ReLU; break-even earlier.",
        _timing("tanh"),
        _COARSE,
    ),
    Item(
        "Figure 10",
        "forward and backward passes of MLPs, sigmoid",
        "As for ReLU; break-even earlier.",
        _timing("sigmoid"),
        _COARSE,
    ),
    Item(
        "Figure 11",
        "the same over widths: where the logarithmic regime ends",
        "Where times begin to depend on w, it is w²L that decides.",
        (
            Part("mlp-printed", read=networks.widths, needs=networks.has_activation("relu")),
            Part(
                "mlp-timing", ("mlp-timing-relu-forward-width",), networks.widths, needs=networks.has_activation("relu")
            ),
        ),
        "The curves are our solver's.",
    ),
    Item(
        "Figure 12",
        "two GPUs",
        "A100 (80 GB) over V100 (40 GB): ratios of the times cluster at 1.1 in the logarithmic regime and at 0.65 beyond it.",
        (Part("hardware", ("hardware-relu-forward",), networks.machines),),
    ),
    Item(
        "Figure 13",
        "MLPs on an A100",
        "Comparable to Figure 3 on another GPU.",
        (replace(_timing("relu")[1], second=True, how=""),),
    ),
    Item(
        "Figure 14",
        "memory",
        "Slightly less than twice the memory, for the Jacobians are as large as the weights.",
        (Part("mlp-memory", ("mlp-memory",), networks.memory),),
    ),
    Item(
        "Figure 15",
        "accuracy in training",
        "94% on the test images in both cases.",
        _training("resnet-training-accuracy", trainings.accuracies),
    ),
    Item(
        "Figure 16",
        "five seeds",
        "Consistent from 5 initialisations.",
        _training("resnet-training-seeds", trainings.seeds),
    ),
    Item(
        "Table 1",
        "the diffusion models",
        "Encoder, decoder, discriminator, residual MLP and UNet, layer by layer.",
        note="One stride of four is 1: by 2 each, 32×32 ends at 2×2, not 4×4. A ReLU before the decoder's tanh would forbid "
        "dark pixels, and is left out. MNIST is padded to 32.",
    ),
    Item(
        "Figure 17",
        "time of the Jacobians",
        "Assembling the Jacobians is negligible beside the reductions, assuming perfect parallelism.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-mnist-phases",),
                diffusion.jacobians,
                needs=diffusion.of_data("mnist"),
            ),
        ),
    ),
    Item(
        "Figure 18",
        "images",
        "No visible difference between the two.",
        (Part("latent-diffusion", ("latent-diffusion-*-images",), diffusion.pictures),),
    ),
    Item(
        "Table 2",
        "diffusion: times, iterations, errors",
        "2.48× to 15.95× in 6 to 27 iterations, with L∞ errors of 0.0007 to 0.026.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-mnist-newton",),
                diffusion.timing_table(diffusion.LATENT),
                diffusion.timing_rows(diffusion.LATENT),
                diffusion.of_data("mnist"),
            ),
            Part(
                "pixel-diffusion",
                ("pixel-diffusion-time",),
                diffusion.timing_table(diffusion.PIXEL),
                diffusion.timing_rows(diffusion.PIXEL),
            ),
        ),
        "The paper's rows beside ours: [report](report.html).",
    ),
    Item(
        "Table 3",
        "settings of Newton's method",
        "At most 15 iterations (diffusion: 30); residual below 10⁻⁴, or below 10⁻⁴ of the first.",
        note="As printed is `Newton(chunk=1, stop=PaperTest(1e-4, 1e-4), max_iterations=15, linear=PCR())`. The default test is "
        "[stricter](solution.md#tolerance).",
    ),
    Item(
        "Figure 19",
        "a fixed number of Newton iterations in training",
        "ResNets train with just 3 iterations a pass, half of the test's 6: potentially another 2×.",
        (Part("resnet-iterations", ("resnet-iterations",), trainings.few_iterations),),
        "2,000 steps, a quarter of an epoch.",
    ),
    Item(
        "Figure 20",
        "latent diffusion: error against iterations",
        "The L∞ error falls below 0.1 in fewer than 15 iterations.",
        (Part("diffusion-iterations", ("diffusion-iterations-latent",), diffusion.iterations("latent")),),
    ),
    Item(
        "Figure 21",
        "pixel diffusion: error against iterations",
        "As in latent space; for the largest L Newton stalls at 10⁻¹.",
        (Part("diffusion-iterations", ("diffusion-iterations-pixel",), diffusion.iterations("pixel")),),
    ),
    Item(
        "Figure 22",
        "the initial guess in training",
        "3 iterations suffice from the batch mean of the last step; from elsewhere more than 5 are needed.",
        (Part("resnet-guess", ("resnet-guess-loss*",), trainings.guesses),),
        "2,000 steps, a quarter of an epoch.",
    ),
    Item(
        "Figure 23",
        "conditional and unconditional diffusion",
        "Conditional models, started from the mean of their class, consistently gain more.",
        (
            Part("pixel-diffusion", ("pixel-diffusion-classes",), diffusion.classes),
            Part("diffusion-guess", ("diffusion-guess-conditional",), diffusion.guesses),
        ),
    ),
)


@dataclass(frozen=True)
class Opening:
    """One of the ten claims with which the page opens: a check of an item.

    Attributes:
        claim: in a line
        label: of the item
        what: how the check begins
    """

    claim: str
    label: str
    what: str

    def check(self, checks: Iterable[Check]) -> Check | None:
        """The one that decides it, without what stands in brackets; None where nothing tells."""
        found = next((check for check in checks if check.what.startswith(self.what)), None)
        columns = ("printed", "defaults", "loop")
        return found and replace(found, **{each: re.sub(r" \([^()]*\)", "", getattr(found, each)) for each in columns})


OPENING: tuple[Opening, ...] = (
    Opening("a forward pass of an MLP is more than 30× as fast", "Figure 3", "forward pass over"),
    Opening("a backward pass is 200× as fast", "Figure 3", "backward pass over"),
    Opening("forward, it pays from L ≈ 128 on", "Figure 3", "forward pass, break-even"),
    Opening("its time is logarithmic in L", "Figure 3", "DeepPCR, time"),
    Opening("MLPs take at most 6 iterations", "Figure 8", "Newton iterations"),
    Opening("the loop needs about 0.6 of DeepPCR's memory", "Figure 14", "memory"),
    Opening("a ResNet's forward pass in training is 7× as fast", "Figure 4", "forward pass over"),
    Opening("training gives the same loss", "Figure 5", "final loss"),
    Opening("latent diffusion is 11.2× as fast, by its proxy", "Figure 1", diffusion.PROXY),
    Opening("the same on the clock", "Figure 1", diffusion.CLOCK),
)
