"""The experiments of the paper and the demo: one module a figure or table."""
