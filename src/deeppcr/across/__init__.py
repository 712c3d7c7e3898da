"""A nonlinear loop over ranks: Newton's iteration and its gradients, each rank with its own part of the steps."""
