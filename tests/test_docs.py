"""Every Python block of the README and the documentation runs as it stands there, and links lead somewhere.

A block runs by itself in plain Python, unless an HTML comment before it, which readers do not see, says otherwise:

    <!-- runs: horovodrun -np 2 -->                     on two ranks, where there is no TensorFlow
    <!-- runs: horovodrun -np 2, with TensorFlow -->    on two ranks, with it
    <!-- not run: why -->                               not at all, and why
    <!-- before: ... -->                                Python to run before it
    <!-- after: ... -->                                 Python to run after it, such as assertions

The blocks of one page share their names, as they do for who reads from top to bottom. All that are to run in the same
way do so in one launch, page by page.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

ALONE, TORCH, TENSORFLOW = "alone", "horovodrun -np 2", "horovodrun -np 2, with TensorFlow"
COMMENTS = ("runs", "not run", "before", "after")

# Comments, and fences with what is in them; a fence ends like it began, in the same column.
PIECES = re.compile(
    r"<!-- *(?P<kind>[\w ]+):(?P<text>.*?)-->|^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Block:
    page: Path
    line: int
    language: str
    code: str
    comments: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> str:
        return "not" if "not run" in self.comments else self.comments.get("runs", ALONE).strip()

    def parts(self) -> Iterator[tuple[str, int, str]]:
        """What to run for it, in order, as file, line and code."""
        for kind, line in (("before", 1), ("", self.line), ("after", 1)):
            code = self.comments.get(kind, "") if kind else self.code
            if code:
                yield f"{self.place}, {kind}" if kind else str(self.page), line, code


def blocks(page: Path) -> list[Block]:
    """The fences of a page, each with the comments before it that are meant for it."""
    found, comments, text = [], {}, page.read_text()
    for piece in PIECES.finditer(text):
        if piece["kind"] is not None:
            kind = piece["kind"].strip()
            assert kind in COMMENTS, f"{page.name}: a comment {kind!r} that says nothing to this test"
            comments[kind] = textwrap.dedent(piece["text"]).strip() + "\n"
        else:
            line = text.count("\n", 0, piece.start()) + 2
            found.append(Block(page, line, piece["language"].strip(), textwrap.dedent(piece["code"]), comments))
            comments = {}
    assert not comments, f"{page.name}: a comment after the last block"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def script(runs: str) -> tuple[str, list[str]]:
    """A program that runs all blocks of this kind, and their places, which it prints."""
    chosen = [block for block in PYTHON if block.runs == runs]
    pages = {str(block.page): [] for block in chosen}
    for block in chosen:
        pages[str(block.page)].append((block.place, list(block.parts())))
    program = f"""
import sys

for page in {list(pages.values())!r}:
    names = {{"__name__": "__main__"}}
    for place, parts in page:
        for file, line, code in parts:
            exec(compile("\\n" * (line - 1) + code, file, "exec"), names)  # so that a traceback names the page's line
        sys.stdout.write(f"\\n{{place}} ran\\n")
        sys.stdout.flush()
"""
    return program, [block.place for block in chosen]


def check(output: str, places: list[str], times: int) -> None:
    assert places, "no block runs like this: then this launch is not needed"
    assert {place: output.count(f"{place} ran") for place in places} == dict.fromkeys(places, times), output


def test_blocks_that_run_by_themselves(tmp_path):
    program, places = script(ALONE)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, places, 1)


@pytest.mark.parametrize(("runs", "framework"), [(TORCH, "torch"), (TENSORFLOW, "tensorflow")])
def test_blocks_that_run_on_ranks(horovodrun, runs, framework, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them write checkpoints
    program, places = script(runs)
    done = horovodrun(2, program, limit=100, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, framework=framework)
    assert done.returncode == 0, done.output
    check(done.output, places, 2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page):
    for block in blocks(page):
        if block.language == "python":
            assert block.runs in ("not", ALONE, TORCH, TENSORFLOW), block.place
            assert len(block.comments.get("not run", "a reason.").split()) >= 2, f"{block.place}: why is it not run?"
        else:
            assert not re.search(r"^(from \w[\w.]* )?import \w", block.code, re.MULTILINE), f"{block.place} is Python"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def messages() -> str:
    """All strings of the package, with a blank for what is filled in, as one text."""
    found = []
    for path in (ROOT / "hvd_averaging").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_are_explained_are_those_of_the_package():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    ours = text.partition("## Messages of Horovod")[0]
    quoted = [heading.strip("… ") for heading in re.findall(r"^### (.*)$", ours, re.MULTILINE)]
    assert quoted
    said = messages()
    assert [message for message in quoted if message not in said] == []
