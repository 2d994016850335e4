"""Turns at what only one may do at a time: each network has its turn after the others', however many wait from one."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict, deque

PLACES = 32


class Turns:
    """Who waits, by the network that they ask from; the network whose turn is next stands first."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[bool]]] = OrderedDict()

    async def take(self, network: str) -> bool:
        """Wait for a turn, which is to be passed on; False where too many wait, and none of a network with more."""
        if not self._taken:
            self._taken = True
            return True
        if sum(map(len, self._waiting.values())) >= self._places and not self._make_room(network):
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(network, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.pass_on()  # it was given to one who does not take it any more
            raise

    def pass_on(self) -> None:
        """End a turn that was taken: it is the next network's, and there of the one who has waited longest."""
        while self._waiting:
            network, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[network] = turns
            if not turn.done():
                turn.set_result(True)
                return
        self._taken = False

    def _make_room(self, network: str) -> bool:
        """Send away the newest of the network that has most waiting, where those are more than one's own would be."""
        greediest = max(self._waiting, key=lambda one: len(self._waiting[one]))
        if len(self._waiting[greediest]) <= len(self._waiting.get(network, ())) + 1:
            return False
        turn = self._waiting[greediest].pop()
        if not turn.done():
            turn.set_result(False)
        return True


def network_of(address: str) -> str:
    """What one host may be thought to have: its IPv4 address, or the /64 around its IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:  # as a socket for both shows IPv4
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found), 64), strict=False))
    return str(found)
