"""What `make faults` prints has each fault once, each with a test."""

from collections import Counter

from tests.faults import table


def test_each_fault_has_one_row() -> None:
    counts = Counter((row.part, row.fault) for row in table.rows())
    assert [key for key, count in counts.items() if count > 1] == []


def test_each_declared_row_is_tested() -> None:
    for module in table.modules():
        tested = set(map(id, table.rows_of(module)))
        assert [str(row) for row in table.declared(module) if id(row) not in tested] == []
