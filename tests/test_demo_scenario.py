"""A scenario's mistakes are reported in one line that names their place; its devices are given as a kubelet gives
them."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from gpumap.lab.demo import scenario_model
from gpumap.lab.demo.scenario import ScenarioError, default_scenario, load_scenario, parse_scenario
from gpumap.lab.demo.scenario_model import Entry
from gpumap.model.observations import PluginAnswer
from gpumap.model.readings import RECOVERY_ACTIONS

GPUS = """
gpus:
  - {model: H100, memory: 80GiB}
  - {model: H100, memory: 80GiB, replicas: 2}
  - {model: H100, memory: 80GiB, mig: [1g.10gb, {profile: 3g.40gb, compute: [1c.3g.40gb, 2c.3g.40gb]}]}
"""
POD = "pods:\n  - name: a\n    containers:\n      - "


def nested(value: str) -> str:
    """Six lines. Each after the first repeats the one before it ten times, in a value of this form."""
    repeated = (f"a{n}: &a{n} {value.format(', '.join([f'*a{n - 1}'] * 10))}\n" for n in range(1, 6))
    return f"a0: &a0 {{x: 1}}\n{''.join(repeated)}"


MISTAKES = [
    ("gpu: []", "scenario: Object contains unknown field `gpu`"),
    ("pods: []", "scenario: Object missing required field `gpus`"),
    ("- a", "scenario: Expected `object`, got `array`"),
    ("gpus: [\npods", "line 2: not YAML: expected ',' or ']', but got '<stream end>'"),
    ("node: a\nnode: b", 'line 2: key "node" is set twice'),
    ("gpus: [{model: H100, memory: 80GB}]", "gpus[0].memory: expected a size such as 20GiB or 512MiB"),
    ("repeat: 90\ngpus: []", "repeat: expected a time such as 90s or 1m30s"),
    (GPUS + "kubelet: {away: [{from: 2m, until: 1m}]}", "kubelet.away[0]: ends before it begins"),
    (
        GPUS + "kubelet: {away: [{from: 4m, until: 5m}]}",
        "kubelet.away[0]: 305s is after the play (repeat: 300s)",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [4g.40gb, 4g.40gb]}]",
        "gpus[0].mig: the profiles take 8 of 7 slices",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, values: {clock_hertz: {}}}]",
        'gpus[0].values: unknown key "clock_hertz"',
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, values: {clocks_hertz: {sm: fast}}}]",
        "gpus[0].values.clocks_hertz[...]: Expected `float`, got `str`",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, growth: {ecc_errors: 1}}]",
        "gpus[0].growth: Invalid enum value 'ecc_errors'",
    ),
    (
        "gpus: [{model: H100, memory: 80GiB, mig: [1g.10gb], replicas: 4}]",
        'gpus[0].replicas: a GPU with "mig" cannot have replicas',
    ),
    (
        "gpus:\n"
        "  - {model: A, memory: 80GiB, uuid: GPU-b1028956-cfa2-4990-bf4a-5da9abb51763}\n"
        "  - {model: A, memory: 80GiB, uuid: GPU-b1028956-cfa2-4990-bf4a-5da9abb51763}",
        "gpus[1]: uuid GPU-b1028956-cfa2-4990-bf4a-5da9abb51763 is also that of gpus[0]",
    ),
    (
        "gpus: [{model: A, memory: 80GiB, faults: [{kind: dead, until: 1m}]}]",
        "gpus[0].faults[0].kind: Invalid enum value 'dead'",
    ),
    (
        "gpus: [{model: A, memory: 80GiB, xids: [{at: 6m, code: 79}]}]",
        "gpus[0].xids[0]: 360s is after the play (repeat: 300s)",
    ),
    (GPUS + POD + "{name: c, gpus: [7]}", "pods[0].containers[0].gpus[0]: there is no gpu 7 (this node has 3)"),
    (
        GPUS + POD + "{name: c, gpus: [1]}",
        'pods[0].containers[0].gpus[0]: gpu 1 is shared, ask for its slots with "slots"',
    ),
    (
        GPUS + POD + "{name: c, mig: {gpu: 2, instance: 3}}",
        "pods[0].containers[0].mig: gpu 2 has no MIG device 3 (it has 3)",
    ),
    (
        GPUS + POD + "{name: c, slots: [{gpu: 1, count: 2}, {gpu: 1}]}",
        "pods[0].containers[0].slots[1]: gpu 1 has 2 slots, 0 of them free at that time",
    ),
    (
        GPUS + POD + "{name: c, ids: {x.io/y: ['{2.3}']}}",
        "pods[0].containers[0].ids.x.io/y[0]: gpu 2 has no MIG device 3 (it has 3)",
    ),
    (
        GPUS + POD + "{name: c, ids: {x.io/y: ['a-[3-1]']}}",
        "pods[0].containers[0].ids.x.io/y[0]: the range [3-1] ends before it begins",
    ),
    (
        GPUS + "kubelet: {offers: {x.io/y: ['[0-999999999]-[0-999999999]']}}",
        "kubelet.offers.x.io/y[0]: means more than 10000 ids",
    ),
    (
        GPUS + POD + "{name: c, ids: {x.io/y: ['a-[0-3]']}}\n      - {name: d, ids: {x.io/y: [a-2]}}",
        "pods[0].containers[1].ids.x.io/y: a-2 is held by default/a at that time",
    ),
    (
        GPUS + POD + "{name: c, ids: {x.io/y: [a]}, answer: {cdi: ['nvidia.com/gpu={7}']}}",
        "pods[0].containers[0].answer.cdi[0]: there is no gpu 7 (this node has 3)",
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 1GiB, sm: 180%}]}",
        "pods[0].containers[0].processes[0].sm: expected a ratio from 0 to 1, or a percentage such as 40%",
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 90GiB}]}",
        "pods[0].containers[0].processes[0]: with it, processes use 90.0 GiB of gpu 0 at 0s, "
        "which has 79.5 GiB for them",
    ),
    (GPUS + POD + "{name: c}\n    leaks: true", 'pods[0]: "leaks" needs an "until", which its processes outlive'),
    (GPUS + POD + "{name: c, init: true}", 'pods[0]: needs a container that is not "init"'),
    (
        GPUS + POD + "{name: c, gpus: [0]}\n  - {name: b, containers: [{name: c, gpus: [0]}]}",
        "pods[1].containers[0].gpus[0]: gpu 0 is held by default/a at that time",
    ),
    (
        GPUS + POD + "{name: c}\n  - {name: a, containers: [{name: c}]}",
        "pods[1]: default/a is there at that time, by pods[0]",
    ),
    (
        GPUS + POD + "{name: c, gpus: [0], processes: [{memory: 1GiB, until: 2m}]}\n    until: 1m",
        'pods[0].containers[0].processes[0]: lives until 120s, but its pod needs (unless it has "leaks") it to end '
        "at 59s",
    ),
    (
        GPUS + "kubelet: {away: [{from: 1m, until: 2m}]}\n" + POD + "{name: c}\n    from: 90s",
        "pods[0]: cannot start at 90s, while the kubelet is away",
    ),
    (f"gpus: [{', '.join(['{model: A, memory: 1GiB}'] * 65)}]", "gpus: Expected `array` of length <= 64"),
    (nested("{{<<: [{}]}}"), "line 6: more than 100000 values, counting aliases"),
    (nested("[{}]"), "line 6: more than 100000 values, counting aliases"),
    ("gpus:\n- &a [*a]\n", "line 2: more than 100000 values, counting aliases"),
    (
        GPUS + "host_processes: [{gpu: 0, memory: 1GiB, comm: a-very-long-command}]",
        "host_processes[0].comm: expected a command name of 1 to 15 characters, without /, parentheses and controls",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_names_its_place(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text)
    assert str(caught.value) == message


def test_a_file_is_named_with_its_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("gpus: 3")
    for path in (broken, tmp_path / "missing.yaml"):
        with pytest.raises(ScenarioError, match=str(path)):
            load_scenario(path)


def test_the_documented_example_is_valid() -> None:
    """The example of docs/dev/scenario.md can be played, and has every key that a scenario may have."""
    document = (Path(__file__).parent.parent / "docs" / "dev" / "scenario.md").read_text(encoding="utf-8")
    example = document.partition("```yaml\n")[2].partition("```")[0]
    assert len(parse_scenario(example).pods) == 4
    entries = {one for one in vars(scenario_model).values() if isinstance(one, type) and issubclass(one, Entry)}
    written = entries - {scenario_model.Gpu, scenario_model.Scenario}
    keys = {key.encode_name for entry in written for key in msgspec.structs.fields(entry)}
    assert len(keys) > 60
    assert [key for key in keys if not re.search(rf"\b{key}\b", example)] == []
    recovery, _ = typing.get_args(typing.get_type_hints(scenario_model.Fault)["recovery"])
    assert typing.get_args(recovery) == RECOVERY_ACTIONS
    faults = typing.get_args(scenario_model.FaultKind)
    assert [word for word in (*faults, *RECOVERY_ACTIONS) if word not in example] == []


def test_ids_are_spelled_out() -> None:
    """A range stands for each of its numbers, several for each of their pairs; devices are named by GPU and number."""
    ids = "ids: {x.io/a: ['{0}-_-[8-10]', 'one'], x.io/b: ['[0-1]-[0-2]'], x.io/c: ['{2.1}', '[a-b]']}"
    scenario = parse_scenario(GPUS + POD + f"{{name: c, {ids}}}")
    found = {entry.resource: set(entry.ids) for entry in scenario.pods[0].containers[0].devices}
    card, mig = scenario.gpus[0].uuid, scenario.gpus[2].devices[1].uuid
    assert found == {
        "x.io/a": {f"{card}-_-8", f"{card}-_-9", f"{card}-_-10", "one"},
        "x.io/b": {"0-0", "0-1", "0-2", "1-0", "1-1", "1-2"},
        "x.io/c": {mig, "[a-b]"},
    }


def test_an_answer_is_to_all_resources_or_to_each() -> None:
    """Without names of resources it is every resource's; with them a resource that is not named has none."""
    ids = "ids: {x.io/a: [a], x.io/b: [b]}"
    text = GPUS + POD + f"{{name: c, gpus: [0], {ids}, "
    one = parse_scenario(text + "answer: {envs: {A: '{1}'}}}").pods[0].containers[0].answer
    each = parse_scenario(text + "answer: {x.io/b: {devices: [/dev/nvidia0], cdi: ['v/c={2.0}']}}}")
    uuid = each.gpus[1].uuid
    assert one == dict.fromkeys(("nvidia.com/gpu", "x.io/a", "x.io/b"), PluginAnswer(envs=(("A", uuid),)))
    answer = PluginAnswer(device_paths=("/dev/nvidia0",), cdi_devices=(f"v/c={each.gpus[2].devices[0].uuid}",))
    assert each.pods[0].containers[0].answer == {"x.io/b": answer}


