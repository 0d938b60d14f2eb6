# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 10 Speculation and overlap: several tokens for the price of one?
#
# **The question.** A decode step reads every weight to write one token, and uses each number once.
# Lesson 09 showed that a product with several rows costs little more than one with a single row. But
# the rows of one answer come one after the other: the second token cannot be computed before the first
# is known. Or can it, if somebody *guesses* the first?
#
# You will measure what a guess may cost, let the engine copy from its own prompt, do rejection sampling
# by hand, and see why the answer stays exactly the model's own. Then a model drafts for itself, and you
# find out when that loses, and why the best idea of this lesson is worth little in a full batch.
#
# *About 60 minutes. Before this: [02 Decode](02_decode.ipynb), [06 Sampling and
# output](06_sampling_and_output.ipynb), [09 Kernels and speed](09_kernels_and_speed.ipynb).*

# %%
import pdlab
from pdlab import workbench as wb
from pdlab.workbench import speculation_experiments as lab

guess = wb.Predictions()
wb.glossary(
    "speculative decoding", "draft", "n-gram", "acceptance rate", "rejection sampling",
    "self-speculation", "early exit", "overlap",
)  # fmt: skip

# %%
knobs = {"device": "cpu", "dtype": "fp32"}
model = pdlab.load("smollm2-135m", **knobs)
int8 = pdlab.load("smollm2-135m", weights="int8", progress=False, **knobs)

# %% [markdown]
# (The same model twice, since the format of its weights (lesson 09) decides what a step costs and what
# further rows do. Sections 2, 6 and 7 run on int8, the faster one; section 4 on fp32, for which a cheaper
# copy is easier to make.)
#
# ## 1. What is a wrong guess worth?
#
# Nothing, of course. So the first question is what it costs. Let an engine compute its newest token and
# a **draft** of some more behind it in one step. The drafts here are nonsense: only time is looked at.

# %%
guess.predict(
    "fp32: a step with 6 tokens instead of 1 takes how many times as long?",
    key="rows",
    unit="times",
)

# %%
costs = lab.step_costs({"fp32": model, "int8": int8})
source = "measured here in turns, medians; one sequence, some 128 tokens of context, backend cpu"
wb.show(wb.figures.step_rows(costs, source))

# %%
print("tokens in the step  " + "".join(f"{n:8}" for n in costs.seconds["fp32"]))
for name, times in costs.seconds.items():
    print(f"{name}, ms            " + "".join(f"{s * 1e3:8.1f}" for s in times.values()))
    print(f"  one more token takes {costs.slope(name):.2f} of a plain step   measured")
guess.compare("rows", costs.ratio("fp32", 6), "times")

# %% [markdown]
# The dotted line is what the same tokens would take one by one. The area between it and a curve is what
# speculation can win, and the distance of a curve from 1 is what a draft costs that is all wrong. In
# papers that distance is often taken to be nothing, which is nearly true where arithmetic is plentiful
# (a GPU, one user). On two cores it is not nothing. Keep these numbers in mind: everything below is
# decided by them.
#
# ## 2. The cheapest guesser: the text itself
#
# Somebody asks the model to correct a text. Most of what it will write stands in the prompt. So look for
# the last few tokens (an **n-gram**) in the text before, and guess that it goes on as it did there: **prompt
# lookup** (Saxena 2023). It needs no second model, and next to no time. Two tasks:

# %%
print(lab.COPY[0]["content"], "\n")
print(lab.CHAT[0]["content"])

# %%
guess.predict(
    "Correcting the text, drafts of 5 tokens: how many times as fast as plain?",
    key="copy",
    unit="times",
)

# %%
guess.predict(
    "And answering the question?",
    ["slower than plain", "about as fast", "1.3 times and more"],
    key="chat",
)

# %% [markdown]
# A draft has at most k tokens. With `auto` the engine chooses the length itself: section 5.

