"""The 22 tests: eight on what an exercise is given, fourteen on the four functions that it asks for.

They run in seconds, on a policy of about a hundred numbers. The fourteen take the namespace `rl`, so that the same test can be
put to any implementation, and judge one function at a time: `-k advantages`, `-k log_prob`, `-k grpo_loss`, `-k train_step`.
Where a known mistake explains a wrong result, the message names the mistake.
"""
from copy import deepcopy
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from math import exp, isnan
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from g2c_rl import advantages, logprobs, loss, lora, sampling, tasks, trainer
from g2c_rl.tasks import Task

SOLUTIONS = dict(group_advantages=advantages.group_advantages, completion_log_prob=logprobs.completion_log_prob, grpo_loss=loss.grpo_loss)


@pytest.fixture
def rl():
    "The implementation under test: `my_rl` in an exercise's folder, the package anywhere else"
    if find_spec('my_rl'): return import_module('my_rl')
    return SimpleNamespace(**SOLUTIONS, GRPOTrainer=trainer.GRPOTrainer)


# ---------- a tiny policy, and what the tests have in common

EOS = 5


class Policy(nn.Module):
    "Logits depend on all tokens so far; dropout makes evaluation mode matter"
    def __init__(self, seed=0, dropout=.5):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed, self.drop, self.head = nn.Embedding(6, 8), nn.Dropout(dropout), nn.Linear(8, 6)
        with torch.no_grad():
            for p in self.parameters(): p.copy_(torch.randn(p.shape, generator=g) * .5)

    def forward(self, ids): return self.head(self.drop(self.embed(ids).cumsum(1)))


class Table(nn.Module):
    "Logits depend on the last token only, so that other tokens must not matter"
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)))

    def forward(self, ids): return self.table(ids)


class Half(Policy):
    "Logits in half precision"
    def forward(self, ids): return super().forward(ids).bfloat16()


class Letters:
    "a to e; the end of a text has the id that also pads"
    eos_id = pad_id = EOS
    def encode(self, text): return ['abcde'.index(c) for c in text]
    def decode(self, ids): return ''.join('abcde'[i] for i in ids if i != EOS)


IDS = torch.tensor([[1, 0, 3, 4, 2, EOS],      # three prompt tokens, then a completion of three
                    [1, 0, 3, 2, EOS, EOS],    # a completion of two, and one column of padding
                    [1, 0, 3, EOS, EOS, EOS],  # stops at once
                    [1, 0, 3, 0, 0, 4]])       # cut before it could stop
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
LENGTHS = MASK.sum(1).tolist()


def slow_log_prob(model, ids, prompt_len, lengths):
    "One token at a time: everything before position t predicts token t"
    return torch.stack([sum(model(row[None, :t])[0, -1].float().log_softmax(-1)[row[t]] for t in range(prompt_len, prompt_len + n))
                        for row,n in zip(ids, lengths)])


def expect(got, right, hint, mistakes=(), atol=1e-6):
    "Fail unless `got` is `right`; `mistakes` pairs what a known mistake would have given with words for it"
    __tracebackhide__ = True
    got, right = torch.as_tensor(got), torch.as_tensor(right)
    close = lambda value: torch.allclose(got, torch.as_tensor(value).to(got), atol=atol)
    if got.shape != right.shape: raise AssertionError(f'{hint}\n  expected the shape {tuple(right.shape)}, got {tuple(got.shape)}')
    if close(right): return
    known = [words for words,value in mistakes if torch.as_tensor(value).shape == got.shape and close(value)]
    raise AssertionError(f'{(known or [hint])[0]}\n  expected {right.tolist()}\n  got      {got.tolist()}')


def alone(test):
    "Judge `train_step` by itself: around a test it calls the solutions of the other three functions, and not the learner's"
    @wraps(test)
    def run(rl):
        step = unwrap(rl.GRPOTrainer.train_step)
        with pytest.MonkeyPatch.context() as patch:
            for name,solution in SOLUTIONS.items(): patch.setitem(step.__globals__, name, solution)
            test(rl)
    return run


