"""From the command line: a task and a verifier of one's own, its failures, its limits, and what comes out."""
import json
import threading
from pathlib import Path

import pytest
import torch
from g2c_rl import cli
from g2c_rl.config import RunConfig
from g2c_rl.evaluation import greedy_completions
from g2c_rl.lora import adapters, adapters_off, load_adapter
from g2c_rl.policies import load_policy
from g2c_rl.runs import load_run, read_config

VERIFIER = '''
def score(task, completion):
    first = completion.strip()[:1]
    if first == '7': raise RuntimeError('no sevens')
    if first == '6': return 'six'
    return float(str(task.answer) in completion)

def stuck(task, completion):
    while True: pass
'''
SMALL = '--groups-per-step 4 --exam-size 20'

@pytest.fixture
def home(tmp_path, monkeypatch):
    "A folder with questions and verifiers, as a user would have it"
    monkeypatch.chdir(tmp_path)
    rows = [dict(prompt=f'Choose {a+b} or {a+b+10}. How much is {a} + {b}? Answer with the number:', answer=a+b)
            for a in range(10, 45, 2) for b in range(11, 41, 3)]
    Path('my.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    Path('my.py').write_text(VERIFIER)
    return tmp_path

@pytest.fixture
def said(capsys):
    "A command's exit status, and what it printed"
    def command(line):
        status = cli.main(line.split())
        printed = capsys.readouterr()
        return status, printed.out + printed.err
    return command

def metrics(run): return [json.loads(line) for line in (Path(run)/'metrics.jsonl').read_text().splitlines()]

def test_a_file_and_a_ready_made_verifier(home, said):
    status, text = said(f'train --data my.jsonl --verifier last_number --steps 2 {SMALL}')
    assert status == 0 and 'held-out my.jsonl' in text and (home/'runs/my/report.html').exists()
    assert said('evaluate runs/my')[0] == 0
    assert read_config('runs/my').task == 'my.jsonl'
    asked = {json.loads(line)['prompt'] for line in Path('runs/my/samples.jsonl').read_text().splitlines()}
    exam = {a['prompt'] for a in json.loads(Path('runs/my/evaluation.json').read_text())['before']['answers']}
    assert len(exam) == 20 and not asked & exam

def test_a_failing_verifier_stops_the_run_and_says_where(home, said):
    status, text = said(f'train --data my.jsonl --verifier my.py:score --steps 2 {SMALL}')
    assert status == 2 and "for the prompt 'Choose" in text and ('no sevens' in text or "returned 'six'" in text)

def test_a_failing_verifier_can_be_skipped(home, said):
    status, text = said(f'train --data my.jsonl --verifier my.py:score --on-error skip --steps 3 {SMALL}')
    assert status == 0, text
    samples = [json.loads(line) for line in Path('runs/my/samples.jsonl').read_text().splitlines()]
    failed = [s for s in samples if s['completion'].strip()[:1] in ('6', '7')]
    assert failed and all(s['reward'] is None and s['advantage'] == 0 for s in failed)
    assert all(s['reward'] is not None for s in samples if s not in failed)
    for step,m in enumerate(metrics('runs/my'), 1): assert m['verifier_errors'] == sum(s['step'] == step for s in failed)
    answers = json.loads(Path('runs/my/evaluation.json').read_text())['after']['answers']
    assert all((a['score'] is None) == (a['completion'].strip()[:1] in ('6', '7')) for a in answers)
    assert 'not judged' in Path('runs/my/report.html').read_text()
    assert said('train --resume runs/my --steps 4 --allow-changes')[0] == 0       # unjudged answers are read back
    assert len(metrics('runs/my')) == 4

def test_a_stuck_verifier_is_ended(home, said):
    status, text = said(f'train --data my.jsonl --verifier my.py:stuck --verifier-seconds .2 --steps 2 {SMALL}')
    assert status == 2 and 'within the limit of 0.2 s' in text and "for the prompt 'Choose" in text

def test_limits_change_no_number(home, said):
    for flags,run in (('', 'free'), ('--verifier-seconds 30 --verifier-memory-mb 1000', 'limited')):
        status, text = said(f'train --data my.jsonl --verifier last_number --steps 2 {SMALL} --out {run} {flags}')
        assert status == 0, text
    for name in ('metrics.jsonl', 'samples.jsonl'): assert Path('free', name).read_bytes() == Path('limited', name).read_bytes()

def test_an_edited_verifier_is_noticed(home, said):
    assert said(f'train --data my.jsonl --verifier my.py:score --on-error skip --steps 2 {SMALL}')[0] == 0
    Path('my.py').write_text(VERIFIER.replace('no sevens', 'none'))
    status, text = said('train --resume runs/my --steps 3')
    assert status == 2 and 'my.py has been edited since' in text
    assert said('train --resume runs/my --steps 3 --allow-changes')[0] == 0

@pytest.mark.parametrize('line, words', [
    ('train --data none.jsonl --verifier last_number', 'none.jsonl'),
    ('train --data my.jsonl', 'last_number'),
    ('train --data my.jsonl --verifier my.py:scroe', 'did you mean my.py:score'),
    ('train --data my.jsonl --verifier lastnumber', 'last_number'),
    ('train my.py:score --verifier last_number', 'my.py:score'),
    ('train --data my.jsonl --verifier last_number --on-error ignore', 'on_error'),
    ('train --data my.jsonl --verifier last_number --verifier-seconds -1', 'verifier_seconds must be at least 0, got -1'),
    ('train --data my.jsonl --verifier last_number --kl-estimator k1', 'kl_estimator must be k2 or k3'),
    ('train --data my.jsonl --verifier last_number --adapter nowhere', 'nowhere holds no adapter'),
    ('audit nowhere --verifier last_number', 'nowhere'), ('compare nowhere', 'nowhere holds no run'), ('merge nowhere --out x', 'holds no run'),
    ('experiment nothing', 'known experiments')])
def test_bad_input_costs_nothing(home, said, line, words):
    status, text = said(line)
    assert status == 2 and words in text and 'Traceback' not in text, text
    assert not (home/'runs').exists()

def test_going_on_from_an_adapter_makes_it_the_reference(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 3 {SMALL} --out first')[0] == 0
    assert said(f'train --data my.jsonl --verifier last_number --steps 2 {SMALL} --adapter first --out second')[0] == 0
    assert metrics('second')[0]['kl'] == 0. and metrics('second')[1]['kl'] > 0
    first, second = (load_run(run)[1] for run in ('first', 'second'))
    weights = lambda model: torch.cat([m.lora_B.flatten() for m in adapters(model).values()])
    assert weights(first).ne(weights(second)).any()
    assert said('train --resume second --steps 3 --allow-changes')[0] == 0         # the reference is found again
    assert metrics('second')[2]['kl'] > 0
    ids = torch.tensor([[1, 20, 30, 40]])
    model, _ = load_policy(adapter='first')
    with torch.no_grad(), adapters_off(model): reference = model(ids)
    with torch.no_grad(): assert torch.allclose(reference, load_adapter(load_policy()[0], 'first')(ids), atol=1e-6)

def test_merge_writes_the_same_policy(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 2 {SMALL} --out run')[0] == 0
    status, text = said('merge run --out whole')
    assert status == 0 and 'whole' in text
    (_, model, tokenizer), (whole, again) = load_run('run'), load_policy('whole')
    ids = torch.tensor([tokenizer.encode('Choose 40 or 50. How much is 20 + 20? Answer with the number:')])
    assert again.encode('Choose 40 or 50. How much is 20 + 20? Answer with the number:') == ids[0].tolist()
    with torch.no_grad(): assert torch.allclose(model(ids), whole(ids), atol=1e-4)
    assert greedy_completions(model, tokenizer, ['How much is 21 + 22? Answer with the number:'], 8)[0].completions == \
        greedy_completions(whole, again, ['How much is 21 + 22? Answer with the number:'], 8)[0].completions
    assert said('merge run --out whole')[0] == 2                                    # never over a model

def test_a_function_as_a_task(home, said):
    Path('copy.py').write_text('''
from g2c_rl.tasks import Task
def say_again(rng):
    n = rng.randint(100, 999)
    return Task(f'Add {n} and 0. Answer with the number:', n)
''')
    status, text = said(f'train copy.py:say_again --verifier last_number --max-new-tokens 6 --steps 2 {SMALL}')
    assert status == 0 and (home/'runs/say_again/config.json').exists(), text
    assert RunConfig('copy.py:say_again', verifier='last_number').family().max_new_tokens == 32
    assert max(s['tokens'] for s in map(json.loads, Path('runs/say_again/samples.jsonl').read_text().splitlines())) <= 6

@pytest.mark.skipif(not Path('/proc').exists(), reason='children are counted in /proc')
def test_no_worker_is_left(home, said):
    children = lambda: Path(f'/proc/self/task/{threading.get_native_id()}/children').read_text().split()
    before = children()
    said(f'train --data my.jsonl --verifier my.py:stuck --verifier-seconds .2 --steps 2 {SMALL} --out stopped')
    assert said(f'train --data my.jsonl --verifier last_number --verifier-seconds 30 --steps 2 {SMALL} --out run')[0] == 0
    assert said('evaluate run')[0] == 0
    assert children() == before
