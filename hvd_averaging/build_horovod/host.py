"""Which Pythons and systems the builder works on. Plain enough to be imported by any Python 3, to say no politely."""

from __future__ import annotations

OLDEST, NEWEST = (3, 10), (3, 13)


def unsupported_host(python: tuple[int, ...], implementation: str, system: str) -> str:
    """Why Horovod cannot be built by this Python on this system, and what to do; the empty string where it can.

    `python` is (major, minor); `implementation` and `system` are `sys.implementation.name` and `sys.platform`.
    """
    supported = "CPython {}.{} to {}.{}".format(*OLDEST, *NEWEST)
    if implementation != "cpython" or not OLDEST <= tuple(python) <= NEWEST:
        found = "{} {}.{}".format(implementation, *python)
        return f"{found} is not supported\n  what to do: use {supported}, for which Horovod builds"
    if system != "linux":
        return f"the system {system!r} is not supported\n  what to do: use Linux"
    return ""
