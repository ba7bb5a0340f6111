"""The 22 tests: eight on what an exercise is given, fourteen on the four functions that it asks for.

They run in seconds, on a policy of a few hundred numbers. Every test takes the namespace `rl`, so that the same test
can be put to another implementation.
"""
from copy import deepcopy
from math import exp, isnan
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from g2c_rl import advantages, logprobs, loss, lora, sampling, tasks, trainer
from g2c_rl.tasks import Task


@pytest.fixture
def rl():
    "The implementation under test"
    return SimpleNamespace(group_advantages=advantages.group_advantages, completion_log_prob=logprobs.completion_log_prob,
                           grpo_loss=loss.grpo_loss, GRPOTrainer=trainer.GRPOTrainer)


# ---------- a tiny policy

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
    return torch.stack([sum(model(row[None, :t])[0, -1].log_softmax(-1)[row[t]] for t in range(prompt_len, prompt_len + n)) for row,n in zip(ids, lengths)])


def make_trainer(rl, verifier, dropout=.5, policy_seed=11, **kwargs):
    model = lora.add_lora(Policy(policy_seed, dropout), rank=2, targets=('head',))
    with torch.no_grad():   # a policy that has left its base, so that the leash pulls
        for m in lora.adapters(model).values(): m.lora_B.copy_(torch.randn(m.lora_B.shape, generator=torch.Generator().manual_seed(9)) * .3)
    settings = dict(k=6, groups_per_step=2, max_new_tokens=3, kl_coef=.1, lr=.05, seed=3) | kwargs
    return rl.GRPOTrainer(model, Letters(), lambda rng: Task(rng.choice(['bad', 'cab', 'ace']), 0), verifier, **settings)


def starts_with_c(task, completion): return float(completion[:1] == 'c')


def state(t):
    return deepcopy((t.model.state_dict(), t.optimizer.state_dict()))


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


@pytest.mark.parametrize('name', [','.join(tasks.families)])
def test_exam_and_training_are_disjoint(name):
    for family in map(tasks.get_family, name.split(',')):
        rng = Random(0)
        exam = {t.prompt for t in tasks.held_out_tasks(family, 100)}
        assert len(exam) == 100 and not exam & {family.make(rng).prompt for _ in range(3000)}


def test_sampler_refuses_what_cannot_work():
    policy, letters = Policy(), Letters()
    for arguments,words in ((('bad', 0, 3), 'k must be at least 1, got 0'), (('bad', 2, 0), 'max_new_tokens must be at least 1, got 0'), (('', 2, 3), 'no tokens')):
        with pytest.raises(ValueError, match=words): sampling.sample_group(policy, letters, *arguments)
    with pytest.raises(ValueError, match='temperature must be 1.0, got 0.7'): sampling.sample_group(policy, letters, 'bad', 2, 3, temperature=.7)


def test_trainer_refuses_what_cannot_work():
    make = lambda model, **kwargs: trainer.GRPOTrainer(model, Letters(), lambda rng: Task('bad', 0), starts_with_c, **kwargs)
    with pytest.raises(ValueError, match='102 of 102 parameters would be trained'): make(Policy())
    adapted = lora.add_lora(Policy(), rank=2, targets=('head',))
    with pytest.raises(ValueError, match='k must be at least 2, got 1'): make(adapted, k=1)
    with pytest.raises(ValueError, match='shares 2 trainable parameters'): make(adapted, reference=adapted)
    with pytest.raises(ValueError, match='steps must be at least 1, got 0'): make(adapted).train(0)


# ---------- asked for: group_advantages

def test_advantages_by_hand(rl):
    got = rl.group_advantages(torch.tensor([1., 1., 0., 0.]))
    assert torch.allclose(got, torch.tensor([1., 1., -1., -1.]) * 3**.5 / 2, atol=1e-6), f'centre by the mean, divide by the standard deviation with K-1: {got}'
    got = rl.group_advantages(torch.tensor([0., .5, 1., 10.]))
    assert torch.allclose(got, torch.tensor([-2.875, -2.375, -1.875, 7.125]) / (68.1875/3)**.5, atol=1e-6), f'centre by the mean, divide by the standard deviation with K-1: {got}'


def test_advantages_of_each_group_alone(rl):
    got = rl.group_advantages(torch.tensor([[1., 0., 0., 0.], [1., 1., 1., 0.], [2., 2., 2., 2.]]))
    assert got.shape == (3, 4), 'rewards (G, K) give advantages (G, K)'
    expected = torch.tensor([[1.5, -.5, -.5, -.5], [.5, .5, .5, -1.5], [0., 0., 0., 0.]])
    assert torch.allclose(got, expected, atol=1e-6), f'statistics are those of a group, not of the batch: {got}'


