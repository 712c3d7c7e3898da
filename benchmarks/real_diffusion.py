"""Sampling with a network of real size, by default and by the loop in a CUDA graph, in the same precision. Compared first, then timed.

    python benchmarks/real_diffusion.py --data FOLDER_OF_CIFAR-10 [--train 120] [--json FILE]
    python benchmarks/real_diffusion.py ... --parts table,others,small,guidance,compiled

Trains diffusers' UNet of google/ddpm-cifar10-32 (35.7 million parameters, 3 x 32 x 32) for so many seconds, or loads it from
--model. Every line says how far the sample is from that of the loop, and how far the loop is from itself where every row comes
beside others: networks round other row counts in other ways. A line whose error is beyond its limit is marked, and not to be quoted.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

import deeppcr
from deeppcr.diffusion import DDIM, DDPM, Noise, Schedule, parallelize, sample
from deeppcr_paper import ddpm
from deeppcr_paper.models import AtSteps, ResidualMLP, UNet
from deeppcr_paper.pictures import cifar10
from deeppcr_paper.timing import clocked
from records import Results, parse, parser_of

SCHEDULE = Schedule.linear(1000)
LOOP = deeppcr.Loop(by="graph")
#: Seconds in which a small network is trained.
TRAINED = 6.0
#: Calls of so many rows tell how far a loop in half precision is from itself: those of two are often computed as one row is.
BESIDE = (2, 32, 64)
#: The largest error that counts, by precision; in half precision what the loop shows against itself, twice.
LIMITS = {"float32": 1e-3, "tf32": 4e-3, "bfloat16": None}


#: By how many times faster than the loop in a CUDA graph a line is to be; all others are not to be slower than that by more than noise.
TARGETS = {
    ("DDPM 1000, one sample", "float32"): 2.5, ("DDPM 1000, one sample", "tf32"): 2.2, ("DDPM 1000, one sample", "bfloat16"): 3.0,
    ("DDIM 100, one sample", "tf32"): 1.6, ("DDIM 50, one sample", "tf32"): 1.2,
}  # fmt: skip
NEVER_BELOW = 0.95
#: Of the loop as it stands, what a first call may take more.
FIRST = 1.5


class Bench:
    """One device, one list of lines."""

    def __init__(self, device: torch.device, results: Results, budget: float):
        self.device, self.results, self.lines = device, results, []
        self.deadline = time.monotonic() + budget
        results.more = {"lines": self.lines}

    def precision(self, name: str) -> Any:
        wanted = "tf32" if name == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = wanted
        return torch.autocast("cuda", torch.bfloat16) if name == "bfloat16" else nullcontext()

    @torch.no_grad()
    def line(
        self,
        name: str,
        precision: str,
        call: Callable[..., Any],
        *,
        limit: float | None = None,
        beside: Sequence[Callable[..., Any]] = (),
        repeats: int = 3,
        eager: bool = False,
    ) -> None:
        """``call(solver)`` samples: by the loop in a graph, then by default."""
        if time.monotonic() > self.deadline:
            print(f"{name:44} left out: no time is left", flush=True)
            return
        try:
            with self.precision(precision):
                self._line(name, precision, call, limit, beside, repeats, eager)
        except Exception as error:  # one line that fails leaves the others
            traceback.print_exc()
            self.lines.append({"name": name, "precision": precision, "failed": str(error)})
        self.results.save()

    def _line(self, name, precision, call, limit, beside, repeats, eager) -> None:
        line: dict[str, Any] = {"name": name, "precision": precision}
        if eager:
            _, line["eager"] = clocked(lambda: call(deeppcr.Loop()), self.device)
        _, line["first"] = clocked(lambda: call(None), self.device)
        reference = call(LOOP)
        loops = [clocked(lambda: call(LOOP), self.device)[1] for _ in range(repeats)]
        for _ in range(4):  # what is seen in the first runs may change what is chosen
            call(None)
        found = [clocked(lambda: call(None), self.device) for _ in range(max(repeats, 3))]
        samples = found[-1][0]
        error = max((each.final - reference.final).abs().max().item() for each, _ in found)
        itself = [(other(LOOP).final - reference.final).abs().max().item() for other in beside]
        line["itself"] = max(itself, default=None)
        allowed = limit or LIMITS[precision] or 2 * max(itself, default=0.0)
        length = int(samples.exact_steps.max())
        line |= {
            "loop": median(loops),
            "found": median(each for _, each in found),
            "seconds": [each for _, each in found],
            "error": error,
            "allowed": allowed,
            "good": error <= allowed,
            "result": samples.result.name,
            "iterations": int(samples.iterations.max()),
            "rows": float(samples.evaluations.double().mean()) / max(length, 1),
            "notes": samples.plan.notes,
            "reserved": torch.cuda.memory_reserved() / 2**30,
        }
        line["gain"] = line["loop"] / line["found"]
        self.lines.append(line)
        self.claim(line)
        size = next((note.split()[1] for note in samples.plan.notes if note.startswith("window: ")), "loop")
        print(
            f"{name:44}{precision:9}loop {1e3 * line['loop']:8.1f}  found {1e3 * line['found']:8.1f}  {line['gain']:5.2f}x  W {size:5}"
            f"its {line['iterations']:4}  rows {line['rows']:5.2f}  error {error:.1e} ({allowed:.0e})  first {1e3 * line['first']:7.0f}"
            + (f" of eager {1e3 * line['eager']:.0f}" if eager else "")
            + (f"  itself {line['itself']:.1e}" if line["itself"] is not None else "")
            + f"  {line['result']}  {line['reserved']:.1f} GiB"
            + ("" if line["good"] else "  NOT WITHIN ITS LIMIT"),
            flush=True,
        )

    def claim(self, line: dict[str, Any]) -> None:
        """Times of a line over the loop's; what is too far from the loop meets no target."""
        name = f"{line['name']}, {line['precision']}"
        target = TARGETS.get((line["name"], line["precision"]), NEVER_BELOW)
        self.results.claim(f"{name}: time over the loop's", 1 / line["gain"] if line["good"] else None, 1 / target)
        if "eager" in line:
            more = line["first"] / line["eager"] - 1
            self.results.claim(f"{name}: what a first call takes more, in loops", more, FIRST)


