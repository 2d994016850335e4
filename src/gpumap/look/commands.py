"""The commands that look and change nothing, `map`, `top`, `waste`, `doctor`: their flags, and how they are done.
`bill` and `inspect` have files of their own.

The flags are read also where another command runs: what does the looking is imported when it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.command_line import Parser, add_command, one_of
from gpumap.errors import UsageError
from gpumap.flags import FLAGS, add_flags
from gpumap.logs import set_up_log
from gpumap.look.bill.command import add_bill
from gpumap.look.inspect.command import add_inspect
from gpumap.look.orders import MAP_ORDERS, TOP_ORDERS, WASTE_ORDERS
from gpumap.look.server_flags import add_server_flags, refuse_details, seconds_of, server_of
from gpumap.settings import Settings, quiet, resolve
from gpumap.stopping import until_stopped

if TYPE_CHECKING:
    from gpumap.document import Document
    from gpumap.look.seen import Seen, Sights
    from gpumap.look.tables import Shape

    Commands = argparse._SubParsersAction[Parser]

LOOKING = ("sources", "log")
"""What the flags are about that these commands take."""
_JQ = """gpumap map -o json | jq -r '.devices[].users[] | select(.unassigned) | .pod'"""
_SERVER = "--prometheus http://prom:9090"
_WATCH_INTERVAL = "2s"
_FLEET_INTERVAL = "15s"
"""Of a whole cluster: a server scrapes no more often."""
_FORMS = ("table", "wide", "json", "yaml", "name")


def add_commands(commands: Commands) -> None:
    for add in (add_map, add_top, add_waste, add_inspect, add_bill, add_doctor):
        add(commands)


def add_map(commands: Commands) -> None:
    show = add_command(
        commands,
        "map",
        _map,
        says="show who holds and who uses each GPU",
        examples=[
            ("this node, once", "gpumap map"),
            ("a running agent, again and again", "gpumap map --watch --url http://127.0.0.1:9401"),
            ("the largest users of each GPU first", "gpumap map --sort-by memory"),
            ("the whole cluster", f"gpumap map {_SERVER}"),
            ("for scripts: who uses what was not given to them", _JQ),
        ],
    )
    _add_look(show, orders=MAP_ORDERS)
    add_flags(show, LOOKING)


def add_top(commands: Commands) -> None:
    top = add_command(
        commands,
        "top",
        _top,
        says="show who uses GPU memory and SM time now, largest first",
        more="A row for each container and device, and for what no container accounts for: the host's processes,\n"
        "those left over from pods that are gone, and memory that no process answers for.",
        examples=[
            ("this node", "gpumap top"),
            ("by SM time, as it changes", "gpumap top --sort-by sm --watch"),
            ("a namespace, of the whole cluster", f"gpumap top -n ml {_SERVER}"),
            ("a row for each process, as nvidia-smi has it", "gpumap top --processes"),
        ],
    )
    add_processes(_add_look(top, orders=TOP_ORDERS))
    add_flags(top, LOOKING)


def add_waste(commands: Commands) -> None:
    waste = add_command(
        commands,
        "waste",
        _waste,
        says="show what is held or granted and not used, and used without a grant",
        more="Findings, worst first:\n"
        "  squatter   uses a device that it was not assigned\n"
        "  leftover   a process of a pod that is gone\n"
        "  over       uses more memory than it was granted\n"
        "  idle       holds a device and has no process on it, or has not computed for --idle-after\n"
        "  unused     was granted more memory than it uses\n"
        "  unmatched  holds slots that are on no device\n"
        "What is not known accuses nobody; below the table stands what could not be judged, and why.",
        examples=[
            ("this node", "gpumap waste"),
            ("who has computed nothing for an hour", "gpumap waste --idle-after 1h --url http://127.0.0.1:9401"),
            ("the most wasted memory first", "gpumap waste --sort-by waste"),
            ("the whole cluster", f"gpumap waste {_SERVER}"),
        ],
    )
    add_idle_after(_add_look(waste, orders=WASTE_ORDERS))
    add_flags(waste, LOOKING)


def add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        says="check each source and each privilege: what works, what not, and the remedy",
        more="Exits with 1 if the kubelet or NVML does not work; everything else is optional.",
        examples=[
            (
                "in the agent's own pod, which has its mounts and rights",
                "kubectl exec -n NAMESPACE POD -- gpumap doctor",
            ),
            ("what a running agent can tell", "gpumap doctor --url http://127.0.0.1:9401"),
        ],
    )
    output = doctor.add_argument_group("output")
    add_form(output, ("table", "json"))
    output.add_argument("--no-headers", action="store_true", help="leave out the line with the columns' titles")
    add_url(doctor)
    add_flags(doctor, LOOKING)


def _add_look(parser: Parser, orders: Sequence[str]) -> argparse._ArgumentGroup:
    """Add what all tables have in common, and give the group for what one has besides."""
    output = add_output(parser, orders)
    what = parser.add_argument_group("what is shown")
    what.add_argument("-n", "--namespace", metavar="NAME", help="rows of this namespace alone (default: of all)")
    what.add_argument("-A", "--all-namespaces", action="store_true", help="rows of all namespaces, also with -n")
    add_server_flags(add_url(parser))
    return output


def add_output(parser: Parser, orders: Sequence[str]) -> argparse._ArgumentGroup:
    """Add how a table is shown, wherever it comes from; `kubectl gpumap` has the same flags."""
    output = parser.add_argument_group("output")
    add_form(output, _FORMS)
    output.add_argument(
        "--sort-by",
        metavar="COLUMN",
        type=one_of(*orders),
        choices=orders,
        help=f"by {', '.join(orders)} (default: {orders[0]}); numbers largest first, names from A to Z, unknown last",
    )
    output.add_argument("--reverse", action="store_true", help="the other way round")
    output.add_argument("--no-headers", action="store_true", help="leave out the line with the columns' titles")
    add_watch(output)
    return output


def add_watch(output: argparse._ArgumentGroup) -> None:
    """Add how often it is shown."""
    output.add_argument("-w", "--watch", action="store_true", help="show it again and again, until Ctrl-C")
    output.add_argument(
        "--interval", metavar="DURATION", help=f"with --watch: from one to the next (default: {_WATCH_INTERVAL})"
    )


def add_processes(output: argparse._ArgumentGroup) -> None:
    """Add what `top` has besides."""
    output.add_argument("--processes", action="store_true", help="a row for each process")


def add_idle_after(output: argparse._ArgumentGroup) -> None:
    """Add what `waste` has besides."""
    output.add_argument(
        "--idle-after", metavar="DURATION", default="5m", help="not computing for so long is idle (default: 5m)"
    )


def add_form(output: argparse._ArgumentGroup, forms: Sequence[str]) -> None:
    """Add in which form; the first is what is shown unless another is asked for."""
    help_ = f"form: {', '.join(forms)} (default: {forms[0]})"
    output.add_argument(
        "-o", "--output", metavar="FORM", type=one_of(*forms), choices=forms, default=forms[0], help=help_
    )


def add_url(parser: Parser) -> argparse._ArgumentGroup:
    """Add which agent is asked, and give the group for what else may be."""
    where = parser.add_argument_group("where from")
    where.add_argument("--url", metavar="URL", help="a running gpumap, such as http://127.0.0.1:9401; else this node")
    return where


# --- carrying them out ------------------------------------------------------------------------------------------------


def _map(given: argparse.Namespace) -> int:
    from gpumap.look.tables import map_names, map_table, map_values

    return run(given, map_table, map_values, names=map_names)


def _top(given: argparse.Namespace) -> int:
    from gpumap.look.tables import top_names, top_table, top_values

    return run(given, top_table, top_values, names=top_names)


def _waste(given: argparse.Namespace) -> int:
    from gpumap.look.tables import waste_names, waste_table, waste_values

    return run(given, waste_table, waste_values, names=waste_names)


def run(
    given: argparse.Namespace,
    table: Callable[[Seen, Shape], str],
    values: Callable[[Seen, Shape], Document],
    look: Callable[[argparse.Namespace, float], Sights] | None = None,
    notes: Callable[[Seen], Sequence[str]] | None = None,
    names: Callable[[Seen, Shape], Sequence[tuple[str, str]]] | None = None,
) -> int:
    """Show what `look` sees every so many seconds, by default this node, the agent of --url, or the cluster of
    --prometheus; `notes` beside it. `names` are the pods that -o name prints."""
    from gpumap.look import show

    often = _FLEET_INTERVAL if getattr(given, "prometheus", None) else _WATCH_INTERVAL
    interval_seconds = seconds_of("--interval", given.interval or often)
    if given.interval is not None and not given.watch:
        raise UsageError("--interval is of use with --watch alone")
    sights = (look or _look)(given, interval_seconds)
    view = show.View(table, values, given.output, _shape(given), _asked(given), notes, names)
    return asyncio.run(until_stopped(show.show(sights, view, watch=given.watch, interval_seconds=interval_seconds)))


def _look(given: argparse.Namespace, interval_seconds: float) -> Sights:
    from gpumap.look import asking

    if given.prometheus is None:
        refuse_details(given)
    settings = _prepare(given)
    if given.prometheus is not None:
        from gpumap.look.fleet.source import from_prometheus

        node = getattr(given, "only_node", None) or ""
        return from_prometheus(server_of(given), interval_seconds, _parts(given), node)
    if settings is None:
        return asking.from_agent(given.url, interval_seconds)
    return asking.from_node(settings, interval_seconds if given.watch else asking.LOCAL_INTERVAL_SECONDS)


def _parts(given: argparse.Namespace) -> frozenset[str]:
    """What of the documents a command shows: a server is not asked for more."""
    from gpumap.look.fleet import families as parts

    if getattr(given, "processes", False):
        raise UsageError("--processes: is known to the node's agent alone (--url)")
    match given.command:
        case "waste":
            found = {parts.HOLDERS, parts.SHARES, parts.GRANTS, parts.USE, parts.PEAKS, parts.LEFTOVERS}
            found |= {parts.ACTIVITY, parts.LAST_SEEN}
        case "top":
            found = {parts.HOLDERS, parts.USE, parts.PEAKS, parts.ACTIVITY, parts.OTHERS}
            found |= set() if given.output == "table" else {parts.LAST_SEEN}
            found |= set() if given.output == "table" and given.sort_by != "granted" else {parts.GRANTS}
        case "inspect":
            found = {parts.HOLDERS, parts.GRANTS, parts.OFFERS}
            found |= {parts.USE} if given.used or given.output != "table" else set()
        case _ if given.output in ("json", "yaml"):
            found = set(parts.ALL)
        case _:
            found = {parts.HOLDERS, parts.SHARES, parts.GRANTS, parts.USE, parts.ACTIVITY, parts.OTHERS}
            found |= {parts.PEAKS} if given.output == "wide" or given.sort_by == "peak" else set()
    return frozenset(found)


def _doctor(given: argparse.Namespace) -> int:
    from gpumap.look import asking, show
    from gpumap.look.tables import Shape

    settings = _prepare(given)
    shape = Shape(headers=not given.no_headers)
    if settings is None:
        asked = show.show_doctor(asking.from_agent(given.url, 0.0), None, form=given.output, shape=shape)
        return asyncio.run(until_stopped(asked))
    from gpumap.look import facts

    sights = asking.from_node(settings, asking.LOCAL_INTERVAL_SECONDS)
    asked = show.show_doctor(sights, lambda: facts.look(settings), form=given.output, shape=shape)
    return asyncio.run(until_stopped(asked))


def _prepare(given: argparse.Namespace) -> Settings | None:
    """Set up the log; give the settings of this node's sources, or nothing where an agent or a server is asked.

    Only what is used is looked at: an agent has sources of its own.
    """
    asks = {"--url": "an agent, which has its own", "--prometheus": "a server about all nodes"}
    elsewhere = [name for name in asks if getattr(given, name.removeprefix("--"), None) is not None]
    if len(elsewhere) > 1:
        raise UsageError("--prometheus: cannot be asked together with --url")
    about = ("log",) if elsewhere else LOOKING
    for flag in FLAGS if elsewhere else ():
        if flag.about == "sources" and getattr(given, flag.name.removeprefix("--").replace("-", "_")) is not None:
            (name,) = elsewhere
            raise UsageError(f"{flag.name}: is about this node's sources, and {name} asks {asks[name]}")
    ours = argparse.Namespace(**{name: value for name, value in vars(given).items() if name != "interval"})
    settings = quiet(resolve(ours, os.environ, about), given, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    return None if elsewhere else settings


def _shape(given: argparse.Namespace) -> Shape:
    from gpumap.look.tables import Shape

    idle_after = getattr(given, "idle_after", None)
    shape = Shape(
        wide=given.output == "wide",
        headers=not given.no_headers,
        order=given.sort_by or "",
        reverse=given.reverse,
        processes=getattr(given, "processes", False),
        namespace="" if getattr(given, "all_namespaces", False) else getattr(given, "namespace", None) or "",
    )
    return shape if idle_after is None else replace(shape, idle_after_seconds=seconds_of("--idle-after", idle_after))


def _asked(given: argparse.Namespace) -> str:
    """What a watch shows above its table; a password in the URL is for the server alone."""
    sorted_by = f" --sort-by {given.sort_by}" if given.sort_by else ""
    places = {"--url": given.url, "--prometheus": getattr(given, "prometheus", None)}
    where = "".join(f" {flag} {re.sub('//[^/@]*@', '//', url)}" for flag, url in places.items() if url)
    return f"gpumap {given.command}{sorted_by}{where}"
