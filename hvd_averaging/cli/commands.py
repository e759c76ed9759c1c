"""What can be asked for on the command line, and which exit status comes of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import click
from rich.console import Console

from hvd_averaging import __version__
from hvd_averaging.build_horovod.__main__ import main as build
from hvd_averaging.cli import frameworks, hosts, launching, report, smoke, survey, variables
from hvd_averaging.cli.findings import NEEDS, Finding, is_broken, warning, with_needs

_DOCTOR_EPILOG = (
    "Exit status: 0 if all that is needed works, 1 if something needed is broken, 2 if the command line is wrong. "
    "Needed are a framework, Horovod for it, Gloo or MPI, a launcher, the hosts of -H, and what --need names."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hvd-averaging")
def cli() -> None:
    """Model averaging (local SGD and its descendants) for Horovod."""


@cli.command(epilog=_DOCTOR_EPILOG)
@click.option("-np", "--num-proc", "ranks", type=click.IntRange(1), metavar="N", help="How many ranks you will start.")
@click.option("-H", "--hosts", "places", metavar="A:2,B:2", help="Where, as for horovodrun; reached by ssh.")
@click.option("--need", "needs", multiple=True, type=click.Choice(NEEDS), help="Fail without it; may be repeated.")
@click.option("--smoke", "train", is_flag=True, help="Let two ranks train for a second on each backend.")
@click.option("--limit", type=click.FloatRange(1), default=60, show_default=True, help="Seconds for each program run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    context: click.Context,
    ranks: int | None,
    places: str | None,
    needs: tuple[str, ...],
    train: bool,
    limit: float,
    as_json: bool,
) -> None:
    """Look at what is installed, what works, and what to do about the rest.

    Needs neither a GPU nor root nor Horovod. Under a launcher (horovodrun -np 2 hvd-averaging doctor) only rank 0
    speaks.
    """
    launch = launching.find_launch(dict(os.environ))
    if launch and launch.rank:
        return
    machines = _hosts(places)
    progress = Console(stderr=True)
    with progress.status("looking at what is installed") as status:
        # On a terminal only; elsewhere a status would be a line of its own at the end.
        say: Callable[[str], None] = status.update if progress.is_terminal else lambda text: None
        findings = with_needs(_examine(machines, ranks, limit, train, say), needs)
    if as_json:
        click.echo(report.as_json(findings))
    else:
        report.show(findings, Console(no_color=launch is not None))  # mpirun gives its ranks a terminal of their own
    context.exit(1 if is_broken(findings) else 0)


def _hosts(text: str | None) -> tuple[hosts.Host, ...]:
    try:
        return hosts.parse_hosts(text) if text else ()
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="-H") from None


def _examine(
    machines: tuple[hosts.Host, ...], ranks: int | None, limit: float, train: bool, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Every check, in the order in which one thing builds on another."""
    seen = survey.take(limit)
    yield from itertools.chain(
        frameworks.check_python(seen),
        frameworks.check_frameworks(seen),
        frameworks.check_keras(seen),
        frameworks.check_horovod(seen),
        launching.check_launcher(seen),
        launching.check_mpirun(seen, limit),
        launching.check_launch(seen),
        launching.check_cores(seen, hosts.ranks_here(machines, ranks)),
        hosts.check_hosts(machines, ranks, limit),
        variables.check_variables(seen),
    )
    if train and launching.find_launch(seen.variables):
        yield warning("training", "not tried: this is a launch already", "run doctor --smoke without a launcher")
    elif train:
        yield from smoke.smoke(seen, limit, say)


@cli.command(
    "build-horovod",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Build Horovod for the frameworks of this Python, install and verify it.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def build_horovod(context: click.Context, options: tuple[str, ...]) -> None:
    """Hand `options` to the builder, which knows them, and --help."""
    context.exit(build(options, "hvd-averaging build-horovod"))
