"""Writes samples of the last hour into a Prometheus by remote write. Rules read them.

The protocol is a snappy-compressed protobuf message, `prometheus.WriteRequest` (prompb/remote.proto and types.proto).
"""

from __future__ import annotations

import struct
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

_HEADERS = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_SERIES_OF_A_REQUEST = 3_000


def series(name: str, labels: Mapping[str, str], samples: bytes) -> bytes:
    """A TimeSeries. `samples` come from the function of that name, which many series may share."""
    named = sorted({"__name__": name, **labels}.items())
    return b"".join(_field(1, _field(1, key.encode()) + _field(2, value.encode())) for key, value in named) + samples


def samples(times: Sequence[float], a_second: float) -> bytes:
    """The samples of a value that starts at 0 and grows by so much in each second, in any whole series."""
    grown = ((time, (time - times[0]) * a_second) for time in times)
    return b"".join(
        _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(int(time * 1000))) for time, value in grown
    )


def write(url: str, every: Iterable[bytes]) -> None:
    """Send the series. Those of one request after another may be of the same times, within an hour."""
    rest = iter(every)
    while batch := [*islice(rest, _SERIES_OF_A_REQUEST)]:
        body = b"".join(_field(1, one) for one in batch)
        packed = _varint(len(body)) + b"\xfc" + struct.pack("<I", len(body) - 1) + body  # one literal, uncompressed
        request = urllib.request.Request(f"{url}/api/v1/write", data=packed, headers=_HEADERS)
        urllib.request.urlopen(request, timeout=120.0).close()


def _field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))
