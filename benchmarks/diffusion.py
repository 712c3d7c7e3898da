"""Sampling in parallel against the loop: eager, and in a CUDA graph. Compared first, then timed.

    python benchmarks/diffusion.py --kind latent --width 16 --data FOLDER_OF_MNIST --out FILE
    python benchmarks/diffusion.py --kind cifar --width 256 --data FOLDER_OF_CIFAR-10
    python benchmarks/diffusion.py --kind latent --width 128 --samples 64    (samples a second, too)

Trains a denoiser of the paper's architecture for a few seconds (on principal components of MNIST or CIFAR-10, whitened,
or on MNIST's images made smaller; without --data on made-up data), samples by the loop, and times each setting of the
window on the same noise. Float32 proper in the loop; in the window TF32 only in the first iterations, and not at all
where a setting says so. The first two calls of a setting are not timed: the second captures the CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deeppcr.diffusion import DDPM, GaussianPrior, Noise, Schedule, Window, sample
from deeppcr_paper.data import mnist
from deeppcr_paper.models import AtSteps, ResidualMLP, UNet, signal_at
from deeppcr_paper.pictures import cifar10
from deeppcr_paper.timing import capture, machine, measure, synchronise


def images(kind: str, folder: Path | None, device: torch.device) -> Tensor:
    """[N, channels, side, side] in [-1, 1]; made up of a few smooth blobs where there is no folder."""
    if folder is not None and kind == "cifar":
        return cifar10(folder).train.to(device)
    if folder is not None:
        pixels = mnist(folder).train.to(device).reshape(-1, 1, 28, 28)
        low, high = pixels.min(), pixels.max()
        return 2 * (pixels - low) / (high - low) - 1
    generator = torch.Generator(device).manual_seed(0)
    grid = torch.linspace(-1, 1, 28, device=device)
    centre = torch.rand(20_000, 3, 2, 1, 1, generator=generator, device=device) * 1.2 - 0.6
    blobs = (grid[:, None] - centre[:, :, 0]) ** 2 + (grid - centre[:, :, 1]) ** 2
    return (2 * torch.exp(-12 * blobs).amax(1, keepdim=True) - 1).clamp(-1, 1)


def training_set(kind: str, width: int, folder: Path | None, device: torch.device) -> Tensor:
    """Whitened principal components [N, width], or images [N, 1, width, width]."""
    pixels = images(kind, folder, device)
    if kind == "pixel":
        return nn.functional.interpolate(pixels, size=(width, width), mode="area")
    flat = pixels.flatten(1)
    centred = flat - flat.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # the least first
    latents = centred @ directions[:, -width:]
    return latents / latents.std(0)


def train(network: nn.Module, data: Tensor, steps: int, batch: int, rate: float) -> float:
    """Predict the noise at every level; returns the mean loss of the last steps."""
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = []
    for _ in range(steps):
        clean = data[torch.randint(len(data), (batch,), device=data.device)]
        times, noise = torch.rand(batch, device=data.device), torch.randn_like(clean)
        share = signal_at(times).reshape(-1, *(1,) * (clean.ndim - 1))
        loss = (network(share.sqrt() * clean + (1 - share).sqrt() * noise, times) - noise).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses[-50:]).mean().item()


class Loop:
    """The loop as one would write it."""

    def __init__(self, denoiser: nn.Module, schedule: Schedule, noise: Noise):
        steps = DDPM().steps(schedule)
        self.denoiser, self.noise = denoiser, noise
        self.keep, self.gain, self.deviation = (
            each.flatten().tolist() for each in (steps.keep, steps.gain, steps.deviation)
        )
        self.times = schedule.timesteps.to(noise.initial.device)[:, None].expand(-1, noise.samples).contiguous()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        z = self.noise.initial
        for l in range(len(self.keep)):
            z = torch.add(self.keep[l] * z, self.denoiser(z, self.times[l]), alpha=self.gain[l])
            if self.deviation[l]:
                z = z.add_(self.noise.steps[l], alpha=self.deviation[l])
        return z


def settings(length: int, tolerance: float) -> dict[str, Window]:
    """The default, and what becomes of it where one thing is another."""
    return {
        "window": Window(tolerance=tolerance),
        "window, freeze=0.1": Window(tolerance=tolerance, freeze=0.1),
        "window, float32 throughout": Window(tolerance=tolerance, tf32=None),
        "window, TF32 longer": Window(tolerance=tolerance, tf32=0.01),
        "window of L/2": Window(tolerance=tolerance, size=-(-length // 2)),
        "window, not accelerated": Window(tolerance=tolerance, accelerate=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["latent", "cifar", "pixel"], default="latent")
    parser.add_argument("--width", type=int, default=16, help="of a latent, or the side of an image")
    parser.add_argument("--hidden", type=int, default=2048, help="of the residual MLP")
    parser.add_argument("--length", type=int, default=1024, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=1, help="sampled at once")
    parser.add_argument("--draws", type=int, default=3, help="different noises, the worst error of which counts")
    parser.add_argument("--train-steps", type=int, default=1500)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds to time for")
    parser.add_argument("--data", type=Path, default=None, help="a folder with MNIST or CIFAR-10")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    torch.manual_seed(0)

    data = training_set(chosen.kind, chosen.width, chosen.data, device)
    network: nn.Module
    if chosen.kind != "pixel":
        network, batch, rate, prior = ResidualMLP(chosen.width, hidden=chosen.hidden), 4096, 3e-4, GaussianPrior()
    else:
        network, batch, rate, prior = UNet(), 512, 1e-3, GaussianPrior.from_data(data)
    network = network.to(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    begun = time.perf_counter()
    loss = train(network, data, chosen.train_steps, batch if device.type == "cuda" else batch // 32, rate)
    synchronise(device)
    print(f"{chosen.kind} {chosen.width}: loss {loss:.4f} after {time.perf_counter() - begun:.0f} s of training")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    schedule = Schedule.linear(chosen.length)
    denoiser = AtSteps(network, schedule.alphas_bar).to(device).eval().requires_grad_(False)
    shape = (chosen.samples, *data.shape[1:])
    noises = []
    for seed in range(chosen.draws):
        generator = torch.Generator(device).manual_seed(seed)
        noises.append(Noise.draw(shape, steps=chosen.length, generator=generator))
    references = [Loop(denoiser, schedule, noise)() for noise in noises]

    rows: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for name, window in settings(chosen.length, chosen.tolerance).items():
            worst, found = 0.0, []
            for noise, reference in [*zip(noises, references, strict=True)] * 2:  # the second time from graphs
                samples = sample(denoiser, schedule, noise, solver=window, jacobian=prior)
                found.append(samples)
                error = (samples.final - reference).abs().max().item()
                worst = max(worst, math.inf if math.isnan(error) else error)
            evaluations = sum(each.evaluations.double().mean().item() for each in found) / len(found)
            rows.append(
                {
                    "method": name,
                    "iterations": max(int(each.iterations.max()) for each in found),
                    "evaluations": evaluations / chosen.length,
                    "error": worst,
                    "result": max((each.result for each in found), key=lambda result: result.severity).name,
                    "notes": found[-1].plan.notes,
                }
            )
            timed[name] = lambda window=window: sample(denoiser, schedule, noises[0], solver=window, jacobian=prior)
        eager = Loop(denoiser, schedule, noises[0])
        slow = {"eager loop": eager}
        if device.type == "cuda":
            replay, captured = capture(eager)
            replay()
            rows.insert(0, {"method": "loop in a CUDA graph", "error": (captured - references[0]).abs().max().item()})
            timed["loop in a CUDA graph"] = replay
        rows.insert(0, {"method": "eager loop", "error": 0.0})
        times = measure(timed, device, budget=chosen.budget) | measure(slow, device, budget=1, repeats=(3, 5))

    print(f"{'':32}{'ms':>9}{'median':>9}{'its.':>6}{'evals/L':>9}{'error':>9}  {'x eager':>8}{'x graph':>8}")
    base = {name: times[name].minimum for name in ("eager loop", "loop in a CUDA graph") if name in times}
    for row in rows:
        timing = times[row["method"]]
        row |= {"minimum": timing.minimum, "median": timing.median, "seconds": list(timing.seconds)}
        ratios = [
            base[name] / timing.minimum if name in base else math.nan for name in ("eager loop", "loop in a CUDA graph")
        ]
        row |= {"over_eager": ratios[0], "over_graph": ratios[1]}
        counts = f"{row['iterations']:6d}{row['evaluations']:9.1f}" if "iterations" in row else " " * 15
        print(
            f"{row['method']:32}{1e3 * timing.minimum:9.2f}{1e3 * timing.median:9.2f}{counts}{row['error']:9.1e}  "
            f"{ratios[0]:8.1f}{ratios[1]:8.1f}  {row.get('result', '')} {'; '.join(row.get('notes', []))}"
        )
    if chosen.samples > 1:
        rates = ", ".join(f"{row['method']} {chosen.samples / row['minimum']:.0f}" for row in rows[: len(base) + 1])
        print(f"samples a second, {chosen.samples} at once: {rates}")
    if chosen.out is not None:
        record = {
            "settings": {name: str(value) for name, value in vars(chosen).items()},
            "loss": loss,
            "machine": machine(device),
            "rows": rows,
        }
        chosen.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
