"""A wheel, built from a source archive of the repository and installed somewhere else, is complete.

Modules, the bundled model, the command, the licence.
"""
import re
import sys
import zipfile

import pytest
from conftest import ROOT, run


@pytest.fixture(scope='module')
def wheel(repo):
    run(sys.executable, 'setup.py', '-q', 'sdist', cwd=repo, PYTHONPATH='')
    archive = next((repo/'dist').glob('*.tar.gz'))
    run(sys.executable, '-m', 'pip', 'wheel', archive, '--no-deps', '--no-build-isolation', '--wheel-dir', 'dist', cwd=repo, PYTHONPATH='')
    return next((repo/'dist').glob('*.whl'))

@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp('target')
    run(sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--no-compile', '--target', target, wheel, cwd=target, PYTHONPATH='')
    return target

def names(folder, pattern):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob(pattern) if p.is_file() and '__pycache__' not in p.parts)

def test_wheel_holds_the_package_and_nothing_else(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {f.split('/')[0] for f in files if '.dist-info/' not in f} == {'g2c_rl'}
    assert any(f.endswith('LICENSE') for f in files)

def test_wheel_holds_the_assets(installed):
    assert names(installed/'g2c_rl'/'assets', '*') == names(ROOT/'g2c_rl'/'assets', '*')
    for f in names(ROOT/'g2c_rl'/'assets', '*'):
        assert (installed/'g2c_rl'/'assets'/f).read_bytes() == (ROOT/'g2c_rl'/'assets'/f).read_bytes()

def test_every_module_imports_from_the_wheel(installed):
    modules = [f[:-3].replace('/', '.') for f in names(installed, 'g2c_rl/**/*.py') if '__init__' not in f and '/assets/' not in f]
    code = f'import sys; sys.path.insert(0, {str(installed)!r}); import g2c_rl, importlib\n' \
           f'assert g2c_rl.__file__.startswith({str(installed)!r}), g2c_rl.__file__\nfor m in {modules}: importlib.import_module(m)'
    run(sys.executable, '-I', '-c', code, cwd=installed)

def test_the_command_answers(installed): assert 'train' in run(installed/'bin'/'g2c-rl', '--help', cwd=installed)

def test_the_readme_runs_from_the_wheel(installed, tmp_path):
    "Every Python block of the README, in order, with nothing of the repository in reach"
    blocks = re.findall(r'^```python\n(.*?)^```', (ROOT/'README.md').read_text(encoding='utf-8'), re.S | re.M)
    code = f'import sys; sys.path.insert(0, {str(installed)!r})\n' + ''.join(blocks)
    assert len(blocks) >= 2 and 18 <= sum(bool(l.strip()) for b in blocks for l in b.splitlines()) <= 25
    said = run(sys.executable, '-I', '-c', code, cwd=tmp_path)
    before, after = map(int, re.search(r'happy stories: (\d+)% before, (\d+)% after', said).groups())
    assert before <= after
