"""Asks a running gpumap for its map, again and again.

This is the edge of the commands: the bytes of an answer become a typed map here, or a FatalError with one line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from http.client import HTTPException

import msgspec
from yarl import URL

from gpumap.cli.credentials import Credentials, address_of, credentials_of, hide_password, is_host, url_of
from gpumap.cli.rows import NodeMaps, NodeMapStream
from gpumap.cli.sources.http_client import HttpAnswer, ask, ask_repeatedly, endpoint_of, no_answer
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.formatting import cut_off
from gpumap.model.node import Node, decode
from gpumap.model.terms import NUMBER_MAX

REQUEST_SECONDS = 10.0
REDIRECTS_MAX = 3
_REASON_CHARACTERS = 200
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_CHARACTERS_MAX = 1 << 16
"""A table gives each row the width of its longest name. An agent cuts names after 4096 bytes, before it escapes them
(agent/sources/messages.py)."""


def maps_of_agent(args: argparse.Namespace, interval_seconds: float) -> NodeMapStream:
    """Ask the agent of --url again and again. Raises UsageError."""
    flag, url = url_of(args)
    address = map_address(flag, url)
    who = credentials_of(args, os.environ, flag, address)
    return ask_repeatedly(lambda: _ask(address.with_user(None), who), interval_seconds)


def map_address(flag: str, url: str) -> URL:
    """Return the URL of an agent's map. Raises UsageError."""
    map_url = address_of(flag, url)
    if map_url.query_string or map_url.fragment:
        plain_url = hide_password(url).partition("?")[0].partition("#")[0]
        raise UsageError(f"{flag} {plain_url}: must end with the path, without a query (?…) and a fragment (#…)")
    path = map_url.path.rstrip("/").removesuffix("/api/v1/map").removesuffix("/metrics")  # as in other tools
    return map_url.with_path(f"{path}/api/v1/map")


async def _ask(address: URL, who: Credentials) -> NodeMaps:
    """Ask once. Raises FatalError with the reason."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            answer = await _follow_redirects(address, who)
    except TimeoutError as error:
        raise FatalError(f"{address} did not answer: no answer within {REQUEST_SECONDS:g} s") from error
    except (OSError, HTTPException) as error:
        why = no_answer(error, https=address.scheme == "https")
        raise FatalError(f"{address} did not answer: {why}") from error
    if answer.status != 200:
        raise FatalError(f"{address} answered {answer.status} {answer.reason}{_hint(answer.status)}")
    return NodeMaps((map_in(answer.body, str(address)),))


async def _follow_redirects(address: URL, who: Credentials) -> HttpAnswer:
    """Ask; follow redirects, unless the request has credentials: they are for this address only."""
    url = address
    for _ in range(REDIRECTS_MAX + 1):
        answer = await ask(endpoint_of(url, who), url.raw_path_qs, who.headers, str(address))
        if answer.status not in _REDIRECTS or not answer.location or any(who):
            return answer
        try:
            url = url.join(URL(answer.location))
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not is_host(url.raw_host):
            raise FatalError(f"{address} redirects to an address without http:// or https://")
    raise FatalError(f"{address} redirects too often")


def _hint(status: int) -> str:
    hints = {
        401: ". Set --user and --password-file",
        403: ". It refuses the request and may require --cert-file",
        404: ". Check that it is the URL of a gpumap agent (for a Prometheus use --prometheus)",
    }
    if status in hints:
        return hints[status]
    return ". Use the URL without redirects" if 300 <= status < 400 else ""


def map_in(body: bytes, who: str) -> Node:
    """Read the map that was answered. Raises FatalError if it is none of this version."""
    try:
        node = decode(body)
        _refuse_huge(node)
        return node
    except msgspec.ValidationError as error:
        why = cut_off(str(error), _REASON_CHARACTERS)
        raise FatalError(f"{who} did not answer with a map of this version of gpumap: {why}") from error
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{who} did not answer with JSON") from error


def _refuse_huge(node: Node) -> None:
    """Raise ValidationError for a text that no table has room for, or a number that overflows in a sum."""
    values: list[object] = [msgspec.to_builtins(node)]
    while values:
        value = values.pop()
        if isinstance(value, str):
            if len(value) > _TEXT_CHARACTERS_MAX:
                raise msgspec.ValidationError(f"a text is longer than {_TEXT_CHARACTERS_MAX} characters")
        elif isinstance(value, dict):
            values += value
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, int | float) and abs(value) > NUMBER_MAX:
            raise msgspec.ValidationError("a number is too large")
