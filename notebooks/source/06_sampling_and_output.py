# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 06 From logits to text: sampling, constraints, streaming
#
# **The question.** The model never writes a word. At each step it gives 49,152 numbers, one for each
# token it knows. Who decides which word you read?
#
# You will draw tokens by hand, cut distributions, count what a grammar forbids, follow half a
# character on its way to the reader, let a slow reader wait, and search with several beams.
#
# *About 75 minutes. Before this: [01 Prefill](01_prefill.ipynb), [02 Decode](02_decode.ipynb), [03 Paged KV](03_paged_kv.ipynb).*

# %%
import textwrap

import pdlab
from pdlab import EngineConfig, SamplingParams
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "logits", "sampling", "temperature", "greedy", "logits processor", "top-k", "top-p", "min-p",
    "repetition penalty", "seed", "constraint", "token mask", "automaton", "detokenizer",
    "stop string", "back-pressure", "log probability", "beam search",
)  # fmt: skip

# %%
model = pdlab.load("smollm2-135m")
encode, token_text = model.tokenizer.encode, model.tokenizer.token_text

# %% [markdown]
# ## 1. One token by hand
#
# Softmax turns logits into probabilities. Lay the tokens side by side in the order of their ids, each
# as wide as its probability: together they fill the line from 0 to 1. Then throw a **dart**, one
# uniform number, and take the token that it hits. That is all there is to a draw (*inverse transform
# sampling*).

# %%
from pdlab.sampling import uniform
from pdlab.workbench import sampling_experiments as sampling

sure, unsure = sampling.places(model, ["The capital of France is", "Once upon a time there was a"])
for place in (sure, unsure):
    top = place.chances.topk(5)
    shown = ", ".join(f"{token_text(i)!r} {p:.1%}" for p, i in zip(*map(list, top), strict=True))
    print(f"{place.prompt} ...  {shown}")
edges = sure.chances.cumsum(0)
best = int(sure.chances.argmax())
print(
    f"{token_text(best)!r} is token {best:,}: it lies from {edges[best - 1]:.4f} to {edges[best]:.4f}"
)
for seed in range(4):
    dart = uniform(seed, 0)
    token = int((edges <= dart).sum())
    print(f"seed {seed}: the dart {dart:.4f} hits {token_text(token)!r}")

# %% [markdown]
# **Temperature** divides the logits before softmax. Below 1 the tall get taller, above 1 all come
# nearer to each other; at 0 the best token is simply taken (*greedy*). The dart stays the same.

# %%
guess.predict(
    "After “The capital of France is”, of 1,000 draws at temperature 1.5: how many are the best token?",
    key="best",
    unit="draws",
)

# %%
checks = sampling.best_token_draws(sure, [0.7, 1.0, 1.5])
for c in checks:
    print(
        f"temperature {c.temperature}: stated {c.stated:6.1%}, drawn {c.drawn} of {c.num}"
        f" (expected {c.num * c.stated:.0f}, give or take {c.spread:.0f})   measured"
    )
guess.compare("best", checks[-1].drawn, "draws")

# %% [markdown]
# The counts agree with what was stated, up to the chance that is in any count. And temperature is no
# "creativity": above 1 it moves probability from the head to the tail, below 1 the other way.
#
# ## 2. The chain
#
# Between the logits and the dart stands a **chain** of processors, always in this order:

# %%
from pdlab.sampling.chain import MASKS, NUDGES, SHAPES

for kind, links in (("nudge", NUDGES), ("forbid", MASKS), ("shape", SHAPES)):
    print(f"{kind:7}", " -> ".join(link.name for link in links))

