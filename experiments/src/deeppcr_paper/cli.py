"""The command ``deeppcr``: run the paper's experiments, and make a page of the results."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError:
    raise SystemExit(
        "deeppcr-paper: something it needs is missing; in a clone: pip install -e . -e experiments -c constraints.txt"
    ) from None

import torch

import deeppcr

from .bars import Bars
from .catalogue import EXPERIMENTS
from .everything import run_all
from .experiment import Context, OutOfTime
from .store import PARTIAL, PaperError, check_folder

#: Exit codes: bad input or a full disk; out of time (try again, as in sysexits.h); Ctrl-C.
BAD, AGAIN, STOPPED = 2, 75, 130

app = typer.Typer(
    help="The experiments of the DeepPCR paper, loops run in parallel over their steps: each by one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def version() -> None:
    """Print the versions of deeppcr and torch."""
    print(f"deeppcr {deeppcr.__version__}, torch {torch.__version__}")


def print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the versions of deeppcr and torch, and end."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The experiment; --list shows them. [bold]all[/]: one after the other."),
    ] = "",
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE1 FILE2", help="For [bold]hardware[/] only: two result files of mlp-timing."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the experiments, and do nothing else.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, about 20 seconds on a laptop: shows that it works.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="Where it runs: cpu, cuda, cuda:1. Default: a GPU if there is one."
        ),
    ] = "",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Folder with the four files of MNIST as they are published, gzipped or not; diffusion also takes "
            "cifar-10-batches-bin/ and celeba/ in it. Default: the folder in DEEPPCR_DATA, else MNIST is downloaded. Quick "
            "runs use scikit-learn's digits unless it is given, those of diffusion unless --set data says otherwise.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the result file.")] = Path("results"),
    models: Annotated[
        Path | None,
        typer.Option(
            "--models",
            metavar="DIR",
            help="Folder for the networks that the diffusion experiments train, which they share. Default: OUT/models.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of all random numbers.")
    ] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of the experiment, a list as depths=64,1024; may be given several times.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME=VALUE",
            help="Measure only the cells with this value, such as w=16,32 or part=training; may be given several times. "
            "The file stays partial; the same command with other cells, or without --only, goes on.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="MIN",
            help="Stop after so many minutes; the same command goes on from there.",
        ),
    ] = None,
) -> None:
    """Run one experiment of the paper and write its results to one JSON file.

    Try [bold]deeppcr-paper reproduce mlp-timing --quick[/] first. A run that is
    interrupted (Ctrl-C, --time-limit, a power cut) leaves what is finished in
    OUT; the same command goes on from there, on this or another machine of the
    same kind. Cells can be shared among machines by [bold]--only[/]: with their
    partial files in one folder, the same command makes one of them (two of one
    name: rename one, and let it begin with the experiment's name as before).

    [bold]deeppcr-paper reproduce all[/] runs every experiment at full size, those that
    say the most first, passes over what is finished in OUT, and ends with a line
    for each.

    [bold]--set[/] makes an experiment smaller or larger. A residual network of
    1,024 layers, 300 steps of training in both modes:

    [bold]deeppcr-paper reproduce resnet-training --set depths=1024 --set steps=300[/]

    With [bold]--set dtype=float64 --set solver=default[/] neither rounding nor
    the paper's loose test drive the two apart. A name that an experiment does
    not have, as in [bold]--set x=1[/], lists those that it has.
    """
    if show_list:
        Console(width=None if sys.stdout.isatty() else 120).print(catalogue())
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    experiment = next((each for each in EXPERIMENTS if each.name == name), None)
    watcher = Bars(console)
    try:
        if experiment is None and name != "all":
            known = ", ".join([*(each.name for each in EXPERIMENTS), "all"])
            raise PaperError(f"{f'unknown experiment {name!r}' if name else 'which experiment?'}; there are: {known}")
        if files and name != "hardware":
            raise PaperError(f"{name} takes no files; only hardware compares result files")
        if name == "all" and (changes or only):
            raise PaperError("all: --set and --only are for one experiment; name it")
        if time_limit is not None and not time_limit > 0:  # nor NaN
            raise PaperError(f"--time-limit {time_limit:g}: expected more than 0 minutes")
        for folder in (out, models):  # before anything is downloaded or trained
            if folder is not None:
                check_folder(folder)
        where, deadline = find_device(device), None if time_limit is None else time.monotonic() + 60 * time_limit

        def context() -> Context:
            watcher.clear()
            return Context(where, data_dir, tuple(files or ()), deadline, watcher, models=models)

        torch.set_float32_matmul_precision("highest")
        with watcher, warnings.catch_warnings():
            # What a solve warns about is in the records; between the bars it would only be noise.
            warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
            if experiment is None:
                code = everything(context, out, watcher, quick=quick, seed=seed)
                raise typer.Exit(code)
            path, summary = experiment.run(
                context(), out, quick=quick, seed=seed, changes=changes or (), only=only or ()
            )
    except PaperError as error:
        console.print(f"[bold red]deeppcr-paper:[/] {escape(str(error))}")
        raise typer.Exit(BAD) from None
    except (KeyboardInterrupt, OutOfTime) as stop:
        why = "time limit reached" if isinstance(stop, OutOfTime) else "interrupted"
        console.print(f"{why}; {watcher.finished} of {watcher.cells} cells are in {escape(str(out))}. To go on:")
        console.print(f"  {escape(command_line())}")
        raise typer.Exit(AGAIN if isinstance(stop, OutOfTime) else STOPPED) from None
    if path.name.endswith(PARTIAL):
        print(f"{watcher.finished} cells as asked for by --only; without it the same command measures the others")
        print(f"written to {path}")
        return
    for line in experiment.lines(summary):
        print(line)
    print(f"written to {path}")


def everything(context: Callable[[], Context], out: Path, watcher: Bars, *, quick: bool, seed: int) -> int:
    """Run all experiments, with a line for each as it ends; the exit code."""
    codes = {0}
    for name, ended in run_all(EXPERIMENTS, context, out, quick=quick, seed=seed):
        if ended == "out of time" and watcher.cells:
            ended += f": {watcher.finished} of {watcher.cells} cells"
        codes.add({"finished": 0, "failed": BAD}.get(ended.partition(":")[0], AGAIN))
        print(f"{name}: {ended}", flush=True)
    # What fails needs somebody; what is out of time only the same command again.
    return next(code for code in (BAD, AGAIN, 0) if code in codes)


@app.command()
def report(
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results", metavar="DIR", help="Folder with result files; may be given several times. Default: results."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page that is written.")] = Path("report.html"),
) -> None:
    """Build one HTML page from the results: the paper's claims and our figures, and a map of the speed-up.

    The page needs nothing but a browser. Of each experiment on each machine it
    shows the newest finished result, quick ones only where there is no full one.
    """
    from .report import build  # draws: what that needs takes long to import

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with console.status("drawing the figures"):
            path = build(results or [Path("results")], out)
    except PaperError as error:
        console.print(f"[bold red]deeppcr-paper:[/] {escape(str(error))}")
        raise typer.Exit(BAD) from None
    print(f"written to {path}")


def find_device(name: str) -> torch.device:
    """The device of that name, if it is there; by default a GPU if there is one."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PaperError(f"--device {name}: no such kind of device; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise PaperError(f"--device {name}: the experiments run on cpu and cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise PaperError(f"--device {name}: torch {torch.__version__} finds {found} on this machine")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def catalogue() -> Table:
    table = Table(title="deeppcr-paper reproduce NAME [--quick]", title_justify="left")
    for heading in ("NAME", "in the paper", "what"):
        table.add_column(heading, no_wrap=heading == "NAME")
    for each in EXPERIMENTS:
        table.add_row(each.name, each.paper, each.what)
    return table


def command_line() -> str:
    """The command as it was given, to be given again."""
    return shlex.join(["deeppcr-paper", *sys.argv[1:]])


if __name__ == "__main__":  # python -m deeppcr_paper.cli must not end in silence
    app()