def test_advantages_of_a_degenerate_group_are_zero(rl):
    for same_rewards in (torch.full((16,), .6), torch.full((3,), .1), torch.zeros(4), torch.full((7,), 1e8), torch.tensor([3.])):
        got = rl.group_advantages(same_rewards)
        assert torch.equal(got, torch.zeros_like(same_rewards)), f'equal rewards {same_rewards.tolist()} teach nothing, but the advantages are {got.tolist()}'
    close = torch.tensor([.6, .6, .6 + 6e-8])   # different by one rounding step: not degenerate
    assert torch.allclose(rl.group_advantages(close), torch.tensor([-1., -1., 2.]) / 3**.5, atol=1e-5), 'rewards that differ, by however little, are not degenerate'


def test_advantages_refuse_rewards_that_are_not_finite(rl):
    for bad in (float('nan'), float('inf'), -float('inf')):
        with pytest.raises(ValueError, match='finite'): rl.group_advantages(torch.tensor([1., bad, 0.]))
    with pytest.raises(ValueError, match='finite'): rl.group_advantages(torch.full((4,), float('nan')))


# ---------- asked for: completion_log_prob

def test_log_prob_equals_one_token_at_a_time(rl):
    model = Policy().eval()
    got, expected = rl.completion_log_prob(model, IDS, 3, MASK), slow_log_prob(model, IDS, 3, LENGTHS)
    assert got.shape == (4,), f'one number for each completion, got shape {tuple(got.shape)}'
    assert torch.allclose(got, expected, atol=1e-5), f'position t predicts token t+1; sum over the completion only: {got.tolist()} instead of {expected.tolist()}'
    whole = rl.completion_log_prob(model, IDS, 3)
    assert torch.allclose(whole, slow_log_prob(model, IDS, 3, [3]*4), atol=1e-5), 'without a mask every token after the prompt counts'


def test_log_prob_ignores_prompt_and_padding_tokens(rl):
    class Table(nn.Module):   # each token depends on the one before only
        def __init__(self): super().__init__(); self.table = nn.Embedding.from_pretrained(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)))
        def forward(self, ids): return self.table(ids)
    model, other = Table(), IDS.clone()
    other[:, :2] = 2
    assert torch.allclose(rl.completion_log_prob(model, other, 3, MASK), rl.completion_log_prob(model, IDS, 3, MASK), atol=1e-6), 'your log-prob changes when a prompt token changes that no completion token sees'
    other = IDS.clone()
    other[~torch.cat([torch.ones(4, 3).bool(), MASK], 1)] = 1
    assert torch.allclose(rl.completion_log_prob(model, other, 3, MASK), rl.completion_log_prob(model, IDS, 3, MASK), atol=1e-6), 'your log-prob changes with what stands in the padding'


def test_log_prob_counts_the_end_of_sequence(rl):
    model = Policy().eval()
    got = rl.completion_log_prob(model, IDS, 3, MASK)
    stop = model(IDS[2:3, :3])[0, -1].log_softmax(-1)[EOS]
    assert torch.allclose(got[2], stop, atol=1e-6), 'a completion that stops at once has the log-prob of its EOS, even though EOS is also the padding'
    observed = torch.tensor([[1, 0, 1]]*4).bool()   # the middle token was written by a tool
    each = torch.stack([slow_log_prob(model, IDS, 3, [n]*4) for n in (1, 2, 3)])
    assert torch.allclose(rl.completion_log_prob(model, IDS, 3, observed), each[0] + each[2] - each[1], atol=1e-5), 'tokens that the mask leaves out are not scored, wherever they stand'


def test_log_prob_gradient(rl):
    model = Policy().eval()
    weights = torch.tensor([1., -2., .5, 3.])
    (weights * rl.completion_log_prob(model, IDS, 3, MASK)).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (weights * slow_log_prob(model, IDS, 3, LENGTHS)).sum().backward()
    for g,p in zip(got, model.parameters()): assert torch.allclose(g, p.grad, atol=1e-4), 'the gradient must flow through every scored token'


# ---------- asked for: grpo_loss

def test_grpo_loss_by_hand(rl):
    logp, ref, adv = torch.tensor([-1., -3., -2.]), torch.tensor([-1.5, -2., -2.]), torch.tensor([2., -1., .5])
    policy = -(2.*-1 + -1.*-3 + .5*-2) / 3
    kl = (exp(-.5) + .5 - 1 + exp(1.) - 1. - 1) / 3
    got = rl.grpo_loss(logp, ref, adv, 0.).item()
    assert abs(got - policy) < 1e-6, f'without a leash the loss is -(A * logp).mean() = {policy:.6f}, got {got:.6f}'
    got = rl.grpo_loss(logp, ref, adv, .3).item()
    assert abs(got - policy - .3*kl) < 1e-6, f'the KL estimate is exp(ref-logp) - (ref-logp) - 1, averaged: expected {policy + .3*kl:.6f}, got {got:.6f}'


