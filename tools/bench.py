"""Measure where the time goes, against others and against the machine. `make bench`; the chapter nbs/explanations/69_speed.ipynb shows it.

Whoever is compared runs in a process of its own and waits for its turn: a step of one, a step of the other, in rounds, so that both see
the same machine. Nothing here is a test; times depend on the machine, ratios much less.
"""
import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

OUT = Path('nbs/explanations/bench.json')
DEFAULTS = dict(who='own', model='smollm2-135m', prompt=60, alike=False, new=8, k=8, groups=4, dtype='float32', one_library=False,
                apart=False, threads=1)


def prompt(rng, c):
    """For the bundled model a question it knows, of 27 tokens; else one of 16, behind worked examples up to about as many as asked for,
    the same before every question or others"""
    if c.model == 'baselm':
        from g2c_rl.tasks import get_family
        return get_family('arithmetic').make(rng).prompt
    def two(r): return r.randint(10, 39), r.randint(10, 39)
    examples, shots = Random(0) if c.alike else rng, 2 * max(1, round((c.prompt - 17) / 43)) if c.prompt > 30 else 0
    worked = [f'Choose {a+b} or {a+b+10}.\n{a} + {b} = {a+b}\n' for a,b in (two(examples) for _ in range(shots))]
    a, b = two(rng)
    return ''.join(worked) + f'Choose {a+b} or {a+b+10}. {a} + {b} ='


# ---------- one side of a comparison, in a process of its own

class Side:
    "Says that it is ready, then takes a step for every line it reads, and writes what the step took"
    def __init__(self, out): self.out, self.parts = out, {}

    def say(self, **facts):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
        print(json.dumps(facts | dict(peak=peak)), file=self.out, flush=True)

    def wait(self):
        if not sys.stdin.readline().strip(): os._exit(0)
        self.parts.clear()
        self.start = time.perf_counter(), time.process_time()

    def done(self, tokens):
        wall, cpu = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        self.say(wall=wall, cpu=cpu, tokens=tokens, parts=self.parts)

    def timed(self, name, f):
        "The same function, its seconds added to a part"
        def g(*args, **kwargs):
            start = time.perf_counter()
            try: return f(*args, **kwargs)
            finally: self.parts[name] = self.parts.get(name, 0.) + time.perf_counter() - start
        return g


def own(side, c):
    "This package"
    import torch
    from g2c_rl import sampling as chapter_of_sampling
    from g2c_rl import trainer as chapter
    from g2c_rl.baselm import model as chapter_of_the_model
    from g2c_rl.lora import add_lora
    from g2c_rl.policies import load_policy
    from g2c_rl.tasks import Task
    if c.one_library: chapter_of_the_model.LARGE = float('inf')
    if c.apart: chapter_of_sampling.SHARED = float('inf')
    model, tokenizer = load_policy(c.model, dtype=c.dtype)
    calls = iter(range(10**9))
    t = chapter.GRPOTrainer(add_lora(model), tokenizer, lambda rng: Task(prompt(rng, c), 0), lambda task, text: float(next(calls) % 2),
                            k=c.k, groups_per_step=c.groups, max_new_tokens=c.new, kl_coef=.02, lr=5e-4)     # every group is informative
    score = t._log_probs
    t._log_probs = lambda policy, batch: side.timed('forward' if torch.is_grad_enabled() else 'reference', score)(policy, batch)
    chapter.sample_groups = side.timed('generation', chapter.sample_groups)
    torch.Tensor.backward = side.timed('backward', torch.Tensor.backward)
    t.optimizer.step = side.timed('optimizer', t.optimizer.step)
    with torch.no_grad():                                       # how far sampler and scorer lie apart, token by token
        groups = chapter.sample_groups(model, tokenizer, [prompt(Random(0), c)], 8, 8, torch.Generator().manual_seed(0))
        scored = chapter.group_log_probs(model, groups, per_token=True)
    gap = (scored[0] - groups[0].token_logp).abs()[groups[0].mask].mean().item()
    side.say(prompt_tokens=groups[0].prompt_len, gap=gap)
    while True:
        side.wait()
        side.done(t.train_step()['tokens'])


