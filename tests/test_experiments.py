"""Experiments: every arm runs in quick form, nothing is computed twice or lost, and what is committed is what was declared."""
import io
import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from g2c_rl import experiments as lab
from g2c_rl.audit import parting_step
from g2c_rl.compare import group_runs, read_runs
from g2c_rl.experiments import Arm, experiments, load_experiment, quick_arm, run_arm, run_experiment
from g2c_rl.tasks import held_out_tasks

RUNS = ROOT/'nbs'/'experiments'/'runs'
LIMIT = 4_000_000        # bytes of all committed histories together

def run(name, folder, seeds=1, **kwargs):
    out = io.StringIO()
    run_experiment(name, seeds, quick=True, folder=folder, out=out, **({'processes': 1} | kwargs))
    return out.getvalue()

def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*.json'))}

def settings(arm):
    "An arm as JSON gives it back; what is not named is the bundled model"
    return {k: v for k,v in json.loads(json.dumps(arm.__dict__)).items() if (k, v) != ('model', 'baselm')}

# ---------- each in quick form

@pytest.mark.parametrize('name', [*lab.in_all, pytest.param('real_model', marks=pytest.mark.slow)])
def test_quick(name, tmp_path):
    said = run(name, tmp_path)
    found = load_experiment(name, tmp_path)
    assert found.keys() == experiments[name].keys() and said.count('\n') == len(found)
    starts = {}
    for label,(r,) in found.items():
        arm = quick_arm(experiments[name][label])
        steps = arm.steps + sum(n for _,n in arm.lessons)
        assert r['config'] == settings(arm) and r['seed'] == 0 and r['schema'] == lab.SCHEMA
        assert {len(curve) for curve in r['metrics'].values()} == {steps} if steps else not any(r['metrics'].values())
        assert all(r[when]['n'] == 8 == len(bits) for when in ('before', 'after') for bits in r[when]['passed'].values())
        assert r['before']['rates'].keys() == {'reward', *arm.audits}
        assert ('english' in r['before']) == arm.english and ('sampled' in r['after']) == bool(arm.probe)
        assert r['weights']['base'] == r['weights']['base_after']                       # the base is never touched
        assert bool(steps) or r['weights']['start'] == r['weights']['end']
        assert {s['step'] for s in r['samples']} <= set(range(1, steps + 1))
        starts.setdefault(arm.rank, set()).add(r['weights']['start'])
    assert all(len(hashes) == 1 for hashes in starts.values())                          # one seed, one initialization

def test_another_model_and_a_file_of_tasks(tmp_path, monkeypatch):
    "The bundled policy poses as the real one, in front of its two-option tasks; the JSON tasks are a chat, which it cannot read"
    asked, real = [], lab.load_policy
    monkeypatch.setattr(lab, 'load_policy', lambda name='baselm': asked.append(name) or real())
    monkeypatch.setattr(lab, 'experiments', dict(real_model={k: a for k,a in experiments['real_model'].items() if k != 'json'}))
    assert run('real_model', tmp_path, seeds=None).count('\n') == 9 and set(asked) == {'smollm2-135m'}        # 3 arms, 3 seeds
    for r in load_experiment('real_model', tmp_path)['sum_last']:
        assert r['config']['model'] == 'smollm2-135m' and r['config']['task'] == 'real_model_tasks.py:sum_last'
        options = [r['after']['passed'][name] for name in ('option_1', 'option_2')]
        assert not any(a == b == '1' for a,b in zip(*options)) and len(r['metrics']['audit_option_1']) == 2
    assert 'nothing to do' in run('real_model', tmp_path, seeds=None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match='copy of the repository'): run('real_model', tmp_path/'other')

def test_all_is_the_bundled_model():
    assert set(experiments) - set(lab.in_all) == {'real_model'}

def test_lessons_change_task_and_verifier():
    r = run_arm(replace(quick_arm(Arm('format', steps=2)), lessons=(('product', 2),)), 0)
    assert len(r['metrics']['kl']) == 4 and r['metrics']['all_fail'][:2] == [2., 2.] and r['metrics']['reward_mean'][:2] == [0., 0.]
    assert r['samples'][0]['prompt'].startswith('How much is') and r['samples'][-1]['prompt'].endswith('{"answer":')

def test_audits_watch_and_do_not_reward():
    arm = quick_arm(experiments['sloppy_verifier']['sloppy'])
    with_audits, without = run_arm(arm, 0), run_arm(replace(arm, audits=()), 0)
    assert with_audits['weights'] == without['weights'] and with_audits['metrics']['reward_mean'] == without['metrics']['reward_mean']

# ---------- many runs