def test_grpo_loss_gradient(rl):
    logp, ref, adv = torch.tensor([-1., -3., -2.], requires_grad=True), torch.tensor([-1.5, -2., -2.], requires_grad=True), torch.tensor([2., -1., .5], requires_grad=True)
    rl.grpo_loss(logp, ref, adv, .3).backward()
    expected = -adv.detach()/3 + .3/3*(1 - (ref - logp).detach().exp())
    assert torch.allclose(logp.grad, expected, atol=1e-6), f'wrong push: {logp.grad.tolist()} instead of {expected.tolist()}'
    assert ref.grad is None or not ref.grad.any(), 'the reference is frozen: no gradient may reach it'
    assert adv.grad is None or not adv.grad.any(), 'advantages are numbers: no gradient may reach them'
    equal = torch.tensor([-4., -.1], requires_grad=True)
    value = rl.grpo_loss(equal, equal.detach(), torch.zeros(2), 1.)
    value.backward()
    assert value.item() == 0 and not equal.grad.any(), 'policy and reference agree: the leash is exactly zero and does not pull'


def test_grpo_loss_survives_any_distance(rl):
    for d in (100., 1e4, -100., -1e4):
        logp = torch.tensor([-20000., -1.], requires_grad=True)
        value = rl.grpo_loss(logp, torch.tensor([-20000. + d, -1.]), torch.zeros(2), .1)
        value.backward()
        assert value.isfinite() and logp.grad.isfinite().all(), f'a log-prob difference of {d:g} overflows'
        assert value > 0 and logp.grad[0]*d < 0, f'at a log-prob difference of {d:g} the leash must pull back towards the reference'


# ---------- asked for: train_step

def test_train_step_takes_the_step_of_its_batch(rl):
    t = make_trainer(rl, starts_with_c)
    twin = deepcopy(t.model).eval()             # takes the same steps, written out
    adapters = [p for p in twin.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=.05, weight_decay=0.)
    frozen = {name: p.clone() for name,p in t.model.named_parameters() if 'lora' not in name}
    live = set()
    t.model.train()
    for _ in range(3):
        metrics = t.train_step()
        assert t.model.training, 'the model gets its own mode back'
        losses, kls = [], []
        for task,g in zip(*t.batch[:2]):
            r = torch.tensor([starts_with_c(task, c) for c in g.completions])
            logp = slow_log_prob(twin, g.ids, g.prompt_len, g.lengths.tolist())
            assert torch.allclose(g.logp, logp, atol=1e-5), 'a step samples afresh from the present policy, in evaluation mode'
            if r.max() == r.min(): continue
            with torch.no_grad(), lora.adapters_off(twin): d = slow_log_prob(twin, g.ids, g.prompt_len, g.lengths.tolist()) - logp.detach()
            k3 = (d - logp + logp.detach()).exp() - (d - logp + logp.detach()) - 1
            losses.append(-((r - r.mean())/r.std() * logp).mean() + .1*k3.mean())
            kls.append(k3.mean().item())
        live.add(len(losses))
        optimizer.zero_grad()
        (sum(losses)/len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.).item()
        optimizer.step()
        expected = dict(loss=sum(losses).item()/len(losses), kl=sum(kls)/len(kls), grad_norm=norm, updated=1.)
        for name,value in expected.items(): assert abs(metrics[name] - value) < 1e-4*max(1, abs(value)), f'{name} is the mean over live groups: {value:.5f}, got {metrics[name]:.5f}'
        for p,q in zip(t.parameters, adapters): assert torch.allclose(p, q, atol=1e-4), 'the adapters did not take the step of this batch'
    assert live == {1, 2}, 'the seed was chosen so that a step has a dead group and another has none'
    assert all(torch.equal(p, frozen[name]) for name,p in t.model.named_parameters() if name in frozen), 'a frozen parameter has moved'


def test_train_step_leaves_a_dead_batch_alone(rl):
    t = make_trainer(rl, starts_with_c)
    for _ in range(3): t.train_step()          # give the optimizer some momentum
    for verdict,counted in ((0., 'all_fail'), (1., 'all_pass')):
        t.verifier = lambda task, completion: verdict
        before, metrics, after = state(t), t.train_step(), state(t)
        assert same(before[0], after[0]), 'a step without contrast must not move the policy (old momentum does, if the optimizer is called)'
        assert same(before[1], after[1]), 'a step without contrast must not touch the optimizer'
        assert metrics['updated'] == 0 and metrics[counted] == 2
        assert all(isnan(metrics[name]) for name in ('kl', 'loss', 'grad_norm')), 'what was not measured is NaN, not zero'
        assert metrics['reward_mean'] == verdict and metrics['tokens'] > 0 and metrics['entropy'] > 0


def test_train_step_learns(rl):
    t = make_trainer(rl, starts_with_c, dropout=0., kl_coef=.01, groups_per_step=4)
    rewards = [t.train_step()['reward_mean'] for _ in range(40)]
    early, late = sum(rewards[:5])/5, sum(rewards[-5:])/5
    assert late > early + .3, f'forty steps should raise the reward, but it went from {early:.2f} to {late:.2f}'
