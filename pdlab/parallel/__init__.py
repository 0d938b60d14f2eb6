"""One model on several ranks: tensor and pipeline parallel, behind one engine's runner."""

from pdlab.parallel.group import RankLost
from pdlab.parallel.runner import ParallelRunner, sharded_memory

__all__ = ["ParallelRunner", "RankLost", "sharded_memory"]
