"""Run the builder, after making sure that this Python can."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvd_averaging.build_horovod.host import unsupported_host


def main(arguments: Sequence[str], program: str) -> int:
    """Build as `arguments` ask; returns the exit status. `program` is what the user has typed before them."""
    # Asked before `cli` is imported: on a Python or system that is not supported, that import itself may fail.
    reason = unsupported_host(sys.version_info[:2], sys.implementation.name, sys.platform)
    if reason:
        print("error: " + reason, file=sys.stderr)
        return 1

    from hvd_averaging.build_horovod import cli

    return cli.main(arguments, program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m hvd_averaging.build_horovod"))
