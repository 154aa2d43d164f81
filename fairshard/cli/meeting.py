"""Where the ranks of torch's elastic launcher meet: a part of its store that no earlier attempt has written to.

The launcher keeps one store for all attempts (torch 2.13). Without a part of its own, a rank may connect to the address
of a dead rank instead of its successor's. The number of restarts cannot name the part: it differs between hosts, and
does not grow when hosts come or go. So rank 0 draws a name, and answers every rank that asks::

    rank r   sets asked/r to a name of its own ----------------- waits for answer/NAME, notes that it has it
    rank 0   reads asked/1 ... asked/W-1, again and again `---- sets answer/NAME to the drawn name

An asking rank draws a new name for each attempt, so an answer to a rank of an earlier attempt goes unread.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PREFIX = "fairshard/meeting"
_POLL_S = 0.01
_DEFAULT_S = 300.0


def meeting(timeout_s: float | None) -> dict[str, Any]:
    """Arguments of ``init_process_group`` for the ranks of this attempt. **Collective** under torch's launcher.

    Raises:
        RuntimeError: the ranks have not met within ``timeout_s`` seconds (300 if it is None).
    """
    timeout = {} if timeout_s is None else {"timeout": datetime.timedelta(seconds=timeout_s)}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return timeout  # rank 0 makes a new store for each attempt
    limit_s = _DEFAULT_S if timeout_s is None else timeout_s
    store, rank, world_size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=limit_s)))
    name = agreed_name(PrefixStore(_PREFIX, store), rank, world_size, limit_s)
    return {"store": PrefixStore(f"{_PREFIX}/{name}", store), "rank": rank, "world_size": world_size, **timeout}


def agreed_name(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """The name that rank 0 has drawn for this attempt. **Collective.**

    Raises:
        RuntimeError: some rank has not asked, or rank 0 has not answered, within ``timeout_s``.
    """
    drawn = uuid.uuid4().hex
    if rank:
        store.set(f"asked/{rank}", drawn)
        store.wait([f"answer/{drawn}"], datetime.timedelta(seconds=timeout_s))
        name = store.get(f"answer/{drawn}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing = set(range(1, world_size))
    answered: set[str] = set()
    until = time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([f"{drawn}/{other}"]):
                missing.discard(other)
            elif store.check([f"asked/{other}"]):
                asked = store.get(f"asked/{other}").decode()
                if asked not in answered:
                    store.set(f"answer/{asked}", drawn)
                    answered.add(asked)
        if time.monotonic() > until:
            raise RuntimeError(f"Ranks {sorted(missing)} of {world_size} have not started within {timeout_s:g} s.")
        time.sleep(_POLL_S if missing else 0)
    return drawn