ANSWERS = dict(bad='c', ca='e', aced='b')      # prompts of different lengths, and the letter that a right answer begins with


def make_letter_task(rng):
    prompt = rng.choice([*ANSWERS])
    return Task(prompt, ANSWERS[prompt])


def begins_right(task, completion): return float(completion[:1] == task.answer)


def make_trainer(rl, dropout=.5, policy_seed=15, **kwargs):
    model = lora.add_lora(Policy(policy_seed, dropout), rank=2, targets=('head',))
    with torch.no_grad():   # a policy that has left its base, so that the leash pulls
        for m in lora.adapters(model).values(): m.lora_B.copy_(torch.randn(m.lora_B.shape, generator=torch.Generator().manual_seed(9)) * .3)
    settings = dict(k=6, groups_per_step=2, max_new_tokens=3, kl_coef=.1, lr=.05, max_grad_norm=4., seed=3) | kwargs
    return rl.GRPOTrainer(model, Letters(), make_letter_task, begins_right, **settings)


def state(t): return deepcopy((t.model.state_dict(), t.optimizer.state_dict()))


def same(a, b):
    "Equal to the last byte, whatever is nested in what"
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---------- given: tasks and verifiers

def test_verifier_takes_the_last_integer():
    task = Task('What is 23 + 58? Options: 81 or 71. Answer with the number:', 81, options=(81, 71))
    passes = [' 81', ' 71 or 81', '23+58=81.', ' 081', ' +81', '7, 81', '81 8.1']
    fails = ['', ' 71', ' 81 or 71', ' 1,081', ' 81.5', ' -81', ' 811', ' 8 1', 'eighty-one', '9'*10_000]
    assert [tasks.verify_arithmetic(task, c) for c in passes] == [1.]*len(passes)
    assert [tasks.verify_arithmetic(task, c) for c in fails] == [0.]*len(fails)


def test_sloppy_verifier_can_be_gamed():
    task = Task('', 81)
    assert [tasks.verify_arithmetic_sloppy(task, c) for c in (' 81 or 71', '1 2 81 3', ' 71', ' 1,081')] == [1., 1., 0., 0.]


def test_format_verifier_is_strict_json():
    task = Task('{"answer":', 'x', prefix='{"answer":')
    passes = [' "blue"}', ' 1} and more', ' {"a": [1]}}', ' null, "b": 2}', '9'*10_000 + '}']
    fails = ['', ' "blue"', ' blue}', ' NaN}', ' Infinity}', ' 1,}', '['*100_000]
    assert [tasks.verify_format(task, c) for c in passes] == [1.]*len(passes)
    assert [tasks.verify_format(task, c) for c in fails] == [0.]*len(fails)


def test_choice_task_gives_nothing_away():
    rng = Random(1)
    exam = [tasks.arithmetic_choice_task(rng) for _ in range(10_000)]
    for rule in (lambda x, y: x, lambda x, y: y, max, min):
        assert abs(sum(rule(*t.options) == t.answer for t in exam) / len(exam) - .5) < .02
    assert [tasks.arithmetic_choice_task(Random(5)) for _ in range(2)] == [tasks.arithmetic_choice_task(Random(5))]*2


def test_format_task_ends_with_the_opening():
    for seed in range(50):
        task = tasks.format_task(Random(seed))
        assert task.prompt.endswith('{"answer":') and task.prefix == '{"answer":' and str(task.answer) in task.prompt
        assert task == tasks.format_task(Random(seed))


def test_exam_and_training_are_disjoint():
    for family in map(tasks.get_family, tasks.families):
        rng = Random(0)
        exam = {t.prompt for t in tasks.held_out_tasks(family, 100)}
        assert len(exam) == 100 and not exam & {family.make(rng).prompt for _ in range(3000)}


