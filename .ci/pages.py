"""The documentation of this version beside those of earlier ones: ``make site``.

In the folder (``site/``, which may hold earlier versions already) this version's pages are a folder by themselves, 0.2 for 0.2.0; the list that the
theme's menu of versions reads, ``latest/`` and the first page are written anew. The layout is that of mike, which may take over.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REDIRECT = '<!doctype html><meta charset="utf-8"><title>deeppcr</title><meta http-equiv="refresh" content="0; url={to}"><a href="{to}">deeppcr</a>\n'


def this_version() -> str:
    """Major and minor: a patch replaces the pages of what it mends."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return ".".join(project["version"].split(".")[:2])


def build(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target.resolve())]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)


def write_list(folder: Path) -> list[str]:
    """Every version in the folder, the newest first; that one is the latest, and where a reader begins."""
    found = [each.name for each in folder.iterdir() if each.is_dir() and re.fullmatch(r"\d+\.\d+", each.name)]
    found.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": each, "title": each, "aliases": ["latest"] * (each == found[0])} for each in found]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (folder / "latest").mkdir(exist_ok=True)
    (folder / "latest" / "index.html").write_text(REDIRECT.format(to=f"../{found[0]}/"), encoding="utf-8")
    (folder / "index.html").write_text(REDIRECT.format(to=f"{found[0]}/"), encoding="utf-8")
    (folder / ".nojekyll").touch()  # folders whose names begin with _ are pages, too
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build(folder / this_version())
    print(f"open {folder}/index.html: {', '.join(write_list(folder))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site")
