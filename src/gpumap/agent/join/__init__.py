"""The join: it combines the answers of all sources into one picture of the node.

`step` takes the `Memory` of the last collection and the `Observations` of this one. It returns a `Snapshot` and the
next `Memory`. The package is pure: no clock, no file, no log. The same input always gives the same output.

Reading order. `step` shows the whole:

| file | question |
|---|---|
| `step` | how does one collection become a snapshot? |
| `joined` | in which order are the parts computed? |
| `inventory` | which devices does the node have? |
| `listing` | which List of the kubelet counts? |
| `pods` | which UID and which name does each pod have? |
| `placement`, `grants`, `shares`, `allocation` | which container holds which device, and how much of it? |
| `attribution` | which pod owns each process on each device? |
| `usage`, `recent_processes`, `history` | how much does each container use, and when did it last work? |
| `describe` | how do these results become the nouns of the node? |
| `rules`, `memory` | what did the user decide? what does gpumap remember? |

| read when needed | what it has |
|---|---|
| `accounting`, `pcie` | seconds and joules for each container; bytes over PCIe |
| `xids`, `xid_containers` | XID errors |
| `stalled` | GPUs that are busy without work |
| `left_out` | devices that old kubelets do not list |
| `needs_restart`, `source_health` | what only a new container solves; the record of each source |
"""

from gpumap.agent.join.memory import Memory
from gpumap.agent.join.rules import Rules
from gpumap.agent.join.step import step

__all__ = ["Memory", "Rules", "step"]