def test_sampler_refuses_what_cannot_work():
    policy, letters = Policy(), Letters()
    for arguments,words in ((('bad', 0, 3), 'k must be at least 1, got 0'), (('bad', 2, 0), 'max_new_tokens must be at least 1, got 0'), (('', 2, 3), 'no tokens')):
        with pytest.raises(ValueError, match=words): sampling.sample_group(policy, letters, *arguments)
    with pytest.raises(ValueError, match='temperature must be 1.0, got 0.7'): sampling.sample_group(policy, letters, 'bad', 2, 3, temperature=.7)
    assert policy.training, 'the policy gets its own mode back'
    policy.context_length = 5
    with pytest.raises(ValueError, match='do not fit the context of 5'): sampling.sample_group(policy, letters, 'bad', 2, 3)
    assert len(sampling.sample_group(policy, letters, 'bad', 2, 2).completions) == 2


def test_trainer_refuses_what_cannot_work():
    make = lambda model, **kwargs: trainer.GRPOTrainer(model, Letters(), lambda rng: Task('bad', 0), begins_right, **kwargs)
    with pytest.raises(ValueError, match='102 of 102 parameters would be trained'): make(Policy())
    adapted = lora.add_lora(Policy(), rank=2, targets=('head',))
    for name,value in (('k', 1), ('groups_per_step', 0), ('max_new_tokens', 0), ('lr', 0.), ('kl_coef', -.1), ('max_grad_norm', 0.)):
        with pytest.raises(ValueError, match=f'{name} must be .* got {value}'): make(adapted, **{name: value})
    with pytest.raises(ValueError, match='none of the'): make(deepcopy(adapted).requires_grad_(False))
    with pytest.raises(ValueError, match='shares 2 trainable parameters'): make(adapted, reference=adapted)
    with pytest.raises(ValueError, match='steps must be at least 1, got 0'): make(adapted).train(0)


# ---------- asked for: group_advantages

def test_advantages_by_hand(rl):
    for rewards,right in (([1., 1., 0., 0.], torch.tensor([1., 1., -1., -1.]) * 3**.5 / 2),
                          ([0., .5, 1., 10.], torch.tensor([-2.875, -2.375, -1.875, 7.125]) / (68.1875/3)**.5),
                          ([-3., -1.], torch.tensor([-1., 1.]) / 2**.5),
                          ([0.]*15 + [1.], torch.tensor([-1.]*15 + [15.]) / 16**.5)):
        r, K = torch.tensor(rewards), len(rewards)
        got, centred = rl.group_advantages(r), r - r.mean()
        assert r.tolist() == rewards, 'your function changes the rewards that it was given; they are still needed for the log'
        expect(got, right, 'subtract the mean of the group, then divide by its standard deviation', (
            ('your signs are flipped: better than average is positive', -right),
            ('divide by the standard deviation with K-1, which is torch\'s default; yours divides the squares by K', right * (K/(K-1))**.5),
            ('subtract the mean of the group before you divide', r/r.std()),
            ('you have centred the rewards; now divide by the standard deviation', centred),
            ('divide by the standard deviation, not by the variance', centred/r.var()),
            ('these are the rewards themselves; an advantage compares them with the group', r)))


def test_advantages_of_each_group_alone(rl):
    r = torch.tensor([[1., 0., 0., 0.], [1., 1., 1., 0.], [2., 2., 2., 2.]])
    got, right = rl.group_advantages(r), torch.tensor([[1.5, -.5, -.5, -.5], [.5, .5, .5, -1.5], [0., 0., 0., 0.]])
    assert got.isfinite().all(), f'a group without contrast, or of one, gets zeros; its standard deviation is 0, and 0/0 is NaN: {got.tolist()}'
    live = torch.tensor([[1.], [1.], [0.]])
    expect(got, right, 'statistics are those of a group, which is a row (the last axis): rewards (G, K) give advantages (G, K)', (
        ('your advantages mix the groups: mean and standard deviation are those of each row, not of the whole batch', (r - r.mean())/r.std()),
        ('your advantages mix the groups: mean and standard deviation are those of each row, not of the whole batch', live*(r - r.mean())/r.std()),
        ('the mean is that of each row, but your standard deviation is that of the whole batch', (r - r.mean(-1, True))/r.std()),
        ('the last axis is the group; your statistics are those of the columns', live*(r - r.mean(0))/r.std(0)),
        ('one group without contrast must not silence the others', torch.zeros(3, 4))), atol=1e-5)
    torch.manual_seed(0)
    many = torch.rand(5, 8)
    expect(rl.group_advantages(many), torch.stack([rl.group_advantages(row) for row in many]), 'a batch of groups is each group by itself', atol=1e-5)
    expect(rl.group_advantages(torch.tensor([[1.], [0.]])), torch.zeros(2, 1), 'groups of one have nothing to compare: zeros')


