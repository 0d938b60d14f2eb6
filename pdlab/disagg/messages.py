"""What a router and its workers say to each other: plain data, the same in one process and in many.

A worker's name for a request is the router's, with the number of the attempt behind it (`r3`,
`r3~1`), so that news of an attempt that was given up cannot be taken for those of the next.

    disaggregated, layer by layer            disaggregated, whole prompt
    router   P          D                    router   P          D
      Reserve --------> Reserved               Prefill ->
      Prefill ->                                        Produced, Held
               ==K,V==> (as layers are done)   Reserve --------> Reserved
               Produced, Held                  Send --->
      Continue -------> Arrived                         ==K,V==>
      Release ->        Produced ...           Continue -------> Arrived
                                               Release ->        Produced ...

With `pull` the router has P `Publish` instead of `Send`, and D `Fetch` what was published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pdlab.disagg.transport.interface import Address, Ticket
from pdlab.engine.moving import RequestState
from pdlab.engine.output import Chunk
from pdlab.kvcache import KVLayout
from pdlab.sampling import TokenLogprobs
from pdlab.trace import TransferRecord


class Arrival(NamedTuple):
    """What policies may go by, on the clock of all workers."""

    time_s: float
    priority: int = 0
    ttft_slo_s: float | None = None


class Route(NamedTuple):
    """Where K and V go, and which of them."""

    worker: str
    address: Address
    layout: KVLayout
    num_cached_tokens: int
    """The first tokens, which the receiver has."""


# --- from the router to a worker -----------------------------------------------------------------


@dataclass(frozen=True)
class Meet:
    """There is another worker, and its cache is laid out like this."""

    name: str
    layout: KVLayout


@dataclass(frozen=True)
class Serve:
    """Serve a request from its state to its end."""

    request_id: str
    state: RequestState
    arrival: Arrival


@dataclass(frozen=True)
class Prefill:
    """Compute all tokens of a state, draw the next one, and keep K and V.

    Args:
        route: send them layer by layer, as they are computed; None to keep them until asked.
    """

    request_id: str
    state: RequestState
    arrival: Arrival
    route: Route | None = None


@dataclass(frozen=True)
class Reserve:
    """Keep a seat and blocks for all tokens of a state, as soon as there is room."""

    request_id: str
    state: RequestState
    arrival: Arrival


@dataclass(frozen=True)
class Send:
    """Push K and V of a held request."""

    request_id: str
    route: Route


@dataclass(frozen=True)
class Publish:
    """Let K and V of a held request be fetched."""

    request_id: str
    route: Route


@dataclass(frozen=True)
class Fetch:
    """Pull K and V of a request that has its room."""

    request_id: str
    ticket: Ticket


@dataclass(frozen=True)
class Continue:
    """The token that was drawn elsewhere: with it, and K and V, a reserved request can run."""

    request_id: str
    token_id: int


@dataclass(frozen=True)
class Release:
    """K and V of a held request have arrived, or nobody wants them: forget it."""

    request_id: str


@dataclass(frozen=True)
class Abort:
    """End a request, wherever it is, and say nothing more about it."""

    request_id: str


@dataclass(frozen=True)
class Renew:
    """These requests are still wanted: their leases begin anew. It is answered with the load."""

    request_ids: list[str]


Command = (
    Meet | Serve | Prefill | Reserve | Send | Publish | Fetch | Continue | Release | Abort | Renew
)


# --- from a worker to the router -----------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first word of a worker."""

    name: str
    address: Address
    layout: KVLayout
    num_blocks: int
    max_num_seqs: int
    clock_s: float
    """What its clock shows now."""
    epoch_s: float
    """What it showed when its engine's clock began."""
    has_prefix_cache: bool = True
    link: str = ""
    """The simulated link that it sends and fetches over, if there is one."""
    lease_s: float = math.inf
    """How long it keeps what nobody renews."""


@dataclass(frozen=True)
class Produced:
    """A piece of a request's output; the last one has its `finish_reason`."""

    request_id: str
    chunk: Chunk
    time_s: float
    """When its token was there, on the worker's clock."""
    times_s: tuple[float, ...] = ()
    """Of each token, where several that came one after the other are told of at once."""


@dataclass(frozen=True)
class Started:
    """A request ran for the first time."""

    request_id: str
    time_s: float
    num_cached_tokens: int


@dataclass(frozen=True)
class Held:
    """A request's prompt is computed, and K and V wait."""

    request_id: str
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_preemptions: int = 0


@dataclass(frozen=True)
class Reserved:
    """A request has its room."""

    request_id: str
    num_cached_tokens: int


@dataclass(frozen=True)
class Published:
    """K and V of a request can be fetched."""

    request_id: str
    ticket: Ticket


@dataclass(frozen=True)
class Arrived:
    """All K and V of a request are in its blocks, and it runs."""

    request_id: str
    transfer: TransferRecord


@dataclass(frozen=True)
class Failed:
    """A request cannot go on here, and has nothing here any more.

    `refused` where no worker of this kind could ever serve it.
    """

    request_id: str
    reason: str
    refused: bool = False


@dataclass(frozen=True)
class Ended:
    """A request is over; its last piece came before."""

    request_id: str
    error: str = ""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_preemptions: int = 0


@dataclass(frozen=True)
class Load:
    """How much there is to do."""

    num_waiting: int
    num_running: int
    num_held: int
    num_reserved: int
    num_free_blocks: int
    step_s: float | None = None
    """Of the last step, and what it held."""
    num_prompt_tokens: int = 0
    num_decodes: int = 0


Event = Hello | Produced | Started | Held | Reserved | Published | Arrived | Failed | Ended | Load


# --- names of transfers --------------------------------------------------------------------------


def transfer_name(request_id: str, source: str, number: int) -> str:
    """The id of a worker's `number`-th transfer."""
    return f"{request_id}@{source}#{number}"


def request_of(transfer_id: str) -> str:
    return transfer_id.rpartition("@")[0]


def source_of(transfer_id: str) -> str:
    return transfer_id.rpartition("@")[2].partition("#")[0]


def transfer_number(transfer_id: str) -> int:
    """A later transfer of one source has a larger one; 0 for no transfer."""
    return int(transfer_id.rpartition("#")[2] or 0)
