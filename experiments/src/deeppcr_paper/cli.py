"""The command ``deeppcr-paper``: run the paper's experiments, and make a page of the results."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import deeppcr

from .bars import Bars
from .catalogue import BEYOND, EXPERIMENTS
from .everything import run_all
from .experiment import AGAIN, BAD, STOPPED, Context, OutOfTime
from .side_by_side import measure_side_by_side
from .store import PARTIAL, PaperError, check_folder

app = typer.Typer(
    help="The experiments of the DeepPCR paper, loops run in parallel over their steps: each by one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def messages() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except PaperError as error:
        messages().print(f"[bold red]deeppcr-paper:[/] {escape(str(error))}")
        raise typer.Exit(BAD) from None


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
    asked: bool = typer.Option(
        False,
        "--version",
        callback=print_version,
        is_eager=True,
        help="Print the versions of deeppcr and torch, and end.",
    ),
) -> None:
    pass


# Options say their names: Typer 0.27 takes none from a parameter whose option has a metavar.
@app.command()
def reproduce(
    name: str = typer.Argument("", metavar="NAME", help="The experiment; --list shows them. [bold]all[/]: one by one."),
    files: list[Path] = typer.Argument(
        None, metavar="FILE1 FILE2", help="For [bold]hardware[/] only: two result files of mlp-timing."
    ),
    show_list: bool = typer.Option(False, "--list", help="List the experiments, and do nothing else."),
    quick: bool = typer.Option(
        False, "--quick", help="Small sizes, about 20 seconds on a laptop: shows that it works."
    ),
    device: str = typer.Option(
        "", "--device", metavar="DEVICE", help="Where it runs: cpu, cuda, cuda:1. Default: a GPU if there is one."
    ),
    data_dir: Path = typer.Option(
        None,
        "--data-dir",
        metavar="DIR",
        help="Folder with the four files of MNIST as they are published, gzipped or not; diffusion also takes "
        "cifar-10-batches-bin/ and celeba/ in it. Default: the folder in DEEPPCR_DATA, else MNIST is downloaded. Quick "
        "runs use scikit-learn's digits unless it is given, those of diffusion unless --set data says otherwise.",
    ),
    out: Path = typer.Option("results", "--out", metavar="DIR", help="Folder for the result file."),
    models: Path = typer.Option(
        None,
        "--models",
        metavar="DIR",
        help="Folder for the networks that the diffusion experiments train, which they share. Default: OUT/models.",
    ),
    seed: int = typer.Option(0, "--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of all random numbers."),
    changes: list[str] = typer.Option(
        (),
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting of the experiment, a list as depths=64,1024; may be given several times.",
    ),
    only: list[str] = typer.Option(
        (),
        "--only",
        metavar="NAME=VALUE",
        help="Measure only the cells with this value, such as w=16,32 or part=training; may be given several times. "
        "The file stays partial; the same command with other cells, or without --only, goes on.",
    ),
    jobs: int = typer.Option(
        None,
        "--jobs",
        metavar="N",
        min=1,
        help="Measure only the cells in which nothing is timed (most trainings), N at a time in processes of their own that "
        "share the device; the same command without --jobs goes on with the others.",
    ),
    time_limit: float = typer.Option(
        None, "--time-limit", metavar="MIN", help="Stop after so many minutes; the same command goes on from there."
    ),
) -> None:
    """Run one experiment of the paper and write its results to one JSON file.

    Try [bold]deeppcr-paper reproduce mlp-timing --quick[/] first. A run that is
    interrupted (Ctrl-C, --time-limit, a power cut) leaves what is finished in
    OUT; the same command goes on from there, on this or another machine of the
    same kind. What is finished is measured anew, into a file of its own.
    Cells can be shared among machines by [bold]--only[/]: with their
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
    with errors_in_one_line():
        chosen = [each for each in EXPERIMENTS if name in (each.name, "all")] or [
            each for each in BEYOND if each.name == name
        ]
        if not chosen:
            known = ", ".join([*(each.name for each in (*EXPERIMENTS, *BEYOND)), "all"])
            raise PaperError(f"{f'unknown experiment {name!r}' if name else 'which experiment?'}; there are: {known}")
        if files and name != "hardware":
            raise PaperError(f"{name} takes no files; only hardware compares result files")
        if name == "all" and (changes or only):
            raise PaperError("all: --set and --only are for one experiment; name it")
        if time_limit is not None and not time_limit > 0:  # nor NaN
            raise PaperError(f"--time-limit {time_limit:g}: expected more than 0 minutes")
        for folder in (out, models or out):  # before anything is downloaded or trained
            check_folder(folder)
        where, bars = find_device(device), Bars(messages())
        deadline = None if time_limit is None else time.monotonic() + 60 * time_limit

        def context() -> Context:
            bars.begin(0, 0)
            return Context(where, data_dir, tuple(files or ()), deadline, bars, models=models)

        torch.set_float32_matmul_precision("highest")
        try:
            with bars, warnings.catch_warnings():
                # What a solve warns about is in the records; between the bars it would only be noise.
                warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
                if name == "all":
                    endings = set()
                    for each, ended in run_all(chosen, context, out, quick=quick, seed=seed, jobs=jobs):
                        endings.add(ended.partition(":")[0])
                        print(f"{each}: {ended}", flush=True)
                    # What fails needs somebody; what is out of time only the same command again.
                    raise typer.Exit(BAD if "failed" in endings else AGAIN if "out of time" in endings else 0)
                measure_all = partial(measure_side_by_side, jobs=jobs) if jobs else None
                path, summary = chosen[0].run(
                    context(), out, quick=quick, seed=seed, changes=changes, only=only, measure_all=measure_all
                )
        except (KeyboardInterrupt, OutOfTime) as stop:
            why = "time limit reached" if isinstance(stop, OutOfTime) else "interrupted"
            console = messages()
            console.print(f"{why}; {bars.finished} of {bars.cells} cells are in {escape(str(out))}. To go on:")
            console.print(f"  {escape(shlex.join(['deeppcr-paper', *sys.argv[1:]]))}")
            raise typer.Exit(AGAIN if isinstance(stop, OutOfTime) else STOPPED) from None
    if path.name.endswith(PARTIAL):
        asked = " and ".join(["--only"] * bool(only) + ["--jobs"] * bool(jobs))
        print(f"{bars.finished} cells as asked for by {asked}; without, the same command measures the others")
    else:
        for line in chosen[0].lines(summary):
            print(line)
    print(f"written to {path}")


