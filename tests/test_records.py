"""Which way a solve goes where nobody says it: what records of earlier ones choose."""

import pytest
import torch

from deeppcr.bounded import Hashed
from deeppcr.ways import plan
from deeppcr.ways.plan import PROBED, Probe, Record


def known(device="cpu", **seconds):
    """A record of ways that were taken once each, by a loop of so many steps that a parallel solve may pay."""
    record = Record(device, (100_000, 1, 1))
    for way, taken in seconds.items():
        record.took(way, taken)
    return record


def test_what_was_never_seen_begins_as_the_loop():
    way, why = Record("cpu").choose()
    assert way == "loop"
    assert "the first of its kind" in why


@pytest.mark.parametrize(("device", "enough"), [("cpu", 0.1), ("cuda", 0.05)])
def test_short_loops_stay_loops(device, enough):
    assert known(device, loop=0.9 * enough).choose()[0] == "loop"
    way, why = known(device, loop=1.1 * enough).choose()
    assert way == "newton"
    assert "is tried" in why


def test_a_way_is_tried_some_times_and_then_judged_by_its_best():
    record, chosen = known(loop=1.0), []
    for seconds in (1.9, 1.5, 0.5):
        chosen.append(record.choose()[0])
        record.took("newton", seconds)
    assert chosen == ["newton"] * 3
    way, why = record.choose()
    assert way == "newton"
    assert why == "of this kind loop took 1 s, newton took 500 ms"
    slower = known(loop=1.0)
    for seconds in (2.0, 1.8, 1.5):
        slower.took("newton", seconds)
    assert slower.choose()[0] == "loop"


def test_what_is_far_slower_is_tried_once():
    assert known(loop=1.0, newton=11.0).choose()[0] == "loop"


def test_what_lost_clearly_is_not_tried_again_soon():
    """On a GPU the first solves say little: they record graphs."""
    assert known("cuda", loop=1.0, newton=8.0).choose()[0] == "newton"
    record, chosen = known(loop=1.0, newton=8.0), []
    for _ in range(60):
        way, _ = record.choose()
        chosen.append(way)
        record.took(way, 8.0 if way == "newton" else 1.0)
    assert [at for at, way in enumerate(chosen) if way == "newton"] == [8, 25]


def test_a_loop_that_takes_longer_than_expected_is_left():
    record = known(newton=2.0)
    record.tries["newton"] = 3
    record.seconds["loop"], record.estimated = 1.0, {"loop"}
    assert record.choose()[0] == "loop"
    record.took("loop", 3.0)
    assert record.choose()[0] == "newton"


def test_an_estimate_is_told_as_one():
    record = known(newton=0.5)
    record.seconds["loop"] = 5.0
    record.estimated.add("loop")
    record.took("newton", 0.6)
    record.took("newton", 0.7)
    assert record.choose() == ("newton", "of this kind newton took 500 ms, loop would take about 5 s")
    record.took("loop", 1.5)  # which is what it takes, whatever was expected
    assert "loop took 1.5 s" in record.choose()[1]
    record.took("loop", 0.9)
    assert "loop took 900 ms" in record.choose()[1]


