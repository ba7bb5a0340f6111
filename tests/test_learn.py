"""The learner's path: a folder whose blanks, tests and working notebook come from the chapters and lose nobody's work."""
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from g2c_rl import learn, trainer
from g2c_rl.cli import main

FILES = ['README.md', 'experiments.ipynb', 'my_rl.py', 'test_rl.py']
PAGE = json.loads((ROOT/'nbs'/'exercises'/'70_exercises.ipynb').read_text(encoding='utf-8'))
COPY = json.loads((ROOT/'g2c_rl'/'assets'/'learn'/'experiments.ipynb').read_text(encoding='utf-8'))
ENV = os.environ | dict(OMP_NUM_THREADS='1', MPLBACKEND='agg', PYTHONPATH=str(ROOT))

def text(cell): return ''.join(cell['source'])
def python(*args, cwd): return subprocess.run([sys.executable, *args], cwd=cwd, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
def tree(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob('*') if p.is_file()}

def results(folder):
    "What pytest says in a learner's folder, as (passed, failed), two sets of names"
    out = python('-m', 'pytest', 'test_rl.py', '-q', '-rA', '--tb=no', '-p', 'no:cacheprovider', cwd=folder).stdout
    passed, failed = (set(re.findall(rf'^{word} test_rl\.py::test_(\w+)', out, re.M)) for word in ('PASSED', 'FAILED'))
    assert len(passed) + len(failed) == 22, out
    return passed, failed

# ---------- blanks and tests

def test_blanks_begin_at_8_and_14(tmp_path):
    learn.write_exercise(tmp_path)
    passed, failed = results(tmp_path)
    assert len(passed) == 8 and len(failed) == 14
    assert all(name.startswith(tuple(learn.pieces)) for name in failed)

def test_solutions_end_at_22(tmp_path):
    learn.write_exercise(tmp_path, list(learn.pieces))
    assert len(results(tmp_path)[0]) == 22

@pytest.mark.parametrize('piece', learn.pieces)
def test_each_piece_turns_its_own_tests_green(tmp_path, piece):
    learn.write_exercise(tmp_path, [piece])
    passed, failed = results(tmp_path)
    asked_for = tuple(learn.pieces)
    assert {name for name in passed if name.startswith(asked_for)} == {name for name in passed | failed if name.startswith(piece)}
    assert len([name for name in passed if not name.startswith(asked_for)]) == 8

def test_pieces_select_their_tests():
    names = re.findall(r'^def test_(\w+)', (ROOT/'tests'/'test_rl.py').read_text(encoding='utf-8'), re.M)
    assert [sum(p in name for name in names) for p in learn.pieces] == [4, 4, 3, 3] and len(names) == 22

@pytest.mark.parametrize('given', [[], ['advantages'], list(learn.pieces)], ids=str)
def test_module_has_the_signatures_of_the_chapters(given):
    written = learn.exercise_module(given)
    compile(written, 'my_rl.py', 'exec')
    assert max(map(len, written.splitlines())) <= 140
    functions = {n.name: n for n in ast.walk(ast.parse(written)) if isinstance(n, ast.FunctionDef)}
    for name,piece in learn.pieces.items():
        solution, mine = learn._function(piece.source), functions[piece.name]
        assert ast.get_docstring(mine) == ast.get_docstring(solution)
        assert [a.arg for a in mine.args.args] == [a.arg for a in solution.args.args] and len(mine.args.defaults) == len(solution.args.defaults)
        if name != 'train_step': assert piece.source.split('"')[0] in written        # with every comment
        body = [ast.dump(n) for n in mine.body[1:]]
        if name in given: assert body == [ast.dump(n) for n in solution.body[1:]]
        else: assert len(body) == 1 and f'{piece.name} is still blank' in body[0] and piece.chapter in body[0]

def test_blanks_say_what_a_step_finds():
    written = learn.exercise_module()
    for name in re.findall(r'self\.(\w+)', ' '.join(l for l in written.splitlines() if l.strip().startswith('#'))):
        assert name in re.findall(r'self\.(\w+)', (ROOT/'g2c_rl'/'trainer.py').read_text(encoding='utf-8')) or hasattr(trainer.GRPOTrainer, name)

# ---------- nobody's work is lost

def test_files_that_exist_are_kept(tmp_path):
    learn.write_exercise(tmp_path)
    (tmp_path/'my_rl.py').write_text('mine')
    (tmp_path/'README.md').unlink()
    done = learn.write_exercise(tmp_path, 'advantages')
    assert done.written == ['README.md'] and sorted(done.kept) == sorted(set(FILES) - {'README.md'})
    assert (tmp_path/'my_rl.py').read_text() == 'mine'
    assert 'kept as they were' in str(done) and 'was not touched' in str(done)

def test_a_link_is_kept_even_if_it_leads_nowhere(tmp_path):
    (tmp_path/'my_rl.py').symlink_to(tmp_path/'elsewhere.py')
    assert learn.write_exercise(tmp_path).kept == ['my_rl.py']
    assert (tmp_path/'my_rl.py').is_symlink() and not (tmp_path/'elsewhere.py').exists()

def test_fresh_renames_everything_and_deletes_nothing(tmp_path):
    folder, before = tmp_path/'mine', []
    for i in range(4):
        learn.write_exercise(folder, fresh=True)
        (folder/'notes').mkdir()
        (folder/'notes'/'thoughts.txt').write_text(f'thought {i}')
        (folder/'my_rl.py').write_text(f'work {i}')
        before.append(tree(folder))
    done = learn.write_exercise(folder, fresh=True)
    archives = sorted(p for p in tmp_path.iterdir() if p != folder)
    assert done.archived in archives and all(p.name.startswith('mine-archived-') for p in archives)
    assert len(archives) == 4 and all(tree(a) in before for a in archives) and all(b in [tree(a) for a in archives] for b in before)
    assert sorted(done.written) == sorted(tree(folder)) == FILES

@pytest.mark.parametrize('at', range(4))
def test_interrupted_half_way(tmp_path, monkeypatch, at):
    replace, done = os.replace, []
    def stop(a, b):
        if len(done) == at: raise KeyboardInterrupt
        replace(a, b)
        done.append(b)
    folder = tmp_path/'mine'
    learn.write_exercise(folder, 'advantages')
    whole, work = tree(folder), {'my_rl.py': b'work'} | {f: b'' for f in FILES if f != 'my_rl.py'}
    for name,content in work.items(): (folder/name).write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', stop)
        with pytest.raises(KeyboardInterrupt): learn.write_exercise(folder, 'advantages', fresh=True)
    there = tree(folder)
    assert len(there) == at and all(whole[name] == content for name,content in there.items())       # whole files, and no half ones
    assert [tree(p) for p in tmp_path.iterdir() if p != folder] == [work]
    rest = learn.write_exercise(folder, 'advantages')
    assert len(rest.written) == 4 - at and tree(folder) == whole

# ---------- what cannot work

@pytest.mark.parametrize('solutions', [['advantage'], 'log_prob,advantage', ['all']])
def test_unknown_solution(tmp_path, solutions):
    with pytest.raises(ValueError, match='unknown piece .* in solutions; known: advantages, log_prob, grpo_loss, train_step'):
        learn.write_exercise(tmp_path/'new', solutions)
    assert not (tmp_path/'new').exists()

def test_folder_that_cannot_be_one(tmp_path, monkeypatch):
    (tmp_path/'file').write_text('')
    with pytest.raises(NotADirectoryError, match='file is a file; name a folder'): learn.write_exercise(tmp_path/'file', fresh=True)
    with pytest.raises(OSError, match='cannot write to .*name a folder that you may write to'): learn.write_exercise(tmp_path/'file'/'deeper')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match='is the folder you are in'): learn.write_exercise('.', fresh=True)
    def refuse(*_): raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(os, 'replace', refuse)
    with pytest.raises(OSError, match='cannot write to .*Permission denied; name a folder'): learn.write_exercise(tmp_path/'new')
    assert tree(tmp_path) == {'file': b''}