def test_advantages_of_a_degenerate_group_are_zero(rl):
    live = [1., 0.] * 8
    for rewards in ([0.]*4, [1.]*4, [.6]*16, [.1]*3, [1e8]*7, [-2.]*5, [3.], [[.6]*16, live]):
        r = torch.tensor(rewards)
        got = rl.group_advantages(r)
        dead = got if r.dim() == 1 else got[0]
        assert dead.isfinite().all(), f'{dead.numel()} rewards of {r.flatten()[0]:g} give {dead.flatten()[0]:g}: the standard deviation is 0 or missing. A group without contrast, or of one, gets zeros'
        assert not dead.any(), f'rewards that are all {r.flatten()[0]:g} teach nothing, yet your advantages are {dead.tolist()}: rounding makes the ' \
                               'standard deviation of equal rewards a little more than 0. Compare the largest with the smallest reward instead'
        assert got.shape == r.shape, f'{tuple(r.shape)} rewards give as many advantages, not {tuple(got.shape)}'
    words = 'rewards that differ, by however little, are not degenerate: no tolerance, and no epsilon in the denominator'
    close = torch.tensor([.6, .6, .6 + 1e-8], dtype=torch.float64)
    expect(rl.group_advantages(close).double(), torch.tensor([-1., -1., 2.], dtype=torch.float64) / 3**.5, words, atol=1e-5)
    close = torch.tensor([.6, .6, .6 + 6e-8])     # one rounding step apart in float32
    assert rl.group_advantages(close).any(), words


def test_advantages_refuse_rewards_that_are_not_finite(rl):
    nan, inf = float('nan'), float('inf')
    for bad in ([1., nan, 0.], [1., inf, 0.], [-inf, 1., 0.], [nan]*4, [inf]*2, [nan], [[1., 0.], [nan, 0.]]):
        try: got = rl.group_advantages(torch.tensor(bad))
        except ValueError: continue
        raise AssertionError(f'the rewards {bad} must be refused with a ValueError, but gave {got.tolist()}: one NaN would silently spoil its group')


# ---------- asked for: completion_log_prob