# %% [markdown]
# *Nudges* move single logits: `logit_bias` adds a number to those you name, the penalties look at what
# is already written. *Masks* set logits to minus infinity: unwanted words, end tokens before
# `min_tokens`, what a grammar rules out. *Shapes* are for random draws only; a greedy sequence takes its
# best token before them. The order matters: of the shapes the temperature comes first, so at 1.5 `top_p`
# sees a flattened distribution and keeps more.
#
# Three filters cut the tail. **top_k** keeps a fixed number of tokens. **top_p** keeps the fewest
# that have probability p together. **min_p** keeps those that have at least a part of the best token's
# probability. (`typical_p` keeps those whose surprise is nearest to the expected one.) How many does
# top_p = 0.9 leave at our two places?

# %%
guess.predict("Tokens left by top_p = 0.9 after “The capital of France is”", key="sure")

# %%
guess.predict("Tokens left by top_p = 0.9 after “Once upon a time there was a”", key="unsure")

# %%
from pdlab.workbench.figures import sampling as pictures

settings = {"top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9}, "min_p 0.05": {"min_p": 0.05}}
left = {place.prompt: sampling.cuts(place, settings) for place in (sure, unsure)}
wb.show(pictures.filter_cuts({p.prompt: p.chances for p in (sure, unsure)}, left))

# %%
for prompt, found in left.items():
    print(prompt, "...")
    for cut in found:
        print(f"    {cut.name:11} {cut.num_left:4} tokens, {cut.mass_left:.1%} of the probability")
guess.compare("sure", left[sure.prompt][1].num_left, "tokens", kind="counted")
guess.compare("unsure", left[unsure.prompt][1].num_left, "tokens", kind="counted")
for place, ranks in ((sure, slice(40, 50)), (unsure, slice(50, 60))):
    words = [token_text(int(i)) for i in place.chances.topk(60).indices[ranks]]
    print(f"ranks {ranks.start + 1} to {ranks.stop} after {place.prompt!r}:", *words)

# %% [markdown]
# Look at the words: the fixed 50 lets in the first list and leaves the second out. top_p and min_p
# follow the distribution, and disagree about what its tail is: top_p looks at the sum, min_p at the best
# token, so where no token stands out, min_p is the stricter of the two.
#
# Now explore. Move the temperature, then cut; throw the dart again; take the token, and go on.

# %%
wb.SamplingLab(model, unsure.prompt, SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1))

# %% [markdown]
# ## 3. The sign of a penalty
#
# To make a token less likely, divide its logit, say by 1.3: so reads the formula of Keskar et al.
# (2019, CTRL, section 4.1). But a logit may be negative. What does dividing do then?

# %%
quiz = (
    "Q: What is the capital of France?\nA: Paris.\n"
    "Q: What is the capital of Spain?\nA: Madrid.\nQ: What is the capital of Italy?\nA:"
)
[place] = sampling.places(model, [quiz])
moves = sampling.repetition_moves(model, place, 1.3)
guess.predict(
    f"Of the {len(moves)} different tokens in the prompt, how many does dividing move UP?",
    ["none", "some", "all"],
    key="up",
)

# %%
print(f"the first 3 and last 6 of {len(moves)}")
print("token         logit   divided by 1.3   the engine's rule")
for m in [*moves[:3], *moves[-6:]]:
    wrong = "  up!" if m.divided > m.logit else ""
    print(f"{m.text!r:10} {m.logit:8.2f} {m.divided:10.2f}{wrong:5} {m.penalized:16.2f}   measured")
up = sum(m.divided > m.logit for m in moves)
answer = "some" if 0 < up < len(moves) else "all" if up else "none"
guess.compare("up", answer, kind="counted", note=f"To be exact: {up}.")

# %% [markdown]
# So the rule has two halves: divide what is positive, *multiply* what is negative. Where zero lies is
# not even meaningful (add 5 to all logits, and the probabilities are the same), so how hard this
# penalty hits depends on the model. **frequency_penalty** and **presence_penalty** subtract instead,
# and have no such problem. They differ in what they count: the repetition penalty looks at prompt and
# output, the other two at the output alone, once for each time or once at all.
#
# ### "Repetition control and grammar are post-processing"
#
# One often reads this. Try it: let the model write freely, and check afterwards.

