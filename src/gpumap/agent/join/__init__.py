"""The join: it combines the answers of all sources into one picture of the node.

`step` takes the `Memory` of the last collection and the `Observations` of this one. It returns a `Snapshot` and the
next `Memory`. The package is pure: no clock, no file, no log. The same input always gives the same output.

Reading order. `step` shows the whole:

| file | question |
|---|---|
| `step` | how does one collection become a snapshot? |
| `collection` | in which order are the parts computed? |
| `inventory` | which devices does the node have? |
| `served_list` | which List of the kubelet counts? |
| `pods` | which UID and which name does each pod have? |
| `placement`, `grants`, `shares`, `allocation` | which container holds which device, and how much of it? |
| `attribution` | which pod owns each process on each device? |
| `usage`, `history` | how much does each container use, and when did it last work? |
| `node_parts` | how do these results become the nouns of the node? |
| `settings`, `memory` | what did the user decide? what does gpumap remember? |

| read when needed | what it has |
|---|---|
| `accounting`, `pcie` | seconds and joules for each container; bytes over PCIe |
| `xids` | XID errors |
| `stalled` | GPUs that are busy without work |
| `unavailable`, `unexplained` | GPUs that NVML or the kubelet leaves out; use without a process |
| `needs_restart` | what only a new container solves |
"""

from gpumap.agent.join.memory import Memory
from gpumap.agent.join.settings import JoinSettings
from gpumap.agent.join.step import step

__all__ = ["JoinSettings", "Memory", "step"]
