"""One sequence over many ranks: what ranks say to each other, and tensors cut up along the steps.

The engine is ``torch.distributed``: a rank is a process of a process group, told by a one-dimensional ``DeviceMesh``.
"""

from .ranks import RankError, Ranks
from .shard import gather, shard

__all__ = ["RankError", "Ranks", "gather", "shard"]
