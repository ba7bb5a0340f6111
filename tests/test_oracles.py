"""Agreement with other frameworks, on one fixed input, at 1e-6.

`oracles/losses.json` holds what unmodified functions of verl, TRL, OpenRLHF and others compute on eight rows of two groups; each
value names its source. Through the public functions of the core can be expressed:

- the advantages: with the standard deviation (theirs has an epsilon of 1e-6 in the denominator), mean only and leave-one-out (the
  core has no option for these two: they are `group_advantages` times the group's spread);
- the means of k1, k2 and k3 over tokens, and verl's `ppo_kl`, which is k1 between old and new policy;
- the *gradients* of the clipped losses, in all their aggregations, where the clip is not active. The core is on-policy, its ratio
  is always 1, so it is compared after dividing the oracle's gradient by the ratio. The aggregation is in what is handed over:
  tokens, means over rows or sums over rows.

Not expressible, since the core has neither ratio nor clip: the values of the clipped losses and their shares of clipped tokens
(of which only the zero gradient of clipped tokens is used here), `gspo` (a clipped ratio of whole sequences, and no gradient was
recorded) and TRL's diagnostics.
"""
import json
from pathlib import Path

import pytest
import torch

from g2c_rl.advantages import group_advantages
from g2c_rl.loss import grpo_loss, kl_estimate

ORACLES = json.loads((Path(__file__).parent/'oracles'/'losses.json').read_text(encoding='utf-8'))
VALUES = {name: v['value'] for name,v in ORACLES['values'].items()}
INPUTS = {name: torch.tensor(v, dtype=torch.float64) for name,v in ORACLES['inputs'].items()}
LOGP, OLD, REF, MASK = (INPUTS[name] for name in ('logp', 'old_logp', 'ref_logp', 'mask'))
REWARDS = INPUTS['rewards'].view(2, 4)                # rows 0-3 and 4-7 are the two groups
SPREAD = REWARDS.std(-1, keepdim=True)


def close(a, b, eps=1e-6): return torch.allclose(a, torch.as_tensor(b, dtype=torch.float64), rtol=0, atol=eps)


def test_every_oracle_has_a_source_and_a_place():
    assert all(v['source'] for v in ORACLES['values'].values())
    compared = {'advantage.grpo.std(ddof=1)+1e-6', 'advantage.mean_only', 'advantage.rloo', *(f'kl.{k}.masked_mean' for k in ('k1', 'k2', 'k3'))}
    compared |= set(AGGREGATIONS)
    assert set(VALUES) - compared == {'gspo'}, 'a value was added: compare it, or say why not'
    assert INPUTS['group'].tolist() == [0]*4 + [1]*4 and INPUTS['G'] == 4


# ---------- advantages

def test_advantages_with_the_standard_deviation():
    theirs, ours = torch.tensor(VALUES['advantage.grpo.std(ddof=1)+1e-6'], dtype=torch.float64), group_advantages(REWARDS)
    # theirs = (r - mean) / (std + eps), ours without eps: the difference is |A| eps / (std + eps), for a spread of .25 up to 6e-6
    assert close((ours * SPREAD / (SPREAD + 1e-6)).flatten(), theirs)
    bound = (ours.abs() * 1e-6 / SPREAD).flatten() + 5e-7    # and their float32
    assert ((ours.flatten() - theirs).abs() <= bound).all()
    assert not close((REWARDS - REWARDS.mean(-1, keepdim=True)).flatten() / REWARDS.std(-1, unbiased=False).repeat_interleave(4), theirs, 1e-2)


def test_advantages_times_the_spread():
    centred = (group_advantages(REWARDS) * SPREAD).flatten()
    assert close(centred, VALUES['advantage.mean_only'])
    assert close(centred * 4/3, VALUES['advantage.rloo'])


# ---------- KL

@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3'])
def test_kl(estimator):
    k = kl_estimate(LOGP, REF, estimator)
    assert k.shape == LOGP.shape
    assert close((k*MASK).sum() / MASK.sum(), VALUES[f'kl.{estimator}.masked_mean'])


@pytest.mark.parametrize('name', ['clipped.token_mean', 'clipped.seq_mean_token_mean', 'clipped.seq_mean_token_sum'])
def test_ppo_kl(name):
    assert close((kl_estimate(OLD, LOGP, 'k1')*MASK).sum() / MASK.sum(), VALUES[name]['ppo_kl'])


# ---------- losses

ADVANTAGES = torch.tensor(VALUES['advantage.grpo.std(ddof=1)+1e-6'], dtype=torch.float64)   # (8,)
RATIO = (LOGP - OLD).exp()


def tokens(logp): return grpo_loss(logp[MASK.bool()], None, ADVANTAGES[:, None].expand_as(LOGP)[MASK.bool()], 0.)
def row_means(logp): return grpo_loss((logp*MASK).sum(-1) / MASK.sum(-1), None, ADVANTAGES, 0.)
def row_sums(logp): return grpo_loss((logp*MASK).sum(-1), None, ADVANTAGES, 0.)        # what the trainer does
def row_sums_over_max(logp): return row_sums(logp) / INPUTS['max_len']


AGGREGATIONS = {'clipped.token_mean': (tokens, .2), 'clipped.token_mean.clip_higher(.2,.28)': (tokens, .28),
                'clipped.seq_mean_token_mean': (row_means, .2), 'clipped.seq_mean_token_sum': (row_sums, .2),
                'clipped.dr_grpo(max_len)': (row_sums_over_max, .2)}


@pytest.mark.parametrize('name', AGGREGATIONS)
def test_gradient_of_the_losses_at_ratio_one(name):
    loss, clip_high = AGGREGATIONS[name]
    positive = ADVANTAGES[:, None] > 0
    clipped = torch.where(positive, RATIO > 1 + clip_high, RATIO < 1 - INPUTS['clip']) & MASK.bool()
    logp = LOGP.clone().requires_grad_()
    (ours,) = torch.autograd.grad(loss(logp), logp)
    theirs = torch.tensor(VALUES[name]['grad'], dtype=torch.float64)
    if clip_high == .2: assert clipped.sum().item() == round(VALUES['clipped.token_mean']['clipfrac'] * MASK.sum().item()) == 8
    assert not theirs[clipped].any() and (~clipped & MASK.bool()).sum() > 20
    assert close((theirs / RATIO)[~clipped], ours[~clipped]), 'sign, weights or advantages differ'
    assert not ours[~MASK.bool()].any()


def test_the_advantages_are_ours_too():
    logp = LOGP.clone().requires_grad_()
    with_ours = grpo_loss((logp*MASK).sum(-1), None, group_advantages(REWARDS).flatten(), 0.)
    (a,), (b,) = torch.autograd.grad(with_ours, logp), torch.autograd.grad(row_sums(logp), logp)
    assert close(a, b, 1e-6 * ADVANTAGES.abs().max().item() / SPREAD.min().item() / 8 + 1e-7)   # the epsilon, again