def naive(side, c):
    "The same update, written as one would first write it: no cache, every prompt K times, all logits, a second copy of the base"
    import torch
    from copy import deepcopy
    from g2c_rl.advantages import group_advantages
    from g2c_rl.loss import grpo_loss
    from g2c_rl.lora import add_lora
    from g2c_rl.policies import load_policy
    from g2c_rl.sampling import draw
    model, tokenizer = load_policy(c.model)
    reference = deepcopy(model)
    parameters = [p for p in add_lora(model).parameters() if p.requires_grad]
    optimizer, rng, generator = torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.), Random(0), torch.Generator().manual_seed(0)

    def sample(ids):
        mask = torch.zeros(len(ids), 0, dtype=torch.bool)
        for _ in range(c.new):
            with torch.no_grad(): tokens = draw(model(ids)[:, -1], torch.rand(len(ids), generator=generator, dtype=torch.float64))
            going = torch.ones(len(ids), dtype=torch.bool) if not mask.shape[1] else mask[:, -1] & (ids[:, -1] != tokenizer.eos_id)
            ids, mask = torch.cat([ids, tokens[:, None]], 1), torch.cat([mask, going[:, None]], 1)
            if not going.any(): break
        return ids, mask

    def score(policy, ids, mask):
        logp = policy(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return logp[:, -mask.shape[1]:].masked_fill(~mask, 0.).sum(-1)

    side.say()
    while True:
        side.wait()
        optimizer.zero_grad()
        tokens = 0
        for _ in range(c.groups):
            ids, mask = side.timed('generation', sample)(torch.tensor([tokenizer.encode(prompt(rng, c))]*c.k))
            advantages = group_advantages(torch.arange(c.k) % 2).float()
            with torch.no_grad(): ref = side.timed('reference', score)(reference, ids, mask)
            loss = grpo_loss(side.timed('forward', score)(model, ids, mask), ref, advantages, .02) / c.groups
            side.timed('backward', loss.backward)()
            tokens += mask.sum().item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.)
        side.timed('optimizer', optimizer.step)()
        side.done(tokens)


