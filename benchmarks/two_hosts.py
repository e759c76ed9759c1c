"""Two hosts on one machine, with a link of limited speed between, and ``horovodrun`` over it. Needs Linux and root.

    python benchmarks/two_hosts.py --link 1gbit benchmarks/round.py --only packed flat fp16 int8

The hosts are network namespaces, joined by a veth pair, whose two ends ``tc tbf`` limits; the second is reached by ssh
as another machine would be. Processors and memory are shared, as is the file system. Namespaces, ssh server and its key
are made for the run and removed after it, also when it is interrupted; ``~/.ssh`` is neither read nor written. What a
run that was killed has left behind is removed by the next.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import launch
import psutil

PREFIX = "hvd-averaging-bench"
HOSTS = {f"{PREFIX}-1": "10.213.77.1", f"{PREFIX}-2": "10.213.77.2"}
INTERFACE = "eth0"  # in both: horovodrun knows one name for all hosts
CONGESTION_CONTROL, CONGESTION_FILE = "reno", "/proc/sys/net/ipv4/tcp_congestion_control"
SSH_PORT = 22
TOOLS = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client"}
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
LOCK = Path("/run", f"{PREFIX}.lock")

BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Unavailable(Exception):
    """Why this machine cannot play two hosts, and what to do about it."""


class TwoHosts:
    """Two hosts that exist: see :func:`two_hosts`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def limit(self, link: str) -> None:
        """Let the link carry so much in either direction, such as ``100mbit`` or ``10gbit``."""
        # As much may pass at once as comes in 4 ms (the kernel's clock is coarse), but no less than two large packets.
        burst = max(round(bits_per_second(link) / 8 * 0.004), 128 * 1024)
        for host in HOSTS:
            tbf = ["tbf", "rate", link, "burst", str(burst), "latency", "50ms"]
            command("tc", "-netns", host, "qdisc", "replace", "dev", INTERFACE, "root", *tbf)

    def run_python(self, arguments: Sequence[str], limit_s: float) -> launch.Launched:
        """One rank on each host, over Gloo."""
        first = next(iter(HOSTS))
        addresses = ",".join(f"{address}:1" for address in HOSTS.values())
        environment = {"HOROVOD_GLOO_IFACE": INTERFACE, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        options = ["--gloo", "-H", addresses, "--network-interfaces", INTERFACE]
        enter = [found("ip"), "netns", "exec", first]
        return launch.run_python(2, arguments, limit_s, options=options, environment=environment, enter=enter)


def bits_per_second(link: str) -> float:
    for unit, factor in BITS.items():
        if link.endswith(unit):
            with contextlib.suppress(ValueError):
                return float(link.removesuffix(unit)) * factor
    raise ValueError(f"{link!r} is not a speed like 100mbit or 10gbit")


def found(tool: str) -> str:
    return shutil.which(tool, path=SEARCHED) or tool


def command(tool: str, *arguments: str) -> str:
    done = subprocess.run([found(tool), *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise Unavailable(f"{tool} {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def check() -> None:
    """Raise :class:`Unavailable` if something that is needed is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("two hosts on one machine are network namespaces, which need Linux and root: run it as root.")
    missing = sorted({TOOLS[tool] for tool in TOOLS if shutil.which(tool, path=SEARCHED) is None})
    if missing:
        raise Unavailable(f"two hosts on one machine need more packages: apt-get install {' '.join(missing)}")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make the hosts, and remove them at the end, however it comes (SIGTERM included)."""
    check()
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(ended_by_exception())
        remove()  # what a run that was killed has left
        stack.callback(remove)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))
        connect()
        prepare_ssh(folder)
        for host, address in HOSTS.items():
            stack.enter_context(serving_ssh(host, address, folder))
        yield TwoHosts(folder)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The namespaces have fixed names, so that leftovers are found: only one run at a time."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable("another run has its two hosts on this machine now: wait for its end.") from None
        yield


@contextlib.contextmanager
def ended_by_exception() -> Iterator[None]:
    """A SIGTERM ends the process as Ctrl-C does: by an exception, so that everything is removed."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def connect() -> None:
    """Namespaces with an address each, where the machine's own name is that address (else Gloo publishes 127.0.0.1)."""
    for host, address in HOSTS.items():
        folder = Path("/etc/netns") / host
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        command("ip", "netns", "add", host)
    first, second = HOSTS
    ends = ["netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
    command("ip", "link", "add", "name", INTERFACE, *ends)
    for host, address in HOSTS.items():
        command("ip", "-netns", host, "address", "add", f"{address}/24", "dev", INTERFACE)
        # Namespaces may always choose this one, so that machines compare: BBR, say, needs time to find the speed.
        command("ip", "netns", "exec", host, "sh", "-c", f"echo {CONGESTION_CONTROL} >{CONGESTION_FILE}")
        for interface in ("lo", INTERFACE):
            command("ip", "-netns", host, "link", "set", interface, "up")


def remove() -> None:
    """Everything of these names, and the processes in the namespaces, which are ours: nobody else knows them."""
    for host in HOSTS:
        if (Path("/run/netns") / host).exists():
            inside = [int(process) for process in command("ip", "netns", "pids", host).split()]
            end([psutil.Process(process) for process in inside if psutil.pid_exists(process)])
            command("ip", "netns", "delete", host)  # takes its end of the link along, and so the other end
        shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may have namespaces, too
        Path("/etc/netns").rmdir()


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def prepare_ssh(folder: Path) -> None:
    """A key for this run, a server that lets only it in, and an ``ssh`` that uses it, for horovodrun to find."""
    key, server, client, ssh = (folder / name for name in ("key", "sshd_config", "ssh_config", "ssh"))
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    server.write_text(
        f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        "KbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
    )
    client.write_text(
        f"IdentityFile {key}\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    ssh.write_text(f'#!/bin/sh\nexec {found("ssh")} -F {client} "$@"\n')
    ssh.chmod(0o700)


@contextlib.contextmanager
def serving_ssh(host: str, address: str, folder: Path) -> Iterator[None]:
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd locks itself in; the system's service makes it, too
    options = ["-D", "-f", str(folder / "sshd_config"), "-E", str(folder / f"{host}.log")]
    options += ["-o", f"ListenAddress={address}", "-p", str(SSH_PORT)]
    server = subprocess.Popen([found("ip"), "netns", "exec", host, found("sshd"), *options])
    try:
        await_ssh(host, address, folder, server)
        yield
    finally:
        server.terminate()
        server.wait(timeout=10)


def await_ssh(host: str, address: str, folder: Path, server: subprocess.Popen[bytes]) -> None:
    """Until it lets the other host in."""
    other = next(each for each in HOSTS if each != host)
    try_it = [found("ip"), "netns", "exec", other, str(folder / "ssh"), "-o", "ConnectTimeout=2", address, "true"]
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and server.poll() is None:
        if subprocess.run(try_it, capture_output=True, timeout=15).returncode == 0:
            return
        time.sleep(0.1)
    raise Unavailable(f"sshd of {host} lets nobody in: {(folder / f'{host}.log').read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="1gbit", help="speed in either direction (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which all ends (default: %(default)s)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="what both hosts run, with its arguments")
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("there is no script to run")
    try:
        bits_per_second(arguments.link)
        with two_hosts() as hosts:
            hosts.limit(arguments.link)
            launched = hosts.run_python(arguments.script, arguments.limit)
    except (Unavailable, ValueError) as error:
        raise SystemExit(f"two_hosts.py: {error}") from None
    sys.exit(launched.returncode)


if __name__ == "__main__":
    main()
