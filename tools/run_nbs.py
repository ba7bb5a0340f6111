"""Run notebooks as `nbdev_test` does (the same cells are skipped) and save their outputs, which `nbdev_test` cannot do.

Every notebook gets a process of its own, so that a seed, a patch or an import in one never reaches another.
"""
import os, subprocess, sys, time

from fastcore.script import Param, call_parse
from fastcore.xtras import working_directory

os.environ['IN_TEST'] = '1'
os.environ.setdefault('OMP_NUM_THREADS', '1')       # the same sums in the same order on every machine
os.environ.setdefault('SOURCE_DATE_EPOCH', '0')

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from IPython.core.displaypub import CapturingDisplayPublisher
from nbdev.clean import nbdev_clean
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.frontmatter import FrontmatterProc
from nbdev.process import NBProcessor


append = CapturingDisplayPublisher.publish

def in_place(self, data, metadata=None, *args, transient=None, update=False, **kwargs):
    "Publish as Jupyter does: an update takes the place of the display that has its id"
    shown = [o for o in self.outputs if update and o['transient'] == transient]
    for o in shown: o.update(data=data, metadata=metadata)
    if not shown: append(self, data, metadata, *args, transient=transient, update=update, **kwargs)

CapturingDisplayPublisher.publish = in_place


def run_nb(path, skip):
    "Execute the notebook at `path`, without the cells that carry a flag in `skip`, and save it cleaned"
    parsed = NBProcessor(path, procs=FrontmatterProc, process=True).nb
    if str(getattr(parsed, 'frontmatter_', {}).get('skip_exec', '')).lower() == 'true': return print(f'{path.name}: skip_exec')
    directives = {c.id: getattr(c, 'directives_', None) or {} for c in parsed.cells}

    def skipped(cell):
        if cell.cell_type != 'code': return True
        flags = directives.get(cell.id, {})
        if 'nbdev_export(' in cell.source or flags.get('eval:', [''])[0].lower() == 'false' or skip & flags.keys(): return True
        cell.outputs = []                           # a cell that prints nothing any more must not keep its old output

    nb, shell, start = read_nb(path), CaptureShell(path), time.time()
    with working_directory(path.parent):
        try: shell.run_all(nb, exc_stop=True, preproc=skipped)
        except Exception: sys.exit(shell.prettytb(fname=path))
    for cell in nb.cells:                           # warnings name paths of this machine
        if cell.cell_type == 'code': cell.outputs = [o for o in cell.outputs if o.get('name') != 'stderr']
    write_nb(nb, path)
    nbdev_clean.__wrapped__(str(path))
    print(f'{path.name}: {time.time()-start:.1f} s', flush=True)


@call_parse
def main(
    paths:Param('Notebooks or folders (default: every notebook)', str, nargs='*', opt=False)=None,
    flags:str='',  # Flags of cells to run that are normally skipped, such as `slow`
):
    "Run notebooks and save their outputs"
    cfg = get_config()
    files = [f.absolute() for p in paths or [None] for f in sorted(nbglob(p, as_path=True))]
    if len(files) == 1:
        sys.path.insert(0, str(cfg.config_path))
        return run_nb(files[0], set(cfg.tst_flags.split()) - set(flags.split()))
    failed = [f.name for f in files if subprocess.run([sys.executable, __file__, str(f), '--flags', flags]).returncode]
    if failed: sys.exit(f'failed: {", ".join(failed)}')
