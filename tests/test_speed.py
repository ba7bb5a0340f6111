"""Work is counted, not timed: what a step must compute, in which portions, and what is not loaded before it is needed."""
import json
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from g2c_rl import sampling, trainer
from g2c_rl.baselm.model import CausalLM, Config, load_baselm
from g2c_rl.logprobs import completion_log_prob, group_log_probs
from g2c_rl.lora import add_lora
from g2c_rl.sampling import SHARED, GroupSample, sample_groups
from g2c_rl.tasks import get_family
from g2c_rl.trainer import GRPOTrainer

MODEL, TOKENIZER = load_baselm()
MODEL.requires_grad_(False)
PROMPTS = [f'What is {a} + 58? Options: {a+58} or 71. Answer with the number:' for a in (21, 22, 25, 29)]     # of equal length
TINY = CausalLM(Config(vocab=4, dim=8, layers=2, heads=2, kv_heads=1, hidden=8)).double().requires_grad_(False)
C = MODEL.config
LAYERS = 2 * C.layers * (C.dim*C.head_dim*(2*C.heads + 2*C.kv_heads) + 3*C.dim*C.hidden)     # operations of a token
HEAD = 2 * C.dim * C.vocab


def products(f):
    "Operations in matrix products, attention's apart"
    with FlopCounterMode(display=False) as counter: f()
    return sum(n for op,n in counter.get_flop_counts().get('Global', {}).items() if str(op).startswith('aten.mm'))


def sampled(k, n=8, prompts=PROMPTS): return sample_groups(MODEL, TOKENIZER, prompts, k, n, torch.Generator().manual_seed(0))


@pytest.mark.parametrize('k', [2, 8, 32])
def test_a_prompt_is_computed_once_for_all_its_completions(k):
    groups = sampled(k)
    P, T = groups[0].prompt_len, max(g.mask.shape[1] for g in groups)
    assert {g.prompt_len for g in groups} == {P}
    scored = sum(g.mask[:, 1:].sum().item() for g in groups)
    with torch.no_grad(): assert products(lambda: group_log_probs(MODEL, groups)) == LAYERS*(4*P + 4*k*(T-1)) + HEAD*(4 + scored)
    read = sum((g.lengths - 1).sum().item() for g in groups)      # what was fed back: all but each completion's last token
    assert products(lambda: sampled(k)) == LAYERS*(4*P + read) + HEAD*(4 + read)


def test_a_beginning_in_common_is_computed_once():
    shots = 'What is 23 + 58? Options: 81 or 71. Answer with the number: 81. '
    n = len(TOKENIZER.encode(shots))
    alike = [shots + p for p in PROMPTS]
    groups = sampled(2, prompts=alike)
    P, common = groups[0].prompt_len, next(i for i in range(99) if len({g.ids[0, i].item() for g in groups}) > 1)
    assert {g.prompt_len for g in groups} == {P} and common >= n >= SHARED
    scored = sum(g.mask[:, 1:].sum().item() for g in groups)
    T, read = max(g.mask.shape[1] for g in groups), sum((g.lengths - 1).sum().item() for g in groups)
    prompts = common + 4*(P - common)
    with torch.no_grad(): assert products(lambda: group_log_probs(MODEL, groups)) == LAYERS*(prompts + 8*(T-1)) + HEAD*(1 + 4 + scored)
    assert products(lambda: sampled(2, prompts=alike)) == LAYERS*(prompts + read) + HEAD*(1 + 4 + read)


