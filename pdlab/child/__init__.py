"""Processes that are started for a part of the work, and how to talk with them."""

from pdlab.child.process import CLOSE_S, Child, be_child
from pdlab.child.socket_channel import SocketChannel

__all__ = ["CLOSE_S", "Child", "SocketChannel", "be_child"]
