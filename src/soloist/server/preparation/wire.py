"""What travels between the server and its preparation processes."""

import socket
import struct

# Before a request: its bytes and the number of its kind. Before anything else: its bytes.
REQUEST, LENGTH = struct.Struct("<QB"), struct.Struct("<Q")

# To the fork server: what to do, and the number of the child. A child's socket travels with FORK.
COMMAND = struct.Struct("<cQ")
FORK, KILL = b"f", b"k"

# From the fork server, once everything is loaded.
READY = b"ready"


def receive(connection: socket.socket, count: int) -> bytearray | None:
    """So many bytes; None where the other side has gone. Blocks."""
    held = bytearray(count)
    view, at = memoryview(held), 0
    while at < count:
        if not (got := connection.recv_into(view[at:])):
            return None
        at += got
    return held


def receive_message(connection: socket.socket) -> bytearray | None:
    """What follows a `LENGTH`; None where the other side has gone. Blocks."""
    if (head := receive(connection, LENGTH.size)) is None:
        return None
    (length,) = LENGTH.unpack(head)
    return receive(connection, length)


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message behind its `LENGTH`. Blocks."""
    connection.sendall(LENGTH.pack(len(message)))
    connection.sendall(message)