@app.command()
def report(
    results: list[Path] = typer.Option(
        ["results"],
        "--results",
        metavar="DIR",
        help="Folder with result files; may be given several times. Default: results.",
    ),
    out: Path = typer.Option("report.html", "--out", metavar="FILE", help="The page that is written."),
) -> None:
    """Build one HTML page from the results: the paper's claims and our figures, and a map of the speed-up.

    The page needs nothing but a browser. Of each experiment on each machine it
    shows the newest finished result, quick ones only where there is no full one.
    """
    from .report import build  # draws: what that needs takes long to import

    with errors_in_one_line(), messages().status("drawing the figures"):
        path = build(results, out)
    print(f"written to {path}")


def find_device(name: str) -> torch.device:
    """The device of that name, if it is there; by default a GPU if there is one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        raise PaperError(f"--device {name}: no such kind of device; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise PaperError(f"--device {name}: the experiments run on cpu and cuda")
    if device.type == "cuda":
        if (device.index or 0) >= count:
            found = f"{count} CUDA devices" if count else "no CUDA device"
            raise PaperError(f"--device {name}: torch {torch.__version__} finds {found} on this machine")
        torch.cuda.set_device(device.index or 0)
    return device


def catalogue() -> Table:
    table = Table(title="deeppcr-paper reproduce NAME [--quick]", title_justify="left")
    for heading in ("NAME", "in the paper", "what"):
        table.add_column(heading, no_wrap=heading == "NAME")
    for each in (*EXPERIMENTS, *BEYOND):
        table.add_row(each.name, each.paper, each.what)
    return table


if __name__ == "__main__":  # python -m deeppcr_paper.cli must not end in silence
    app()
