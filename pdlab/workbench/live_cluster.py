"""The LiveCluster widget: workers that serve while a class watches, and a button to kill each."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import traitlets
from IPython.display import display, update_display

from pdlab.disagg import RouterConfig, local_specs
from pdlab.engine import EngineConfig, Prompt, admission
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import require_bool, require_int
from pdlab.workbench.fallback import fallback_card
from pdlab.workbench.live_cluster_data import Answer, lines_of, recorded_picture
from pdlab.workbench.live_cluster_prompts import usual_prompts
from pdlab.workbench.live_cluster_run import LiveRun
from pdlab.workbench.picture import pictures_wanted
from pdlab.workbench.widget import TraceWidget

ENGINE = EngineConfig(
    num_blocks=96, max_num_seqs=16, max_num_batched_tokens=1024, record_trace=False
)
"""A small pool, so that a document is seen to fill it; no trace, because there is no end."""
NOT_STARTED = "not started"
END_S = 30.0
"""How long the processes may take to end."""
WISHES = ("start", "stop", "kill", "revive", "paste")
"""That the page may send."""


class LiveCluster(TraceWidget):
    """Real processes that serve readers without end, each with a button to kill it.

    Shown in a cell it costs nothing: it waits for its start button. Some processes read prompts,
    others write answers; K and V travel between them. When one is killed, the answers that it was
    writing go on elsewhere. With `exact=True` they have the very tokens that they would have had.

        wb.LiveCluster(model)                    # one process reads, two write
        live = wb.LiveCluster(model); live.start()
        live.kill("d0"); live.revive("d0"); live.paste(600); live.stop()

    All processes end with `stop`, with the last view of the widget, with the kernel, and when
    another LiveCluster is started. `answers` keeps what the readers were sent.

    Args:
        model: the processes load their own, by its name.
        num_prefill, num_decode: processes of each kind.
        num_readers: answers that are being written at any time.
        max_tokens: of each answer.
        exact: bit-identical whatever the batch, and several times slower.
        prompts: what the readers ask, one after the other.
        router: how requests are routed.
        spec: further fields of each `WorkerSpec`, as for `local_specs`.

    Raises:
        ValueError: an argument is out of range.
    """

    name = "live_cluster"
    shared = ("asker",)

    header = traitlets.Dict().tag(sync=True)
    """Constants: in words what serves, and on what."""
    state = traitlets.Unicode(NOT_STARTED).tag(sync=True)
    """Then `starting`, `running`, `stopping`, and `stopped` or `failed`."""
    picture = traitlets.Dict().tag(sync=True)
    """See `picture_of`; before the start a recorded one, which has `recorded`."""
    message = traitlets.Unicode().tag(sync=True)
    """What went wrong, in words."""

    _run: LiveRun | None = None  # also for `close` of a widget that was refused

    def __init__(
        self,
        model: Model,
        num_prefill: int = 1,
        num_decode: int = 2,
        *,
        num_readers: int = 4,
        max_tokens: int = 64,
        exact: bool = False,
        prompts: Sequence[Prompt] | None = None,
        router: RouterConfig | None = None,
        **spec: Any,
    ):
        require_int("num_readers", num_readers, least=1, most=8)
        require_int("max_tokens", max_tokens, least=2, most=512)
        require_bool("exact", exact)
        if prompts is not None and not prompts:
            raise ValueError("prompts is empty: readers need at least 1")
        config = admission.resolve(model, replace(ENGINE, exact=exact))
        told: dict[str, Any] = {
            "config": config,
            "dtype": model.dtype_name,
            "weights": model.weights,
            "device": model.device.type,
        } | spec
        self._specs = local_specs(num_prefill, num_decode, model=model.name, **told)
        self._model, self._router = model, router
        self._prompts = usual_prompts(model) if prompts is None else list(prompts)
        self._num_readers, self._max_tokens = num_readers, max_tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_views: int | None = None
        """Views on the page; None if there never was one."""
        self._displays: list[str] = []
        machine = describe_machine()
        mode = "exact" if exact else "fast (equal tokens but at near ties)"
        super().__init__(
            header={
                "names": [s.name for s in self._specs],
                "roles": _in_words(num_prefill, num_decode),
                "model": model.name,
                "mode": mode,
                "machine": f"{machine['processor']}, {machine['cores']} cores, "
                f"{str(machine['date'])[:10]}",
            },
            picture=recorded_picture(),
        )
        self.on_msg(self._on_message)

    # --- what one can do ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes and serve; returns at once. Another LiveCluster ends before.

        Does nothing while it runs.
        """
        if self._run is not None and not self._run.is_over:
            return
        _end_others()
        self._loop = _running_loop()
        self.message = ""
        self._run = LiveRun(
            self._model,
            self._specs,
            self._prompts,
            router=self._router,
            num_readers=self._num_readers,
            max_tokens=self._max_tokens,
            notify=self._notify,
        )
        self._run.start()
        self.refresh()

    def stop(self) -> None:
        """End all processes, and return when they have ended; the last picture stays."""
        if self._run is not None:
            self._run.stop()
            if not self._run.wait(END_S):
                raise TimeoutError(f"the processes have not ended within {END_S:g} s")
            self.refresh()

    def kill(self, name: str) -> None:
        """End a worker with SIGKILL, as `kill -9` in a terminal does.

        Raises:
            ValueError: there is no such worker.
            RuntimeError: nothing runs.
        """
        self._wish(lambda run: run.kill(name), name)

    def revive(self, name: str) -> None:
        """Start a lost worker anew, as another process; it takes some seconds to join.

        Raises:
            ValueError, RuntimeError: as `kill`.
        """
        self._wish(lambda run: run.revive(name), name)

    def paste(self, num_tokens: int = 600) -> None:
        """A document arrives, of which a few words are to be written.

        Raises:
            ValueError: it is longer than a worker's KV memory.
            RuntimeError: nothing runs.
        """
        room = min(
            self.config.num_blocks * self.config.block_size, self._model.config.max_model_len
        )
        require_int("num_tokens", num_tokens, least=1, most=room - 64)
        self._wish(lambda run: run.paste(num_tokens))

    def refresh(self) -> None:
        """Take in what is new. Only needed in plain Python: a notebook's event loop does it."""
        run = self._run
        if run is None:
            return
        before = self.state
        with self.hold_sync():
            self.picture = run.picture
            self.state = run.state
            if run.error is not None:
                self.message = str(run.error)
            if run.is_over and self.state != before:
                self._keep_last_picture()  # so the page has it when it hears of the end

    @property
    def config(self) -> EngineConfig:
        """Of the workers' engines."""
        return self._specs[0].config

    @property
    def answers(self) -> list[Answer]:
        """The newest 100 answers that are over: prompt, params, output."""
        return [] if self._run is None else list(self._run.answers)

    @property
    def first_token_s(self) -> float | None:
        """From the start to the first token of all; None before that."""
        return None if self._run is None else self._run.first_token_s

    def close(self) -> None:
        """Also end all processes."""
        if self._run is not None:
            self._run.stop()
        super().close()

    def summary(self) -> str:
        state = self.state
        if "recorded" in self.picture:
            state += f"; the picture was recorded: {self.picture['recorded']}"
        return f"LiveCluster: {self.header['roles']}, {self.header['model']}: {state}"

    # --- the run ------------------------------------------------------------------------------

    def _wish(self, wish: Callable[[LiveRun], None], name: str | None = None) -> None:
        if name is not None and name not in self.header["names"]:
            raise ValueError(f"name={name!r} is no worker: {', '.join(self.header['names'])}")
        if self._run is None or self._run.is_over:
            raise RuntimeError(f"the cluster is {self.state}: start it first")
        wish(self._run)

    def _notify(self) -> None:
        """In the run's thread: let the event loop take in what is new."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the kernel ends
                self._loop.call_soon_threadsafe(self.refresh)

    # --- the page -----------------------------------------------------------------------------

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        kind = content.get("type")
        if kind == "view":
            self._count_views(1 if content.get("open") else -1)
        elif kind == "stop":
            if self._run is not None:
                self._run.stop()  # waiting would keep the kernel from all else
                self.state = "stopping" if not self._run.is_over else self.state
        elif kind in WISHES:
            arguments = [str(content["name"])] if "name" in content else []
            try:
                getattr(self, kind)(*arguments)
                self.message = ""
            except (ValueError, RuntimeError) as error:
                self.message = str(error)

    def _count_views(self, change: int) -> None:
        """When the last view is gone (its cell runs again), nobody watches: end the processes."""
        self._num_views = max(0, (self._num_views or 0) + change)
        if self._num_views == 0 and self._run is not None:
            self._run.stop()

    def _ipython_display_(self, **_: Any) -> None:
        """Displayed under a name of its own, so that the saved page can have the last picture."""
        data, metadata = self._repr_mimebundle_()
        name = f"live-cluster-{random.getrandbits(64):016x}"
        self._displays.append(name)
        display(data, metadata=metadata, raw=True, display_id=name)

    def _keep_last_picture(self) -> None:
        """What a saved page shows is made when it is displayed: show it anew."""
        for name in self._displays:
            data, metadata = self._repr_mimebundle_()
            update_display(data, metadata=metadata, raw=True, display_id=name)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        if not pictures_wanted() or "image/png" not in data:
            data["text/html"] = fallback_card(self.summary(), *lines_of(self.picture))
        return data, metadata


def _in_words(num_prefill: int, num_decode: int) -> str:
    def part(number: int, what: str) -> str:
        return f"{number} process{'es' * (number != 1)} {what}{'s' * (number == 1)}"

    return f"{part(num_prefill, 'read')} prompts, {part(num_decode, 'write')} answers"


def _end_others() -> None:
    """Two at once would only slow each other down, and the other may have no view any more."""
    for thread in threading.enumerate():
        if isinstance(thread, LiveRun):
            thread.stop()
            thread.wait(END_S)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