@pytest.mark.parametrize('shots', ['', 'What is 23 + 58? Options: 81 or 71. Answer with the number: 81. '])
def test_a_beginning_in_common_changes_no_value_and_no_gradient(shots):
    model, found = add_lora(load_baselm()[0]).double(), []
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad: p += .02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p)))
    groups = sample_groups(model, TOKENIZER, [shots + p for p in (PROMPTS[0], 'Add 12, 13 and 14', '')][:3 if shots else 2], 3, 6,
                           torch.Generator().manual_seed(0))
    for score in (group_log_probs, lambda m, gs, per_token: [completion_log_prob(m, g.ids, g.prompt_len, g.mask, per_token) for g in gs]):
        model.zero_grad()
        terms = torch.cat([t.flatten() for t in score(model, groups, per_token=True)])
        (terms * torch.linspace(-1, 2, len(terms))).sum().backward()
        found.append([terms.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for x,y in zip(*found): assert y.abs().max() > 0 and (x - y).abs().max() <= 1e-10 * max(1., y.abs().max())


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_prompts_that_begin_alike_in_any_way(beginning, ends):
    prompts, before = [beginning + end for end in ends], sampling.SHARED
    sampling.SHARED = 1
    try:
        with torch.no_grad(): logits, cache, pad = sampling.prefill(TINY, prompts, last=1)
    finally: sampling.SHARED = before
    assert cache.length == max(map(len, prompts)) and pad.tolist() == [cache.length - len(p) for p in prompts]
    with torch.no_grad():
        after = TINY(torch.full((len(prompts), 1), 2), cache=cache, pad=pad)
        for prompt,row,then in zip(prompts, logits, after):
            assert torch.allclose(row, TINY(torch.tensor([prompt]), last=1)[0], atol=1e-12)
            assert torch.allclose(then, TINY(torch.tensor([prompt + [2]]), last=1)[0], atol=1e-12)


def test_going_back_costs_what_going_forward_costs():
    "The base is frozen: no gradients of matrices, but of adapters. The first layer's input needs none either"
    model = add_lora(load_baselm()[0])
    groups = sampled(8)
    logps = []
    forward = products(lambda: logps.extend(group_log_probs(model, groups)))
    backward = products(lambda: sum(logp.sum() for logp in logps).backward())
    assert .85 < backward / forward < 1.05
    model.requires_grad_(True)                                     # were the matrices trained, they would cost as much again
    logps = group_log_probs(model, groups)
    assert 1.85 < products(lambda: sum(logp.sum() for logp in logps).backward()) / forward < 2.1


def parts_of(groups, live, most):
    before, trainer.MOST = trainer.MOST, most
    try: return list(trainer._micro_batches(groups, live))
    finally: trainer.MOST = before


def fake(rows, T, P=3):
    return GroupSample(torch.zeros(rows, P + T, dtype=torch.long), P, torch.full((rows,), T), torch.ones(rows, dtype=torch.bool),
                       torch.zeros(rows, T), [str(i) for i in range(rows)])


def positions(batch):
    "What passes the layers when these are scored together: prompts, and completions, each padded to the longest"
    return len(batch) * max(g.prompt_len for *_,g in batch) + sum(len(rows) for _,rows,_ in batch) * max(g.mask.shape[1] for *_,g in batch)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=6), st.integers(1, 120), st.randoms())
@settings(max_examples=200, deadline=None)
def test_portions_hold_every_row_once_and_no_more_than_they_may(shapes, most, random):
    groups = [fake(*shape) for shape in shapes]
    live = {i: torch.tensor(sorted(random.sample(range(n), random.randint(1, n)))) for i,(n,_,_) in enumerate(shapes)}
    batches = parts_of(groups, live, most)
    for batch in batches:
        (_, rows, group), P = batch[0], batch[0][2].prompt_len
        alone = len(batch) == 1 and (len(rows) == 1 or len(rows)*group.mask.shape[1] <= P)      # the least that a part may be
        assert positions(batch) <= most or alone
        for i,rows,group in batch: assert group.completions == [groups[i].completions[r] for r in rows.tolist()]
    seen = {i: [r for batch in batches for j,rows,_ in batch if j == i for r in rows.tolist()] for i in live}
    assert seen == {i: rows.tolist() for i,rows in live.items()}


def all_parts(groups): return parts_of(groups, {i: torch.arange(len(g.ids)) for i,g in enumerate(groups)}, 1280)


def test_one_long_answer_does_not_make_short_ones_long():
    batches = all_parts([fake(8, 32)] + [fake(8, 3) for _ in range(31)])
    assert sum(map(positions, batches)) == 32*3 + 31*8*3 + 8*32


def test_a_cut_group_reads_its_prompt_few_times():
    "Passes over a prompt of 1,000 tokens, with answers of which 280 tokens would fit beside it"
    batches = all_parts([fake(16, 250, P=1000)])
    assert [len(rows) for batch in batches for _,rows,_ in batch] == [4, 4, 4, 4]
    assert [len(batch) for batch in all_parts([fake(8, 64, P=17)]*4)] == [2, 2]


