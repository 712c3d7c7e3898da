"""What is kept from call to call."""

import threading
import weakref
from types import SimpleNamespace

from deeppcr.bounded import Bounded
from deeppcr.sequence.fingerprint import Same


class Owner:
    pass


def test_the_least_recently_used_goes_first():
    kept = Bounded(most=2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key, "none") for key in "abc"] == [1, "none", 3]
    kept.put("a", 4)  # in place of the old one
    assert sorted(kept.values()) == [3, 4]
    kept.clear()
    assert len(kept) == 0


def test_bytes_are_bounded_but_for_the_latest():
    kept = Bounded(most=9, most_bytes=10)
    for number, size in enumerate((4, 6, 1)):
        kept.put(number, SimpleNamespace(bytes=size))
    assert [each.bytes for each in kept.values()] == [6, 1]
    kept.put("large", SimpleNamespace(bytes=100))
    assert [each.bytes for each in kept.values()] == [100]


def test_what_is_taken_is_lent_once():
    kept = Bounded(most=2)
    kept.put("a", 1)
    assert kept.take("a") == 1
    assert kept.take("a") is None


def test_what_is_kept_goes_with_its_owner():
    """Also where its key was looked up since, by an equal one: the end of the owner makes what it is known by equal to nothing."""
    kept, owner, other = Bounded(most=3), Owner(), Owner()
    for number in range(3):
        for _ in range(2):
            kept.put((Same(owner), number), number, owner)
    assert kept.get((Same(owner), 1)) == 1
    assert (
        weakref.getweakrefcount(owner) == 1 + 3
    )  # of all keys, and one a thing: not one for every time that it was put
    kept.put("another's", 3, other)
    assert kept.take((Same(owner), 2)) == 2  # in use
    del owner
    assert kept.values() == [3]
    kept.put("nobody's", 4, 5)  # which cannot be watched
    assert kept.get("nobody's") == 4


def test_an_owner_that_ends_while_the_cache_is_busy_does_not_stop_it():
    """The last to hold it may be what the cache throws away, while it is told to throw away something else of the owner's."""
    kept, owner = Bounded(most=2), Owner()
    kept.put("holds it", owner, owner)
    kept.put("is its own", None, owner)
    del owner
    thread = threading.Thread(target=lambda: kept.put("another", 1), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert kept.values() == [1]