# %%
ways = {"plain": None} | {f"k = {k}": pdlab.PromptLookup(num_tokens=k) for k in (2, 5, 10)}
ways["auto"] = pdlab.PromptLookup(num_tokens="auto")
tasks = {
    "copy": lab.compare(int8, ways, [lab.COPY], max_tokens=96, rounds=2),
    "chat": lab.compare(int8, ways, [lab.CHAT], max_tokens=64),
}
print("task  drafts  tokens/s  speed-up  tokens a step  steps with a draft  stood   measured, int8")
for task, run in tasks.items():
    for way in ways:
        t = run.told(way)
        stood = f"{t.acceptance:.0%}" if t.num_drafts else "-"
        print(
            f"{task:5} {way:7} {run.tokens_s(way):8.1f} {t.speedup:9.2f} {t.tokens_a_step:14.2f}"
            f" {t.share:19.0%} {stood:>6}"
        )

# %%
gain = tasks["chat"].told("k = 5").speedup
answer = "1.3 times and more" if gain >= 1.3 else "about as fast"
guess.compare("copy", tasks["copy"].told("k = 5").speedup, "times")
guess.compare("chat", "slower than plain" if gain < 0.95 else answer, note=f"{gain:.2f} times.")
print("plain: ", tasks["copy"].texts["plain"][0][:180], "...")
print("k = 5: ", tasks["copy"].texts["k = 5"][0][:180], "...")

# %% [markdown]
# (If the little model gave the misspelt words back: it was asked to correct them, and it is little. Here
# only speed is looked at. *Stood* is the part of the drafted tokens that were looked at and right. Each
# step counts with the median time of those of its size, so that a busy moment of your machine does not
# spoil a line; differences below a tenth mean nothing.)
#
# On the copy nearly every step has a draft, and it is nearly always right. In the answer to the question
# hardly anything stands twice, so there is hardly a draft: little is won, and little is lost.
#
# Walk through it. Violet is what was drafted and stood, orange what the model drew itself. Boxes in the
# text show where the last tokens stood before; dots, what was copied. Then choose another run, and watch
# the point wander along the curve. The **cost ratio** c is what drafting one token takes, in plain
# steps. Move it: what if the same guesses came from a second model that takes a third of a step for
# each?

# %%
wb.SpeculationView(tasks["copy"].drafted, plain=tasks["copy"].traces["plain"], run="k = 5")

# %% [markdown]
# The dotted curve is theorem 3.8 of Leviathan et al. (2023). If a drafted token stands with probability a,
# whatever the place, a step with k of them gives (1 - a^(k+1)) / (1 - a) tokens on average: those that
# stand, and one more that the model draws itself. It takes k c + 1 plain steps, *if checking is free*.
# The dashed curve also counts what a checked token costs here (section 1), and that not every step had
# a draft. Measured points need not lie on either: a is not the same at each place, and the step with the
# bad luck may be the long one.
#
# ## 3. Why the answer does not change
#
# At temperature 0 it is plain to see. Row j of the step sees the draft's first j tokens, so its logits are
# those that plain decoding would have, *if* those tokens are right. Take the most probable token of each
# row as always, as long as it is what was drafted. The first that is not is the model's own, and good.
# What comes after it was computed for a text that will not be: it is thrown away. Its K and V stand in
# slots that are written again, and blocks that held nothing else are given back: the block table (lesson
# 03) is *rewound*.
#
# With a temperature, the model *draws*. If the draft was drawn from a distribution q and the model has
# p, keep the drafted x with probability min(1, p(x) / q(x)); else draw from what is missing, max(0, p -
# q), normalized. (Leviathan et al. 2023 and Chen et al. 2023 found this rule independently.) Five tokens
# will do to see it.

