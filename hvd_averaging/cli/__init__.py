"""The command ``hvd-averaging``: is everything there that training needs, and does it work?

Each file answers one question:

- `commands`: what can be asked for, and which exit status comes of it
- `findings`: what is one thing that was found, and how bad is it
- `probe`, `probing`: what is installed (looked at in other processes, which may crash or hang)
- `frameworks`, `launching`, `hosts`, `variables`: the checks, from what was seen to findings
- `smoke`, `smoke_training`: do two ranks really train
- `report`: how findings are shown

This file runs without the packages of the extra `[cli]`, to say that they are missing.
"""

from __future__ import annotations

import sys

# What `[cli]` installs, by the names of its modules.
_EXTRA = ("click", "rich")


def main() -> int:
    """The console script: runs the command and returns its exit status."""
    try:
        from hvd_averaging.cli.commands import cli
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA:
            raise
        print(f"hvd-averaging needs {missing.name}; run: pip install 'hvd-averaging[cli]'", file=sys.stderr)
        return 2
    return int(cli.main(prog_name="hvd-averaging", standalone_mode=True) or 0)
