"""The workflow files: linted, pinned, and no secret or permission more than they need."""
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, run

FILES = sorted((ROOT/'.github'/'workflows').glob('*.yml'))
USES = re.compile(r'^\s*-?\s*uses: *(\S+)(.*)$', re.M)
workflows = pytest.mark.parametrize('file', FILES, ids=lambda f: f.stem)

def load(file): return yaml.safe_load(file.read_text(encoding='utf-8'))
def steps(file): return [s for job in load(file)['jobs'].values() for s in job['steps']]

def test_zizmor_finds_nothing():
    zizmor = shutil.which('zizmor', path=str(Path(sys.executable).parent)) or 'zizmor'
    run(zizmor, '--offline', '--no-progress', '--persona', 'pedantic', *FILES, cwd=ROOT)

def test_zizmor_would_find_something(tmp_path):
    bad = tmp_path/'bad.yml'
    bad.write_text(re.sub(r'@[0-9a-f]{40}', '@v6', FILES[0].read_text(encoding='utf-8')))
    with pytest.raises(pytest.fail.Exception, match='unpinned-uses'): run('zizmor', '--offline', '--no-progress', bad, cwd=ROOT)

@workflows
def test_every_action_is_pinned_to_a_commit(file):
    found = USES.findall(file.read_text(encoding='utf-8'))
    assert len(found) == sum('uses' in s for s in steps(file)) > 0
    for action,comment in found:
        assert re.fullmatch(r'[\w.-]+/[\w./-]+@[0-9a-f]{40}', action), action
        assert re.fullmatch(r' # v\d+\.\d+\.\d+', comment), f'{action}: the version in a comment'

def test_one_pin_for_each_action():
    pins = {}
    for file in FILES:
        for action,comment in USES.findall(file.read_text(encoding='utf-8')): pins.setdefault(action.split('@')[0], set()).add((action, comment))
    assert all(len(p) == 1 for p in pins.values()), pins

def test_what_runs_where():
    test, docs, release = (load(ROOT/'.github'/'workflows'/f'{name}.yml') for name in ('test', 'docs', 'release'))
    matrix = test['jobs']['test']['strategy']['matrix']
    assert {o.split('-')[0] for o in matrix['os']} == {'ubuntu', 'macos'} and len(matrix['python']) >= 2
    quarto = next(s for s in docs['jobs']['build']['steps'] if 'quarto' in s.get('uses', ''))
    assert re.fullmatch(r'\d+\.\d+\.\d+', str(quarto['with']['version'])), 'Quarto has one version'
    assert docs['jobs']['deploy']['permissions'] == {'pages': 'write', 'id-token': 'write'}
    assert release['jobs']['publish']['permissions'] == {'id-token': 'write'}, 'trusted publishing, and nothing else'
    for file in FILES:
        assert load(file)['permissions'] == {'contents': 'read'}
        assert 'secrets.' not in file.read_text(encoding='utf-8')

def test_every_make_target_that_a_workflow_calls_exists():
    targets = set(re.findall(r'^([\w-]+):', (ROOT/'Makefile').read_text(encoding='utf-8'), re.M))
    called = {t for f in FILES for s in steps(f) for t in re.findall(r'^make (\w+)', s.get('run', ''), re.M)}
    assert called <= targets and {'test', 'docs', 'dist'} <= called

def test_colab_cells_come_from_settings(repo):
    "Without a repository a cell that does nothing; with one on GitHub also a link; written twice, the same"
    colab = lambda: run(sys.executable, 'tools/colab.py', cwd=repo)
    colab()
    experiments = sorted((ROOT/'nbs'/'experiments').glob('[0-9]*.ipynb'))
    assert experiments and all((repo/f.relative_to(ROOT)).read_bytes() == f.read_bytes() for f in experiments), 'run `make export`'
    settings = repo/'settings.ini'
    settings.write_text(settings.read_text().replace('https://example.org/%(user)s', 'https://github.com/ada'))
    colab()
    for f in experiments:
        text = (repo/f.relative_to(ROOT)).read_text(encoding='utf-8')
        assert text.count(f'https://colab.research.google.com/github/ada/g2c_rl/blob/main/nbs/experiments/{f.name}') == 1
        assert text.count('git clone -q --depth 1 --branch main https://github.com/ada/g2c_rl ') == 1 and 'example.org' not in text
    again = {f: (repo/f.relative_to(ROOT)).read_bytes() for f in experiments}
    colab()
    assert all((repo/f.relative_to(ROOT)).read_bytes() == b for f,b in again.items())