# %%
words = ["blue", "clear", "grey", "dark", "green"]
dice = lab.Rejection(p=[0.40, 0.30, 0.15, 0.10, 0.05], q=[0.65, 0.10, 0.15, 0.08, 0.02])
print("            p     q   stands with   drafted and stands   missing   drawn after a rejection")
for i, word in enumerate(words):
    p, q = dice.p[i], dice.q[i]
    print(
        f"{word:8} {p:5.2f} {q:5.2f} {min(1, p / q):10.2f} {dice.kept[i]:17.2f}"
        f" {dice.missing[i]:15.2f} {dice.residual[i]:17.2f}"
    )
print(f"a draft stands with probability {dice.acceptance:.2f}   computed")

# %%
guess.predict(
    "The drafter says 'blue' in 65 of 100 cases. How often will 'blue' come out?",
    ["65 of 100", "between 40 and 65", "40 of 100", "less than 40"],
    key="blue",
)

# %%
import numpy as np

rng = np.random.default_rng(0)


def draw_one():
    x = rng.choice(5, p=dice.q)  # the drafter
    if rng.random() < min(1, dice.p[x] / dice.q[x]):
        return x
    return rng.choice(5, p=dice.residual)


counts = np.bincount([draw_one() for _ in range(20_000)], minlength=5).tolist()
wb.show(wb.figures.rejection_figure(dice, words, counts))

# %%
far = max(abs(n / 20_000 - p) for n, p in zip(counts, dice.p, strict=True))
print("came  ", "  ".join(f"{w} {n / 20_000:.3f}" for w, n in zip(words, counts, strict=True)))
print("p     ", "  ".join(f"{w} {p:.3f}" for w, p in zip(words, dice.p, strict=True)))
print(f"furthest apart: {far:.3f}; by chance alone some 0.003 is usual, 0.01 very rare   counted")
guess.compare("blue", "40 of 100", kind="counted", note=f"{counts[0] / 200:.1f} of 100.")

# %% [markdown]
# The picture is the proof. The violet bar of a token is min(p, q): that much comes out through drafts.
# Where q is too small, p is not reached, and orange is the rest. How often is something rejected? In as
# many cases as the violet bars leave open: 1 minus their sum. How much orange is there? Violet and orange
# together are p, which adds up to 1: again 1 minus the sum of the violet. So there are just as many draws
# after a rejection as there is orange to fill, and they are shared out as the orange is. No approximation,
# whatever q is: a bad drafter makes it slow, never wrong.
#
# A lookup has no q, it is sure: q(x) = 1. Then x stands with p(x). This engine does that by letting the
# model draw in each row *as it would have done anyway*, with the same random number, and going on while
# it draws what was guessed. So with a lookup the tokens are the very same as without a draft, even at a
# temperature. (With a drafter that draws, they are other draws from the same p.)

# %%
warm = lab.compare(
    int8, {"plain": None, "k = 5": ways["k = 5"]}, [lab.CHAT], 40, temperature=0.8, seed=11
)
print("plain: ", warm.texts["plain"][0])
print("k = 5: ", warm.texts["k = 5"][0])
print("\ntokens that are those of plain decoding   counted")
print(f"  temperature 0.8: {warm.num_equal('k = 5')} of {len(warm.token_ids['k = 5'][0])}")
for task, run in tasks.items():
    for way in run.drafted:
        print(f"  {task}, {way}: {run.num_equal(way)} of {len(run.token_ids[way][0])}")

# %% [markdown]
# (If a line says less than all: products with several rows may add up in another order than with one,
# and so round otherwise in the last digit. Where two tokens are nearly tied, that decides; the text goes
# on as another one of the same model. It is the batch's doing, not the draft's: any batching does it.
# `EngineConfig(exact=True)` gives up speed for the same bits always, and there they are.)
#
# ## 4. The model drafts for itself
#
# Where nothing can be copied, somebody has to think. A model of a tenth of the size would do, if there
# is one with the same vocabulary (`pdlab.DraftModel`). Otherwise the model itself, made cheaper
# (**self-speculation**):
#
# * **its weights in 4 bits** (`SelfDraft`): nearly the same opinions, fewer bytes to read;
# * **its first layers only** (`EarlyExit`): 20 of 30, then straight to the head (an **early exit**).
#
# Each of the three writes a draft as any model writes: a token after the other, a pass for each, with K
# and V of its own. So it takes memory, and has to compute the prompt, too, before its first guess.

