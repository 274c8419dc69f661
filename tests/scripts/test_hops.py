"""scripts.hops counts the functions of every walk."""

from scripts import hops


def test_each_walk_is_counted(capsys):
    hops.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert all(int(number) > 5 for row in rows for number in row.split("|")[2:4])
