"""The ways to solve a loop, each by itself: one step after the other, by Newton, by kernels; and what is remembered of them."""
