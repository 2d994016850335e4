"""Why something of a cluster cannot be seen, in words: the API server's, kubectl's, or the agents'. Pure."""

from __future__ import annotations

import json

from gpumap.model.text import cut_off

RULE = '{apiGroups: [""], resources: [pods/proxy], verbs: [get]}'
"""What a Role or ClusterRole must have, besides listing pods."""
_SAID_CHARACTERS = 400
_ASKS = {401: "a password", 403: "a client certificate"}
"""What an agent with a --web-config may want to see (web/config/guard.py)."""
_BESIDE = "look through `kubectl port-forward` with `gpumap map --url` and its flags"


def no_map(status: int, body: bytes) -> str:
    """Why a status came instead of a map: from the API server, which says so in a Status, or from the agent."""
    message = _status_message(body)
    if message is None and status in _ASKS:
        return f"its agent asks for {_ASKS[status]}, which the API server does not pass on: {_BESIDE}"
    if message is None:
        return f"its agent answered {status}: {cut_off(body.decode(errors='replace'), _SAID_CHARACTERS)}"
    match status:
        case 403:
            return f"{_who_may_not(message)}; ask for the rule {RULE}"
        case 404:
            return "its agent's pod has just gone"
    return f"the API server does not reach its agent: {message.removeprefix('error trying to reach service: ')}"


def no_list(status: int, body: bytes, *, of_all_namespaces: bool) -> str:
    """Why there is no list of pods: in the API server's words, or in kubectl's, which did not reach it."""
    message = _status_message(body)
    if message is None:
        return f"the API server did not answer: {cut_off(body.decode(errors='replace'), _SAID_CHARACTERS) or status}"
    match status:
        case 401:
            return f"the API server does not know who asks: {message}"
        case 403:
            advice = "; --agent-namespace asks in one namespace alone" if of_all_namespaces else ""
            return _who_may_not(message) + advice
    return f"the API server answered {status}: {message}"


def _who_may_not(message: str) -> str:
    """`pods "a" is forbidden: User "jane" cannot …`, without the pod, which is one of many."""
    return message.partition(" is forbidden: ")[2] or message


def _status_message(body: bytes) -> str | None:
    """What a Status of the API server says; None where the answer is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("kind") != "Status":
        return None
    return cut_off(str(found.get("message") or found.get("reason") or "no reason told"), _SAID_CHARACTERS)