# %%
guess.predict(
    "Which of the two drafters is right more often?", ["4 bits", "20 layers"], key="right"
)

# %%
guess.predict(
    "Answering the question in fp32, how many of the two are faster than plain decoding?",
    ["none", "one", "both"],
    key="faster",
)

# %%
drafters = {
    "4 bits": pdlab.SelfDraft("int4", num_tokens=4),
    "20 layers": pdlab.EarlyExit(20, num_tokens=3),
}
own = lab.compare(model, {"plain": None} | drafters, [lab.CHAT], max_tokens=32)
told = {name: own.told(name) for name in drafters}
source = "measured here, fp32, one question"
wb.show(wb.figures.acceptance_by_position(told, source))

# %%
wb.show(wb.figures.predicted_speedups(told, source))
for name, t in told.items():
    print(
        f"{name:10} stood {t.acceptance:4.0%} of those looked at; c = {t.cost_ratio:.2f};"
        f" a checked token {t.check_slope:.2f} of a step; measured {t.speedup:.2f} times"
    )
better = max(told, key=lambda name: told[name].acceptance)
guess.compare("right", better)
faster = sum(t.speedup > 1 for t in told.values())
guess.compare("faster", ["none", "one", "both"][faster])

# %% [markdown]
# * **4 bits** is right nearly always, and that flatters it: this model comes in a 4-bit file, so its
#   layers *are* on that grid already (lesson 09). What a drafter costs is a matter of bytes. But it is
#   small, and other things in a step than its weights do not shrink: so c is larger than the bits say.
# * **20 layers** costs nearly two thirds of a step by its layers, and the head on top, and is
#   mostly wrong: nobody trained layer 20 to speak. Most of a step for a guess that stands one time in six
#   is how speculation *loses*, and the formula said so before. LayerSkip (Elhoushi et al. 2024)
#   trains a model so that its early layers can speak; then it is another matter.
#
# When does a drafter pay at all? With one token of draft, it takes c + 1 (and the check) for 1 + a tokens.
# So a must be more than c and what a checked token costs, together. A hundred percent right at the price
# of the model itself wins nothing.

# %%
rows = [(f"copy, {w}", tasks["copy"].told(w)) for w in ("k = 2", "k = 5", "k = 10")]
rows += [(f"chat, {w}", tasks["chat"].told(w)) for w in ("k = 2", "k = 5", "k = 10")]
rows += [(f"chat, {name}", t) for name, t in told.items()]
print("                   stood      c   a checked token   with a draft   speed-up   measured")
for name, t in sorted(rows, key=lambda row: -row[1].acceptance):
    print(
        f"{name:17} {t.acceptance:6.0%} {t.cost_ratio:7.3f} {t.check_slope:12.2f}"
        f" {t.share:15.0%} {t.speedup:11.2f}"
    )

# %%
print("\n".join(lab.recorded_lines()))

