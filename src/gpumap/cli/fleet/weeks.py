"""Asks a Prometheus how much memory and SM time pods used on each device in the last week."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumap.cli.fleet import queries
from gpumap.cli.fleet.queries import braced
from gpumap.cli.fleet.source import maps_of, now, number_of
from gpumap.cli.node_maps import NodeMaps, Week
from gpumap.cli.prometheus import Prometheus, Row, together

_WEEK = "7d"
_OWN = ("namespace", "pod", "container", "uuid")
_MOVED = tuple(f"exported_{one}" for one in _OWN)
_KEY = ("namespace", "pod", "uuid")
Key = tuple[str, str, str]
"""Namespace, pod and uuid."""


async def maps_with_weeks(server: Prometheus, match: str, parts: frozenset[str], node: str, namespace: str) -> NodeMaps:
    """Ask once for the maps, and for the last week of the pods in them."""
    maps = await maps_of(server, match, parts, node, namespace)
    held = (one.uuid for found in maps.maps for device in found.devices for one in device.containers if one.holds)
    uuids: set[str] = {*held} if node else set()
    return maps._replace(weeks=await _weeks(server, ",".join((match, *_of(namespace, uuids)))))


def _of(namespace: str, uuids: set[str]) -> Iterator[str]:
    """Select less, to read less. With a namespace, the scrape must honor gpumap's labels."""
    if namespace:
        yield f'namespace="{namespace}"'
    if uuids:
        yield f'uuid=~"{"|".join(sorted(uuids))}"'


async def _weeks(server: Prometheus, match: str) -> Mapping[Key, Week]:
    """Return the last week of each pod on each device. A sidecar counts with its pod.

    The peak is the agent's own, which misses nothing between scrapes. It starts again with the agent and with the pod,
    so all of its samples count. They are read ten minutes at a time, because a week at once may be too much for the
    server. The share of SM time is that of the busiest ten minutes. Its counter does not move while SM time is unknown,
    so only hours with a known ratio count.
    """
    moment = await now(server)
    peak, ratio = (f"{one.name}{braced(match)}" for one in (queries.PEAK, queries.SM))
    seconds = f"gpumap_container_sm_seconds_total{braced(match)}"
    peaks, busy, hours = await together(
        [
            server.instant(_each("sum", f"max_over_time(max_over_time({peak}[10m])[{_WEEK}:10m])"), moment),
            server.instant(_each("sum", f"max_over_time(rate({seconds}[10m])[{_WEEK}:10m])"), moment),
            server.instant(_each("min", f"count_over_time({ratio}[{_WEEK}:1h])"), moment),
        ]
    )
    ratios, seen = _by_pod(busy), _by_pod(hours)
    return {
        key: Week(round(value), min(ratios[key], 1.0), seen[key] / 24)
        for key, value in _by_pod(peaks).items()
        if key in ratios and key in seen
    }


def _each(operator: str, series: str) -> str:
    """Return PromQL for a value of each pod on each device. A container that several targets report counts once."""
    each = f"max by ({', '.join((*_OWN, *_MOVED))}) ({series})"
    pods = [one for one in (*_OWN, *_MOVED) if not one.endswith("container")]
    return f"{operator} by ({', '.join(pods)}) ({each})"


def _by_pod(rows: list[Row]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for row in rows:
        namespace, pod, uuid = (row.labels.get(f"exported_{one}") or row.labels.get(one, "") for one in _KEY)
        value = number_of(row)
        if value is not None:
            found[namespace, pod, uuid] = value
    return found
