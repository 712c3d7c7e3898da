"""Times are measured once and kept: without a GPU, by a bench that is made up."""

import json
import logging
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from deeppcr.nn import calibrate
from deeppcr.nn.calibrate import Kind
from deeppcr.nn.cost import Times

GPU = torch.device("cuda", 0)
KIND = Kind.of(16, "relu", 1, False)
ABOUT = {"format": 1, "device": "Made Up GPU", "torch": "1.0"}


class MadeUp:
    """Times that follow a formula; ``measured`` counts."""

    def __init__(self, noise=0.0):
        self.noise, self.asked = noise, []

    def loop(self, blocks, rows):
        self.asked.append(("loop", blocks, rows))
        return 3e-6 + blocks * 0.2e-6 * max(1, rows / 100)

    def round(self, chunks, chunk, rows):
        self.asked.append(("round", chunks, chunk, rows))
        return 10e-6 + 1e-7 * chunks + chunk * 0.5e-6 * max(1, chunks * rows / 64) - self.noise * chunk * (chunks == 64)

    def host(self):
        return 5e-5, 1e-4


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU that is made up, with a cache folder of its own and nothing known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPPCR_CALIBRATE", raising=False)
    monkeypatch.setattr(calibrate, "_known", {})
    monkeypatch.setattr(calibrate, "describe", lambda device: dict(ABOUT))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=66, clock_rate=990000)
    )
    benches = []

    def bench(*arguments):
        benches.append(MadeUp())
        return benches[-1]

    monkeypatch.setattr(calibrate, "Kernels", bench)
    return SimpleNamespace(
        benches=benches,
        path=calibrate.cache_file(ABOUT),
        find=lambda layers=4096, kind=KIND: calibrate.find(GPU, kind, kind.padded, layers),
        forget=lambda: calibrate._known.clear(),
    )


def test_what_is_measured_is_found_again_in_the_model():
    bench = MadeUp()
    times = calibrate.measure(bench, KIND, 16)
    assert times.loop(1000, 1) == pytest.approx(5e-5 + 1000 * 0.2e-6)
    assert times.loop(1000, 1024) == pytest.approx(5e-5 + 1000 * 0.2e-6 * 10.24)
    for chunks in (8, 64, 512, 2048):
        expected = max(1e-4, 6e-5 + 5 * bench.round(chunks, 16, 1))
        assert times.parallel(16 * chunks, 16, 1, 5) == pytest.approx(expected, rel=1e-6)
    assert times.step_of(128 * 64) == pytest.approx(0.5e-6 * 128)  # with many rows


@pytest.mark.parametrize(("width", "skip"), [(1, 1), (64, 1), (256, 1), (64, 64)])
def test_it_is_measured_in_little_memory(width, skip):
    bench = MadeUp()
    calibrate.measure(bench, Kind.of(width, "relu", skip, skip > 1), width)
    for asked in bench.asked:
        blocks = asked[1] if asked[0] == "loop" else asked[1] * asked[2]
        assert blocks * skip * width**2 <= 2**26
        assert asked[0] == "loop" or asked[1] * asked[3] * width**2 <= 2**26


def test_noise_does_not_turn_time_around():
    times = calibrate.measure(MadeUp(noise=1e-6), KIND, 16)
    assert list(times.step) == sorted(times.step)
    assert min(times.step) > 0


def test_once_in_a_process_and_once_in_a_file(machine, caplog):
    caplog.set_level(logging.INFO, logger="deeppcr")
    times, source = machine.find()
    assert source == "measured on this device"
    assert machine.find()[0] is times
    assert len(machine.benches) == 1
    assert len(caplog.records) == 1
    assert "relu, width 16" in caplog.text
    assert "DEEPPCR_CALIBRATE=0" in caplog.text
    assert str(machine.path) in caplog.text
    machine.forget()  # another process
    assert machine.find() == (times, source)
    assert len(machine.benches) == 1
    assert list(machine.path.parent.iterdir()) == [machine.path]


def test_kinds_share_a_file(machine):
    other = Kind.of(16, "tanh", 4, True)
    machine.find()
    machine.find(kind=other)
    assert len(machine.benches) == 2
    assert set(json.loads(machine.path.read_text())["times"]) == {KIND.name, other.name}
    machine.forget()
    machine.find()
    machine.find(kind=other)
    assert len(machine.benches) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[]",
        '{"about": null}',
        json.dumps({"about": ABOUT, "times": None}),
        json.dumps({"about": ABOUT, "times": {KIND.name: {"host_loop": 1}}}),
        json.dumps({"about": ABOUT | {"torch": "2.0"}, "times": {}}),
        b"\xff\xfe\x00",
    ],
)
def test_a_file_that_is_broken_or_foreign_is_measured_anew(machine, content):
    machine.path.parent.mkdir(parents=True)
    machine.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    times, _ = machine.find()
    assert len(machine.benches) == 1
    kept = json.loads(machine.path.read_text())
    assert kept["about"] == ABOUT
    assert Times.from_json(kept["times"][KIND.name]) == times


def test_another_version_has_another_file():
    assert calibrate.cache_file(ABOUT) != calibrate.cache_file(ABOUT | {"torch": "1.1"})
    assert calibrate.cache_file(ABOUT).name.startswith("times-made-up-gpu-")


def test_a_times_file_of_another_device_is_not_believed(machine):
    machine.find()
    content = json.loads(machine.path.read_text())
    assert calibrate.read(machine.path, content["about"])
    assert not calibrate.read(machine.path, content["about"] | {"device": "Another"})