def test_a_bare_name_is_a_scenario_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, unless there is a file of that name; another name is reported with those that there are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").mkdir()
    assert load_scenario(Path("sharing")).node == "sharing-node"
    assert load_scenario(Path("default")).text == default_scenario().text
    with pytest.raises(ScenarioError) as caught:
        load_scenario(Path("shering"))
    assert (
        str(caught.value)
        == "shering: no such file, nor a scenario that comes with gpumap (default, faults, sharing, stalled)"
    )
    with pytest.raises(ScenarioError, match=r"^a+: File name too long$"):
        load_scenario(Path("a" * 300))
    (tmp_path / "sharing").write_text("node: mine" + GPUS)
    assert load_scenario(Path("sharing")).node == "mine"


def test_init_containers_hand_their_slot_on() -> None:
    """A container uses again what its pod's init container held, as the kubelet's devicesToReuse does."""
    text = (
        GPUS + POD + "{name: main, slots: {gpu: 1}}\n      - {name: warm, init: true, slots: {gpu: 1}}\n    until: 1m"
    )
    main, warm = parse_scenario(text).pods[0].containers
    assert main.devices == warm.devices
    assert len(main.devices[0].ids) == 1


def test_a_file_that_is_no_scenario(tmp_path: Path) -> None:
    """Other bytes, odd tags and a folder are one line."""
    other, tag, folder = (tmp_path / name for name in ("other.yaml", "tag.yaml", "folder.yaml"))
    folder.mkdir()
    other.write_bytes("node: é".encode("utf-16"))
    tag.write_text("node: !!bool abc\n")
    for path, mistake in (
        (folder, "Is a directory"),
        (other, "is not UTF-8 text"),
        (tag, "not YAML: a value does not fit its tag"),
    ):
        with pytest.raises(ScenarioError) as error:
            load_scenario(path)
        assert str(error.value) == f"{path}: {mistake}"
