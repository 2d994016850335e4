"""`gpumap bill` without a real server: times, questions, reckoning, forms, and each way in which a server can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest

from gpumap.cli.bill.counting import KINDS, Bill, Gap, Increases, Pod, Request, bill_of, pods_of
from gpumap.cli.bill.pod_labels import metric_label
from gpumap.cli.bill.promql import (
    COUNTERS,
    ENERGY,
    HELD,
    MEMORY,
    NOT_MEASURED,
    PRESENT,
    SM_KNOWN,
    USED,
    USED_OF_MIG,
    WORK_MEMORY,
    WORK_SM,
    Counter,
    Key,
    Scope,
    growth,
    sum_of_steps,
)
from gpumap.cli.bill.query import gaps_between, target_matchers
from gpumap.cli.bill.table import bill_csv, bill_table, bill_values
from gpumap.cli.bill.window import Window, parse_time, window_of
from gpumap.cli.table import Shape
from gpumap.model.errors import UsageError
from gpumap.model.workloads import workload
from tests.command import one_line, run_command, run_command_in_loop
from tests.played_prometheus import Rows, answering, api, refusal, serving

NOW = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC).timestamp()
TRAINER: Key = ("ml", "trainer", "main", "GPU-1")


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
    ("start", "end", "expected"),
    [
        (
            "yesterday",
            "now",
            "--from yesterday: must be a time such as 2026-11-01, 2026-11-01T08:00:00Z, 30d (ago) or now",
        ),
        ("2026-11-31", "now", "--from 2026-11-31: this date or time does not exist"),
        ("2026-11-01T08:00:00", "now", "--from 2026-11-01T08:00:00: has no time zone: end it"),
        (
            "2026-11-01",
            "2026-10-01",
            "--from 2026-11-01: is later than --to 2026-10-01 (2026-10-01T00:00:00Z, in steps of 1m)",
        ),
        ("2009-12-31", "now", "--from 2009-12-31: is before 2010, when Prometheus did not exist"),
        ("1d", "9999999999", "--to 9999999999: is in the future"),
        ("2026-11-01", "2026-11-01T00:00:30Z", "--from 2026-11-01: is the same moment as --to 2026-11-01T00:00:30Z"),
        ("2026-11-01", "2026-12-01", "--to 2026-12-01: is in the future"),
        ("1793491200000", "now", "--from 1793491200000: must be a time"),
        ("", "now", "--from : must be a time"),
        ("30d", "-1d", "--to -1d: must be a time"),
    ],
)
def test_windows_that_are_none(start: str, end: str, expected: str) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(expected)):
        window_of(start, end, "1m", NOW)


def test_a_window_has_whole_steps() -> None:
    """Moments between are rounded down, both of them: bills of windows that touch add up."""
    assert window_of("2026-11-01T00:00:59Z", "now", "1m", NOW)[:2] == (1793491200, int(NOW) - 90)
    for resolution in ("0s", "59s", "60500ms", "11m", "often"):
        with pytest.raises(UsageError, match=f"--resolution {resolution}: "):
            window_of("1d", "now", resolution, NOW)
    with pytest.raises(UsageError, match=r"must be whole seconds, from 1m to 10m$"):
        window_of("1d", "now", "601s", NOW)


# --- bills ------------------------------------------------------------------------------------------------------------


def test_a_bill_of_jobs() -> None:
    """Jobs have the time in which they were present, over all their GPUs. What is not known is a dash."""
    first: Key = ("slurm_job", "42", "GPU-1")
    second: Key = ("slurm_job", "42", "GPU-2")
    blind: Key = ("pbs_job", "7.pbs01", "MIG-1")
    grown: dict[Counter, dict[Key, float]] = {
        PRESENT: {first: 7200.0, second: 3600.0, blind: 1800.0},
        SM_KNOWN: {first: 7200.0, second: 1800.0},
        WORK_SM: {first: 3600.0, second: 1800.0},
        WORK_MEMORY: {first: float(7200 << 30), blind: float(1800 << 30)},
    }
    request = REQUEST._replace(grouping="job", price=None)
    made = bill_of("http://prom", request, Increases(grown, 0.0, ()), {})
    lines = [re.split(r"  +", line) for line in bill_table(made, Shape()).splitlines()]
    assert lines[0] == ["KIND", "JOB", "GPU-HOURS PRESENT", "GPU-HOURS USED", "IDLE", "GIB-HOURS"]
    assert lines[1:3] == [
        ["slurm_job", "42", "3.00", "1.50", "40%", "2.00"],
        ["pbs_job", "7.pbs01", "0.50", "-", "-", "0.50"],
    ]
    text = bill_table(made, Shape())
    assert "1.00 of these GPU-hours are without SM time" in text
    assert "held" not in text.lower()
    values: Any = bill_values(made)
    assert values["rows"][0] == {
        "kind": "slurm_job",
        "job": "42",
        "present_gpu_hours": 3.0,
        "used_gpu_hours": 1.5,
        "idle_ratio": pytest.approx(0.4),
        "use_unknown_gpu_hours": 0.5,
        "memory_gib_hours": 2.0,
        "cost": None,
    }
    assert bill_csv(made).splitlines()[0] == (
        "from,to,kind,job,present_gpu_hours,used_gpu_hours,idle_ratio,use_unknown_gpu_hours,memory_gib_hours"
    )
    by_user = bill_of(
        "http://prom", request._replace(grouping="user"), Increases({one: {} for one in grown}, 0.0, ()), {}
    )
    assert bill_table(by_user, Shape()).startswith("There is nothing to charge.\n\nFrom 2026-10-01")


async def test_a_server_without_gpumap_has_no_bill_of_jobs() -> None:
    async with serving(api()) as url:
        assert "has no gpumap samples in this window" in await bill(url, "--by", "job")


def test_the_question_is_plain_promql() -> None:
    found = sum_of_steps(growth(USED, Scope('cluster="a"', 60)), 3600, 60)
    functions = set(re.findall(r"([a-z_]+)\(", found))
    assert functions == {"last_over_time", "sum_over_time"}
    assert "@" not in found
    renamed = growth(USED, Scope("", 60, exported=True))
    assert renamed.count('"pod", "$1", "exported_pod", "(.+)"') == renamed.count(f"({USED.name}")


def test_the_query_of_targets_has_no_pod_labels() -> None:
    """A GPU's own series has none: `--match` of a namespace would find no gpumap."""
    match = 'cluster="a",namespace="ml", exported_pod =~ "a,\\"b.*",zone!=\'x\''
    assert target_matchers(match) == "cluster=\"a\",zone!='x'"
    scope = Scope(match, 60, target_match=target_matchers(match))
    assert f"{NOT_MEASURED.name}{{cluster=\"a\",zone!='x'}}" in growth(HELD, scope)


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


