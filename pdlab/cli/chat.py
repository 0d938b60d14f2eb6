"""`pdlab chat`: a conversation in a terminal, or down a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from pdlab.cli.speculation import parse_speculation
from pdlab.cli.text import counted, seconds, si
from pdlab.cli.walk import CONTROL_CHARACTERS, check_save
from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.conversation import Conversation, Turn
from pdlab.engine.output import Chunk
from pdlab.models import load

PROMPT = "> "
HELP = {
    "/help": "this list",
    "/reset": "begin a new conversation; the system message stays",
    "/undo": "take the last exchange back",
    "/retry": "answer the last question again",
    "/stats": "what each turn took",
    "/system TEXT": "what the model is told before all else; without TEXT, nothing",
    "/quit": "end, as Ctrl-D does; Ctrl-C stops an answer",
}


@dataclass(frozen=True)
class Chat:
    """What `pdlab chat` was asked for."""

    model: str = "smollm2-135m"
    system: str | None = None
    temperature: float = 0.2
    top_p: float = 0.9
    seed: int | None = None
    max_tokens: int = 256
    weights: str = "auto"
    device: str = "cpu"
    speculate: str | None = None
    save: Path | None = None


def chat(asked: Chat) -> None:
    """Answer each line of stdin until it ends.

    Raises:
        ValueError: a parameter is out of range, or the model cannot chat.
    """
    params = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        max_tokens=asked.max_tokens,
    )
    check_save(asked.save)
    console = Console(highlight=False)
    speculation = parse_speculation(asked.speculate)
    model = load(asked.model, weights=asked.weights, device=asked.device)
    # a trace grows with every step, and a chat has no end: kept only to be saved
    config = EngineConfig(record_trace=asked.save is not None, speculation=speculation)
    with Engine(model, config) as engine:
        terminal = Terminal(console, Conversation(engine, params, asked.system))
        terminal.greet()
        terminal.talk()
        if asked.save:
            engine.trace.save(asked.save)
            console.print(f"trace: {asked.save}", soft_wrap=True)


class Terminal:
    """Reads lines, prints answers. Decorates only where somebody sits before it."""

    def __init__(self, console: Console, conversation: Conversation):
        self.console = console
        self.conversation = conversation
        self.interactive = sys.stdin.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": self.help,
            "/reset": self.reset,
            "/undo": self.undo,
            "/retry": self.retry,
            "/stats": self.stats,
            "/system": self.system,
        }

    def greet(self) -> None:
        if not self.interactive:
            return
        model, limit = self.conversation.engine.model, self.conversation.context_limit
        self.console.print(
            f"[bold]{model.name}[/], {si(model.config.num_parameters, '')} parameters, on "
            f"{model.device}; {limit:,} tokens fit. /help lists what else you can type.",
            soft_wrap=True,
        )

    def talk(self) -> None:
        for line in self.lines():
            if line.startswith("/"):
                if line.split(maxsplit=1)[0] in ("/quit", "/exit"):
                    return
                self.command(line)
            elif line.strip():
                self.answer(partial(self.conversation.say, line.strip()))

    def lines(self) -> Iterator[str]:
        """Lines of stdin. At a prompt, Ctrl-C gives up the line and not the program."""
        if not self.interactive:
            yield from sys.stdin
            return
        _enable_line_editing()
        while True:
            try:
                yield input(PROMPT)
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /quit ends[/]")
            except EOFError:
                self.console.print()
                return

    def answer(self, ask: Callable[[], Iterator[Chunk]]) -> None:
        """Print an answer as it comes, and below it what it took. Ctrl-C stops it."""
        before = self.conversation.turn
        try:
            with closing(cast(Generator[Chunk, None, None], ask())) as stream:
                for chunk in stream:
                    self.write(chunk.text)
        except KeyboardInterrupt:
            pass
        except ValueError as error:
            self.note(str(error))
        turn = self.conversation.turn
        if turn is not None and turn is not before:
            self.write("\n")
            for line in notes(turn):
                self.note(line)

    def write(self, text: str) -> None:
        """The model's text, which must not command the terminal."""
        if text:
            self.console.out(text.translate(CONTROL_CHARACTERS), end="", highlight=False)

    def note(self, text: str) -> None:
        text = text.translate(CONTROL_CHARACTERS)
        self.console.print(text, style="dim", markup=False, soft_wrap=True)

    # --- commands -----------------------------------------------------------------------------

    def command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if name in self.commands:
            self.commands[name](rest.strip())
        else:
            self.note(f"{name[:40]} is no command: /help lists them; a space before / says it")

    def help(self, _: str) -> None:
        for name, meaning in HELP.items():
            self.note(f"{name:13} {meaning}")

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.note("a new conversation")

    def undo(self, _: str) -> None:
        try:
            self.note(f"taken back: {self.conversation.undo()[:60]!r}")
        except ValueError as error:
            self.note(str(error))

    def retry(self, _: str) -> None:
        self.answer(self.conversation.retry)

    def system(self, text: str) -> None:
        self.conversation.system = text or None
        self.note(f"the model is told: {text}" if text else "no system message of ours")

    def stats(self, _: str) -> None:
        """A row for each turn, and what of the conversation the prefix cache has now."""
        chat = self.conversation
        table = Table(box=None, pad_edge=False, header_style="bold")
        headers = ("turn", "prompt", "cached", "computed", "answer", "TTFT", "tok/s", "KV blocks")
        for header in headers:
            table.add_column(header, justify="right", no_wrap=True)
        for number, turn in enumerate(chat.turns, 1):
            counts = (number, turn.prompt_tokens, turn.cached_tokens, turn.new_tokens)
            blocks = f"{turn.cached_blocks} + {turn.own_blocks}"
            rest = (str(len(turn.token_ids)), ttft(turn), speed(turn), blocks)
            table.add_row(*map(str, counts), *rest)
        self.console.print(table)
        for line in self.standing():
            self.note(line)

    def standing(self) -> list[str]:
        chat, cache = self.conversation, self.conversation.engine.kv_cache
        kept = chat.cached_blocks()
        lines = [
            f"context: {len(chat.token_ids):,} of {chat.context_limit:,} tokens",
            f"prefix cache: {counted(kept, 'block')} of this conversation, "
            f"{si(kept * cache.block_bytes, 'B')}; the pool has {chat.engine.pool.num_blocks}",
        ]
        if chat.forgotten:
            lines.append(f"forgotten: {counted(len(chat.forgotten), 'message')}")
        return lines


def notes(turn: Turn) -> list[str]:
    """What a turn took, in a line; a line before it if something was forgotten."""
    blocks = counted(turn.cached_blocks + turn.own_blocks, "KV block")
    took = [
        counted(len(turn.token_ids), "token") + (" (stopped)" * (turn.finish_reason == "abort")),
        f"{speed(turn)} tok/s",
        f"TTFT {ttft(turn)}",
        f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens from the prefix cache",
        f"{blocks}, {si(turn.kv_bytes, 'B')}",
    ]
    lines = [" · ".join(took)]
    if turn.finish_reason == "length":
        lines.append("cut off: it has reached max_tokens, or the end of the context")
    if turn.forgotten:
        gone = counted(turn.forgotten, "exchange")
        lines.insert(0, f"forgotten: the oldest {gone}; {turn.context_limit:,} tokens fit")
    return lines


def ttft(turn: Turn) -> str:
    return "–" if turn.ttft_s is None else seconds(turn.ttft_s)


def speed(turn: Turn) -> str:
    return "–" if turn.tokens_per_s is None else f"{turn.tokens_per_s:.1f}"


def _enable_line_editing() -> None:
    """Arrow keys and history in `input()`, where this Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
