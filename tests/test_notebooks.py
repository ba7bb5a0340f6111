"""Every notebook runs from top to bottom, by `nbdev_test`, in a process of its own."""
import pytest
from conftest import ROOT, notebooks, run


@pytest.mark.parametrize('nb', notebooks(), ids=lambda p: p.with_suffix('').as_posix())
def test_notebook_runs(nb): run('nbdev_test', '--path', ROOT/'nbs'/nb, cwd=ROOT, OMP_NUM_THREADS='1', MPLBACKEND='agg')
