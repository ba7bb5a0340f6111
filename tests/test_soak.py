"""Thousands of steps of a run, with its records and checkpoints: neither memory nor open files may grow.

A stub policy of about a hundred numbers makes a step take a few milliseconds, so that 5,000 steps are a matter of seconds. It learns
very slowly, so that there is something to update all the time.
What is kept on purpose, one number for each metric and step, is counted into the bound.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

STEPS, EVERY, WARM_UP = 5_000, 100, 1_000
HISTORY = .0008                  # MB a step: some twenty floats and their places in lists, kept on purpose
SLACK = 4.                       # MB: what allocators keep or give back meanwhile

SOAK = '''
import gc, json, os, sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, 'tests')
import torch, test_rl
from g2c_rl import runs, tasks, trainer
from g2c_rl.config import RunConfig
steps, every, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def rss():
    "Resident memory, MB"
    with open('/proc/self/statm') as f: return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20

def open_files(): return len(os.listdir('/proc/self/fd'))

config = RunConfig('arithmetic', steps=steps, groups_per_step=2, k=6, exam_size=3)
family = SimpleNamespace(make=test_rl.make_letter_task, verifier=test_rl.begins_right, max_new_tokens=3, chance=None)
solutions = SimpleNamespace(GRPOTrainer=trainer.GRPOTrainer)
exam = [tasks.Task(p, a) for p,a in test_rl.ANSWERS.items()]
runs._made = lambda config: nullcontext((family, test_rl.make_trainer(solutions, lr=1e-4), exam))
curve = []
def progress(metrics):
    progress.step += 1
    if progress.step % every == 0: curve.append([progress.step, round(rss(), 2), open_files()])
progress.step = 0
runs.train_run(config, out/'run', progress, checkpoint_every=50)
updates = sum(json.loads(line)['updated'] for line in open(out/'run'/'metrics.jsonl'))
print(json.dumps(dict(steps=steps, updates=int(updates), curve=curve)))
'''

def soak(out, steps=STEPS, every=EVERY):
    "Take so many steps in a process of its own; memory in MB and open files, every so many steps"
    done = subprocess.run([sys.executable, '-c', SOAK, str(steps), str(every), str(out)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

def growth(curve, warm_up=WARM_UP):
    "Growth of memory after warm-up in MB, what is allowed, and growth of open files"
    (first, start, files), (last, end, files_then) = next(c for c in curve if c[0] >= warm_up), curve[-1]
    return round(end - start, 2), HISTORY*(last - first) + SLACK, files_then - files

@pytest.mark.skipif(not Path('/proc/self/statm').exists(), reason='memory and open files are read from /proc')
def test_nothing_grows(tmp_path):
    result = soak(tmp_path)
    memory, allowed, files = growth(result['curve'])
    assert result['steps'] >= 5_000 and result['updates'] > 1_000
    assert memory <= allowed and files == 0, (memory, allowed, files)

def test_a_leak_would_be_noticed():
    "20 kB a step, and one file in a thousand steps"
    leaky = [[s, 300 + .02*s, 20 + s//1000] for s in range(100, 5_001, 100)]
    memory, allowed, files = growth(leaky)
    assert memory > allowed and files == 4

if __name__ == '__main__':       # measure again for the book: python tests/test_soak.py
    from tempfile import TemporaryDirectory
    with TemporaryDirectory() as tmp: (ROOT/'nbs'/'explanations'/'soak.json').write_text(json.dumps(soak(Path(tmp))) + '\n')
