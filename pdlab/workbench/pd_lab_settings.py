"""What the controls of the PDLab say, and the three clusters that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from pdlab.disagg.ratio import Split, batch_of, need_of, split
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.search import MODES, Candidate
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.engine import EngineConfig
from pdlab.link import LINKS
from pdlab.requirements import LARGEST_SEED, require_choice, require_int, require_number
from pdlab.workbench.pd_lab_machines import THERE, Device
from pdlab.workbench.pd_lab_workloads import describe, make_requests
from pdlab.workbench.policy_lab_data import MOST_REQUESTS
from pdlab.workload.serving import SLO
from pdlab.workload.traces import TraceRequest

AGGREGATED, CHUNKED, DISAGGREGATED = MODES
MODE_HINTS = {
    AGGREGATED: "each worker serves whole requests; whole prompts, before the outputs of others",
    CHUNKED: "each worker serves whole requests; prompts in chunks, beside the outputs of others",
    DISAGGREGATED: "prompts on some workers, outputs on others; K and V travel between them",
}
NO_LINK = "takes no time"
LINK_NAMES = (NO_LINK, *LINKS)
MOST_DEVICES = 16
USUAL_BATCH = 16
"""Outputs that are made together, for the cost model's advice."""


class Plan(NamedTuple):
    """A cluster to simulate, or to run."""

    workers: dict[str, SimulatedSpec]
    router: RouterConfig


