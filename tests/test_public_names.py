"""The names that users import. A change here is a change for them: say so in CHANGELOG.md."""

import pytest

import deeppcr

NAMES = {
    "deeppcr": """
        PCR Auto BatchMean ConvergenceError ConvergenceWarning DenseJacobian DiagonalJacobian Finding FixedIterations
        ForwardSubstitution Fused GivenJacobian Hierarchical HutchinsonJacobian Implicit Jacobi Loop Newton PaperTest Picard Plan
        Prediction Random RepeatInitial Result ScalarJacobian Solution StepError Unrolled UpdateTest Zeros check clear_caches collapse
        diffusion distributed fuse linear nn predict rowwise scan solve with_history
    """,
    "deeppcr.linear": """
        PCR Auto BlockDiagonal Blocks Dense Diagonal ForwardSubstitution Fused Hierarchical LinearSolver Scalar lfilter solve solve_coupled
    """,
    "deeppcr.distributed": "RankError gather shard",
    "deeppcr.fuse": "source",
    "deeppcr.nn": "DiagonalGRU DiagonalLSTM GRU LSTM MLP RNN ResNet Sequential convert revert",
    "deeppcr.diffusion": """
        DDIM DDPM Clip CoarseStart DiagonalPart GaussianPrior GaussianStart MeanStart Noise ParallelLoop PipelineSample Samples
        Schedule Steps UnsupportedScheduler Window parallel_sample parallelize read_scheduler sample
    """,
}


@pytest.mark.parametrize("package", NAMES)
def test_names_are_those_that_users_know(package):
    module = deeppcr if package == "deeppcr" else getattr(deeppcr, package.rpartition(".")[2])
    assert sorted(module.__all__) == sorted(NAMES[package].split())
    assert all(getattr(module, name) is not None for name in module.__all__)
