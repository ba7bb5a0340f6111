"""A run that is killed, starved of disk or damaged goes on as if nothing had happened, or says what is wrong.

The kills are real: `SIGKILL`, in a child of a small harness that has imported everything once, so that a child starts in
milliseconds. A child counts its own function calls (Python and C) and kills itself at the n-th, with n drawn from all that an
uninterrupted run makes; other children are killed from outside, after a random time, wherever they are then.
"""
import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from g2c_rl import checkpoints, cli, lora, runs, tasks, trainer
from g2c_rl.config import RunConfig

posix = pytest.mark.skipif(os.name != 'posix', reason='needs signals, fork and file limits')
CONFIG = RunConfig('arithmetic', steps=8, groups_per_step=2, k=4, exam_size=8)
EQUAL = 'metrics.jsonl', 'samples.jsonl', 'alarms.jsonl', 'tokens.jsonl', 'evaluation.json', 'adapter_model.safetensors'

HARNESS = '''
import os, random, signal, sys, time
import g2c_rl.runs
sys.stderr = open(os.devnull, 'w')
from pathlib import Path
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from g2c_rl.config import RunConfig
from g2c_rl.runs import resume_run, train_run
out, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = RunConfig('arithmetic', steps=6, groups_per_step=2, k=3, exam_size=4)
rng, calls = random.Random(seed), 0
g2c_rl.runs.plot_history = lambda *args, **kwargs: plt.subplots(1, 2)[1]            # or else half of all calls would draw curves
Figure.savefig = lambda figure, path, **kwargs: Path(path).write_bytes(b'')

def die_at(n):
    "Count function calls, and end the process at the n-th"
    global calls
    calls = 0
    def count(frame, event, arg):
        global calls
        if event in ('call', 'c_call'): calls += 1
        if calls == n: os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)

def go(folder):
    if (folder/'config.json').exists(): resume_run(folder, checkpoint_every=2)
    else: train_run(config, folder, checkpoint_every=2)

def child(folder, at_call=None, after=None, count_to=None):
    "Train or resume in a child; true if it was killed"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if at_call is not None: die_at(at_call)
            go(folder)
            if count_to: count_to.write_text(str(calls))
            status = 0
        finally: os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)                # a child that has finished is a zombie, and takes no harm
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL

go(out/'warm')                                      # here, so that no child has to import or allocate anything for the first time
start = time.monotonic(); child(out/'whole'); seconds = time.monotonic() - start
child(out/'counted', at_call=-1, count_to=out/'calls')
total, killed, runs = int((out/'calls').read_text()), dict(call=0, time=0), 0
while sum(killed.values()) < kills:
    runs += 1
    folder = out/f'run-{runs}'
    for _ in range(4):                              # at most four kills, then it may finish
        kind = 'time' if runs % 3 == 0 else 'call'
        died = child(folder, after=rng.uniform(0, seconds)) if kind == 'time' else child(folder, at_call=rng.randrange(1, total))
        killed[kind] += died
        if not died: break
    child(folder)
print(total, killed['call'], killed['time'], runs, round(seconds, 2))
'''

