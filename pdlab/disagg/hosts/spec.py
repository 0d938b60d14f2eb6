"""Workers described as plain data, which can be sent to where they shall live."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Transport
from pdlab.disagg.transport.sockets import MIN_TOKEN_CHARS, SocketTransport, new_token
from pdlab.disagg.worker import ROLES, Role, Worker
from pdlab.engine import Engine, EngineConfig
from pdlab.link import Link
from pdlab.machine import deal, physical_cores
from pdlab.models import Model, load, load_outline
from pdlab.models.catalog import DEFAULT_MODEL
from pdlab.models.loading import AUTO, DTYPES
from pdlab.requirements import require_choice, require_int, require_number, shown

Kind = Literal["in-process", "socket", "torch", "nixl", "ray"]
OPTIONS: dict[str, tuple[str, ...]] = {
    "in-process": (),
    "socket": ("token", "family", "host", "port"),
    "torch": ("init_method", "rank", "world_size", "device", "host", "connect_timeout_s"),
    "nixl": ("token", "family", "host", "device", "tls"),
    "ray": (),
}
"""What each kind of transport can be told."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "socket": ("token",),
    "torch": ("init_method", "rank", "world_size"),
    "nixl": ("token",),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a worker may be called: its name is part of the ids of transfers."""
MOST_SECONDS = 1e9


@dataclass(frozen=True)
class TransportSpec:
    """How a worker's K and V travel.

    Args:
        kind: `in-process` (workers of one process only), `socket`, `torch`, `nixl` or `ray`.
        options: arguments of the transport's class, see `OPTIONS`; for `torch`, those of
            `TorchDistributed.join`. They are not shown: a token is a secret.
        link: a slower link, simulated, for what is sent and fetched by this worker.

    Raises:
        ValueError: a field is not as it should be.
    """

    kind: Kind
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    link: Link | None = None

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, tuple(OPTIONS))
        if not isinstance(self.options, dict):
            raise ValueError(f"options is a {type(self.options).__name__}; it must be a dict")
        if unknown := set(self.options) - set(OPTIONS[self.kind]):
            raise ValueError(
                f"options has {', '.join(sorted(map(str, unknown)))}; {self.kind!r} knows "
                f"{', '.join(OPTIONS[self.kind]) or 'none'}"
            )
        if missing := set(REQUIRED.get(self.kind, ())) - set(self.options):
            raise ValueError(f"options has no {', '.join(sorted(missing))}: {self.kind!r} needs it")
        token = self.options.get("token", "-" * MIN_TOKEN_CHARS)
        if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
            raise ValueError(
                f"options: token must be text of at least {MIN_TOKEN_CHARS} characters"
            )
        if not isinstance(self.link, Link | None):
            raise ValueError(f"link={shown(self.link)} must be a Link or None")


@dataclass(frozen=True)
class WorkerSpec:
    """All that it takes to make a worker.

    Raises:
        ValueError: a field is not as it should be.
    """

    name: str
    """Of letters, digits, `_`, `-` and `.`; no two workers of a cluster have the same."""
    transport: TransportSpec
    role: Role = "both"
    model: str = DEFAULT_MODEL
    """As `pdlab.load` takes it."""
    config: EngineConfig = field(default_factory=EngineConfig)
    """With `tensor_parallel` or `pipeline_parallel` above 1 the worker has ranks of its own."""
    dtype: str | None = None
    """None for the device's usual one."""
    weights: str = AUTO
    """The format of the weights, as `pdlab.load` takes it."""
    device: str = "cpu"
    num_threads: int | None = None
    """Of torch, where the worker has a process of its own; None for one on each of its cores."""
    cores: tuple[int, ...] | None = None
    """Processors that its process keeps to; None for any."""
    slowdown: float = 1.0
    """How much longer each step takes than it does: a slower machine, pretended."""
    layers_per_parcel: int = 1
    """Layers that leave together, of those that leave as they are computed."""
    lease_s: float = 30.0
    """How long it keeps what nobody renews."""
    transfer_timeout_s: float = 60.0
    """How long the next parcel may take once a prompt is computed."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ValueError(
                f"name={shown(self.name)} must have 1 to 64 letters, digits, `_`, `-` or `.`, and "
                "begin with a letter or digit"
            )
        if not isinstance(self.transport, TransportSpec):
            raise ValueError(f"transport={shown(self.transport)} must be a TransportSpec")
        require_choice("role", self.role, ROLES)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={shown(self.model)} must be a name or a path, as text")
        if not isinstance(self.config, EngineConfig):
            raise ValueError(f"config={shown(self.config)} must be an EngineConfig")
        if self.dtype is not None:
            require_choice("dtype", self.dtype, tuple(DTYPES))
        if not isinstance(self.weights, str):
            raise ValueError(f"weights={shown(self.weights)} must be text: auto, file, int8, ...")
        if not isinstance(self.device, str):
            raise ValueError(f"device={shown(self.device)} must be text: cpu, cuda, cuda:1, ...")
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, least=1, most=1024)
        self._check_cores()
        require_number("slowdown", self.slowdown, 1, 1e6)
        require_int("layers_per_parcel", self.layers_per_parcel, least=1)
        for name in ("lease_s", "transfer_timeout_s"):
            require_number(name, getattr(self, name), 0.001, MOST_SECONDS)

    @property
    def threads(self) -> int | None:
        """Of torch, in a process of its own; None for torch's own choice."""
        return self.num_threads or (len(self.cores) if self.cores else None)

    def _check_cores(self) -> None:
        if self.cores is None:
            return
        if not isinstance(self.cores, tuple) or not self.cores:
            raise ValueError(f"cores={shown(self.cores)} must be a tuple of at least one, or None")
        for core in self.cores:
            require_int("cores", core, least=0)
        if len(set(self.cores)) < len(self.cores):
            raise ValueError(f"cores={shown(self.cores)} names a core twice")


