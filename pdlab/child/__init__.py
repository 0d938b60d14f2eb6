"""Processes that do a part of the work, and how to talk with them: fresh interpreters of this
machine, ranks of a torch.distributed job, actors of Ray."""

from pdlab.child.process import CLOSE_S, Child, be_child
from pdlab.child.socket_channel import SocketChannel

__all__ = ["CLOSE_S", "Child", "SocketChannel", "be_child"]
