"""`python -m hvd_averaging.cli`: the same as `hvd-averaging`, for this very Python."""

from __future__ import annotations

import sys

from hvd_averaging.cli import main

if __name__ == "__main__":
    sys.exit(main())
