"""The TransferView widget: K and V leave one worker and arrive at another, below the prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.requirements import require_choice
from pdlab.workbench.transfer_data import (
    Cluster,
    choices,
    largest_transfer,
    named_stories,
    require_place,
    transfer_data,
)
from pdlab.workbench.widget import TraceWidget

VIEWS = ("whole", "hand-over")


class TransferView(TraceWidget):
    """One request's transfer: the sender's steps, each parcel by layer, the receiver's steps.

    `TransferView(run)` shows one run; `TransferView({"push": one, "stream": other})` shows the same
    transfer of several on one time axis, so that one sees what layer by layer hides. Time 0 is the
    end of the prompt's last step. Below, how the tokens of the sender's blocks lie in the
    receiver's; block numbers are known of a `ClusterTrace` only.

    Args:
        runs: a run or a trace of a cluster, or several by name (at most 6).
        transfer: number of the transfer, by the requests' names; the one with the most bytes by
            default.
        view: `whole`, or `hand-over` for the time around the prompt's end.

    Raises:
        ValueError: there is no run or no transfer in it, or no such transfer or view.
    """

    name = "transfer_view"

    runs = traitlets.List().tag(sync=True)
    """`transfer_data` of each run."""
    choices = traitlets.List().tag(sync=True)
    """Transfers that can be chosen, in words."""
    transfer = traitlets.Int(0).tag(sync=True)
    view = traitlets.Unicode("whole").tag(sync=True)

    def __init__(
        self,
        runs: Cluster | Mapping[str, Cluster],
        *,
        transfer: int | None = None,
        view: str = "whole",
    ) -> None:
        self._stories = named_stories(runs)
        for name, story in self._stories.items():
            if not story.transfers:
                raise ValueError(f"runs: {name!r} has no transfer")
        self._count = min(len(story.transfers) for story in self._stories.values())
        first = next(iter(self._stories.values()))
        if transfer is None:
            transfer = min(largest_transfer(first), self._count - 1)
        require_place("transfer", transfer, self._count)
        require_choice("view", view, VIEWS)
        super().__init__(choices=choices(first)[: self._count], transfer=transfer, view=view)
        self._reload()

    def summary(self) -> str:
        parts = [
            f"{data['name']}: {data['num_bytes'] / 1e6:.3g} MB from {data['source']} to "
            f"{data['target']} in {data['wall_s'] * 1e3:.3g} ms, "
            f"{data['wait_s'] * 1e3:.3g} ms waited after the prompt"
            + (f", simulated link: {data['link']}" if data["link"] else "")
            for data in self.runs
        ]
        lines = dict.fromkeys(data["line"] for data in self.runs)
        return f"Transfer of K and V. {'; '.join(parts)}. {'; '.join(lines)}"

    def _reload(self) -> None:
        self.runs = [
            transfer_data(story, self.transfer, name) for name, story in self._stories.items()
        ]

    @traitlets.observe("transfer")
    def _on_transfer(self, _change: Any) -> None:
        self._reload()

    @traitlets.validate("transfer")
    def _check_transfer(self, proposal: Any) -> int:
        require_place("transfer", proposal["value"], self._count)
        return int(proposal["value"])

    @traitlets.validate("view")
    def _check_view(self, proposal: Any) -> str:
        require_choice("view", proposal["value"], VIEWS)
        return str(proposal["value"])
