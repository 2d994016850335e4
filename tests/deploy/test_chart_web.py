"""TLS, client certificates and passwords by the chart's values: what gpumap gets, and where no secret is."""

from typing import Any

import pytest
import yaml

from gpumap.agent.web.config import REQUIRED, WebConfig, parse
from tests.deploy.chart import Manifest, container_of, pod_of, render, render_all
from tests.deploy.chart_variations import EVERYTHING, PASSWORD_SENT, of

HASH = "$2y$10$" + 21 * "a" + "." + 31 * "b"
USERS = (f"basicAuth.users.prometheus={HASH}", r"basicAuth.users.mr\.1e3=" + HASH)
TLS = ("tls.secretName=certificate",)
CLIENTS = ("tls.clientCaSecretName=clients",)
OWN = ("webConfig.secretName=own",)
FILE = "/etc/gpumap/web-config/web-config.yml"


def web_config(manifests: dict[str, Manifest]) -> WebConfig:
    return parse(manifests["Secret"]["stringData"]["web-config.yml"].encode())


def secrets_mounted(manifests: dict[str, Manifest]) -> dict[str, str]:
    """Where the files of each Secret are: path in the container by Secret and key; a whole Secret by an empty key."""
    paths = {mount["name"]: mount["mountPath"] for mount in container_of(manifests)["volumeMounts"]}
    found = {}
    for volume in pod_of(manifests)["volumes"]:
        secret: dict[str, Any] = volume.get("secret", {})
        for item in secret.get("items", [{"key": "", "path": ""}] if secret else []):
            found[f"{secret['secretName']}/{item['key']}"] = f"{paths[volume['name']]}/{item['path']}"
    return found


@pytest.mark.parametrize("more", [(), CLIENTS, USERS, ("tls.minVersion=TLS13",)])
def test_gpumap_understands_what_it_is_told(more: tuple[str, ...]) -> None:
    """The file that the chart writes says what the values say, and names files that are mounted."""
    manifests = render(*TLS, *more)
    tls = web_config(manifests).tls
    assert tls is not None
    files = secrets_mounted(manifests)
    assert (tls.cert_file, tls.key_file) == (files["certificate/tls.crt"], files["certificate/tls.key"])
    assert f"--web-config={FILE}" in container_of(manifests)["args"]
    assert f"{files[manifests['Secret']['metadata']['name'] + '/']}web-config.yml" == FILE
    assert (tls.client_auth_type == REQUIRED) is (more == CLIENTS)
    assert tls.client_ca_file == (files["clients/ca.crt"] if more == CLIENTS else "")
    assert tls.min_version == ("TLS13" if "tls.minVersion=TLS13" in more else "TLS12")
    assert dict(web_config(manifests).users) == (dict.fromkeys(("prometheus", "mr.1e3"), HASH) if more == USERS else {})


def test_passwords_go_without_tls() -> None:
    """Only basicAuth: a file with users and no certificate."""
    manifests = render(*USERS)
    config = web_config(manifests)
    assert config.tls is None
    assert len(config.users) == 2
    assert "scheme" not in container_of(manifests)["readinessProbe"]["httpGet"]


UNCHECKED = tuple(f"{monitor}.tlsConfig.insecureSkipVerify=true" for monitor in ("serviceMonitor", "podMonitor"))


@pytest.mark.parametrize("values", [TLS, (*OWN, "webConfig.tls=true", *UNCHECKED)])
def test_probes_speak_tls(values: tuple[str, ...]) -> None:
    """Both probes and both monitors use https where the page does."""
    monitors = render(*values, "serviceMonitor.enabled=true") | render(*values, "podMonitor.enabled=true")
    container = container_of(monitors)
    assert {container[probe]["httpGet"]["scheme"] for probe in ("livenessProbe", "readinessProbe")} == {"HTTPS"}
    assert monitors["ServiceMonitor"]["spec"]["endpoints"][0]["scheme"] == "https"
    assert monitors["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ((), "http://127.0.0.1:9401"),
        (("port=9500",), "http://127.0.0.1:9500"),
        (("extraEnv[0].name=GPUMAP_URL", "extraEnv[0].value="), None),
        (TLS, None),
        (USERS, None),
        (OWN, None),
        (("extraArgs={--web-config=/own/web-config.yml}",), None),
    ],
)
def test_commands_in_the_pod_ask_its_agent(values: tuple[str, ...], url: str | None) -> None:
    """If it asks for no certificate and no password: a command in the pod has neither."""
    variables = {entry["name"]: entry.get("value") for entry in container_of(render(*values))["env"]}
    assert (variables.get("GPUMAP_URL") or None) == url


def test_hashes_stand_in_the_secret_alone() -> None:
    for manifest in render_all(*TLS, *USERS, *EVERYTHING, *of("serviceMonitor", PASSWORD_SENT)):
        assert (HASH in yaml.safe_dump(manifest, width=10**6)) is (manifest["kind"] == "Secret"), manifest["kind"]


def test_rotation_replaces_no_pod() -> None:
    """Other users, none of them left too, and another TLS version are only in the Secret, which running agents read
    again."""
    other = USERS[0].replace("aaa", "bbb")
    pods = [
        render(*TLS, *values)["DaemonSet"]
        for values in (USERS, USERS[:1], (other,), (), (*USERS, "tls.minVersion=TLS13"))
    ]
    assert pods[1:] == pods[:-1]