# %%
date = r"(19|20)\d\d-(0\d|1[0-2])-[0-3]\d"
moon = "The first moon landing was on "
guess.predict(
    "Of 12 free texts at temperature 1, how many begin with YYYY-MM-DD?",
    ["0 to 3", "4 to 8", "9 to 12"],
    key="free",
)

# %%
import re

free = SamplingParams(temperature=1.0, n=12, seed=1, max_tokens=11)
with pdlab.Engine(model) as engine:
    texts = [c.text for c in engine.generate(moon, free)[0].completions]
print(textwrap.fill("  |  ".join(texts), 92))
fits = [text for text in texts if re.match(date, text)]
bins = {3: "0 to 3", 8: "4 to 8", 12: "9 to 12"}
answer = next(name for most, name in bins.items() if len(fits) <= most)
guess.compare("free", answer, kind="counted", note=f"To be exact: {len(fits)}.")

# %% [markdown]
# Every text that does not fit was computed for nothing, all its decode steps, and a greedy text can be
# retried for ever: it is always the same. The engine asks *before* it draws: at each step the
# mask leaves only tokens that can still lead to a valid text. How much does it take away?

# %%
from pdlab.workbench.constraint_lab_data import run_constrained

params = SamplingParams(temperature=1.0, seed=1, regex=date)
run = run_constrained(model, encode(moon), params, backend="pdlab")
steps = sampling.tries_without_mask(run, model)
wb.show(pictures.mask_mass(steps))

# %%
chance = 1.0
for step in steps:
    chance *= step.mass_left
print(f"the text: {run.output.text!r}")
print(f"all {len(steps)} draws fit by themselves: {chance:.1%}, once in {1 / chance:,.0f} times")
print(f"drawing again at a step until it fits: {sum(s.tries for s in steps)} draws   measured")

# %% [markdown]
# (Once in so many times *along this text*; "2 of 12" counted texts that are any date.)
#
# To draw again *at one step* gives the same distribution as the mask, and costs only draws (until
# the allowed part is one in a million, or the choice is greedy). To throw away whole texts costs decode
# steps. And it is not the same distribution: whole texts keep the model's preference among the
# *complete* valid texts, while a mask decides step by step and cannot see that a start it likes leads
# nowhere good. Penalties cannot be done afterwards at all: what they change is the odds.
#
# ## 4. Seeds
#
# The dart depends on the request's seed, on how many tokens it has put out, and with `n` on which of the
# texts it is; on nothing else: not on the batch, the time, or whether the request was preempted. So the
# same request gives the same text, alone or in company?

# %%
others = ["One, two, three, four,", "Hello!", "The capital of France is"]
seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
for exact in (False, True):
    c = sampling.in_company(model, unsure.prompt, others, seeded, exact=exact)
    same = "the same tokens" if c.alone == c.beside else "other tokens"
    print(
        f"exact={exact!s:5} {same}; logits differ by {c.logit_difference:.1g} at most;"
        f" {c.flip_chance:.2%} of darts would hit another token   measured"
    )

# %% [markdown]
# (Both numbers are the worst of the steps.) The darts are the same; the *line they are thrown at* may
# not be. With more rows, the CPU adds in another order, and the last bits of the logits change.
# The edge of a token moves by the sum of all changes before it, and there may be 49,151 tokens before
# it. Now and then an edge moves across the dart. From there on the texts part.
# In exact mode (lesson 01) the logits are bit-equal, and so is the text.
#
# ## 5. Constraints
#
# How does the engine know which of 49,152 tokens may come? A regular expression becomes an
# **automaton** over bytes, once. Then a token is allowed in a state if all its bytes have somewhere to
# go. Each state's mask is computed once, and kept.

# %%
from pdlab.sampling.regex import compile_regex

automaton = compile_regex(date)
print(f"{automaton.num_states} states; accepts 1969-07-20: {automaton.matches(b'1969-07-20')},")
print(
    f"1969-07-4: {automaton.matches(b'1969-07-4')}, 1969-13-20: {automaton.matches(b'1969-13-20')}"
)