def test_log_prob_equals_one_token_at_a_time(rl):
    model = Policy().eval()
    got, right = rl.completion_log_prob(model, IDS, 3, MASK), slow_log_prob(model, IDS, 3, LENGTHS)
    logits = model(IDS)
    every = logits.log_softmax(-1)
    def terms(first, shift, source=every):   # of the tokens first, ..., 5 as predicted `shift` positions before
        return source[:, first-shift:6-shift].gather(-1, IDS[:, first:, None])[..., 0]
    scored, lengths, seen = terms(3, 1) * MASK, MASK.sum(1), torch.cat([torch.ones(4, 2).bool(), MASK], 1)
    last, first = torch.arange(3) == lengths[:, None] - 1, torch.arange(3) == 0
    expect(got, right, 'position t predicts token t+1; add up the log-probs of the completion tokens, and of no others', (
        ('off by one: the logits at position t predict token t+1, and yours are compared with token t', (terms(3, 0)*MASK).sum(1)),
        ('off by one: the logits at position t predict token t+1, and yours are compared with token t+2', (terms(3, 2)*MASK).sum(1)),
        ('add the tokens up: yours is their mean, and a long completion would count no more than a short one', right/lengths),
        ('add the tokens up: yours is their mean, padding included', right/3),
        ('the prompt is in your sum: it begins at the completion\'s first token', (terms(1, 1)*seen).sum(1)),
        ('off by one: the last prompt token is in your sum', (terms(2, 1)*seen[:, 1:]).sum(1)),
        ('off by one: the first completion token is not in your sum; the last prompt position predicts it', (scored * ~first).sum(1)),
        ('off by one: the last completion token is not in your sum', (scored * ~last).sum(1)),
        ('padding is in your sum: use the mask', terms(3, 1).sum(1)),
        ('your mask is inverted: true marks the tokens to count', (terms(3, 1) * ~MASK).sum(1)),
        ('the end-of-sequence token is not in your sum: it is a choice like any other, even if it has the id of the padding', (scored * (IDS[:, 3:] != EOS)).sum(1)),
        ('these are logits; a log-prob also subtracts the logsumexp over the vocabulary', (terms(3, 1, logits)*MASK).sum(1)),
        ('these are probabilities; take their logarithm before you add', (terms(3, 1).exp()*MASK).sum(1)),
        ('normalize over the vocabulary, the last axis', (terms(3, 1, F.pad(logits[:, 2:-1].log_softmax(1), (0, 0, 2, 1)))*MASK).sum(1)),
        ('the completion depends on the prompt: show the model all of it', slow_log_prob(model, IDS[:, 2:], 1, LENGTHS)),
        ('your sign is flipped: a log-prob is negative', -right)), atol=1e-5)
    expect(rl.completion_log_prob(model, IDS, 3), slow_log_prob(model, IDS, 3, [3]*4), 'without a mask every token after the prompt counts', atol=1e-5)
    for rows,columns in ((1, 6), (1, 4), (4, 4)):
        ids = IDS[:rows, :columns]
        expect(rl.completion_log_prob(model, ids, 3), slow_log_prob(model, ids, 3, [columns-3]*rows), 'one completion, or completions of one token, are possible too', atol=1e-5)
    half = Half().eval()
    words = 'compute in float32 even if the logits come in half precision: the sum of many terms would lose its small differences'
    expect(rl.completion_log_prob(half, IDS, 3, MASK).float(), slow_log_prob(half, IDS, 3, LENGTHS), words, atol=1e-3)


def test_log_prob_ignores_prompt_and_padding_tokens(rl):
    model, other = Table(), IDS.clone()
    score = lambda ids: rl.completion_log_prob(model, ids, 3, MASK)
    other[:, :2] = 2
    expect(score(other), score(IDS), 'your log-prob changes when a prompt token changes that no completion token depends on')
    for token in range(6):
        other = IDS.clone()
        other[~torch.cat([torch.ones(4, 3).bool(), MASK], 1)] = token
        expect(score(other), score(IDS), 'your log-prob changes when the padding changes')
    other = IDS.clone()
    other[:, 2] = 2
    assert not torch.isclose(score(other), score(IDS)).any(), 'the completion depends on the prompt: show the model all of it'


def test_log_prob_counts_the_end_of_sequence(rl):
    model = Policy().eval()
    stop = slow_log_prob(model, IDS[2:3], 3, [1])
    words = 'a completion that stops at once has the log-prob of its end-of-sequence token, even if that token has the id of the padding'
    expect(rl.completion_log_prob(model, IDS, 3, MASK)[2:3], stop, words, (
        ('you have lost the end-of-sequence token: take the mask that is given, not one made from token ids, since padding may have the same id', torch.zeros(1)),), atol=1e-5)
    observed = torch.tensor([[1, 0, 1]]*4).bool()   # the middle token was written by a tool
    each = torch.stack([slow_log_prob(model, IDS, 3, [n]*4) for n in (1, 2, 3)])
    words = 'tokens that the mask leaves out are not scored, wherever they stand, and the tokens after them are'
    expect(rl.completion_log_prob(model, IDS, 3, observed), each[0] + each[2] - each[1], words, atol=1e-5)


