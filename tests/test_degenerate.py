"""Groups without contrast teach nothing, exactly: no advantage, no step, not one byte of difference."""
from copy import deepcopy
from math import isnan
from random import Random

import pytest
import torch

from g2c_rl import trainer
from g2c_rl.advantages import group_advantages
from g2c_rl.baselm.model import load_baselm
from g2c_rl.lora import add_lora
from g2c_rl.tasks import VerifierError, get_family
from g2c_rl.trainer import GRPOTrainer

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float64])


def byte_for_byte(a, b):
    "Equal in structure and in every byte: `torch.equal` takes -0. for 0., and NaN for different from itself"
    if isinstance(a, torch.Tensor):
        raw = lambda t: t.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(raw(a), raw(b))
    if isinstance(a, dict): return list(a) == list(b) and all(byte_for_byte(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(byte_for_byte, a, b))
    return a == b


# ---------- advantages

@DTYPES
@pytest.mark.parametrize('value,k', [(.6, 16), (.1, 3), (1/3, 7), (1e-30, 5), (1e30, 5), (-.7, 11), (0., 8), (1., 8), (16777217., 6)])
def test_equal_rewards_give_exact_zeros(value, k, dtype):
    rewards = torch.full((k,), value, dtype=dtype)
    got = group_advantages(rewards)
    assert got.dtype == dtype and byte_for_byte(got, torch.zeros(k, dtype=dtype))


def test_the_traps_are_traps():
    "What the standard deviation says about rewards that are all the same number"
    same_rewards = torch.full((16,), .6)
    assert 0 < same_rewards.std() < 1e-6 and ((same_rewards - same_rewards.mean()) / same_rewards.std()).abs().max() > .5
    close = torch.tensor([.6, .6 + 1e-8], dtype=torch.float64)
    assert 0 < close.std() < 1e-8, 'these differ; an epsilon of 1e-8 would halve them'


def test_rewards_that_differ_by_little_are_not_degenerate():
    for low,step in ((.6, 1e-8), (0., 1e-8), (1., 1e-12), (100., 1e-12)):
        rewards = torch.tensor([low, low, low + step, low], dtype=torch.float64)
        assert rewards[2] != low
        expected = torch.tensor([-.5, -.5, 1.5, -.5], dtype=torch.float64)
        assert torch.allclose(group_advantages(rewards), expected, atol=1e-9, rtol=0)
    assert byte_for_byte(group_advantages(torch.tensor([.6, .6 + 1e-8])), torch.zeros(2)), 'in float32 these two are one number'
    one_apart = torch.tensor([.1, .1, .1])
    one_apart[0] = one_apart[0].nextafter(torch.tensor(0.))
    assert torch.allclose(group_advantages(one_apart), torch.tensor([-2., 1., 1.])/3**.5, atol=1e-6)


@DTYPES
def test_a_group_of_one_has_no_siblings(dtype):
    assert byte_for_byte(group_advantages(torch.tensor([.6], dtype=dtype)), torch.zeros(1, dtype=dtype))
    assert byte_for_byte(group_advantages(torch.tensor([[1.], [0.], [.3]], dtype=dtype)), torch.zeros(3, 1, dtype=dtype))
    with pytest.raises(ValueError, match='finite'): group_advantages(torch.tensor([float('nan')], dtype=dtype))


@DTYPES
def test_unscorable_rewards_raise_wherever_they_stand(dtype):
    nan, inf = float('nan'), float('inf')
    for bad in ([nan]*4, [inf]*4, [-inf, inf, 0., 1.], [1., 0., nan, 0.], [[1., 0.], [nan, nan]], [[1., 1.], [inf, inf]]):
        with pytest.raises(ValueError, match='finite'): group_advantages(torch.tensor(bad, dtype=dtype))


@DTYPES
def test_mixed_batches(dtype):
    "Dead rows are zero, live rows are what they are alone, in any order and company"
    live = [torch.tensor(r, dtype=dtype) for r in ([1., 0., 0., 0.], [.6, .6, .6, .7], [0., 1., 2., 3.])]
    dead = [torch.full((4,), v, dtype=dtype) for v in (.6, .1, 0., 1., 1e6)]
    rows = [dead[0], live[0], dead[1], dead[2], live[1], live[2], dead[3], dead[4]]
    got = group_advantages(torch.stack(rows))
    for row,advantage in zip(rows, got):
        assert byte_for_byte(advantage, group_advantages(row))
        assert advantage.any().item() == any(row is l for l in live)
    assert byte_for_byte(group_advantages(torch.stack(rows).view(2, 4, 4)), got.view(2, 4, 4))
    assert torch.allclose(got.sum(-1), torch.zeros(8, dtype=dtype), atol=1e-6)
    assert got.abs().max() <= 3/4**.5 + 1e-6


# ---------- a step without contrast

FAMILY = get_family('arithmetic')


def by_length(task, completion): return float(len(completion) % 2)


def bundled_trainer(**kwargs):
    model, tokenizer = load_baselm()
    settings = dict(k=6, groups_per_step=3, max_new_tokens=FAMILY.max_new_tokens, kl_coef=.2, lr=1e-2, seed=1) | kwargs
    return GRPOTrainer(add_lora(model), tokenizer, FAMILY.make, by_length, **settings)


def everything(t): return deepcopy((t.model.state_dict(), t.optimizer.state_dict()))


@pytest.mark.parametrize('verdict', [0., 1., .6, .1, -3.])
def test_a_dead_step_changes_not_one_byte(verdict):
    t = bundled_trainer()
    for _ in range(2): assert t.train_step()['updated'] == 1
    moments = [s['exp_avg'] for s in t.optimizer.state_dict()['state'].values()]
    assert len(moments) == len(t.parameters) and any(m.any() for m in moments), 'there is momentum that could move something'
    before = everything(t)
    t.verifier = lambda task, completion: verdict
    for _ in range(2):
        metrics = t.train_step()
        assert byte_for_byte(before, everything(t))
        assert metrics['updated'] == 0 and metrics['all_fail'] + metrics['all_pass'] == 3 and metrics['reward_spread'] < 1e-12
        assert all(isnan(metrics[name]) for name in ('kl', 'loss', 'grad_norm', 'seconds_update'))
    t.verifier = by_length
    assert t.train_step()['updated'] == 1 and not byte_for_byte(before, everything(t)), 'and afterwards it learns again'


def test_the_comparison_would_notice():
    "The same check on a step that does call the optimizer with no gradient to follow"
    t = bundled_trainer()
    t.train_step()
    before = everything(t)
    for p in t.parameters: p.grad = torch.zeros_like(p)
    t.optimizer.step()
    after = everything(t)
    assert not byte_for_byte(before[0], after[0]) and not byte_for_byte(before[1], after[1])
    assert not byte_for_byte(torch.tensor([0.]), torch.tensor([-0.])) and byte_for_byte(torch.tensor([float('nan')]), torch.tensor([float('nan')]))


def test_a_dead_group_is_neither_scored_nor_differentiated(monkeypatch):
    t, calls = bundled_trainer(), []
    score, lossf = trainer.group_log_probs, trainer.grpo_loss
    monkeypatch.setattr(trainer, 'group_log_probs', lambda *args, **kwargs: calls.append('score') or score(*args, **kwargs))
    monkeypatch.setattr(trainer, 'grpo_loss', lambda *args, **kwargs: calls.append('loss') or lossf(*args, **kwargs))
    t.verifier = lambda task, completion: .6
    t.train_step()
    assert calls == []
    turn = iter(range(100))
    t.verifier = lambda task, completion: float(6 <= (i := next(turn)) < 12 and i % 2)     # only the second of three groups is live
    metrics = t.train_step()
    assert calls == ['score', 'score', 'loss'] and (metrics['updated'], metrics['all_fail']) == (1, 2)


def test_dead_neighbours_leave_a_live_groups_step_alone():
    "One live group, alone or between dead ones: the same gradient, the same bytes after the step"
    prompts = [FAMILY.make(Random(i)) for i in range(3)]
    def step(order):
        t = bundled_trainer(groups_per_step=len(order))
        tasks = iter([prompts[i] for i in order])
        t.make_task, t.verifier = (lambda rng: next(tasks)), (lambda task, completion: by_length(task, completion) if task is prompts[0] else .6)
        metrics = t.train_step()
        return [p.grad.clone() for p in t.parameters], metrics
    (alone, a), (first, b) = step([0]), step([0, 1, 2])   # first in line, so that it gets the same uniforms
    assert (a['updated'], b['updated'], b['all_fail']) == (1, 1, 2)
    for x,y in zip(alone, first): assert torch.allclose(x, y, atol=1e-6)
    for name in ('loss', 'kl', 'grad_norm'): assert abs(a[name] - b[name]) < 1e-4, name


def test_a_verifier_without_an_answer_stops_the_step():
    t = bundled_trainer()
    t.train_step()
    before = everything(t)
    for verdict in (float('nan'), None, float('inf')):
        t.verifier = lambda task, completion, v=verdict: v
        with pytest.raises(VerifierError, match='finite number'): t.train_step()
        assert byte_for_byte(before, everything(t))
