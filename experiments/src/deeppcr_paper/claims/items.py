"""The paper's figures and tables in its order: what it claims with them, and which of our results answers. Written by hand.

The figures of the paper are counted as it prints them; its tables of network parts are one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..denoisers import PRESETS
from . import diffusion, networks, trainings
from .check import Check, Table
from .results import Finished, Needs

_PAPER, _OURS = PRESETS["paper"], PRESETS["short"]
_TRAINED = (
    f"Our networks are trained for fewer epochs than the paper's: autoencoders for {_OURS.autoencoder_epochs} instead of "
    f"{_PAPER.autoencoder_epochs}, denoisers of latents for {_OURS.latent_epochs} instead of {_PAPER.latent_epochs}, of pixels for "
    f"{_OURS.pixel_epochs} instead of {_PAPER.pixel_epochs}; `--set training=paper` trains for as long."
)
_COARSE = "At full size measured at the widths 4, 16, 64 and 256; `--set other_widths=2,4,8,...` names others."


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
    """

    experiment: str
    figures: Sequence[str] = ()
    read: Callable[[Finished], list[Check]] = lambda result: []
    also: Callable[[Finished], Table] | None = None
    needs: Needs = lambda result: True
    second: bool = False


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


def _timing(activation: str) -> Part:
    return Part(
        "mlp-timing",
        (f"mlp-timing-{activation}-forward", f"mlp-timing-{activation}-backward"),
        networks.timing(activation),
        networks.strong_baselines(activation),
        networks.has_activation(activation),
    )


_TIMED = "The paper timed up to 100 runs on a V100 against the loop in eager PyTorch, and shows the shortest."

