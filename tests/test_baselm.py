"""The bundled policy and the algorithm do not know each other; here is what must agree all the same.

The tasks' prompts are spelled out twice, once where they are asked and once where the corpus imitates people answering them, and
so is the rule that keeps the exam out of both pretraining and training. The shipped checkpoint must be worth training.
"""
import re
from itertools import islice
from random import Random

import pytest
import torch
from conftest import ROOT

from g2c_rl import tasks
from g2c_rl.baselm import corpus
from g2c_rl.baselm.model import load_baselm
from g2c_rl.evaluation import evaluate_policy, probe_policy

DOCUMENTS = 20_000


@pytest.fixture(scope='module')
def documents(): return list(islice(corpus.documents(Random(7)), DOCUMENTS))


def skeleton(prompt):
    "A prompt without what varies in it"
    words = '|'.join(tasks.NOUNS + tasks.COLORS + tasks.PEOPLE + tasks.THINGS)
    return re.sub(rf'\b({words})\b', '*', re.sub(r'\d+', '#', prompt))


def pairs(text):
    "Every pair of two-digit numbers that a text adds, as unordered pairs"
    chains = re.findall(r'\d+(?: ?\+ ?\d+)+', text)
    lists = re.findall(r'Add (\d+), (\d+) and (\d+)', text)
    numbers = [list(map(int, re.findall(r'\d+', c))) for c in chains] + [list(map(int, t)) for t in lists]
    found = {frozenset(p) for n in numbers for p in zip(n, n[1:])}
    found |= {frozenset((sum(n[:2]), n[2])) for n in numbers if len(n) == 3}
    return {p for p in found if min(p) >= 10}


@pytest.mark.parametrize('name', tasks.families)
def test_the_corpus_speaks_the_prompts(name, documents):
    make, rng = tasks.get_family(name).make, Random(0)
    asked = {skeleton(make(rng, held_out=held).prompt) for held in (False, True) for _ in range(100)}
    for prompt in asked:
        answered = sum(skeleton(d).startswith(prompt) for d in documents)
        assert answered > 100, f'{prompt!r} starts only {answered} of {DOCUMENTS} documents'


def test_the_rule_of_the_exam_is_one_rule():
    for a in range(10, 90):
        for b in range(10, 90): assert corpus.held_pair(a, b) == tasks.is_held_out(min(a, b), max(a, b))
    for noun in tasks.NOUNS:
        for color in tasks.COLORS: assert corpus.held_color(noun, color) == tasks.is_held_out(noun, color)
    for person in tasks.PEOPLE:
        for n in range(2, 10):
            for things in tasks.THINGS: assert corpus.held_count(person, n, things) == tasks.is_held_out(person, n, things)
    assert (corpus.NOUNS, corpus.COLORS, corpus.PEOPLE, corpus.THINGS) == (tasks.NOUNS, tasks.COLORS, tasks.PEOPLE, tasks.THINGS)


@pytest.mark.parametrize('name', ['arithmetic', 'addition', 'three_numbers'])
def test_sums_of_the_exam_are_never_seen(name, documents):
    family, rng = tasks.get_family(name), Random(1)
    seen = set().union(*(pairs(d) for d in documents))
    trained = set().union(*(pairs(family.make(rng).prompt) for _ in range(5000)))
    exam = {frozenset(map(int, re.findall(r'\d+', re.search(r'(\d+ \+ \d+)|Add (\d+, \d+)', t.prompt)[0]))) for t in tasks.held_out_tasks(family, 200)}
    assert len(seen) > 1000 and len(trained) > 500 and len(exam) > 80
    assert not exam & seen, 'a sum of the exam was pretrained on'
    assert not exam & trained, 'a sum of the exam is trained on'


def test_format_questions_of_the_exam_are_never_seen(documents):
    family, rng, text = tasks.get_family('format'), Random(1), '\n'.join(documents)
    exam = tasks.held_out_tasks(family, 200)
    facts = {t.prompt.split('.')[0] for t in exam}         # "The lamp is blue"
    assert len(facts) >= 100
    assert not [f for f in facts if f in text], 'a fact of the exam was pretrained on'
    assert not facts & {family.make(rng).prompt.split('.')[0] for _ in range(5000)}, 'a fact of the exam is trained on'
    assert sum('Reply in JSON' in d for d in documents) > 500


def test_the_checkpoint_is_small():
    assert sum(p.stat().st_size for p in (ROOT/'g2c_rl/assets/baselm').iterdir()) <= 4_500_000


@pytest.mark.parametrize('name', ['arithmetic', 'format'])
def test_the_checkpoint_is_worth_training(name):
    "Right often enough to be reinforced, wrong often enough to have something to learn; the wide table is in the evaluation chapter"
    (model, tokenizer), family = load_baselm(), tasks.get_family(name)
    exam = tasks.held_out_tasks(family, 200)
    greedy = evaluate_policy(model, tokenizer, exam, family.verifier, family.max_new_tokens)
    probe = probe_policy(model, tokenizer, exam, family.verifier, family.max_new_tokens, generator=torch.Generator().manual_seed(0))
    assert .35 <= greedy.pass_rate <= .65, f'greedy {greedy}'
    assert .5 <= probe.mixed <= .95, f'{probe.mixed:.1%} of the groups are mixed'
    if name == 'arithmetic':
        named = [set(map(str, t.options)) <= set(tasks.integers_in(c)) for t,texts in zip(exam, probe.completions) for c in texts]
        assert .04 <= sum(named)/len(named) <= .12, f'both options are named in {sum(named)/len(named):.1%} of the samples'


@pytest.mark.parametrize('name', ['addition', 'three_numbers'])
def test_free_answers_are_sometimes_right(name):
    (model, tokenizer), family = load_baselm(), tasks.get_family(name)
    probe = probe_policy(model, tokenizer, tasks.held_out_tasks(family, 200), family.verifier, family.max_new_tokens, generator=torch.Generator().manual_seed(0))
    assert probe.sampled > .05, f'{probe.sampled:.1%} of the samples are right'