def test_log_prob_gradient(rl):
    model, weights = Policy(dropout=0.), torch.tensor([1., -2., .5, 3.])
    got = rl.completion_log_prob(model, IDS, 3, MASK)
    assert got.requires_grad, 'your log-prob carries no gradient, so nothing could be learned from it'
    assert model.training and model.drop.training, 'your log-prob changes the mode of the model (train or eval); leave that to the caller'
    (weights * got).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (weights * slow_log_prob(model, IDS, 3, LENGTHS)).sum().backward()
    for g,p in zip(grads, model.parameters()): expect(g, p.grad, 'the gradient must flow through every scored token, and no other', atol=1e-4)


# ---------- asked for: grpo_loss

def test_grpo_loss_by_hand(rl):
    logp, ref, adv = torch.tensor([-1., -3., -2.]), torch.tensor([-1.5, -2., -2.]), torch.tensor([2., -1., -.5])
    d = ref - logp
    policy, kl = -(2.*-1 + -1.*-3 + -.5*-2) / 3, (exp(-.5) + .5 - 1 + exp(1.) - 1. - 1) / 3
    expect(rl.grpo_loss(logp, ref, adv, 0.), policy, 'without a leash the loss is -(A * logp).mean()', (
        ('your loss pushes good completions down and bad ones up: the optimizer descends, so the sign of A * logp is minus', -policy),
        ('take the mean over the completions, not the sum', 3*policy)))
    expect(rl.grpo_loss(logp, ref, adv, .3), policy + .3*kl, 'the leash adds kl_coef times the mean of exp(ref - logp) - (ref - logp) - 1', [
        (words, policy + .3*value) for words,value in (
            ('your leash pushes away from the reference: the KL is added to a loss, and makes it larger', -kl),
            ('your KL has policy and reference swapped: the exponent is ref_logp - logp', ((-d).exp() + d - 1).mean()),
            ('this is k1: it can be negative, and as a loss its gradient is zero on average', (-d).mean()),
            ('this is k2, half the squared difference', (d**2/2).mean()),
            ('this is the absolute difference, which pulls equally hard at any distance', d.abs().mean()),
            ('the leash has lost its -1: it must be zero where policy and reference agree', kl + 1),
            ('take the mean of the KL over the completions, not the sum', 3*kl))])
    for far in (-6., 6.):
        value = rl.grpo_loss(torch.zeros(2), torch.tensor([far, 0.]), torch.zeros(2), 2.)
        expect(value, exp(far) - far - 1, 'the KL estimate is exact at a difference of 6, where nothing overflows', atol=1e-3)


def test_grpo_loss_gradient(rl):
    logp, ref, adv = (torch.tensor(v, requires_grad=True) for v in ([-1., -3., -2.], [-1.5, -2., -2.], [2., -1., -.5]))
    rl.grpo_loss(logp, ref, adv, .3).backward()
    pull = .3/3*(1 - (ref - logp).detach().exp())
    assert logp.grad is not None, 'the policy gets no gradient: logp must not be detached'
    expect(logp.grad, -adv.detach()/3 + pull, 'the gradient with respect to logp is -A/K + kl_coef (1 - exp(ref - logp))/K', (
        ('the leash does not pull: its gradient is missing; only the reference is detached', -adv.detach()/3),
        ('the advantages do not push: the gradient of A * logp is missing', pull),
        ('this pushes the wrong way: a descent step would make good completions less likely', adv.detach()/3 + pull)))
    assert ref.grad is None or not ref.grad.any(), 'a gradient reaches the reference, which is frozen: detach it'
    assert adv.grad is None or not adv.grad.any(), 'a gradient reaches the advantages, which are numbers: detach them'
    equal = torch.tensor([-4., -.1], requires_grad=True)
    value = rl.grpo_loss(equal, equal.detach(), torch.zeros(2), 1.)
    value.backward()
    assert value.item() == 0 and not equal.grad.any(), 'policy and reference agree: the leash is exactly zero and does not pull'


