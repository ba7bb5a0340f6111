"""What several test files need: the repository's root, its notebooks, and copies of it to build and break things in."""
import shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILT = ('.*', '_*', 'build', 'dist', '*.egg-info', '__pycache__', 'node_modules')     # never copied

def notebooks():
    "Every notebook of the book, by its path in nbs/"
    files = (p.relative_to(ROOT/'nbs') for p in (ROOT/'nbs').rglob('*.ipynb'))
    return sorted(p for p in files if not any(part[0] in '._' for part in p.parts))

def copy_repo(to):
    "A copy of everything but what is installed or built"
    keep = {'_quarto.yml', '__init__.py', '_modidx.py'}
    shutil.copytree(ROOT, to, ignore=lambda d, names: shutil.ignore_patterns(*BUILT)(d, names) - keep)
    return to

def run(*args, cwd, **env):
    "Run a command of this Python's environment, and show what it printed when it fails"
    import os
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    done = subprocess.run([str(a) for a in args], cwd=cwd, env=os.environ | dict(PATH=path, PYTHONPATH=str(cwd)) | env,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f'{" ".join(map(str, args))}\n{done.stdout}'
    return done.stdout

def pytest_collection_modifyitems(items):
    "With pytest-xdist every file stays on one worker, for its fixtures' sake, except the notebooks: each is a process of its own"
    for item in items:
        if item.path.name != 'test_notebooks.py': item.add_marker(pytest.mark.xdist_group(item.path.name))

@pytest.fixture(scope='module')
def repo(tmp_path_factory): return copy_repo(tmp_path_factory.mktemp('repo')/'g2c_rl')
