"""Simulated runs of the PDLab, kept so that a control that goes back answers at once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from pdlab.disagg.serving import ClusterRun
from pdlab.workbench.pd_lab_data import picture_of, shown_until_s
from pdlab.workbench.pd_lab_machines import Device
from pdlab.workbench.pd_lab_settings import Settings
from pdlab.workbench.pd_lab_workloads import num_cut
from pdlab.workbench.policy_lab_data import last_token_s

MOST_KEPT = 36


class Simulations:
    """By settings and mode; the newest ones are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], ClusterRun] = OrderedDict()
        self.num_made = 0

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        """Whether the run of `Settings.key` is there."""
        return key in self._kept

    def run(self, settings: Settings, mode: str, device: Device) -> ClusterRun:
        """Simulate, if it is not there yet."""
        key = settings.key(mode)
        if key not in self._kept:
            self._kept[key] = settings.run(mode, device)
            self.num_made += 1
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def picture(
        self, settings: Settings, mode: str, device: Device, *, whole: bool, num_real: int
    ) -> dict[str, Any]:
        """A mode's column.

        Args:
            whole: show all of the run, not only its beginning.
            num_real: requests that would run for real: when they would be over is told.
        """
        run = self.run(settings, mode, device)
        until_s = None if whole else shown_until_s(settings.requests(device))
        return picture_of(run, mode, settings.name_of(mode), settings.slo, until_s) | {
            "line": settings.line(mode),
            "real_s": last_token_s(run.serving, num_real),
        }


def about(settings: Settings, device: Device) -> dict[str, Any]:
    """What holds for all modes: what the numbers rest on, and the cost model's advice."""
    advice = settings.advice(device)
    limit = device.machine.max_model_len
    count = num_cut(settings.workload, settings.num_requests, settings.seed, limit)
    return {
        "settings": asdict(settings),
        "provenance": device.machine.line,
        "advice": advice.num_prefill,
        "advice_words": f"cost model: {advice}, carries {advice.capacity_rps:.3g}/s",
        "cut": f"{count} prompts of the trace are cut to {limit:,} tokens in all" if count else "",
    }