def test_grpo_loss_survives_any_distance(rl):
    for d in (30., 100., 1e4, -30., -100., -1e4):
        logp = torch.tensor([-20000., -1.], requires_grad=True)
        value = rl.grpo_loss(logp, torch.tensor([-20000. + d, -1.]), torch.zeros(2), .1)
        value.backward()
        assert value.isfinite(), f'your loss is {value.item()} when ref_logp - logp is {d:g}: float32 holds exp(x) up to x = 88 only; continue it as a line from about 20'
        assert logp.grad.isfinite().all(), f'your loss is finite but its gradient is not when ref_logp - logp is {d:g}: an infinity that is selected away still spoils the gradient'
        assert value > 0, f'the KL estimate is never negative, but it is {value.item()/.1:g} when ref_logp - logp is {d:g}'
        assert logp.grad[0] != 0, f'a leash that is clamped does not pull: the gradient is zero when ref_logp - logp is {d:g}'
        assert logp.grad[0]*d < 0, f'the leash pulls away from the reference when ref_logp - logp is {d:g}'


# ---------- asked for: train_step

@alone
def test_train_step_takes_the_step_of_its_batch(rl):
    live, clipped = set(), set()
    for reference in (None, Policy(5)):
        t, rng = make_trainer(rl, reference=reference), Random(3)
        twin = deepcopy(t.model).eval()             # takes the same steps, written out
        adapters = [p for p in twin.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=.05, weight_decay=0.)
        frozen = {name: p.clone() for name,p in t.model.named_parameters() if 'lora' not in name}
        frozen_reference = deepcopy(reference and reference.state_dict())
        stale = [torch.zeros_like(p) for p in adapters]
        t.model.train(), t.model.embed.eval()
        for _ in range(3):
            randomness = torch.get_rng_state()
            metrics = t.train_step()
            assert all(torch.equal(p, frozen[name]) for name,p in t.model.named_parameters() if name in frozen), 'a frozen parameter has moved'
            assert torch.get_rng_state().equal(randomness), 'draw with self.generator: the step uses, or changes, the global random numbers'
            assert t.model.training and t.model.drop.training and not t.model.embed.training, 'the step leaves the model in another mode (train or eval) than it found it in'
            assert t.batch is not None and len(t.batch) == 4, 'self.batch keeps the tasks, groups, rewards and advantages of the step'
            assert list(t.batch[0]) == [make_letter_task(rng) for _ in range(2)], 'each step draws groups_per_step new tasks: self.make_task(self.rng)'
            losses, kls = [], []
            for n,(task,g) in enumerate(zip(*t.batch[:2])):
                prompt = torch.tensor(Letters().encode(task.prompt))
                assert g.ids.shape[0] == 6 and g.ids[:, :len(prompt)].equal(prompt.expand(6, -1)), 'group number i holds k completions of the prompt of task number i'
                assert g.lengths.max() <= 3, 'completions are cut at max_new_tokens'
                r = torch.tensor([begins_right(task, c) for c in g.completions])
                expect(torch.as_tensor(t.batch[2][n]).float(), r, 'each completion is judged by the verifier, with the task that it answers')
                logp = slow_log_prob(twin, g.ids, g.prompt_len, g.lengths.tolist())
                expect(g.logp, logp, 'these samples are not from the present policy: sample afresh in every step, in evaluation mode, with the adapters on', atol=1e-4)
                if r.max() == r.min(): continue
                with torch.no_grad(), lora.adapters_off(twin), sampling.eval_mode(reference or twin) as base:
                    d = slow_log_prob(base, g.ids, g.prompt_len, g.lengths.tolist()) - logp.detach()
                k3 = (d - logp + logp.detach()).exp() - (d - logp + logp.detach()) - 1
                losses.append(-((r - r.mean())/r.std() * logp).mean() + .1*k3.mean())
                kls.append(k3.mean().item())
            live.add(len(losses))
            loss, kl = sum(losses)/len(losses), sum(kls)/len(kls)
            optimizer.zero_grad()
            loss.backward()
            stale = [old + p.grad for old,p in zip(stale, adapters)]
            stale_norm = torch.stack([g.norm() for g in stale]).norm().item()
            norm = torch.nn.utils.clip_grad_norm_(adapters, 4.).item()
            stale = [g * min(1, 4/stale_norm) for g in stale]
            clipped.add(norm > 4)
            optimizer.step()
            assert metrics['updated'] == 1, 'a step with a live group is an update'
            expect(metrics['kl'], kl, 'kl is the mean over the live groups of the KL estimate, before the update, in evaluation mode', (
                ('the KL is 0, although the policy has left its reference: you compare the policy with itself (with self.frozen() as reference: ...)', 0.),
                ('the KL is the mean over live groups: a group without contrast is left out', kl*len(kls)/2)), atol=1e-4)
            expect(metrics['loss'], loss.item(), 'loss is the mean of grpo_loss over the live groups, in evaluation mode', (
                ('a group without contrast must not dilute the others: divide by the number of live groups', loss.item()*len(losses)/2),
                ('take the mean over the live groups, not the sum', loss.item()*len(losses))), atol=1e-4)
            expect(metrics['grad_norm'], norm, 'grad_norm is the length of the gradient of this loss, before it is clipped', (
                ('the gradient of an earlier step is still in there: call self.optimizer.zero_grad() first', stale_norm),
                ('grad_norm is the length of the gradient before clipping, yours is the length after it', min(norm, 4.))), atol=1e-4)
            for p,q in zip(t.parameters, adapters):
                expect(p, q, 'the adapters did not take the step of this batch: zero_grad, backward, clip to self.max_grad_norm, optimizer step, once each and in this order', atol=1e-4)
        assert same(frozen_reference, reference and reference.state_dict()) and (reference is None or reference.training), 'the reference has changed'
    assert live == {1, 2} and clipped == {True, False}, 'the seed was chosen so that a step has a dead group and another has none, and one gradient is clipped and another is not'