def test_a_folder_that_cannot_be_written(machine, monkeypatch):
    def refuse(**_):
        raise PermissionError("read-only")

    monkeypatch.setattr(calibrate.tempfile, "mkstemp", refuse)
    times, source = machine.find()
    assert source == "measured on this device"
    assert machine.find()[0] is times
    assert not machine.path.exists()


def test_somebody_without_a_home(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setattr(calibrate.os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert calibrate.cache_file(ABOUT) is None
    assert machine.find()[1] == "measured on this device"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(machine, caplog):
    caplog.set_level(logging.INFO, logger="deeppcr")
    machine.path.parent.write_text("a file stands where the folder should be")
    times, source = machine.find()
    assert source == "measured on this device"
    assert machine.find()[0] is times
    assert "could not be kept" in caplog.text


def test_a_disk_that_is_full_leaves_nothing_behind(machine, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(calibrate.os, "replace", full)
    assert machine.find()[1] == "measured on this device"
    assert list(machine.path.parent.iterdir()) == []


def test_what_is_kept_is_read_where_nothing_is_to_be_measured(machine, monkeypatch):
    monkeypatch.setenv("DEEPPCR_CALIBRATE", "read")
    assert "built-in" in machine.find()[1]
    assert not machine.benches
    monkeypatch.delenv("DEEPPCR_CALIBRATE")
    times, _ = machine.find()
    machine.forget()
    monkeypatch.setenv("DEEPPCR_CALIBRATE", "READ")
    assert machine.find() == (times, "measured on this device")
    assert len(machine.benches) == 1


@pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
def test_switched_off(machine, monkeypatch, value):
    machine.find()
    machine.forget()
    monkeypatch.setenv("DEEPPCR_CALIBRATE", value)
    times, source = machine.find()
    assert "built-in" in source
    assert len(machine.benches) == 1
    full, _ = calibrate.built_in(torch.device("cpu"), KIND)
    assert times.step_of(4) == pytest.approx(2 * full.step_of(4))  # half the clock rate of an H200


def refuse_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def refuse_compilation(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def refuse_chance(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize("refuse", [refuse_capture, refuse_compilation, refuse_chance])
def test_never_at_the_wrong_moment(machine, refuse):
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch)
        _, source = machine.find()
        assert "built-in" in source
        assert not machine.benches
    machine.find()
    assert len(machine.benches) == 1
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch)
        assert machine.find()[1] == "measured on this device"  # what is known may be used


def test_not_for_a_shallow_network(machine):
    assert "built-in" in machine.find(layers=10)[1]
    assert not machine.benches
    assert not machine.path.exists()


def test_a_measurement_that_fails_fails_nothing_else(machine, monkeypatch, caplog):
    tries = []

    def broken(*_):
        tries.append(1)
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(calibrate, "Kernels", broken)
    for _ in range(3):
        assert "built-in" in machine.find()[1]
    assert len(tries) == 1
    assert "too large" in caplog.text


def test_what_is_read_is_what_was_written(tmp_path):
    times = calibrate.measure(MadeUp(), KIND, 16)
    path = tmp_path / "a" / "times.json"
    calibrate.write(path, ABOUT, KIND, times)
    assert calibrate.read(path, ABOUT) == {KIND.name: times}
    assert Times.from_json(asdict(times)) == times


def test_nothing_is_kept_of_a_busy_device(machine, monkeypatch):
    """The same loop takes longer at the end of the measurement than at its beginning."""
    loop, asked = MadeUp.loop, []

    def slower_and_slower(self, blocks, rows):
        asked.append(1)
        return loop(self, blocks, rows) * (1 + 0.1 * len(asked))

    monkeypatch.setattr(MadeUp, "loop", slower_and_slower)
    assert "built-in" in machine.find()[1]
    assert not machine.path.exists()


@pytest.mark.parametrize(("factor", "busy"), [(1.25, False), (1.35, True)])
def test_the_end_of_the_measurement_is_looked_at(machine, monkeypatch, factor, busy):
    """After what takes the host's time, too."""
    loop, host, done = MadeUp.loop, MadeUp.host, []

    def then_busy(self):
        done.append(self)
        return host(self)

    monkeypatch.setattr(MadeUp, "host", then_busy)
    monkeypatch.setattr(MadeUp, "loop", lambda self, *sizes: loop(self, *sizes) * (factor if done else 1))
    assert ("built-in" in machine.find()[1]) == busy


def test_nor_of_one_that_was_busy_in_between(machine, monkeypatch):
    loop, asked = MadeUp.loop, []

    def slow_for_a_while(self, blocks, rows):
        asked.append(blocks)
        return loop(self, blocks, rows) * (2 if asked.count(64) == 5 else 1)

    monkeypatch.setattr(MadeUp, "loop", slow_for_a_while)
    assert "built-in" in machine.find()[1]
    assert asked.count(64) > 6  # and as fast as at first in the end


def test_a_call_takes_as_long_as_on_a_machine_with_nothing_else_to_do(monkeypatch):
    """Two of three calls are held up by something else; one of ten is quick as no other is."""
    clock = SimpleNamespace(now=0.0, calls=0)

    def run():
        clock.calls += 1
        clock.now += 1e-4 if clock.calls % 10 == 0 else 1e-3 if clock.calls % 3 == 0 else 5e-3

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert calibrate.seconds_of_call(run) == pytest.approx(1e-3)