def test_a_backward_pass_counts_where_gradients_are_wanted():
    """On a CPU a loop takes as long backward as forward, and a parallel solve less."""
    record = known(loop=1.0, newton=1.2)
    record.tries["newton"] = 3
    assert record.choose()[0] == "loop"
    record.differentiated = True
    assert record.choose() == (
        "newton",
        "of this kind loop took 1 s and backward about 1 s, newton took 1.2 s and backward about 480 ms",
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loop_that_is_short_forward_may_be_long_enough_with_its_backward_pass(device):
    record = known(device, loop=0.8 * plan._WORTH_NEWTON[device])
    assert record.choose()[0] == "loop"
    record.differentiated = True
    assert record.choose()[0] == "newton"
    assert known(device, loop=0.002).is_worth_kernels(again=True) is False
    record = known(device, loop=0.002)
    record.differentiated = True
    assert record.is_worth_kernels(again=True)


@pytest.mark.parametrize(
    ("device", "loop", "tried"), [("cuda", 0.02, [3, 4, 5]), ("cuda", 0.001, []), ("cpu", 0.02, [])]
)
def test_what_comes_again_on_a_gpu_pays_for_a_trial_together(device, loop, tried):
    record, found = known(device), []
    record.seconds["loop"] = loop
    for record.solves in range(6):
        found += [record.solves] * (record.choose()[0] != "loop")
    assert found == tried


def test_the_gradients_of_a_graph_are_those_of_a_parallel_solve(monkeypatch):
    monkeypatch.setattr(Record, "expected_newton", lambda self, loop: 10 * loop)
    record = known("cuda", loop=1.0, graph=0.1)
    record.differentiated = True
    assert record.total("graph") == pytest.approx(0.1 + 10 * 0.6)
    record.tries["graph"] = 3
    assert record.choose()[0] == "loop"


@pytest.mark.parametrize(("part", "way"), [(0.6, "newton"), (0.8, "loop")])
def test_a_parallel_solve_is_tried_where_it_is_expected_to_pay(part, way, monkeypatch):
    """By a margin: it may not converge."""
    monkeypatch.setattr(Record, "expected_newton", lambda self, loop: part * loop)
    assert known(loop=1.0).choose()[0] == way


def test_what_a_parallel_solve_is_expected_to_take():
    def expected(length, rows=1, width=1):
        return Record("cuda", (length, rows, width)).expected_newton(1.0)

    # Of few numbers operations are what counts: as many as a chunk has steps, which are the root of the length, and 32 at most.
    assert expected(16) / expected(256) == pytest.approx(4, rel=1e-3)
    assert expected(4096) / expected(16384) == pytest.approx(4, rel=1e-2)
    # Of many numbers those count, of every row, and of a Jacobian of every row.
    assert expected(4096, 2 * 10**6) / expected(4096, 10**6) == pytest.approx(2, rel=1e-2)
    assert expected(4096, 10**4, 200) / expected(4096, 10**4, 100) == pytest.approx(4, rel=0.02)


def test_what_did_not_work_is_left_alone_for_a_while():
    """For 8 solves, then for 16, 32 ...; until it works."""
    for device, other in (("cpu", "loop"), ("cuda", "graph")):
        record, tried = known(device, loop=1.0), []
        for solve in range(60):
            way = record.choose()[0]
            record.took(way, {"newton": 0.1, "graph": 0.5, "loop": 1.0}[way])
            if way == "newton":
                tried.append(solve)
                record.bar("newton", "it did not converge")
            elif solve > 3:
                assert way == other
        assert tried == [0, 9, 26, 59]
    record.bar("graph", "it cannot be recorded")
    assert record.choose()[0] == "loop"
    del record.barred["newton"]
    assert record.choose()[0] == "newton"


def test_kernels_are_made_for_what_comes_again_or_is_long():
    assert not Record("cuda").is_worth_kernels(again=True)
    assert not known(loop=0.001).is_worth_kernels(again=True)
    assert known(loop=0.01).is_worth_kernels(again=True)
    assert not known(loop=0.01).is_worth_kernels(again=False)
    assert known(loop=10.0).is_worth_kernels(again=False)


@pytest.mark.parametrize(("length", "asked"), [(2 * PROBED, []), (100, [25.0])])
def test_a_probe_looks_once_and_not_at_short_loops(length, asked, monkeypatch):
    """After the first steps, which warm up, one takes a quarter of a second here; a GPU is asked for all of them at once."""
    now, seen, record = iter([0.0, (PROBED - 2) * 0.25]), [], Record("cuda")
    monkeypatch.setattr(plan, "now", lambda device: next(now))
    probe = Probe(record, length, torch.device("cuda"), lambda seconds: seen.append(seconds) or True)
    gave_up = [probe.gives_up(index) for index in range(1, length)]
    assert seen == asked
    assert gave_up.count(True) == len(asked)
    assert record.seconds == ({"loop": 25.0} if asked else {})


def related(key, length, relation="pendulum"):
    return plan.record_of(key, (length, 4, 2), torch.device("cpu"), False, lambda: relation)


@pytest.fixture
def forgotten():
    plan.forget_records()
    yield
    plan.forget_records()


def test_what_did_not_work_is_not_tried_by_every_related_kind(forgotten):
    """Of other lengths, rows, or numbers in a closure: each would take twice as long as the loop, for ever."""
    first, tried = related("first", 6000), []
    for way, seconds in (("loop", 1.0), ("newton", 1.2)):
        first.took(way, seconds)
    first.bar("newton", "did not converge")
    for number in range(130):
        record = related(number, 6000 + number)
        record.took("loop", 1.0)
        if record.choose()[0] == "newton":
            tried.append(number)
            record.took("newton", 1.2)
            record.bar("newton", "did not converge")
    assert tried == [7, 23, 55, 87, 119]  # after as many as of one kind, and then twice as many; but not without end
    assert related("much shorter", 100).barred == {}
    assert related("another step", 6000, relation="filter").barred == {}


def test_what_took_longer_is_not_tried_by_every_related_kind(forgotten):
    for key, seconds, barred in (("slow", 1.5, ["newton"]), ("quick", 0.5, [])):
        first = related(key, 6000, relation=key)
        first.took("loop", 1.0)
        first.took("newton", seconds)
        assert list(related(f"{key} too", 5900, relation=key).barred) == barred


def test_what_is_hopeless_each_kind_finds_out_by_itself(forgotten):
    related("first", 6000).bar("newton", "steps can only be called one by one", for_good=True)
    assert related("other", 6001).barred == {}


def test_kinds_whose_keys_have_one_hash_are_two():
    """As those of softmax over the last dimension and over the one before it, which mixes rows: the hash of -1 is that of -2."""
    one, other = ((Hashed(dim), (50, 4, 4), torch.device("cpu"), False) for dim in (-1, -2))
    assert hash(one[0]) == hash(other[0])
    assert plan.record_of(*one) is plan.record_of(*one)
    assert plan.record_of(*one) is not plan.record_of(*other)
