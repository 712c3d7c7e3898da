"""The kernels of ``FusedIteration``.

Shapes: L steps, B samples, D the flattened sample (``WIDTH``), N rows of one call of the network. One slot, float32,
nothing clipped.

In PyTorch an iteration is some eighty small operations, and on a GPU every one of them costs its launch. Here there
are four kernels of programs that each hold a few steps of one sample, a fifth of one program a sample, and the scan:

    gather      rows of the network from states; a sample's rows follow each other, so a pair finds its row by itself
    (network)
    judge       what the steps make of the outputs; residuals; how much further than their inputs steps have moved
    (scan)      updates
    compare     with the last two updates: five inner products a pair
    move        sums of these over the steps before, the extrapolated states, and which steps are done
    count       the steps that are done from the first on; whether a sample must go back

Sums over steps are taken by every program by itself, in a fixed order: nothing depends on timing.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

#: sizes that a kernel is not compiled for anew
_SIZES = ["count", "length", "samples", "size"]


@triton.jit
def _size(values):
    """Magnitudes; of what is not a number, infinity."""
    magnitude = tl.abs(values)
    return tl.where(magnitude < float("inf"), magnitude, float("inf"))


@triton.jit
def _largest(before, values):
    return tl.maximum(before, tl.max(_size(values), 1))


@triton.jit
def _pairs(length, samples, STEPS: tl.constexpr):
    """The sample of this program, its steps, and which of these there are."""
    step = tl.program_id(0) // samples * STEPS + tl.arange(0, STEPS)
    return tl.program_id(0) % samples, step, step < length


@triton.jit
def _columns(at, exists, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = at + tl.arange(0, COLUMNS)[None, :]
    return column, exists[:, None] & (column < WIDTH)


@triton.jit(do_not_specialize=_SIZES)
def gather(
    states, scale, times, counters, inputs, row_times, row_samples, offsets, count, length, samples, size,
    SCALED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """A few rows. Those beyond the last pair are of the state after all steps, of the first sample."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sample, begin, total = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), 0
    for at in range(0, samples, SAMPLES):
        each = at + tl.arange(0, SAMPLES)
        exists = each < samples
        rest = length - tl.load(counters + each, mask=exists, other=0).to(tl.int32)
        rows = tl.where(exists, tl.minimum(rest, size), 0)
        ends = total + tl.cumsum(rows, 0)
        passed = (row[:, None] >= ends[None, :]) & exists[None, :]
        sample += tl.sum(passed.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends[None, :], 0), 1))
        total += tl.sum(rows, 0)
        tl.store(offsets + each, (ends - rows).to(tl.int64), mask=exists)  # by all programs the same
    real = row < total
    first = tl.load(counters + sample, mask=real, other=0).to(tl.int32)
    step = tl.where(real, first + row - begin, length)
    sample = tl.where(real, sample, 0)

    exists = row < count
    tl.store(row_times + row, tl.load(times + step, mask=exists), mask=exists)
    tl.store(row_samples + row, sample.to(tl.int64), mask=exists)
    source = (step.to(tl.int64) * samples + sample)[:, None] * WIDTH
    target = row.to(tl.int64)[:, None] * WIDTH
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, exists, WIDTH, COLUMNS)
        values = tl.load(states + source + column, mask=mask)
        if SCALED:
            values *= tl.load(scale + step, mask=exists)[:, None]
        tl.store(inputs + target + column, values, mask=mask)


@triton.jit
def _stepped(states, outputs, shift, before, row, pair, column, keep, gain, mask, SHIFTED: tl.constexpr):
    """What steps make of states and outputs."""
    value = keep * tl.load(states + before + column, mask=mask, other=0)
    if SHIFTED:
        value += tl.load(shift + pair + column, mask=mask, other=0)
    return value + gain * tl.load(outputs + row + column, mask=mask, other=0)


