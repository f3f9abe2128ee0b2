"""How many threads multiply: as many as there are cores that others leave free.

Threads of OpenMP wait for each other after every product. Where another process has the core of
one of them, all others wait for it, and spin while they wait: docs/cpu.md tells what that costs.
"""

from functools import cache

import torch

from soloist.device import CoreWatch

# A core counts as taken where others use more of it than this.
_TAKEN_SHARE = 0.4

# Libraries cut rows between threads, and a thread with fewer than these takes another kernel, whose
# bits differ. A single row is not cut.
_LEAST_ROWS = 8


class Threads:
    """Chooses the number of threads before every pass; no bit depends on it.

    Where a library's bits do (MKL's and oneDNN's on Xeons with AMX), there is one. Several
    passes can still be read side by side.

    Args:
        most: on a machine that does nothing else.
        watch: tells what others do.
    """

    def __init__(self, most: int, watch: CoreWatch | None = None) -> None:
        self.most = most
        self._watch = CoreWatch() if watch is None else watch
        self.may_vary = most == 1 or _same_bits(most)

    @property
    def num_free(self) -> int:
        """Threads that have a core to themselves, at least one."""
        if self.most == 1:
            return 1
        free = self._watch.num_cores - self._watch.others()
        return max(1, min(self.most, int(free + _TAKEN_SHARE)))

    def use(self, num_rows: int, num_threads: int) -> None:
        """Let the calling thread's next pass run on so many threads, if products have the rows."""
        if self.most == 1:
            return
        if not self.may_vary:
            num_threads = 1
        most = num_threads if num_rows == 1 else max(1, num_rows // _LEAST_ROWS)
        wanted = min(num_threads, most)
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


@cache
def _same_bits(most: int) -> bool:
    """Whether products have the bits of one thread on two threads and on `most`.

    The products are two that differed wherever any did: of one row, and of rows that AMX takes.
    """
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    try:
        for dtype, num_rows in ((torch.float32, 1), (torch.bfloat16, 40)):
            x = torch.randn(num_rows, 896, generator=generator).to(dtype)
            weight = torch.randn(896, 320, generator=generator).to(dtype)
            found = []
            for num_threads in (1, 2, most):
                torch.set_num_threads(num_threads)
                found.append(x @ weight)
            if not all(torch.equal(one, found[0]) for one in found):
                return False
    finally:
        torch.set_num_threads(before)
    return True
