"""Tasks for a real model: two-option additions in several wordings, and questions to be answered in JSON.

Copy this file and change it. `g2c-rl train real_model_tasks.py:sum_last --model smollm2-135m` trains on one of its families.
"""
from functools import partial
from random import Random

from g2c_rl.tasks import Family, Task, format_task, integers_in, is_held_out, verify_arithmetic, verify_format

# What a two-option addition can look like. {x} and {y} are the options.
WORDINGS = dict(
    question   = 'What is {a} + {b}? Choose {x} or {y}. Answer with only the number.',
    options    = 'Question: What is {a} + {b}? Options: {x} or {y}.\nAnswer:',
    statement  = '{a} + {b} is either {x} or {y}. The sum is',
    answer_cue = 'What is 12 + 25? Choose 37 or 47.\nAnswer: 37\nWhat is 41 + 33? Choose 64 or 74.\nAnswer: 74\n'
                 'What is {a} + {b}? Choose {x} or {y}.\nAnswer:',
    terse      = '12 + 25: 37 or 47? 37\n41 + 33: 64 or 74? 74\n58 + 16: 74 or 84? 74\n{a} + {b}: {x} or {y}?',
    sum_last   = 'Choose {x} or {y}. {a} + {b} =',
    sum_last_2 = 'Choose 37 or 47.\n12 + 25 = 37\nChoose 64 or 74.\n41 + 33 = 74\nChoose {x} or {y}.\n{a} + {b} =',
    sum_last_3 = 'Options: 37, 47. 12 + 25 = 37\nOptions: 64, 74. 41 + 33 = 74\nOptions: 85, 75. 58 + 17 = 75\nOptions: {x}, {y}. {a} + {b} =',
    both       = 'What is {a} + {b}? Choose {x} or {y}. Answer with only the number.\n{a} + {b} =',
)
# The same as the turns of a chat, the user's first. A last turn of the assistant is gone on with.
CHATS = dict(
    chat       = ['What is {a} + {b}? Choose {x} or {y}. Answer with only the number.'],
    chat_1     = ['What is 12 + 25? Choose 37 or 47. Answer with only the number.', '37',
                  'What is {a} + {b}? Choose {x} or {y}. Answer with only the number.'],
    chat_sum   = ['Choose {x} or {y}.\n{a} + {b} ='],
    chat_begun = ['What is {a} + {b}? Choose {x} or {y}.', '{a} + {b} ='],
)
OFFSETS = dict(tens=(-10, 10), plain=(-10, 10, -1, 1))


def messages(turns):
    "A chat that the user begins"
    return [dict(role='assistant' if i % 2 else 'user', content=text) for i,text in enumerate(turns)]


def two_options(
    rng:Random,           # Source of randomness
    held_out=False,       # Draw from the exam instead of the training questions
    wording='sum_last',   # One of `WORDINGS` or `CHATS`
    offsets='tens',       # How far the wrong option is from the sum
):
    "A two-digit addition and two options, the sum and a slip"
    while True:
        a, b = rng.randint(10, 79), rng.randint(10, 79)
        if a + b <= 89 and is_held_out(min(a, b), max(a, b)) == held_out: break
    right, wrong = a + b, a + b + rng.choice(OFFSETS[offsets])
    x, y = (right, wrong) if rng.random() < .5 else (wrong, right)
    fill = lambda text: text.format(a=a, b=b, x=x, y=y)
    prompt = fill(WORDINGS[wording]) if wording in WORDINGS else messages(map(fill, CHATS[wording]))
    return Task(prompt, right, options=(x, y))


def verify_first(task, completion):
    "Pass when the first integer in the completion is the answer: what is written after it can neither help nor hurt"
    return float(next(integers_in(completion), None) == str(task.answer))


INSTRUCTIONS = dict(
    strict = 'Return only a JSON object with the key "answer" and a short value, then stop.\n{question}',
    reply  = '{question} Reply in JSON.',
    after  = '{question} Return a JSON object with the key "answer".',
)


def json_answer(
    rng:Random,               # Source of randomness
    held_out=False,           # Draw from the exam instead of the training questions
    instruction='strict',     # One of `INSTRUCTIONS`
):
    "A question about a sentence, asked by chat, with the answer's JSON object already opened"
    task = format_task(rng, held_out)
    question = task.prompt.split(' Reply in JSON.')[0]
    prompt = messages([INSTRUCTIONS[instruction].format(question=question), task.prefix])
    return Task(prompt, task.answer, prefix=task.prefix)


def family(wording, offsets='tens', verifier=verify_first):
    "Two-option additions in one wording"
    return Family(partial(two_options, wording=wording, offsets=offsets), verifier, 8, chance=.5)


# One family for every wording, to be named on the command line
for _name in (*WORDINGS, *CHATS): globals()[_name] = family(_name)
json_strict, json_reply, json_after = (Family(partial(json_answer, instruction=i), verify_format, 12) for i in INSTRUCTIONS)
