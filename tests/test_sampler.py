"""Sampling and scoring describe one and the same policy: with a cache or without, in a batch or alone, in any mode."""
from itertools import product

import pytest
import torch
from test_rl import EOS, Letters, Policy, slow_log_prob
from torch import nn

from g2c_rl.baselm.model import load_baselm
from g2c_rl.logprobs import completion_log_prob, last_logits
from g2c_rl.lora import add_lora
from g2c_rl.sampling import draw, greedy_completions, sample_group, sample_groups

LM, TOKENIZER = load_baselm()
PROMPTS = ['What is 23 + 58? Options: 81 or 71. Answer with the number:', 'The cup', 'Add 12, 13 and 14. Show your work if you like:']
LETTERS = ['bad', 'c', 'dead']


class Plain(nn.Module):
    "A policy that only knows `model(ids)`: neither cache nor padding"
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids): return self.model(ids)


class Watched(nn.Module):
    "A policy that notes how many rows and columns it is asked for"
    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []
        if hasattr(model, 'new_cache'): self.new_cache = model.new_cache

    def forward(self, ids, **kwargs):
        self.seen.append(tuple(ids.shape))
        return self.model(ids, **kwargs)


class WithDropout(nn.Module):
    "The bundled policy with dropout on its logits, which evaluation mode switches off"
    def __init__(self, model):
        super().__init__()
        self.model, self.drop, self.new_cache = model, nn.Dropout(.5), model.new_cache

    def forward(self, ids, **kwargs): return self.drop(self.model(ids, **kwargs))


def seeded(seed=0): return torch.Generator().manual_seed(seed)
def bundled(): return LM, TOKENIZER, PROMPTS, 12
def plain_bundled(): return Plain(LM), TOKENIZER, PROMPTS, 12
def stub(): return Policy(7).eval(), Letters(), LETTERS, 6


policies = pytest.mark.parametrize('make', [stub, bundled, plain_bundled])


def assert_same(a, b):
    "Two groups are the same tokens, with the same log-probs to 1e-5"
    assert a.prompt_len == b.prompt_len and a.completions == b.completions
    assert torch.equal(a.ids, b.ids) and torch.equal(a.lengths, b.lengths) and torch.equal(a.finished, b.finished)
    assert torch.allclose(a.token_logp, b.token_logp, atol=1e-5, rtol=0)


# ---------- what is drawn

def chi_square_limit(dof):
    "About the 99.9 % point (Wilson and Hilferty)"
    return dof * (1 - 2/(9*dof) + 3.09*(2/(9*dof))**.5)**3


def test_sampled_completions_follow_the_policy():
    "Joint frequencies of whole completions of up to three tokens, against their exact probabilities"
    policy, n = Policy(7, dropout=0.), 20_000
    sample = sample_group(policy, Letters(), 'bad', n, 3, generator=seeded(0))
    everything = [y for k in (1, 2, 3) for y in product(range(6), repeat=k) if EOS not in y[:-1] and (k == 3 or y[-1] == EOS)]
    rows = torch.tensor([[1, 0, 3, *y] + [EOS]*(3 - len(y)) for y in everything])
    with torch.no_grad(): probs = slow_log_prob(policy, rows, 3, [len(y) for y in everything]).exp()
    assert abs(probs.sum().item() - 1) < 1e-5 and len(everything) == 156
    number = {y: i for i,y in enumerate(everything)}
    drawn = [number[tuple(row[3:3+k])] for row,k in zip(sample.ids.tolist(), sample.lengths.tolist())]
    seen, expected = torch.bincount(torch.tensor(drawn), minlength=156).float(), n*probs
    rare = expected < 5
    seen, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected))
    assert len(expected) > 100
    assert ((seen - expected)**2 / expected).sum() < chi_square_limit(len(expected) - 1)
    flat = torch.full_like(expected, n/len(expected))      # the test can fail: a uniform policy is another one
    assert ((seen - flat)**2 / flat).sum() > 10*chi_square_limit(len(expected) - 1)