def test_gaps() -> None:
    """Steps without a sample, at the ends and between; a time that is no longer than between two scrapes is none."""
    window = Window(6000, 12000, 60)

    def gaps(*steps: range) -> list[tuple[int, int]]:
        return list(gaps_between([moment for one in steps for moment in one], window))

    assert gaps() == [(6000, 12000)]
    assert gaps(range(6060, 12001, 60)) == []
    assert gaps(range(7200, 12001, 60)) == [(6000, 7140)]
    assert gaps(range(6060, 8000, 60)) == [(7980, 12000)]
    assert gaps(range(6060, 8000, 60), range(8580, 12001, 60)) == []
    assert gaps(range(6060, 8000, 60), range(8640, 12001, 60)) == [(7980, 8580)]


# --- the forms --------------------------------------------------------------------------------------------------------


MIG: Key = ("web", "mig", "main", "MIG-1")
REQUEST = Request("namespace", "", None, "", 3, "2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z", 60)
BY_TEAM = REQUEST._replace(grouping="label", label="team")
GROWN = {
    HELD: {TRAINER: 7200.0, MIG: 3600.0},
    USED: {TRAINER: 1800.0},
    USED_OF_MIG: {},
    ENERGY: {TRAINER: 3_600_000.0},
    MEMORY: {TRAINER: 0.0, MIG: float(3600 << 30)},
}