# %% [markdown]
# Walk through the run: which tokens the mask lets through, what the model would have said, and where
# in the automaton the text stands. Then change the expression, or choose a JSON schema.

# %%
wb.ConstraintLab(model, moon, params, backend="pdlab")

# %% [markdown]
# ### Valid is not true
#
# The shape of an answer is right when the pattern is. Is the answer?

# %%
import datetime


def is_day(text):
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


loose = SamplingParams(temperature=1.0, seed=0, n=12, regex=r"\d{4}-\d\d-\d\d")
with pdlab.Engine(model) as engine:
    dates = [c.text for c in engine.generate(moon, loose)[0].completions]
print(textwrap.fill(" ".join(dates), 92))
print("in no calendar:", *[d for d in dates if not is_day(d)])
print("right (1969-07-20):", dates.count("1969-07-20"))
for name, found in (("free", texts), ("constrained", dates)):
    year = sum("1969" in text for text in found)
    print(f"name 1969: {year} of {len(found)} {name} texts   counted")

# %% [markdown]
# All of them match the pattern. Some are no days at all. And compare the years with those of the free
# texts: a model may know a fact in one form ("20 July 1969") and lose it when it must use another. A
# constraint makes text *parsable*, not true. It can even make it worse.
#
# ### May come, not must end

# %%
guess.predict(
    "Greedy, with json_schema={'type': 'number'} and max_tokens=24: why does the text end?",
    ["the number is complete", "the model chooses to end it", "max_tokens"],
    key="end",
)

# %%
price = "The price in euros: "
bounded = {"type": "integer", "minimum": 0, "maximum": 1000}
asked = [{"json_schema": {"type": "number"}}, {"json_schema": bounded}, {"regex": r"\d+(\.\d\d)?"}]
with pdlab.Engine(model) as engine:
    for knob in asked:
        out = engine.generate(price, SamplingParams(max_tokens=24, **knob))[0]
        print(f"{out.text:26} finish_reason {out.finish_reason!r}, stop_reason {out.stop_reason!r}")
        if knob is asked[0]:
            reason = out.finish_reason
guess.compare("end", "max_tokens" if reason == "length" else "the model chooses to end it")

# %% [markdown]
# (`stop_reason` is "constraint" where the text is complete and nothing may follow.)
#
# A number may always go on with one more digit, so the grammar never forces an end, and this model
# likes zeros. A text that ends by `length` may be *invalid*: an object cut in the middle is no JSON. So
# look at `finish_reason` before you parse, give bounds (`maximum`, `maxLength`, `maxItems`), and leave
# enough `max_tokens`.
#
# And know your dialect. The same pattern, in our masker and in llguidance:

# %%
digits = SamplingParams(regex=r"\d+")
ours, theirs = (
    set(sampling.allowed_at_start(model, digits, backend)) for backend in ("pdlab", "llguidance")
)
print(f"tokens that may begin \\d+: {len(ours)} by pdlab, {len(theirs)} by llguidance   counted")
print("only there:", *sorted(token_text(i) for i in theirs - ours))

# %% [markdown]
# Ours reads `\d` as 0 to 9. To llguidance, as to Python's `re`, it is any decimal digit in Unicode,
# such as ٣. Such characters take several bytes, and so the tokens of their first bytes are allowed. Write `[0-9]` if you mean that.
#
# ## 6. From tokens to text
#
# A token is a piece of *bytes*, and a character may take several tokens. Also, the beginning of a stop
# string looks like any text. So the engine holds back what is not certain. Step through:

# %%
wb.StreamView.from_tokens(
    model, encode("世界, café, 😀 Stop or STOP! Never seen"), stop="STOP!", step=1
)

# %% [markdown]
# Why not simply decode each token and send it? Let a model write emoji, and do just that.

# %%
guess.predict(
    "Of 16 tokens of emoji, each decoded alone, how many come out broken, as “�”?",
    ["none", "about half", "nearly all, or all"],
    key="lost",
)

