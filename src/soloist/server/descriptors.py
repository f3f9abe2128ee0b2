"""How many files and sockets this process may have open at once."""

import resource

# Beside connections: the model's files, libraries, the GPU's, other processes' pipes.
_RESERVED = 256


def connections_for(most: int) -> int:
    """Connections, up to `most`, that the system lets this process have, once it is asked for them.

    The soft limit is raised as far as `most` needs and the hard one allows, and never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return most
    # A limit without room for the reserve still has room for some connections.
    return max(min(most, soft - _RESERVED), min(most, soft // 4))
