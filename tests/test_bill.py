"""`gpumap bill` without a real server: times, questions, reckoning, forms, and each way in which a server can fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import pytest
from aiohttp import web

from gpumap.agent.join.accounting import KEPT_SECONDS
from gpumap.agent.metrics.accounting import ACCOUNTING
from gpumap.cli.bill.counter_increase import Gain, InconsistentAnswerError, Told, gains
from gpumap.cli.bill.counting import (
    ABSENT_SECONDS,
    ENERGY,
    GAP,
    HELD,
    MEMORY,
    OF_CONTAINERS,
    OF_GPUS,
    UNATTRIBUTED,
    USED,
    Asked,
    Counter,
    Event,
    Key,
    Kind,
    changes,
)
from gpumap.cli.bill.lines import Amounts, Bill, Line, lines_of, total_of
from gpumap.cli.bill.pod_labels import metric_label
from gpumap.cli.bill.scrape_gaps import holes, joined
from gpumap.cli.bill.window import parse_time, window_of
from gpumap.cli.tables.bill import bill_csv, bill_table, bill_values
from gpumap.cli.tables.layout import Shape
from gpumap.model.errors import UsageError
from tests.command import gpumap, gpumap_in_loop, one_line
from tests.demo_process import GPUMAP, environment
from tests.played_prometheus import Answer, Rows, answering, api, refusal, serving, sleeping

NOW = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC).timestamp()
TRAINER: Key = ("ml", "trainer", "main", "GPU-1")
TRAINER_LABELS = ("namespace", "pod", "container", "uuid")


# --- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2026-11-01", "2026-11-01T00:00:00+00:00"),
        ("2026-11-01T08:30:00Z", "2026-11-01T08:30:00+00:00"),
        ("2026-11-01t08:30:00z", "2026-11-01T08:30:00+00:00"),
        ("2026-11-01T09:30:00+01:00", "2026-11-01T08:30:00+00:00"),
        ("2026-11-01 08:30:00.25Z", "2026-11-01T08:30:00.250+00:00"),
        ("1793491200", "2026-11-01T00:00:00+00:00"),
        ("now", "2026-11-21T11:59:30+00:00"),
        ("1d", "2026-11-20T11:59:30+00:00"),
        ("1h30m", "2026-11-21T10:29:30+00:00"),
    ],
)
def test_times(text: str, means: str) -> None:
    """As RFC 3339, dates, Unix seconds and durations; `now` is when all that was measured has arrived."""
    assert parse_time(text, NOW) == datetime.fromisoformat(means).timestamp()


@pytest.mark.parametrize(
    ("start", "end", "says"),
    [
        ("yesterday", "now", "--from yesterday: is no time such as 2026-11-01, "),
        ("2026-11-31", "now", "--from 2026-11-31: there is no such date or time"),
        ("2026-11-01T08:00:00", "now", "--from 2026-11-01T08:00:00: is a time of which zone?"),
        ("2026-11-01", "2026-10-01", "--from 2026-11-01: is later than --to 2026-10-01"),
        ("2026-11-01", "2026-11-01T00:00:30Z", "--from 2026-11-01: is the same moment as --to 2026-11-01T00:00:30Z"),
        ("2026-11-01", "2026-12-01", "--to 2026-12-01: is in the future"),
        ("1793491200000", "now", "--from 1793491200000: is no time"),
        ("", "now", "--from : is no time"),
        ("30d", "-1d", "--to -1d: is no time"),
    ],
)
def test_windows_that_are_none(start: str, end: str, says: str) -> None:
    """One line, with the flag and what was given."""
    with pytest.raises(UsageError, match="^" + says.replace("?", "[?]").replace("+", "[+]")):
        window_of(start, end, "1m", NOW)


def test_a_window_has_whole_steps() -> None:
    """Moments between are rounded down, both of them: bills of windows that touch add up."""
    assert window_of("2026-11-01T00:00:59Z", "now", "1m", NOW)[:2] == (1793491200, int(NOW) - 90)
    for resolution in ("0s", "59s", "60500ms", "11m", "often"):
        with pytest.raises(UsageError, match=f"--resolution {resolution}: "):
            window_of("1d", "now", resolution, NOW)


# --- the questions ----------------------------------------------------------------------------------------------------


def test_the_question() -> None:
    """Plain PromQL: range functions, offsets, `unless`, comparisons, label_replace; no extrapolation, no subquery."""
    found = changes(USED, Asked('cluster="a"', 60))
    series = 'last_over_time(gpumap_container_sm_seconds_total{cluster="a"}[60s])'
    assert f"max by (namespace, pod, container, uuid) ({series})" in found
    assert found.count(" offset 60s") == 5
    assert found.count("label_replace") == 5
    functions = set(re.findall(r"([a-z_]+)\(", found))
    assert functions == {"label_replace", "last_over_time", "max_over_time", "min_over_time"}
    assert not re.search(r"\[[^]]*:|@", found)
    renamed = changes(USED, Asked("", 60, exported=True))
    assert renamed.count('"pod", "$1", "exported_pod", "(.+)"') == renamed.count("_over_time")


def test_the_names_are_those_that_gpumap_gives() -> None:
    """Each counter is a family of the group accounting, with the labels by which it is asked for."""
    families = {family.name: family.labels for family in ACCOUNTING}
    assert {one.name: set(one.keys) for one in (*OF_CONTAINERS, *OF_GPUS)} == {
        name: set(labels) & {*TRAINER_LABELS} for name, labels in families.items()
    }


def test_counters_stand_for_as_long_as_is_believed() -> None:
    """What gpumap keeps is what a bill takes for the time in which a counter can have gone unseen."""
    assert ABSENT_SECONDS == KEPT_SECONDS


@pytest.mark.parametrize(
    ("label", "series"),
    [
        ("team", "label_team"),
        ("app.kubernetes.io/name", "label_app_kubernetes_io_name"),
        ("costCenter", "label_cost_center"),
        ("Team-Name", "label_team_name"),
    ],
)
def test_labels_have_the_names_that_kube_state_metrics_gives_them(label: str, series: str) -> None:
    """Other characters become `_`, camelCase becomes words."""
    assert metric_label(label) == series


# --- the reckoning ----------------------------------------------------------------------------------------------------


def event(step: int, kind: Kind, value: float) -> Event:
    return Event(step, kind, Fraction(value))


def gain(counter: Counter, told: Told, **others: Told) -> Gain:
    """What one counter of the trainer went, in steps of a minute; others stand by their names."""
    named = {"HELD": HELD, "GAP": GAP}
    all_told = {one: Told() for one in (*OF_CONTAINERS, *OF_GPUS)} | {named[name]: one for name, one in others.items()}
    return gains(all_told | {counter: told}, 60)[counter][TRAINER]


def told(*events: Event, first: float | None = None, last: float | None = None, before: Event | None = None) -> Told:
    return Told(
        {} if first is None else {TRAINER: Fraction(first)},
        {} if last is None else {TRAINER: Fraction(last)},
        {} if before is None else {TRAINER: before},
        {TRAINER: events} if events else {},
    )


@pytest.mark.parametrize(
    ("said", "amount", "doubted"),
    [
        (told(first=100, last=700), 600, 0),
        (told(event(5, Kind.CAME, 42), last=342), 342, 0),
        (told(event(5, Kind.WENT, 400), first=100), 300, 0),
        (told(event(5, Kind.CAME, 42), event(9, Kind.WENT, 250)), 250, 0),
        (told(event(5, Kind.CAME, 361), last=400), 39, 361),
        (told(event(5, Kind.FELL, 400), first=100, last=50), 350, 0),
        (told(event(5, Kind.PEAK, 400), first=100, last=50), 350, 0),
        (told(event(5, Kind.PEAK, 30), event(5, Kind.CAME, 20), last=80), 110, 0),
        (told(event(5, Kind.WENT, 400), event(25, Kind.CAME, 1500), first=100, last=1600), 1500, 0),
        (told(event(5, Kind.WENT, 400), event(25, Kind.CAME, 30), first=100, last=60), 360, 0),
        (told(event(5, Kind.WENT, 400), event(6, Kind.CAME, 9000), first=100, last=9100), 400, 8600),
        (
            told(event(5, Kind.WENT, 400), event(25, Kind.LEAST, 390), event(25, Kind.CAME, 450), first=100, last=500),
            800,
            0,
        ),
        (told(event(2, Kind.CAME, 900), last=1000, before=event(-20, Kind.WENT, 300)), 700, 0),
        (told(first=100, last=90), 0, 0),
    ],
)
def test_how_far_a_counter_went(said: Told, amount: int, doubted: int) -> None:
    """Births, ends, restarts at and in a step, gaps; more than time has passed is not believed; never below zero."""
    assert gain(HELD, said)[:2] == (Fraction(amount), Fraction(doubted))


def test_other_counters_are_believed_as_the_clocks_beside_them() -> None:
    """Energy has no clock of its own: what came with GPU-seconds that cannot be of this time is not of it either."""
    late = told(event(5, Kind.CAME, 9000), last=9060)
    assert gain(ENERGY, told(event(5, Kind.CAME, 5000), last=8000), HELD=late)[:2] == (Fraction(3000), Fraction(5000))
    born = told(event(5, Kind.CAME, 30), last=9060)
    assert gain(ENERGY, told(event(5, Kind.CAME, 5000), last=8000), HELD=born)[:2] == (Fraction(8000), Fraction(0))
    steady = told(first=100, last=700)
    assert gain(ENERGY, told(event(5, Kind.FELL, 5000), first=4000, last=4900), HELD=steady).amount == 900
    anew = told(event(5, Kind.FELL, 400), first=100, last=50)
    both = told(event(4, Kind.PEAK, 5000), event(5, Kind.PEAK, 5000), first=4000, last=900)
    assert gain(ENERGY, both, HELD=anew).amount == 1900, "it began anew once, as the clock did"
    assert gain(ENERGY, told(event(6, Kind.FELL, 5000), first=4000, last=900), HELD=anew).amount == 1900


def test_what_is_born_while_nobody_scrapes_is_believed() -> None:
    """The GPU was seen before without it: the counter cannot be older than that. So with every GPU of the server."""
    late = told(event(40, Kind.CAME, 2000), last=2000)
    gone, back = event(5, Kind.WENT, 0), event(40, Kind.CAME, 0)
    zero = Fraction(0)
    assert gain(HELD, late).amount == 0
    same = Told({("GPU-1",): zero}, {("GPU-1",): zero}, {}, {("GPU-1",): (gone, back)})
    assert gain(HELD, late, GAP=same).amount == 2000
    all_others = Told({("GPU-9",): zero}, {("GPU-9",): zero}, {}, {("GPU-9",): (gone, back)})
    assert gain(HELD, late, GAP=all_others).amount == 2000
    some_seen = Told(
        {("GPU-9",): zero, ("GPU-8",): zero}, {("GPU-9",): zero, ("GPU-8",): zero}, {}, {("GPU-9",): (gone, back)}
    )
    assert gain(HELD, late, GAP=some_seen).amount == 0


def test_holes() -> None:
    """When no GPU is seen; holes of windows that touch are one, and one that is no longer than a scrape is none."""

    def gaps(*of_gpus: tuple[bool, list[Event]]) -> Told:
        names: list[Key] = [(f"GPU-{number}",) for number in range(len(of_gpus))]
        first = {name: Fraction(0) for name, (seen, _) in zip(names, of_gpus, strict=True) if seen}
        return Told(first, {}, {}, {name: tuple(found) for name, (_, found) in zip(names, of_gpus, strict=True)})

    went, came = event(5, Kind.WENT, 0), event(30, Kind.CAME, 0)
    assert holes(gaps(), 100) == [(0, 100)]
    assert holes(gaps((False, [came])), 100) == [(0, 29)]
    assert holes(gaps((True, [went])), 100) == [(4, 100)]
    assert holes(gaps((True, [went, came])), 100) == [(4, 29)]
    assert holes(gaps((True, [went, came]), (True, [])), 100) == []
    assert holes(gaps((True, [went]), (False, [event(20, Kind.CAME, 0)])), 100) == [(4, 19)]
    long = (Event(120, Kind.WENT, Fraction(0), 60), Event(240, Kind.CAME, Fraction(0), 60))
    assert holes(gaps((True, [*long])), 300) == [(60, 180)]
    assert joined([(0, 60), (300, 700), (700, 1200), (2000, 2600)]) == ((300, 1200), (2000, 2600))


@pytest.mark.parametrize(
    "said",
    [
        told(first=100),
        told(last=100),
        told(event(5, Kind.CAME, 1), first=100, last=200),
        told(event(5, Kind.WENT, 100)),
        told(event(5, Kind.FELL, 100)),
    ],
)
def test_answers_that_do_not_fit_together(said: Told) -> None:
    """Something came in between two questions: no number is made of that."""
    with pytest.raises(InconsistentAnswerError):
        gain(HELD, said)


# --- the forms --------------------------------------------------------------------------------------------------------


def a_bill() -> Bill:
    """Of two namespaces; one has a MIG device, which tells no use."""

    def went(amount: int) -> Gain:
        return gain(HELD, told(first=0, last=amount))

    mig: Key = ("web", "mig", "main", "MIG-1")
    found = {
        HELD: {TRAINER: went(7200), mig: went(3600)},
        USED: {TRAINER: went(1800)},
        ENERGY: {TRAINER: went(3_600_000)},
        MEMORY: {TRAINER: went(0), mig: went(3600 << 30)},
        UNATTRIBUTED: {},
        GAP: {},
    }
    lines = lines_of(found, lambda key: key[:1])
    total = total_of(line.amounts for line in lines)
    window = ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
    return Bill("http://prom", *window, 60, "namespace", None, Fraction(3), lines, total, None, None, Fraction(0))


def test_a_table_of_it() -> None:
    """What is not known is a dash; the idle share is of what is known."""
    lines = [line.split() for line in bill_table(a_bill(), Shape()).splitlines()]
    assert lines[1:4] == [
        ["ml", "2.00", "0.50", "75%", "1.00", "6.00"],
        ["web", "1.00", "-", "-", "-", "3.00"],
        ["TOTAL", "3.00", "0.50", "75%", "1.00", "9.00"],
    ]
    empty = replace(a_bill(), lines=(), total=Amounts())
    assert bill_table(empty, Shape()).startswith("No container held or used a GPU.\n\nFrom 2026-10-01")
    little = Line(("a",), Amounts(held=Fraction(1)))
    assert "<0.01" in bill_table(replace(a_bill(), lines=(little,)), Shape())


def test_who_takes_more_than_its_share_makes_no_other_one_less_idle() -> None:
    """Of two with a quarter of a card each, one that computes on all of it and one that computes not: half is idle."""
    idler: Key = ("ml", "idler", "main", "GPU-1")
    held, used = gain(HELD, told(first=0, last=900)), gain(HELD, told(first=0, last=3600))
    found = {HELD: {TRAINER: held, idler: held}, USED: {TRAINER: used, idler: gain(HELD, told(first=0, last=0))}}
    (line,) = lines_of({ENERGY: {}, MEMORY: {}, **found}, lambda key: key[:1])
    assert line.amounts.idle() == Fraction(1, 2)
    assert line.amounts.used == 3600


def test_csv_of_it() -> None:
    """RFC 4180; what is not known is empty; a name that a spreadsheet would take for a formula stays a name."""
    text = bill_csv(a_bill())
    assert text == (
        "from,to,namespace,held_gpu_hours,used_gpu_hours,idle_ratio,held_use_unknown_gpu_hours,energy_kwh,energy_joules,"
        "memory_gib_hours,price_per_gpu_hour,cost\r\n"
        "2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,ml,2.0,0.5,0.75,0.0,1.0,3600000.0,0.0,3.0,6.0\r\n"
        "2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,web,1.0,,,1.0,,,1.0,3.0,3.0\r\n"
    )
    odd = tuple(Line((name,), Amounts(held=Fraction(0))) for name in ('=HYPERLINK("x")', "a,b", "x\ny", None))
    cells = bill_csv(replace(a_bill(), by="label", label="team", lines=odd), headers=False).split("\r\n")
    assert [line.partition("Z,2026-11-01T00:00:00Z,")[2].partition(",0.0")[0] for line in cells[:4]] == [
        '"\'=HYPERLINK(""x"")"',
        '"a,b"',
        "x?y",
        "(none)",
    ]
    odd = tuple(Line((name,), Amounts(held=Fraction(0))) for name in ("(none)", None))
    shown = bill_table(replace(a_bill(), by="label", label="team", lines=odd), Shape()).splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ['"(none)"', "(none)"]


def test_values_of_it() -> None:
    """A versioned document; what is not known is null."""
    found = bill_values(a_bill())
    assert (found["version"], found["by"], found["rows"][1]["namespace"]) == (1, "namespace", "web")
    assert found["rows"][1]["used_gpu_hours"] is None
    assert found["totals"]["cost"] == 9
    assert json.loads(json.dumps(found)) == found


# --- mistakes ---------------------------------------------------------------------------------------------------------

SERVER = ("--prometheus", "http://127.0.0.1:9", "--from", "1d")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the following arguments are required: --from, --prometheus"),
        (
            ("--prometheus", "prom:9090", "--from", "1d"),
            "--prometheus prom:9090: does not start with http:// or https://",
        ),
        (("--prometheus", "http://u:secret@", "--from", "1d"), "--prometheus http://: is not a URL"),
        (("--prometheus", "http://a:x/", "--from", "1d"), "--prometheus http://a:x/: is not a URL"),
        ((*SERVER, "--by", "team"), '--by: "team" is not namespace, pod or label'),
        ((*SERVER, "--by", "label"), "--by label: needs --label NAME"),
        ((*SERVER, "--label", "team"), "--label: is of use with --by label"),
        ((*SERVER, "--label-match", 'a="b"'), "--label-match: is of use with --by label"),
        ((*SERVER, "--by", "label", "--label", "my team"), "--label my team: is not the name of a label"),
        ((*SERVER, "--price-per-gpu-hour", "-1"), "--price-per-gpu-hour"),
        ((*SERVER, "--price-per-gpu-hour", "2,50"), "--price-per-gpu-hour 2,50: is not a price such as 2 or 2.75"),
        ((*SERVER, "--match", "cluster=a"), "--match cluster=a: is not of the form 'cluster=\"a\"'"),
        ((*SERVER, "--match", 'a="b"}) or vector(1'), "--match"),
        ((*SERVER, "--header", "secret"), '--header: is not of the form "Name: value"'),
        ((*SERVER, "--header", "A: 1", "--header", "a: 2"), "--header: a is given twice"),
        ((*SERVER, "--token-file", "/no/such"), "--token-file /no/such: No such file or directory"),
        ((*SERVER, "--resolution", "1h"), "--resolution 1h: must be whole seconds, from 1m to 10m"),
        ((*SERVER, "--timeout", "0s"), "--timeout 0s: must be longer than zero"),
        ((*SERVER, "-o", "yaml"), '-o/--output: "yaml" is not table, csv or json'),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    """Exit code 2, before anything is asked; what may be a secret is not repeated."""
    told = one_line(gpumap("bill", *arguments), 2)
    assert told.startswith(says)
    assert "secret" not in told


# --- servers that fail ------------------------------------------------------------------------------------------------


async def bill(url: str, *arguments: str, code: int = 1) -> str:
    """What the command says of its failure, the address left out."""
    done = await gpumap_in_loop("bill", "--prometheus", url, "--from", "2024-01-01", "--to", "2024-01-02", *arguments)
    return one_line(done, code).removeprefix(f"{url} ")


EMPTY = {"series": [], "query": {"resultType": "vector", "result": []}, "query_range": {"resultType": "matrix"}}


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("", 401, "answered 401 Unauthorized: who is asking? see --header"),
        ("no org id\n", 401, "answered 401 Unauthorized: no org id"),
        ("<html>denied", 403, "answered 403 Forbidden: it refuses"),
        ("404 page not found", 404, "answered 404 Not Found: 404 page not found"),
        (refusal("bad_data", "parse error"), 400, "answered 400 Bad Request: parse error"),
        (refusal("execution", "query timed out"), 503, "answered 503 Service Unavailable: query timed out"),
        (
            "<!doctype html><title>Log in",
            200,
            "answered what is no JSON (a page of HTML: a login?): is it the URL of a ",
        ),
        ("up 1", 200, "answered what is no JSON: is it the URL of a Prometheus, "),
        ("[1]", 200, "answered JSON that is not of Prometheus's API: is it"),
        ('{"status": "success", "data": {}}', 200, "answered what is no list of series: is it"),
        (
            '{"status": "success", "data": [], "warnings": ["store x is away"]}',
            200,
            "answered, but warns: store x is a",
        ),
        ('{"status": "success", "data": [], "isPartial": true}', 200, "answered in part: some of its storage is away"),
    ],
)
async def test_a_server_that_refuses_or_is_none(text: str, status: int, says: str) -> None:
    """Exit code 1, and one line with its URL and its reason."""
    async with serving(answering(text, status)) as url:
        assert (await bill(url)).startswith(says)


async def test_a_login_page_is_no_answer() -> None:
    """Nobody follows a redirect with a question and its password."""
    async with serving(answering("", 302, Location="https://sso.example.com/login?next=x")) as url:
        says = await bill(url.replace("//", "//me:secret@"))
        assert says == f"{url} redirects to https://sso.example.com/login?next=x: give the URL that answers itself"


async def test_a_server_that_is_away() -> None:
    """It does not answer, or not in time: said at once, and once."""
    assert await bill("http://127.0.0.1:9") == "did not answer: connection refused"
    async with serving(sleeping) as url:
        assert await bill(url, "--timeout", "200ms") == "did not answer within 0.2 s"


def vector(value: object, **labels: str) -> Rows:
    return [{"metric": {"namespace": "ml", "pod": "p", "container": "c", "uuid": "GPU-1", **labels}, "value": value}]


def matrix(values: object, **labels: str) -> Rows:
    return [{"metric": {"uuid": "GPU-1", **labels}, "values": values}]


START = 1704067200


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (
            api(),
            "has nothing of gpumap's group accounting in this time: is gpumap scraped by it, and does --match fit?",
        ),
        (api(vector([START, "NaN"])), 'answered "NaN", which is no value of a counter'),
        (api(vector([START, "+Inf"])), 'answered "+Inf", which is no value of a counter'),
        (api(vector([START, "-1"])), "answered -1, which is no value of a counter"),
        (api(vector([START, 1])), "answered a row that is none of a vector: is it"),
        (api(vector("1")), "answered a row that is none of a vector: is it"),
        (api([{"value": [START, "1"]}]), "answered a row that is none of a vector: is it"),
        (api(matrix=matrix([[START + 60, "1"]])), "answered with series that were not asked for"),
        (api(matrix=matrix([[START + 61, "1"]], event="CAME")), "answered for other moments than it was asked for"),
        (api(matrix=matrix([[None, "1"]], event="CAME")), "answered a row that is none of a matrix: is it"),
        (api(matrix=matrix([[START + 60, "1"]], event="CAME")), "gave answers that do not fit together: samples were"),
    ],
)
async def test_answers_that_are_not_what_was_asked(served: Answer, says: str) -> None:
    """No number is made of them."""
    async with serving(served) as url:
        assert (await bill(url)).startswith(says)


async def test_more_than_time_has_passed_is_no_bill() -> None:
    """A container holds a device for no longer than the window is, whatever made its counters say so."""
    served = api(vector([START, "0"]))

    async def answer(request: web.Request) -> web.StreamResponse:
        time = (await request.post()).get("time")
        if time is None:
            return await served(request)
        seconds = 3 * (int(str(time)) - START)
        data = {"resultType": "vector", "result": vector([int(str(time)), str(seconds)])}
        return web.json_response({"status": "success", "data": data})

    async with serving(answer) as url:
        assert await bill(url) == (
            "has it that container c of pod ml/p held GPU-1 for longer than this time: do two agents serve one "
            "node, or do the clocks of those who scrape it differ?"
        )


async def test_who_waits_is_told_what_for() -> None:
    """On a terminal, once; never in a file or a pipe."""
    reader, terminal = os.openpty()

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with serving(hang) as url:
        process = await asyncio.create_subprocess_exec(
            *(GPUMAP, "bill", "--prometheus", url, "--from", "1d"), env=environment(), stderr=terminal
        )
        os.close(terminal)
        try:
            async with asyncio.timeout(20):
                said = await asyncio.to_thread(os.read, reader, 1000)
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()
            os.close(reader)
    assert said.decode().strip() == f"gpumap: asking {url}: a day of many GPUs takes seconds, a month minutes"


async def test_what_is_sent() -> None:
    """POST to the path that was given, with headers and password, for whole answers; shown without the password."""
    asked: list[web.Request] = []
    async with serving(api(vector([START, "7"]), asked=asked)) as url:
        named = url.replace("//", "//me:secret@") + "/select/0/prometheus/"
        where = ("--prometheus", named, "--from", "2024-01-01", "--to", "2024-01-02")
        done = await gpumap_in_loop("bill", *where, "--header", "X-Scope-OrgID: ml", "-o", "json")
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["server"] == f"{url}/select/0/prometheus"
    assert {request.method for request in asked} == {"POST"}
    assert {request.path.rpartition("/")[0] for request in asked} == {"/select/0/prometheus/api/v1"}
    assert {request.headers["X-Scope-OrgID"] for request in asked} == {"ml"}
    assert {request.headers["Authorization"] for request in asked} == {"Basic bWU6c2VjcmV0"}
    for request in asked:
        assert (await request.post())["partial_response"] == "false"


async def test_a_token(tmp_path: Path) -> None:
    """From a file, which no list of processes shows."""
    asked: list[web.Request] = []
    file = tmp_path / "token"
    file.write_text("abc.def\n")
    async with serving(api(asked=asked)) as url:
        await bill(url, "--token-file", str(file))
    assert asked[0].headers["Authorization"] == "Bearer abc.def"
    for text in ("", "two words", "\x00"):
        file.write_text(text)
        says = await bill("http://127.0.0.1:9", "--token-file", str(file), code=2)
        assert says == f"--token-file {file}: does not hold a token"


async def test_a_bill_that_is_interrupted_is_a_failure() -> None:
    """It prints nothing, and does not end as if nothing had been held."""
    reached = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        reached.set()
        await asyncio.sleep(60)
        return web.Response()

    async with serving(hang) as url:
        process = await asyncio.create_subprocess_exec(
            *(GPUMAP, "bill", "--prometheus", url, "--from", "1d"),
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(20):
            await reached.wait()
            process.send_signal(signal.SIGTERM)
            out, errors = await process.communicate()
    assert (process.returncode, out, errors) == (1, b"", b"gpumap: stopped before the bill was whole\n")
