"""What speculation is measured on: text that copies, and text that does not.

Half of the copying tasks edit code, half rewrite or quote a text. The model is small and does not
always do what it is told; what matters here is how much of what it writes stands in its prompt, and
that is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdlab.engine import Prompt

_CODE = (
    """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0
""",
    """def read_scores(path):
    scores = {}
    with open(path) as file:
        for line in file:
            name, score = line.split(",")
            scores[name] = int(score)
    return scores


def best_player(scores):
    best = None
    for name in scores:
        if best is None or scores[name] > scores[best]:
            best = name
    return best
""",
    """def binary_search(numbers, wanted):
    low = 0
    high = len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == wanted:
            return middle
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1
""",
)
_EDITS = (
    "Rename the function `mean` to `average` in this code. Write out the whole code.",
    "Rename the class `Stack` to `Pile` in this code. Write out the whole code.",
    "Rename the variable `scores` to `points` in this code. Write out the whole code.",
    "Add a docstring to the function in this code. Write out the whole code.",
)
_TEXTS = (
    "Paging cuts the memory for keys and values into blocks of equal size. A sequence holds a "
    "table of the blocks that it fills, and takes another one only when the last is full. So "
    "nothing is reserved for tokens that may never come, and two sequences that begin alike can "
    "share the blocks of their common beginning.",
    "The river rises in the mountains and runs north for two hundred miles before it meets the "
    "sea. In spring the snow melts and the water is high and brown. In late summer the river is "
    "low, and children walk across it on the stones. Most of the towns stand on the eastern bank, "
    "where the ground is firm.",
    "Bread needs only flour, water, salt and yeast. Mix the flour with the water and let it rest "
    "for half an hour. Then add the salt and the yeast and knead the dough until it is smooth. "
    "Let it rise in a warm place until it has doubled, shape it, let it rise again, and bake it "
    "in a very hot oven.",
    "The museum opens at nine in the morning and closes at six in the evening. On Mondays it is "
    "closed. Tickets cost twelve euros, and six euros for students. Visitors under the age of ten "
    "enter free. Photographs are allowed in all rooms but the one on the second floor.",
)
_REWRITES = (
    "Repeat this text word for word.",
    "Repeat this text, and replace the word `river` by `stream`.",
    "Correct the spelling of this text. If it is correct, repeat it as it is.",
    "Quote the sentences of this text that a visitor should know, word for word.",
)
_QUESTIONS = (
    "What should I see on a first visit to Paris?",
    "Explain to a child why the sky is blue.",
    "Write a short story about a dog who learns to swim.",
    "What are the advantages of learning a second language?",
    "Give me three ideas for a birthday party in winter.",
    "How does a bicycle stay upright?",
    "Write a polite letter to a neighbour about noise at night.",
    "What is the difference between weather and climate?",
)


def _copies() -> Iterator[str]:
    for edit, code, rewrite, text in zip(_EDITS, _CODE, _REWRITES, _TEXTS, strict=True):
        yield f"{edit}\n\n```python\n{code}```"
        yield f"{rewrite}\n\n{text}"


TASKS: dict[str, list[Prompt]] = {
    "copy": [[{"role": "user", "content": text}] for text in _copies()],
    "chat": [[{"role": "user", "content": text}] for text in _QUESTIONS],
}
"""Eight chat prompts of each."""