def test_command(tmp_path, capsys):
    folder = str(tmp_path/'mine')
    assert main(['learn', folder]) == 0 and 'wrote my_rl.py' in capsys.readouterr().out
    assert main(['learn', folder, '--fresh', '--solutions', 'advantages,log_prob']) == 0 and '-archived-' in capsys.readouterr().out
    assert 'advantages.masked_fill' in (tmp_path/'mine'/'my_rl.py').read_text()
    assert main(['learn', folder, '--solutions', 'everything']) == 2
    assert 'known: advantages' in capsys.readouterr().err

# ---------- the working notebook

RUN = """
import json, re, sys
namespace = {}
for c in json.load(open('experiments.ipynb', encoding='utf-8'))['cells']:
    if c['cell_type'] != 'code' or 'strict' in namespace and 'quick' in sys.argv: continue
    source = re.sub(r'^STEPS, GROUPS, EXAM = .*', 'STEPS, GROUPS, EXAM = 2, 2, 12', ''.join(c['source']), flags=re.M)
    exec(compile(source, 'cell', 'exec'), namespace)
print('HISTORY', json.dumps({name: namespace['strict'].history[name] for name in ('loss', 'reward_mean', 'updated')}))
"""

def run_notebook(folder, *args):
    done = python('-c', RUN, *args, cwd=folder)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.split('HISTORY')[1])

