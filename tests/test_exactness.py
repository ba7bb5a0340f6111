"""Gradients and KL without sampling: every completion of a small policy, in float64.

Expected reward comes from a walk down the tree of completions that shares no code with the package. Whatever an estimator
proposes is enumerated over all groups and compared with the gradient of that walk.
"""
from itertools import product
from math import comb, log

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from g2c_rl.advantages import group_advantages
from g2c_rl.logprobs import completion_log_prob
from g2c_rl.loss import grpo_loss, kl_estimate

A, B, EOS, LONGEST, PROMPT = 0, 1, 2, 3, (1, 0)
COMPLETIONS = [y for n in range(1, LONGEST + 1) for y in product((A, B, EOS), repeat=n)
               if EOS not in y[:-1] and (n == LONGEST or y[-1] == EOS)]
IDS = torch.tensor([[*PROMPT, *y] + [EOS]*(LONGEST - len(y)) for y in COMPLETIONS])
MASK = torch.arange(LONGEST) < torch.tensor([len(y) for y in COMPLETIONS])[:, None]


class Policy(nn.Module):
    "Logits depend on all tokens so far and on their order"
    def __init__(self, seed=0, shift=0.):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.double()
        with torch.no_grad():
            for p in self.parameters(): p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
            self.head.bias[B] += shift   # an easier or a harder prompt

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(torch.tanh((x * torch.arange(1, x.shape[1] + 1)[:, None]).cumsum(1)))


def passes(y): return float(B in y)
def partial(y): return 1. if B in y else .1*(A in y)


def walk(policy, value, y=()):
    "The mean of `value(y)` over all completions: probabilities multiply along the path from the root"
    probs = policy(torch.tensor([PROMPT + y]))[0, -1].softmax(-1)
    mean = 0.
    for token,p in enumerate(probs):
        longer = (*y, token)
        end = token == EOS or len(longer) == LONGEST
        mean = mean + p * (value(longer) if end else walk(policy, value, longer))
    return mean


def log_probs(policy): return completion_log_prob(policy, IDS, len(PROMPT), MASK)


def flat_grad(value, policy):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(policy.parameters()), retain_graph=True)])


def all_groups(K): return torch.tensor(list(product(range(len(COMPLETIONS)), repeat=K)))


def table(reward): return torch.tensor([reward(y) for y in COMPLETIONS], dtype=torch.float64)


def proposals(policy, groups, advantages):
    "Of N groups (N, K): how likely each is (N,), and the ascent direction of its loss (N, P)"
    logp = log_probs(policy)
    scores = torch.stack([flat_grad(l, policy) for l in logp])
    drawn = logp.detach()[groups].requires_grad_()
    losses = torch.vmap(lambda l, a: grpo_loss(l, None, a, 0.))(drawn, advantages)
    (push,) = torch.autograd.grad(losses.sum(), drawn)
    return drawn.detach().sum(-1).exp(), -(push[..., None] * scores[groups]).sum(1)


def exact_mean(*args):
    weights, directions = proposals(*args)
    return weights @ directions


def close(a, b, eps=1e-10): return torch.allclose(a, b, rtol=0, atol=eps)


def centred(r): return group_advantages(r) * r.std(-1, keepdim=True)


# ---------- the policy gradient

@pytest.mark.parametrize('seed', range(3))
def test_probabilities_add_up_to_one(seed):
    policy = Policy(seed)
    assert len(COMPLETIONS) == 15 and abs(log_probs(policy).exp().sum().item() - 1) < 1e-12
    for i,y in enumerate(COMPLETIONS): assert close(log_probs(policy)[i].exp(), walk(policy, lambda z, y=y: float(z == y)), 1e-12)


@pytest.mark.parametrize('reward', [passes, partial])
@pytest.mark.parametrize('seed', range(3))
def test_reinforce_is_the_gradient_on_average(seed, reward):
    policy, r = Policy(seed), table(reward)[:, None]
    gradient = flat_grad(walk(policy, reward), policy)
    assert gradient.norm() > .05 and close(exact_mean(policy, all_groups(1), r), gradient)
    surrogate = sum(log_probs(policy).exp().detach()[i] * grpo_loss(log_probs(policy)[i:i+1], None, r[i], 0.) for i in range(len(r)))
    assert close(-flat_grad(surrogate, policy), gradient), 'the same through autograd from loss to weights'


