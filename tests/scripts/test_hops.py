"""scripts.hops counts each function once, and changes of file in calls and returns."""

from hf_longctx import corpus, metrics
from scripts import hops


def test_each_walk_is_counted(capsys):
    hops.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert all(int(number) > 5 for row in rows for number in row.split("|")[2:4])


def test_a_function_counts_once_and_a_file_there_and_back():
    def walk():
        for _ in range(2):
            metrics.rope_base_bound(context_length=64, head_dim=8)

    functions, moves = hops.count(walk)
    once = hops.count(lambda: metrics.rope_base_bound(context_length=64, head_dim=8))
    assert (functions, moves) == (once[0], 2 * once[1])
    assert hops.count(lambda: corpus.__name__) == (0, 0)
