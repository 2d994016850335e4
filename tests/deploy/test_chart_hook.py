"""The pod of `helm test`: what it may do, which agents it asks, and how it judges good and bad agents."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import bcrypt
import pytest
import yaml

from tests.certificates import make_certificate, make_signed_certificate
from tests.demo_process import GPUMAP, demo, environment, listening, running, wait_for
from tests.deploy.chart import CHART, Manifest, helm, is_hook, render_all, settings
from tests.deploy.chart_variations import CERTIFICATE_SHOWN, PASSWORD_SENT, VARIATIONS, of

HASH = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
PASSWORD = of("serviceMonitor", PASSWORD_SENT)
CERTIFICATE = of("serviceMonitor", CERTIFICATE_SHOWN)
TLS = "tls.secretName=certificate"
UNASKED: dict[str, tuple[str, ...]] = {
    "a password that nobody told": (f"basicAuth.users.prometheus={HASH}",),
    "a client's certificate that nobody named": (TLS, "tls.clientCaSecretName=clients"),
    "an authority that only Prometheus has": (TLS, "serviceMonitor.tlsConfig.caFile=/etc/ca.crt"),
    "an authority that nobody has": (TLS, "serviceMonitor.tlsConfig.insecureSkipVerify=true"),
    "a certificate for another name": (TLS, "serviceMonitor.tlsConfig.serverName=gpumap"),
    "whatever the file says": ("webConfig.secretName=web",),
    "not to": ("tests.enabled=false",),
}
HOOK = "templates/tests/connection.yaml"
LOST_CARD = """\
node: lost
repeat: 1h
gpus:
  - model: NVIDIA H100 80GB HBM3
    memory: 80GiB
    faults: [{kind: lost, from: 0, until: 1h}]
"""


def hooks(*values: str, release: str = "prod") -> list[Manifest]:
    return [one for one in render_all(*values, release=release) if is_hook(one)]


def arguments_of(pod: Manifest) -> list[str]:
    (container,) = pod["spec"]["containers"]
    arguments: list[str] = container["args"]
    return arguments


def url_of(pod: Manifest) -> str:
    (url,) = [word.removeprefix("--url=") for word in arguments_of(pod) if word.startswith("--url=")]
    return url


def ask(pod: Manifest, url: str, files: Path | None = None, user: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the pod's command line on this machine: another agent in the Service's place, `files` in the mount's."""
    (container,) = pod["spec"]["containers"]
    mounts = container.get("volumeMounts", ())
    variables = {}
    for one in container.get("env", ()):
        value = user if "valueFrom" in one else one["value"]
        for mount in mounts:
            value = value.replace(mount["mountPath"], str(files))
        variables[one["name"]] = value
    return subprocess.run(
        (str(GPUMAP), *(word.replace(url_of(pod), url) for word in arguments_of(pod))),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ((), "http://prod-gpumap.monitoring.svc:9401"),
        (("service.port=80", "fullnameOverride=gpumap-2"), "http://gpumap-2.monitoring.svc:80"),
        (("tls.secretName=certificate",), "https://prod-gpumap.monitoring.svc:9401"),
    ],
)
def test_it_asks_the_releases_service(values: tuple[str, ...], url: str) -> None:
    (pod,) = hooks(*values)
    (service,) = [one for one in render_all(*values, release="prod") if one["kind"] == "Service"]
    assert url_of(pod) == url
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert url.endswith(f"//{name}.monitoring.svc:{port}")


def test_openshift_is_known_by_its_api() -> None:
    """Also with constraints of one's own."""
    done = helm(
        "template", "prod", CHART, *settings(()), "--api-versions", "security.openshift.io/v1", "--show-only", HOOK
    )
    assert done.returncode == 0, done.stderr
    assert not yaml.safe_load(done.stdout)["spec"]["securityContext"].keys() & {"runAsUser", "runAsGroup"}


@pytest.mark.parametrize("values", UNASKED.values(), ids=UNASKED)
def test_there_is_none_where_it_could_not_be_answered(values: tuple[str, ...]) -> None:
    """Without a password or a client's certificate it would fail beside agents that work."""
    assert hooks(*values) == []


def test_it_passes_where_an_agent_works(tmp_path: Path) -> None:
    """`gpumap doctor` is answered, and shows what the agent sees."""
    (pod,) = hooks()
    with demo(tmp_path) as url:
        done = ask(pod, url)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^kubelet +ok", done.stdout, re.MULTILINE)