def test_a_constant_baseline_changes_the_variance_only():
    policy, r = Policy(1), table(passes)[:, None]
    gradient = flat_grad(walk(policy, passes), policy)
    def variance(b):
        weights, directions = proposals(policy, all_groups(1), r - b)
        assert close(weights @ directions, gradient)
        return (weights @ (directions - gradient)**2).sum().item()
    scores = torch.stack([flat_grad(l, policy) for l in log_probs(policy)])
    weight = log_probs(policy).exp().detach() * scores.pow(2).sum(-1)
    best = (weight @ r[:, 0] / weight.sum()).item()
    assert variance(best) < min(variance(best - .01), variance(best + .01), variance(0.), variance(1.))
    assert variance(-10.) > 20*variance(best)
    assert abs(variance(best + .3) - variance(best) - .3**2 * weight.sum().item()) < 1e-10, 'a parabola'


@pytest.mark.parametrize('reward', [passes, partial])
@pytest.mark.parametrize('K', [2, 3])
def test_the_groups_mean_costs_a_factor(K, reward):
    policy, r = Policy(2), table(reward)[all_groups(K)]
    gradient = flat_grad(walk(policy, reward), policy)
    assert close(centred(r), r - r.mean(-1, keepdim=True), 1e-12)
    assert close(exact_mean(policy, all_groups(K), centred(r)), (K-1)/K * gradient)
    leave_one_out = r - (r.sum(-1, keepdim=True) - r) / (K-1)
    assert close(exact_mean(policy, all_groups(K), leave_one_out), gradient)


def stretch(p, K):
    "How many times the gradient the std-scaled estimator is, for rewards of 0 and 1"
    spread = [(n*(K-n) / (K*(K-1)))**.5 for n in range(K+1)]
    return (K-1)/K * sum(comb(K, n) * p**n * (1-p)**(K-n) * spread[n] for n in range(K+1)) / (p*(1-p))


@pytest.mark.parametrize('K,shift', [(2, -3.), (3, 0.), (4, -4.), (4, 0.), (4, 4.)])
def test_dividing_by_the_spread_stretches_the_gradient(K, shift):
    policy = Policy(0, shift)
    p = walk(policy, passes)
    gradient = flat_grad(p, policy)
    got = exact_mean(policy, all_groups(K), group_advantages(table(passes)[all_groups(K)]))
    assert close(got, stretch(p.item(), K) * gradient)


def test_the_stretch_depends_on_difficulty():
    for K in (2, 3):
        for p in (.001, .2, .5, .99): assert abs(stretch(p, K) - (K-1)/K**.5) < 1e-12, 'none in groups of two and three'
    for K in (4, 8, 16):
        assert abs(stretch(1e-8, K) - (K-1)/K**.5) < 1e-6, 'at the ends, the bound on an advantage'
        assert stretch(.01, K) > stretch(.1, K) > stretch(.5, K) and abs(stretch(.9, K) - stretch(.1, K)) < 1e-12
    assert 1.4 < stretch(1e-8, 8) / stretch(.5, 8) < 1.45
    assert abs(stretch(.5, 900) - 2) < .003, 'many samples: 1/sqrt(p(1-p))'


@pytest.mark.parametrize('K', [2, 3])
def test_dividing_by_the_spread_bends_the_gradient_of_partial_credit(K):
    policy, r = Policy(8), table(partial)[all_groups(K)]
    gradient = flat_grad(walk(policy, partial), policy)
    assert cosine_similarity(exact_mean(policy, all_groups(K), group_advantages(r)), gradient, 0) < .97
    assert cosine_similarity(exact_mean(policy, all_groups(K), centred(r)), gradient, 0) > 1 - 1e-12


