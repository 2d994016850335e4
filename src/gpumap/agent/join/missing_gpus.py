"""GPUs that are on PCI and that NVML does not list: for how long, and why gpumap cannot judge it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.rules import Rules
from gpumap.model.device_ids import pci_address
from gpumap.model.node import MissingGpus
from gpumap.model.observations import Failed, Moment, Observations, Observed, PciFunction, ProcTable
from gpumap.model.shown import age, counted

CONTROLLER_3D, DRIVER = "0x0302", "nvidia"


@dataclass(frozen=True, slots=True)
class MissingMemory:
    """What gpumap remembers of such GPUs."""

    listed_ids: frozenset[str] = frozenset()
    """PCI device ids of the GPUs that NVML listed."""
    since: Mapping[str, Moment] = field(default_factory=dict)
    """By address: since when NVML does not list a function."""
    levels: tuple[Moment, ...] = ()
    """Since when at least one GPU is missing, at least two, and so on."""


def find_missing(
    before: MissingMemory,
    observations: Observations,
    inventory: Inventory,
    procs: ProcTable,
    last_finished: Moment | None,
    rules: Rules,
) -> tuple[MissingMemory, MissingGpus | None, str]:
    """Return what to remember, and the missing GPUs; or `None` and why they cannot be judged."""
    why = rules.why_not_on_pci or _why_unjudged(observations, procs)
    if why or not isinstance(observations.pci, Observed):
        return MissingMemory(before.listed_ids), None, why
    now, functions = observations.finished, observations.pci.value
    bus_ids = [*(gpu.pci_bus_id for gpu in inventory.gpus), *(gpu.pci_bus_id for gpu in inventory.nameless)]
    listed = {pci_address(bus_id) for bus_id in bus_ids} & {function.address for function in functions}
    listed_ids = before.listed_ids | {function.device_id for function in functions if function.address in listed}
    missing = [one.address for one in functions if one.address not in listed and _is_gpu(one, listed_ids)]
    # A GPU of NVML's whose address is not on PCI, or not known, may be any of them.
    count = max(len(missing) - (len(bus_ids) - len(listed)), 0)
    is_gap = last_finished is not None and rules.is_gap(last_finished, now)
    since = {address: now if is_gap else before.since.get(address, now) for address in missing if count}
    levels = (*(() if is_gap else before.levels[:count]), *[now] * count)[:count]
    memory = MissingMemory(listed_ids, since, levels)
    lasting = tuple(address for address, moment in since.items() if now.since(moment) >= rules.grace_seconds)
    sure = min(len(lasting), sum(now.since(moment) >= rules.grace_seconds for moment in levels))
    if sure:
        return memory, MissingGpus(sure, lasting, now.wall - now.since(levels[0])), ""
    if count:
        what = f"{counted(count, 'GPU')} on PCI {'is' if count == 1 else 'are'} not in NVML"
        return memory, None, f"{what}, for less than {age(rules.grace_seconds)}"
    return memory, MissingGpus(), ""


def _why_unjudged(observations: Observations, procs: ProcTable) -> str:
    if isinstance(observations.nvml, Failed):
        return "NVML does not answer"
    if not (procs.pid_visibility and procs.is_machine):
        return "gpumap is not in the machine's own PID namespace: NVML may list only some of the GPUs"
    if isinstance(observations.pci, Failed):
        return observations.pci.complaints[-1].detail
    return "" if observations.pci else "PCI was not read"


def _is_gpu(function: PciFunction, listed_ids: frozenset[str]) -> bool:
    """Return whether NVML should list a function: the driver has it, or it is a GPU of a kind that NVML listed."""
    is_taken = function.driver not in ("", DRIVER) or function.driver_override
    is_of_driver = function.class_code == CONTROLLER_3D and function.driver == DRIVER
    return not is_taken and (is_of_driver or function.device_id in listed_ids)