def a_bill(
    grown: Mapping[Counter, Mapping[Key, float]] = GROWN,
    request: Request = REQUEST,
    label_of: Mapping[Pod, str] = MappingProxyType({}),
) -> Bill:
    """Of two namespaces; one has a MIG device, which reports no use."""
    return bill_of("http://prom", request, Increases({one: {} for one in COUNTERS} | dict(grown), 0, ()), label_of)


def test_a_table_of_it() -> None:
    """What is not known is a dash; the idle share is of what is known."""
    lines = [line.split() for line in bill_table(a_bill(), Shape()).splitlines()]
    assert lines[1:4] == [
        ["ml", "2.00", "0.50", "75%", "1.00", "6.00"],
        ["web", "1.00", "-", "-", "-", "3.00"],
        ["TOTAL", "3.00", "0.50", "75%", "1.00", "9.00"],
    ]
    assert bill_table(a_bill({}), Shape()).startswith("There is nothing to charge.\n\nFrom 2026-10-01")
    assert "<0.01" in bill_table(a_bill({HELD: {TRAINER: 1}}), Shape())


@pytest.mark.parametrize(
    ("order", "reverse", "groups"),
    [
        ("held", False, ["b", "a", "c", "d"]),
        ("cost", False, ["b", "a", "c", "d"]),
        ("cost", True, ["a", "c", "b", "d"]),
        ("used", False, ["c", "a", "b", "d"]),
        ("idle", False, ["b", "a", "c", "d"]),
        ("kwh", False, ["d", "a", "b", "c"]),
        ("memory", False, ["c", "a", "b", "d"]),
        ("name", False, ["a", "b", "c", "d"]),
        ("name", True, ["d", "c", "b", "a"]),
    ],
)
def test_the_order_of_the_rows(order: str, reverse: bool, groups: list[str]) -> None:
    """The largest first, unknown last; equal ones by name. All forms have it, and the default is that of the cost."""
    a, b, c, d = ((name, "p", "main", "GPU-1") for name in "abcd")
    grown: dict[Counter, dict[Key, float]] = {
        HELD: {a: 10.0, b: 20.0, c: 10.0},
        USED: {a: 2.0, b: 1.0, c: 9.0},
        ENERGY: {d: 5.0},
        MEMORY: {c: 5.0},
    }
    made = a_bill(grown, REQUEST._replace(order=order, reverse=reverse))
    assert [line.group[0] for line in made.lines] == groups
    values: Any = bill_values(made)
    assert [row["namespace"] for row in values["rows"]] == groups
    assert [line.split(",")[2] for line in bill_csv(made, headers=False).splitlines()] == groups
    shown = [line.split()[0] for line in bill_table(made, Shape()).splitlines()[1:6]]
    assert shown == [*groups, "TOTAL"]


def test_use_above_a_share_makes_no_other_container_less_idle() -> None:
    """Of two with a quarter of a card each, one that computes on all of it and one that computes not: half is idle."""
    idler: Key = ("ml", "idler", "main", "GPU-1")
    (line,) = a_bill({HELD: {TRAINER: 900, idler: 900}, USED: {TRAINER: 3600, idler: 0}}).lines
    assert line.amounts.idle() == 0.5
    assert line.amounts.used == 3600


def test_a_mig_device_is_used_by_its_activity() -> None:
    (line,) = a_bill({HELD: {MIG: 3600}, USED_OF_MIG: {MIG: 900}}).lines
    assert (line.amounts.used, line.amounts.idle()) == (900, 0.75)


def test_csv_of_it() -> None:
    """RFC 4180; what is not known is empty; a name that a spreadsheet would take for a formula stays a name."""
    assert bill_csv(a_bill()) == (
        "from,to,namespace,held_gpu_hours,used_gpu_hours,idle_ratio,held_use_unknown_gpu_hours,energy_kwh,energy_joules,"
        "memory_gib_hours,price_per_gpu_hour,cost\r\n"
        "2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,ml,2.0,0.5,0.75,0.0,1.0,3600000.0,0.0,3.0,6.0\r\n"
        "2026-10-01T00:00:00Z,2026-11-01T00:00:00Z,web,1.0,,,1.0,,,1.0,3.0,3.0\r\n"
    )


