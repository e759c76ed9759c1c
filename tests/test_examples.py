"""The demo as a user runs it: what it prints and draws, and what it says when it is called wrongly."""

from __future__ import annotations

import re
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TORCH = ROOT / "examples" / "torch_local_sgd.py"
HIERARCHICAL = ROOT / "examples" / "torch_hierarchical.py"


class Row(NamedTuple):
    accuracy: float
    rounds: int
    megabytes: float


def table_row(output: str, name: str) -> Row:
    match = re.search(rf"{name} +([\d.]+)% +(\d+) +([\d.]+) +[\d.]+\s", output)
    assert match, f"no table row for {name!r} in:\n{output}"
    accuracy, rounds, megabytes = match.groups()
    return Row(float(accuracy), int(rounds), float(megabytes))


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:])


@pytest.mark.parametrize("example", ["torch_local_sgd", "tensorflow_loop", "keras_fit"])
def test_demo_compares_three_ways(horovodrun, tmp_path, example):
    epochs, period, warmup_steps = 2, 4, 3
    options = f"--epochs {epochs} --period {period} --warmup-steps {warmup_steps} --seed 5 --output".split()
    options.append(str(tmp_path / "new" / "folder"))
    framework = "torch" if example.startswith("torch") else "tensorflow"
    launched = horovodrun(2, TORCH.with_name(f"{example}.py"), limit=100, args=options, framework=framework)
    assert launched.returncode == 0, launched.output

    steps = epochs * (400 // 16)  # 800 digits on 2 ranks, in batches of 16
    rounds = sum(step >= warmup_steps and (step - warmup_steps) % period == 0 for step in range(steps)) + 1  # and join
    payload = 4 * (64 * 256 + 256 + 256 * 10 + 10)  # bytes of the network; a ring of two sends as much

    gradients = table_row(launched.output, "gradient averaging")
    models = table_row(launched.output, "model averaging")
    alone = table_row(launched.output, "one rank, one shard")
    assert (gradients.rounds, models.rounds, alone.rounds) == (steps, rounds, 0)
    assert gradients.megabytes == pytest.approx(steps * payload / 1e6, abs=0.005)
    # A round also carries its header, and the table has two decimals.
    assert models.megabytes == pytest.approx(rounds * payload / 1e6, rel=0.005, abs=0.005)
    assert alone.megabytes == 0
    assert min(gradients.accuracy, models.accuracy, alone.accuracy) > 75

    picture = tmp_path / "new" / "folder" / f"{example}.png"
    assert f"Picture: {picture}" in launched.output
    width, height = png_size(picture)
    assert width > 800 and height > 400 and picture.stat().st_size > 10_000


@pytest.mark.parametrize("example", ["torch_hierarchical", "torch_post_local_sgd"])
def test_demos_of_two_nodes_tell_apart_what_goes_between_them(horovodrun, tmp_path, example):
    epochs, period, warmup_steps = 3, 4, 8
    options = f"--epochs {epochs} --period {period} --warmup-steps {warmup_steps} --output {tmp_path}".split()
    launched = horovodrun(4, TORCH.with_name(f"{example}.py"), limit=100, args=options)
    assert launched.returncode == 0, launched.output

    steps = epochs * (200 // 16)  # 800 digits on 4 ranks, in batches of 16
    rounds = len(range(warmup_steps, steps, period))
    rounds_of_all = len(range(4 * period, steps, 4 * period))
    within = 4 * (64 * 256 + 256 + 256 * 10 + 10) / 1e6  # megabytes of the network; a ring of two sends as much
    between = 1.5 * within  # a ring of four

    def check(name, expected_rounds, *expected_megabytes):
        row = re.search(rf"{name} +([\d.]+)% +(\d+) +([\d.]+) +([\d.]+) +[\d.]+\s", launched.output)
        assert row, f"no table row for {name!r} in:\n{launched.output}"
        assert float(row[1]) > 75 and int(row[2]) == expected_rounds
        megabytes = float(row[3]), float(row[4])
        assert megabytes == pytest.approx(expected_megabytes, rel=0.005, abs=0.005)

    check("gradient averaging", steps, steps * between, 0)
    hierarchical = example == "torch_hierarchical"
    periodic = len(range(warmup_steps if hierarchical else 0, steps, period)) + 1  # and join
    check("model averaging", periodic, periodic * between, 0)
    if hierarchical:
        check("hierarchical", rounds + 1, (rounds_of_all + 1) * between, (rounds - rounds_of_all) * within)
    else:
        # Gradients at every step, of all ranks in warm-up and of the node afterwards; and the rounds of parameters.
        of_all = warmup_steps + rounds + 1
        check("post-local SGD", steps + rounds + 1, of_all * between, (steps - warmup_steps) * within)
    assert f"Picture: {tmp_path / f'{example}.png'}" in launched.output
    assert min(png_size(tmp_path / f"{example}.png")) > 400


def test_hierarchical_demo_needs_two_equal_nodes():
    run = subprocess.run([sys.executable, str(HIERARCHICAL)], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (1, "")
    assert "which 1 is not. Launch eight: horovodrun -np 8 python" in run.stderr


def test_torch_demo_on_one_rank_says_how_to_launch_it(tmp_path):
    command = [sys.executable, str(TORCH), "--epochs", "1", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert f"Launch four: horovodrun -np 4 python {TORCH}" in run.stdout.splitlines()[0]
    assert table_row(run.stdout, "model averaging").megabytes == 0


def test_torch_demo_refuses_a_bad_option_before_it_trains():
    run = subprocess.run([sys.executable, str(TORCH), "--period", "0"], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (2, "")
    assert "torch_local_sgd.py: argument --period: '0' is not a whole number of at least 1" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--period", "2.5"], "'2.5' is not a whole number of at least 1"),
        (["--warmup-steps=-1"], "'-1' is not a whole number of at least 0"),
        (["--epochs", "many"], "'many' is not a whole number of at least 1"),
        (["--seed="], "'' is not a whole number of at least 0"),
        (["--output", __file__], "cannot make the folder"),
        (["--learn"], "unrecognized arguments: --learn"),
    ],
)
def test_bad_options_are_explained_in_one_line(arguments, complaint, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)  # where the default folder may be made
    parse = runpy.run_path(str(TORCH.with_name("options.py")))["parse"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        parse("A demo.")
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert complaint in errors and errors.count("\n") == 1


def test_demo_script_names_the_demos_there_are(tmp_path):
    run = subprocess.run([ROOT / "scripts" / "demo", "caffe"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout) == (2, "")
    said, names = run.stderr.rstrip("\n").split(", only: ")
    assert said == "demo: there is no demo called 'caffe'"
    assert {"torch", "tensorflow", "keras", "hierarchical", "post_local"} == set(names.split())


@pytest.mark.parametrize(
    ("name", "ranks", "example"), [("torch", 4, "torch_local_sgd.py"), ("hierarchical", 8, "torch_hierarchical.py")]
)
def test_demo_script_launches_a_demo_on_its_ranks(tmp_path, name, ranks, example):
    """With a set-up that does nothing and a launcher that says what it was told."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for path, body in (("scripts/setup", ""), (".venv/bin/horovodrun", 'echo "[0]<stdout>:$*"')):
        (tmp_path / path).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / path).chmod(0o755)
    command = [tmp_path / "scripts" / "demo", name, "--epochs", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    python, script, output = f"{tmp_path}/.venv/bin/python", f"{tmp_path}/examples/{example}", f"{tmp_path}/output"
    assert run.stdout == f"-np {ranks} --gloo {python} {script} --output {output} --epochs 3\n"
