"""Values that are not finite: which samples they cost, what is said of them, and what becomes of gradients."""

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, Noise, Schedule, Window, sample

SCHEDULE = Schedule.linear(40)


def poisoned(z, t, classes):
    """Sample by sample: NaN from t = 25 on where the class is 1."""
    bad = (classes == 1) & (t <= 25)
    return torch.where(bad[:, None], float("nan"), 0.9 * z + 0.1 * torch.sin(z))


def draw(samples):
    return Noise.draw((samples, 4), 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [7, 40])
def test_one_sample_that_is_not_finite_leaves_the_others_alone(size):
    rows = []

    def watched(z, t, classes):
        rows.append(classes.clone())
        return poisoned(z, t, classes)

    noise, classes = draw(3), torch.tensor([0, 1, 0])
    kept = [0, 2]
    others = Noise(noise.initial[kept], noise.steps[:, kept])
    with torch.no_grad():
        alone = sample(poisoned, SCHEDULE, others, classes=classes[kept], solver=Window(size=size))
        with pytest.warns(deeppcr.ConvergenceWarning, match=r"not finite at step 15 \(t = 25\); sample 1; 1 of 3"):
            found = sample(watched, SCHEDULE, noise, classes=classes, solver=Window(size=size))
    assert found.results == (Result.CONVERGED, Result.NON_FINITE, Result.CONVERGED)
    assert found.exact_steps.tolist() == [40, 14, 40]
    assert torch.equal(found.iterations[kept], alone.iterations)  # as if it had not been there
    assert torch.equal(found.evaluations[kept], alone.evaluations)
    assert (found.final[kept] - alone.final).abs().max() <= 1e-8
    assert not found.final[1].isfinite().any()
    last = 1 + 18 + int(found.iterations.max())  # with the checks of the rows
    assert (rows[last - 1] == 0).all()  # it is not evaluated to the end
    assert all((each == 1).all() for each in rows[last:])  # and nothing but it goes to the loop


def test_all_samples_may_be_lost_at_once():
    with torch.no_grad(), pytest.warns(deeppcr.ConvergenceWarning, match=r"not finite at step 15 .*2 of 2 samples"):
        found = sample(poisoned, SCHEDULE, draw(2), classes=torch.ones(2, dtype=torch.long))
    assert found.results == (Result.NON_FINITE, Result.NON_FINITE)
    assert found.exact_steps.tolist() == [14, 14]


@pytest.mark.parametrize("solver", [Window(), deeppcr.Newton(), deeppcr.Loop()], ids=lambda s: type(s).__name__)
def test_with_gradients_on_a_network_of_nan_is_called_by_its_name(solver):
    weight = torch.tensor(float("nan"), dtype=torch.float64, requires_grad=True)
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        found = sample(lambda z, t: weight * z, SCHEDULE, draw(2), solver=solver)
    assert found.result is Result.NON_FINITE


def test_gradients_of_the_other_samples_are_those_of_the_loop():
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    noise, classes = draw(3), torch.tensor([0, 1, 0])
    leaf = noise.initial.clone().requires_grad_()

    def gradients(solver, rows, initial, steps):
        noise = Noise(initial, steps)
        found = sample(
            lambda z, t, c: weight * poisoned(z, t, c), SCHEDULE, noise, classes=classes[rows], solver=solver
        )
        return found, found.final[: len(rows)]

    with pytest.warns(deeppcr.ConvergenceWarning, match="sample 1"):
        found, final = gradients(Window(), [0, 1, 2], leaf, noise.steps)
    _, expected = gradients(deeppcr.Loop(), [0, 2], leaf[[0, 2]], noise.steps[:, [0, 2]])
    wanted = (weight, leaf)
    got = torch.autograd.grad(final[[0, 2]].square().sum(), wanted, retain_graph=True)
    for one, other in zip(got, torch.autograd.grad(expected.square().sum(), wanted), strict=True):
        assert (one - other).abs().max() <= 1e-7 * (1 + other.abs().max())
    with pytest.raises(RuntimeError, match=r"no gradient: .* not finite at step 15"):
        found.final.sum().backward()


def test_frozen_networks_give_results_without_a_graph_however_they_end():
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        found = sample(poisoned, SCHEDULE, draw(2), classes=torch.tensor([0, 1]))
    assert not found.final.requires_grad


def test_what_was_returned_unfinished_has_gradients_where_it_is_finished():
    """One sample starts from its solution and is finished at once; the other is not given the time."""
    leaf = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    given = (lambda z, t: torch.sin(z), SCHEDULE)
    start = sample(*given, leaf.detach(), step=DDIM(), solver=deeppcr.Loop(), keep_states=True).states
    start[:, 1] = 0
    with pytest.warns(deeppcr.ConvergenceWarning, match="sample 1; 1 of 2"):
        found = sample(
            *given, leaf, step=DDIM(), start=start, solver=Window(max_iterations=2, size=40), on_failure="return"
        )
    assert found.results == (Result.CONVERGED, Result.NOT_CONVERGED)
    loop = sample(*given, leaf, step=DDIM(), solver=deeppcr.Loop())
    got, expected = (torch.autograd.grad(each.final[0].sum(), leaf, retain_graph=True)[0] for each in (found, loop))
    assert torch.allclose(got, expected, atol=1e-7)
    with pytest.raises(RuntimeError, match="did not converge"):
        torch.autograd.grad(found.final[1].sum() + leaf.sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="did not converge"):
        found.final[1].sum().backward()