def test_working_notebook_runs_on_the_learners_functions(tmp_path):
    learn.write_exercise(tmp_path, list(learn.pieces))
    right = run_notebook(tmp_path)
    with open(tmp_path/'my_rl.py', 'a') as f: f.write('\n_right = group_advantages\ndef group_advantages(rewards): return -_right(rewards)\n')
    wrong = run_notebook(tmp_path, 'quick')
    assert right['updated'][0] == 1 and right['reward_mean'][0] == wrong['reward_mean'][0]      # the same samples,
    assert right['loss'][0] == -wrong['loss'][0] != 0                                           # pushed the other way

def test_working_notebook_has_neither_answers_nor_outputs():
    answers = [text(c) for c in PAGE['cells'] if text(c).startswith('::: {.callout')]
    replies = [text(c).strip() for c in COPY['cells'] if text(c).startswith('**Your')]
    everything = '\n'.join(map(text, COPY['cells']))
    questions = re.findall(r'^\*\*Question (\d+)\.\*\*', everything, re.M)
    assert questions == [str(i+1) for i in range(len(answers))] and replies.count('**Your answer**') == len(answers) >= 12
    assert replies.count('**Your prediction**') == everything.count('**Predict.**') >= 5
    for line in (l for a in answers for l in a.splitlines() if len(l) > 40): assert line not in everything
    assert not any(c.get('outputs') or c.get('execution_count') for c in COPY['cells'])
    assert not re.search(r'^#\||^:::|\]\([^)]*\.html|tempfile', everything, re.M)
    assert everything.count('<details>') == 3*len(learn.pieces) == everything.count('</details>')

def test_page_folds_an_answer_after_every_question():
    cells = [text(c) for c in PAGE['cells']]
    for i,cell in enumerate(cells):
        if not re.match(r'\*\*Question', cell): continue
        answer = next(c for c in cells[i+1:] if c.startswith((':::', '**')))
        assert answer.startswith('::: {.callout-note collapse="true"}\n## A model answer\n') and answer.endswith(':::')

def test_copies_are_in_sync():
    spec = importlib.util.spec_from_file_location('exercise_tool', ROOT/'tools'/'exercise.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert list(tool.working_cells(PAGE['cells'])) == COPY['cells'], 'run `make export`'
    assert (ROOT/'g2c_rl'/'assets'/'learn'/'test_rl.py.txt').read_bytes() == (ROOT/'tests'/'test_rl.py').read_bytes(), 'run `make export`'
