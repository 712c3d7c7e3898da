"""One sequence over many ranks: what ranks say to each other, and tensors cut up along the steps.

The engine is ``torch.distributed``: a rank is a process of a process group, told by a one-dimensional ``DeviceMesh``.
"""

from .cut import gather, shard
from .ranks import RankError

__all__ = ["RankError", "gather", "shard"]
