"""``kvxfer doctor`` under real conditions: small memory, low limits, namespaces, firewalls, bad settings."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from tests.chaos.namespaces import Network, why_not
from tests.chaos.namespaces import run as shell
from tests.support.certificates import Authority, Identity, write
from tests.support.console import free_port
from tests.support.doctor import command, doctor, run
from tests.support.processes import sidecars

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change limits, users and namespaces")
DEFAULT_MEMLOCK = 8 * 2**20


@root
@pytest.mark.container
def test_small_shared_memory() -> None:
    """As Docker gives it to a container that asks for nothing."""
    own = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    told = doctor("--only", "memory", "--memory-directory", "/dev/shm", prefix=own)
    found = told.only("error")
    assert told.status == 1
    assert found["what"].startswith("/dev/shm: 64 MiB, 64 MiB free")
    assert "--shm-size" in found["todo"]
    assert "medium: Memory" in found["todo"]


def test_warnings_fail_only_if_asked(tmp_path: Path) -> None:
    memory = ("--only", "memory", "--memory-directory", str(tmp_path / "none"), "--set", "allow_posix_shm=false")
    told = doctor(*memory)
    assert f"there is no directory {tmp_path / 'none'}" in told.only("warning")["what"]
    assert told.status == 0
    assert doctor(*memory, "--strict").status == 1


@root
def test_low_memlock_as_another_user() -> None:
    """Root is exempt; the user that containers run as is not."""
    limited = ("prlimit", f"--memlock={DEFAULT_MEMLOCK}")
    assert doctor("--only", "memlock", prefix=limited).bad() == []
    told = doctor("--only", "memlock", "--as-uid", "1000", prefix=limited)
    found = told.only("warning")
    assert found["what"].startswith(f"uid 1000 may lock {DEFAULT_MEMLOCK:,} bytes of memory")
    assert "failed with ENOMEM" in found["what"]
    assert "LimitMEMLOCK" in found["todo"]


@root
@pytest.mark.container
def test_separate_pid_namespaces() -> None:
    engine = subprocess.Popen(["sleep", "60"])
    try:
        pid = ("--only", "namespaces", "--engine-pid", str(engine.pid))
        shared = doctor(*pid)
        assert shared.bad() == []
        seen = doctor(*pid, prefix=("unshare", "--pid", "--fork"))
        assert "is in a pid namespace of its own" in seen.only("warning")["what"]
        hidden = doctor(*pid, prefix=("unshare", "--pid", "--fork", "--mount-proc"))
        assert hidden.status == 1
        assert f"no process {engine.pid} in this pid namespace" in hidden.only("error")["what"]
        alone = doctor("--only", "namespaces", prefix=("unshare", "--pid", "--fork", "--mount-proc"))
        assert "in a pid namespace of its own, as in a container" in alone.only("warning")["what"]
        for told in (seen.only("warning"), hidden.only("error"), alone.only("warning")):
            assert "memfd" in told["why"]
            assert "TCP" in told["why"]
            assert "shareProcessNamespace" in told["todo"]
    finally:
        engine.kill()
        engine.wait()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    made = Network(["a", "b"])
    yield made
    made.close()


@pytest.mark.container
def test_a_firewalled_peer_port_is_told_from_one_that_nobody_listens_on(network: Network) -> None:
    a, b = network.hosts["a"], network.hosts["b"]
    peer = ("--only", "peer", "--peer", f"{b.address}:9000")
    refused = doctor(*peer, prefix=a.prefix).only("error")
    assert "refuses: the host is there, and nothing listens" in refused["what"]
    with network.drop("a", "b", "dport", "9000-9000"):
        dropped = doctor(*peer, prefix=a.prefix)
        assert dropped.status == 1
        found = dropped.only("error")
    assert "does not answer: packets vanish" in found["what"]
    assert "firewall" in found["why"]
    assert "UCX_TCP_PORT_RANGE" in found["todo"]
    nowhere = doctor("--only", "peer", "--peer", "10.99.0.1:9000", prefix=("unshare", "--net")).only("error")
    assert "cannot be reached" in nowhere["what"]


@pytest.mark.nixl
@pytest.mark.container
def test_an_interface_that_ucx_cannot_use(network: Network) -> None:
    host = network.hosts["a"]
    shell("ip", "-n", host.namespace, "link", "add", "bare0", "type", "veth", "peer", "name", "bare1")
    for name in ("bare0", "bare1"):
        # An address of its own for the link alone is not given, so that there is no address at all.
        shell(*host.prefix, "sh", "-c", f"echo 1 > /proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        shell("ip", "-n", host.namespace, "link", "set", name, "up")
    try:
        checks = ("--only", "network", "--only", "ucx")
        told = doctor(*checks, prefix=host.prefix, environment={"UCX_NET_DEVICES": "bare0"})
        assert ("ucx", "error") in told.bad()
        assert ("network", "warning") in told.bad()
        what = [f["what"] for f in told.findings]
        assert any("UCX_NET_DEVICES names bare0, which UCX cannot use here" in w for w in what)
        assert "UCX cannot use the interface bare0: it has no address" in what
        assert any("devices that UCX can use: eth0, lo" in w for w in what)
    finally:
        shell("ip", "-n", host.namespace, "link", "del", "bare0")


def test_a_taken_port(tmp_path: Path) -> None:
    socket_path = tmp_path / "engine.sock"
    with socket.create_server(("127.0.0.1", free_port())) as taken, socket.socket(socket.AF_UNIX) as engine:
        port = taken.getsockname()[1]
        engine.bind(str(socket_path))
        engine.listen()
        told = doctor("--only", "ports", "--peer-port", str(port), "--engine-socket", str(socket_path))
    assert told.status == 1
    what = [f["what"] for f in told.findings if f["status"] == "error"]
    assert len(what) == 2
    assert what[0].startswith(f"peer_port: 127.0.0.1:{port} is taken by process {os.getpid()} (")
    assert what[1].startswith(f"engine_socket: {socket_path} is served by process {os.getpid()} (")
    free = doctor("--only", "ports", "--peer-port", str(port), "--engine-socket", str(tmp_path / "other.sock"))
    assert free.bad() == []


def test_an_expired_certificate(tmp_path: Path) -> None:
    authority = Authority("ca")
    for expired in (False, True):
        files = write(tmp_path, Identity(authority, "p.example", expired=expired))
        files["peer_tls_key"].chmod(0o600)
        flags = [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", str(path))]
        told = doctor("--only", "tls", "--advertise", "p.example:9000", *flags)
        if expired:
            assert told.status == 1
            assert f"{files['peer_tls_cert']} expired on" in told.only("error")["what"]
            assert "by this machine's clock" in told.only("error")["what"]
        else:  # the tests' certificates are good for a day
            assert told.status == 0
            assert "expires on" in told.only("warning")["what"]


@pytest.mark.nixl
def test_ucx_settings_that_disable_what_is_needed() -> None:
    checks = ("--only", "ucx", "--only", "transport")
    without = doctor(*checks, environment={"UCX_TLS": "^tcp"})
    assert without.bad() == [("transport", "error"), ("ucx", "error")]
    found = [f["what"] for f in without.findings]
    assert "UCX_TLS=^tcp leaves no transport that connects agents" in found[1]
    assert "no active messages transport" in found[0]

    # Over TCP alone all works, and nobody is told; a name that is misspelled has no effect.
    slow = doctor(*checks, environment={"UCX_TLS": "tcp", "UCX_TCP_KEEPIDL": "1s", "UCX_TCP_USER_TIMEOUT": "60s"})
    assert slow.status == 0
    told = {f["what"]: f for f in slow.findings if f["status"] == "warning"}
    assert len(told) == 4, told
    assert any(w.startswith("two agents on this host read over tcp/") and "software emulation" in w for w in told)
    assert "UCX_TLS=tcp leaves CMA out" in told
    assert told["UCX does not know UCX_TCP_KEEPIDL"]["todo"].startswith("Did you mean UCX_TCP_KEEPIDLE")
    assert "UCX_TCP_USER_TIMEOUT=60s replaces kvxfer's default, 3s" in told


@pytest.mark.nixl
def test_all_checks_and_a_live_peer() -> None:
    port = free_port()
    with sidecars(["p"], {"peer_port": port}) as (p,):
        address = f"127.0.0.1:{port}"
        told = doctor(
            "--peer", address, "--memory-directory", str(p.directory), "--engine-socket", f"{p.directory}/d.sock"
        )
        assert told.status == 0, told.findings
        what = [f["what"] for f in told.findings]
        assert any(w.startswith("NIXL 1.") and "UCX modules loaded: cma" in w for w in what)
        assert any(w.startswith("two agents on this host read over cma/memory (zero-copy) at") for w in what)
        assert any(f"{address} (127.0.0.1) is reached from 127.0.0.1 (lo): SERVING (plaintext)" in w for w in what)
        assert {f["check"] for f in told.findings} >= {"settings", "memlock", "tls", "gpu", "ports", "network"}


def test_without_nixl_and_torch(tmp_path: Path) -> None:
    """The same Python, its packages but those of NIXL and torch."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in [p for p in sys.path if p.endswith("site-packages")]:
        for entry in Path(place).iterdir():
            if "nixl" not in entry.name and not entry.name.startswith(("torch", "functorch")):
                (packages / entry.name).symlink_to(entry)
    ours = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "clients" / "python")]
    line = command()
    done = run([line[0], "-S", *line[1:], "--json"], {"PYTHONPATH": os.pathsep.join([*ours, str(packages)])})
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)["findings"]
    (missing,) = [f for f in told if f["status"] == "error"]
    assert missing["what"] == "NIXL is not installed"
    assert missing["todo"].startswith("pip install 'nixl>=1.5,<2'")
    unknown = {f["check"] for f in told if f["status"] == "unknown"}
    assert unknown == {"transport", "network"}


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--only", "everything"), "there is no check 'everything'; allowed: settings, library"),
        (("--peer", "1.2.3:80"), "peer is '1.2.3:80'"),
        (("--set", "nonsense"), "--set takes name=value"),
        (("--set", "nonsense=1"), "nonsense is no setting"),
        (("--peer-port", "70000"), "peer_port"),
        (("--config", "/nonexistent.toml"), "there is no such file"),
        (("--engine-pid", "0"), "engine-pid"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert says in done.stderr


def test_plain_output_says_why_and_what_to_do() -> None:
    done = run(command("--only", "settings", "--only", "gpu", "--peer-host", "0.0.0.0"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    # What serve would refuse is a finding, not bad usage.
    assert lines[0].startswith("error    settings    settings: peer_host '0.0.0.0' is not loopback")
    assert lines[1].strip().startswith("why: ")
    assert lines[2].strip().startswith("do:  ")
    assert lines[-1].endswith("1 error")
    assert "\x1b" not in done.stdout


def test_a_terminal_gets_a_table() -> None:
    if shutil.which("script") is None:
        pytest.skip("script of util-linux is not installed")
    line = " ".join(command("--only", "settings"))
    done = run(["script", "--quiet", "--return", "--command", line, "/dev/null"], {"TERM": "xterm", "COLUMNS": "100"})
    assert done.returncode == 0
    assert "what, why it matters, what to do" in done.stdout
    assert "\x1b[" in done.stdout