@triton.jit(do_not_specialize=_SIZES)
def judge(
    states, outputs, shift, keeps, gains, counters, offsets, values, residuals, used, measured, moved, growth, noise,
    length, samples, size,
    SHIFTED: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Values of the steps that were evaluated and are finite, else the states; how they differ from these.

    And from the values before: see ``Iteration._watch``.
    """
    sample, step, exists = _pairs(length, samples, STEPS)
    age = step - tl.load(counters + sample).to(tl.int32)
    active = exists & (age >= 0) & (age < size)
    pair = step.to(tl.int64) * samples + sample
    place = pair[:, None] * WIDTH  # of states: that before the step, since the initial one is the first
    after = place + tl.cast(samples, tl.int64) * WIDTH
    row = (tl.load(offsets + sample) + age)[:, None] * WIDTH
    keep, gain = tl.load(keeps + step, mask=exists)[:, None], tl.load(gains + step, mask=exists)[:, None]

    largest = tl.zeros([STEPS], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, active, WIDTH, COLUMNS)
        value = _stepped(states, outputs, shift, place, row, place, column, keep, gain, mask, SHIFTED)
        largest = _largest(largest, tl.where(mask, value, 0))
    use = active & (largest < float("inf"))
    # From an exact state that is the loop's own fate. Only one pair of a sample is the first.
    tl.store(counters + samples + sample + 0 * step, 1, mask=exists & (age == 0) & (use == 0))

    largest, change, reach = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, exists, WIDTH, COLUMNS)
        state = tl.load(states + after + column, mask=mask, other=0)
        before = tl.load(values + place + column, mask=mask, other=0)
        value = _stepped(
            states, outputs, shift, place, row, place, column, keep, gain, mask & active[:, None], SHIFTED
        )  # fmt: skip
        value = tl.where(use[:, None], value, state)
        residual = value - state
        change += tl.sum(tl.where(mask, (value - before) * (value - before), 0), 1)
        reach += tl.sum(tl.where(mask, value * value, 0), 1)
        # Of tiles that are smaller than the program, several threads hold the same numbers: all of them have read first.
        tl.debug_barrier()
        tl.store(values + place + column, value, mask=mask)
        tl.store(residuals + place + column, residual, mask=mask)
        largest = _largest(largest, tl.where(mask, residual, 0))
    tl.store(measured + pair, tl.where(age == 0, 0, largest), mask=use)
    again = use & (tl.load(used + pair, mask=exists, other=0) != 0)
    move, grown = tl.load(moved + pair, mask=exists, other=0), tl.load(growth + pair, mask=exists, other=1)
    change = tl.sqrt(change)
    ratio = change / move
    known = again & (change > noise * tl.sqrt(reach)) & (ratio < float("inf"))
    tl.debug_barrier()
    tl.store(growth + pair, tl.maximum(ratio, tl.sqrt(ratio) * tl.sqrt(grown)), mask=known)
    tl.store(used + pair, use.to(tl.int8) + again.to(tl.int8), mask=exists)


@triton.jit(do_not_specialize=_SIZES)
def compare(
    updates, last_updates, last_sizes, used, products, length, samples, size,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last two changes of updates, times each other, themselves and this update; see ``Iteration``."""
    sample, step, exists = _pairs(length, samples, STEPS)
    pair = step.to(tl.int64) * samples + sample
    at_step = sample.to(tl.int64) * length + step
    pairs = tl.cast(samples, tl.int64) * length
    known = tl.load(used + pair, mask=exists, other=0) != 0
    known = known & (tl.load(last_sizes + pair, mask=exists, other=0) > 0)
    known_before = known & (tl.load(last_sizes + pairs + pair, mask=exists, other=0) > 0)
    place = pair[:, None] * WIDTH
    one, both, two = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    along_one, along_two = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, known, WIDTH, COLUMNS)
        _, mask_before = _columns(at, known_before, WIDTH, COLUMNS)
        update = tl.load(updates + place + column, mask=mask, other=0)
        last = tl.load(last_updates + place + column, mask=mask, other=0)
        before = tl.load(last_updates + pairs * WIDTH + place + column, mask=mask_before, other=0)
        change, change_before = update - last, tl.where(mask_before, last - before, 0)
        one += tl.sum(change * change, 1)
        both += tl.sum(change * change_before, 1)
        two += tl.sum(change_before * change_before, 1)
        along_one += tl.sum(change * update, 1)
        along_two += tl.sum(change_before * update, 1)
    tl.store(products + at_step, one, mask=exists)
    tl.store(products + pairs + at_step, both, mask=exists)
    tl.store(products + 2 * pairs + at_step, two, mask=exists)
    tl.store(products + 3 * pairs + at_step, along_one, mask=exists)
    tl.store(products + 4 * pairs + at_step, along_two, mask=exists)


