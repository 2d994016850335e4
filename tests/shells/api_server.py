"""A server that plays the part of the Kubernetes API which `kubectl gpumap` needs, for the real kubectl.

It speaks TLS with a certificate of its own, knows users by their tokens, lists pods by label, node and namespace, a
page at a time, and hands `pods/proxy` on to agents: running ones, or maps and failures that a test gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from gpumap.cli.sources.kubectl_agents import Pod, pod_list
from tests.certificates import make_certificate

LABELS = {"app.kubernetes.io/name": "gpumap", "app.kubernetes.io/instance": "gpumap"}
JANE, JOHN = "token-of-jane", "token-of-john"
USERS = {JANE: "jane", JOHN: "john"}


@dataclass
class PlayedPod:
    """An agent's pod. `agent` is the URL of a running one, the bytes of a map, (status, text) of its own, or None where
    nothing listens."""

    node: str
    name: str
    agent: str | bytes | tuple[int, str] | None = None
    namespace: str = "gpumap"
    labels: Mapping[str, str] = field(default_factory=lambda: dict(LABELS))
    created: str = "2026-01-01T00:00:00Z"
    phase: str = "Running"
    waiting: str = ""
    leaving: bool = False
    port: int = 9401
    hangs: bool = False

    def as_json(self) -> dict[str, Any]:
        state = {"waiting": {"reason": self.waiting}} if self.waiting else {"running": {}}
        metadata = {
            "name": self.name,
            "namespace": self.namespace,
            "labels": dict(self.labels),
            "creationTimestamp": self.created,
        }
        container = {"name": "gpumap", "ports": [{"name": "metrics", "containerPort": self.port}]}
        ready = "True" if self.phase == "Running" and not self.waiting else "False"
        return {
            "metadata": metadata | ({"deletionTimestamp": self.created} if self.leaving else {}),
            "spec": {"nodeName": self.node, "containers": [container]},
            "status": {
                "phase": self.phase,
                "conditions": [{"type": "Ready", "status": ready}],
                "containerStatuses": [{"name": "gpumap", "state": state}],
            },
        }


class ApiServer:
    """`pods` may change while it runs. `forbidden` are (user, verb and resource, node or namespace or "")."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: list[PlayedPod] = []
        self.forbidden: set[tuple[str, str, str]] = set()
        self.asked: list[str] = []
        self.prefix = ""
        self.port = 0
        self._session: aiohttp.ClientSession | None = None

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    def write_kubeconfig(self, **contexts: tuple[str, str, str]) -> None:
        """Contexts by name: the token, the namespace, and the path of the server; the first is the current one."""
        server = f"https://127.0.0.1:{self.port}"
        names = list(contexts)
        clusters, users, listed = [], [], []
        for name, (token, namespace, path) in contexts.items():
            cluster = {"server": server + path, "certificate-authority": str(self.certificate)}
            clusters.append({"name": f"cluster-{name}", "cluster": cluster})
            users.append({"name": f"user-{name}", "user": {"token": token}})
            context = {"cluster": f"cluster-{name}", "user": f"user-{name}"}
            listed.append({"name": name, "context": context | ({"namespace": namespace} if namespace else {})})
        config = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "users": users, "contexts": listed}
        self.kubeconfig.write_text(yaml.safe_dump(config | {"current-context": names[0]}))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if not request.path.startswith(self.prefix):
            return _status(404, "the server could not find the requested resource")
        path = request.path.removeprefix(self.prefix)
        if path == "/version":
            return web.json_response({"major": "1", "minor": "37", "gitVersion": "v1.37.1"})
        user = USERS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            return _status(401, "Unauthorized")
        user = request.headers.get("Impersonate-User", user)
        match path.strip("/").split("/"):
            case ["api", "v1", "pods"]:
                return self._list(request, user, "")
            case ["api", "v1", "namespaces", namespace, "pods"]:
                return self._list(request, user, namespace)
            case ["api", "v1", "namespaces", namespace, "pods", name, "proxy", *rest]:
                return await self._proxy(request, user, namespace, name, "/".join(rest))
        return _status(404, "the server could not find the requested resource")

    def _list(self, request: web.Request, user: str, namespace: str) -> web.Response:
        if (user, "list pods", namespace) in self.forbidden:
            scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            return _forbidden(f'pods is forbidden: User "{user}" cannot list resource "pods" in API group "" {scope}')
        wanted = dict(one.split("=", 1) for one in request.query.get("labelSelector", "").split(",") if one)
        node = request.query.get("fieldSelector", "").removeprefix("spec.nodeName=")
        found = [
            pod
            for pod in self.pods
            if pod.labels.items() >= wanted.items() and node in ("", pod.node) and namespace in ("", pod.namespace)
        ]
        begin, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "1000000"))
        more = {"continue": str(begin + limit)} if len(found) > begin + limit else {}
        items = [pod.as_json() for pod in found[begin : begin + limit]]
        answer = web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": more, "items": items})
        answer.enable_compression()  # as the real one does with long answers
        return answer

    async def _proxy(self, request: web.Request, user: str, namespace: str, name: str, path: str) -> web.StreamResponse:
        name, _, port = name.removeprefix("https:").partition(":")
        pod = next((one for one in self.pods if (one.namespace, one.name) == (namespace, name)), None)
        if pod is None:
            return _status(404, f'pods "{name}" not found')
        if {(user, "get pods/proxy", pod.node), (user, "get pods/proxy", "")} & self.forbidden:
            what = f'User "{user}" cannot get resource "pods/proxy" in API group "" in the namespace "{namespace}"'
            return _forbidden(f'pods "{name}" is forbidden: {what}')
        if pod.hangs:
            await asyncio.sleep(3600)
        match pod.agent:
            case None:
                refused = f"dial tcp 10.0.0.7:{port}: connect: connection refused"
                return _status(503, f"error trying to reach service: {refused}")
            case bytes():
                return web.Response(body=pod.agent, content_type="application/json")
            case (status, text):
                return web.Response(status=status, text=text)
        assert self._session is not None
        async with self._session.get(f"{pod.agent}/{path}", headers=_passed(request)) as answer:
            return web.Response(status=answer.status, body=await answer.read(), headers=_passed(answer))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve on a free port until the block ends."""
        make_certificate(self.folder, "tls")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.folder / "tls.key")
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
                await site.start()
                self.port = runner.addresses[0][1]
                yield
            finally:
                await runner.cleanup()


def _passed(message: web.Request | aiohttp.ClientResponse) -> dict[str, str]:
    names = ("Accept", "Accept-Encoding", "Content-Type", "Content-Encoding")
    return {name: message.headers[name] for name in names if name in message.headers}


def _forbidden(message: str) -> web.Response:
    return _status(403, message, "Forbidden")


def _status(code: int, message: str, reason: str = "") -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)


def map_of(found: Mapping[str, Any], node: str) -> bytes:
    """A map as another node would answer it."""
    return json.dumps({**found, "name": node}).encode()


def listed(*pods: Mapping[str, Any]) -> tuple[Pod, ...]:
    """Pods as the API server lists them."""
    return pod_list(json.dumps({"items": pods}).encode()).items or ()
