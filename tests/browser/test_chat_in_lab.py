"""The Chat in JupyterLab: it streams, Stop stops it, and the second turn finds the first."""

from __future__ import annotations

from .conftest import KERNEL_IDLE, SIZE, Lab, change_theme, run_cells, screenshot

CELLS = [
    "import pdlab\nfrom pdlab import workbench as wb\n"
    "model = pdlab.load('smollm2-135m', progress=False)\n"
    "params = pdlab.SamplingParams(max_tokens=200, ignore_eos=True)",
    "chat = wb.Chat(model, params=params, system='You are a helpful teacher.')\nchat",
]
WAIT_FOR_THE_OLD = """import asyncio
for _ in range(400):
    if not old.busy and old.conversation.engine.memory is None: break
    await asyncio.sleep(0.05)
print('old:', old.conversation.turns[-1].finish_reason, len(old.conversation.engine.requests),
      old.conversation.engine.memory)"""
RUN_AGAIN = """(source) => {
  const { content } = window.jupyterapp.shell.currentWidget;
  content.model.sharedModel.insertCell(2, { cell_type: 'code', source });
  content.widgets[0].model.sharedModel.setSource('old = chat');
  window.jupyterapp.commands.execute('notebook:run-all-cells');
}"""
LONG = "Write a long story about a lighthouse."


def test_chat_streams_stops_and_reuses_the_prefix(page, lab: Lab) -> None:
    run_cells(page, lab, "chat", CELLS)
    page.wait_for_selector(".pd-chat", timeout=120_000)
    page.wait_for_function(KERNEL_IDLE, timeout=60_000)
    answer_streams_and_escape_stops_it(page)
    second_turn_finds_the_first(page)
    shift_enter_begins_a_line_and_empty_says_nothing(page)
    what_is_too_long_is_refused_and_not_lost(page)
    for theme in ("Dark", "Light"):
        change_theme(page, theme)
        page.wait_for_timeout(300)
        screenshot(page.locator(".pd-chat"), f"chat-{theme.lower()}")
    page.set_viewport_size({"width": 620, "height": 1100})
    page.wait_for_timeout(300)
    view = page.locator(".pd-chat")
    assert view.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1")
    screenshot(view, "chat-narrow")
    page.set_viewport_size(SIZE)
    cell_run_again_ends_the_old_answer(page)


def say(page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answer_of(page) -> str:
    return page.locator(".pd-chat-model .pd-chat-text").last.text_content()


def pill_says(page, word: str) -> None:
    page.wait_for_function(
        "(word) => document.querySelector('.pd-chat .pd-pill').textContent === word",
        arg=word,
        timeout=60_000,
    )


def answer_streams_and_escape_stops_it(page) -> None:
    say(page, LONG)
    pill_says(page, "decode")
    assert page.get_by_label("Your message").input_value() == ""
    lengths = []
    for _ in range(3):
        lengths.append(len(answer_of(page)))
        page.wait_for_function(
            "(n) => [...document.querySelectorAll('.pd-chat-model .pd-chat-text')].at(-1)"
            ".textContent.length > n",
            arg=lengths[-1],
            timeout=30_000,
        )
    assert lengths == sorted(set(lengths))
    page.wait_for_selector(".pd-chat-cells i[data-kind='decode']", timeout=60_000)
    screenshot(page.locator(".pd-chat"), "chat-streaming")
    page.get_by_label("Your message").focus()
    page.keyboard.press("Escape")
    pill_says(page, "ready")
    stopped = answer_of(page)
    assert 0 < len(stopped) < 600
    page.get_by_text("stopped", exact=True).wait_for()
    page.wait_for_timeout(500)
    assert answer_of(page) == stopped


def second_turn_finds_the_first(page) -> None:
    say(page, "Go on.")
    pill_says(page, "decode")
    assert page.locator(".pd-chat-part[data-state='cached']").count() >= 2
    page.get_by_role("button", name="Stop").click()
    pill_says(page, "ready")
    first, second = page.locator(".pd-chat-turns .pd-num:nth-child(4n+3)").all_text_contents()
    assert first.startswith("0 + ")
    cached, computed = map(int, second.split(" + "))
    assert cached > computed
    assert page.locator(".pd-chat-cells i[data-kind='kept']").count() >= 2


def shift_enter_begins_a_line_and_empty_says_nothing(page) -> None:
    box = page.get_by_label("Your message")
    box.fill("   ")
    box.press("Enter")
    assert page.get_by_role("button", name="Send").is_disabled()
    box.fill("one")
    box.press("Shift+Enter")
    box.type("two")
    assert box.input_value() == "one\ntwo"
    box.fill("")
    assert page.locator(".pd-chat").get_attribute("data-turns") == "2"
    assert page.locator(".pd-chat-message").is_hidden()


def what_is_too_long_is_refused_and_not_lost(page) -> None:
    box, text = page.get_by_label("Your message"), "no " * 9000
    box.fill(text)
    page.get_by_role("button", name="Send").click()
    page.get_by_text("more than the 8192 that fit").wait_for(timeout=30_000)
    pill_says(page, "ready")
    assert box.input_value() == text
    assert page.locator(".pd-chat").get_attribute("data-turns") == "2"
    box.fill("")


def cell_run_again_ends_the_old_answer(page) -> None:
    """The old view goes, so its answer ends; the new widget is empty, and the kernel is free."""
    say(page, LONG)
    pill_says(page, "decode")
    page.evaluate(RUN_AGAIN, WAIT_FOR_THE_OLD)
    page.get_by_text("old: abort 0 None").wait_for(timeout=60_000)
    pill_says(page, "ready")
    assert page.locator(".pd-chat").get_attribute("data-turns") == "0"