@triton.jit
def _summed(products, step, begin, first, last, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums up to each step of those from ``begin`` on; all before ``first`` are 0, and all from ``last`` on."""
    before = tl.zeros([BLOCK], tl.float32)
    for at in range(first, tl.minimum(begin, last), BLOCK):
        earlier = at + tl.arange(0, BLOCK)
        before += tl.load(products + earlier, mask=earlier < tl.minimum(begin, last), other=0)
    return tl.sum(before, 0) + tl.cumsum(tl.load(products + step, mask=step < last, other=0), 0)


@triton.jit
def _least_squares(one, both, two, along_one, along_two, ridge):
    """See ``iteration._least_squares``."""
    one, two = tl.sqrt(tl.maximum(one, 1.1754943508222875e-38)), tl.sqrt(tl.maximum(two, 1.1754943508222875e-38))
    cosine = both / (one * two)
    along_one, along_two = along_one / one, along_two / two
    diagonal = 1 + ridge
    determinant = diagonal * diagonal - cosine * cosine
    weight = (diagonal * along_one - cosine * along_two) / (determinant * one)
    return weight, (diagonal * along_two - cosine * along_one) / (determinant * two)


@triton.jit
def _target(state, update, last, before, known, known_before, weight, weight_before, ACCELERATE: tl.constexpr):
    """The plain state after the update, and the extrapolated one; ``last`` and ``before``: the plain states before."""
    plain = state + update
    target = plain
    if ACCELERATE:
        target = plain - weight[:, None] * tl.where(known[:, None], plain - last, 0)
        target = target - weight_before[:, None] * tl.where(known_before[:, None], last - before, 0)
    return plain, target


@triton.jit(do_not_specialize=_SIZES)
def move(
    states, values, updates, last_updates, last_plains, last_sizes, used, products, counters, verdict,
    moved, excesses, thresholds, allowance, floor, ridge, length, samples, size,
    ACCELERATE: tl.constexpr, LEAVE: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The new states. The verdict is not positive where a step is done; without ``LEAVE`` it is the size of its update."""
    sample, step, exists = _pairs(length, samples, STEPS)
    prefix = tl.load(counters + sample).to(tl.int32)
    age = step - prefix
    first = age == 0
    pair = step.to(tl.int64) * samples + sample
    pairs = tl.cast(samples, tl.int64) * length
    at_sample = sample.to(tl.int64) * length
    times = tl.load(used + pair, mask=exists, other=0)
    use = times != 0
    place = pair[:, None] * WIDTH
    place_before = place + pairs * WIDTH
    after = place + tl.cast(samples, tl.int64) * WIDTH
    known, known_before = use, use
    weight, weight_before = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    last_size = weight
    if ACCELERATE:
        last_size = tl.load(last_sizes + pair, mask=exists, other=0)
        known = use & (last_size > 0)
        known_before = known & (tl.load(last_sizes + pairs + pair, mask=exists, other=0) > 0)
        begin, end = tl.program_id(0) // samples * STEPS, tl.minimum(prefix + size, length)
        products += at_sample
        weight, weight_before = _least_squares(
            _summed(products, step, begin, prefix, end, STEPS, BLOCK),
            _summed(products + pairs, step, begin, prefix, end, STEPS, BLOCK),
            _summed(products + 2 * pairs, step, begin, prefix, end, STEPS, BLOCK),
            _summed(products + 3 * pairs, step, begin, prefix, end, STEPS, BLOCK),
            _summed(products + 4 * pairs, step, begin, prefix, end, STEPS, BLOCK),
            ridge,
        )

    plain_size, largest = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, exists, WIDTH, COLUMNS)
        state = tl.load(states + after + column, mask=mask, other=0)
        update = tl.load(updates + place + column, mask=mask, other=0)
        plain_size = _largest(plain_size, update)
        if ACCELERATE:
            last = tl.load(last_plains + place + column, mask=mask, other=0)
            before = tl.load(last_plains + place_before + column, mask=mask, other=0)
            plain, target = _target(
                state, update, last, before, known, known_before, weight, weight_before, ACCELERATE
            )  # fmt: skip
            largest = _largest(largest, tl.where(mask, target - state, 0))
    largest = tl.maximum(plain_size, largest)

    taken = (largest < float("inf")) & (first == 0)
    height, distance = tl.zeros([STEPS], tl.float32), tl.zeros([STEPS], tl.float32)
    for at in range(0, WIDTH, COLUMNS):
        column, mask = _columns(at, exists, WIDTH, COLUMNS)
        state = tl.load(states + after + column, mask=mask, other=0)
        update = tl.load(updates + place + column, mask=mask, other=0)
        last, before, last_update = state, state, update
        if ACCELERATE:
            last = tl.load(last_plains + place + column, mask=mask, other=0)
            before = tl.load(last_plains + place_before + column, mask=mask, other=0)
            last_update = tl.load(last_updates + place + column, mask=mask, other=0)
        plain, target = _target(
            state, update, last, before, known, known_before, weight, weight_before, ACCELERATE
        )  # fmt: skip
        target = tl.where(taken[:, None], target, tl.load(values + place + column, mask=mask, other=0))
        distance += tl.sum(tl.where(mask, (target - state) * (target - state), 0), 1)
        state = target
        tl.debug_barrier()  # as in _judge
        tl.store(states + after + column, state, mask=mask)
        height = _largest(height, tl.where(mask, state, 0))
        if ACCELERATE:
            tl.store(last_updates + place_before + column, last_update, mask=mask)
            tl.store(last_updates + place + column, update, mask=mask)
            tl.store(last_plains + place_before + column, last, mask=mask)
            tl.store(last_plains + place + column, plain, mask=mask)
    if ACCELERATE:
        tl.store(last_sizes + pairs + pair, last_size, mask=exists)
        tl.store(last_sizes + pair, tl.where(plain_size < float("inf"), plain_size, 0), mask=exists)
    tl.store(moved + samples + pair, tl.sqrt(distance), mask=exists)
    if LEAVE:
        allowed = tl.load(thresholds + pair, mask=exists & (times > 1), other=0) + tl.load(allowance + sample) * height
        small = (largest < float("inf")) & (largest <= allowed)
        tl.store(excesses + pair, tl.where(small & (first == 0), largest - floor * height, 0), mask=use)
        done = ((small | first) & use) | (age < 0)
        # Negative: it is done, but has moved too far for the step behind it to be, too.
        found = tl.where(done, tl.where(small | (first == 0), 0.0, -1.0), 1.0)
        tl.store(verdict + at_sample + step, found, mask=exists)
    else:
        tl.store(verdict + at_sample + step, largest, mask=exists)