@dataclass(frozen=True)
class Settings:
    """What the controls say. All else follows from it."""

    num_devices: int
    """Of each of the three clusters."""
    num_prefill: int
    """Of these, where prompts and outputs are apart; the others make the outputs."""
    prefill_chunk: int | None
    """Most tokens of one prompt in a step of a worker that has only prompts; None for all."""
    decode_chunk: int
    """Most tokens in a step that has outputs and prompts: of `chunked`, and of the workers for
    outputs where they compute short prompts."""
    local_prefill_tokens: int
    """Prompts up to so many tokens are computed where their output is made."""
    transfer: str
    """As of `RouterConfig`."""
    link: str
    """A name of `LINK_NAMES`."""
    rate_rps: float
    """Of all devices together."""
    workload: str
    num_requests: int
    seed: int
    machine: str
    ttft_slo_s: float
    tpot_slo_s: float

    def checked(self) -> Settings:
        """Itself.

        Raises:
            ValueError: a number is out of its range, or a name is unknown.
            OSError: the workload is a file that cannot be read.
        """
        require_int("num_devices", self.num_devices, 2)
        require_int("num_prefill", self.num_prefill, 1)
        if self.num_devices > MOST_DEVICES:
            raise ValueError(f"num_devices={self.num_devices} must be at most {MOST_DEVICES}")
        if self.num_prefill >= self.num_devices:
            raise ValueError(
                f"num_prefill={self.num_prefill} must be below num_devices={self.num_devices}: "
                "outputs need a device, too"
            )
        if self.prefill_chunk is not None:
            require_int("prefill_chunk", self.prefill_chunk, 1)
        require_int("decode_chunk", self.decode_chunk, 1)
        require_int("local_prefill_tokens", self.local_prefill_tokens, 0)
        require_choice("transfer", self.transfer, TRANSFERS)
        require_choice("link", self.link, LINK_NAMES)
        require_number("rate_rps", self.rate_rps, 1e-6, 1e6)
        describe(self.workload)
        require_int("num_requests", self.num_requests, 2, MOST_REQUESTS)
        require_int("seed", self.seed, 0, LARGEST_SEED // 4)
        self.slo.checked()
        return self

    @property
    def slo(self) -> SLO:
        return SLO(self.ttft_slo_s, self.tpot_slo_s)

    @property
    def ratio(self) -> str:
        return f"{self.num_prefill}P{self.num_devices - self.num_prefill}D"

    def name_of(self, mode: str) -> str:
        """What a column is called."""
        return self.ratio if mode == DISAGGREGATED else f"{self.num_devices} {mode}"

    def line(self, mode: str) -> str:
        """A mode's settings, but the machine, in one line."""
        parts = [self.name_of(mode)]
        if mode == CHUNKED:
            parts.append(f"steps of {self.decode_chunk}")
        if mode == DISAGGREGATED:
            chunk = "whole prompts" if self.prefill_chunk is None else f"{self.prefill_chunk}"
            link = "no link" if self.link == NO_LINK else self.link
            parts += [f"prompt chunks: {chunk}", self.transfer, link]
            if self.local_prefill_tokens:
                parts.append(f"up to {self.local_prefill_tokens} prompt tokens beside outputs")
        workload = f"{self.workload} at {self.rate_rps:g}/s, seed {self.seed}"
        return f"{', '.join(parts)}; {workload}"

    def key(self, mode: str) -> tuple[Any, ...]:
        """Of the settings, those on which a mode's run depends; the limits are none."""
        of_all = self.num_devices, self.rate_rps, self.workload, self.num_requests, self.seed
        own: tuple[Any, ...] = ()
        if mode == CHUNKED:
            own = (self.decode_chunk,)
        if mode == DISAGGREGATED:
            beside = self.decode_chunk if self.local_prefill_tokens else None
            own = (self.num_prefill, self.prefill_chunk, self.local_prefill_tokens, beside)
            own += (self.transfer, self.link)
        return (mode, self.machine, *of_all, *own)

    def requests(self, device: Device) -> tuple[TraceRequest, ...]:
        """The workload."""
        max_len = device.machine.max_model_len
        return make_requests(self.workload, self.num_requests, self.rate_rps, self.seed, max_len)

    def plan(self, mode: str, device: Device) -> Plan:
        """The cluster of a mode, with as many devices as those of the others.

        Raises:
            ValueError: knobs do not go together.
        """
        worker = device.worker(self.link)
        if mode != DISAGGREGATED:
            chunk = self.decode_chunk if mode == CHUNKED else None
            candidate = Candidate(mode, worker, self.num_devices, chunk_size=chunk)
            return Plan(candidate.workers, candidate.router)
        candidate = Candidate(
            mode,
            worker,
            self.num_prefill,
            num_decode=self.num_devices - self.num_prefill,
            chunk_size=self.prefill_chunk,
            transfer=self.transfer,
        )
        router = replace(candidate.router, local_prefill_tokens=self.local_prefill_tokens)
        workers = {
            name: replace(spec, config=self._beside_outputs(spec.config))
            if spec.role == "decode"
            else spec
            for name, spec in candidate.workers.items()
        }
        return Plan(workers, router)

    def _beside_outputs(self, config: EngineConfig) -> EngineConfig:
        """As a candidate that chunks has it."""
        budget = max(self.decode_chunk, config.max_num_seqs)
        return replace(config, max_num_batched_tokens=budget)

    def run(self, mode: str, device: Device, num_requests: int | None = None) -> ClusterRun:
        """Simulate; only the first requests if a number is given."""
        plan = self.plan(mode, device)
        return simulate_cluster(self.requests(device)[:num_requests], plan.workers, plan.router)

    def advice(self, device: Device) -> Split:
        """The ratio that carries most of this workload, by the cost model."""
        times, config = device.machine.step_times, device.machine.config
        batch = min(USUAL_BATCH, batch_of(self.requests(device), config))
        return split(need_of(self.requests(device), times, times, batch=batch), self.num_devices)


SETTABLE = tuple(field.name for field in fields(Settings) if field.name != "num_requests")
"""The settings that have a control."""


def first_settings(
    device: Device, num_devices: int, slo: SLO | None, given: Mapping[str, Any]
) -> Settings:
    """What the controls begin with, where nothing else is given: a machine that is well busy."""
    require_int("num_devices", num_devices, 2)
    limits = slo or device.machine.usual_slo()
    begin: dict[str, Any] = {
        "num_devices": num_devices,
        "num_prefill": max(1, num_devices // 2),
        "prefill_chunk": None,
        "decode_chunk": device.decode_chunks[0],
        "local_prefill_tokens": 0,
        "transfer": "stream",
        "link": "100GbE" if device.machine.label == THERE else NO_LINK,
        "seed": 0,
        "machine": device.machine.label,
        "ttft_slo_s": limits.ttft_s,
        "tpot_slo_s": limits.tpot_s,
        "rate_rps": _round(num_devices * usual_rate(device, given["workload"])),
    }
    return Settings(**begin | dict(given))


def moved(
    now: Settings, devices: Mapping[str, Device], slo: SLO | None, values: Mapping[str, Any]
) -> dict[str, Any]:
    """What follows from another machine, or another number of devices.

    As busy as before, the same share for prompts; and the machine's own limits and chunks.
    """
    name, count = values.get("machine", now.machine), values.get("num_devices", now.num_devices)
    if (name, count) == (now.machine, now.num_devices):
        return {}
    require_choice("machine", name, tuple(devices))
    require_int("num_devices", count, 2)
    old, new = devices[now.machine], devices[name]
    busy = now.rate_rps / now.num_devices / usual_rate(old, now.workload)
    found: dict[str, Any] = {
        "rate_rps": _round(busy * count * usual_rate(new, now.workload)),
        "num_prefill": min(max(1, round(now.num_prefill / now.num_devices * count)), count - 1),
    }
    if name != now.machine:
        limits = slo or new.machine.usual_slo()
        found |= {"ttft_slo_s": limits.ttft_s, "tpot_slo_s": limits.tpot_s}
        found["decode_chunk"] = max(now.decode_chunk, new.decode_chunks[0])
    return found


def usual_rate(device: Device, workload: str) -> float:
    """Requests a second that keep one device busy."""
    requests = make_requests(workload, 200, 1.0, 0, device.machine.max_model_len)
    return device.machine.rate_for(requests)


def _round(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")
