"""Build what is published, look into it, and use it where nothing else is installed: ``make dist``.

The source distribution first, then the wheel from that, as an installer would build it. Nothing is uploaded.

    make dist                                  # with every supported Python that is on the PATH; at least this one must work
    make dist ARGS="--python 3.12"             # with this one, which must work
    make dist ARGS="--linked"                  # without a network: PyTorch and what it needs are links to those of this Python
    make dist ARGS="--build-only"              # no environments
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from trove_classifiers import classifiers as known_classifiers

ROOT = Path(__file__).resolve().parents[1]
#: What is not for publishing: caches, results of runs that were stopped.
NEVER = re.compile(r"__pycache__|\.pyc$|\.partial|\.tmp$|\.DS_Store|(^|/)\.(venv|git)(/|$)")

#: After the README's example, which may take the loop: the same in parallel.
SOLVED = """
parallel = deeppcr.solve(step, z0, xs, solver=deeppcr.Newton())
assert parallel.result is deeppcr.Result.CONVERGED, parallel
torch.testing.assert_close(parallel.states, solution.states, rtol=1e-3, atol=1e-4)
"""
#: And a step as a kernel, which Triton's interpreter runs without a GPU.
KERNEL = """
from deeppcr import runtime
runtime.KERNEL_DEVICES.add("cpu")
cosine = lambda z: 0.5 * torch.cos(z)
kernel, plain = (deeppcr.solve(cosine, torch.ones(2, 3), length=5, solver=deeppcr.Loop(by=by)) for by in ("kernel", "python"))
torch.testing.assert_close(kernel.states, plain.states)
"""
#: Without Triton: none is there, and who asks for a kernel is told.
NO_KERNEL = """
import importlib.util
assert importlib.util.find_spec("triton") is None
try:
    deeppcr.solve(torch.cos, torch.ones(3), length=5, solver=deeppcr.Loop(by="kernel"))
except ValueError:
    pass
else:
    raise AssertionError("a kernel without Triton")
"""


class Failed(Exception):
    """What was built is not fit to be published, or does not work."""


def run(*command: object, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))[:300]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """The source distribution of the checkout, and the wheel of the source distribution."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", folder.resolve())
    run(*hatchling, "-t", "sdist", cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(
                unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
            )  # from Python 3.11.4 on
        (source,) = Path(unpacked).iterdir()
        run(*hatchling, "-t", "wheel", cwd=source)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


def metadata_of(built: Built) -> tuple[bytes, bytes]:
    """As it stands in each of the two."""
    with tarfile.open(built.sdist) as archive:
        source = archive.extractfile(f"{built.sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert source is not None
        of_sdist = source.read()
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return of_sdist, archive.read(name)


def check_metadata(text: bytes) -> Metadata:
    """What an index would refuse: fields that are wrong, classifiers that it does not know, a page without a type."""
    try:
        found = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        raise Failed("metadata: " + "; ".join(map(str, errors.exceptions))) from None
    unknown = set(found.classifiers or ()) - known_classifiers
    if unknown:
        raise Failed(f"metadata: an index knows no classifier {', '.join(sorted(unknown))}")
    if not found.description or found.description_content_type != "text/markdown":
        raise Failed("metadata: the README is not the description, as text/markdown")
    return found


def check_contents(built: Built) -> None:
    """Both are of one version, say the same of themselves, are for every platform, and hold nothing that was left lying about."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    name, of_sdist = parse_sdist_filename(built.sdist.name)
    wheel_name, of_wheel, _, tags = parse_wheel_filename(built.wheel.name)
    if not (name == wheel_name == "deeppcr" and str(of_sdist) == str(of_wheel) == version):
        raise Failed(f"{built.sdist.name} and {built.wheel.name} are not deeppcr {version}")
    if {str(tag) for tag in tags} != {"py3-none-any"}:
        raise Failed(f"{built.wheel.name} is not for every platform")
    in_sdist, in_wheel = metadata_of(built)
    if in_sdist != in_wheel:
        raise Failed("the metadata of source distribution and wheel differ")
    check_metadata(in_wheel)
    with tarfile.open(built.sdist) as source, zipfile.ZipFile(built.wheel) as wheel:
        left = [name for name in (*source.getnames(), *wheel.namelist()) if NEVER.search(name)]
    if left:
        raise Failed(f"not for publishing: {', '.join(left[:5])}")
    if find_spec("twine"):
        run(sys.executable, "-m", "twine", "check", "--strict", built.sdist, built.wheel)


def example() -> str:
    """The first one of the README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]


def supported() -> list[str]:
    """Versions of Python, as the classifiers have them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]


def works(python: str) -> bool:
    """Whether it is there, and is one: pyenv has names on the PATH for versions that are switched off."""
    return (
        bool(shutil.which(python))
        and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode
    )


def link(site: Path, *names: str, without: frozenset[str] = frozenset()) -> None:
    """What this Python has of these packages and of all that they require, as links in another environment's ``site``."""
    waiting, seen = list(names), set(without)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            if name in names:
                raise Failed(f"--linked: {name} is not installed here") from None
            continue  # a requirement that PyTorch does without, as it does here
        for each in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = site / each
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(each))).resolve())
        requirements = map(Requirement, found.requires or ())
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