# %% [markdown]
# (The last table is all that `pdlab bench speculation` measured, on other prompts and with `auto`, too. The
# theorem alone promises too much wherever checking costs. The second prediction, which knows what checking
# took, is near the measurement; what is left is mostly that the chance to stand is not the same at each
# place, as the formula takes it to be. Look at c for an int8 target: its plain step takes hardly longer than
# one in 4 bits, so even drafts that are always right lose. *regrouped* is this model with its channels in
# another order, so that 4 bits are no longer its home (lesson 09): that is what an int4 drafter is like
# for a model that does not come from a 4-bit file. Larger batches are the matter of section 6.)
#
# ### Claims, tested
#
# * *"Speculation trades quality for speed."* Section 3: counted. What does change quality is accepting
#   *more* than the rule allows, which some systems offer ("typical acceptance" in Medusa): another
#   method, and it says so.
# * *"Longer drafts are always faster."* Each further token stands less often (all before it must stand),
#   and costs the same to check. As soon as one more takes time, to draft or to check, the curve in the
#   widget has a top: move c, and read where it is best.
# * *"The acceptance rate is all that counts."* The first of the two tables is sorted by what stood, and the
#   speed-ups in it are not in order: compare 4 bits with the copied drafts. A free guess that is sometimes
#   wrong may beat a dear one that is always right.
# * *"It helps at every batch size."* Section 6.
#
# ## 5. A length that adapts
#
# No k is right for both tasks, and a server does not know what it will be asked. So measure while it
# runs: how often do drafts stand, what does a step take with them and without? `num_tokens="auto"` takes
# the length with the most tokens a second by those numbers, none at all if every draft loses, and now and
# then tries another one, to learn what has changed.

# %%
lengths = {task: lab.draft_lengths(run.traces["auto"]) for task, run in tasks.items()}
source = "counted in section 2, num_tokens=auto; the copy was made twice, one after the other"
wb.show(wb.figures.draft_length_figure(lengths, source))
for task, run in tasks.items():
    best = max((w for w in ways if w != "auto"), key=run.tokens_s)
    print(
        f"{task}: auto {run.told('auto').speedup:.2f} times plain; the best fixed choice was"
        f" {best}, {run.told(best).speedup:.2f} times   measured"
    )

# %% [markdown]
# In a few dozen steps it cannot learn much, and what it tries, it pays for. So expect it below the best fixed
# length: by a tenth or so, also where the best is to draft nothing. What it saves you is knowing which.
#
# ## 6. A full batch
#
# The same correction for 1, 4 and 8 users at once.

# %%
guess.predict(
    "Drafts of 5, a batch of 8: the speed-up compared with that of one alone",
    ["larger", "about the same", "less", "it is gone: slower than plain"],
    key="batch",
)

# %%
batches = lab.batch_gains(int8, pdlab.PromptLookup(num_tokens=5), max_tokens=48)
told8 = {size: run.told("drafts") for size, run in batches.items()}
predicted = {size: t.predicted(round(t.mean_length)) for size, t in told8.items()}
measured = {size: t.speedup for size, t in told8.items()}
source = "measured here, int8; predicted by the formula with what checking took in each batch"
wb.show(wb.figures.batch_figure(predicted, measured, source))

# %%
print(
    "sequences  plain tokens/s  with drafts  speed-up  a checked token, in plain steps   measured"
)
for size, run in batches.items():
    print(
        f"{size:9} {run.tokens_s('plain'):15.1f} {run.tokens_s('drafts'):12.1f}"
        f" {measured[size]:9.2f} {told8[size].check_slope:20.2f}"
    )
change = measured[8] / measured[1]
answer = "larger" if change > 1.1 else "about the same" if change > 0.9 else "less"
guess.compare("batch", answer if measured[8] >= 1 else "it is gone: slower than plain")

# %% [markdown]
# The drafts are as good as before, and the gain shrinks, or is gone. The reason is in the last column.
# Alone, a step was waiting for memory, and more rows were nearly free. A batch has filled that gap
# already: *batching and speculation spend the same idle arithmetic*. Beyond the turning point (lesson 09,
# exercise 3) each checked token costs its full price, and those that do not stand are simply lost. (If
# your machine is wide and its gain holds at 8: try `sizes=(1, 16)`. A GPU turns at some hundred rows,
# so there the gain lasts to larger batches.)
#
# That is so as long as a step mostly reads *weights*, which are read once for the whole batch. With long
# contexts it mostly reads K and V, and each sequence has its own: batching spares none of that, and the
# rows of a draft do, since they share what they read. There speculation may gain in large batches, too
# (MagicDec, Sadhukhan et al. 2024, whose drafter looks at a part of the context only).
#
# So the number of drafts has to follow the load. This engine gives drafts only the room that nobody
# else needs, and `auto` learns costs for each size of batch.
#
# ## 7. Overlap: hiding what is not the model
#
# Drafts make a step give more. The other way is to make the step shorter: between two forward passes an
# engine schedules, draws, turns tokens into text, keeps its books. Meanwhile the model stands still. On
# another thread, all of that could happen *while the model computes*. How much is there to hide?

