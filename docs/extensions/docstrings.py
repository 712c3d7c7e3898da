"""What the API page needs to read the docstrings of the package: loaded by mkdocs.yml, no part of the site.

In the source an example is a plain run of ``>>>`` lines, where doctest finds it, and parameters that share a sentence share
a line, ``atol, rtol: ...``. The reader of docstrings behind the page wants a section for the one and a line each for the other.
"""

import re

import griffe

_SHARED = re.compile(r"^(\s+)(\w+(?:, \w+)+): (.*)$")


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _with_section(_one_line_each(obj.docstring.value))


def _one_line_each(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        shared = _SHARED.match(line)
        if shared is None:
            lines.append(line)
        else:
            indent, names, meaning = shared.groups()
            lines += [f"{indent}{name}: {meaning}" for name in names.split(", ")]
    return "\n".join(lines)


def _with_section(text: str) -> str:
    before, prompt, example = text.partition("\n>>> ")
    if not prompt:
        return text
    return f"{before}\n\nExamples:\n" + "\n".join(f"    {line}".rstrip() for line in f">>> {example}".split("\n"))