def test_frequencies_of_the_bundled_model():
    n = 4000
    sample = sample_group(LM, TOKENIZER, PROMPTS[0], n, 1, generator=seeded(1))
    with torch.no_grad(): expected = n*LM(sample.ids[:1, :sample.prompt_len])[0, -1].softmax(-1)
    seen, rare = torch.bincount(sample.ids[:, -1], minlength=len(expected)).float(), expected < 5
    seen, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected))
    assert ((seen - expected)**2 / expected).sum() < chi_square_limit(len(expected) - 1)


def test_draw_walks_along_the_cumulative_distribution():
    probs = torch.tensor([[.2, 0., .5, .3]])
    for u,token in ((0., 0), (.1999, 0), (.2001, 2), (.6999, 2), (.7001, 3), (1 - 2**-53, 3)):
        assert draw(probs.log(), torch.tensor([u], dtype=torch.float64)).item() == token
    last = torch.tensor([[0., 1., 0.]]).log()              # a token of probability 0 is never drawn, at no end
    assert all(draw(last, torch.tensor([u], dtype=torch.float64)).item() == 1 for u in (0., .5, 1 - 2**-53))


# ---------- the sampler's log-probs are the scorer's

@policies
def test_every_token_is_scored_as_it_was_drawn(make):
    model, tokenizer, prompts, longest = make()
    for sample in sample_groups(model, tokenizer, prompts, 6, longest, seeded(2)):
        with torch.no_grad():
            scored = completion_log_prob(model, sample.ids, sample.prompt_len, sample.mask, per_token=True)
            slow = slow_log_prob(Plain(model), sample.ids, sample.prompt_len, sample.lengths.tolist())
        assert (scored - sample.token_logp).abs().max() < 1e-5, 'the importance ratio of a fresh sample is 1 on every token'
        assert torch.allclose(sample.logp, slow, atol=1e-4, rtol=0)
        assert (sample.token_logp[sample.mask] < 0).all() and not sample.token_logp[~sample.mask].any()


def test_end_of_sequence_is_a_scored_choice():
    for model,tokenizer,prompts,longest in (stub(), bundled()):
        ended = 0
        for sample in sample_groups(model, tokenizer, prompts, 8, longest, seeded(3)):
            for i,n in enumerate(sample.lengths.tolist()):
                row = sample.ids[i, sample.prompt_len:]
                assert (tokenizer.eos_id in row[:n-1].tolist()) is False and (row[n:] == tokenizer.pad_id).all()
                assert sample.finished[i].item() == (row[n-1].item() == tokenizer.eos_id)
                assert sample.mask[i].tolist() == [j < n for j in range(len(row))]
                assert sample.completions[i] == tokenizer.decode(row[:n - sample.finished[i].int()].tolist())
                if sample.finished[i]:
                    with torch.no_grad(): stop = model(sample.ids[i:i+1, :sample.prompt_len+n-1])[0, -1].log_softmax(-1)[tokenizer.eos_id]
                    assert abs(sample.token_logp[i, n-1] - stop) < 1e-5
                    ended += 1
        assert ended > 3


def test_padding_may_look_like_an_end():
    "The same draw, whatever id pads: pad == eos changes nothing but the padding"
    class Padded(Letters):
        pad_id = 0
    assert Letters.pad_id == Letters.eos_id
    a, b = (sample_group(Policy(7), t, 'bad', 16, 6, generator=seeded(4)) for t in (Letters(), Padded()))
    assert torch.equal(a.mask, b.mask) and torch.equal(a.token_logp, b.token_logp) and a.completions == b.completions
    assert torch.equal(a.ids[:, 3:][a.mask], b.ids[:, 3:][b.mask]) and not torch.equal(a.ids, b.ids)
    assert (a.finished & (a.lengths < a.mask.shape[1])).any() and (a.lengths == 1).any(), 'some row is padded, some row stopped at once'
    with torch.no_grad(): x, y = (completion_log_prob(Policy(7).eval(), s.ids, 3, s.mask) for s in (a, b))
    assert torch.allclose(x, y, atol=1e-6) and torch.allclose(x, a.logp, atol=1e-5)


