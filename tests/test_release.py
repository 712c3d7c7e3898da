"""What a release says of itself, in one place and the same everywhere: versions, what it runs with, how it is published."""

import json
import re
import tomllib
from datetime import date
from pathlib import Path

import pytest

import deeppcr
from scripts import script

ROOT = Path(__file__).resolve().parents[1]
dist = script(".ci", "dist")
pages = script(".ci", "pages")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def project(folder=".") -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def read(path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def parsed(path) -> dict:
    return pytest.importorskip("yaml").safe_load(read(path))


def minors(first: str, last: str) -> list[str]:
    """Every minor version from the first to the last."""
    (major, low), (same, high) = (each.split(".") for each in (first, last))
    assert major == same
    return [f"{major}.{minor}" for minor in range(int(low), int(high) + 1)]


def supported() -> dict[str, list[str]]:
    """The statement: of Python and of PyTorch, every version from the oldest to the newest that is tested."""
    rows = re.findall(r"^\| (Python|PyTorch) \| ([\d.]+) \| ([\d.]+) \|$", read("docs/SUPPORT.md"), re.MULTILINE)
    assert [name for name, *_ in rows] == ["Python", "PyTorch"]
    return {name: minors(first, last) for name, first, last in rows}


def test_one_version():
    (version, when), *_ = re.findall(r"^## \[([^\]]+)\] - (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert when == "unreleased" or date.fromisoformat(when)
    said = [project()["project"]["version"], project("experiments")["project"]["version"], deeppcr.__version__]
    assert {version, *said, parsed("CITATION.cff")["version"]} == {version}


def test_project_files_say_which_pythons_as_the_statement_does():
    pythons = supported()["Python"]
    for folder in (".", "experiments"):
        assert project(folder)["project"]["requires-python"] == f">={pythons[0]}"  # and no bound from above
    classified = re.findall(r"Python :: (3\.\d+)$", "\n".join(project()["project"]["classifiers"]), re.MULTILINE)
    assert classified == pythons
    tools = project()["tool"]
    assert tools["ruff"]["target-version"] == "py" + pythons[0].replace(".", "")
    assert tools["pyright"]["pythonVersion"] == pythons[0]


def test_project_files_say_which_torch_as_the_statement_does():
    torches = supported()["PyTorch"]
    assert project()["project"]["dependencies"] == [f"torch>={torches[0]}"]
    pinned = re.search(r"^torch==(\d+\.\d+)\.", read("constraints.txt"), re.MULTILINE)[1]
    assert pinned == torches[-1]


def test_the_workflows_run_what_the_statement_says(dist):
    pairs = parsed(".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert [pair["python"] for pair in pairs] == supported()["Python"]
    assert [pair["torch"] for pair in pairs] == supported()["PyTorch"]
    wheels = read(".github/workflows/wheels.yml")
    assert re.findall(r"--python (\S+?)(?=[ \"])", wheels) == supported()["Python"]
    assert dist.supported() == supported()["Python"]


def test_no_other_page_says_it_again():
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    claim = re.compile(r"Python 3\.\d+ (to|or|and)|(PyTorch|torch) 2\.\d+ (to|or newer|and newer)")
    found = {page.name: claim.search(page.read_text(encoding="utf-8")) for page in others}
    assert {name for name, match in found.items() if match} == set()


def test_the_citation_is_one_and_is_of_this_project():
    """By the format's own schema, as far as it is used here: https://github.com/citation-file-format."""
    cited, ours = parsed("CITATION.cff"), project()["project"]
    assert cited["cff-version"] == "1.2.0"
    assert set(cited) <= {
        "cff-version",
        "message",
        "type",
        "title",
        "version",
        "license",
        "authors",
        "preferred-citation",
    }
    assert cited["message"]
    assert cited["type"] == "software"
    assert cited["title"].startswith(f"{ours['name']}:")
    assert cited["license"] == ours["license"]
    assert cited["authors"] == ours["authors"]
    paper = cited["preferred-citation"]
    assert paper["type"] == "conference-paper"
    assert all({"family-names", "given-names"} == set(author) for author in paper["authors"])
    assert isinstance(paper["year"], int)
    assert paper["url"] == ours["urls"]["Paper"]
    assert paper["identifiers"] == [{"type": "other", "value": f"arXiv:{paper['url'].rpartition('/')[2]}"}]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_little_and_call_what_is_there(path):
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        more = {("publish", "publish"): {"id-token": "write"}, ("docs", "publish"): {"contents": "write"}}
        assert job.get("permissions") == more.get((path.stem, name)), name
    text = read(path)
    for used in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"actions/[\w-]+@v\d+|pypa/[\w-]+@release/v\d+|\./\.github/workflows/\w+\.yml", used), used
        assert not used.startswith("./") or (ROOT / used).exists()
    targets = set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets


def test_there_are_workflows():
    assert [path.stem for path in WORKFLOWS] == ["docs", "publish", "tests", "wheels"]


METADATA = """Metadata-Version: 2.4
Name: deeppcr
Version: 1.0
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

# Words
"""


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("Version: 1.0", "Version: one", "version"),
        ("Typing :: Typed", "Typing :: Somewhat", "no classifier Typing :: Somewhat"),
        ("text/markdown", "text/plain", "README"),
        ("# Words\n", "", "README"),
        ("Classifier:", "Requires-Python: newer\nClassifier:", "requires-python"),
    ],
)
def test_wrong_metadata_is_found(dist, was, becomes, message):
    dist.check_metadata(METADATA.encode())
    assert was in METADATA
    with pytest.raises(dist.Failed, match=message):
        dist.check_metadata(METADATA.replace(was, becomes).encode())


def test_pages_of_versions_stand_side_by_side(pages, tmp_path, monkeypatch):
    for earlier in ("0.1", "0.10", "stylesheets"):
        (tmp_path / earlier).mkdir()
    monkeypatch.setattr(pages, "build", lambda target: target.mkdir())
    monkeypatch.setattr(pages, "this_version", lambda: "0.9")
    pages.main(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["0.10", "0.9", "0.1"]  # by their numbers
    assert [each["aliases"] for each in listed] == [["latest"], [], []]
    assert 'url=0.10/"' in (tmp_path / "index.html").read_text()
    assert 'url=../0.10/"' in (tmp_path / "latest" / "index.html").read_text()


def test_the_site_of_a_version_goes_by_major_and_minor(pages):
    assert pages.this_version() == ".".join(deeppcr.__version__.split(".")[:2])
