"""The sliding window: a quasi-Newton iteration on the steps of a sampler that are not finished yet."""