@pytest.mark.parametrize(
    ("team", "cell", "shown"),
    [
        ('=HYPERLINK("x")', '"\'=HYPERLINK(""x"")"', '=HYPERLINK("x")'),
        ("a,b", '"a,b"', "a,b"),
        ("x\ny", "x?y", "x?y"),
        ("(none)", '"""(none)"""', '"(none)"'),
        (None, "(none)", "(none)"),
    ],
)
def test_odd_names(team: str | None, cell: str, shown: str) -> None:
    """Each stays one cell, and is no formula; a label `(none)` is not a pod without the label."""
    bill = a_bill({HELD: {TRAINER: 3600}}, BY_TEAM, {} if team is None else {("ml", "trainer"): team})
    line, _, _ = bill_csv(bill, headers=False).partition("\r\n")
    assert line.partition("Z,2026-11-01T00:00:00Z,")[2].partition(",1.0,")[0] == cell
    assert bill_table(bill, Shape()).splitlines()[1].split()[0] == shown


def test_values_of_it() -> None:
    found: Any = bill_values(a_bill())
    assert (found["version"], found["by"], found["rows"][1]["namespace"]) == (1, "namespace", "web")
    assert found["rows"][1]["used_gpu_hours"] is None
    assert found["totals"]["cost"] == 9
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("by", "columns", "groups"),
    [
        ("namespace", ("namespace",), [("ml",), ("web",)]),
        ("pod", ("namespace", "pod"), [("ml", "trainer"), ("web", "mig")]),
        ("label", ("team",), [("blue",), (None,)]),
        ("workload", ("namespace", "workload"), [("ml", "blue"), ("web", "Pod/mig")]),
    ],
)
def test_what_a_bill_is_by(by: str, columns: tuple[str, ...], groups: list[tuple[str | None, ...]]) -> None:
    """A pod without the label, or without a known workload, has a line of its own; the second is also a warning."""
    request = REQUEST._replace(grouping=by, label="team" if by == "label" else None)
    made = a_bill(request=request, label_of={("ml", "trainer"): "blue"})
    assert made.columns == columns
    assert [line.group for line in made.lines] == groups
    names = ",".join(("label_value",) if by == "label" else columns)
    assert bill_csv(made).startswith(f"from,to,{names},held_gpu_hours,")
    unlisted = ("kube-state-metrics does not list web/mig. Each has a row of its own.",)
    assert made.warnings == (unlisted if by == "workload" else ())
    everything = {("ml", "trainer"): "blue", ("web", "mig"): "red"}
    assert a_bill(request=made.request, label_of=everything).warnings == ()
    assert pods_of(GROWN) == {("ml", "trainer"), ("web", "mig")}


def test_the_kinds_of_jobs_and_users_are_those_that_gpumap_gives() -> None:
    """Each path is of work outside pods that a bill can be by."""
    jobs = "/slurm/uid_1000/job_42/step_0", "/system.slice/pbs.service/jobid/7.pbs01", "/htcondor/x_slot1_1@node"
    found = [workload([path]) for path in (*jobs, "/user.slice/user-1000.slice/session-2.scope")]
    kinds = [one.kind for one in found if one is not None]
    assert {"job": "|".join(kinds[:3]), "user": kinds[3]} == KINDS


@pytest.mark.parametrize(
    ("held", "used", "idle", "without_share"),
    [(7200.0, 1800.0, 0.75, None), (7200.0, None, None, None), (None, 1800.0, None, 1800.0), (None, None, None, None)],
)
def test_idle_is_of_what_is_known(
    held: float | None, used: float | None, idle: float | None, without_share: float | None
) -> None:
    """It needs the amounts of containers and of work outside pods. Use without a share makes no container less idle."""

    def only(value: float | None, key: Key) -> dict[Key, float]:
        return {} if value is None else {key: value}

    pods = a_bill({HELD: only(held, TRAINER), USED: only(used, TRAINER), ENERGY: {TRAINER: 1.0}})
    assert pods.total.idle() == idle
    assert pods.total.used_without_share == without_share
    job: Key = ("slurm_job", "42", "GPU-1")
    work = {PRESENT: {job: 7200.0}, SM_KNOWN: only(held, job), WORK_SM: only(used, job), WORK_MEMORY: {}}
    of_job = bill_of("http://prom", REQUEST._replace(grouping="job"), Increases(work, 0.0, ()), {})
    assert of_job.total.idle() == idle


