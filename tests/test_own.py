"""From the command line: a task and a verifier of one's own, its failures, its limits, and what comes out."""
import json
import re
import threading
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from g2c_rl import cli
from g2c_rl.config import RunConfig
from g2c_rl.evaluation import greedy_completions
from g2c_rl.lora import adapters, adapters_off, load_adapter
from g2c_rl.policies import load_policy, save_policy
from g2c_rl.runs import load_run, read_config

VERIFIER = '''
def score(task, completion):
    first = completion.strip()[:1]
    if first == '7': raise RuntimeError('no sevens')
    if first == '6': return 'six'
    return float(str(task.answer) in completion)

def stuck(task, completion):
    while True: pass

def leaves(rng): raise SystemExit(0)
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
    ('train --data my.jsonl --verifier last_number --seed 99999999999999999999', 'seed must fit in 64 bits'),
    ('train my.py:leaves --verifier last_number', 'my.py:leaves raised SystemExit'),
    ('train --data my.jsonl --verifier last_number --adapter nowhere', 'nowhere holds no adapter'),
    ('audit nowhere --verifier last_number', 'nowhere'), ('compare nowhere', 'nowhere holds no run'), ('merge nowhere --out x', 'holds no run'),
    ('experiment nothing', 'known experiments')])
def test_bad_input_costs_nothing(home, said, line, words):
    status, text = said(line)
    assert status == 2 and words in text and 'Traceback' not in text, text
    assert not (home/'runs').exists()

@pytest.mark.parametrize('line', ['evaluate model', 'report model', 'train --resume model', 'merge model --out x', 'audit model --verifier last_number',
                                  f'train --data my.jsonl --verifier last_number --steps 1 {SMALL} --out model'])
def test_a_folder_of_a_model_is_no_run(home, said, line):
    (home/'model').mkdir(); (home/'model'/'config.json').write_text('{"architectures": ["LlamaForCausalLM"]}')
    status, text = said(line)
    assert status == 2 and 'config.json' in text and ('name a run folder' in text or 'choose another folder' in text), text
    assert 'KeyError' not in text and [p.name for p in (home/'model').iterdir()] == ['config.json']

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

def test_a_failure_names_file_line_and_what_to_type(home, said):
    status, text = said(f'train --data my.jsonl --verifier my.py:score --steps 2 {SMALL} --on-error skip --out run')
    assert status == 0, text
    for flags in ('', ' --verifier-seconds 30'):                                    # in a worker as without
        status, text = said(f'train --data my.jsonl --verifier my.py:score --steps 2 {SMALL} --out stopped{len(flags)}{flags}')
        where = 'score (my.py, line 4) raised RuntimeError: no sevens' in text or 'score (my.py, line 2) r' in text and "returned 'six'" in text
        assert status == 2 and where and '--on-error skip' in text and 'on_error' not in text, text
    status, text = said(f'train --data my.jsonl --verifier my.py:stuck --verifier-seconds .2 --steps 2 {SMALL} --out stuck')
    assert status == 2 and 'stuck (my.py, line 8) raised TimeoutError' in text and '--verifier-seconds N' in text, text
    status, text = said('evaluate run --verifier my.py:stuck --verifier-seconds .2 --on-error stop')
    assert status == 2 and '(the same command) --on-error skip' in text, text

def test_a_failure_in_a_step_says_how_to_go_on(home, said):
    Path('late.py').write_text('''
def score(task, completion, calls=[]):
    calls.append(1)
    if 60 < len(calls) < 70: raise RuntimeError('tired')
    return float(str(task.answer) in completion)
''')
    status, text = said(f'train --data my.jsonl --verifier late.py:score --steps 3 {SMALL}')
    assert status == 2 and 'g2c-rl train --resume runs/my --allow-changes\n' in text and '--allow-changes --on-error skip' in text, text
    ways = [line.split('g2c-rl ')[1] for line in text.splitlines() if 'g2c-rl train --resume' in line]
    assert said(ways[-1])[0] == 0 and len(metrics('runs/my')) == 3                  # it works as it stands there

def test_other_commands_have_limits_too(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 2 {SMALL} --out run')[0] == 0
    for line in ('evaluate run --verifier my.py:stuck --exam-size 3', 'audit run --verifier my.py:stuck'):
        status, text = said(f'{line} --verifier-seconds .1')
        assert status == 2 and 'within the limit of 0.1 s' in text, text
    status, text = said('evaluate run --verifier my.py:stuck --exam-size 2 --verifier-seconds .1 --on-error skip')
    assert status == 2 and 'none of the 2 answers of the exam could be judged' in text and '--on-error skip' not in text, text
    assert said(f'train --data my.jsonl --verifier last_number --steps 1 --on-error skip {SMALL} --out skips')[0] == 0
    status, text = said('evaluate skips --verifier my.py:stuck --exam-size 2 --verifier-seconds .1')         # the run's own `skip`
    assert status == 2 and 'none of the 2 answers of the exam could be judged' in text and '--on-error skip' not in text, text
    status, text = said('audit run --verifier my.py:score --on-error skip --verifier-seconds 30')
    assert status == 0 and 'not judged' in text, text
    status, text = said('check --data my.jsonl --verifier my.py:stuck --verifier-seconds .01 --n 2 --k 2')
    assert status == 1 and 'the verifier failed on 4 of 4 samples' in text, text
    status, text = said('check --data my.jsonl --verifier my.py:score --n 8 --on-error skip')
    assert status == 0 and 'a run leaves them out' in text and 'step: 8 groups' in text, text

def test_a_task_is_any_object_with_a_prompt(home, said):
    Path('bare.py').write_text('''