# %%
guess.predict(
    "int8, one sequence: which part of a plain decode step is not the model?",
    ["less than a twentieth", "a twentieth to a fifth", "more than a fifth"],
    key="own",
)

# %%
work = {
    "alone": lab.own_work(tasks["copy"].traces["plain"]),
    "alone, drafts of 5": lab.own_work(tasks["copy"].traces["k = 5"]),
    "8 sequences": lab.own_work(batches[8].traces["plain"]),
    "8 sequences, drafts of 5": lab.own_work(batches[8].traces["drafts"]),
}
wb.show(wb.figures.own_work_figure(work, "measured here, int8, medians of the decode steps"))

# %%
shares = {name: 1 - parts["model"] / sum(parts.values()) for name, parts in work.items()}
for name, parts in work.items():
    rest = ", ".join(f"{stage} {s * 1e3:.2f}" for stage, s in parts.items() if stage != "model")
    print(f"{name:26} model {parts['model'] * 1e3:6.1f} ms; {rest} ms   measured")
most = {name: 1 / (1 - share) for name, share in shares.items()}
print("all of it hidden, at most:", ", ".join(f"{n} {g:.2f} times" for n, g in most.items()))
print("that is predicted, from the times above")
share = shares["alone"]
answer = "a twentieth to a fifth" if share > 0.05 else "less than a twentieth"
guess.compare("own", "more than a fifth" if share > 0.2 else answer, note=f"{share:.1%}.")

# %% [markdown]
# Not everything can be hidden, however many threads there are. The next step needs the token that this
# one draws, so drawing stands in the way, and with it whatever decides who is in the next batch. What can
# go aside: text, stop strings and streams of the step before, the records, and whatever the *caller* does
# between two steps, such as sending tokens to a browser. `EngineConfig(overlap=True)` computes the next
# step in a thread meanwhile. Eight sequences, and a caller that does nothing, or waits 5 ms after each
# step as for a network:

# %%
guess.predict(
    "A caller that waits 5 ms after each step: how much of that does overlap hide?",
    ["next to nothing", "about half", "nearly all"],
    key="hidden",
)

# %%
loops = lab.overlap_loops(int8, batch=8, waits_s=(0.0, 0.005))
print("caller   one after the other   with overlap   gain   measured, int8, medians")
for plain, beside in zip(loops[::2], loops[1::2], strict=True):
    print(
        f"{plain.caller_s * 1e3:3.0f} ms {plain.loop_s * 1e3:18.1f} ms {beside.loop_s * 1e3:11.1f} ms"
        f" {plain.loop_s / beside.loop_s:9.2f}"
    )
part = (loops[2].loop_s - loops[3].loop_s) / loops[2].caller_s
answer = "next to nothing" if part < 0.25 else "about half" if part < 0.75 else "nearly all"
guess.compare("hidden", answer, note=f"{part:.0%} of the 5 ms.")

# %%
names = {False: "one after the other", True: "with overlap"}
wb.OverlapView({names[loop.overlap]: loop.trace for loop in loops[2:]}, first=4)