class Clean:
    """An environment in which nothing is installed.

    Args:
        linked: take packages from this Python, by links, instead of installing them
    """

    def __init__(self, folder: Path, python: str, *, linked: bool):
        self.linked = linked
        self.apart = {
            "cwd": folder,
            "env": {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        }
        run(python, "-m", "venv", *(["--without-pip"] if linked else []), folder / "venv", **self.apart)
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"

    def says(self, code: str, **variables: str) -> str:
        return run(self.python, "-c", code, cwd=self.apart["cwd"], env={**self.apart["env"], **variables}).strip()

    def install(self, *what: object) -> None:
        """Wheels, or packages by name with all that they require; none of Triton, which no wheel of the library's asks for."""
        if not self.linked:
            run(self.python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *what, **self.apart)
            return
        site = Path(self.says("import sysconfig; print(sysconfig.get_path('purelib'))"))
        for each in what:
            if isinstance(each, Path):
                zipfile.ZipFile(each).extractall(site)
                link(site, "torch", without=frozenset({"triton"}))
            else:
                link(site, str(each))


def use(wheel: Path, python: str, *, must: bool, linked: bool = False) -> str:
    """Install it into an environment of its own and run the README's example, without Triton and with it. Returns what was shown.

    Args:
        must: whether it is an error where pip finds nothing that it needs, as there may be no PyTorch for this Python at hand
    """
    with tempfile.TemporaryDirectory() as folder:
        clean = Clean(Path(folder), python, linked=linked)
        try:
            clean.install(wheel)
        except Failed as failure:
            if must:
                raise
            clean.install("--no-deps", wheel)
            run(clean.python, "-m", "compileall", "-q", Path(folder) / "venv", **clean.apart)
            why = next((line for line in str(failure).splitlines() if line.startswith("ERROR")), "pip failed")
            return f"compiled only, as what it needs cannot be installed ({why})"
        where = clean.says(
            "import deeppcr, pathlib; print(pathlib.Path(deeppcr.__file__).is_relative_to(pathlib.Path.cwd()))"
        )
        if where != "True":
            raise Failed("another deeppcr was imported than the one that was installed")
        before = [f"torch {clean.says('import torch; print(torch.__version__)')}"]
        if clean.says("import importlib.util; print(importlib.util.find_spec('triton') is None)") == "True":
            clean.says(example() + SOLVED + NO_KERNEL)
            before.append("without Triton")
        clean.install("triton", "numpy")
        clean.says(example() + SOLVED + KERNEL, TRITON_INTERPRET="1")
        return ", ".join([*before, f"with Triton {clean.says('import triton; print(triton.__version__)')}: works"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build what is published, check it, and use it in clean environments.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to; emptied before (dist/)")
    parser.add_argument("--python", action="append", help="a version, such as 3.12, that must work; may be given again")
    parser.add_argument(
        "--linked", action="store_true", help="install nothing: link to the PyTorch of this Python, which alone is used"
    )
    parser.add_argument("--build-only", action="store_true", help="make no environments")
    options = parser.parse_args(arguments)
    try:
        built = build(options.out)
        check_contents(built)
        for path in (built.sdist, built.wheel):
            print(
                f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, checked{' (by twine, too)' * bool(find_spec('twine'))}"
            )
        this_one = "{}.{}".format(*sys.version_info)
        versions = [] if options.build_only else [this_one] if options.linked else options.python or supported()
        for version in versions:
            python = sys.executable if options.linked else f"python{version}"
            if works(python):
                must = version == this_one or bool(options.python)
                said = use(built.wheel, python, must=must, linked=options.linked)
            elif options.python:
                raise Failed(f"{python} is not on the PATH")
            else:
                said = "not at hand"
            print(f"Python {version}: {said}", flush=True)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