def test_times_without_samples_are_warnings() -> None:
    """Five are listed. Without counters of GPUs nothing can be said."""
    gaps = [(f"{hour}:00", f"{hour}:30") for hour in range(1, 8)]

    def warnings(found: list[tuple[str, str]] | None, match: str = "") -> list[str]:
        grown: dict[Counter, dict[Key, float]] = {one: {} for one in COUNTERS}
        increases = Increases(grown, 0.0, None if found is None else tuple(Gap(*ends) for ends in found))
        return list(bill_of("http://prom", REQUEST._replace(match=match), increases, {}).warnings)

    uncertain = "Use within this gap may not be charged."
    message = [f"The server has no gpumap samples from {a} to {b}. {uncertain}" for a, b in gaps]
    assert warnings([]) == []
    assert warnings(gaps[:5]) == message[:5]
    assert warnings(gaps[:6]) == [*message[:5], "Gaps that are not listed: 1."]
    assert warnings(gaps) == [*message[:5], "Gaps that are not listed: 2."]
    unchecked = "so gpumap cannot check the window for gaps."
    assert warnings(None) == [f"There are no counters of GPUs, {unchecked}"]
    assert warnings(None, 'a="b"') == [f'There are no counters of GPUs that match a="b", {unchecked}']


# --- mistakes ---------------------------------------------------------------------------------------------------------

SERVER = ("--prometheus", "http://127.0.0.1:9", "--from", "1d")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: --from, --prometheus"),
        (
            ("--prometheus", "prom:9090", "--from", "1d"),
            "--prometheus prom:9090: must start with http:// or https://",
        ),
        (("--prometheus", "http://u:secret@", "--from", "1d"), "--prometheus http://: is not a URL"),
        (
            ("--prometheus", "http://a:x/", "--from", "1d"),
            "--prometheus http://a:x/: Invalid URL: port can't be converted to integer",
        ),
        ((*SERVER, "--by", "team"), '--by: unknown value "team"; valid values: namespace, pod, label'),
        ((*SERVER, "--by", "job", "--price-per-gpu-hour", "2"), "--price-per-gpu-hour: not with --by job, because"),
        ((*SERVER, "--by", "label"), "--by label requires --label NAME"),
        ((*SERVER, "--label", "team"), "--label requires --by label"),
        ((*SERVER, "--label-match", 'a="b"'), "--label-match requires --by label or --by workload"),
        ((*SERVER, "--by", "label", "--label", "my team"), "--label my team: must be the name of a label"),
        ((*SERVER, "--price-per-gpu-hour", "-1"), "--price-per-gpu-hour"),
        ((*SERVER, "--price-per-gpu-hour", "2,50"), "--price-per-gpu-hour 2,50: must be a price such as 2 or 2.75"),
        ((*SERVER, "--match", "cluster=a"), "--match cluster=a: must have the form 'cluster=\"a\"'"),
        ((*SERVER, "--match", 'a="b"}) or vector(1'), "--match"),
        ((*SERVER, "--header", "secret"), '--header: must have the form "Name: value"'),
        ((*SERVER, "--header", "A: 1", "--header", "a: 2"), "--header: a is set twice"),
        ((*SERVER, "--token-file", "/no/such"), "--token-file /no/such: No such file or directory"),
        ((*SERVER, "--resolution", "1h"), "--resolution 1h: must be whole seconds, from 1m to 10m"),
        ((*SERVER, "--timeout", "0s"), "--timeout 0s: must be longer than zero"),
        (
            (*SERVER, "--sort-by", "price"),
            '--sort-by: unknown value "price"; valid values: held, cost, used, idle, kwh',
        ),
        ((*SERVER, "-o", "yaml"), '-o/--output: unknown value "yaml"; valid values: table, csv, json'),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    line = one_line(run_command("bill", *arguments), 2)
    assert line.startswith(expected)
    assert "secret" not in line


# --- servers that fail ------------------------------------------------------------------------------------------------