# %% [markdown]
# Four steps of each, with a caller that waits 5 ms. *compute* is what the model's thread does, *host* the
# engine's and its caller's: it *schedules* a step and *launches* it, *waits* for it, *books* the new tokens
# (all that the next plan depends on), and *tells* readers and records of them. Empty in the model's lane is
# time in which it stood still. Hatched is what the host did while the model computed: that is hidden. With
# overlap it is the telling of the last step, and the caller's wait; what is left between two computations
# is what the next one has to know. What is hidden is not all won: the computation itself gets a little
# longer beside it, so the table above may show less than the picture. (A caller that *waits* costs no
# processor. One that computes takes its time from the cores that the model needs, and on a CPU hides much
# less. Handing a step to another thread is not free either: where the caller does nothing, the gain may
# well be below 1, as overlap then costs more
# than it hides. And runs differ by a tenth by themselves.)
#
# On this CPU a step is so long that the engine's own work is a small part of it: little to win, unless
# the caller is slow. On a GPU the engine works on another processor altogether, a step is
# a few milliseconds, and half of the time may be lost to the engine (SGLang's own account, below). So
# there it is the first thing to do, and here nearly the last.
#
# ## Exercises
#
# **1. Your own drafter.** Write `guess_next(token_ids, num_tokens)`: what may follow these tokens? A simple
# one: if the last token stood in the text before, what came behind it there, the last time. Return at most
# `num_tokens` ids, or none.


# %%
def guess_next(token_ids, num_tokens):
    # BEGIN SOLUTION
    last = token_ids[-1]
    for at in range(len(token_ids) - 2, -1, -1):
        if token_ids[at] == last:
            return token_ids[at + 1 : at + 1 + num_tokens]
    return []
    # END SOLUTION


# %%
@wb.check("your drafter")
def drafter_check():
    from pdlab.workbench import speculation_experiments as lab

    yours = guess_next([7, 1, 2, 3, 7], 2)
    assert list(yours) == [1, 2], f"7 was followed by 1, 2: guess these, not {yours}"
    assert list(guess_next([7, 1, 7, 2, 7], 1)) == [2], "the last time, 2 came behind 7"
    assert len(guess_next([5, 6], 3)) == 0, "6 never stood before: guess nothing"
    assert len(guess_next([4, 4, 4], 2)) <= 2, "no more than num_tokens"
    run = lab.compare(
        model, {"plain": None, "yours": lab.Guessing(guess_next)}, ["1 2 3 4 1 2 3 4 1 2"], 12,
        backend="auto",
    )  # fmt: skip
    t = run.told("yours")
    print(f"{t.num_accepted} of {t.num_drafted} drafted tokens stood: {t.tokens_a_step:.1f} a step")
    assert run.token_ids["yours"] == run.token_ids["plain"], "the output must be the model's own"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# last = token_ids[-1]
# for at in range(len(token_ids) - 2, -1, -1):
#     if token_ids[at] == last:
#         return token_ids[at + 1 : at + 1 + num_tokens]
# return []
# ```
#
# In the engine a drafter is anything with `propose`, `learn`, `forget` and `close`
# (`pdlab.engine.drafting.Drafter`); `Guessing` wraps your function into one. One token is a short memory:
# `PromptLookup` looks for the last four first, then three, then two, in an index instead of a loop.
#
# </details>

# %% [markdown]
# **2. Tokens a step.** A drafted token stands with probability `a` if all before it stood. Each step
# drafts `k` and gives one more of its own. How many tokens is that on average?


# %%
def tokens_a_step(a, k):
    # BEGIN SOLUTION
    return sum(a**place for place in range(k + 1))
    # END SOLUTION


# %%
@wb.check("tokens a step")
def tokens_check():
    from pdlab.speculate import expected_tokens

    assert abs(tokens_a_step(0.0, 4) - 1) < 1e-9, "nothing stands: one a step"
    assert abs(tokens_a_step(1.0, 4) - 5) < 1e-9, "all stands: k and one more"
    yours = tokens_a_step(0.8, 1)
    assert abs(yours - 1.8) < 1e-9, f"one draft, right in 80 %: 1.8 on average, not {yours}"
    for a in (0.5, 0.8, 0.95):
        assert abs(tokens_a_step(a, 5) - expected_tokens(a, 5)) < 1e-9, "not for k = 5"
        print(
            f"a = {a}: " + ", ".join(f"k = {k}: {tokens_a_step(a, k):.2f}" for k in (1, 3, 5, 10))
        )