def test_only_what_precedes_the_end_is_decoded():
    "A tokenizer that hides nothing: neither EOS nor padding may reach the verifier, and an id that is cut off is not lost"
    class Loud(Letters):
        pad_id = 0
        def decode(self, ids): return ' '.join(map(str, ids))
    sample = sample_group(Policy(7), Loud(), 'bad', 32, 4, generator=seeded(13))
    assert sample.finished.any() and not sample.finished.all()
    for row,n,end,text in zip(sample.ids[:, 3:].tolist(), sample.lengths.tolist(), sample.finished.tolist(), sample.completions):
        assert text == ' '.join(map(str, row[:n-1] if end else row[:4])) and str(EOS) not in text


# ---------- in a batch or alone, with a cache or without

@policies
def test_batched_equals_one_by_one(make):
    "Prompts of different lengths in one batch (left-padded where there is a cache), and each alone, from the same uniforms"
    model, tokenizer, prompts, longest = make()
    assert len({len(tokenizer.encode(p)) for p in prompts}) == 3
    alone = seeded(5)
    for sample,prompt in zip(sample_groups(model, tokenizer, prompts, 5, longest, seeded(5)), prompts):
        assert_same(sample, sample_group(model, tokenizer, prompt, 5, longest, generator=alone))
    greedy = greedy_completions(model, tokenizer, prompts, longest)
    for sample,prompt in zip(greedy, prompts): assert_same(sample, greedy_completions(model, tokenizer, [prompt], longest)[0])


def test_cached_equals_uncached():
    for a,b in zip(sample_groups(LM, TOKENIZER, PROMPTS, 6, 12, seeded(6)), sample_groups(Plain(LM), TOKENIZER, PROMPTS, 6, 12, seeded(6))):
        assert_same(a, b)
        with torch.no_grad():
            x, y = (completion_log_prob(m, a.ids, a.prompt_len, a.mask, per_token=True) for m in (LM, Plain(LM)))
        assert (x - y).abs().max() < 1e-5


def test_shared_prefill_equals_repeated():
    "A prompt that is computed once and shared by its group, and one that is computed for every row: samples, scores, gradients"
    together = sample_group(LM, TOKENIZER, PROMPTS[0], 6, 8, generator=seeded(7))
    repeated = sample_groups(LM, TOKENIZER, PROMPTS[:1]*6, 1, 8, seeded(7))
    for i,one in enumerate(repeated):
        n = one.lengths.item()
        assert torch.equal(together.ids[i, :together.prompt_len+n], one.ids[0]) and n == together.lengths[i]
        assert (together.token_logp[i, :n] - one.token_logp[0]).abs().max() < 1e-5
    watched = Watched(LM)
    ids, T = together.ids[:, :-1], together.mask.shape[1]
    with torch.no_grad(): shared, plain = last_logits(watched, ids, T), last_logits(Plain(LM), ids, T)
    assert watched.seen == [(1, together.prompt_len), (6, T - 1)], 'the common beginning is computed once'
    assert (shared - plain).abs().max() < 1e-4
    adapted = add_lora(load_baselm()[0])
    with torch.no_grad():
        for name,p in adapted.named_parameters():
            if 'lora_B' in name: p.normal_(std=.02, generator=seeded(8))
    weights, gradients = torch.linspace(-1, 1, 6), []
    for model in (adapted, Plain(adapted)):
        adapted.zero_grad()
        (weights * completion_log_prob(model, together.ids, together.prompt_len, together.mask)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in adapted.parameters() if p.requires_grad]))
    assert gradients[0].norm() > .1 and (gradients[0] - gradients[1]).abs().max() < 1e-5*gradients[1].abs().max().clamp(min=1)


