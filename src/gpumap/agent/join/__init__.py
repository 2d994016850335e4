"""The join: it combines the answers of all sources into one picture of the node.

In come the `Memory` of the last collection and the `Observations` of this one; out go a `Snapshot` and the next
`Memory`. The package is pure: no clock, no file, no log. The same input always gives the same output.

Reading order. `step` shows the whole; each file after `joined` needs only those between it and `joined`:

| file | question |
|---|---|
| `step` | how does one collection become a snapshot? |
| `joined` | in which order are the parts computed? |
| `inventory` | which devices does the node have? |
| `listing` | which List of the kubelet counts? |
| `pods` | which UID and which name does each pod have? |
| `placement`, `grants`, `allocation` | which container holds which device, and how much of it? |
| `attribution` | which pod owns each process on each device? |
| `usage` | how much does each container use? |
| `describe` | how do these results become the nouns of the node? |
| `memory` | what does gpumap remember? |

Read when needed: `accounting` (seconds and joules for each container), `xids` and `xid_containers` (XID errors),
`needs_restart` (what only a new container solves), `source_health` (the record of each source).
"""

from gpumap.agent.join.joined import Rules
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.step import step

__all__ = ["Memory", "Rules", "step"]