@triton.jit
def _grown(growth, sample, at, before, length, samples, BLOCK: tl.constexpr):
    """A block of pairs of a sample, from step ``length - 1 - at`` backwards, which of them there are, and the logarithm of
    the growth after each; ``before``: that of the block before."""
    back = at + tl.arange(0, BLOCK)
    pair = (length - 1 - back).to(tl.int64) * samples + sample
    exists = back < length
    later = tl.log(tl.load(growth + pair + samples, mask=exists & (back > 0), other=1))
    return back, pair, exists, before + tl.cumsum(later, 0), before + tl.sum(later, 0)


@triton.jit(do_not_specialize=_SIZES)
def count(
    verdict, counters, growth, excesses, thresholds, allowance, floor, bound, strict, settled,
    length, samples, size, LEAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sample's counters, and the window it has next; without ``LEAVE`` how many steps of it are not settled.

    A sample that has finished goes back where a step left too early: see ``Iteration._go_back``.
    """
    sample = tl.program_id(0)
    prefix = tl.load(counters + sample).to(tl.int32)
    end = tl.minimum(prefix + size, length)
    left, large = tl.zeros([BLOCK], tl.int32) + end, tl.zeros([BLOCK], tl.int32)
    for at in range(prefix, end, BLOCK):
        step = at + tl.arange(0, BLOCK)
        found = tl.load(verdict + (sample.to(tl.int64) * length + step), mask=step < end, other=0)
        left = tl.minimum(left, tl.where(found > 0, step, end))
        large += (found >= settled).to(tl.int32)  # what is no number is infinite here
    if LEAVE:
        now = tl.min(left, 0)
        jumped = tl.load(verdict + (sample.to(tl.int64) * length + prefix), mask=prefix < length, other=0) < 0
        now = tl.minimum(now, tl.where(jumped, prefix + 1, length))
        if (now == length) & (prefix < length):
            after = 0.0
            for at in range(0, length, BLOCK):
                back, pair, exists, grown, after = _grown(growth, sample, at, after, length, samples, BLOCK)
                early = tl.load(excesses + pair, mask=exists, other=0) * tl.exp(grown) > bound
                now = tl.minimum(now, tl.min(tl.where(early, length - 1 - back, length), 0))
            if now < length:
                tl.store(allowance + sample, floor)
                after = 0.0
                for at in range(0, length, BLOCK):
                    back, pair, exists, grown, after = _grown(growth, sample, at, after, length, samples, BLOCK)
                    threshold = tl.load(thresholds + pair, mask=exists, other=0)
                    tl.store(thresholds + pair, tl.minimum(threshold, strict / tl.exp(grown)), mask=exists)
        tl.store(counters + sample, now)
    else:
        tl.store(counters + 2 * samples + sample, tl.sum(large, 0))
    iterations, evaluations = counters + 5 * samples + sample, counters + 6 * samples + sample
    tl.store(iterations, tl.load(iterations) + tl.where(prefix < length, 1, 0))
    tl.store(evaluations, tl.load(evaluations) + (end - prefix))
