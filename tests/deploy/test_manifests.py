"""What is in deploy/ is well-formed, and says the same everywhere.  No container is started, no cluster needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxfer.config import Settings
from kvxfer.sidecar import ENGINE_SERVICE

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZATIONS = sorted(path.parent for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"))
IDS = [str(path.relative_to(DEPLOY / "kubernetes")) for path in KUSTOMIZATIONS]
SCRIPTS = [*sorted(DEPLOY.rglob("*.sh")), *sorted((DEPLOY.parent / "scripts").glob("*.sh"))]


def tool(name: str, *arguments: str | Path, stdin: str | None = None) -> str:
    """What a tool of the environment says; it must be content."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin, cwd=DEPLOY.parent)
    assert done.returncode == 0, f"{name} ended {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def built(directory: Path) -> str:
    """What `kubectl apply -k` would send."""
    return tool("kubectl", "kustomize", directory)


def of_kind(text: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document["kind"] == kind]


def sidecars(text: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The sidecar's container of every Deployment, and the pod that it is in."""
    pods = [deployment["spec"]["template"]["spec"] for deployment in of_kind(text, "Deployment")]
    return [(container, pod) for pod in pods for container in pod.get("initContainers", [])]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container["env"]}


@pytest.mark.parametrize("directory", KUSTOMIZATIONS, ids=IDS)
class TestKubernetes:
    def test_the_api_would_take_it(self, directory: Path, tmp_path: Path) -> None:
        file = tmp_path / "built.yaml"
        file.write_text(built(directory))
        tool("kubernetes-validate", "--strict", "--kubernetes-version", "1.34", file)

    def test_every_engine_has_a_native_sidecar(self, directory: Path) -> None:
        text = built(directory)
        assert len(sidecars(text)) == len(of_kind(text, "Deployment")) == 2
        for container, pod in sidecars(text):
            assert container["restartPolicy"] == "Always"
            assert pod["terminationGracePeriodSeconds"] > Settings().drain_timeout + 5
            (engine,) = pod["containers"]
            assert engine["name"] == "engine"
            places = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]}["kvxfer"] for c in (container, engine)]
            assert places == ["/run/kvxfer", "/run/kvxfer"]
            (volume,) = [v for v in pod["volumes"] if v["name"] == "kvxfer"]
            assert volume["emptyDir"]["medium"] == "Memory"

    def test_probes_ask_what_they_should(self, directory: Path) -> None:
        """A startup probe that waited for a cache would wait for ever: the engine starts after it."""

        def asked(probe: dict[str, Any]) -> str:
            if "grpc" in probe:
                assert "exec" not in probe
                return str(probe["grpc"].get("service", ""))
            command = probe["exec"]["command"]
            assert command[:2] == ["kvxfer", "health"]
            return str(command[command.index("--service") + 1]) if "--service" in command else ""

        for container, _ in sidecars(built(directory)):
            assert asked(container["startupProbe"]) == ""
            assert asked(container["livenessProbe"]) == ""
            assert asked(container["readinessProbe"]) == ENGINE_SERVICE

    def test_the_policy_opens_the_ports_that_are_used_and_no_others(self, directory: Path) -> None:
        text = built(directory)
        (policy,) = [p for p in of_kind(text, "NetworkPolicy") if p["metadata"]["name"] == "kvxfer"]
        rule, metrics = policy["spec"]["ingress"]
        opened = {(p["port"], p.get("endPort", p["port"])) for p in rule["ports"]}
        label = policy["spec"]["podSelector"]["matchLabels"]
        assert rule["from"] == [{"podSelector": {"matchLabels": label}}]
        assert metrics["from"] == [{"namespaceSelector": {}}]
        for deployment in of_kind(text, "Deployment"):
            assert label.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        for container, _ in sidecars(text):
            variables = environment(container)
            first, _, last = variables["UCX_TCP_PORT_RANGE"].partition("-")
            peer = int(variables["KVXFER_PEER_PORT"])
            assert opened == {(peer, peer), (int(first), int(last))}
            http = int(variables["KVXFER_HTTP_PORT"])
            assert [p["port"] for p in metrics["ports"]] == [http]
            assert {p["containerPort"] for p in container["ports"]} == {peer, http}

    def test_every_container_is_locked_down(self, directory: Path) -> None:
        for sidecar, pod in sidecars(built(directory)):
            for container in (sidecar, *pod["containers"]):
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"]
                assert not context["allowPrivilegeEscalation"]
                assert context["capabilities"]["drop"] == ["ALL"]
                added = context["capabilities"].get("add", [])
                assert added == (["IPC_LOCK"] if directory.name == "rdma" and container is sidecar else [])
            assert pod["securityContext"]["runAsNonRoot"] is (directory.name != "rdma")
            assert pod["automountServiceAccountToken"] is False

    def test_the_settings_are_those_of_a_sidecar(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for container, _ in sidecars(built(directory)):
            for name, value in environment(container).items():
                assert not name.startswith("KVXFER_") or name.removeprefix("KVXFER_").lower() in Settings.model_fields
                if name.startswith("KVXFER_") and not name.startswith("KVXFER_PEER_TLS"):
                    monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.0.0.1"))
            plaintext = directory.name == "plaintext"
            mounted = {m["name"] for m in container["volumeMounts"]}
            assert ("kvxfer-tls" in mounted) is not plaintext
            assert ("KVXFER_INSECURE_PEER" in environment(container)) is plaintext
            if plaintext:
                assert Settings.load().insecure_peer


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_compose_file_locks_its_containers_down_and_has_settings_that_exist() -> None:
    services = compose()["services"]
    assert set(services) == {"certificates", "prefill", "prefill-engine", "decode", "decode-engine"}
    for name, service in services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        settings = [n for n in service.get("environment", {}) if n.startswith("KVXFER_")]
        assert all(n.removeprefix("KVXFER_").lower() in Settings.model_fields for n in settings)
        assert len(settings) > 4 or not service.get("build"), name


def test_hadolint() -> None:
    tool("hadolint", DEPLOY / "Dockerfile")


def test_yamllint() -> None:
    rules = {"document-start": "disable", "line-length": {"max": 140}}
    tool("yamllint", "--strict", "--config-data", yaml.safe_dump({"extends": "default", "rules": rules}), DEPLOY)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    tool("shellcheck", script)


def test_the_image_has_the_settings_that_a_sidecar_reads() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    names = re.findall(r"\bKVXFER_([A-Z_]+)=", text)
    assert len(names) == 4
    assert {n.lower() for n in names} <= set(Settings.model_fields)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
class TestCertificates:
    SCRIPT = DEPLOY / "certificates.sh"

    def make(self, *wanted: str | Path) -> str:
        done = subprocess.run([self.SCRIPT, *wanted], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_a_sidecar_takes_them(self, tmp_path: Path) -> None:
        self.make(f"{tmp_path}/pods:kvxfer.internal:other.example", f"{tmp_path}/second")
        for name in ("pods", "second"):
            files = {f"peer_tls_{k}": tmp_path / name / f for k, f in CERTIFICATE_FILES.items()}
            assert Settings.load(peer_host="0.0.0.0", **files).peer_tls() is not None
            assert (tmp_path / name / "tls.key").stat().st_mode & 0o777 == 0o600
        certificate = tmp_path / "pods/tls.crt"
        shown = subprocess.run(
            ["openssl", "x509", "-in", certificate, "-noout", "-text"], capture_output=True, text=True, check=True
        ).stdout
        assert "DNS:pods, DNS:kvxfer.internal, DNS:other.example" in shown
        assert {p.name for p in (tmp_path / "pods").iterdir()} == set(CERTIFICATE_FILES.values())

    def test_kubernetes_takes_them_as_a_secret(self, tmp_path: Path) -> None:
        self.make(f"{tmp_path}/pods:kvxfer.internal")
        dry = ("--from-file", tmp_path / "pods", "--dry-run=client", "--output=yaml")
        made = yaml.safe_load(tool("kubectl", "create", "secret", "generic", "kvxfer-tls", *dry))
        assert set(made["data"]) == set(CERTIFICATE_FILES.values())

    def test_those_that_exist_are_kept(self, tmp_path: Path) -> None:
        self.make(tmp_path / "a", tmp_path / "b")
        before = (tmp_path / "a/tls.crt").read_text()
        assert self.make(tmp_path / "a", tmp_path / "b") == ""
        assert (tmp_path / "a/tls.crt").read_text() == before
        # One that is missing needs a new CA, and so do all.
        self.make(tmp_path / "a", tmp_path / "c")
        assert (tmp_path / "a/ca.crt").read_text() == (tmp_path / "c/ca.crt").read_text()

    def test_without_arguments_it_says_how_it_is_used(self) -> None:
        done = subprocess.run([self.SCRIPT], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "certificates.sh DIRECTORY" in done.stderr


CERTIFICATE_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}


def test_what_is_missing_for_containers_is_said(tmp_path: Path) -> None:
    """On a machine without Docker and Podman, to a user who may not install them."""
    for name in ("dirname", "sh", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    script = DEPLOY.parent / "scripts/containers.sh"
    done = subprocess.run([script, "engine"], capture_output=True, text=True, timeout=60, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout == ""
    assert "needs Docker" in done.stderr
    assert "apt-get install --no-install-recommends podman" in done.stderr
