"""What several test files need: the repository's root, its notebooks, and copies of it to build and break things in."""
import os, shutil, subprocess, sys
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
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    done = subprocess.run([str(a) for a in args], cwd=cwd, env=os.environ | dict(PATH=path, PYTHONPATH=str(cwd)) | env,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode: pytest.fail(f'{" ".join(map(str, args))}\n{done.stdout}', pytrace=False)
    return done.stdout

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "Side by side, a file stays on one worker for its fixtures' sake; the notebooks, each a process of its own, are spread"
    from xdist.scheduler import LoadScopeScheduling
    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid): return nodeid if 'test_notebooks.py' in nodeid else nodeid.split('::')[0]
    return Files(config, log)

@pytest.fixture(scope='module')
def repo(tmp_path_factory): return copy_repo(tmp_path_factory.mktemp('repo')/'g2c_rl')