def make_worker(
    spec: WorkerSpec,
    *,
    model: Model | None = None,
    board: Switchboard | None = None,
    transport: Transport | None = None,
) -> Worker:
    """The worker that a spec describes, in this process: of its threads and cores it sets nothing.

    Args:
        model: if it is loaded already; workers of one process may share it.
        board: connects the workers of one process, if their transport is `in-process`.
        transport: if it is there already; it is the worker's then.

    Raises:
        ValueError: the model is unknown, the configuration does not fit it, or there is no board.
        FetchError: the model has to be fetched and cannot be.
        ImportError: the transport needs a package that is not installed.
    """
    if spec.transport.kind == "in-process" and board is None and transport is None:
        raise ValueError("board=None: transport kind 'in-process' needs one, shared by its workers")
    engine = Engine(model or _model_of(spec), spec.config)
    try:
        transport = transport or make_transport(spec.transport, spec.name, board=board)
    except BaseException:
        engine.close()
        raise
    return Worker(
        spec.name,
        engine,
        transport,
        slowdown=spec.slowdown,
        layers_per_parcel=spec.layers_per_parcel,
        lease_s=spec.lease_s,
        transfer_timeout_s=spec.transfer_timeout_s,
    )


def _model_of(spec: WorkerSpec) -> Model:
    """The model; without weights, where ranks load their shares themselves."""
    options: dict[str, Any] = {"device": spec.device, "dtype": spec.dtype, "progress": False}
    has_ranks = spec.config.num_ranks > 1 and spec.config.rank_host != "thread"
    if has_ranks and spec.weights == AUTO:
        return load_outline(spec.model, **options)
    return load(spec.model, weights=spec.weights, **options)


def make_transport(
    spec: TransportSpec, name: str, *, board: Switchboard | None = None
) -> Transport:
    """The transport that a spec describes.

    Raises:
        ValueError: an option is out of range.
        ImportError: it needs a package that is not installed.
    """
    match spec.kind:
        case "in-process":
            assert board is not None
            return InProcess(board, name, link=spec.link)
        case "socket":
            return SocketTransport(name=name, link=spec.link, **spec.options)
        case "torch":
            from pdlab.disagg.transport.torch_distributed import TorchDistributed

            return TorchDistributed.join(link=spec.link, **spec.options)
        case "nixl":
            from pdlab.disagg.transport.nixl_transport import NixlTransport

            return NixlTransport(name=name, link=spec.link, **spec.options)
        case "ray":
            from pdlab.disagg.transport.ray_transport import RayTransport

            return RayTransport(link=spec.link)


# --- workers of this machine --------------------------------------------------------------------


def local_specs(
    num_prefill: int,
    num_decode: int,
    *,
    model: str = DEFAULT_MODEL,
    config: EngineConfig | None = None,
    prefill_config: EngineConfig | None = None,
    decode_config: EngineConfig | None = None,
    link: Link | None = None,
    pin: bool = True,
    **others: Any,
) -> list[WorkerSpec]:
    """Specs of processes of this machine, `p0`, `p1`, ... for prompts and `d0`, ... for outputs.

    They reach each other by sockets. Cores are dealt out so that prefill and decode share none, if
    there are two, and no two workers share one, if there are enough; if there are plenty, one stays
    free for the router. Ranks of an engine stay on its worker's cores.

    Args:
        config: of all engines; `prefill_config` and `decode_config` go before it.
        link: a slower link, simulated, for all.
        pin: keep each worker to its cores. Its threads are as many in any case.
        others: further fields of each `WorkerSpec`.

    Raises:
        ValueError: there would be no worker, or a field is not as it should be.
    """
    require_int("num_prefill", num_prefill, least=0, most=1024)
    require_int("num_decode", num_decode, least=0, most=1024)
    if num_prefill + num_decode == 0:
        raise ValueError("num_prefill=0 and num_decode=0: there must be at least 1 worker")
    config = config or EngineConfig()
    transport = TransportSpec("socket", {"token": new_token()}, link)
    names = [f"p{i}" for i in range(num_prefill)] + [f"d{i}" for i in range(num_decode)]
    shares = deal_cores(num_prefill, num_decode, physical_cores())
    specs = []
    for index, (name, share) in enumerate(zip(names, shares, strict=True)):
        is_prefill = index < num_prefill
        own: dict[str, Any] = {
            "transport": transport,
            "role": "prefill" if is_prefill else "decode",
            "model": model,
            "config": (prefill_config if is_prefill else decode_config) or config,
            "num_threads": len(share),
            "cores": tuple(sorted(cpu for core in share for cpu in core)) if pin else None,
        }
        specs.append(WorkerSpec(name, **own | others))
    return specs


def deal_cores(
    num_prefill: int, num_decode: int, cores: Sequence[tuple[int, ...]]
) -> list[list[tuple[int, ...]]]:
    """Cores for each worker, those that prefill first; where they are too few, workers share.

    Args:
        cores: each with the processors that it appears as.
    """
    num_workers = num_prefill + num_decode
    if len(cores) > 2 * num_workers:
        cores = cores[1:]
    if len(cores) == 1 or not num_prefill or not num_decode:
        return deal(num_workers, cores)
    num_first = min(max(1, round(len(cores) * num_prefill / num_workers)), len(cores) - 1)
    return deal(num_prefill, cores[:num_first]) + deal(num_decode, cores[num_first:])
