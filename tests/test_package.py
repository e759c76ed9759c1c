"""The wheel, as it would be installed: in an empty environment, without any framework."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent

CHECK = """
import sys
import hvd_averaging
from hvd_averaging import PeriodicModelAverager, average_parameters
loaded = [name for name in ("torch", "tensorflow", "keras", "horovod", "numpy", "click", "rich") if name in sys.modules]
assert not loaded, loaded
averager = PeriodicModelAverager(period=4)
assert [averager.due(step) for step in range(5)] == [True, False, False, False, True]
try:
    average_parameters([1.0])
except TypeError as error:
    print(error)
print(hvd_averaging.__version__)
"""


def run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_where_nothing_else_is_installed(tmp_path):
    wheels = tmp_path / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    (wheel,) = wheels.glob("hvd_averaging-*.whl")
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    output = run(python, "-c", CHECK, cwd=tmp_path)
    assert "not a tensor" in output
    run(python, "-m", "hvd_averaging.build_horovod", "--help", cwd=tmp_path)
    command = [str(python), f"{site}/bin/hvd-averaging", "doctor"]
    lacking = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert lacking.returncode == 2
    assert lacking.stderr == "hvd-averaging needs click; run: pip install 'hvd-averaging[cli]'\n"
    assert (Path(site) / "hvd_averaging" / "py.typed").exists()
    assert not (Path(site) / "tests").exists()