def step(most, groups=3, **kwargs):
    "Gradients and metrics of one step away from the reference, in portions of so many tokens"
    model, verdicts = add_lora(load_baselm()[0]).double(), iter(range(10**6))
    t = GRPOTrainer(model, TOKENIZER, get_family('arithmetic').make, lambda task, text: float(next(verdicts) % 3), groups_per_step=groups, **kwargs)
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in t.parameters: p += .02 * torch.randn(p.shape, generator=gen)
    t.optimizer.step = lambda: None
    before, trainer.MOST = trainer.MOST, most
    try: metrics = t.train_step()
    finally: trainer.MOST = before
    return [p.grad for p in t.parameters], metrics


@pytest.mark.parametrize('kwargs', [dict(), dict(kl_per_token=True), dict(kl_estimator='k2', kl_coef=.5)])
def test_portions_change_no_gradient(kwargs):
    whole, a = step(10**6, **kwargs)
    for most in (1, 20, 100):
        parts, b = step(most, **kwargs)
        for x,y in zip(whole, parts): assert torch.allclose(x, y, atol=1e-10, rtol=0)
        for name in ('loss', 'kl', 'grad_norm'): assert abs(a[name] - b[name]) < 1e-10, name


def test_no_graph_outlives_its_portion(monkeypatch):
    "Objects of an old graph, scattered over memory, would make each portion need memory of its own"
    class Held: pass
    seen, score = [], GRPOTrainer._log_probs
    def watched(self, policy, batch):
        if not torch.is_grad_enabled(): return score(self, policy, batch)
        assert not any(held() for held in seen)
        logps = score(self, policy, batch)
        for logp in logps:
            held = Held()
            seen.append(weakref.ref(held))
            logp.register_hook(lambda grad, held=held: None)
        return logps
    monkeypatch.setattr(GRPOTrainer, '_log_probs', watched)
    step(20)
    assert len(seen) > 4 and not any(held() for held in seen)


def test_groups_of_other_prompts_do_not_touch_each_other():
    "A group's log-probs are the same alone and beside longer and shorter prompts"
    groups = sampled(4, 6, ['The cup', PROMPTS[0], 'Add 12, 13 and 14. Show your work if you like:'])
    with torch.no_grad():
        for g,together in zip(groups, group_log_probs(MODEL, groups, per_token=True)):
            alone = completion_log_prob(MODEL, g.ids, g.prompt_len, g.mask, per_token=True)
            assert together.shape == alone.shape and torch.allclose(together, alone, atol=1e-5)


def test_gradients_are_those_of_the_plain_version():
    "Log-probs without logits have their gradient in closed form; here beside `completion_log_prob`, which has logits"
    model, groups, found = add_lora(load_baselm()[0]).double(), sampled(4, 6), []
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad: p += .02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p)))
    for score in (group_log_probs, lambda m, gs, _: [completion_log_prob(m, g.ids, g.prompt_len, g.mask, per_token=True) for g in gs]):
        model.zero_grad()
        terms = torch.cat([t.flatten() for t in score(model, groups, True)])
        (terms * torch.linspace(-1, 2, len(terms))).sum().backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for x,y in zip(*found): assert y.abs().max() > 0 and (x - y).abs().max() <= 1e-10 * max(1., y.abs().max())


def loaded(code):
    "Modules that a fresh interpreter has after some code"
    found = subprocess.run([sys.executable, '-c', f'import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))'], text=True,
                           capture_output=True, check=True)
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_help_comes_without_torch():
    assert 'torch' not in loaded('from g2c_rl.cli import main\ntry: main(["--help"])\nexcept SystemExit: pass')
    assert 'torch' not in loaded('import g2c_rl')


def test_the_algorithm_loads_no_library_that_it_does_not_need():
    assert not {'matplotlib', 'transformers', 'tokenizers', 'jsonschema', 'IPython'} & loaded('import g2c_rl.trainer, g2c_rl.policies')


def test_the_benchmark_runs():
    done = subprocess.run([sys.executable, ROOT/'tools'/'bench.py', '--quick'], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ['naive', 'own', 'naive'], done.stdout
