"""The whole comparison, or parts of it: launches every measurement, keeps all numbers, draws them, and says which bars
are reached. ``scripts/bench`` runs this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bars
import chart
import machine
from launch import Launched, run_python
from rich.console import Console
from two_hosts import TwoHosts, Unavailable, two_hosts

Result = dict[str, Any]
"""What a launch writes about one comparison."""

HERE = Path(__file__).resolve().parent
ROUND, TRAINING = HERE / "round.py", HERE / "end_to_end.py"

PARTS = {
    "rounds": "a round beside others', on one host",
    "wire": "a round over a limited link, with every wire (needs root)",
    "training": "samples per second and time to an accuracy over a limited link (needs root)",
}
SIZES = [[f"{tensors}x{megabytes}MB" for tensors in (10, 300, 2000)] for megabytes in (1, 10, 100)]
TOGETHER = "ours", "hvd", "MPI", "PeriodicModelAverager", "one tensor"  # not each by itself: four ranks take minutes
LARGE = "packed", "flat", "grouped", "PeriodicModelAverager", "MPI"  # of which 16 GB of memory hold two ranks
LINKS = {"10gbit": 10, "1gbit": 10, "100mbit": 3}  # and how often a round is repeated


@dataclass(frozen=True)
class Measurement:
    """One launch. Without a ``link`` it is on this host, with ``backend``."""

    part: str
    script: Path
    options: tuple[str, ...]
    limit_s: float
    np: int = 2
    backend: str = "gloo"
    link: str = ""

    @property
    def label(self) -> str:
        """What tells its results from those of others."""
        where = self.link or f"{self.np} ranks, {self.backend}"
        return " ".join([f"{self.part}, {where}:", self.script.name, *self.options])


def plan(quick: bool) -> Iterator[Measurement]:
    """What tells most comes first, since a run may be broken off."""
    yield from rounds(2, quick)
    for link, repeats in {"1gbit": 2}.items() if quick else LINKS.items():
        words = ("packed", "flat", "fp16", "bf16", "int8", "one tensor")
        options = ("--only", *words, "--repeats", str(repeats))
        yield Measurement("wire", ROUND, options, 300 if quick else 1200, link=link)
    for link in ("1gbit",) if quick else LINKS:
        few = ("--only", "hvd.DistributedOptimizer", "period 8", "period 32", "--turns", "2", "--seconds", "20")
        yield Measurement("training", TRAINING, few if quick else (), 300 if quick else 3600, link=link)
    if not quick:
        yield from rounds(4, quick)


def rounds(np: int, quick: bool) -> Iterator[Measurement]:
    repeats = ("--repeats", "5" if quick else "30")
    limit_s = 200 if quick else 900
    for backend in ("mpi", "gloo"):
        yield Measurement("rounds", ROUND, repeats, limit_s, np, backend)
        yield Measurement("rounds", ROUND, (*repeats, "--framework", "tensorflow"), limit_s, np, backend)
        small = ("--shapes", bars.SMALL_TENSORS, "--only", "flat", "--repeats", "30")
        yield Measurement("rounds", ROUND, small, limit_s, np, backend)
        if not quick and np == 2:
            large = ("--repeats", "10", "--shapes", "gpt2_small", "--only", *LARGE)
            yield Measurement("rounds", ROUND, large, limit_s, np, backend)
    if not quick:
        few = ("--repeats", "5") if np == 2 else ("--repeats", "3", "--only", *TOGETHER)
        for backend, sizes in itertools.product(("mpi", "gloo"), SIZES):
            yield Measurement("rounds", ROUND, (*few, "--shapes", *sizes), 1800, np, backend)


def run(measurement: Measurement, hosts: TwoHosts | None) -> tuple[Launched, list[Result]]:
    """Launch it; what it wrote, which is nothing if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        json_path = Path(folder) / "result.json"
        arguments = [str(measurement.script), *measurement.options, "--json", str(json_path)]
        if hosts is None:
            options = [f"--{measurement.backend}"]
            launched = run_python(measurement.np, arguments, measurement.limit_s, options=options)
        else:
            hosts.limit(measurement.link)
            launched = hosts.run_python([*arguments, "--link", measurement.link], measurement.limit_s)
        good = launched.returncode == 0 and json_path.exists()
        return launched, json.loads(json_path.read_text()) if good else []


def save(path: Path, description: dict[str, object], results: list[Result]) -> None:
    """One line for each result, so that a difference can be read."""
    lines = ",\n".join(json.dumps(result) for result in results)
    path.write_text(f'{{"machine": {json.dumps(description)},\n"results": [\n{lines}\n]}}\n')


def parse() -> argparse.Namespace:
    described = "\n".join(f"  {part:<10}{what}" for part, what in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=f"{(__doc__ or '').partition('. ')[0].strip()}.\n\nparts:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("parts", nargs="*", metavar="part", help="which parts (default: all)")
    option("--quick", action="store_true", help="some minutes: few repeats, the most telling measurements only")
    option("--resume", action="store_true", help="go on with a run that was broken off: keep what it has measured")
    option("--output", type=Path, help="folder (default: benchmarks/results, or with --quick output)")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}, only: {', '.join(PARTS)}")
    return arguments


def load(path: Path, description: dict[str, object]) -> list[Result]:
    """The results of a run that was broken off.

    Raises:
        SystemExit: they are of another machine.
    """
    if not path.exists():
        return []
    kept = json.loads(path.read_text())
    differing = {key for key in description if kept["machine"].get(key) != description[key]}
    if differing - {"date", "load_before"}:
        sys.exit(
            f"{path} is of another machine or other versions ({', '.join(sorted(differing))}): leave out --resume."
        )
    results: list[Result] = kept["results"]
    return results


def measure(
    parts: Sequence[str], quick: bool, results: list[Result], keep: Callable[[list[Result]], None]
) -> list[str]:
    """Add to the results what they lack, keep them after every launch, and say what could not be measured, and why."""
    there = {result.get("launch") for result in results}
    lacking = [each for each in plan(quick) if each.part in parts and each.label not in there]
    failures = []
    with ExitStack() as stack:
        hosts = None
        if any(measurement.link for measurement in lacking):
            try:
                hosts = stack.enter_context(two_hosts())
            except Unavailable as error:
                failures.append(f"wire and training left out: {error}")
        for measurement in lacking:
            if measurement.link and hosts is None:
                continue
            launched, found = run(measurement, hosts if measurement.link else None)
            results += [{"launch": measurement.label, **result} for result in found]
            if not found:
                ended = "its time was over" if launched.returncode == 124 else f"exit code {launched.returncode}"
                failures.append(f"{measurement.label} failed: {ended}")
            keep(results)
    return failures


def main() -> None:
    arguments = parse()
    folder = arguments.output or (HERE.parent / "output" if arguments.quick else HERE / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("-".join(["quick" if arguments.quick else "full", *arguments.parts]) + ".json")
    console = Console(highlight=False, width=100)
    description = machine.describe()
    console.print(f"{description['processor']}, {description['cores']} cores, {description['memory_gb']} GB")
    results = load(path, description) if arguments.resume else []
    failures = measure(arguments.parts or list(PARTS), arguments.quick, results, partial(save, path, description))
    console.print("", bars.table(bars.bars(results)), sep="\n")
    picture = chart.draw(results, path.with_suffix(".png"))
    console.print(f"\nNumbers: {path}" + (f", picture: {picture}" if picture else ""), soft_wrap=True)
    for failure in failures:
        console.print(failure, style="red", soft_wrap=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
