"""Step by step the same parameters as ``torch.distributed``'s own averagers, which run here for real on Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import parity_training
import pytest

SCRIPT = Path(parity_training.__file__)


@pytest.mark.parametrize("size", [2, 4])
def test_parameters_match_upstream_step_by_step(horovodrun, tmp_path, size):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    subprocess.run([*torchrun, SCRIPT, "upstream", tmp_path], check=True, timeout=120, env=environment)
    done = horovodrun(size, SCRIPT, args=["ours", str(tmp_path)])
    assert done.returncode == 0, done.output
    for rank in range(size):
        theirs, ours = (np.load(tmp_path / f"{library}-{rank}.npz") for library in ("upstream", "ours"))
        assert len(theirs.files) == len(parity_training.PERIODIC) + (3 if size == 4 else 0)
        for schedule in theirs.files:
            assert len(theirs[schedule]) == parity_training.STEPS
            assert np.ptp(theirs[schedule], axis=0).max() > 0.01, "training that moves"
            np.testing.assert_allclose(ours[schedule], theirs[schedule], rtol=0, atol=1e-6, err_msg=schedule)