def kill_and_resume(out, kills=40, seed=0):
    "Kill runs until there were that many kills; calls of a whole run, kills by call and by time, runs, and files that differ"
    done = subprocess.run([sys.executable, '-c', HARNESS, out, str(kills), str(seed)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    total, by_call, by_time, n, seconds = done.stdout.split()
    different = [f'run-{i}/{name}' for i in range(1, int(n) + 1) for name in EQUAL if (out/'whole'/name).exists()
                 and (out/f'run-{i}'/name).read_bytes() != (out/'whole'/name).read_bytes()]
    return dict(calls=int(total), killed_by_call=int(by_call), killed_by_time=int(by_time), runs=int(n), different=different)

@posix
def test_killed_at_random_points_and_resumed(tmp_path):
    result = kill_and_resume(tmp_path)
    assert result['killed_by_call'] + result['killed_by_time'] >= 40 and result['different'] == [], result
    assert len((tmp_path/'whole'/'metrics.jsonl').read_text().splitlines()) == 6


# ---------- in this process

def train(folder, progress=None, config=CONFIG, **kwargs): return runs.train_run(config, folder, progress, **{'checkpoint_every': 2} | kwargs)

def newest(folder): return sorted((folder/'checkpoints').glob('*.safetensors'))[-1]

def same(a, b): return [name for name in EQUAL if (a/name).exists() and (a/name).read_bytes() != (b/name).read_bytes()] == []

@pytest.fixture(scope='module')
def whole(tmp_path_factory): return train(tmp_path_factory.mktemp('whole')/'run').folder

@pytest.fixture
def stopped(tmp_path, stopped_once): return shutil.copytree(stopped_once, tmp_path/'run')

@pytest.fixture(scope='module')
def stopped_once(tmp_path_factory):
    "A run that was interrupted without a chance to save, in its sixth step"
    folder = tmp_path_factory.mktemp('stopped')/'run'
    with pytest.raises(KeyboardInterrupt): train(folder, raise_in_step(6, KeyboardInterrupt))
    return folder

def raise_in_step(n, error):
    seen = []
    def progress(metrics):
        seen.append(metrics)
        if len(seen) == n: raise error
    return progress

def said(capsys, *words):
    "Exit status and words of a command, on one line"
    status = cli.main(list(map(str, words)))
    return status, capsys.readouterr().err

def test_goes_on_from_the_newest_checkpoint(stopped, whole):
    assert newest(stopped).stem == 'step-000004'
    runs.resume_run(stopped, checkpoint_every=2)
    assert same(whole, stopped)

@posix
def test_second_ctrl_c_while_a_checkpoint_is_written(tmp_path, whole, monkeypatch):
    "The first Ctrl-C lets the step end and saves; the second comes in the middle of that"
    fsync, writing = os.fsync, []
    def interrupted(fd):
        if (tmp_path/'run'/'checkpoints'/'step-000003.safetensors.tmp').exists() and not writing:
            writing.append(True); os.kill(os.getpid(), signal.SIGINT)
        fsync(fd)
    def first(metrics, seen=[]):    # noqa: B006
        seen.append(metrics)
        if len(seen) == 3: os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(os, 'fsync', interrupted)
    with pytest.raises(KeyboardInterrupt): train(tmp_path/'run', first)
    assert writing and [p.name for p in (tmp_path/'run'/'checkpoints').iterdir()] == ['step-000002.safetensors']
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

def test_full_disk_while_a_checkpoint_is_written(tmp_path, whole, monkeypatch):
    "The checkpoint before it stays, nothing half-written is left, and the error says what happened"
    def full(tensors, path, **kwargs):
        if 'step-000004' not in str(path): return save_file(tensors, path, **kwargs)
        path.write_bytes(b'half'); raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with monkeypatch.context() as m:
        m.setattr(checkpoints, 'save_file', full)
        with pytest.raises(OSError, match='No space left'): train(tmp_path/'run')
    assert [p.name for p in (tmp_path/'run'/'checkpoints').iterdir()] == ['step-000002.safetensors']
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

@posix
@pytest.mark.parametrize('limit', [3_000, 20_000, 150_000], ids='{}_bytes'.format)
def test_files_cannot_grow_any_more(tmp_path, whole, limit):
    "A real limit of the system, in a process of its own: first the records are too large, then the adapter, then the checkpoints"
    script = f'import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},)*2); from g2c_rl.cli import main; sys.exit(main())'
    flags = '--steps 8 --groups-per-step 2 --k 4 --exam-size 8 --checkpoint-every 2'.split()
    run = lambda *start: subprocess.run([sys.executable, *start], cwd=ROOT, capture_output=True, text=True,
                                        env=os.environ | dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', PYTHONPATH=str(ROOT)))
    done = run('-c', script, 'train', 'arithmetic', '--out', str(tmp_path/'run'), *flags)
    assert done.returncode == 2 and 'g2c-rl:' in done.stderr and 'Traceback' not in done.stderr, done.stderr
    assert 'File too large' in done.stderr
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

@posix
def test_read_only_folder(tmp_path, capsys, monkeypatch):
    "Found before the first exam is paid for (root may write anywhere, so the system's answer is played)"
    if os.geteuid():
        tmp_path.chmod(0o500)
    else:
        def refuse(path, *args, **kwargs): raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        monkeypatch.setattr(type(tmp_path), 'mkdir', refuse)
    monkeypatch.setattr(runs, '_examine', lambda *args: pytest.fail('the exam was held'))
    status, err = said(capsys, 'train', 'arithmetic', '--out', tmp_path/'run')
    tmp_path.chmod(0o700)
    assert status == 2 and 'Permission denied' in err and str(tmp_path/'run') in err

def meddle(path, about=None, tensors=None):
    "A checkpoint with another header or other tensors"
    from safetensors import safe_open
    with safe_open(path, 'pt') as f: old = json.loads(f.metadata()['about'])
    save_file(load_file(path) if tensors is None else tensors, path, metadata=dict(about=json.dumps(old if about is None else about(old))))

DAMAGE = dict(
    empty=lambda p: p.write_bytes(b''),
    truncated=lambda p: p.write_bytes(p.read_bytes()[:-1000]),
    header_only=lambda p: p.write_bytes(p.read_bytes()[:500]),
    zeros=lambda p: p.write_bytes(bytes(p.stat().st_size)),
    text=lambda p: p.write_text('hello'),
    a_picture=lambda p: p.write_bytes(b'\x89PNG\r\n' + bytes(5000)),
    a_pickle=lambda p: p.write_bytes(pickle.dumps(dict(a=1))),
    foreign_safetensors=lambda p: save_file(dict(x=torch.zeros(3)), p),
    other_adapters=lambda p: meddle(p, tensors={k: v for k,v in load_file(p).items() if 'lora_B' not in k}),
    other_header=lambda p: meddle(p, about=lambda a: []),
    no_header=lambda p: meddle(p, about=lambda a: None),
    newer_version=lambda p: meddle(p, about=lambda a: a | dict(format=99)),
    no_random_state=lambda p: meddle(p, about=lambda a: {k: v for k,v in a.items() if k != 'rng'}),
    no_generator=lambda p: meddle(p, tensors={k: v for k,v in load_file(p).items() if k != 'generator'}),
    no_lengths=lambda p: meddle(p, about=lambda a: a | dict(extra={})),
    no_optimizer_groups=lambda p: meddle(p, about=lambda a: a | dict(groups=None)),
)

@pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_falls_back_to_the_one_before(stopped, whole, damage, capsys):
    damage(newest(stopped))
    runs.resume_run(stopped, checkpoint_every=2)
    assert same(whole, stopped)
    err = capsys.readouterr().err
    assert 'step-000004' in err and 'trying the one before' in err, err

def test_no_checkpoint_can_be_used(stopped, capsys):
    "Then nothing is touched: a newer version may still read them"
    for p in (stopped/'checkpoints').iterdir(): DAMAGE['newer_version'](p)
    before = (stopped/'metrics.jsonl').read_bytes()
    status, err = said(capsys, 'train', '--resume', stopped)
    assert status == 2 and 'format 99' in err and (stopped/'metrics.jsonl').read_bytes() == before

def test_a_run_killed_before_its_first_checkpoint_starts_again(stopped, whole):
    shutil.rmtree(stopped/'checkpoints')
    runs.resume_run(stopped, checkpoint_every=2)
    assert same(whole, stopped)

def test_changed_settings_are_refused(stopped, capsys):
    before = {p: p.read_bytes() for p in stopped.rglob('*') if p.is_file()}
    status, err = said(capsys, 'train', '--resume', stopped, '--lr', '.1', '--kl-coef', '.05')
    assert status == 2 and f'lr was {CONFIG.lr} and would be 0.1' in err and 'kl_coef' not in err and '--allow-changes' in err
    assert {p: p.read_bytes() for p in stopped.rglob('*') if p.is_file()} == before
    result = runs.resume_run(stopped, dict(steps=9, lr=.1), allow_changes=True)
    assert len(result.history['kl']) == 9 and runs.read_config(stopped) == replace(CONFIG, steps=9, lr=.1)

@posix
def test_two_runs_in_one_folder(tmp_path, stopped, capsys):
    "The second is refused, whether it starts or resumes, and from another process too"
    with runs._locked(stopped):
        status, err = said(capsys, 'train', '--resume', stopped)
        assert status == 2 and 'in use by another run' in err
        code = f'from g2c_rl.runs import resume_run; resume_run({str(stopped)!r})'
        done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)))
        assert done.returncode and 'in use by another run' in done.stderr
    (tmp_path/'new').mkdir()
    with runs._locked(tmp_path/'new'):
        with pytest.raises(FileExistsError, match='in use by another run'): train(tmp_path/'new')
    status, err = said(capsys, 'train', 'arithmetic', '--out', stopped)
    assert status == 2 and 'already holds a run' in err