@pytest.mark.parametrize('estimator,direction', [('k3', 'forward'), ('k2', 'reverse')])
def test_the_whole_loss(estimator, direction):
    "Groups of two with a leash: the mean gradient is that of the reward, less that of the leash's own KL"
    policy, groups = Policy(3), all_groups(2)
    ref = log_probs(Policy(4)).detach()
    r, logp = table(passes)[groups], log_probs(policy)
    weights = logp.detach()[groups].sum(-1).exp()
    losses = torch.vmap(lambda l, f, a: grpo_loss(l, f, a, .7, estimator))(logp[groups], ref[groups], centred(r))
    kl = (logp.exp() * (logp - ref)).sum() if direction == 'reverse' else (ref.exp() * (ref - logp)).sum()
    expected = -flat_grad(walk(policy, passes), policy)/2 + .7*flat_grad(kl, policy)
    assert close(flat_grad((weights*losses).sum(), policy), expected)
    default = torch.vmap(lambda l, f, a: grpo_loss(l, f, a, .7))(logp[groups], ref[groups], centred(r))
    assert (estimator == 'k3') == close(default, losses), 'k3 is the default'


# ---------- the KL estimators

def drifted(seed): return log_probs(Policy(seed)), log_probs(Policy(seed + 10)).detach()


def weighted(logp, ref, estimator): return (logp.detach().exp() * kl_estimate(logp, ref, estimator)).sum()


@pytest.mark.parametrize('seed', range(3))
def test_values_of_the_estimators(seed):
    logp, ref = (l.detach() for l in drifted(seed))
    kl = (logp.exp() * (logp - ref)).sum()
    assert kl > .1 and close(weighted(logp, ref, 'k1'), kl, 1e-12) and close(weighted(logp, ref, 'k3'), kl, 1e-12)
    assert abs(weighted(logp, ref, 'k2') - kl) > .01, 'k2 is biased'
    assert (kl_estimate(logp, ref, 'k2') >= 0).all() and (kl_estimate(logp, ref, 'k3') >= 0).all() and (kl_estimate(logp, ref, 'k1') < 0).any()
    errors = []
    for t in (.02, .01):   # k2 agrees to second order: half the distance, an eighth of the error
        near = (ref + t*(logp - ref)).log_softmax(-1)
        errors.append(abs(weighted(near, ref, 'k2') - (near.exp() * (near - ref)).sum()).item())
    assert 7 < errors[0]/errors[1] < 9
    chi = (logp.exp()**2 / ref.exp()).sum() - 1
    assert close((logp.exp() * kl_estimate(ref, logp, 'k3')).sum() / (chi - kl), torch.ones_like(kl), 1e-12), 'with the arguments exchanged: chi-square minus KL'


def test_two_outcomes_by_hand():
    logp, ref = torch.tensor([.9, .1], dtype=torch.float64).log(), torch.tensor([.5, .5], dtype=torch.float64).log()
    assert [round(weighted(logp, ref, e).item(), 4) for e in ('k1', 'k2', 'k3')] == [.3681, .2850, .3681]
    assert round((logp.exp() * kl_estimate(ref, logp, 'k3')).sum().item(), 4) == .2719
    assert close(kl_estimate(logp, ref, 'k3'), torch.tensor([5/9 - log(5/9) - 1, 5 - log(5) - 1], dtype=torch.float64), 1e-12)


@pytest.mark.parametrize('seed', range(3))
def test_gradients_of_the_estimators(seed):
    policy = Policy(seed)
    logp, ref = log_probs(policy), log_probs(Policy(seed + 10)).detach()
    reverse, forward = flat_grad((logp.exp() * (logp - ref)).sum(), policy), flat_grad((ref.exp() * (ref - logp)).sum(), policy)
    assert not close(reverse, forward, .01)
    for estimator,expected in (('k1', 0*reverse), ('k2', reverse), ('k3', forward)):
        assert close(flat_grad(weighted(logp, ref, estimator), policy), expected), estimator


