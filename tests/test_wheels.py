"""What gets installed: the library, which needs PyTorch alone, and the experiments, a package of their own."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).resolve().parents[1]
dist = script(".ci", "dist")


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(dist, tmp_path_factory, pytestconfig):
    """What is published: source distribution and wheel."""
    if pytestconfig.getoption("--device") != "cpu":
        pytest.skip("the same for every device")
    return dist.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheels(built, tmp_path_factory) -> dict[str, Path]:
    """Those of library and experiments, by the name of the package."""
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT / "experiments")
    (experiments,) = folder.glob("*.whl")
    return {path.name.partition("-")[0]: path for path in (built.wheel, experiments)}


def files_of(wheel: Path) -> dict[str, bytes]:
    """But those about the wheel itself, which go by their last names."""
    with zipfile.ZipFile(wheel) as archive:
        return {re.sub(r"^[^/]*\.dist-info/", "", name): archive.read(name) for name in archive.namelist()}


def requirements_of(wheel: Path) -> set[str]:
    """Of the package without extras, by name."""
    found = Parser().parsestr(files_of(wheel)["METADATA"].decode()).get_all("Requires-Dist", [])
    return {re.split(r"[^\w-]", each)[0] for each in found if "extra ==" not in each}


def sources(package: Path) -> set[str]:
    found = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in found}


def test_the_wheel_of_the_library_has_the_library_alone(wheels):
    found = files_of(wheels["deeppcr"])
    assert {name for name in found if "/" in name and not name.startswith("licenses/")} == sources(ROOT / "src/deeppcr")
    assert "deeppcr/py.typed" in found
    assert "entry_points.txt" not in found  # no command
    assert requirements_of(wheels["deeppcr"]) == {"torch"}


def test_the_wheel_of_the_experiments_has_its_command_and_its_assets(wheels):
    found = files_of(wheels["deeppcr_paper"])
    assert {name for name in found if "/" in name} == sources(ROOT / "experiments/src/deeppcr_paper")
    assert any(name.endswith(".css") for name in found)
    assert "deeppcr-paper = deeppcr_paper.__main__:main" in found["entry_points.txt"].decode()
    assert {"deeppcr", "filelock", "matplotlib", "safetensors", "typer"} <= requirements_of(wheels["deeppcr_paper"])


def test_what_is_published_is_fit_to_be(dist, built):
    dist.check_contents(built)
    with tarfile.open(built.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "constraints.txt",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        ".ci/run",
    } <= packed
    assert {f"src/{name}" for name in sources(ROOT / "src/deeppcr")} <= packed


def test_the_library_works_with_torch_alone(dist, wheels, tmp_path):
    """From its wheel, by itself; whatever else is installed cannot be imported."""
    zipfile.ZipFile(wheels["deeppcr"]).extractall(tmp_path)  # as pip does, in a moment
    missing = ("triton", "rich", "typer", "matplotlib", "sklearn", "scipy", "diffusers", "deeppcr_paper")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n{dist.example()}{dist.SOLVED}print(deeppcr.__file__)"
    said = run(sys.executable, "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert said.split() == [str(tmp_path / "deeppcr" / "__init__.py")]


@pytest.mark.thorough
def test_the_library_works_where_nothing_else_is_installed(dist, built):
    """But PyTorch and what that needs, linked to, so that it takes no network; ``make dist`` installs them."""
    assert dist.use(built.wheel, sys.executable, must=True, linked=True).endswith("works")


def test_only_what_is_required_is_linked(dist, tmp_path):
    dist.link(tmp_path, "torch", without=frozenset({"triton"}))
    found = {path.name for path in tmp_path.iterdir()}
    assert {"torch", "sympy", "mpmath"} <= found  # mpmath is sympy's requirement
    assert not {"triton", "pytest", "numpy", "deeppcr_paper"} & found
    with pytest.raises(dist.Failed, match="not installed"):
        dist.link(tmp_path, "no-such-package")


@pytest.mark.thorough
def test_the_experiments_work_where_nothing_else_is_installed(wheels, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    apart = {"cwd": tmp_path, "env": {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}}
    constrained = ("install", "--quiet", "-c", ROOT / "constraints.txt")
    run(programs / "python", "-m", "pip", *constrained, *wheels.values(), **apart)
    assert "mlp-timing" in run(programs / "deeppcr-paper", "reproduce", "--list", **apart)