def test_scoring_is_the_same_one_by_one_and_in_any_order():
    for model,tokenizer,prompts,longest in (stub(), bundled()):
        sample = sample_group(model, tokenizer, prompts[0], 6, longest, generator=seeded(9))
        with torch.no_grad():
            together = completion_log_prob(model, sample.ids, sample.prompt_len, sample.mask)
            order = torch.tensor([3, 1, 5, 0, 2, 4])
            permuted = completion_log_prob(model, sample.ids[order], sample.prompt_len, sample.mask[order])
            alone = [completion_log_prob(model, sample.ids[i:i+1, :sample.prompt_len+n], sample.prompt_len) for i,n in enumerate(sample.lengths)]
        assert torch.allclose(permuted, together[order], atol=1e-5, rtol=0) and torch.allclose(torch.cat(alone), together, atol=1e-5, rtol=0)


# ---------- modes and randomness

@pytest.mark.parametrize('make', [lambda: (Policy(7), Letters(), LETTERS, 6), lambda: (WithDropout(LM), TOKENIZER, PROMPTS, 8)])
def test_training_mode_does_not_reach_the_samples(make):
    model, tokenizer, prompts, longest = make()
    model.train()
    model.drop.eval()                                      # a module with a mode of its own keeps it
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sampled = sample_groups(model, tokenizer, prompts, 4, longest, seeded(10))
    assert model.training and not model.drop.training and torch.equal(torch.get_rng_state(), before)
    model.drop.train()
    for a,b in zip(sampled, sample_groups(model, tokenizer, prompts, 4, longest, seeded(10))): assert_same(a, b)
    assert model.training and model.drop.training and torch.equal(torch.get_rng_state(), before)
    model.eval()
    for a,b in zip(sampled, sample_groups(model, tokenizer, prompts, 4, longest, seeded(10))): assert_same(a, b)
    for sample in sampled:
        with torch.no_grad(): scored = completion_log_prob(model, sample.ids, sample.prompt_len, sample.mask, per_token=True)
        assert (scored - sample.token_logp).abs().max() < 1e-5
    LM.eval()


# ---------- rows that have ended

@pytest.mark.parametrize('model', [LM, Plain(LM), Policy(7)])
def test_finished_rows_leave_early_and_change_nothing(model):
    tokenizer, prompt, longest = (Letters(), 'bad', 6) if isinstance(model, Policy) else (TOKENIZER, PROMPTS[0], 8)
    watched, k = Watched(model), 12
    sample = sample_group(watched, tokenizer, prompt, k, longest, generator=seeded(11))
    rows = [shape[0] for shape in watched.seen]
    writing = [(~sample.finished | (sample.lengths > t)).sum().item() for t in range(1, longest)]
    writing = [n for n in writing if n]
    assert rows[1:] == writing and writing[-1] < k, 'after t tokens only the rows that go on are computed'
    assert rows[0] == (1 if hasattr(model, 'new_cache') else k), 'a cached prompt is computed once'
    # the same uniforms, every row computed to the end
    uniforms = torch.rand(k, longest, generator=seeded(11), dtype=torch.float64)
    ids = torch.tensor([tokenizer.encode(prompt)]*k)
    with torch.no_grad():
        for t in range(longest): ids = torch.cat([ids, draw(model.eval()(ids)[:, -1], uniforms[:, t])[:, None]], 1)
    for i,n in enumerate(sample.lengths.tolist()): assert torch.equal(sample.ids[i, :sample.prompt_len+n], ids[i, :sample.prompt_len+n])


def test_generation_stops_when_all_rows_have_ended():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.calls = nn.Parameter(torch.tensor([-50.]*5 + [50.])), 0

        def forward(self, ids):
            self.calls += 1
            return self.bias.expand(*ids.shape, 6)
    model = Stops()
    sample = sample_group(model, Letters(), 'bad', 4, 100, generator=seeded(12))
    assert model.calls == 1 and sample.ids.shape == (4, 4) and sample.finished.all() and sample.completions == ['']*4
