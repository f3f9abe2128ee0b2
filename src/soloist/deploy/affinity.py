"""Which replica a request should go to. Pure: it is told of replicas, loads and ends of requests.

Three rules, in this order:

1. A free column goes before everything else: a replica that runs as many requests as it has columns
   gets no more while another one has a column free.
2. Replicas that run more requests than the least busy one, by more than a bound, are passed over:
   what a cached beginning saves is soon lost where many share the steps.
3. Among the others a session goes to its home, the replica that rendezvous hashing gives it (Thaler
   and Ravishankar, 1998): it moves only when that replica is gone or passed over, and all routers
   agree on it. A request without a session goes where the longest beginning of it was read, and
   where none was, to the least busy replica.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from soloist.deploy.prefix import Wish

# A beginning of fewer pieces is not worth a detour: less than a chunk of the prefix cache.
LEAST_PIECES = 2

# After that, a request that was to be sent was not: its client went away meanwhile. And one that is
# over will not be told of again.
_LOST_S = 10.0


@dataclass(slots=True)
class _Sent:
    replica: str
    at: float
    is_sure: bool = False


class Affinity:
    """Orders replicas for requests, and remembers which of them has read what.

    May be used from several threads.

    Args:
        columns: requests that a replica runs side by side.
        imbalance: how many requests more than the least busy replica one may run, for the sake of
            what it has cached.
        most_hashes: that are remembered; the least recently used ones are forgotten.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        columns: int,
        imbalance: int,
        most_hashes: int = 500_000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._columns, self._imbalance = columns, imbalance
        self._most_hashes, self._now = most_hashes, now
        self._sent: dict[str, _Sent] = {}
        # Requests that were over before `routed` told where they went, and since when.
        self._over: dict[str, float] = {}
        self._readers: OrderedDict[bytes, set[str]] = OrderedDict()
        self._lock = threading.Lock()

    def order(self, request_id: str, wish: Wish, reported: Mapping[str, int]) -> list[str]:
        """All replicas, the best first, which the request counts for from now on.

        Args:
            request_id: of the request; asked for again, it counts once.
            wish: what it would like.
            reported: the replicas there are, and how many requests each was last known to have.
        """
        with self._lock:
            self._sent.pop(request_id, None)
            self._over.pop(request_id, None)
            loads = self._loads(reported)
            if not loads:
                return []
            least = min(loads.values())
            has_free = least < self._columns

            def rank(replica: str) -> tuple[float, ...]:
                load = loads[replica]
                is_busy = has_free and load >= self._columns
                if is_busy or load > least + self._imbalance:
                    return (1 + is_busy, load, 0, 0)
                if wish.session is not None:
                    return (0, 0, 0, -weight(wish.session.encode(), replica))
                matched = matches[replica]
                return (0, -matched, load, -weight(novel, replica))

            matches = {} if wish.session is not None else self._matches(wish.hashes, loads)
            novel = wish.hashes[LEAST_PIECES - 1] if len(wish.hashes) >= LEAST_PIECES else b""
            ordered = sorted(loads, key=rank)
            self._sent[request_id] = _Sent(ordered[0], self._now())
            return ordered

    def routed(self, request_id: str, wish: Wish, replica: str) -> None:
        """The request went there, so its beginning will have been read there.

        Of a short one, whose answer came with the word that it was taken, the end is told first.
        """
        with self._lock:
            if self._over.pop(request_id, None) is None:
                self._sent[request_id] = _Sent(replica, self._now(), is_sure=True)
            # The first piece last: without it the others are of no use.
            for one in reversed(wish.hashes):
                self._readers.setdefault(one, set()).add(replica)
                self._readers.move_to_end(one)
            while len(self._readers) > self._most_hashes:
                self._readers.popitem(last=False)

    def ended(self, request_id: str) -> None:
        """The request is over, however it ended."""
        with self._lock:
            sent = self._sent.pop(request_id, None)
            if sent is None or not sent.is_sure:
                self._over[request_id] = self._now()

    def _loads(self, reported: Mapping[str, int]) -> dict[str, int]:
        """The larger one of what a replica told and what was sent to it from here."""
        lost = self._now() - _LOST_S
        for request_id in [i for i, s in self._sent.items() if not s.is_sure and s.at < lost]:
            del self._sent[request_id]
        for request_id in [i for i, at in self._over.items() if at < lost]:
            del self._over[request_id]
        own = Counter(sent.replica for sent in self._sent.values())
        return {replica: max(told, own[replica]) for replica, told in reported.items()}

    def _matches(self, hashes: tuple[bytes, ...], replicas: Mapping[str, int]) -> dict[str, int]:
        """How many pieces of a beginning each replica has read; 0 for too few."""
        matches, still = dict.fromkeys(replicas, 0), set(replicas)
        for count, one in enumerate(hashes, 1):
            still &= self._readers.get(one, set())
            if not still:
                break
            for replica in still if count >= LEAST_PIECES else ():
                matches[replica] = count
        return matches


def weight(key: bytes, replica: str) -> int:
    """Of a replica for a key; the one with the highest weight is the key's home."""
    return int.from_bytes(blake2b(key + b"\0" + replica.encode(), digest_size=6).digest())
