"""The process that reads requests: it loads a model's text side once and forks children of itself.

A fork costs milliseconds and shares all that was loaded. This process has one thread, never reads a
request, and ends its children when the server goes away, however that happens. Run as
`python -m soloist.server.preparation.fork_server FD`, where FD is a socket to the server.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from soloist.server.preparation.child import serve
from soloist.server.preparation.wire import COMMAND, FORK, READY, receive_message
from soloist.text.processor import Processor, ProcessorFiles

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Children:
    """Process ids by the numbers that the server gave."""

    pids: dict[int, int] = field(default_factory=dict)

    def reap(self, *_: object) -> None:
        """Forget those that have ended; called when one does."""
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for number in [n for n, known in self.pids.items() if known == pid]:
                del self.pids[number]

    def end(self) -> None:
        """End all of them, and wait for it: there may be nobody else to do so."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def kill(self, number: int) -> None:
        """End one that may have ended already. Nobody else has its process id: it is not reaped."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := self.pids.get(number)) is not None:
            os.kill(pid, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def main(control: socket.socket) -> None:
    """Serve the server until it goes away."""
    told = receive_message(control)
    if told is None:
        return
    files, names = pickle.loads(told)  # noqa: S301 - from the process that started this one
    assert isinstance(files, ProcessorFiles), "the server sends them first"
    processor = loaded(files)
    control.sendall(READY)
    children = _Children()
    signal.signal(signal.SIGCHLD, children.reap)
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            if len(data) < COMMAND.size:
                return
            command, number = COMMAND.unpack(data)
            if command != FORK:
                children.kill(number)
                continue
            (fd,) = fds
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if not pid:
                _become_child(control, fd, processor, names)
            children.pids[number] = pid
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.close(fd)
    finally:
        children.end()


def loaded(files: ProcessorFiles) -> Processor:
    """A processor with all that is made on first use: children would make it again and again."""
    processor = Processor(files)
    processor.tokenizer.encode("a")
    processor.tokenizer.least_tokens("a")
    with suppress(Exception):  # a model without a template is told so by each request
        processor.chat_template  # noqa: B018
    with suppress(Exception):
        processor.grammars.compile('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')
    return processor


def _become_child(
    control: socket.socket, fd: int, processor: Processor, names: tuple[str, ...]
) -> None:
    """Read requests until the server goes away; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        control.close()
        _die_with_fork_server()
        serve(socket.socket(fileno=fd), processor, names)
        status = 0
    finally:
        os._exit(status)


def _die_with_fork_server() -> None:
    """A child that loops does not see its socket close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    # Ctrl-C reaches the whole group; the server says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(socket.socket(fileno=int(sys.argv[1])))