ITEMS: tuple[Item, ...] = (
    Item(
        "Figure 1",
        "image generation by latent diffusion",
        "Denoising in O(log₂ L) instead of O(L): 11.2× over the sequential baseline, with comparable quality.",
        (Part("latent-diffusion", read=diffusion.headline, needs=diffusion.of_data("mnist")),),
        "The paper's time is a proxy, as if the Jacobians were computed perfectly in parallel. Its figure is a picture of the "
        "idea; ours of this experiment are under Figure 6.",
    ),
    Item(
        "Figure 2",
        "the algorithm, and a scheme of its reductions",
        "log₂ L rounds of parallel cyclic reduction leave L systems of one unknown each.",
        note="It is `deeppcr.PCR`; [the mathematics](mathematics.md) derives it, with the signs that the printed equations "
        "get wrong. Tests compare it with a dense solve and with forward substitution, at awkward lengths, in both "
        "directions.",
    ),
    Item(
        "Figure 3",
        "forward and backward passes of MLPs, ReLU",
        "The loop's time is linear in L, DeepPCR's logarithmic for the most part: 0.55 s to 0.015 s forward (more than 30×), "
        "589 ms to 2.45 ms backward (200×) for the best sizes; break-even at L ≈ 2⁷ forward and 2⁵ backward. Wide networks "
        "fall back to a linear regime.",
        (_timing("relu"),),
        _TIMED + " Ours count the whole public call, with its stopping test, and stand beside stronger loops.",
    ),
    Item(
        "Figure 4",
        "time of the forward pass in the training of ResNets",
        "7× at w = 16 with skip connections of 4 layers (L = 256, 512, 1024), and the time stays roughly constant: 3.2 h "
        "against 30 min over the whole training.",
        (Part("resnet-training", ("resnet-training-time",), trainings.times_of_passes),),
        "Batch 8, as the paper's 60,000 steps in 8 epochs imply. The loop's curve comes from the fastest loop there is; the "
        "eager loop and the method as printed are timed on a hundred steps.",
    ),
    Item(
        "Figure 5",
        "loss in training",
        "Trained layer by layer and by DeepPCR, the losses evolve in a practically equivalent way.",
        (Part("resnet-training", ("resnet-training-loss",), trainings.losses),),
    ),
    Item(
        "Figure 6",
        "latent diffusion on MNIST: times, speed-ups, distances",
        "Up to 11×, 1.3 s to 0.12 s, over w = 16 to 128 and L = 256, 512, 1024 (mean of 100 runs); less beyond w ≈ 2⁶ at "
        "L = 1024. The Wasserstein-2 distances of the latents to the test set, sequential and DeepPCR, differ by about 0.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-mnist-time", "latent-diffusion-mnist-speedup", "latent-diffusion-mnist-distance"),
                diffusion.latents,
                needs=diffusion.of_data("mnist"),
            ),
        ),
        "The paper's times are a proxy (Jacobians as if perfectly parallel); ours are wall-clock, with everything counted. "
        + _TRAINED,
    ),
    Item(
        "Figure 7",
        "latent diffusion on CIFAR-10 and CelebA",
        "8× on CIFAR-10 and 9× on CelebA; slower beyond w = 2⁷. The speed-up depends on w and L, not on the data.",
        (
            Part(
                "latent-diffusion",
                ("latent-diffusion-cifar10-time", "latent-diffusion-cifar10-speedup", "latent-diffusion-celeba-time"),
                diffusion.other_data,
                needs=diffusion.of_data("cifar10"),
            ),
        ),
        "CelebA takes part where a folder of its images is given.",
    ),
    Item(
        "Figure 8",
        "Newton's method: iterations and errors",
        "At most 6 iterations in every configuration, practically independent of L; ReLU takes more than sigmoid; the output "
        "differs from the loop's by almost always machine precision. In training, parameters drift apart, but boundedly.",
        (
            Part("mlp-newton", ("mlp-newton-repeat-initial", "mlp-newton-random"), networks.newton),
            Part("resnet-training", ("resnet-training-newton",), trainings.newton),
        ),
        "For PyTorch's default initialisation. [When few iterations suffice](convergence.md) shows what other weights do.",
    ),
    Item(
        "Figure 9",
        "forward and backward passes of MLPs, tanh",
        "Basically as for ReLU; break-even earlier, at L closer to 2⁶ than to 2⁷.",
        (_timing("tanh"),),
        _COARSE,
    ),
    Item(
        "Figure 10",
        "forward and backward passes of MLPs, sigmoid",
        "Basically as for ReLU; break-even earlier, at L closer to 2⁶ than to 2⁷.",
        (_timing("sigmoid"),),
        _COARSE,
    ),
    Item(
        "Figure 11",
        "the same over widths: where the logarithmic regime ends",
        "Times should not depend on w; where they begin to, it is w²L, the size of the system, that decides: the threshold "
        "runs along an isoline of it.",
        (
            Part(
                "mlp-timing", ("mlp-timing-relu-forward-width",), networks.widths, needs=networks.has_activation("relu")
            ),
        ),
    ),
    Item(
        "Figure 12",
        "two GPUs",
        "A100 (80 GB) over V100 (40 GB): ratios of the times cluster at 1.1 in the logarithmic regime and at 0.65 beyond it, "
        "because the larger memory puts off the linear regime by a factor of 2 in w²L.",
        (Part("hardware", ("hardware-relu-forward",), networks.machines),),
        "It compares results of `mlp-timing` from two machines.",
    ),
    Item(
        "Figure 13",
        "MLPs on an A100",
        "Comparable to Figure 3 on another GPU.",
        (replace(_timing("relu"), second=True),),
        "Ours would come from another GPU than that of our Figure 3, which is itself another than the paper's.",
    ),
    Item(
        "Figure 14",
        "memory",
        "Peak memory of the loop over that of DeepPCR, forward: consistently around 0.6, so slightly less than twice the "
        "memory, for the Jacobians are as large as the weights.",
        (Part("mlp-memory", ("mlp-memory",), networks.memory),),
        "The network itself counts on both sides.",
    ),
    Item(
        "Figure 15",
        "accuracy in training",
        "94% on the test images at the end in both cases, their difference consistently close to 0.",
        (Part("resnet-training", ("resnet-training-accuracy",), trainings.accuracies),),
    ),
    Item(
        "Figure 16",
        "five seeds",
        "Loss and accuracy from 5 initialisations: consistent, sequential and DeepPCR alike.",
        (Part("resnet-training", ("resnet-training-seeds",), trainings.seeds),),
    ),
    Item(
        "Table 1",
        "the diffusion models",
        "Encoder, decoder, discriminator, residual MLP and UNet, layer by layer.",
        note="A description: there is nothing to measure. Ours follow it where it can be followed: four layers of stride 2 take "
        "32×32 to 2×2, not to the 4×4×128 that is printed, so one of them keeps the resolution; the decoder's ReLU before "
        "its tanh would forbid dark pixels, and is left out; MNIST is padded from 28 to 32.",
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
        "We measure the share of each phase on the clock.",
    ),
    Item(
        "Figure 18",
        "images",
        "Images made sequentially and by DeepPCR show no visible difference.",
        (Part("latent-diffusion", ("latent-diffusion-*-images",), diffusion.pictures),),
    ),
    Item(
        "Table 2",
        "diffusion: times, iterations, errors",
        "Latent, L = 1024, w = 16, 32, 64, 128: 11.22×, 10.98×, 8.81×, 6.09× in 13.4, 14.1, 17.4, 18.5 iterations; pixels, "
        "L = 1024, 4×4, 8×8, 16×16: 14.25×, 15.95×, 2.48× in 12.3, 11.1, 27.3 iterations. L∞ errors of 0.0007 to 0.0061, and "
        "0.026 for 16×16 at L = 1024. Less at L = 256 and 512 (from 3.5× to 11.2×).",
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
                ("pixel-diffusion-time", "pixel-diffusion-newton", "pixel-diffusion-images"),
                diffusion.timing_table(diffusion.PIXEL),
                diffusion.timing_rows(diffusion.PIXEL),
            ),
        ),
        "The paper's times are adjusted as if the Jacobians were parallel; ours are wall-clock. " + _TRAINED,
    ),
    Item(
        "Table 3",
        "settings of Newton's method",
        "At most 15 iterations for forward passes and 30 for diffusion; residual below 10⁻⁴, or below 10⁻⁴ of the first.",
        note="The runs as printed use exactly these: `deeppcr.PaperTest(1e-4, 1e-4)`, `max_iterations=15` (30 for diffusion), `chunk=1`, "
        "`deeppcr.PCR()`. The library's own default is stricter: it tests the last update of every step, not only the "
        "residual, to 10⁻⁵ in float32.",
    ),
    Item(
        "Figure 19",
        "a fixed number of Newton iterations in training",
        "ResNets of up to 1024 layers train with just 3 iterations a pass, half of the 6 under the test: potentially another "
        "2×, 14× in all.",
        (Part("resnet-iterations", ("resnet-iterations",), trainings.few_iterations),),
        "The paper does not say for how long it trained here; at full size ours end after 2,000 steps, about a quarter of an epoch.",
    ),
    Item(
        "Figure 20",
        "latent diffusion: error against iterations",
        "The L∞ error falls below 0.1 in fewer than 15 iterations, whatever w and L; only at L = 1024 does it start late.",
        (Part("diffusion-iterations", ("diffusion-iterations-latent",), diffusion.iterations("latent")),),
    ),
    Item(
        "Figure 21",
        "pixel diffusion: error against iterations",
        "As in latent space, for 4×4, 8×8 and 16×16; for the largest L Newton stalls once it has reached 10⁻¹.",
        (Part("diffusion-iterations", ("diffusion-iterations-pixel",), diffusion.iterations("pixel")),),
    ),
    Item(
        "Figure 22",
        "the initial guess in training",
        "At 1024 layers 3 iterations suffice from the batch mean of the last step's activations; from zeros or random numbers "
        "more than 5 are needed.",
        (Part("resnet-guess", ("resnet-guess-loss*", "resnet-guess-iterations*"), trainings.guesses),),
        "At full size ours end after 2,000 steps, about a quarter of an epoch; what whole trainings need is not told.",
    ),
    Item(
        "Figure 23",
        "conditional and unconditional diffusion",
        "Conditional models, started from the mean of their class, consistently gain more than unconditional ones, for images "
        "of all sizes and L = 256, 512, 1024.",
        (
            Part("pixel-diffusion", ("pixel-diffusion-classes",), diffusion.classes),
            Part("diffusion-guess", ("diffusion-guess-*",), diffusion.guesses),
        ),
    ),
)
