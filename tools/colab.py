"""Give every experiment a link to Colab and a first cell that installs the package there, both from settings.ini.

The link appears once `git_url` names a repository on GitHub; the cell does nothing anywhere but on Colab.
"""
import json
from pathlib import Path

from fastcore.script import call_parse
from nbdev.config import get_config

SETUP = """#| hide
# On Colab, fetch the repository and install the package; anywhere else this cell does nothing. (Written by tools/colab.py.)
if 'google.colab' in str(get_ipython()):
    get_ipython().system('git clone -q --depth 1 --branch {branch} {url} /content/{repo} && pip install -q /content/{repo}[smollm2]')
    get_ipython().run_line_magic('cd', '-q /content/{repo}/{folder}')"""

def cells(path, cfg):
    "The cells that belong after the title of the notebook at `path`, a path in the repository"
    url = cfg.git_url.rstrip('/')
    if (host := 'https://github.com/') in url:
        link = f'https://colab.research.google.com/github/{url.removeprefix(host)}/blob/{cfg.branch}/{path.as_posix()}'
        yield dict(cell_type='markdown', id='colab-link', metadata={}, source=f'[Open this notebook in Colab]({link})')
    setup = SETUP.format(branch=cfg.branch, url=url, repo=cfg.repo, folder=path.parent.as_posix())
    yield dict(cell_type='code', id='colab-setup', metadata={}, source=setup, execution_count=None, outputs=[])

def prepare(file, root, cfg):
    "Put the cells into one notebook, in place of those that an earlier call has put there"
    nb = json.loads(file.read_text(encoding='utf-8'))
    new = [c | dict(source=c['source'].splitlines(True)) for c in cells(file.relative_to(root), cfg)]
    kept = [c for c in nb['cells'] if not c.get('id', '').startswith('colab-')]
    nb['cells'] = kept[:1] + new + kept[1:]
    file.write_text(json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n', encoding='utf-8')

@call_parse
def main():
    "Write the Colab cells of all experiments"
    cfg = get_config()
    for file in sorted(Path(cfg.nbs_path/'experiments').glob('[0-9]*.ipynb')): prepare(file, cfg.config_path, cfg)