async def bill(url: str, *arguments: str, code: int = 1) -> str:
    """What the command says of its failure, the address left out."""
    done = await run_command_in_loop(
        "bill", "--prometheus", url, "--from", "2024-01-01", "--to", "2024-01-02", *arguments
    )
    return one_line(done, code).removeprefix(f"{url} ")


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("", 401, "answered 401 Unauthorized: set credentials, such as --header"),
        ("no org id\n", 401, "answered 401 Unauthorized: no org id"),
        ("<html>denied", 403, "answered 403 Forbidden: access denied"),
        ("404 page not found", 404, "answered 404 Not Found: 404 page not found"),
        (refusal("bad_data", "parse error"), 400, "answered 400 Bad Request: parse error"),
        (refusal("execution", "query timed out"), 503, "answered 503 Service Unavailable: query timed out"),
        (
            "<!doctype html><title>Log in",
            200,
            "answered without JSON (an HTML page, perhaps a login). Check that it is the URL of a ",
        ),
        ("up 1", 200, "answered without JSON. Check that it is the URL of a Prometheus, "),
        ("[1]", 200, "answered with JSON of another API. Check that it is"),
        ('{"status": "success", "data": {}}', 200, "answered without a list of series. Check that it is"),
        (
            '{"status": "success", "data": [], "warnings": ["store x is away"]}',
            200,
            "answered with a warning: store x is a",
        ),
        (
            '{"status": "success", "data": [], "isPartial": true}',
            200,
            "answered incompletely because some of its storage is not available",
        ),
    ],
)
async def test_a_server_that_refuses_or_is_none(text: str, status: int, expected: str) -> None:
    """Exit code 1, and one line with its URL and its reason."""
    async with serving(answering(text, status)) as url:
        assert (await bill(url)).startswith(expected)


def vector(value: object, **labels: str) -> Rows:
    return [{"metric": {"namespace": "ml", "pod": "p", "container": "c", "uuid": "GPU-1", **labels}, "value": value}]


START = 1704067200


async def test_more_than_time_has_passed_is_no_bill() -> None:
    """Containers hold a device for no longer than the window is, whatever made their counters say so."""
    async with serving(api(vector([START, str(3 * 86400)]))) as url:
        assert await bill(url) == (
            "reports that containers held 72.0 GPU-hours of GPU-1, which is longer than the window. Check that one "
            "node has one agent, and that the clocks of all scrapers agree"
        )


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("1.7e308", ("--by", "job")),
        ("1e300", ("--by", "job", "-o", "json")),
        ("NaN", ("--by", "user", "-o", "csv")),
        ("1e300", ()),
        ("-1", ("--by", "label", "--label", "team")),
        ("abc", ("--by", "label", "--label", "team")),
    ],
)
async def test_a_value_that_no_counter_has(value: str, arguments: tuple[str, ...]) -> None:
    """One line says so: no sum overflows, and no number of 300 digits is printed."""
    point = [START + 60, value]
    labels = ("a", "b") if "label" in arguments else ("a",)
    value_now = [START, "60"] if "label" in arguments else point
    rows = [row for label in labels for row in vector(value_now, label_team=label)]
    matrix = [{"metric": row["metric"], "values": [point]} for row in rows]
    async with serving(api(rows, matrix)) as url:
        assert await bill(url, *arguments) == f'answered "{value}", which is not a value of a counter'


@pytest.mark.parametrize("form", ["table", "csv", "json"])
async def test_no_label_steers_a_terminal(form: str) -> None:
    """Neither the bill nor the notices on stderr contain control characters or direction marks of a scraped label."""
    rows = vector([START, "60"], pod="p\x1b]0;owned\x07\r\nforged\u202e\x9b2J\u2028")
    arguments = ("--from", "2024-01-01", "--to", "2024-01-02", "--by", "pod", "-o", form)
    async with serving(api(rows)) as url:
        done = await run_command_in_loop("bill", "--prometheus", url, *arguments)
    assert done.returncode == 0
    assert ("The server did not scrape these pods" in done.stderr) is (form == "csv")
    lines = (done.stdout + done.stderr).replace("\r\n", "\n").split("\n")
    assert [line for line in lines if not line.isprintable() or line.startswith("forged")] == []
