"""Records the picture that a LiveCluster shows before it is started.

python -m pdlab.workbench.live_cluster_recording       # two minutes; on a machine that is else idle
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pdlab
from pdlab.disagg import local_specs
from pdlab.models.catalog import DEFAULT_MODEL
from pdlab.workbench.live_cluster import ENGINE
from pdlab.workbench.live_cluster_data import RECORDED, Picture, save_picture
from pdlab.workbench.live_cluster_prompts import PROMPTS
from pdlab.workbench.live_cluster_run import LiveRun

VICTIM = "d0"
TOKENS_BEFORE, CHARS_AFTER = 14, 36
"""Of an answer that the lost worker had, at least: written by it, and elsewhere."""
PATIENCE_S = 180.0


def record() -> Picture:
    """Serve, kill a worker that writes, and wait until what it had is being written elsewhere.

    Raises:
        TimeoutError: that took too long.
    """
    model = pdlab.load(DEFAULT_MODEL)
    changed = threading.Event()
    run = LiveRun(
        model,
        local_specs(1, 2, model=model.name, config=ENGINE),
        PROMPTS,
        notify=changed.set,
    )
    run.start()
    try:
        _wait(run, changed, _is_writing)
        run.kill(VICTIM)
        return _wait(run, changed, _has_gone_on)
    finally:
        run.stop()
        run.wait()


def _wait(run: LiveRun, changed: threading.Event, holds: Callable[[Picture], bool]) -> Picture:
    end_s = time.monotonic() + PATIENCE_S
    while changed.wait(PATIENCE_S) and time.monotonic() < end_s:
        changed.clear()
        if holds(run.picture):
            return run.picture
        if run.error is not None:
            raise run.error
    raise TimeoutError(f"what was waited for has not come in {PATIENCE_S:g} s")


def _is_writing(picture: Picture) -> bool:
    """The victim has written some of an answer that is far from its end, and others are whole."""
    written = [row["tokens"] for row in picture["rows"] if row.get("decode_on") == VICTIM]
    return picture["answers"] >= 3 and any(TOKENS_BEFORE <= n <= 2 * TOKENS_BEFORE for n in written)


def _has_gone_on(picture: Picture) -> bool:
    again = [row for row in picture["rows"] if row.get("attempt")]
    return any(row["lost"] and len(row["pieces"][-1]) >= CHARS_AFTER for row in again)


if __name__ == "__main__":
    save_picture(record(), DEFAULT_MODEL)
    print(RECORDED)