def trl(side, c):
    "TRL's GRPOTrainer"
    os.environ.update(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', TRL_EXPERIMENTAL_SILENCE='1')
    import tempfile
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from g2c_rl.smollm2 import fetch_smollm2
    folder, rng, tokens = fetch_smollm2(), Random(0), []

    def reward(completions, completion_ids, **_):
        tokens[:] = map(len, completion_ids)
        return [float(i % 2) for i in range(len(completions))]

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 0: side.say(); side.wait()
        def on_step_end(self, args, state, control, **_): side.done(sum(tokens)); side.wait()

    class Trainer(GRPOTrainer):
        def _generate(self, *args, **kwargs): return side.timed('generation', super()._generate)(*args, **kwargs)

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=c.dtype == 'bfloat16', fp16=False, num_generations=c.k,
            per_device_train_batch_size=c.k*c.groups, gradient_accumulation_steps=1, max_completion_length=c.new, temperature=1.,
            top_p=1., top_k=0, beta=.02, loss_type='grpo',
            scale_rewards='group', num_iterations=1, learning_rate=5e-4, lr_scheduler_type='constant', weight_decay=0., max_grad_norm=1.,
            gradient_checkpointing=False, max_steps=10**6, logging_steps=10**6, save_strategy='no', report_to=[], seed=0, disable_tqdm=True,
            use_vllm=False, dataloader_num_workers=0, dataloader_pin_memory=False)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, c.dtype))
        Trainer(model=model, reward_funcs=reward, args=config, processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[Turns()],
                train_dataset=Dataset.from_list([dict(prompt=prompt(rng, c)) for _ in range(4000)]),
                peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM')).train()


def matmul(side, c):
    "The machine's rate: square matrices, 2 n^3 operations, from the library that the package takes or from the other"
    import torch
    from g2c_rl.baselm.model import product
    a, n = torch.randn(2048, 2048, dtype=getattr(torch, c.dtype)), 8
    side.say()
    while True:
        side.wait()
        for _ in range(n): a @ a if c.one_library else product(a, a)
        side.done(n * 2 * 2048**3)


def profile(side, c):
    "What the sampler's time goes into, operator by operator"
    import torch
    from g2c_rl.lora import add_lora
    from g2c_rl.policies import load_policy
    from g2c_rl.sampling import sample_groups
    model, tokenizer = load_policy(c.model, dtype=c.dtype)
    model, rng, generator = add_lora(model), Random(0), torch.Generator().manual_seed(0)
    side.say()
    while True:
        side.wait()
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            groups = sample_groups(model, tokenizer, [prompt(rng, c) for _ in range(c.groups)], c.k, c.new, generator)
        for e in seen.key_averages(): side.parts[e.key] = e.self_cpu_time_total / 1e6
        side.done(sum(g.lengths.sum().item() for g in groups))


def work(settings):
    c = argparse.Namespace(**settings)
    out, sys.stdout = sys.stdout, sys.stderr                    # whatever else is printed is not a report
    import torch
    torch.set_num_threads(c.threads)
    dict(own=own, naive=naive, trl=trl, matmul=matmul, profile=profile)[c.who](Side(out), c)


# ---------- the comparison

class Worker:
    "A side, from outside"
    def __init__(self, **settings):
        self.settings = DEFAULTS | settings
        env = os.environ | dict(OMP_NUM_THREADS=str(self.settings['threads']))
        self.process = subprocess.Popen([sys.executable, __file__, '--work', json.dumps(self.settings)], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.ready, self.steps = self._read(), []

    def _read(self):
        line = self.process.stdout.readline()
        if not line: raise RuntimeError(f"a side ended early; to see why: tools/bench.py --work '{json.dumps(self.settings)}'")
        return json.loads(line)

    def step(self, keep=True):
        self.process.stdin.write('go\n')
        self.process.stdin.flush()
        result = self._read()
        if keep: self.steps.append(result)
        return result

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def record(self):
        return dict(settings=self.settings, ready=self.ready, steps=self.steps)


def compare(sides, rounds, threads):
    "Each side takes a step to warm up, and where there is a choice of threads one to choose by; then they go on in rounds"
    best = []
    for settings in sides:
        tried = [Worker(**settings, threads=n) for n in threads]
        walls = [w.step(keep=False)['wall'] for w in tried]
        if len(tried) > 1: walls = [w.step(keep=False)['wall'] for w in tried]
        for w,wall in zip(tried, walls):
            if wall > min(walls): w.close()
        best.append((tried[walls.index(min(walls))], dict(zip(map(str, threads), walls))))
    for _ in range(rounds):
        for w,_ in best: w.step()
    records = [w.record() | dict(probe=probe) for w,probe in best]
    for w,_ in best: w.close()
    return records


def lone(warm=True, **settings):
    "One side by itself, on one thread unless told"
    w = Worker(**settings)
    if warm: w.step(keep=False)
    for _ in range(2 if warm else 1): w.step()
    record = w.record()
    w.close()
    return record


def machine():
    "What the numbers depend on"
    import torch
    about = Path('/proc/cpuinfo')
    lines = about.read_text(encoding='utf-8').splitlines() if about.exists() else []
    cpu = next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.processor())
    cpu = f'{cpu}, {torch.backends.cpu.get_cpu_capability()}'
    return dict(cpu=cpu, cores=os.cpu_count(), system=platform.system(), torch=torch.__version__)


def say(title, records):
    print(title)
    for r in records:
        s, walls = r['settings'], [x['wall'] for x in r['steps']]
        peak = max(x['peak'] for x in r['steps'])
        print(f'  {s["who"]:8}{s["threads"]} thread{"s" if s["threads"] > 1 else " "} {median(walls):8.2f} s a step '
              f'({min(walls):.2f} to {max(walls):.2f}){peak/1e9:7.2f} GB', flush=True)


VERSUS = {
    'trl_float32':  dict(),
    'trl_bfloat16': dict(dtype='bfloat16'),
    'trl_alike':    dict(alike=True),
    'trl_long':     dict(prompt=16, new=64),
}
GROWTH = dict(
    k=[dict(k=k) for k in (2, 4, 8, 16)],
    prompt=[dict(prompt=p) for p in (16, 60, 103, 189)],
    new=[dict(new=n) for n in (8, 16, 32)],
    groups=[dict(groups=g) for g in (1, 2, 4)],
    model=[dict(model=m, groups=8, prompt=30) for m in ('baselm', 'smollm2-135m')],
    memory=[dict(k=64, new=256, groups=1)],
)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--work', type=json.loads, help=argparse.SUPPRESS)
    p.add_argument('--quick', action='store_true', help='the bundled model and one round, to see that everything works; nothing is saved')
    p.add_argument('--only', nargs='+', metavar='PART', help='parts to measure anew; the others stay as they were')
    p.add_argument('--threads', nargs='+', type=int, metavar='N', help='thread counts to choose from (default: 1 and 2)')
    args = p.parse_args()
    if args.work: return work(args.work)
    rounds, threads = (1, [1]) if args.quick else (5, args.threads or sorted({1, min(2, os.cpu_count() or 1)}))
    parts = {'naive': lambda: compare([dict(who=w, model='baselm', groups=8) for w in ('own', 'naive')], rounds, threads)}
    if not args.quick:
        parts |= {name: lambda s=s: compare([s | dict(who='own'), s | dict(who='trl')], rounds, threads) for name,s in VERSUS.items()}
        parts |= {'libraries': lambda: compare([dict(who='own'), dict(who='own', one_library=True)], rounds, threads)}
        parts |= {'beginning': lambda: compare([dict(who='own', alike=True), dict(who='own', alike=True, apart=True)], rounds, threads)}
        parts |= {'matmul': lambda: compare([dict(who='own'), dict(who='matmul', one_library=True), dict(who='matmul')], rounds, threads)}
        parts |= {'profile': lambda: [lone(who='profile', threads=max(threads))]}
        parts |= {f'growth_{name}': lambda name=name, s=s: [lone(name != 'memory', **x) for x in s] for name,s in GROWTH.items()}
    if unknown := set(args.only or ()) - parts.keys(): p.error(f'unknown part {min(unknown)}; known: {", ".join(parts)}')
    for name,measure in parts.items():
        if args.only and name not in args.only: continue
        say(name, records := measure())
        if args.quick: continue
        found = json.loads(OUT.read_text(encoding='utf-8')) if OUT.exists() else {}
        found |= {name: records, 'machine': machine()}
        OUT.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__': main()
