"""The README's script, as a newcomer would run it."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_script_runs_and_is_as_short_as_it_looks(horovodrun):
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    check = (
        "\nfrom hvd_averaging import check_replicas\nprint('step', averager.step, check_replicas(model) is not None)\n"
    )
    done = horovodrun(2, script + check)
    assert done.returncode == 0, done.output
    assert done.output.count("step 100 True") == 2
