"""The nouns. Every other room imports this one, and it imports no other.

What the sources report (`readings` from NVML, `observations` from all of them), what one collection makes of it
(`snapshot`), and what an agent serves and the commands read (`map`), each declared once, as frozen values. Beside them
are pure statements about strings: device ids, cgroup paths, device plugins' answers, units, text.

Start with `readings`, then `observations`, then `snapshot`.
"""