class Bomb:
    "Whoever unpickles this leaves a trace"
    def __init__(self, trace): self.trace = trace
    def __reduce__(self): return open, (str(self.trace), 'w')

def test_no_pickle_is_read(stopped, whole, tmp_path):
    for name in ('checkpoints/step-000005.safetensors', 'checkpoints/step-000006.pt', 'optimizer.pt', 'adapter_model.bin', 'state.pkl'):
        (stopped/name).write_bytes(pickle.dumps(Bomb(tmp_path/'trace')))
    torch.save(Bomb(tmp_path/'trace'), stopped/'checkpoints'/'step-000007.safetensors')
    runs.resume_run(stopped, checkpoint_every=2)
    runs.evaluate_run(stopped)
    assert same(whole, stopped) and not (tmp_path/'trace').exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path/'trace'))).close()
    assert (tmp_path/'trace').exists()                                    # it would have left one
    for path in {*(ROOT/'g2c_rl').rglob('*.py')} - {ROOT/'g2c_rl/limits.py'}:     # which talks to a process of its own, and reads no file
        assert not re.search(r'\bimport\b.*\b(pickle|marshal|joblib|shelve)\b|torch\.load\b|allow_pickle', path.read_text(encoding='utf-8')), path


# ---------- verifiers that misbehave