def test_second_run_has_nothing_to_do(tmp_path):
    run('format', tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json')}
    assert 'nothing to do' in run('format', tmp_path)
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json')} and len(before) == 2

def test_same_numbers_again_and_in_two_processes(tmp_path):
    threads = torch.get_num_threads()
    for name,processes in (('a', 1), ('b', 1), ('c', 2)): run('format', tmp_path/name, processes=processes)
    a, b, c = (contents(tmp_path/name) for name in 'abc')
    assert a == b == c and len(a) == 2 and torch.get_num_threads() == threads
    costs = [json.loads(line) for line in (tmp_path/'c'/'format'/'cost.jsonl').read_text().splitlines()]
    assert {x['run'] for x in costs} == {'one_group-0', 'eight_groups-0'} and all(x['seconds'] > 0 < x['cpu_seconds'] and x['cores'] for x in costs)

def test_what_is_stale_is_made_again(tmp_path, monkeypatch):
    run('format', tmp_path)
    good = contents(tmp_path)
    one, eight = sorted((tmp_path/'format').glob('*.json'), reverse=True)
    one.write_text(one.read_text()[:100])                                               # broken
    eight.write_text(eight.read_text().replace('"lr": 0.002', '"lr": 0.003'))           # other settings
    assert run('format', tmp_path).count('\n') == 2 and contents(tmp_path) == good
    r = json.loads(one.read_text())
    for stale in (r | dict(schema=0), r | dict(seed=1), r | dict(weights=r['weights'] | dict(base='of another model'))):
        one.write_text(json.dumps(stale))
        assert 'run 1/1' in run('format', tmp_path) and contents(tmp_path) == good
    assert run('format', tmp_path, fresh=True).count('\n') == 2 and contents(tmp_path) == good

def test_interruption_loses_one_run_and_resumes(tmp_path, monkeypatch):
    real, calls = lab.run_arm, []
    def interrupted(arm, seed):
        calls.append(seed)
        if len(calls) == 2: raise KeyboardInterrupt
        return real(arm, seed)
    monkeypatch.setattr(lab, 'run_arm', interrupted)
    with pytest.raises(KeyboardInterrupt): run('format', tmp_path, seeds=2)
    assert len(contents(tmp_path)) == 1
    (tmp_path/'format'/'one_group-1.json.tmp').write_text('{"half')                     # left by a kill while writing
    monkeypatch.setattr(lab, 'run_arm', lambda arm, seed: calls.append(seed) or real(arm, seed))
    assert 'run 3/3' in run('format', tmp_path, seeds=2)
    assert len(calls) == 5 and len(contents(tmp_path)) == 4 and not list(tmp_path.rglob('*.tmp'))

def test_a_failing_run_is_an_error(tmp_path, monkeypatch):
    def fail(arm, seed): raise ValueError('the verifier is broken')
    monkeypatch.setattr(lab, 'run_arm', fail)
    with pytest.raises(ValueError, match='verifier is broken'): run('format', tmp_path)
    assert not contents(tmp_path)

def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lab.history_folder().as_posix() == 'experiments'
    (tmp_path/'nbs'/'experiments'/'runs').mkdir(parents=True)
    assert lab.history_folder().as_posix() == 'nbs/experiments/runs'
    (tmp_path/'file').write_text('')
    with pytest.raises(OSError, match='cannot write to'): run('format', tmp_path/'file')

# ---------- what is committed

@pytest.mark.parametrize('name', experiments)
def test_committed_histories_are_what_is_declared(name):
    found, starts = load_experiment(name, RUNS), {}
    base = lab.fingerprint(lab.load_policy()[0].state_dict()) if name in lab.in_all else found['json'][0]['weights']['base']
    for label,runs in found.items():
        arm = experiments[name][label]
        wanted = 5 if name in lab.in_all else 3 if label in ('sum_last', 'json') else 1
        assert [r['seed'] for r in runs] == list(range(len(runs))) and len(runs) >= wanted, f'{name}/{label}'
        for r in runs:
            assert r['config'] == settings(arm), f'{name}/{label}: g2c-rl experiment {name}'
            assert r['weights']['base'] == r['weights'].get('base_after', base) == base, f'{name}/{label} was made with another base'
            starts.setdefault((arm.rank, r['seed']), set()).add(r['weights']['start'])
            assert {len(c) for c in r['metrics'].values()} == {arm.steps + sum(n for _,n in arm.lessons)}
            exam = held_out_tasks(lab.lab_family(arm.task), arm.exam_size)[:20]           # the questions are today's
            assert [a['prompt'] for a in r['answers']] == [t.prompt for t in exam]
    assert all(len(hashes) == 1 for hashes in starts.values())
    declared = {f'{label}-{seed}.json' for label,runs in found.items() for seed in range(len(runs))}
    assert {p.name for p in (RUNS/name).glob('*.json')} == declared                     # and nothing else

def test_committed_histories_are_small():
    assert sum(p.stat().st_size for p in RUNS.rglob('*') if p.is_file()) < LIMIT

def test_a_committed_history_repeats():
    "The first run of the format experiment, at full size; another processor may round differently, so the first steps are compared"
    kept, again = load_experiment('format', RUNS)['one_group'][0], run_arm(experiments['format']['one_group'], 0)
    assert kept['weights']['start'] == again['weights']['start']
    assert kept['metrics']['reward_mean'][:3] == again['metrics']['reward_mean'][:3]
    assert kept['metrics']['entropy'][:3] == pytest.approx(again['metrics']['entropy'][:3], abs=1e-3)
    assert kept['before']['passed'] == again['before']['passed']

# ---------- reading

def test_compare_reads_committed_histories():
    groups = group_runs(read_runs(RUNS/'group_size'))
    assert [len(runs) for runs in groups.values()] == [5]*len(experiments['group_size'])
    assert all('k=' in label and 'groups_per_step=' in label and 'lr=' not in label for label in groups)

@pytest.mark.parametrize('groups', [1, 4, 16])
def test_parting_step_is_neither_deaf_nor_nervous(groups):
    def gaps(seed, opens, size):
        rng = random.Random(seed)
        return [[rng.gauss(.1, .1) + size*(t >= opens) for _ in range(groups)] for t in range(1, 81)]
    early = sum(parting_step(gaps(s, 99, 0)) is not None for s in range(100))
    assert early <= 2                                                                   # of runs without a hack
    found = [parting_step(gaps(s, 40, .4)) for s in range(50)]
    assert sum(f is not None and 38 <= f <= 44 for f in found) >= 45