def test_it_fails_where_nobody_answers() -> None:
    """No agent is ready, or none was scheduled: one line says that no agent answered."""
    (pod,) = hooks()
    done = ask(pod, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "did not answer" in done.stderr


@pytest.fixture(name="lost_card", scope="module")
def run_lost_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An agent on a node with one card, which is lost."""
    folder = tmp_path_factory.mktemp("lost")
    scenario = folder / "lost.yaml"
    scenario.write_text(LOST_CARD)
    with demo(folder, "--scenario", str(scenario)) as url:
        yield url


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ((), 1),
        (("gpuNodesOnly=false", "nodeSelector.gpu=on"), 1),
        (("gpuNodesOnly=false",), 0),
        (("gpuNodesOnly=false", *VARIATIONS["rather on some nodes"]), 0),
    ],
    ids=["GPU nodes", "chosen nodes", "every node", "rather on some nodes"],
)
def test_it_wants_a_driver_where_every_agent_has_one(lost_card: str, values: tuple[str, ...], code: int) -> None:
    """It fails on a node without a working GPU, but where agents run on nodes that need have none."""
    (pod,) = hooks(*values)
    done = ask(pod, lost_card)
    assert done.returncode == code, done.stdout + done.stderr


@contextlib.contextmanager
def guarded(folder: Path, config: str, passed: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
    """An agent with this web configuration. Gives its address, and what `passed` gave when it first gave something."""
    path, log = folder / "web.yml", folder / "demo.log"
    path.write_text(config)
    command = (str(GPUMAP), "demo", "--listen", "127.0.0.1:0", "--web-config", str(path))
    with running(command, log, folder) as process:
        url = f"https://{listening(process, log)}"
        yield url, wait_for("answer", lambda: passed(url), process, log)


def sources_of(pod: Manifest) -> dict[str, tuple[str, str]]:
    """Which key of which Secret each file below the mount is."""
    (volume,) = pod["spec"]["volumes"]
    secrets = [source["secret"] for source in volume["projected"]["sources"]]
    return {item["path"]: (one["name"], item["key"]) for one in secrets for item in one["items"]}


def test_it_trusts_the_secrets_authority(tmp_path: Path) -> None:
    """Over TLS: with the ca.crt that the pod mounts it passes; with another one, or none, it says so in one line."""
    (pod,) = hooks(TLS)
    assert sources_of(pod) == {"ca-file": ("certificate", "ca.crt")}
    make_certificate(tmp_path, "tls")
    make_certificate(tmp_path, "other")
    for name, folder in (("tls", "good"), ("other", "bad")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ca-file").write_bytes((tmp_path / f"{name}.crt").read_bytes())

    def passed(url: str) -> str | None:
        done = ask(pod, url, tmp_path / "good")
        return done.stdout if done.returncode == 0 else None

    with guarded(tmp_path, "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n", passed) as (url, said):
        assert "kubelet" in said
        done = ask(pod, url, tmp_path / "bad")
        assert done.returncode != 0
        assert "certificate is not trusted" in done.stderr
        done = ask(pod, url, tmp_path / "nowhere")
        assert done.returncode != 0
        assert "/nowhere/ca-file" in done.stderr


def test_it_asks_as_the_monitor_does(tmp_path: Path) -> None:
    """Where a password and a client's certificate are wanted, it has those of the monitor's Secrets, and passes."""
    guard = (TLS, "tls.clientCaSecretName=clients", f"basicAuth.users.prometheus={HASH}")
    (pod,) = hooks(*guard, *PASSWORD, *CERTIFICATE)
    assert sources_of(pod) == {
        "ca-file": ("certificate", "ca.crt"),
        "cert-file": ("prometheus", "tls.crt"),
        "key-file": ("prometheus", "tls.key"),
        "password-file": ("prometheus", "password"),
    }
    (user,) = [one["valueFrom"] for one in pod["spec"]["containers"][0]["env"] if one["name"] == "GPUMAP_USER"]
    assert user == {"secretKeyRef": {"name": "prometheus", "key": "user"}}

    make_certificate(tmp_path, "ca")
    for name in ("tls", "client"):
        make_signed_certificate(tmp_path, name, "ca")
    files = tmp_path / "files"
    files.mkdir()
    for name, source in (("ca-file", "ca.crt"), ("cert-file", "client.crt"), ("key-file", "client.key")):
        (files / name).write_bytes((tmp_path / source).read_bytes())
    (files / "password-file").write_text("open sesame")
    (secret,) = [one for one in render_all(*guard, *PASSWORD, *CERTIFICATE) if one["kind"] == "Secret"]
    config = secret["stringData"]["web-config.yml"]
    for path, name in (("tls/tls", "tls"), ("client-ca/ca", "ca")):
        config = config.replace(f"/etc/gpumap/{path}.", f"{tmp_path}/{name}.")

    def passed(url: str) -> str | None:
        done = ask(pod, url, files, "prometheus")
        return done.stdout if done.returncode == 0 else None

    with guarded(tmp_path, config, passed) as (url, said):
        assert "kubelet" in said
        (files / "password-file").write_text("shut sesame")
        done = ask(pod, url, files, "prometheus")
        assert done.returncode != 0
        assert "401" in done.stderr


def test_it_asks_as_a_pod_monitor_does() -> None:
    values = of("podMonitor", PASSWORD_SENT)
    (pod,) = hooks(f"basicAuth.users.prometheus={HASH}", "podMonitor.enabled=true", *values)
    assert sources_of(pod) == {"password-file": ("prometheus", "password")}