def plant(monkeypatch, in_step, fault):
    "A verifier that does something else, once, at the second completion of a training step"
    verify, calls = tasks.get_family('arithmetic').verifier, []
    def verifier(task, completion):
        calls.append(completion)
        if len(calls) == CONFIG.exam_size + 8*(in_step - 1) + 2: fault()      # the exam comes first; a step scores 8
        return verify(task, completion)
    monkeypatch.setitem(tasks.families, 'arithmetic', replace(tasks.get_family('arithmetic'), verifier=verifier))

def raise_value_error(): raise ValueError('no such unit')

@pytest.mark.parametrize('fault', [raise_value_error, lambda: sys.exit(0), lambda: sys.exit('bye')], ids=['raises', 'exit', 'exit_words'])
def test_verifier_that_raises_or_exits(tmp_path, whole, monkeypatch, fault, capsys):
    "The run ends with task, completion and cause, and goes on as if nothing had happened"
    with monkeypatch.context() as m:
        plant(m, 3, fault)
        with pytest.raises(tasks.VerifierError, match='for the prompt .* and the completion'): train(tmp_path/'run')
    assert newest(tmp_path/'run').stem == 'step-000002' and len((tmp_path/'run'/'metrics.jsonl').read_text().splitlines()) == 2
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

def test_verifier_that_prints(tmp_path, whole, monkeypatch, capsys):
    plant(monkeypatch, 3, lambda: print('\x1b[2Jlook at me'))
    train(tmp_path/'run')
    assert same(whole, tmp_path/'run')

@posix
@pytest.mark.parametrize('where', ['exits', 'returns'])
def test_verifier_that_forks(tmp_path, whole, where):
    "A child that the verifier leaves behind, even one that returns into the training loop, writes nothing into the run"
    script = f'''
import os, test_resume as t
class Plant:
    def setitem(self, d, k, v): d[k] = v
def fork():
    if os.fork() == 0 and {where!r} == 'exits': os._exit(0)
t.plant(Plant(), 3, fork); t.train(t.Path({str(tmp_path/'run')!r}))
'''.replace('t.Path', '__import__("pathlib").Path')
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env=os.environ | dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', PYTHONPATH=f'{ROOT}:{ROOT/"tests"}'))
    assert done.returncode == 0, done.stderr
    assert same(whole, tmp_path/'run')