# %% [markdown]
# <details><summary>Solution</summary>
#
# `sum(a**place for place in range(k + 1))`: 1 for the token that always comes, a for the first draft, a²
# for the second, which needs both. That is (1 - a^(k+1)) / (1 - a). It never exceeds 1 / (1 - a), however
# long the draft.
#
# </details>

# %% [markdown]
# **3. The best length.** `check_s[k]` is the time of a step that checks `k` drafted tokens (k = 0 is a
# plain step), `draft_s` what drafting one token takes. Which k gives the most tokens a second?


# %%
def best_length(a, check_s, draft_s):
    # BEGIN SOLUTION
    def rate(k):
        return sum(a**place for place in range(k + 1)) / (check_s[k] + k * draft_s)

    return max(range(len(check_s)), key=rate)
    # END SOLUTION


# %%
@wb.check("the best length")
def length_check():
    free = [1.0] * 9
    assert best_length(0.9, free, 0.0) == 8, "if nothing costs anything, the longest"
    assert best_length(0.3, free, 0.5) == 0, "right in 30 %, for half a step each: none at all"
    yours = best_length(0.8, [1 + 0.15 * k for k in range(9)], 0.0)
    assert yours == 5, f"0.15 of a step for each checked token, right in 80 %: 5, not {yours}"
    for a in (0.5, 0.7, 0.9, 0.97):
        lengths = [best_length(a, [1 + s * k for k in range(33)], 0.0) for s in (0.02, 0.1, 0.3)]
        print(f"a = {a}: k = {lengths} where a checked token costs 0.02, 0.1, 0.3 of a step")


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def rate(k):
#     return sum(a**place for place in range(k + 1)) / (check_s[k] + k * draft_s)
#
# return max(range(len(check_s)), key=rate)
# ```
#
# Put in the times of section 1 and the acceptance of section 2, and see whether it finds the fixed length
# that was fastest there.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **vLLM** takes drafts from n-grams of the prompt, suffix trees, EAGLE heads, MTP layers or a draft model
#   (`speculative_config`, *vLLM: Speculative Decoding*). Its guide recommends speculation for "medium-to-low
#   QPS (queries per second), memory-bound workloads", which is section 6, and says that n-grams give modest
#   speed-ups but add no work at peak traffic, which is section 2. Its first versions came with the warning
#   that all this was "not yet optimized". Scheduling ahead of the GPU is its default since v0.14 (release
#   notes, January 2026).
# * **SGLang** recommends EAGLE-3, and publishes 158 tokens/s without, 244 with EAGLE-2 and 373 with EAGLE-3
#   for Llama 3.1 8B, one user, on an H100 (*Speculative Decoding*; published). Its overlapped scheduler runs a
#   batch ahead: 1.1 times the throughput (*SGLang v0.4*, December 2024; published), where an engine that
#   does not may spend as much as half of its time on the CPU.
# * **EAGLE** (Li et al. 2024) drafts with one small layer over the model's own hidden states; **Medusa**
#   (Cai et al. 2024) with extra heads, each for a place further ahead. Both check a *tree* of guesses
#   instead of one line: more rows, so more of what section 1 measured.
# * **MTP**: DeepSeek-V3 was trained with a module that predicts a token further. 85 % to 90 % of
#   them stand, for 1.8 times the tokens a second (*DeepSeek-V3 Technical Report*, 2024, 5.4.3; published).
#   Compare exercise 2: k = 1 gives at most 1.9 at 90 %.
# * **llama.cpp** has draft models and several kinds of n-gram lookup (*docs/speculative.md*), with knobs
#   for the longest draft and the least probability for which it goes on drafting.
# * **TensorRT-LLM** launches step n + 1 before the CPU has looked at the tokens of step n (*Overlap
#   Scheduler*), and pays one step too many when something had ended.
#
# What ours lacks: trees of guesses, trained draft heads, and a drafter that shares the model's own K and V.
