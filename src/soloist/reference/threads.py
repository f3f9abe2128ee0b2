"""How many threads multiply: as many as there are cores that others leave free.

Threads of OpenMP wait for each other after every product. Where another process has the core of
one of them, all others wait for it, and spin while they wait: docs/cpu.md tells what that costs.
"""

import torch

from soloist.device import CoreWatch

# A core counts as taken where others use more of it than this.
_TAKEN_SHARE = 0.4

# Libraries cut rows between threads, and a thread with fewer than these takes another kernel, whose
# bits differ. A single row is not cut.
_LEAST_ROWS = 8


class Threads:
    """Chooses the number of threads before every pass; no bit depends on it.

    Args:
        most: on a machine that does nothing else.
        watch: tells what others do.
    """

    def __init__(self, most: int, watch: CoreWatch | None = None) -> None:
        self.most = most
        self._watch = CoreWatch() if watch is None else watch

    @property
    def num_free(self) -> int:
        """Threads that have a core to themselves, at least one."""
        if self.most == 1:
            return 1
        free = self._watch.num_cores - self._watch.others()
        return max(1, min(self.most, int(free + _TAKEN_SHARE)))

    def use(self, num_tokens: int, num_threads: int) -> None:
        """Let the calling thread's next pass, of so many tokens, run on so many threads."""
        if self.most == 1:
            return
        most = num_threads if num_tokens == 1 else max(1, num_tokens // _LEAST_ROWS)
        wanted = min(num_threads, most)
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
