"""Run the builder, after making sure that this Python can."""

from __future__ import annotations

import sys

from hvd_averaging.build_horovod.host import unsupported_host

if __name__ == "__main__":
    # Asked before `cli` is imported: on a Python or system that is not supported, that import itself may fail.
    reason = unsupported_host(sys.version_info[:2], sys.implementation.name, sys.platform)
    if reason:
        sys.exit("error: " + reason)

    from hvd_averaging.build_horovod.cli import main

    sys.exit(main())
