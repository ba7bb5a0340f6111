"""What is made from the notebooks is what is committed: a gate for those who forgot `make export`."""
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, notebooks, run


def tree(folder, pattern):
    "The bytes of every file in `folder` that matches"
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob(pattern) if p.is_file()}

def differing(ours, theirs, pattern):
    "The files that are not the same in two folders"
    a, b = tree(ours, pattern), tree(theirs, pattern)
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))

def test_package_is_what_the_notebooks_export(repo):
    for p in (repo/'g2c_rl').rglob('*.py'):
        if 'assets' not in p.parts: p.unlink()
    run('nbdev_export', cwd=repo)
    assert not differing(ROOT/'g2c_rl', repo/'g2c_rl', '*.py'), 'run `make export`'

def test_notebooks_are_clean(repo):
    run('nbdev_clean', cwd=repo)
    assert not [nb for nb in notebooks() if (ROOT/'nbs'/nb).read_bytes() != (repo/'nbs'/nb).read_bytes()], 'run `make export`'

def test_readme_is_the_index_notebook(repo):
    run(sys.executable, 'tools/readme.py', cwd=repo)
    assert (ROOT/'README.md').read_text() == (repo/'README.md').read_text(), 'run `make export`'
    assert not differing(ROOT/'nbs'/'images', repo/'nbs'/'images', '*'), 'run `make export`'

def test_ruff(): run(sys.executable, '-m', 'ruff', 'check', '--no-cache', '.', cwd=ROOT)

def test_outputs_are_saved_and_machine_independent():
    for nb in notebooks():
        text = (ROOT/'nbs'/nb).read_text(encoding='utf-8')
        assert '"output_type": "error"' not in text, f'{nb} has a saved error'
        assert not any(path in text for path in (str(ROOT), str(Path.home()) + '/', 'site-packages/')), f'{nb} shows a path of one machine'

def test_no_large_files():
    listed = subprocess.run('git ls-files -z --cached --others --exclude-standard'.split(), cwd=ROOT, capture_output=True, text=True)
    large = [f for f in listed.stdout.split('\0') if f and (ROOT/f).is_file() and (ROOT/f).stat().st_size > 5_000_000]
    assert not large
