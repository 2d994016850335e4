"""The nouns. Every other room imports this one, and it imports no other.

It declares each noun once, as frozen values. `readings` are the answers of NVML, `observations` those of all sources.
`snapshot` is the result of one collection. `node` is the document that an agent serves and the commands read. The room
also has pure functions on strings: device ids, cgroup paths, device plugins' answers, units, text.

Start with `readings`, then `observations`, then `snapshot`.
"""