def test_k1_in_the_loss_is_a_baseline():
    logp, ref = (l.detach().requires_grad_() for l in drifted(0))
    a = torch.randn(len(logp), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with_k1 = grpo_loss(logp, None, a, 0.) + .3*kl_estimate(logp, ref.detach(), 'k1').mean()
    shifted = grpo_loss(logp, None, a - .3, 0.)
    assert close(torch.autograd.grad(with_k1, logp)[0], torch.autograd.grad(shifted, logp)[0], 1e-14)


def test_noise_near_the_reference_and_far_from_it():
    def deviation(t, estimator):
        logp, ref = torch.tensor([t, 0.], dtype=torch.float64).log_softmax(-1), torch.full((2,), .5, dtype=torch.float64).log()
        mean = weighted(logp, ref, estimator)
        return (logp.exp() * (kl_estimate(logp, ref, estimator) - mean)**2).sum().sqrt()
    assert deviation(.25, 'k3') < .02*deviation(.25, 'k1') and deviation(4., 'k3') > 4*deviation(4., 'k1')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('estimator', ['k2', 'k3'])
def test_the_leash_is_slack_at_equality_and_pulls_everywhere_else(estimator, dtype):
    for level in (0., -1e-3, -30., -2e4):
        x = torch.tensor([level, -1.7], dtype=dtype, requires_grad=True)
        k = kl_estimate(x, x.detach(), estimator)
        assert k.tolist() == [0., 0.] and torch.autograd.grad(k.sum(), x)[0].tolist() == [0., 0.]
    for size in (1e-3, .1, 1., 10., 19.9, 20., 20.1, 88., 89., 100., 1e3, 1e4):
        for d in (size, -size):
            x = torch.zeros(1, dtype=dtype, requires_grad=True)
            k = kl_estimate(x, torch.tensor([d], dtype=dtype), estimator)
            (g,) = torch.autograd.grad(k, x)
            assert k.isfinite() and k > 0 and g.isfinite() and g*d < 0, (d, k, g)
            least = min(size, .99) if estimator == 'k2' else min(size/2, .99)
            assert abs(g) >= least, f'at {d} the pull has faded to {g.item()}'


def test_k3_is_itself_up_to_the_tangent_and_convex_beyond():
    d = torch.linspace(-50, 60, 2201, dtype=torch.float64)
    x = torch.zeros_like(d, requires_grad=True)
    k = kl_estimate(x, d)
    (g,) = torch.autograd.grad(k.sum(), x)
    near = d <= 20
    assert torch.allclose(k[near], d[near].exp() - d[near] - 1, rtol=1e-12, atol=1e-12)
    assert torch.allclose(g[near], 1 - d[near].exp(), rtol=1e-12, atol=1e-12)
    assert (g.diff() <= 0).all() and (k.diff().diff() > -1e-4).all(), 'no kink the wrong way'
    beyond = d > 20
    assert torch.allclose(g[beyond], g.new_tensor(1.) - torch.tensor(20., dtype=torch.float64).exp(), rtol=1e-12), 'the slope goes on'


# ---------- a torn leash

T, P, Q = 32, .9, .3                                       # 32 independent tokens: only how many are of the first kind matters
COUNT = torch.arange(T + 1, dtype=torch.float64)


def bernoulli(p): return COUNT*log(p) + (T - COUNT)*log(1 - p)


def test_far_away_summed_k3_is_k1_on_all_that_is_ever_drawn():
    logp, ref = bernoulli(P).requires_grad_(), bernoulli(Q)
    pi = (logp.detach() + torch.tensor([log(comb(T, i)) for i in range(T + 1)], dtype=torch.float64)).exp()
    score = COUNT - T*P                                    # of the policy's log-odds
    def pull(estimator): return torch.autograd.grad(kl_estimate(logp, ref, estimator).sum(), logp)[0]
    def strength(estimator):                               # mean over standard deviation, of one completion's pull on the log-odds
        g = pull(estimator) * score
        mean = (pi*g).sum()
        return (mean / (pi*(g - mean)**2).sum().sqrt()).item()
    assert abs(pi.sum().item() - 1) < 1e-12
    reverse = T*P*(1-P)*(log(P/(1-P)) - log(Q/(1-Q)))
    assert close((pi * pull('k2') * score).sum(), torch.tensor(reverse, dtype=torch.float64), 1e-9)
    drawn = pi.cumsum(0) > .01                             # 99 of 100 completions
    assert (pull('k3')[drawn] - 1).abs().max() < 1e-3, 'k3 pushes all of them equally'
    assert pull('k2')[drawn].diff().min() > 1, 'k2 pulls harder on what has drifted further'
    assert strength('k2') > .2 and 0 < strength('k3') < 1e-4
