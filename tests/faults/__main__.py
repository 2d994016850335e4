"""`python -m tests.faults`, or `make faults`: print every fault that a test injects, and what gpumap then shows."""

from tests.faults.table import rows

found = sorted(rows(), key=lambda row: row.part)
for row in found:
    print(row, *row.lines, sep="\n    ")
print(f"{len(found)} faults. docs/dev/testing.md explains the texts.")
