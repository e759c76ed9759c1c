"""How findings are shown: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_averaging.cli.findings import Finding, Level, is_broken

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line for each finding, its remedy below it, and a last line that says what it comes to."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=20, overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        # Text, not markup: what is quoted may have square brackets.
        what = Text(finding.what)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="bold" if finding.level is not Level.NOTE else "")
        table.add_row(Text(finding.level.value, _STYLES[finding.level]), Text(finding.about), what)
    console.print(table)
    console.print(Text("\n" + _summary(findings)))


def _summary(findings: Sequence[Finding]) -> str:
    counted = Counter(finding.level for finding in findings)
    parts = [
        f"{counted[level]} {level.value}{'s' if counted[level] > 1 else ''}"
        for level in (Level.ERROR, Level.WARNING, Level.NOTE)
        if counted[level]
    ]
    state = "Something that is needed is broken" if is_broken(findings) else "All that is needed works"
    return f"{state}{': ' if parts else ''}{', '.join(parts)}."


def as_json(findings: Sequence[Finding]) -> str:
    """An object with `works` (true or false) and the list `findings`."""
    content = {"works": not is_broken(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2)