@posix
def test_verifier_that_hangs(tmp_path, whole, monkeypatch):
    "Ctrl-C asks, a second one stops at once; what is left is the last checkpoint"
    def hang():
        for i in range(2): threading.Timer(.2 + .3*i, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Event().wait(30)
        pytest.fail('it was not stopped')
    with monkeypatch.context() as m:
        plant(m, 4, hang)
        with pytest.raises(KeyboardInterrupt): train(tmp_path/'run')
    assert newest(tmp_path/'run').stem == 'step-000002'
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

@posix
def test_verifier_that_eats_memory(tmp_path, whole, monkeypatch):
    "An allocation that the system refuses is an error like any other in a verifier"
    def eat(): bytearray(2**60)
    with monkeypatch.context() as m:
        plant(m, 3, eat)
        with pytest.raises(tasks.VerifierError, match='MemoryError'): train(tmp_path/'run')
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')


# ---------- numbers that are none, and clocks that jump

def poisoned(poison):
    "A trainer to which something happens before its fourth step (and that shows in the next step with a live group)"
    class Poisoned(trainer.GRPOTrainer):
        def train_step(self):
            if len(self.history.get('loss', ())) == 3: poison(next(iter(lora.adapters(self.model).values())).lora_B)
            return super().train_step()
    return Poisoned

def nan_gradient(B): B.register_hook(lambda grad: grad*float('nan'))

def nan_gradient_once(B):
    handle = B.register_hook(lambda grad: (handle.remove(), grad*float('nan'))[1])

def nan_weight(B): B.data[0, 0] = float('nan')

def test_gradient_that_is_not_finite(tmp_path, whole, monkeypatch):
    "The step is not taken, the tensor is named, the batch is saved, and the run goes on from before"
    with monkeypatch.context() as m:
        m.setattr(runs, 'GRPOTrainer', poisoned(nan_gradient))
        with pytest.raises(trainer.NonFiniteError, match=r'not finite.* model\.layers\.0\..*lora_B'): train(tmp_path/'run')
    saved = json.loads((tmp_path/'run'/'nonfinite.json').read_text())
    step = saved['batch'][0]['step']
    assert 'lora_B' in saved['cause'] and len(saved['batch']) == 8 and {r['step'] for r in saved['batch']} == {step} and step >= 4
    assert newest(tmp_path/'run').stem == f'step-{step-1:06}'
    assert all(t.isfinite().all() for name,t in load_file(newest(tmp_path/'run')).items() if name.startswith(('parameter', 'optimizer')))
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

def test_gradient_that_is_not_finite_skipped(tmp_path, monkeypatch):
    "When told, the update is left out and counted"
    monkeypatch.setattr(runs, 'GRPOTrainer', poisoned(nan_gradient_once))
    result = train(tmp_path/'run', config=replace(CONFIG, skip_nonfinite=True))
    assert sum(result.history['nonfinite']) == 1 and len(result.history['nonfinite']) == 8
    assert result.history['updated'][result.history['nonfinite'].index(1.)] == 0 and 1. in result.history['updated'][3:]
    assert all(t.isfinite().all() for t in load_file(tmp_path/'run'/'adapter_model.safetensors').values())

def test_weights_that_are_not_finite(tmp_path, whole, monkeypatch):
    "Nothing is sampled from them"
    with monkeypatch.context() as m:
        m.setattr(runs, 'GRPOTrainer', poisoned(nan_weight))
        with pytest.raises(ArithmeticError, match='not finite'): train(tmp_path/'run')
    runs.resume_run(tmp_path/'run', checkpoint_every=2)
    assert same(whole, tmp_path/'run')

def test_clock_that_jumps(tmp_path, whole, monkeypatch, capsys):
    "Neither the records nor the progress line depend on what time it is"
    jump = iter(range(10_000_000, 0, -1000))
    monkeypatch.setattr(runs.time, 'time', lambda: next(jump))
    train(tmp_path/'run', runs.Progress(8))
    assert same(whole, tmp_path/'run') and re.search(r'step 8/8 .* 0:00 left', capsys.readouterr().err)
