"""Render a conversation with a model's own chat template, as transformers does.

Templates are Jinja programs that come with the model: untrusted code, so they run in Jinja's
sandbox and see plain data only. The environment below has what transformers gives a template; a
test compares the two. (Importing transformers for this would cost seconds at every start.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""At least `role` and `content`."""


def render_chat(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The text that stands for `messages`.

    Args:
        template: Jinja source.
        messages: {"role": ..., "content": ...} each; keys whose value is None count as absent.
        variables: further names the template may read: `add_generation_prompt`, `bos_token`, ...

    Raises:
        ValueError: a message is no mapping with a role, its content is not text, or the template
            refuses the conversation.
    """
    import jinja2

    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    try:
        return _compile(template).render(messages=plain, **variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}]={message!r} is not a mapping with a 'role'")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"messages[{index}]: content is a {type(content).__name__}; only text is supported"
        )
    try:
        plain = json.loads(json.dumps(dict(message)))
    except TypeError as error:
        raise ValueError(f"messages[{index}] holds what JSON cannot: {error}") from error
    return {key: value for key, value in plain.items() if value is not None}


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own `tojson` escapes for HTML, which is not what a model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation_tag() -> Any:
    """An extension that lets `{% generation %}...{% endgeneration %}` through unchanged.

    Templates mark what the assistant wrote with it, which matters for training only.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