def sampler(network: Callable, step: Any, length: int, shape: tuple[int, ...], device: torch.device, **more: Any):
    """``call(solver)``, with noise of its own."""
    generator = torch.Generator(device).manual_seed(0)
    noise = Noise.draw(shape, steps=length if isinstance(step, DDPM) else None, generator=generator)
    schedule = SCHEDULE.take(length) if length < 1000 else SCHEDULE

    def call(solver: Any) -> Any:
        given = {} if solver is None else {"solver": solver}
        return sample(network, schedule, noise, step=step, **given, **more)

    return call


def beside_others(network: Callable, rows: int) -> Callable:
    """The network, with every row in a call of so many of it."""

    def repeated(z: Tensor, t: Tensor) -> Tensor:
        return network(z.repeat(rows, 1, 1, 1), t.repeat(rows))[: len(z)]

    return repeated


def by_scheduler(network: Callable, name: str, length: int, shape: tuple[int, ...], device: torch.device):
    import diffusers

    kind = {"Euler": diffusers.EulerDiscreteScheduler, "DPM++": diffusers.DPMSolverMultistepScheduler}[name]
    scheduler = kind(num_train_timesteps=1000, beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    scheduler.set_timesteps(length, device=device)
    loop = parallelize(scheduler, network)
    latents = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    latents = latents * scheduler.init_noise_sigma
    return lambda solver: loop(latents, **({} if solver is None else {"solver": solver}))


def table(bench: Bench, net: Callable, device: torch.device) -> None:
    """What is asked for: the window against the loop, one sample."""
    one = (1, 3, 32, 32)
    wide = [beside_others(net, rows) for rows in BESIDE]
    for step, length, precisions in (
        (DDIM(), 50, ("tf32", "bfloat16", "float32")),
        (DDIM(), 100, ("tf32", "bfloat16", "float32")),
        (DDPM(), 1000, ("tf32", "bfloat16", "float32")),
    ):
        name = f"{type(step).__name__} {length}, one sample"
        for precision in precisions:
            beside = [sampler(each, step, length, one, device) for each in wide] if precision == "bfloat16" else []
            slow = length == 1000
            bench.line(
                name,
                precision,
                sampler(net, step, length, one, device),
                beside=beside,
                repeats=1 if slow else 3,
                eager=length == 50,
            )


def others(bench: Bench, net: Callable, device: torch.device) -> None:
    """Never slower: samplers, batches and lengths, with defaults."""
    for batch, length, name in (
        (1, 20, "DDIM"), (1, 20, "DPM++"), (1, 50, "Euler"), (1, 50, "DPM++"), (1, 250, "DDPM"), (1, 250, "Euler"),
        (2, 50, "DDIM"), (4, 20, "DDIM"), (4, 50, "DDIM"), (4, 250, "DDPM"), (16, 50, "DDIM"), (16, 20, "DPM++"), (64, 20, "DDIM"), (64, 50, "Euler"),
    ):  # fmt: skip
        shape = (batch, 3, 32, 32)
        if name in ("Euler", "DPM++"):
            call = by_scheduler(net, name, length, shape, device)
        else:
            call = sampler(net, {"DDIM": DDIM(), "DDPM": DDPM()}[name], length, shape, device)
        bench.line(f"{name} {length}, {batch} samples", "tf32", call, repeats=3, eager=length == 20)


def small(bench: Bench, images: Tensor, device: torch.device) -> None:
    """Networks of the paper's sizes, on smaller and grey images: 16 x 16, and 8 x 8 as vectors."""
    torch.manual_seed(0)
    grey = images.mean(1, keepdim=True)
    for name, network, data in (
        ("residual MLP", ResidualMLP(64, hidden=2048), avg_pool2d(grey, 4).flatten(1)),
        ("UNet 16 x 16", UNet(1, base=16), avg_pool2d(grey, 2)),
    ):
        denoiser = AtSteps(network.to(device), SCHEDULE.alphas_bar).to(device)
        ddpm.trained(denoiser, data, TRAINED, batch=256, rate=1e-3, seed=0)
        for length, batch in product((1000, 50), (1, 64)):
            call = sampler(denoiser, DDPM(), length, (batch, *data.shape[1:]), device)
            bench.line(f"{name}, DDPM {length}, {batch} samples", "float32", call)


def guidance(bench: Bench, net: Callable, device: torch.device) -> None:
    """Two halves of a call; the network is told nothing, so that they are alike."""

    def told(z: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        return net(z, t)

    more = {"classes": torch.zeros(1, dtype=torch.long, device=device), "guidance": 2.0, "unconditional": 1}
    bench.line("DDIM 50, guidance", "tf32", sampler(told, DDIM(), 50, (1, 3, 32, 32), device, **more))


def compiled(bench: Bench, net: ddpm.Denoiser, device: torch.device) -> None:
    fast = torch.compile(net)
    for length in (50, 100):
        bench.line(f"DDIM {length}, compiled", "tf32", sampler(fast, DDIM(), length, (1, 3, 32, 32), device))


def main() -> int:
    parser = parser_of(__doc__, "nothing: a network of real size needs its time")
    parser.add_argument("--data", type=Path, required=True, help="a folder with CIFAR-10")
    parser.add_argument("--train", type=float, default=120.0, help="seconds")
    parser.add_argument("--model", type=Path, default=None, help="where the network is kept")
    parser.add_argument("--parts", default="table,others,small,guidance,compiled")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; what has no time left is left out")
    chosen = parse(parser, None)
    device = torch.device("cuda")
    results, begun = Results("real-diffusion", chosen, parts=chosen.parts), time.monotonic()
    torch.manual_seed(0)
    net = ddpm.unet(32, 3, 128).to(device)
    images = cifar10(chosen.data).train.to(device)
    torch.backends.cudnn.benchmark = True
    about = ddpm.trained(net, images, chosen.train, batch=128, rate=2e-4, seed=0, path=chosen.model)
    torch.backends.cudnn.benchmark = False
    print("network:", about, flush=True)
    bench = Bench(device, results, chosen.budget - (time.monotonic() - begun))
    results.more["network"] = about
    for part in chosen.parts.split(","):
        if part == "small":
            small(bench, images, device)
        else:
            {"table": table, "others": others, "guidance": guidance, "compiled": compiled}[part](bench, net, device)
    results.more["reserved"] = torch.cuda.max_memory_reserved() / 2**30
    print(f"reserved at most: {results.more['reserved']:.1f} GiB")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
