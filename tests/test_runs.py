"""A run folder does not lie: about its verifier, its files, its settings, how many were judged, and how far it came."""
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from g2c_rl import cli, runs, tasks, trainer
from g2c_rl.config import RunConfig
from g2c_rl.records import fingerprints
from safetensors.torch import load_file

VERIFIER = '''
from words import PASSES
def score(task, completion): return float(PASSES(task, completion))
'''
STRICT = 'def PASSES(task, completion): return completion.strip() == str(task.answer)'
NEVER = 'def PASSES(task, completion): return False'
FAILS = 'def PASSES(task, completion): raise RuntimeError("no judge")'
SMALL = '--groups-per-step 2 --k 4 --exam-size 10 --max-new-tokens 8'

@pytest.fixture
def home(tmp_path, monkeypatch):
    "A folder with questions, a verifier, and a neighbour that it imports"
    (tmp_path/'home').mkdir()
    monkeypatch.chdir(tmp_path/'home')
    rows = [dict(prompt=f'Choose {a+b} or {a+b+10}. How much is {a} + {b}? Answer with the number:', answer=a+b)
            for a in range(10, 45, 2) for b in range(11, 41, 3)]
    Path('my.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    Path('my.py').write_text(VERIFIER)
    Path('words.py').write_text(STRICT)
    return tmp_path/'home'

@pytest.fixture
def said(capsys):
    "A command's exit status, and what it printed"
    def command(line):
        for name in ('words', *(n for n in list(runs.sys.modules) if n.startswith('my_'))): runs.sys.modules.pop(name, None)
        from g2c_rl import data
        data._modules.clear()                                   # each command is a process of its own
        status = cli.main(line.split())
        printed = capsys.readouterr()
        return status, printed.out + printed.err
    return command

def read(run, name): return json.loads(Path(run, name).read_text())
def lines(run, name): return [json.loads(line) for line in Path(run, name).read_text().splitlines()]
def exam(run, when): return read(run, 'evaluation.json')[when]
def train(said, more=''): return said(f'train --data my.jsonl --verifier my.py:score --steps 2 {SMALL} --out run {more}')

# ---------- one ruler

def test_before_is_judged_by_the_verifier_that_judges_after(home, said):
    status, text = train(said)
    assert status == 0, text
    before = exam('run', 'before')
    Path('words.py').write_text(NEVER)                            # a neighbour of the verifier, not the file itself
    status, text = said('train --resume run --steps 3')
    assert status == 2 and 'words.py has been edited since' in text and exam('run', 'before') == before
    status, text = said('train --resume run --steps 3 --allow-changes')
    assert status == 0, text
    again = exam('run', 'before')
    assert [a['completion'] for a in again['answers']] == [a['completion'] for a in before['answers']]
    assert before['pass_rate'] > .5 and again['pass_rate'] == 0. == exam('run', 'after')['pass_rate']
    assert 'changed after step 2: steps: 2 → 3; words.py has been edited since' in text
    change, = read('run', 'config.json')['changes']
    assert change == dict(step=2, what=['steps: 2 → 3', 'words.py has been edited since'])
    assert 'words.py has been edited since' in Path('run/report.html').read_text()

def test_longer_answers_are_given_by_the_untrained_policy_too(home, said):
    assert train(said)[0] == 0
    before = exam('run', 'before')
    status, text = said('train --resume run --max-new-tokens 1 --steps 3 --allow-changes')
    assert status == 0, text
    short = exam('run', 'before')
    assert short['max_new_tokens'] == 1 and [a['completion'] for a in short['answers']] != [a['completion'] for a in before['answers']]
    fresh = said(f'train --data my.jsonl --verifier my.py:score --steps 1 {SMALL} --max-new-tokens 1 --out other')
    assert fresh[0] == 0 and exam('other', 'before') == short

def test_an_edited_answer_changes_both_exams(home, said):
    assert train(said)[0] == 0
    assert exam('run', 'before')['pass_rate'] > 0
    wrong = ''.join(json.dumps(json.loads(line) | dict(answer=0)) + '\n' for line in Path('my.jsonl').read_text().splitlines())
    Path('my.jsonl').write_text(wrong)
    assert said('train --resume run --steps 3 --allow-changes')[0] == 0
    assert exam('run', 'before')['pass_rate'] == exam('run', 'after')['pass_rate'] == 0

def test_a_changed_learning_rate_is_used(home, said):
    "It was read back from the checkpoint, and the change was only on paper"
    for more,run in (('', 'slow'), ('--lr .5', 'fast')):
        assert said(f'train arithmetic --steps 4 {SMALL} --out {run}')[0] == 0
        assert said(f'train --resume {run} --steps 8 {more} --allow-changes')[0] == 0
    slow, fast = (load_file(f'{run}/adapter_model.safetensors') for run in ('slow', 'fast'))
    largest = lambda state: max(t.abs().max().item() for name,t in state.items() if 'lora_B' in name)
    assert largest(fast) > 10*largest(slow)

@pytest.mark.parametrize('flags', ['--model other', '--seed 1', '--rank 4', '--adapter run'])
def test_what_a_run_begins_with_cannot_change(home, said, flags):
    assert said(f'train arithmetic --steps 1 {SMALL} --out run')[0] == 0
    status, text = said(f'train --resume run {flags} --steps 2 --allow-changes')
    assert status == 2 and 'a run cannot change it' in text and '--adapter FOLDER' in text

# ---------- files

def test_files_that_a_run_depends_on(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 1 {SMALL} --out first')[0] == 0
    assert said('merge first --out model')[0] == 0
    assert said(f'train --data my.jsonl --verifier my.py:score --steps 1 {SMALL} --adapter first --out run')[0] == 0
    files = read('run', 'config.json')['files']
    assert {name: sorted(found) for name,found in files.items()} == dict(
        task=['my.jsonl'], verifier=['my.py', 'words.py'], adapter=['adapter_config.json', 'adapter_model.safetensors'])
    assert said('train --resume first --steps 2 --allow-changes')[0] == 0       # and with it, the reference of `run`
    status, text = said('train --resume run --steps 2')
    assert status == 2 and 'first/adapter_model.safetensors has been edited since' in text
    assert {'model.safetensors', 'config.json', 'tokenizer.json'} <= fingerprints(RunConfig('arithmetic', model='model'))['model'].keys()

def test_evaluate_merge_and_audit_mention_edited_files(home, said):
    assert train(said)[0] == 0
    assert '!' not in said('evaluate run')[1]
    Path('words.py').write_text(NEVER)
    status, text = said('evaluate run')
    assert status == 0 and 'words.py has been edited since run was made' in text and '0.0% of 10' in text
    assert 'words.py' not in said('evaluate run --verifier last_number')[1]
    status, text = said('audit run --verifier last_number')
    assert status == 0 and 'words.py has been edited since run was made' in text
    Path('my.jsonl').unlink()
    for command in ('evaluate run', 'audit run --verifier last_number', 'train --resume run --steps 3', 'train --resume run --steps 3 --allow-changes'):
        status, text = said(command)
        assert status == 2 and 'my.jsonl' in text and 'put it back' in text and 'Traceback' not in text, text
    assert said('merge run --out whole')[0] == 0                                 # needs neither questions nor verifier

def test_from_another_folder(home, said, monkeypatch):
    "Relative paths lead where they led when the run was started, and a moved project takes its paths along"
    assert said(f'train --data my.jsonl --verifier last_number --steps 1 {SMALL} --out first')[0] == 0
    assert train(said, '--adapter first')[0] == 0
    assert str(home) not in Path('run/config.json').read_text()
    (home.parent/'elsewhere').mkdir(); monkeypatch.chdir(home.parent/'elsewhere')
    Path('my.py').write_text(VERIFIER); Path('words.py').write_text(FAILS)       # of the same name, and not the run's
    status, text = said('train --resume ../home/run --steps 3 --allow-changes')
    assert status == 0 and 'edited' not in text, text
    assert said('evaluate ../home/run')[0] == 0
    assert read('../home/run', 'config.json')['config']['task'] == '../home/my.jsonl'
    os.rename(home, home.parent/'moved'); monkeypatch.chdir(home.parent/'moved')
    assert said('evaluate first')[0] == 0

# ---------- what was not judged

def test_a_verifier_that_judges_nothing_ends_the_run_at_once(home, said):
    Path('words.py').write_text(FAILS)
    status, text = train(said, '--on-error skip')
    assert status == 2 and 'none of the 10 answers of the exam could be judged' in text and 'no judge' in text
    assert not Path('run/metrics.jsonl').exists() and Path('run/config.json').exists()
    Path('words.py').write_text(STRICT)
    status, text = said('train --resume run')                   # nothing had been made with the old file, so nothing is to be allowed
    assert status == 0 and '2 of 2 steps' in text and read('run', 'config.json')['changes'] == [], text
    Path('words.py').write_text(FAILS)
    assert said('evaluate run')[0] == 2

def test_a_failing_first_exam_can_be_gone_on_with(home, said):
    Path('words.py').write_text(FAILS)
    assert train(said)[0] == 2
    Path('words.py').write_text(STRICT)
    assert said('train --resume run')[0] == 0
    whole = said(f'train --data my.jsonl --verifier my.py:score --steps 2 {SMALL} --out whole')
    assert whole[0] == 0
    for name in ('metrics.jsonl', 'samples.jsonl', 'evaluation.json'): assert Path('run', name).read_bytes() == Path('whole', name).read_bytes()

def test_what_was_not_judged_is_counted_everywhere(home, said):
    Path('words.py').write_text('def PASSES(task, completion):\n    if completion.strip()[:1] in "4567": raise RuntimeError("no judge")\n'
                                '    return completion.strip() == str(task.answer)')
    status, text = train(said, '--on-error skip --steps 12')
    assert status == 0, text
    errors, unjudged = sum(m['verifier_errors'] for m in lines('run', 'metrics.jsonl')), exam('run', 'after')['not_judged']
    assert errors > 20 and 0 < unjudged < 10
    assert f'; {unjudged} not judged, which count as not passed' in text and '(not judged)' in text
    assert f'{errors:.0f} of 96 completions were not judged' in text and f'not judged {errors:.0f}  ' in text   # summary, progress
    alarm, = [a for a in lines('run', 'alarms.jsonl') if a['alarm'] == 'verifier']
    assert alarm['value'] > .2 and 'mend the verifier' in alarm['advice'] and '! verifier (' in text
    for s in lines('run', 'samples.jsonl'): assert (s.get('error', '') == '') == (s['reward'] is not None)
    assert any('RuntimeError: no judge' in s.get('error', '') for s in lines('run', 'samples.jsonl'))
    assert f'{unjudged} not judged' in Path('run/report.html').read_text()

def test_a_group_that_nobody_could_judge_is_not_a_failed_group(tmp_path, monkeypatch):
    calls = []
    def fails_after_the_exam(task, completion):
        calls.append(task)
        if len(calls) > 5: raise RuntimeError('gone')
        return 1.
    monkeypatch.setitem(tasks.families, 'arithmetic', replace(tasks.get_family('arithmetic'), verifier=fails_after_the_exam))
    result = runs.train_run(RunConfig('arithmetic', steps=11, groups_per_step=2, k=3, exam_size=5, on_error='skip'), tmp_path/'run')
    assert result.history['all_fail'] == result.history['all_pass'] == result.history['updated'] == [0.]*11
    assert [a['alarm'] for a in lines(tmp_path/'run', 'alarms.jsonl')] == ['verifier']
    text = runs.summarize(result)
    assert 'none of the 5 answers could be judged' in text and '66 of 66 completions were not judged' in text

# ---------- summaries

def test_the_size_of_the_exam_is_the_one_that_was_held(home, said):
    status, text = said(f'train --data my.jsonl --verifier last_number --steps 1 {SMALL} --exam-size 500 --out run')
    n = exam('run', 'after')['n']
    assert status == 0 and n < 100 and f'greedy, {n} questions it never saw (500 were asked for)' in text

def test_steps_and_tracker_of_a_resumed_run(home, said, monkeypatch):
    seen = []
    class Tracking:
        def log(self, step, metrics): seen.append(step)
        def close(self): seen.append('closed')
    monkeypatch.setattr(runs, 'make_tracker', lambda name, folder, config: seen.append(name) or Tracking())
    assert said(f'train arithmetic --steps 3 {SMALL} --out run --tracker trackio --checkpoint-every 1')[0] == 0
    status, text = said('train --resume run --steps 5 --allow-changes')
    assert seen == ['trackio', 1, 2, 3, 'closed', 'trackio', 4, 5, 'closed']
    assert status == 0 and 'step 4/5' in text and 'step 5/5' in text and '5 of 5 steps, 2 of them now, in' in text, text
    assert [p.name for p in sorted(Path('run/checkpoints').iterdir())] == ['step-000004.safetensors', 'step-000005.safetensors']
    status, text = said('train --resume run --steps 4 --allow-changes')
    assert status == 2 and 'has taken 5 steps already' in text and Path('run/adapter_model.safetensors').exists()
    with pytest.raises(ValueError, match='checkpoint_every must be at least 1'): runs.resume_run('run', checkpoint_every=0)
    runs.resume_run('run', dict(steps=6), tracker='', allow_changes=True)
    assert seen[-1] == 'closed' and len(seen) == 9 and read('run', 'config.json')['recording'] == dict(checkpoint_every=1, tracker='')

# ---------- ends

def test_results_of_an_earlier_end_do_not_outlive_it(tmp_path):
    "Killed after it went on, a run has no final exam, adapter or report of a policy that is gone"
    config = RunConfig('arithmetic', steps=2, groups_per_step=2, k=4, exam_size=8)
    run = runs.train_run(config, tmp_path/'run').folder
    pid = os.fork()
    if pid == 0:
        runs.resume_run(run, dict(steps=9), lambda metrics: os.kill(os.getpid(), signal.SIGKILL), allow_changes=True)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert 'after' not in read(run, 'evaluation.json')
    for name in ('adapter_model.safetensors', 'report.html', 'curves.png'): assert not (run/name).exists()
    with pytest.raises(FileNotFoundError, match='the run is not at its end.*resume_run'): runs.evaluate_run(run)
    assert runs.resume_run(run).history['kl'] and (run/'report.html').exists()

def test_a_run_that_stopped_says_why(tmp_path, monkeypatch, capsys):
    calls = []
    def verifier(task, completion):
        calls.append(completion)
        if len(calls) == 8 + 8*2 + 1: raise ValueError('no such unit')
        return float(len(completion) % 2)
    monkeypatch.setitem(tasks.families, 'arithmetic', replace(tasks.get_family('arithmetic'), verifier=verifier))
    config = RunConfig('arithmetic', steps=4, groups_per_step=2, k=4, exam_size=8)
    with pytest.raises(tasks.VerifierError) as caught: runs.train_run(config, tmp_path/'run')
    assert any('2 steps are saved' in note and 'resume_run(' in note for note in caught.value.__notes__)
    stopped = read(tmp_path/'run', 'stopped.json')
    assert (stopped['step'], stopped['of']) == (2, 4) and 'no such unit' in stopped['cause']
    assert 'no such unit' in (tmp_path/'run'/'report.html').read_text()
    runs.evaluate_run(tmp_path/'run')
    assert 'was stopped at step 2 of 4' in capsys.readouterr().err
    assert not runs.resume_run(tmp_path/'run').interrupted and not (tmp_path/'run'/'stopped.json').exists()

@pytest.mark.skipif(os.name != 'posix', reason='needs signals')
def test_sigterm_is_a_request(tmp_path):
    "A cluster that evicts sends it first"
    seen = []
    def progress(metrics):
        seen.append(metrics)
        if len(seen) == 2: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    result = runs.train_run(RunConfig('arithmetic', steps=5, groups_per_step=2, k=4, exam_size=8), tmp_path/'run', progress)
    assert result.interrupted and len(result.history['kl']) == 2 and read(tmp_path/'run', 'stopped.json') == dict(step=2, of=5, cause='SIGTERM')
    assert signal.getsignal(signal.SIGTERM) == before

def test_weights_that_are_not_finite_are_explained_and_not_saved(tmp_path, monkeypatch):
    class Poisoned(trainer.GRPOTrainer):
        def train_step(self):
            if len(self.history.get('loss', ())) == 3: self.parameters[1].data[0, 0] = float('nan')
            return super().train_step()
    config = RunConfig('arithmetic', steps=5, groups_per_step=2, k=4, exam_size=8)
    with monkeypatch.context() as m:
        m.setattr(runs, 'GRPOTrainer', Poisoned)
        with pytest.raises(trainer.NonFiniteError, match=r'first model\.layers\.0.*lora_B.*resume_run'):
            runs.train_run(config, tmp_path/'run', checkpoint_every=2)
    saved = read(tmp_path/'run', 'nonfinite.json')
    assert 'lora_B' in saved['cause'] and {r['step'] for r in saved['batch']} == {3}
    assert not (tmp_path/'run'/'adapter_model.safetensors').exists()
    assert [p.stem for p in sorted((tmp_path/'run'/'checkpoints').iterdir())] == ['step-000002']
    runs.resume_run(tmp_path/'run')
    assert not (tmp_path/'run'/'nonfinite.json').exists()

def test_another_environment_is_mentioned(tmp_path, capsys):
    config = RunConfig('arithmetic', steps=2, groups_per_step=2, k=4, exam_size=8)
    run = runs.train_run(config, tmp_path/'run').folder
    about = read(run, 'config.json')
    about['versions']['torch'], about['threads'] = '1.0', 99
    (run/'config.json').write_text(json.dumps(about))
    result = runs.resume_run(run, dict(steps=3), allow_changes=True)
    assert 'torch: 1.0 → ' in capsys.readouterr().err and any('threads: 99 → ' in w for w in result.changes[0]['what'])