class Wish:
    def __init__(self, prompt): self.prompt = prompt
def make(rng): return Wish(f'Say {rng.randint(100, 999)} again:')
def score(task, completion): return float(len(completion.strip()) in (2, 3))
from fractions import Fraction
rows = [dict(prompt=f'How much is {i}/2?', answer=Fraction(i, 2)) for i in range(60)]      # nothing that JSON knows
wishes = [Wish(f'Say {i} again:') for i in range(60)]
''')
    for task in ('make', 'rows', 'wishes'):
        flags = f'bare.py:{task} --verifier bare.py:score --max-new-tokens 6'
        assert 'Traceback' not in said(f'check {flags} --n 4')[1]
        status, text = said(f'train {flags} --steps 2 --groups-per-step 4 --exam-size 5 --out {task}')
        assert status == 0, text
        for line in ('evaluate', 'report', 'audit --verifier bare.py:score'): assert said(f'{line} {task}')[0] == 0
    assert all('/2' in a['prompt'] and isinstance(a['answer'], str) for a in json.loads(Path('rows/evaluation.json').read_text())['after']['answers'])

@pytest.mark.parametrize('line, words', [
    ('check --data chat.jsonl --verifier last_number', 'a model that was trained to chat, such as smollm2-135m'),
    ('check arithmetic --data my.jsonl --verifier last_number', 'name one task, not arithmetic and my.jsonl'),
    ('check --data my.jsonl --data my.jsonl --verifier last_number', 'name one task'),
    ('check --data my.json --verifier last_number', ".to_json('my.jsonl', orient=\"records\", lines=True)"),
    ('check --data none.jsonl --verifier last_number', 'there is no file none.jsonl in '),
    ('check --data my.jsonl --verifier none.py:score', 'there is no file none.py in '),
    ('check --data my.jsonl --verifier my.py', 'as my.py:NAME; it has: score, stuck'),
    ('check --data my.jsonl --verifier my:score', 'did you mean my.py:score?'),
    ('check arithmetic --model baslm', 'did you mean baselm?'),
    ('check arithmetic --model cut', 'is damaged or incomplete'),
    ('check arithmetic --groups-per-step 0', 'groups_per_step must be at least 1')])
def test_what_is_wrong_and_what_was_meant(home, said, monkeypatch, line, words):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    Path('chat.jsonl').write_text(''.join(json.dumps(dict(prompt=[dict(role='user', content=f'{i}?')], answer=i)) + '\n' for i in range(40)))
    if '--model cut' in line:
        save_policy(*load_policy(), 'cut')
        Path('cut/model.safetensors').write_bytes(Path('cut/model.safetensors').read_bytes()[:100_000])
    status, text = said(line)
    assert status == 2 and words in text and 'Errno' not in text and 'Traceback' not in text, text

@pytest.mark.parametrize('line, words', [('train --stepz 3', 'train takes no --stepz; see g2c-rl train --help'),
                                         ('train --steps x', "invalid int value: 'x'; see g2c-rl train --help")])
def test_a_wrong_flag_is_one_line(capsys, line, words):
    with pytest.raises(SystemExit) as stop: cli.main(line.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and words in said and len(said.splitlines()) == 1

def test_an_adapter_on_another_base_is_said(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 1 {SMALL} --out first')[0] == 0
    save_policy(*load_policy(), 'copy')
    status, text = said('check --data my.jsonl --verifier last_number --n 2 --model copy --adapter first')
    assert status in (0, 1) and 'the adapter in first was trained on baselm, and is put on copy' in text, text
    assert 'was trained on' not in said('check --data my.jsonl --verifier last_number --n 2 --adapter first')[1]
    status, text = said('check --data my.jsonl --verifier last_number --model first')
    assert status == 2 and 'holds an adapter and no model' in text

def test_fewer_steps_than_were_taken(home, said):
    assert said(f'train --data my.jsonl --verifier last_number --steps 3 {SMALL} --out run')[0] == 0
    before = Path('run/config.json').read_bytes(), Path('run/evaluation.json').read_bytes()
    status, text = said('train --resume run --steps 2 --allow-changes')
    assert status == 2 and 'has taken 3 steps already' in text, text
    assert before == (Path('run/config.json').read_bytes(), Path('run/evaluation.json').read_bytes())

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"

def test_a_folder_of_ones_own_and_chat_messages(home, said):
    transformers, tokenizers = pytest.importorskip('transformers'), pytest.importorskip('tokenizers')
    spelled = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i,c in enumerate(['<e>', 'Ġ', 'Ċ', *map(chr, range(33, 127))])}, []))
    spelled.pre_tokenizer, spelled.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=96)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, bos_token_id=None, eos_token_id=0, pad_token_id=0))
    for name,template in (('chatty', TEMPLATE), ('plain', None)):
        llama.save_pretrained(name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=spelled, eos_token='<e>', pad_token='<e>', chat_template=template).save_pretrained(name)
    rows = [dict(prompt=[dict(role='user', content=f'Say {i}.')], answer=i) for i in range(60)]
    Path('chat.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    Path('any.py').write_text('def has_e(task, completion): return float("e" in completion.lower())')
    flags = '--data chat.jsonl --verifier any.py:has_e --max-new-tokens 6 --model'
    status, text = said(f'check {flags} plain --n 2')
    assert status == 2 and 'no chat template' in text and 'smollm2-135m' in text, text
    assert 'sampler and scorer' in said(f'check {flags} chatty --n 4')[1]
    status, text = said(f'train {flags} chatty --steps 2 --groups-per-step 4 --exam-size 5 --out run')
    assert status == 0 and 'user: Say ' in text, text
    for line in ('evaluate run', 'report run', 'audit run --verifier any.py:has_e', 'merge run --out whole'):
        status, text = said(line)
        assert status == 0, text
    whole, merged = load_policy('whole'), transformers.AutoModelForCausalLM.from_pretrained('whole')
    ids = torch.tensor([whole[1].encode(rows[0]['prompt'])])
    with torch.no_grad(): assert torch.allclose(load_run('run')[1](ids), merged(ids).logits, atol=1e-4)

def test_the_readme_does_what_it_says(home, said):
    text = (ROOT/'README.md').read_text(encoding='utf-8').split('## Bring your own')[1].split('\n## ')[0]
    code, shell = re.search(r'```python\n(.*?)```', text, re.S)[1], re.search(r'```sh\n(.*?)```', text, re.S)[1]
    Path('my_task.py').write_text(code)
    lines = [line.split('#')[0].strip().removeprefix('g2c-rl ') for line in shell.splitlines()]
    assert [line.split()[0] for line in lines] == ['check', 'train', 'evaluate', 'audit', 'merge']
    for line in lines:
        status, printed = said(line)
        assert status == 0, (line, printed)
        if line.startswith('train'): assert float(re.search(r"after +([\d.]+)%", printed)[1]) > 50
    transformers = pytest.importorskip('transformers')
    assert transformers.AutoModelForCausalLM.from_pretrained('merged').config.model_type == 'llama'


def test_help_does_not_name_defaults_that_are_not(capsys):
    for command in ('evaluate', 'audit'):
        with pytest.raises(SystemExit): cli.main([command, '--help'])
        assert "(default: 'stop')" not in ' '.join(capsys.readouterr().out.split())

def test_a_prompt_that_does_not_fit_is_found_before_the_first_exam(home, said):
    rows = [dict(prompt=f'{"many words " * (200 if i == 3 else 1)}{i} + 1?', answer=i + 1) for i in range(60)]
    Path('long.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for line in ('check', f'train --steps 2 {SMALL}'):
        status, text = said(f'{line} --data long.jsonl --verifier last_number')
        assert status == 2 and 'do not fit the context of 256' in text and "It is 'many words" in text, text
    assert not Path('runs').exists()

def test_a_run_that_was_stopped_says_how_it_goes_on(home, said):
    Path('slow.py').write_text('''
import os, signal
def score(task, completion, calls=[]):
    calls.append(1)
    if len(calls) == 60: os.kill(os.getpid(), signal.SIGINT)
    return float(str(task.answer) in completion)
''')
    status, text = said(f'train --data my.jsonl --verifier slow.py:score --steps 3 {SMALL}')
    assert status == 130 and 'go on: g2c-rl train --resume runs/my' in text, text
    assert said('train --resume runs/my')[0] == 0 and len(metrics('runs/my')) == 3