# %%
from pdlab.workbench import output_experiments as output

with pdlab.Engine(model) as engine:
    emoji = engine.generate("Write emojis: 😀 😃 😄", SamplingParams(max_tokens=16))[0]
pieces = output.token_by_token(model.tokenizer, emoji.token_ids)
print("token by token:", "".join(pieces))
print("the engine:    ", emoji.text)
broken = sum(output.num_lost([piece]) > 0 for piece in pieces)
answer = "nearly all, or all" if broken > 12 else "about half" if broken else "none"
guess.compare("lost", answer, kind="counted", note=f"To be exact: {broken}.")

# %% [markdown]
# (Where the engine's text ends in a “�”, `max_tokens` cut the last character
# in two.) And the stop string: a naive loop sends each piece, then looks whether the text now ends with
# the stop string. By then it is too late.

# %%
with pdlab.Engine(model) as engine:
    counted = engine.generate("One, two, three,", SamplingParams(max_tokens=14))[0]
stop = " seven, eight"
leak = output.stop_leak(output.token_by_token(model.tokenizer, counted.token_ids), stop)
print(f"the stop string:        {stop!r}")
print(f"sent by the naive loop: {leak.naive!r}")
print(f"sent by the engine:     {leak.held_back!r}")
print(f"leaked:                 {leak.leaked!r}")

# %% [markdown]
# ## 7. Streaming, and waiting
#
# `engine.stream` yields text as it becomes certain. What a reader feels is the time to the first
# token (**TTFT**) and the gaps after it (**ITL**, inter-token latency).

# %%
from itertools import pairwise
from statistics import median

wb.warm_up(model)
short, pieces, times = SamplingParams(max_tokens=16, ignore_eos=True), [], []
with pdlab.Engine(model) as engine:
    for chunk in engine.stream(unsure.prompt, short):
        pieces.append(chunk.text)
        times += chunk.times_s
    ttft = times[0] - engine.trace.requests["r0"].arrival_s
gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
print("|".join(pieces))
print(f"TTFT {ttft * 1e3:.0f} ms   measured")
print(f"ITL {median(gaps):.0f} ms (median of {len(gaps)}), {max(gaps):.0f} ms at most   measured")

# %% [markdown]
# Two readers share an engine, and want 16 tokens each. One reads at once. The other takes a third of a
# second over each chunk, and no more than 2 chunks may wait for it. Does the engine go on for both?

# %%
guess.predict(
    "When the fast reader has its 16 tokens, the slow one's request has computed",
    ["16 too", "8 to 15", "less than 8"],
    key="slow",
)

# %% [markdown]
# (`astream` is the stream for an event loop, and a notebook has one: so `await` stands here without
# more ado.)

# %%
[alone] = await output.read_together(model, [output.Reader("alone", unsure.prompt)], short)
fast, slow = await output.read_together(
    model,
    [
        output.Reader("fast", unsure.prompt),
        output.Reader("slow", sure.prompt, delay_s=0.33, max_unread=2),
    ],
    short,
)
for r in (alone, fast, slow):
    print(f"{r.name:5} computed after {r.computed_s:.1f} s, read after {r.read_s:.1f} s   measured")
num = slow.num_computed(fast.computed_s)
answer = "16 too" if num == 16 else "8 to 15" if num >= 8 else "less than 8"
guess.compare("slow", answer, kind="counted", note=f"To be exact: {num}.")

# %% [markdown]
# The slow one had what it had read, and the 2 chunks that may wait. Then its request is **paused**: it
# stays in memory and skips steps, so unread text does not pile up, and the others go on without it. This
# is *back-pressure*. (Where the fast one takes longer than alone, it is for the other's prefill, and for
# steps that computed a token of each.)
#
# A reader who leaves should not be computed for, either. Closing the stream aborts the request, which
# gives its blocks back, and no later step runs it:

# %%
with pdlab.Engine(model) as engine:
    before = engine.pool.num_free
    stream = engine.stream(unsure.prompt, SamplingParams(max_tokens=500))
    for _ in range(5):
        next(stream)
    during = engine.pool.num_free
    stream.close()
    freed = engine.pool.num_free
    engine.generate(sure.prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    ran = len(engine.trace.sequence_steps("r0"))
print(f"free blocks: {before} before, {during} while it ran, {freed} after closing   counted")
print(f"steps that ran it: {ran} of {len(engine.trace.steps)}   counted")

# %% [markdown]
# ## 8. Many answers
#
# `n=4` draws four texts. Their prompt is computed once, and its blocks are shared (lesson 03).

# %%
with pdlab.Engine(model, EngineConfig(block_size=4)) as engine:
    many = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    story = "In a village at the edge of the desert there lived an old clockmaker who"
    for c in engine.generate(story, many)[0].completions:
        print(f"{c.index}: {c.text!r}")
    blocks = output.blocks_of(engine.trace.steps[-1])
print(f"{blocks.held} blocks held at the end; without sharing {blocks.unshared}   counted")

# %% [markdown]
# **Beam search** also keeps four texts, but no dart is thrown. Each step extends every beam by every
# token, and the four *most probable* continuations of all go on. A beam with two children is forked:
# they share all blocks, and only the block that is being filled is copied. A cache that is one tensor
# a beam must be put in a new order instead, whole, at each step.

# %%
from pdlab.engine import beam_search

sea = "My favourite thing about the sea is"
beams = beam_search(model, sea, beam_width=4, max_tokens=40)
print(f"{beams.num_forks} forks, {beams.num_copies} blocks copied on write   counted")
print(f"a reordered cache would copy {output.copied_by_reordering(beams)} blocks   counted")
print(f"most blocks held: {beams.peak_blocks}; without sharing {beams.peak_blocks_unshared}")
guess.predict(
    "Which text is the most probable one, by the model's own log probability a token?",
    ["greedy", "a random draw", "beam search"],
    key="likely",
)

# %%
long = {"max_tokens": 40}
written = output.sampled_texts(
    model,
    sea,
    [
        ("greedy", SamplingParams(**long)),
        ("a random draw", SamplingParams(temperature=1.0, top_p=0.9, seed=2, **long)),
    ],
)
written.append(output.beam_text("beam search", beams))
for t in written:
    print(f"{t.name}: {t.logprob_per_token:.2f} a token, {t.repeated:.0%} of trigrams repeated")
    print(textwrap.indent(textwrap.fill(t.text.strip().replace("\n", " / "), 92), "    "))
guess.compare("likely", max(written, key=lambda t: t.logprob_per_token).name)

# %% [markdown]
# Beams find what greed passes by: a first token that is not the best, and leads to better ones. Which of
# the texts would you rather read? For open-ended text people do not write what is most probable, and
# texts found by search are duller and repeat themselves more (Holtzman et al. 2020, *The Curious Case
# of Neural Text Degeneration*). Where there is one right answer, as in translation, beams help.
#
# ## 9. A chat
#
# A chat is all of this at once, and the prefix cache besides: each turn sends the whole conversation
# again, and finds the K and V of all the full blocks of what was said (lesson 03). What stands in the
# last block, not yet full, is computed again. Try it; in a saved page you see two turns.

# %%
guide = (
    "You are a friendly travel guide who knows the museums, churches, parks and markets of Europe."
)
chat = wb.Chat(
    model,
    params=SamplingParams(max_tokens=32, temperature=0.7, seed=5),
    system=guide + " Answer in one or two short sentences, and say what is near.",
)
chat.say(
    "We are three friends in Rome for one rainy day, and we love paintings. What should we see?"
)
chat.say("Where can we eat pizza?")
chat

# %%
for number, turn in enumerate(chat.conversation.turns, 1):
    print(
        f"turn {number}: {turn.prompt_tokens} prompt tokens, {turn.cached_tokens} cached,"
        f" {turn.new_tokens} computed; TTFT {turn.ttft_s * 1e3:.0f} ms   measured"
    )
chat.close()

# %% [markdown]
# ## 10. What does it cost?
#
# `pdlab bench sampling` decodes a batch with many mixes of parameters and reads the engine's own
# clock. This is a recorded table; run the command to have your machine's.

# %%
from pdlab.bench.sampling import SamplingCosts
from pdlab.shipped import shipped

costs = SamplingCosts.load(shipped("data") / "measured" / "sampling.json")
wb.show(pictures.sampling_costs(costs))

# %% [markdown]
# Every mix decodes a batch of the same prompts; what differs is the way from logits to tokens.
# ("everything": all links at once; "every row another": each sequence has another mix. Small
# differences are noise.) A plain draw costs little; sorting, and looking at the raw logits too, cost
# more. Masks (here llguidance's) are made one sequence at a time. On a GPU the model's part of a step is
# far shorter, while masks are still made by the CPU: servers hide this work behind the computing.
#
# ## Exercises
#
# **1. min_p.** `logits` is a tensor [vocab_size]. Return a tensor of bool: which tokens have at least
# `part` of the best token's probability?


# %%
def keeps(logits, part):
    # BEGIN SOLUTION
    chances = logits.softmax(-1)
    return chances >= part * chances.max()
    # END SOLUTION


# %%
@wb.check("min_p")
def min_p_check():
    import torch

    from pdlab.workbench import sampling_experiments as sampling

    tie = keeps(torch.zeros(3), 1.0)
    assert torch.is_tensor(tie), f"return a tensor; you returned {tie!r}"
    assert tie.dtype == torch.bool, f"return a tensor of bool; you returned {tie!r}"
    assert tie.all(), "three tokens alike and part 1: each has at least as much as the best"
    yours = keeps(torch.tensor([0.5, 0.25, 0.2, 0.05]).log(), 0.3)
    right = [True, True, True, False]
    hint = "0.5, 0.25, 0.2, 0.05 and part 0.3: what has 0.15 or more stays"
    assert yours.tolist() == right, f"{hint}; you returned {yours!r}"
    for place in sampling.places(model, ["The capital of France is", "Once upon a time"]):
        for part in (0.01, 0.1, 0.5):
            engine_keeps = place.follow(min_p=part).final > 0
            wrong = int((keeps(place.logits, part) != engine_keeps).sum())
            assert not wrong, f"“{place.prompt}”, part {part}: {wrong} tokens unlike the engine's"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# chances = logits.softmax(-1)
# return chances >= part * chances.max()
# ```
#
# The engine never computes the probabilities: `p >= part * p_best` is the same as
# `logit >= logit_best + log(part)`.
#
# </details>

# %% [markdown]
# **2. A link of your own.** No token twice in a row: return the logits with the last token of the
# output forbidden. (`output_ids` is empty at first. A function that depends on nothing but its
# arguments survives preemption.)


# %%
def no_echo(logits, prompt_ids, output_ids):
    # BEGIN SOLUTION
    if output_ids:
        logits[output_ids[-1]] = -float("inf")
    return logits
    # END SOLUTION


# %%
@wb.check("no token twice in a row")
def no_echo_check():
    from itertools import pairwise

    import torch

    from pdlab.workbench.sampling_experiments import OwnProcessor

    for output_ids, right in (([], [1.0, -2, 3, 0]), ([2, 1], [1.0, -float("inf"), 3, 0])):
        yours = no_echo(torch.tensor([1.0, -2, 3, 0]), [3], output_ids)
        wrong = f"logits [1, -2, 3, 0] and output {output_ids}: you returned {yours!r}"
        assert torch.is_tensor(yours) and yours.tolist() == right, wrong  # noqa: PT018
    mine = OwnProcessor("no_echo", no_echo)
    with pdlab.Engine(model) as small:
        for own in ((), (mine,)):
            params = pdlab.SamplingParams(max_tokens=12, ignore_eos=True, logits_processors=own)
            out = small.generate("ha ha ha ha ha ha ha", params)[0]
            print(f"{'with' if own else 'without'} it: {out.text!r}")
    twice = [a for a, b in pairwise(out.token_ids) if a == b]
    assert not twice, f"token {twice[0]} came twice in a row"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# if output_ids:
#     logits[output_ids[-1]] = -float("inf")
# return logits
# ```
#
# In a program of your own, write a `LogitsProcessor` with `name` and `process`, which gets all rows at
# once, and pass it in `SamplingParams(logits_processors=...)`.
#
# </details>

# %% [markdown]
# **3. Hold back.** `text` does not contain the stop string. Which end of it must be held back, because
# the stop string may be beginning there? Return the longest such end, or "".


# %%
def held_back(text, stop):
    # BEGIN SOLUTION
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return text[-length:]
    return ""
    # END SOLUTION


# %%
@wb.check("hold back")
def held_back_check():
    import random

    from pdlab.engine.stops import StopFinder

    yours = held_back("see you, ST", "STOP")
    assert yours == "ST", f"“ST” may become “STOP”; you returned {yours!r}"
    draw = random.Random(0)
    for _ in range(300):
        stop = "".join(draw.choices("ab", k=draw.randint(1, 5)))
        finder, text = StopFinder([stop]), ""
        while finder.found is None and len(text) < 30:
            piece = "".join(draw.choices("ab", k=draw.randint(1, 3)))
            finder.push(piece)
            text += piece
            got = None if finder.found else held_back(text, stop)
            right = f"after {text!r} the engine holds back {finder.held!r}, with stop {stop!r}"
            assert finder.found or got == finder.held, f"{right}; you returned {got!r}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# for length in range(min(len(text), len(stop) - 1), 0, -1):
#     if stop.startswith(text[-length:]):
#         return text[-length:]
# return ""
# ```
#
# The longest first: with the stop string `aab` and the text `aa`, holding back one `a` would let the
# other go too soon.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **vLLM**'s sampler has much the same chain in another order: bad words, min_tokens and logit bias,
#   penalties, then temperature, min_p, and top_k and top_p last. Log probabilities are by default those
#   of the raw logits (`logprobs_mode="raw_logprobs"`), as here (API reference,
#   *vllm.v1.sample.sampler*). Structured output is made by xgrammar or guidance, and `auto` chooses
#   (*Structured Outputs*). `EngineCore.step` starts the model, fills the grammar's bit mask while the
#   GPU computes, and only then samples (*vllm/v1/engine/core.py*). Text is made in the API server, a
#   process of its own (*Architecture Overview*); stop strings are looked for there, in the detokenizer
#   (*vllm/v1/engine/detokenizer.py*).
# * **SGLang** introduced jumping forward: where a grammar allows only one continuation, it is appended
#   without a decode step, and tokenized anew (Yin et al. 2024, *Fast JSON Decoding for Local LLMs with
#   Compressed Finite State Machine*, LMSYS blog). Its runtime dropped that in 2025 (pull request 4032).
# * **llama.cpp** lets you set the order of its chain (`--samplers`); by default penalties come first
#   and the temperature *last*, after top_k 40, top_p 0.95 and min_p 0.05 (*llama-server*, README). Its
#   filters therefore do not see the temperature.
# * **transformers** keeps two groups in one list: processors, and for sampling the *warpers*
#   temperature, top_k, top_p, min_p, typical_p. With `do_sample=True`, top_k is 50 unless you or the
#   model say otherwise (`generation/utils.py` and `configuration_utils.py`, version 5.24).
# * **OpenAI**'s chat completions have temperature, top_p, the two subtracting penalties and logit_bias,
#   but no top_k or repetition penalty. `best_of` is a parameter of the older completions endpoint
#   (*Create completion*). In pdlab, ask for `n` texts with `logprobs=0` and choose.
#
# **Next:** many requests at once: who runs, who waits, and for how long.