@alone
def test_train_step_leaves_a_dead_batch_alone(rl):
    t = make_trainer(rl, k=7)                  # the standard deviation of seven rewards of .1 is not 0, not even in float64
    for _ in range(3): t.train_step()          # gives the optimizer some momentum
    assert t.optimizer.state, 'three steps, and the optimizer was never called'
    t.model.eval()
    scored = []
    t.model.head.register_forward_hook(lambda layer, *_: scored.append(torch.is_grad_enabled() or not layer.enabled))
    for verdict,counted in ((0., 'all_fail'), (1., 'all_pass'), (.1, 'all_fail')):
        t.verifier = lambda task, completion: verdict
        before, metrics, after = state(t), t.train_step(), state(t)
        assert same(before[0], after[0]), 'a step without contrast must not move the policy; old momentum does so even if the gradient is zero, so do not call the optimizer'
        assert same(before[1], after[1]), 'a step without contrast must not touch the optimizer'
        assert not any(scored), 'a group without contrast is not scored, neither by the reference nor for a gradient: there is nothing to learn from it'
        assert metrics['updated'] == 0 and metrics[counted] == 2, f'a step of two groups without contrast counts 2 as {counted} and 0 as updated'
        for name in ('kl', 'loss', 'grad_norm'):
            assert isnan(metrics[name]), f'what was not measured is NaN: a {name} of {metrics[name]:g} would be a false measurement'
        assert metrics['reward_mean'] == pytest.approx(verdict) and metrics['tokens'] > 0 and metrics['entropy'] > 0, 'a dead batch was sampled and judged all the same'
        assert not t.model.training, 'the step leaves the model in another mode (train or eval) than it found it in'
    t.verifier = lambda task, completion: 1/0
    t.model.train()
    try: t.train_step()
    except tasks.VerifierError: pass
    else: raise AssertionError('a verifier that fails must stop the step: call it through `score`, and let its error pass')
    assert t.model.training and same(before, state(t)), 'a step that stops half-way leaves the policy, its mode and the optimizer as they were'


@alone
def test_train_step_learns(rl):
    t = make_trainer(rl, dropout=0., kl_coef=.01, groups_per_step=4)
    rewards = [t.train_step()['reward_mean'] for _ in range(25)]
    early, late = sum(rewards[:5])/5, sum(rewards[-5:])/5
    assert late > early + .3, f'25 steps should raise the reward, but it went from {early:.2f} to {late:.2f}'
